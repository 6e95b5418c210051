"""Time AdamW's update with each form of moments, and compare the codes of 8-bit moments with bitsandbytes.

One thread updates 4 Mi parameters in blocks, as a CPU does in a run; the forms alternate. The comparison needs
bitsandbytes and prints the digests that ``tests/streaming/test_int8_moments.py`` holds.

    python benchmarks/moments.py
    python benchmarks/moments.py --bitsandbytes
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from gptj_ft.models.layout import MOMENTS
from gptj_ft.streaming.adamw import BLOCK_NUMEL
from gptj_ft.streaming.moments import FORMS, items_of, num_items
from gptj_ft.streaming.moments.form import MomentForm, Noise
from gptj_ft.streaming.moments.int8 import BLOCK, is_signed
from gptj_ft.streaming.stores.base import chunks

NUMEL, TURNS = 1 << 22, 9


def updater(form: MomentForm) -> Callable[[], None]:
    """Return a function that updates all parameters once."""
    scratch: dict[str, Tensor] = {}

    def reused(name: str, numel: int) -> Tensor:
        if name not in scratch:
            scratch[name] = torch.empty(BLOCK_NUMEL)
        return scratch[name][:numel]

    parameter, gradient, step = torch.randn(NUMEL), torch.randn(NUMEL), torch.tensor(5.0)
    stored = {kind: torch.empty(num_items(NUMEL, form.dtype), dtype=form.dtype) for kind in MOMENTS}
    for span in chunks(NUMEL, BLOCK_NUMEL):
        for kind, values in zip(MOMENTS, (torch.randn(BLOCK_NUMEL), torch.rand(BLOCK_NUMEL)), strict=True):
            form.store(kind, values, stored[kind][items_of(span, form.dtype)], None, reused)

    def update() -> None:
        for span in chunks(NUMEL, BLOCK_NUMEL):
            own = {kind: stored[kind][items_of(span, form.dtype)] for kind in MOMENTS}
            first, second = (form.load(kind, own[kind], reused) for kind in MOMENTS)
            torch._fused_adamw_(
                [parameter[span]], [gradient[span]], [first], [second], [], [step], lr=1e-5, beta1=0.9, beta2=0.999,
                weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
            for kind, values in zip(MOMENTS, (first, second), strict=True):
                form.store(kind, values, own[kind], Noise((1, kind), span.start), reused)

    return update


def time_updates() -> None:
    """Print the nanoseconds of a core per element, by form."""
    torch.set_num_threads(1)
    updates = {name: updater(form) for name, form in FORMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for turn in range(TURNS + 1):
        for name, update in updates.items():
            start = time.thread_time()
            update()
            if turn:
                seconds[name].append(time.thread_time() - start)
    for name, each in seconds.items():
        times = median(each) / median(seconds["bf16"])
        best = min(each) / NUMEL * 1e9
        print(f"{name}: {median(each) / NUMEL * 1e9:.2f} ns (best {best:.2f}), {times:.2f} times bf16", flush=True)


def compare() -> None:
    """Print the digests of bitsandbytes' maps, codes, scales and values."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / part) for part in ("", "streaming")]
    import bitsandbytes.functional as theirs
    import xxhash
    from test_int8_moments import BITSANDBYTES, moments

    from gptj_ft.system.memory import bytes_of

    for kind in MOMENTS:
        numbers, digest = theirs.create_dynamic_map(signed=is_signed(kind)), xxhash.xxh3_64()
        digest.update(bytes_of(numbers))
        for number in range(80):
            # Of fp64, for which it has no kernel of its own on a CPU: the generic one.
            values = moments(kind, number).double()
            codes, scales = torch.ops.bitsandbytes.quantize_blockwise.default(values, numbers, BLOCK)
            restored = theirs.dequantize_blockwise(codes, absmax=scales, code=numbers, blocksize=BLOCK)
            has_values = scales > 0
            for tensor in (codes.view(-1, BLOCK)[has_values], scales, restored.view(-1, BLOCK)[has_values]):
                digest.update(bytes_of(tensor))
        print(f"{kind}: {digest.hexdigest()}, equal: {digest.hexdigest() == BITSANDBYTES[kind]}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bitsandbytes", action="store_true", help="compare with bitsandbytes, and stop")
    compare() if parser.parse_args().bitsandbytes else time_updates()
