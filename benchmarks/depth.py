"""Measure peak memory by depth for a model streamed from disk: only layer inputs should add to it.

Random GPT-Js of one width and 4, 8, 16 and 32 blocks, weights, gradients and moments on disk, every block recomputed;
two steps each, because the first has no update to apply. Each in a separate process.

    python benchmarks/depth.py --work /tmp/depth
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("streamed_vs_resident.py")


def main() -> None:
    """Measure the depths in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="new folder, removed at the end")
    parser.add_argument("--layers", default="4,8,16,32")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    state = arguments.work / "state"
    peaks: dict[int, int] = {}
    for layers in map(int, arguments.layers.split(",")):
        options = {
            "work": state, "layers": layers, "width": arguments.width, "tokens": arguments.tokens, "steps": 2,
            "variant": "disk",
        }  # fmt: skip
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        done = subprocess.run([sys.executable, str(SCRIPT), *words], check=True, stdout=subprocess.PIPE)
        shutil.rmtree(state)
        result = json.loads(done.stdout)
        peaks[layers] = result["peak_rss_bytes"]
        print(json.dumps({"layers": layers, **result}), flush=True)
    arguments.work.rmdir()
    least = min(peaks)
    for layers, peak in peaks.items():
        added = (layers - least) * arguments.tokens * arguments.width * 4
        expected = peaks[least] + added
        print(
            f"{layers:>3} blocks: {peak / 1e9:.2f} GB; {least} blocks and {added / 1e9:.2f} GB of layer inputs: "
            f"{expected / 1e9:.2f} GB, {peak / expected - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
