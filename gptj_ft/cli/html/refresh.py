"""Reload a page in the browser while a run trains, without a server."""

from __future__ import annotations

import base64
import hashlib
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptj_ft.errors import GptjFtError
from gptj_ft.system.files import read_text

PAGE = "report.html"  # in a run folder
GENERATOR = "gptj-ft, while the run trains"
# The only script of any page: `meta refresh` alone would reload the page of a killed run forever. The policy of the
# page allows this text and no other, by its digest.
SCRIPT = """
const facts = document.body.dataset, opened = Date.now(), age = document.getElementById("age");
function look() {
  const seconds = Math.max(0, Math.round(Date.now() / 1000 - facts.written));
  age.textContent = ", " + (seconds < 120 ? seconds + " s" : seconds < 7200 ? Math.round(seconds / 60) + " min" :
    Math.round(seconds / 3600) + " h") + " ago";
  if (seconds > facts.stale) document.body.className = "stale";
  else if (Date.now() - opened > 1000 * facts.refresh) location.reload();
}
look();
setInterval(look, 1000);
"""


def refresh_facts(seconds: float, stale_seconds: float) -> dict[str, Any]:
    """Return the facts for ``refresh.html``.

    Args:
        seconds: between two reloads.
        stale_seconds: age from which the page does not reload any more.
    """
    return {
        "script": SCRIPT,
        "digest": base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
        "written": int(time.time()),
        "seconds": max(1, round(seconds)),
        "stale_seconds": round(stale_seconds),
    }


def shows_answers(path: Path) -> bool:
    """Tell whether a file is a page that was written while a run trained; such a page shows answers."""
    with suppress(OSError, ValueError, GptjFtError):
        return GENERATOR in read_text(path)
    return False
