"""What an evaluation has found out so far, on disk: one that was killed goes on from there and ends with the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from gptj_ft.errors import ResourceError
from gptj_ft.system.digests import digest_of
from gptj_ft.system.files import append_text, keep_folder, read_bytes
from gptj_ft.system.paths import make_home, part_of_home


class ResultCache:
    """Findings by kind and row, in ``evaluations/`` in `home`, under a digest of all that they depend on.

    They may hold texts that a model wrote, so the file is removed when the evaluation is done.

    Args:
        facts: everything that has a part in the findings; the same facts, the same file. JSON must hold them.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self.path = part_of_home("evaluations") / f"{digest[:32]}.jsonl"
        self._found: dict[str, dict[int, Any]] = {}
        for kind, findings in self._lines() if self.path.is_file() else ():
            self._found.setdefault(kind, {}).update({int(row): value for row, value in findings.items()})

    def of(self, kind: str) -> dict[int, Any]:
        """Return the findings of a kind, by row."""
        return self._found.setdefault(kind, {})

    def add(self, kind: str, findings: Mapping[int, Any]) -> None:
        """Note findings, durably.

        Raises:
            ResourceError: they cannot be written.
        """
        self.of(kind).update(findings)
        entry = [kind, {str(row): value for row, value in findings.items()}]
        line = json.dumps([digest_of(entry), *entry])
        try:
            make_home()
            keep_folder(self.path.parent)
            append_text(self.path, f"\n{line}\n")  # on a line of its own, whatever a crash has left before it
        except OSError as error:
            raise ResourceError(f"cannot write {self.path}: {error.strerror}") from error

    def _lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield kind and findings of each line that is as it was written; what others held is found out again."""
        try:
            lines = read_bytes(self.path).split(b"\n")
        except OSError as error:
            raise ResourceError(f"cannot read {self.path}: {error.strerror}") from error
        for line in lines:
            try:
                digest, *entry = json.loads(line)
            except (ValueError, TypeError, RecursionError):  # cut short by a crash, or damaged
                continue
            if digest == digest_of(entry):
                yield entry[0], entry[1]

    def close(self) -> None:
        """Remove the file: all is known."""
        self.path.unlink(missing_ok=True)
