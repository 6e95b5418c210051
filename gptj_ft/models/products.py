"""Matrix products on a CPU: which library computes the two products of a backward pass.

oneDNN computes every forward product: with it, a row has the same bits in a product of any number of rows. Gradients of
inputs and of weights may come from MKL instead. `planning.product_times` measures which library is faster for a model's
matrices; a run records the choice, because the libraries round differently.

On a CPU without a bf16 unit, bf16 matrices are widened to fp32 for their product, which is rounded to bf16: both
libraries' own bf16 products emulate the unit there, at a fourth of the rate of fp32 or less. A run records this, too.

Axis letters: T tokens, I input width, O output width.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Library = Literal["onednn", "mkl"]
Shape = tuple[int, int]  # of a stored weight
SUM_ROWS, SUM_NUMEL = 256, 2**20  # minimum block of a weight gradient that `add_product` computes at once
WIDE_ROWS, WIDE_NUMEL = 256, 2**20  # minimum block of a bf16 matrix that is widened to fp32 at once
WIDENED = "widened "
ROW_MAJOR, NOT_TURNED, TURNED = 101, 111, 112  # constants of CBLAS


class Libraries(NamedTuple):
    """Libraries of the products in a linear layer's backward pass, and the type in which they multiply."""

    inputs: Library = "onednn"  # gradient of the inputs
    weights: Library = "onednn"  # gradient of the weight, summed in fp32
    widens: bool = False  # bf16 matrices are multiplied in fp32, forward as well; see `Products`

    def __str__(self) -> str:
        return self.inputs if self.inputs == self.weights else f"{self.inputs}/{self.weights}"

    @classmethod
    def parse(cls, text: str) -> Libraries:
        """Parse ``onednn/mkl``, or one name for both; raise `ValueError` for other text."""
        names = text.split("/")
        if len(names) > 2 or set(names) - {"onednn", "mkl"}:
            raise ValueError(f"{text!r} names no library: expected onednn or mkl, or two of them such as onednn/mkl")
        return cls(cast(Library, names[0]), cast(Library, names[-1]))


ONEDNN_ALONE = Libraries()


@dataclass(frozen=True)
class Products:
    """Libraries of a model's matrices, by the shape in which a weight is stored.

    As text, e.g. ``widened onednn/mkl 192x576=onednn``: bf16 matrices are widened to fp32; the libraries of most
    matrices; those of the others.
    """

    default: Libraries = ONEDNN_ALONE
    by_shape: Mapping[Shape, Libraries] = field(default_factory=dict, hash=False)
    widens: bool = False  # bf16 matrices are widened to fp32 for their product, forward and backward

    def of(self, weight: Tensor) -> Libraries:
        """Return the libraries for a weight."""
        rows, columns = weight.shape
        libraries = self.by_shape.get((rows, columns), self.default)
        return libraries._replace(widens=True) if self.widens else libraries

    def __str__(self) -> str:
        others = (f"{rows}x{columns}={each}" for (rows, columns), each in sorted(self.by_shape.items()))
        return WIDENED * self.widens + " ".join((str(self.default), *others))

    @classmethod
    def parse(cls, text: str) -> Products:
        """Parse the text of `Products`; raise `ValueError` for other text."""
        default, *others = text.removeprefix(WIDENED).split()
        by_shape = {}
        for word in others:
            match = re.fullmatch(r"(\d{1,9})x(\d{1,9})=(.*)", word)
            if match is None:
                raise ValueError(f"{word!r}: expected a shape and its libraries, such as 192x576=onednn")
            by_shape[int(match[1]), int(match[2])] = Libraries.parse(match[3])
        return cls(Libraries.parse(default), by_shape, text.startswith(WIDENED))

    @property
    def uses_mkl(self) -> bool:
        return any("mkl" in each for each in (self.default, *self.by_shape.values()))


ONEDNN = Products()


def products_for(dtype: torch.dtype, device: torch.device, emulates_bf16: bool) -> Products:
    """Return the products of a forward pass.

    Args:
        emulates_bf16: the CPU has no bf16 unit, see `system.machine.emulates_bf16`.
    """
    return Products(widens=emulates_bf16 and dtype == torch.bfloat16 and device.type == "cpu")


def set_products(layers: Iterable[nn.Module], products: Products) -> None:
    """Set the libraries of all linear layers of a model."""
    for layer in layers:
        for module in layer.modules():
            if hasattr(module, "products"):
                module.products = products  # type: ignore[assignment]


def has_onednn(x_TD: Tensor) -> bool:
    """Tell whether oneDNN multiplies tensors of this type and device."""
    is_kind = x_TD.device.type == "cpu" and x_TD.dtype in (torch.float32, torch.bfloat16)
    return is_kind and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def has_mkl(dtype: torch.dtype) -> bool:
    """Tell whether this build of torch offers MKL's products of a type."""
    if dtype == torch.float32:
        return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
    return dtype == torch.bfloat16 and _gemm_bf16bf16f32() is not None


def multiply(x_TI: Tensor, weight_OI: Tensor, bias: Tensor | None = None, widens: bool = False) -> Tensor:
    """Multiply by a weight with oneDNN, without an autograd graph: [T, O].

    Args:
        widens: multiply bf16 matrices in fp32, and round the result.
    """
    if widens and x_TI.dtype == torch.bfloat16:
        return _multiply_widened(x_TI, weight_OI, bias, "onednn")
    if x_TI.dtype != torch.float32:
        return F.linear(x_TI, weight_OI, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_TI, weight_OI, bias, "none", [], "")
    return out


def _multiply_widened(x_TI: Tensor, weight_OI: Tensor, bias: Tensor | None, library: Library) -> Tensor:
    """Multiply bf16 matrices in fp32, a block of the weight's rows at a time, and round the result to bf16."""
    # The result first: it may be kept until backward, and a temporary matrix below it would leave a hole in the heap.
    out_TO = x_TI.new_empty(len(x_TI), len(weight_OI))
    x_TI = x_TI.float()
    num_rows = max(WIDE_ROWS, WIDE_NUMEL // weight_OI.shape[1])
    outs, weights = torch.split(out_TO, num_rows, dim=1), torch.split(weight_OI, num_rows)
    biases = [None] * len(weights) if bias is None else torch.split(bias.float(), num_rows)
    for out, weight, own_bias in zip(outs, weights, biases, strict=True):
        wide = weight.float()
        out.copy_(torch.mm(x_TI, wide.t()) if library == "mkl" else multiply(x_TI, wide, own_bias))
    return out_TO


def multiply_row(x_1I: Tensor, weight_OI: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply one bf16 row by a weight with MKL: [1, O]."""
    # Measured with AMX, weights of 4096 x 4096: MKL reads them at 18 to 20 GB/s, as fast as a sum does, oneDNN at 13.
    is_turned = weight_OI.stride(1) != 1
    weight = _with_contiguous_rows(weight_OI.t() if is_turned else weight_OI)
    x_1I, gemm = _with_contiguous_rows(x_1I), _gemm_bf16bf16f32()
    out_O1 = x_1I.new_empty(len(weight_OI), 1, dtype=torch.float32)
    assert gemm is not None
    assert x_1I.dtype == weight.dtype == torch.bfloat16
    assert x_1I.shape == (1, weight_OI.shape[1])
    gemm(
        ROW_MAJOR, TURNED if is_turned else NOT_TURNED, TURNED, len(weight_OI), 1, weight_OI.shape[1],
        1.0, weight.data_ptr(), weight.stride(0), x_1I.data_ptr(), x_1I.shape[1], 0.0, out_O1.data_ptr(), 1,
    )  # fmt: skip
    out_1O = out_O1.t()
    return (out_1O if bias is None else out_1O.add_(bias)).to(x_1I.dtype)


def input_gradient(gradient_TO: Tensor, weight_OI: Tensor, libraries: Libraries) -> Tensor:
    """Multiply the gradient of a linear layer's outputs by its weight: [T, I]."""
    if not has_onednn(gradient_TO):
        return gradient_TO @ weight_OI
    if libraries.widens and gradient_TO.dtype == torch.bfloat16:
        return _multiply_widened(gradient_TO, weight_OI.t(), None, libraries.inputs)
    if libraries.inputs == "mkl" and gradient_TO.dtype == torch.float32:
        return torch.mm(gradient_TO, weight_OI)
    return multiply(gradient_TO, weight_OI.t())  # in bf16 MKL would need an fp32 result and a pass that rounds it


def add_product(total_MN: Tensor, left_TM: Tensor, right_TN: Tensor, libraries: Libraries) -> None:
    """Add ``left.t() @ right`` to an fp32 sum."""
    if libraries.widens and left_TM.dtype == torch.bfloat16:
        narrow, right_TN, num_rows = libraries._replace(widens=False), right_TN.float(), _sum_rows(total_MN)
        for total, left in zip(torch.split(total_MN, num_rows), torch.split(left_TM, num_rows, dim=1), strict=True):
            add_product(total, left.float(), right_TN, narrow)
    elif libraries.weights == "onednn" or not has_mkl(left_TM.dtype):
        _add_blocks(total_MN, left_TM, right_TN)
    elif left_TM.dtype == torch.float32:
        total_MN.addmm_(left_TM.t(), right_TN)
    else:
        _add_bf16(total_MN, left_TM, right_TN)


def _add_blocks(total_MN: Tensor, left_TM: Tensor, right_TN: Tensor) -> None:
    """Multiply with oneDNN, and add, block by block of rows."""
    # A block of the product stays in the cache until it is added. A whole product goes through new memory instead: one
    # more write and read, which take twice as long as the bf16 arithmetic with 220 tokens, and a fifth with 2,048.
    num_rows = _sum_rows(total_MN)
    for total, left in zip(torch.split(total_MN, num_rows), torch.split(left_TM, num_rows, dim=1), strict=True):
        if left.dtype == torch.float32:  # oneDNN copies a transposed slice itself otherwise, and slower
            left = left.contiguous().t().contiguous().t()
        total.add_(multiply(left.t(), right_TN.t()))


def some_rows(*matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of several matrices, `WIDE_ROWS` at a time."""
    # Whole fp32 matrices between tensors that are kept until backward would leave holes in the heap: a third of a small
    # run's memory.
    return zip(*(torch.split(matrix, WIDE_ROWS) for matrix in matrices), strict=True)


def _sum_rows(total_MN: Tensor) -> int:
    return max(SUM_ROWS, SUM_NUMEL // total_MN.shape[1])


def _add_bf16(total_MN: Tensor, left_TM: Tensor, right_TN: Tensor) -> None:
    """Multiply bf16 matrices with MKL, adding to an fp32 sum in the same pass.

    Torch has no such operation on a CPU. oneDNN's product is rounded to bf16 and summed by a second pass: 10 more bytes
    an element, as slow as the product itself with 1,000 tokens.
    """
    gemm = _gemm_bf16bf16f32()
    assert gemm is not None
    left_TM, right_TN = _with_contiguous_rows(left_TM), _with_contiguous_rows(right_TN)
    (rows, columns), tokens = total_MN.shape, len(left_TM)
    # MKL gets addresses: it would read and write beyond tensors of other shapes or types.
    assert (left_TM.dtype, right_TN.dtype, total_MN.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert (left_TM.shape, right_TN.shape) == ((tokens, rows), (tokens, columns))
    assert total_MN.stride(1) == 1, "internal error: rows of the sum are not contiguous"
    gemm(
        ROW_MAJOR, TURNED, NOT_TURNED, rows, columns, tokens,
        1.0, left_TM.data_ptr(), left_TM.stride(0), right_TN.data_ptr(), right_TN.stride(0),
        1.0, total_MN.data_ptr(), total_MN.stride(0),
    )  # fmt: skip


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """Return a matrix as BLAS takes it: each row contiguous, rows at least a row apart."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


@cache
def _gemm_bf16bf16f32() -> ctypes._NamedFuncPointer | None:
    """Find ``cblas_gemm_bf16bf16f32`` of the MKL that torch's library for x86 processors contains.

    Source: https://www.intel.com/content/www/us/en/docs/onemkl/developer-reference-c/current/cblas-gemm-bf16bf16f32.html
    """
    if not has_mkl(torch.float32):
        return None
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "torch_cpu.dll"):
        try:
            gemm = ctypes.CDLL(str(folder / name)).cblas_gemm_bf16bf16f32
        except (OSError, AttributeError):  # another build: without this library, or it hides MKL
            continue
        integer, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
        gemm.restype = None
        gemm.argtypes = [
            integer, integer, integer, integer, integer, integer,
            real, pointer, integer, pointer, integer, real, pointer, integer,
        ]  # fmt: skip
        return gemm
    return None
