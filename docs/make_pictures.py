"""Draw `docs/terminal.svg`: the terminal during and after a real `gptj-ft finetune` of the tiny model.

    python docs/make_pictures.py [--rows 500] [--columns 86]

Runs the command in a pseudo-terminal, replays its output (carriage returns, erased lines, cursor movements), and
exports the screen with rich. Takes a minute or two on two quiet cores; needs no network.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
ROWS = DOCS.parent / "examples" / "clinic_notes_train.jsonl"
# A random model has everything to learn: a far higher learning rate than GPT-J 6B needs.
COMMAND = (
    "gptj-ft finetune --recipe summarization --data my.jsonl --model tiny",
    "--weights disk --optimizer-state disk --lr 3e-3 --batch-size 16",
)
CONTROL = re.compile(r"(\r|\n|\x1b\[\?\d+[hl]|\x1b\[\d*[AK]|\x1b\[\d*m)")
SHOWN_SHARE = 60  # percent done of the progress bar that is shown


def main() -> None:
    """Run the command and write the picture."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=500, help="rows of the example data to train on (500)")
    options.add_argument("--columns", type=int, default=86, help="width of the terminal (86)")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = ROWS.read_text(encoding="utf-8").splitlines(keepends=True)[: arguments.rows]
        (Path(folder) / "my.jsonl").write_text("".join(lines), encoding="utf-8")
        measure(folder)
        output = record(folder, arguments.columns)
    console = Console(record=True, width=arguments.columns, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text.from_ansi("\n".join(picture(output))))
    drawn = console.export_svg(title="gptj-ft", unique_id="terminal")
    # Without the fonts that rich would have a reader's browser fetch.
    (DOCS / "terminal.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.S), encoding="utf-8")


def environment() -> dict[str, str]:
    """Return the environment of the command: a separate home, and this checkout's package."""
    paths = os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "GPTJ_FT_HOME": "home", "PYTHONPATH": paths, "TERM": "xterm-256color"}


def measure(folder: str) -> None:
    """Measure the machine first, to keep the measurement out of the picture."""
    command = [sys.executable, "-m", "gptj_ft", "plan", "--model", "EleutherAI/gpt-j-6b", "--json"]
    subprocess.run(command, cwd=folder, env=environment(), capture_output=True, check=False)


def record(folder: str, columns: int) -> str:
    """Run `COMMAND` in a pseudo-terminal and return its output."""
    parent, child = pty.openpty()
    words = [sys.executable, "-m", "gptj_ft", *" ".join(COMMAND).split()[1:]]
    sized = {**environment(), "COLUMNS": str(columns), "LINES": "100"}
    process = subprocess.Popen(words, cwd=folder, env=sized, stdin=child, stdout=child, stderr=child)
    os.close(child)
    chunks = []
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:  # the command has closed its end
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(parent)
    if code := process.wait():
        raise SystemExit(f"the command ended with {code}:\n{b''.join(chunks).decode()[-2000:]}")
    return b"".join(chunks).decode()


def picture(output: str) -> list[str]:
    """Return the final screen with the progress bar of `SHOWN_SHARE` percent."""
    lines, frames = replay(output)
    start = next(number for number, line in enumerate(lines) if "The run" in line)
    trains = next(number for number, line in enumerate(lines) if "validation loss after 0" in line) + 1
    bar = next(frame for frame in frames if done_share(frame[0]) >= SHOWN_SHARE)
    head = "$ " + " \\\n      ".join(COMMAND)
    return [head, "...", *lines[start:trains], "", *bar, "...", *lines[trains:]]


def done_share(line: str) -> int:
    """Return the percentage on a line with a progress bar; -1 on any other."""
    match = re.search(r"(\d+)%", line)
    return int(match[1]) if match else -1


def replay(output: str) -> tuple[list[str], list[list[str]]]:
    """Return the final lines, and the progress bar (with the lines below it) each time it was drawn."""
    lines, row, frames = [""], 0, []
    for piece in CONTROL.split(output):
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece.startswith("\x1b[") and piece.endswith("A"):
            row -= int(piece[2:-1] or 1)
        elif piece.startswith("\x1b[") and piece.endswith("K"):
            if "tokens/s" in lines[-1]:
                bars = [number for number, line in enumerate(lines) if done_share(line) >= 0]
                frames += [lines[bars[-1] :]] if bars else []
            lines[row:] = [""]  # every erasure is followed by a redrawing of all that is below
        elif piece != "\r" and not piece.startswith("\x1b[?"):
            lines[row] += piece
    return lines, frames


if __name__ == "__main__":
    main()
