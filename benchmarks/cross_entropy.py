"""Compare cross-entropy in the memory of its logits with torch's: bits, seconds, page faults.

Loss and gradient of one chunk of logits as the head gives it, in turns. Prints Markdown; values are medians over TURNS.

    python benchmarks/cross_entropy.py
    python benchmarks/cross_entropy.py --classes 50257 --threads 1
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.models.batch import NO_TARGET
from gptj_ft.streaming.cross_entropy import summed_cross_entropy
from gptj_ft.streaming.step import HEAD_CHUNK_BYTES

TURNS = 9


def torchs(logits_SC: Tensor, targets_S: Tensor) -> Tensor:
    """Sum the losses by torch."""
    return F.cross_entropy(logits_SC, targets_S, ignore_index=NO_TARGET, reduction="sum")


def measured(
    loss: Callable[[Tensor, Tensor], Tensor], logits_SC: Tensor, targets_S: Tensor
) -> tuple[Tensor, float, float]:
    """Return the gradient, and milliseconds and thousands of page faults of forward and backward."""
    output = logits_SC.clone().requires_grad_()
    faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    (gradient,) = torch.autograd.grad(loss(output, targets_S), output)
    seconds = time.perf_counter() - start
    return gradient, 1e3 * seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / 1e3


def main() -> None:
    """Compare, for some numbers of classes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="*", default=[4096, 50257])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| rows x classes | bits | torch: ms, faults (1,000) | in place | times as fast |\n|---|---|---|---|---|")
    for classes in arguments.classes:
        rows = HEAD_CHUNK_BYTES // (4 * classes)
        logits_SC, targets_S = torch.randn(rows, classes), torch.randint(classes, (rows,))
        costs: dict[str, list[tuple[float, float]]] = {"torch": [], "in place": []}
        is_equal = True
        for _ in range(TURNS):
            gradients = []
            for name, loss in (("torch", torchs), ("in place", summed_cross_entropy)):
                gradient, *cost = measured(loss, logits_SC, targets_S)
                costs[name].append((cost[0], cost[1]))
                gradients.append(gradient)
            is_equal &= torch.equal(*gradients)
        (old, old_faults), (new, new_faults) = (
            [median(each) for each in zip(*costs[name], strict=True)] for name in costs
        )
        cells = f"{old:.0f}, {old_faults:.0f} | {new:.0f}, {new_faults:.0f} | {old / new:.1f}"
        print(f"| {rows} x {classes:,} | {'equal' if is_equal else 'DIFFERENT'} | {cells} |")


if __name__ == "__main__":
    main()
