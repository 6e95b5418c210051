"""Choose the library of each matrix product of a backward pass by its time on this machine."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gptj_ft.models.linear import Conv1D
from gptj_ft.models.lora import LoRALinear
from gptj_ft.models.products import (
    Libraries,
    Library,
    Products,
    Shape,
    add_product,
    has_mkl,
    input_gradient,
)
from gptj_ft.planning.workload import Workload

NARROWEST = 192  # width of the narrowest matrix that is timed; the time of narrower ones is mostly that of the calls
MOST_NUMEL = 2**24  # of a timed weight; a larger one is timed with fewer rows, which takes no more seconds an element
FEWEST_TOKENS, MOST_TOKENS = 256, 1024
PRODUCT_SECONDS = 0.03  # of a timed product, by the rate of large ones
FEWEST_TURNS, MOST_TURNS = 2, 10  # over both libraries, after a warm-up
ENOUGH_SECONDS = 0.1  # after which no turn starts
GAIN = 1.1  # speed-up at which MKL replaces oneDNN: near 1, noise would choose
LIBRARIES: tuple[Library, Library] = ("onednn", "mkl")
MOST_ERROR = 0.01  # of a bf16 product relative to its largest element


class Choice(NamedTuple):
    """Libraries of a matrix, and what they gain."""

    libraries: Libraries
    seconds: float  # of the backward products with them
    onednn_seconds: float
    load: float = 0.0  # of the cores by other programs


@dataclass(frozen=True)
class ProductKind:
    """A weight whose products are timed."""

    shape: Shape
    is_transposed: bool  # stored as (input width, output width)
    is_trained: bool
    dtype: torch.dtype
    tokens: int

    @property
    def name(self) -> str:
        rows, columns = self.shape
        facts = f"{rows}x{columns}, {self.dtype}, {self.tokens} tokens"
        return facts + ", transposed" * self.is_transposed + ", frozen" * (not self.is_trained)

    def choose(self) -> Choice:
        """Time the products with both libraries, in turns."""
        rows, columns = self.shape
        rows = min(rows, MOST_NUMEL // columns)
        outputs, inputs = (columns, rows) if self.is_transposed else (rows, columns)
        x_TI, gradient_TO = _noise((self.tokens, inputs), self.dtype), _noise((self.tokens, outputs), self.dtype)
        weight = _noise((rows, columns), self.dtype)
        weight_OI = weight.t() if self.is_transposed else weight

        by_input: dict[Library, float] = {"onednn": 0.0}
        if self.dtype == torch.float32:  # in bf16 both would be oneDNN's
            by_input = _alternate(lambda each: input_gradient(gradient_TO, weight_OI, each))
        by_weight: dict[Library, float] = {"onednn": 0.0}
        if self.is_trained:
            total, sides = torch.zeros(rows, columns), (gradient_TO, x_TI)
            if self.is_transposed:
                sides = (x_TI, gradient_TO)
            if _is_right(total, *sides):
                by_weight = _alternate(lambda each: add_product(total, *sides, each))
        of_input, of_weight = _fastest(by_input), _fastest(by_weight)
        return Choice(
            Libraries(of_input, of_weight),
            by_input[of_input] + by_weight[of_weight],
            by_input["onednn"] + by_weight["onednn"],
        )


def kinds_of(workload: Workload, dtype: torch.dtype, rate: float) -> Counter[ProductKind]:
    """Count the matrices of a model that are worth timing.

    Args:
        rate: FLOP/s of large products, which limits the tokens.
    """
    if not has_mkl(dtype) or not workload.num_trained:
        return Counter()
    typical = workload.step.micro_batch_mean
    counts = Counter[ProductKind]()
    for layer, layout in zip(workload.layers, workload.layouts, strict=True):
        for path, module in layer.named_modules():
            if not hasattr(module, "products"):
                continue
            weight = module.weight
            assert isinstance(weight, Tensor)
            rows, columns = weight.shape
            if min(rows, columns) < NARROWEST:
                continue
            most = PRODUCT_SECONDS * rate / (2 * min(rows * columns, MOST_NUMEL))
            tokens = 2 ** round(math.log2(min(typical, max(FEWEST_TOKENS, most), MOST_TOKENS)))
            is_trained = f"{path}.weight".lstrip(".") in layout.used_shapes
            if is_trained or dtype == torch.float32:  # a frozen weight in bf16 has no product to choose for
                counts[ProductKind((rows, columns), _is_transposed(module), is_trained, dtype, tokens)] += 1
    return counts


def products_of(counts: Mapping[ProductKind, int], choices: Mapping[str, Choice]) -> tuple[Products, float]:
    """Combine the choices for a model's matrices.

    Returns:
        The libraries, and the speed of backward's products relative to oneDNN's alone.
    """
    elements = Counter[Libraries]()
    chosen, seconds, before = dict[Shape, Libraries](), 0.0, 0.0
    # Trained weights last: frozen ones of the same shape have timed one product only, so they must not decide.
    for kind, count in sorted(counts.items(), key=lambda item: item[0].is_trained):
        choice = choices[kind.name]
        chosen[kind.shape] = choice.libraries
        elements[choice.libraries] += count * math.prod(kind.shape)
        seconds, before = seconds + count * choice.seconds, before + count * choice.onednn_seconds
    default = max(elements, key=lambda each: (elements[each], each), default=Libraries())
    others = {shape: libraries for shape, libraries in chosen.items() if libraries != default}
    return Products(default, others), before / seconds if seconds else 1.0


def time_products(kinds: Sequence[ProductKind]) -> list[Choice]:
    """Choose the libraries of each matrix."""
    return [kind.choose() for kind in kinds]


def _is_transposed(module: nn.Module) -> bool:
    return isinstance(module, Conv1D) or (isinstance(module, LoRALinear) and module.is_transposed)


def _noise(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    # A row of noise, repeated: as good as noise for timing, and fast to make.
    row = torch.randn(1, shape[1], generator=generator)
    return (row * torch.linspace(0.5, 1.5, shape[0])[:, None]).to(dtype)


def _is_right(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Tell whether MKL's result agrees with oneDNN's, on a part of the matrix."""
    part = left[:, :NARROWEST]
    sums = [torch.zeros(part.shape[1], total.shape[1]) for _ in range(2)]
    for total_of_part, library in zip(sums, LIBRARIES, strict=True):
        add_product(total_of_part, part, right, Libraries(library, library))
    return bool((sums[0] - sums[1]).abs().max() <= MOST_ERROR * sums[0].abs().max())


def _alternate(run: Callable[[Libraries], object]) -> dict[Library, float]:
    """Return the least seconds with each library."""
    seconds: dict[Library, float] = dict.fromkeys(LIBRARIES, math.inf)
    began = time.perf_counter()
    for turn in range(1 + MOST_TURNS):
        if turn > FEWEST_TURNS and time.perf_counter() - began > ENOUGH_SECONDS:
            break
        for library in LIBRARIES:
            start = time.perf_counter()
            run(Libraries(library, library))
            if turn:  # the first starts threads and compiles kernels
                seconds[library] = min(seconds[library], time.perf_counter() - start)
    return seconds


def _fastest(seconds: Mapping[Library, float]) -> Library:
    return "mkl" if GAIN * seconds.get("mkl", math.inf) < seconds["onednn"] else "onednn"
