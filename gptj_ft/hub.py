"""What the Hub and the way to it answer when something is wrong, in words that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gptj_ft.errors import NetworkError, UsageError


@contextmanager
def hub_errors(repository: str, endpoint: str) -> Iterator[None]:
    """Turn what goes wrong between here and the Hub into one line and what to do.

    Args:
        repository: what is being fetched.
        endpoint: the Hub's address.

    Raises:
        UsageError: a wrong name, or offline by the environment.
        NetworkError: everything else that is not a fault of the local disk.
    """
    from huggingface_hub import errors

    again = "type the same command again later, it goes on where it stopped"
    try:
        yield
    except errors.HFValidationError as error:
        raise UsageError(f"'{repository}' is not a repository's name; write owner/name") from error
    except errors.OfflineModeIsEnabled as error:
        raise UsageError(f"cannot download {repository}: HF_HUB_OFFLINE is set in the environment; unset it") from error
    except errors.GatedRepoError as error:
        raise NetworkError(
            f"{repository} is gated: accept its terms at {endpoint}/{repository}, then set HF_TOKEN to your token"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise NetworkError(
            f"no repository {repository} at {endpoint}: check the name; if it is private, set HF_TOKEN to your token"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise NetworkError(f"{repository} has no such revision; look at {endpoint}/{repository}/tree/main") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        raise NetworkError(f"{endpoint} answered {status} for {repository}; {_advice(status, again)}") from error
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # the HTTP client's own root
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise NetworkError(f"no connection to {endpoint} ({reason}); check the network and {again}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise NetworkError(
            f"{endpoint} does not answer as a Hugging Face Hub; check HF_ENDPOINT and proxies"
        ) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise NetworkError(f"transfer from {endpoint} incomplete; {again}") from error


def _advice(status: int, again: str) -> str:
    return "check the name, and set HF_TOKEN to a token that may read it" if status in (401, 403) else again
