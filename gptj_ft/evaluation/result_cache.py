"""Cache of per-row results on disk, so that an interrupted evaluation resumes and ends with the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from gptj_ft.system.files import disk_errors, keep_folder
from gptj_ft.system.jsonl import JsonLines
from gptj_ft.system.paths import make_home, part_of_home


class ResultCache:
    """Results by kind and row, in ``evaluations/`` in `home`, under a digest of all that they depend on.

    They may hold texts that a model wrote, so the file is removed when the evaluation is done.

    Args:
        facts: everything that the results depend on, as JSON holds it; the same facts name the same file.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self.path = part_of_home("evaluations") / f"{digest[:32]}.jsonl"
        self._found: dict[str, dict[int, Any]] = {}
        for _, line in JsonLines(self.path, is_sealed=True).read():
            if line is not None:  # what a damaged one held is found out again
                found = {int(row): value for row, value in line["findings"].items()}
                self._found.setdefault(line["kind"], {}).update(found)

    def of(self, kind: str) -> dict[int, Any]:
        """Return the results of a kind, by row."""
        return self._found.setdefault(kind, {})

    def add(self, kind: str, findings: Mapping[int, Any]) -> None:
        """Add results, durably.

        Raises:
            ResourceError: they cannot be written.
        """
        self.of(kind).update(findings)
        with disk_errors(self.path):
            make_home()
            keep_folder(self.path.parent)
        by_row = {str(row): value for row, value in findings.items()}
        JsonLines(self.path, is_sealed=True).append({"kind": kind, "findings": by_row})

    def close(self) -> None:
        """Remove the file: all is known."""
        self.path.unlink(missing_ok=True)
