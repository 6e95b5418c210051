"""Compare losses, gradients and weights: with `transformers`, between device and CPU, between placements."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptj_ft.diagnostics.trial import PEAK_LR, PROMPTS, RESIDENT, SmallModel, Trial, Wrap, open_trial, run, take_step
from gptj_ft.models.attention import attend, takes_ragged
from gptj_ft.models.batch import pack
from gptj_ft.streaming.stores.placement import Place, Placement
from gptj_ft.system.accelerator import CPU, is_accelerator
from gptj_ft.system.dtypes import PRECISIONS

# A head as wide as GPT-J's: not every kernel takes it.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "gptj": {"vocab_size": 503, "n_positions": 64, "n_embd": 256, "n_layer": 2, "n_head": 1, "rotary_dim": 64},
    "gpt2": {
        "vocab_size": 503, "n_positions": 64, "n_embd": 96, "n_layer": 2, "n_head": 3, "activation_function": "gelu",
    },
}  # fmt: skip


class Tolerance(NamedTuple):
    """Relative differences between two computations of a number."""

    expected: float  # largest that rounding explains
    wrong: float  # from here on the computation is wrong, not inexact
    reason: str  # for the expected one


# Compared with `transformers` on the CPU in fp32. AdamW's first steps divide a gradient by its own size: where it is
# nearly zero, rounding decides the sign of a step.
TRANSFORMERS_TOLERANCE = {
    "loss": Tolerance(1e-5, 5e-5, "sums in another order, in 24 bits"),
    "gradient": Tolerance(1e-4, 1e-3, "sums in another order, in 24 bits, through all layers"),
    "weights": Tolerance(1e-4, 1e-3, "AdamW's first steps enlarge the rounding of small gradients"),
}
# An accelerator's loss, compared with the CPU's. On an H200 it differed by 1.6e-7 in fp32, 5.2e-5 in bf16 and 5.0e-6 in
# fp16.
LOSS_TOLERANCE = {
    "fp32": Tolerance(1e-5, 1e-3, "sums in another order, in 24 bits; products in TF32, of 11 bits, differ by 1e-4"),
    "bf16": Tolerance(2e-3, 3e-2, "weights, hidden states and products are rounded to 8 bits"),
    "fp16": Tolerance(5e-4, 1e-2, "weights, hidden states and products are rounded to 11 bits"),
}
# A kernel's outputs and gradients, compared with the CPU's in fp32. On an H200 they differed by 2.6e-3 in bf16.
ATTENTION_TOLERANCE = {
    "bf16": Tolerance(1e-2, 1e-1, "weights of the softmax and products are rounded to 8 bits"),
    "fp16": Tolerance(1e-2, 1e-1, "weights of the softmax and products are rounded to 11 bits"),
}
DOCUMENT_LENGTHS = (5, 300, 1, 64)  # tokens, of the attention comparison
HOST, DISK = Placement("host", "host", "host"), Placement("disk", "disk", "disk")
MIXED = Placement("device", "host", "device"), Placement("host", "device", "host")


class Mismatch(Exception):
    """Numbers are wrong."""


class Skipped(Exception):
    """The device does not need a part of the check-up, or cannot run it."""


def judge(what: str, error: float, tolerance: Tolerance) -> list[str]:
    """Return a line if a difference is larger than expected; none if rounding explains it.

    Args:
        what: names the number and what it is compared with.

    Raises:
        Mismatch: the number is wrong.
    """
    # Not `>`: NaN must fail, too.
    if not error <= tolerance.wrong:
        raise Mismatch(f"{what} by {error:.2g} (relative)")
    if error <= tolerance.expected:
        return []
    times = error / tolerance.expected
    return [
        f"{what} by {error:.2g} (relative), {times:.2g} times the {tolerance.expected:g} expected: {tolerance.reason}"
    ]


def margin(error: float, tolerance: Tolerance) -> float | None:
    """Return how many times a difference fits into the expected one; ``None``: there is no difference."""
    return round(tolerance.expected / error, 3) if error else None


def make_reference(model_type: str) -> Any:
    """Make a random model of `transformers` whose norm weights and biases differ from 1 and 0, so that all matter."""
    from transformers import GPT2Config, GPT2LMHeadModel, GPTJConfig, GPTJForCausalLM

    config_of, model_of = {"gptj": (GPTJConfig, GPTJForCausalLM), "gpt2": (GPT2Config, GPT2LMHeadModel)}[model_type]
    config = config_of(
        **SHAPES[model_type], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = model_of(config).float().eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, mean=0.3, std=0.3)
    return model


def save_reference(reference: Any, folder: Path) -> None:
    """Save a model of `transformers` without a progress bar."""
    from transformers.utils import logging

    has_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        reference.save_pretrained(folder)
    finally:
        if has_bars:
            logging.enable_progress_bar()


def check_transformers(folder: Path, num_steps: int = 3, families: Sequence[str] = ("gptj", "gpt2")) -> dict[str, Any]:
    """Train small models with this engine and with a plain `transformers` loop on the CPU, and compare them.

    Args:
        folder: receives the models, by family.

    Raises:
        Mismatch: a number is wrong, by `TRANSFORMERS_TOLERANCE`.
    """
    results: dict[str, Any] = {"differs": []}
    for model_type in families:
        reference = make_reference(model_type)
        save_reference(reference, folder / model_type)
        errors = _compare_training(SmallModel.read(folder / model_type), reference, num_steps)
        for name, tolerance in TRANSFORMERS_TOLERANCE.items():
            results["differs"] += judge(f"{model_type}: {name} differs from transformers", errors[name], tolerance)
        margins = {name: margin(errors[name], tolerance) for name, tolerance in TRANSFORMERS_TOLERANCE.items()}
        results[model_type] = {**errors, "margins": margins}
    return results


def _compare_training(model: SmallModel, reference: Any, num_steps: int) -> dict[str, float]:
    """Return the largest relative differences of the losses, the first step's gradients and the weights."""
    parameters = dict(reference.named_parameters())
    # Weight decay applies to matrices only, as in this engine.
    matrices = [parameter for parameter in parameters.values() if parameter.ndim > 1]
    others = [parameter for parameter in parameters.values() if parameter.ndim == 1]
    recipe = Trial(CPU).recipe
    torch_adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=PEAK_LR, betas=recipe.betas, eps=recipe.eps,
    )  # fmt: skip
    losses: list[float] = []
    gradients: list[float] = []
    with open_trial(model, Trial(CPU)) as (offloaded, optimizer):
        num_layers, name_of = len(offloaded.layers), model.architecture.family.name_of

        def difference(kind: Any, expected: Mapping[str, Tensor]) -> float:
            errors = []
            for layer in offloaded.trained:
                flat = torch.cat([chunk.clone() for _, chunk in offloaded.read_chunks(kind, layer)])
                for name, view in offloaded.layouts[layer].views(flat).items():
                    errors.append(_relative(view, expected[name_of(layer, name, num_layers)]))
            return max(errors)

        for _ in range(num_steps):
            ours, _ = take_step(model, offloaded, optimizer)
            torch_adamw.zero_grad()
            theirs = _reference_loss(reference, model.documents)
            theirs.backward()  # type: ignore[no-untyped-call]
            losses.append(abs(ours - theirs.item()) / abs(theirs.item()))
            if not gradients:
                grads = {name: x.grad for name, x in parameters.items() if x.grad is not None}
                gradients.append(difference("grad", grads))
            if recipe.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters.values(), recipe.clip_norm)
            torch_adamw.step()
        optimizer.flush()
        weights = difference(offloaded.parameter, {name: x.detach() for name, x in parameters.items()})
    return {"loss": max(losses), "gradient": gradients[0], "weights": weights}


def _reference_loss(reference: Any, documents: Sequence[Sequence[int]]) -> Tensor:
    """Return the mean loss over the targets of all documents; each document is its own forward pass."""
    total, count = torch.zeros(()), 0
    for ids, prompt in zip(documents, PROMPTS, strict=True):
        logits, targets = reference(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:])
        # Nothing predicts a document's first token, even if it belongs to the answer.
        first = max(prompt, 1) - 1
        total = total + F.cross_entropy(logits[first:], targets[first:], reduction="sum")
        count += len(ids) - 1 - first
    return total / count


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


def trials(device: torch.device, precision: str, is_thorough: bool) -> list[list[Trial]]:
    """Return groups of configurations whose results must be bit-equal; the first of each group is all on the device."""

    def adapters(place: Place) -> Trial:
        return Trial(device, precision, Placement("device", "device", "device", frozen=place), is_lora=True)

    full = [Trial(device, precision), Trial(device, precision, DISK)]
    full += [Trial(device, precision, HOST, num_kept=1, num_deferred=2)]
    lora = [adapters("device"), adapters("disk")]
    if not is_thorough:
        return [full, lora]
    full += [Trial(device, precision, placement) for placement in (HOST, *MIXED)]
    if precision == "fp16":  # with a loss scale, updates always wait for the whole step
        return [full, [*lora, adapters("host")]]
    unclipped = [Trial(device, precision, placement, is_clipped=False) for placement in (RESIDENT, HOST)]
    return [full, [*lora, adapters("host")], unclipped]


def check_placements(
    model: SmallModel, groups: Sequence[Sequence[Trial]], wrap: Wrap = lambda store: store
) -> dict[str, Any]:
    """Train a small model in every configuration and compare the bits in each group, and the losses with the CPU's.

    Args:
        groups: the first configuration of each group is the reference.
        wrap: replacement of each store.

    Raises:
        Mismatch: different bits, or a wrong loss by `LOSS_TOLERANCE`.
    """
    errors: dict[str, float] = {}
    margins: dict[str, float | None] = {}
    differs: list[str] = []
    with deterministic() as nondeterministic:
        for first, *others in groups:
            expected = run(model, first)
            if is_accelerator(first.device):
                error, tolerance = expected.relative_error(run(model, replace(first, device=CPU))), LOSS_TOLERANCE
                errors[str(first)] = error
                margins[str(first)] = margin(error, tolerance[first.precision])
                differs += judge(f"{first}: the loss differs from the CPU's", error, tolerance[first.precision])
            for trial in others:
                if difference := run(model, trial, wrap).difference(expected):
                    raise Mismatch(f"{trial}: {difference}, compared with all on the device")
    tried = [str(trial) for group in groups for trial in group]
    allowed = {first.precision: LOSS_TOLERANCE[first.precision].expected for first, *_ in groups}
    return {
        "equal": tried, "loss_error_to_cpu": errors, "allowed_error": allowed, "margins": margins, "differs": differs,
        "not_deterministic": nondeterministic,
    }  # fmt: skip


@contextmanager
def deterministic() -> Iterator[list[str]]:
    """Select torch's deterministic kernels; yield a list that receives the names of other kernels at the end."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch._C._get_deterministic_fill_uninitialized_memory()  # torch.utils.deterministic
    names: list[str] = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch._C._set_deterministic_fill_uninitialized_memory(False)  # training does not fill, either
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield names
        texts = (str(warning.message) for warning in caught)
        names += dict.fromkeys(text.split(" ")[0] for text in texts if "deterministic" in text)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch._C._set_deterministic_fill_uninitialized_memory(fills)


def check_attention(device: torch.device, precision: str) -> dict[str, Any]:
    """Compare a device's attention over a packed batch with the CPU's in fp32.

    Raises:
        Mismatch: outputs or gradients are wrong, by `ATTENTION_TOLERANCE`.
    """
    dtype, tolerance = PRECISIONS[precision], ATTENTION_TOLERANCE[precision]
    results: dict[str, Any] = {"differs": []}
    batch = pack([[1] * length for length in DOCUMENT_LENGTHS])
    on_device = batch.to(device)
    generator = torch.Generator().manual_seed(0)
    for width in (64, 256):
        shape = (len(batch.tokens_T), 2, width)
        inputs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
        compared = []
        for at, kind, documents in ((device, dtype, on_device), (CPU, torch.float32, batch)):
            q, k, v = leaves = [x.to(at).to(kind).requires_grad_() for x in inputs]
            out = attend(q, k, v, documents, 0)
            out.sum().backward()  # type: ignore[no-untyped-call]
            compared.append([x.detach().cpu().float() for x in (out, *(leaf.grad for leaf in leaves)) if x is not None])
        error = max(_relative(ours, theirs) for ours, theirs in zip(*compared, strict=True))
        is_ragged = takes_ragged(device, dtype, width)
        kernel = "ragged" if is_ragged else "document by document"
        results[str(width)] = {
            "kernel": kernel, "error": error, "allowed_error": tolerance.expected, "margin": margin(error, tolerance),
        }  # fmt: skip
        what = f"attention in {precision} ({kernel}) with heads of {width} differs from the CPU's in fp32"
        results["differs"] += judge(what, error, tolerance)
    return results
