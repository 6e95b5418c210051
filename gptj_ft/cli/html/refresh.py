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
# Generators, in the head of pages.
LIVE = "gptj-ft finetune"
WATCHED = "gptj-ft watch"
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


def refresh_facts(seconds: float = 0.0, stale_seconds: float = 0.0, generator: str = "") -> dict[str, Any]:
    """Return the facts for ``refresh.html``.

    Args:
        seconds: between two reloads; 0: the page does not reload.
        stale_seconds: age from which the page does not reload any more.
        generator: the program that writes the page repeatedly.
    """
    reload = {
        "script": SCRIPT,
        "digest": base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
        "at": int(time.time()),
        "seconds": max(1, round(seconds)),
        "stale_seconds": round(stale_seconds),
    }
    written = time.strftime("%Y-%m-%d %H:%M:%S") if generator else ""
    return {"refresh": reload if seconds else None, "generator": generator, "written": written}


def is_made_by(generator: str, page: Path) -> bool:
    """Tell whether a page has a generator; pages of `LIVE` show answers."""
    return f'content="{generator}"' in _text_of(page)


def reloads(page: Path) -> bool:
    """Tell whether a page reloads itself."""
    return "<body data-written=" in _text_of(page)


def _text_of(page: Path) -> str:
    with suppress(OSError, ValueError, GptjFtError):
        return read_text(page)
    return ""
