"""``source.json``: which repository of the Hub a model folder's weights stem from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gptj_ft.durable import read_text
from gptj_ft.errors import DataError
from gptj_ft.hub_files import HubFile

SOURCE = "source.json"


@dataclass(frozen=True)
class Origin:
    """The content of ``source.json``.

    Attributes:
        repository: ``owner/name`` on the Hub.
        commit: of the revision that was fetched.
        license: the repository's license tag; empty if it has none.
        revision: branch, tag or commit that was asked for; ``None``: the main branch.
        files: what a download consists of; none in a folder that was made from one.
    """

    repository: str
    commit: str
    license: str
    revision: str | None = None
    files: tuple[HubFile, ...] = ()

    def to_text(self) -> str:
        """Return it as it is written."""
        return json.dumps(asdict(self), indent=2) + "\n"


def read_origin(folder: Path) -> Origin | None:
    """Return what a folder says of its weights; ``None`` if nothing.

    Raises:
        DataError: it is damaged.
    """
    path = folder / SOURCE
    if not path.is_file():
        return None
    try:
        values = json.loads(read_text(path))
        files = tuple(HubFile(**file) for file in values["files"])
        return Origin(**{**values, "files": files})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged ({error!r}); remove the folder and fetch it again") from error
