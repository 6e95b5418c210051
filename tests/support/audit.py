"""Compare the pins of ``constraints.txt`` with the advisories of https://osv.dev; needs a network and nothing else.

Exit codes: 0 no advisory, 1 advisories, 2 not audited.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVICE = "https://api.osv.dev/v1/querybatch"
TIMEOUT_SECONDS = 60.0


def pins(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and version of each pinned package."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([\w.-]+)==([\w.+-]+)", line):
            yield match[1], match[2]


def post(body: bytes) -> bytes:
    """Send a query to the service; return its answer."""
    request = urllib.request.Request(SERVICE, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        return bytes(answer.read())


def audit(path: Path, ask: Callable[[bytes], bytes] = post) -> int:
    """Print the advisories for the pinned packages; return the exit code."""
    packages = list(pins(path))
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in packages]
    try:
        results: list[dict[str, Any]] = json.loads(ask(json.dumps({"queries": queries}).encode()))["results"]
        advisories = [[str(each["id"]) for each in result.get("vulns") or ()] for result in results]
    except OSError as error:
        print(f"not audited: {SERVICE} cannot be reached: {error}; run it where there is a network", file=sys.stderr)
        return 2
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"not audited: {SERVICE} sent an unexpected answer: {error!r}", file=sys.stderr)
        return 2
    if not packages or len(advisories) != len(packages):
        print(f"not audited: {len(packages)} pins, {len(advisories)} answers", file=sys.stderr)
        return 2
    for (name, version), ids in zip(packages, advisories, strict=True):
        for each in ids:
            print(f"{name} {version}: https://osv.dev/vulnerability/{each}")
    print(f"{len(packages)} packages, {sum(map(bool, advisories))} with advisories")
    return int(any(advisories))


if __name__ == "__main__":
    sys.exit(audit(ROOT / "constraints.txt"))
