"""Write ``requirements.txt``: the pins of ``constraints.txt`` with the SHA-256 of every file that PyPI has for them.

Run by ``make hashes``, which installs uv for it. `pip` then installs nothing else, on any platform.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONSTRAINTS, REQUIREMENTS = ROOT / "constraints.txt", ROOT / "requirements.txt"
# Builds that PyPI does not have: torch for CPUs, Linux x86-64, CPython 3.11, as `pip hash` prints it.
OTHER_BUILDS = {"torch": ("6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",)}
HEADER = """\
# constraints.txt with hashes, for `pip install --require-hashes`. Written by `make hashes`.
# torch: PyPI's files, and the CPU build that this project is tested with (Linux x86-64, CPython 3.11).
"""


def with_other_builds(text: str) -> str:
    """Add the hashes of `OTHER_BUILDS`."""
    for name, hashes in OTHER_BUILDS.items():
        lines = "".join(f"    --hash=sha256:{each} \\\n" for each in hashes)
        text = re.sub(rf"^{name}==.*\n", lambda match, lines=lines: match[0] + lines, text, flags=re.M)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    options = ["--no-deps", "--generate-hashes", "--universal", "--python-version", "3.11", "--no-header", "--quiet"]
    command = [sys.argv[1], "pip", "compile", *options, "--no-annotate", "--no-config", str(CONSTRAINTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{CONSTRAINTS}: {done.stderr.strip()}")
    REQUIREMENTS.write_text(HEADER + with_other_builds(done.stdout), encoding="utf-8")
