"""Time one block of GPT-J and of Llama 3.1 8B in turns, with the products that are named.

A turn takes each block forward without a graph, then forward and backward. Rates count the products with the block's
weights only: forward one, forward and backward three. Norms, attention and activations take their time and count
nothing. Weights are random; documents have 256 tokens.

    python benchmarks/block_rates.py --products "fp32 mkl" "bf16 widened mkl" "bf16 onednn"
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from full_size import ROW, SHAPES

from gptj_ft.models.batch import pack
from gptj_ft.models.functional import FunctionalLayer
from gptj_ft.models.layout import Layout
from gptj_ft.models.products import Products, set_products
from gptj_ft.models.registry import Architecture, families
from gptj_ft.planning.layer_cost import parameters_of
from gptj_ft.system.accelerator import CPU
from gptj_ft.system.dtypes import PRECISIONS

PASSES, TRAINING_PASSES = 2, 6  # FLOP per token and weight


@dataclass
class Block:
    """A block with random weights, and its input."""

    run: Callable[..., torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    x_TD: torch.Tensor

    @classmethod
    def of(cls, shape: Mapping[str, Any], form: str, tokens: int) -> Block:
        """Build a block; ``form`` is a precision, then the text of `Products`."""
        precision, _, products = form.partition(" ")
        dtype, family = PRECISIONS[precision], families()[shape["model_type"]]
        architecture = Architecture(family, family.read_config(dict(shape)), dict(shape))
        layer = architecture.layers()[1]
        set_products([layer], Products.parse(products))
        parameters = parameters_of(layer, Layout.of(layer), dtype, CPU)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.normal_(0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
                if parameter.grad is not None:
                    parameter.grad.zero_()
        x_TD = torch.randn(tokens, architecture.config.n_embd).to(dtype)
        return cls(FunctionalLayer(layer).run, parameters, x_TD)

    def rates(self) -> tuple[float, float]:
        """Return GFLOP/s of forward, and of forward and backward."""
        batch = pack([[0] * ROW] * (len(self.x_TD) // ROW))
        start = time.perf_counter()
        with torch.no_grad():
            self.run(self.parameters, self.x_TD, batch, _no_poll)
        middle = time.perf_counter()
        out_TD = self.run(self.parameters, self.x_TD.detach().requires_grad_(), batch, _no_poll)
        torch.autograd.backward(out_TD, 1e-3 * self.x_TD)
        end = time.perf_counter()
        weights = sum(parameter.numel() for parameter in self.parameters.values() if parameter.ndim > 1)
        work = 1e-9 * weights * len(self.x_TD)
        return PASSES * work / (middle - start), TRAINING_PASSES * work / (end - middle)


def _no_poll() -> None:
    pass


def main() -> None:
    """Time the blocks in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--products", nargs="+", default=["fp32 mkl", "bf16 widened mkl", "bf16 onednn"])
    parser.add_argument("--tokens", type=int, default=1024, help=f"a multiple of {ROW}")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    blocks = {
        (shape, form): Block.of(SHAPES[shape], form, arguments.tokens)
        for shape in arguments.shapes
        for form in arguments.products
    }
    for block in blocks.values():  # compiles kernels
        block.rates()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {name: [] for name in blocks}
    for _ in range(arguments.turns):
        for name, block in blocks.items():
            found[name].append(block.rates())
    for (shape, form), rates in found.items():
        forward, training = (
            f"{median(kind):.0f} ({min(kind):.0f} to {max(kind):.0f})" for kind in zip(*rates, strict=True)
        )
        print(f"{shape}, {form}: GFLOP/s forward {forward}, forward and backward {training}")


if __name__ == "__main__":
    main()
