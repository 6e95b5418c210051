"""Test that a run records the libraries of its products, and keeps their bits in every placement and on resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.small_run import assert_same_weights, losses_of, weights_of
from support.steps import interrupting

from gptj_ft.config.run_folder import Run
from gptj_ft.models import products
from gptj_ft.models.products import Libraries, has_mkl
from gptj_ft.planning import product_times
from gptj_ft.planning.product_times import Choice

TINY = "finetune --recipe summarization --data rows.jsonl --model tiny --lr 1e-2 --batch-size 8 --set holdout=0.1"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "widened": torch.float32}  # of the products
NARROWEST = 32  # for these tests


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", list(DTYPES))
def test_chosen_products_are_recorded_and_resumed(precision: str, shell, rows_file: Path, monkeypatch) -> None:
    if not has_mkl(DTYPES[precision]):
        pytest.skip("this torch offers no MKL")
    chosen = Libraries("onednn", "mkl") if precision == "bf16" else Libraries("mkl", "mkl")
    text, reason = str(chosen), "1.5 times as fast as oneDNN here"
    if precision == "widened":
        text, reason = f"widened {chosen}", f"bf16 is multiplied in fp32, since this CPU has no bf16 unit; {reason}"
    monkeypatch.setattr("gptj_ft.planning.machine_profile.emulates_bf16", lambda: precision == "widened")
    monkeypatch.setattr(product_times, "NARROWEST", NARROWEST)
    monkeypatch.setattr(product_times, "time_products", lambda kinds: [Choice(chosen, 1.0, 1.5)] * len(kinds))
    options = f"{TINY} --epochs 1 --precision {'fp32' if precision == 'fp32' else 'bf16'}"
    done = shell(f"{options} --output straight --weights device --optimizer-state device")
    assert done.code == 0, done.err
    assert f"{text} for gradients of inputs/weights: {reason}" in " ".join(done.err.split())
    assert Run(Path("straight")).recipe().products == text
    with interrupting(2):
        assert shell(f"{options} --output stopped --weights disk --optimizer-state disk").code == 130
    # Now oneDNN's own products would be chosen, but the run has its libraries.
    monkeypatch.setattr("gptj_ft.planning.machine_profile.emulates_bf16", lambda: False)
    monkeypatch.setattr(product_times, "time_products", lambda kinds: [Choice(Libraries(), 1.0, 1.0)] * len(kinds))
    assert shell("finetune --resume stopped --host-memory 900GB").code == 0
    assert losses_of(Run(Path("straight"))) == losses_of(Run(Path("stopped")))
    assert_same_weights(weights_of(Path("straight/model")), weights_of(Path("stopped/model")))
    # The libraries are really used: in bf16, oneDNN's sums are rounded differently.
    assert shell(f"{options} --output other --set products=onednn").code == 0
    ours, theirs = (losses_of(Run(Path(name))) for name in ("straight", "other"))
    if precision != "fp32":
        assert ours != theirs
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    for (step, loss, _), (same_step, other_loss, _) in zip(ours, theirs, strict=True):
        assert step == same_step
        assert loss is other_loss is None or loss == pytest.approx(other_loss, rel=tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize("dora", ["false", "true"])
def test_adapters_train_with_widened_products(dora: str, shell, rows_file: Path) -> None:
    options = f"{TINY} --epochs 1 --precision bf16 --method lora --set lora.dropout=0.1 --set lora.dora={dora}"
    for name, chosen in {"own": "onednn", "wide": "widened onednn"}.items():
        done = shell(f"{options} --output {name} --set 'products={chosen}'")
        assert done.code == 0, done.err
    own, wide = (losses_of(Run(Path(name))) for name in ("own", "wide"))
    assert own != wide
    for (_, loss, _), (_, other, _) in zip(own, wide, strict=True):
        assert loss is other is None or loss == pytest.approx(other, rel=1e-2)


def test_resume_without_mkl_warns_of_other_bits(shell, rows_file: Path, monkeypatch) -> None:
    with interrupting(2):
        done = shell(f"{TINY} --epochs 1 --precision bf16 --set products=onednn/mkl --output stopped")
    assert done.code == 130, done.err
    monkeypatch.setattr(products, "_gemm_bf16bf16f32", lambda: None)
    done = shell("finetune --resume stopped")
    assert done.code == 0
    warning = "this torch offers no MKL for bf16, with which the run began (onednn/mkl): oneDNN replaces it"
    assert warning in " ".join(done.err.split())
    assert warning in Path("stopped/log.txt").read_text()


def test_run_from_before_keeps_onednn(shell, rows_file: Path) -> None:
    with interrupting(2):
        assert shell(f"{TINY} --epochs 1 --output stopped").code == 130
    recipe = Path("stopped/recipe.yaml")
    lines = recipe.read_text().splitlines(keepends=True)
    assert any(line.startswith("products:") for line in lines)
    recipe.write_text("".join(line for line in lines if not line.startswith("products:")))
    assert Run(Path("stopped")).recipe().products == "onednn"
    assert shell("finetune --resume stopped").code == 0


@pytest.mark.parametrize("value", ["blis", "mkl/", "onednn/mkl 3x=mkl"])
def test_unknown_products_are_rejected(value: str, shell, rows_file: Path) -> None:
    done = shell(f"{TINY} --set 'products={value}'")
    assert done.code == 2
    assert "expected auto, onednn, mkl, or two libraries such as onednn/mkl" in " ".join(done.err.split())
