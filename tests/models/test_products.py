"""Test the libraries of matrix products: their gradients, their text, and the layers that use them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gptj_ft.models import products
from gptj_ft.models.linear import Linear, project
from gptj_ft.models.products import (
    SUM_ROWS,
    Libraries,
    Library,
    Products,
    add_product,
    has_mkl,
    multiply,
    multiply_row,
    set_products,
)
from gptj_ft.models.registry import families

DTYPES = [torch.float32, torch.bfloat16]
LIBRARIES: list[Library] = ["onednn", "mkl"]
MKL = Libraries("mkl", "mkl")


def skip_without_mkl(library: Library, dtype: torch.dtype) -> None:
    if library == "mkl" and not has_mkl(dtype):
        pytest.skip(f"this torch offers no MKL for {dtype}")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradient_is_summed_in_fp32(dtype: torch.dtype, library: Library) -> None:
    skip_without_mkl(library, dtype)
    torch.manual_seed(0)
    left, right = torch.randn(33, 2 * SUM_ROWS + 7).to(dtype), torch.randn(33, 5000).to(dtype)
    begun = torch.randn(left.shape[1], right.shape[1])
    total = begun.clone()
    add_product(total, left, right, Libraries(library, library))
    whole = begun + left.float().t() @ right.float()
    # oneDNN rounds a bf16 product, of about 20, before it is added; MKL does not.
    tolerance = 0.05 if (library, dtype) == ("onednn", torch.bfloat16) else 1e-5
    torch.testing.assert_close(total, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mkl_sums_views_of_larger_matrices(dtype: torch.dtype) -> None:
    skip_without_mkl("mkl", dtype)
    torch.manual_seed(0)
    left, right, memory = torch.randn(40, 96).to(dtype), torch.randn(64, 40).to(dtype), torch.zeros(32, 100)
    sides = {"slice": (left[:, 16:48], right.t()), "repeated": (left[:1, :32].expand(40, 32), right.t())}
    for name, (of_left, of_right) in sides.items():
        total = memory.zero_()[:, :64]
        add_product(total, of_left, of_right, MKL)
        expected = of_left.float().t() @ of_right.float()
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        assert not memory[:, 64:].any(), "beyond the sum"


@pytest.mark.parametrize("widens", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_linear_layer_match_torch(dtype: torch.dtype, is_transposed: bool, widens: bool) -> None:
    skip_without_mkl("mkl", dtype)
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(61, 40).to(dtype), torch.randn(24, 40).to(dtype), torch.randn(61, 24).to(dtype)
    stored = (weight.t() if is_transposed else weight).clone().requires_grad_()
    stored.grad_dtype = torch.float32
    stored.grad = torch.zeros(stored.shape)
    ours = x.clone().requires_grad_()
    chosen = Products(Libraries("mkl", "mkl"), widens=widens)
    project(ours, stored, None, "training", is_transposed, chosen).backward(gradient)
    of_weight = gradient.float().t() @ x.float()
    torch.testing.assert_close(stored.grad.t() if is_transposed else stored.grad, of_weight, rtol=1e-4, atol=1e-4)
    of_x, tolerance = gradient.float() @ weight.float(), 1e-5 if dtype == torch.float32 else 0.02
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad.float(), of_x, rtol=tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_widened_products_are_those_of_fp32_rounded_once(is_transposed: bool, monkeypatch) -> None:
    monkeypatch.setattr(products, "WIDE_NUMEL", 1)
    monkeypatch.setattr(products, "WIDE_ROWS", 16)  # the last block has 10
    torch.manual_seed(0)
    x, weight, bias = torch.randn(61, 40).bfloat16(), torch.randn(90, 40).bfloat16(), torch.randn(90).bfloat16()
    weight = weight.t().contiguous().t() if is_transposed else weight
    out = multiply(x, weight, bias, widens=True)
    expected = (x.double() @ weight.double().t() + bias.double()).to(torch.bfloat16)
    assert (out != expected).double().mean() < 1e-3, "an fp32 sum may round a tie to the other side"
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-6)
    assert torch.equal(multiply(x[3:4], weight, bias, widens=True), out[3:4]), "the same bits for any number of rows"


def test_widened_products_sum_unrounded_weight_gradients() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(33, 2 * SUM_ROWS + 7).bfloat16(), torch.randn(33, 5000).bfloat16()
    total = torch.ones(left.shape[1], right.shape[1])
    add_product(total, left, right, Libraries(widens=True))
    torch.testing.assert_close(total, 1 + left.float().t() @ right.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "onednn",
        "mkl",
        "onednn/mkl",
        "onednn/mkl 192x576=onednn 576x192=mkl",
        "mkl 50257x768=mkl/onednn",
        "widened onednn/mkl 3x3=mkl",
    ],
)
def test_products_survive_their_text(text: str) -> None:
    chosen = Products.parse(text)
    assert str(chosen) == text
    assert chosen.uses_mkl == ("mkl" in text)


@pytest.mark.parametrize(
    "text", ["blis", "mkl/", "widened", "widenedmkl", "mkl/onednn/mkl", "mkl 3=mkl", "mkl 3x3=", "mkl 3x3=blis"]
)
def test_wrong_text_of_products_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|names no library"):
        Products.parse(text)


def test_libraries_are_chosen_by_stored_shape() -> None:
    chosen = Products.parse("onednn/mkl 192x576=onednn")
    assert chosen.of(torch.empty(192, 576)) == Libraries()
    assert chosen.of(torch.empty(576, 192)) == Libraries("onednn", "mkl")
    assert Products.parse("widened mkl 192x576=onednn").of(torch.empty(192, 576)) == Libraries(widens=True)


@pytest.mark.parametrize("name", ["gptj", "gpt2"])
def test_layers_compute_with_their_products(name: str, monkeypatch) -> None:
    seen: list[str] = []

    def note(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, libraries: Libraries) -> None:
        seen.append(libraries.weights)

    shape = {"vocab_size": 11, "n_positions": 8, "n_embd": 32, "n_layer": 1, "n_head": 4}
    family = families()[name]
    layers = family.build_layers(family.read_config(shape | ({"rotary_dim": 4} if name == "gptj" else {})))
    set_products(layers, Products.parse("onednn/mkl 32x32=onednn"))
    matrices = [module for layer in layers for module in layer.modules() if hasattr(module, "products")]
    assert {str(module.products) for module in matrices} == {"onednn/mkl 32x32=onednn"}
    # Every matrix but the embeddings belongs to such a layer.
    paths = {path for path, weight in layers[1].named_parameters() if weight.ndim == 2}
    assert paths == {f"{path}.weight" for path, module in layers[1].named_modules() if module in matrices}

    monkeypatch.setattr("gptj_ft.models.linear.add_product", note)
    for width in (32, 48):
        linear = Linear(32, width, bias=False)
        set_products([nn.Sequential(linear)], Products.parse("onednn/mkl 32x32=onednn"))
        linear.weight.grad = torch.zeros_like(linear.weight)

        class Rows:
            kernel, noise = "training", None

        linear(torch.randn(3, 32, requires_grad=True), Rows()).sum().backward()  # type: ignore[arg-type]
    assert seen == ["onednn", "mkl"]


def test_build_without_mkl_sums_with_onednn(monkeypatch) -> None:
    monkeypatch.setattr(products, "_gemm_bf16bf16f32", lambda: None)
    left, right = torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(3, 5, dtype=torch.bfloat16)
    assert not has_mkl(torch.bfloat16)
    total = torch.zeros(4, 5)
    add_product(total, left, right, MKL)
    assert total.eq(3.0).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_one_row_times_weights_is_not_rounded_twice(is_transposed: bool, has_bias: bool) -> None:
    skip_without_mkl("mkl", torch.bfloat16)
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((1, 300), (170, 300), (170,)))
    stored = weight.t().contiguous().t() if is_transposed else weight
    found = multiply_row(x, stored, bias if has_bias else None)
    exact = x.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)  # half a unit in the last place


@pytest.mark.parametrize("unit", ["AMX", "AVX-512"])
@pytest.mark.parametrize("rows", [1, 2, 5, 32, 33])
def test_decoding_few_rows_in_bf16_matches_fp64(rows: int, unit: str, monkeypatch) -> None:
    monkeypatch.setattr("gptj_ft.models.linear.has_fast_decoding", lambda dtype: unit == "AMX")
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((rows, 300), (170, 300), (170,)))
    exact = x.double() @ weight.double().t() + bias.double()
    for is_transposed in (False, True):
        stored = weight.t().contiguous() if is_transposed else weight
        found = project(x, stored, bias, "decoding", is_transposed).double()
        torch.testing.assert_close(found, exact, rtol=2**-7, atol=0.1)


@pytest.mark.parametrize("sides", [(3, 4, 3, 6), (3, 5, 3, 5), (3, 4, 2, 5)], ids=["wide", "high", "short"])
def test_mkl_never_gets_tensors_of_other_shapes(sides: tuple[int, int, int, int]) -> None:
    skip_without_mkl("mkl", torch.bfloat16)
    left, right = torch.ones(sides[:2]).bfloat16(), torch.ones(sides[2:]).bfloat16()
    with pytest.raises(AssertionError):
        add_product(torch.zeros(4, 5), left, right, MKL)
    with pytest.raises(AssertionError):
        multiply_row(torch.ones(1, 4).bfloat16(), torch.ones(3, 5).bfloat16())
