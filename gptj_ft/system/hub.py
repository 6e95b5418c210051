"""Access the Hub: token, offline mode, readable error messages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal
from urllib.request import getproxies

from gptj_ft.errors import GptjFtError, NetworkError, NoSuchRevision, Unreachable, UsageError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_closed_here = False


def close_network() -> None:
    """Close the network for every library of Hugging Face, in this process and its children."""
    global _closed_here
    _closed_here = not any(os.environ.get(name, "").lower() in ("1", "on", "yes", "true") for name in OFFLINE)
    os.environ.update(dict.fromkeys(OFFLINE, "1"))


@contextmanager
def open_network() -> Iterator[bool]:
    """Undo `close_network` for huggingface_hub in the block; yield whether the network is open.

    It stays closed if the user's own environment asked for offline before `close_network`.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before and not _closed_here
    try:
        yield not constants.HF_HUB_OFFLINE
    finally:
        constants.HF_HUB_OFFLINE = before


def is_offline() -> bool:
    """Tell whether the environment forbids the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def hub_api(endpoint: str | None = None) -> HfApi:
    """Return the Hub's client, without telemetry and with a token from ``HF_TOKEN`` only.

    Args:
        endpoint: address; default: ``HF_ENDPOINT``, else https://huggingface.co.
    """
    # Set both: huggingface_hub reads the environment when it is first imported, which may have happened already.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import HfApi, constants, logging

    # It logs each attempt; we report only the last one.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    constants.HF_HUB_DISABLE_TELEMETRY = True
    # False instead of None, which would use a stored login.
    token = os.environ.get("HF_TOKEN") or False
    address = endpoint or os.environ.get("HF_ENDPOINT") or None
    return HfApi(endpoint=address.rstrip("/") if address else None, token=token, library_name="gptj-ft")


@contextmanager
def hub_errors(
    repository: str, endpoint: str, kind: str = "model", wants: Literal["read", "write"] = "read"
) -> Iterator[None]:
    """Translate errors of the Hub and the connection into one line with advice.

    Args:
        repository: ``owner/name``.
        endpoint: the Hub's address.
        kind: ``model`` or ``dataset``.
        wants: permission that is needed.

    Raises:
        Unreachable: no connection, or the Hub is down.
        NoSuchRevision: the revision does not exist.
    """
    from huggingface_hub import errors

    endpoint = re.sub("//[^/@]*@", "//", endpoint)  # do not show a password in the address
    page = f"{endpoint}/{'datasets/' if kind == 'dataset' else ''}{repository}"
    again = "type the same command again later: it resumes the transfer"
    try:
        yield
    except GptjFtError:
        raise
    # Subclasses come first: a gated repository is a RepositoryNotFoundError, an invalid name a ValueError.
    except errors.HFValidationError as error:
        raise UsageError(f"'{repository}' is not a repository's name; write owner/name") from error
    except errors.OfflineModeIsEnabled as error:
        raise UsageError(
            f"cannot ask the Hub for {repository}: HF_HUB_OFFLINE is set in the environment; unset it"
        ) from error
    except errors.GatedRepoError as error:
        raise NetworkError(
            f"{repository} is gated: accept its terms at {page}, then set HF_TOKEN to your token"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise NetworkError(
            f"no repository {repository} at {endpoint}: check the name; if it is private, set HF_TOKEN to your token"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise NoSuchRevision(f"{repository} has no such revision; look at {page}/tree/main") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        kind_of_error = Unreachable if status >= 500 else NetworkError
        advice = _advice(status, wants, again)
        raise kind_of_error(f"{endpoint} answered {status} for {repository}; {advice}") from error
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # the HTTP client's own root
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        check = f"check the network{' and the proxy in HTTPS_PROXY' if getproxies() else ''}"
        raise Unreachable(f"no connection to {endpoint} ({reason}); {check}, and {again}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise NetworkError(
            f"{endpoint} does not answer as a Hugging Face Hub; check HF_ENDPOINT and proxies"
        ) from error
    except OSError as error:
        # Errors of the local disk have a number; huggingface_hub's error for a short transfer has none.
        if error.errno is not None:
            raise
        raise NetworkError(f"transfer {'from' if wants == 'read' else 'to'} {endpoint} incomplete; {again}") from error


def _advice(status: int, wants: str, again: str) -> str:
    if status in (401, 403):
        token = "whether HF_TOKEN is" if os.environ.get("HF_TOKEN") else "set HF_TOKEN to"
        return f"check the name, and {token} a token that may {wants} it"
    if status == 407:
        return "the proxy requires a login: set HTTPS_PROXY to http://name:password@host:port"
    if status == 429:
        return f"that is too many requests: wait some minutes, then {again}"
    return again
