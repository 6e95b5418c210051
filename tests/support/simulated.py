"""Train, score and generate on the simulated device in every placement and schedule; needs a separate process.

``python -m support.simulated [--all | --only NAME ... | --reduced NAME ...]`` prints a JSON line per case: names,
digest of its numbers, races with their places, errors. Cases of one group must have equal digests. Without options it
runs the reduced matrix of the test suite, compares losses with the CPU, and counts the program's waits for the device;
with ``--reduced`` it runs a part of that matrix. ``--device cuda:0`` runs cases on a real device instead, once each:
its schedule is its own, and nothing looks for races.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support import accelerator
from support.accelerator import SCHEDULES, Schedule
from support.accelerator.ghost import forget_tensors
from support.family_shapes import FAMILY_SHAPES, FIRST_SHAPES

DEVICE = f"{accelerator.NAME}:0"
CPU = torch.device("cpu")
LENGTHS, PROMPTS = (5, 9, 12, 3, 7), (2, 3, 1, 0, 2)  # tokens of the rows
MICRO_BATCH_TOKENS = 16
# The first step of a run checks for unchanged tensors, and its many waits hide races: cases begin with the second.
BEFORE, STEPS = 1, 2
SAMPLED_SEED = 0  # the second and the third step train other blocks
PLACES = ("device", "host", "disk")
MIXED = (
    ("device", "host", "device"),
    ("host", "device", "host"),
    ("disk", "host", "disk"),
    ("device", "device", "host"),
)
EVERYWHERE = (*((place,) * 3 for place in PLACES), *MIXED)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = {
    "gptj": {"vocab_size": 61, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 2, "rotary_dim": 4},
    "gpt2": {"vocab_size": 61, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 2},
}
SHAPES["strided gptj"] = SHAPES["gptj"]  # its tensors are not contiguous in their file
SHAPES["deep gptj"] = {**SHAPES["gptj"], "n_layer": 5}
# Name -> (shape, quantization, whether its values are restored to a plain model)
QUANTIZED = {
    "gptj nf4": ("gptj", "nf4", False),
    "gptj restored": ("gptj", "nf4", True),
    "gpt2 int8": ("gpt2", "int8", False),
    "gpt2 restored": ("gpt2", "int8", True),
}
ENCODERS = {"bert": "BertForSequenceClassification", "roberta": "RobertaForSequenceClassification"}
LABELS = ("no", "perhaps", "yes")
NARROW_AGREEMENT = 1e-2  # relative difference from the CPU in bf16 and fp16
FOLDERS: list[Path] = []  # of the models that this process has made
LORA = {"rank": 4, "alpha": 6, "targets": ["q_proj", "v_proj", "mlp.fc_out"], "dropout": 0.1}


@dataclass(frozen=True)
class Case:
    """A computation on the device under a schedule."""

    scenario: str  # name in `SCENARIOS`
    group: str  # cases of a scenario's group give the same numbers
    label: str  # placement and options
    schedule: Schedule  # when the device executes its queues
    run: Callable[[torch.device], Any] = field(repr=False)  # returns the numbers to compare
    num_devices: int = 1


@lru_cache
def model_folder(name: str) -> Path:
    """Return the folder of a random model of one of the `SHAPES`, cached per process."""
    from conftest import random_gpt2, random_gptj
    from support.family_models import random_of_family

    folder = Path(tempfile.mkdtemp(prefix="simulated-model-", dir=memory()))
    FOLDERS.append(folder)
    if name in FAMILY_SHAPES:
        random_of_family(name, vocab_size=61).save_pretrained(folder)
        return folder
    if name in QUANTIZED:
        return _quantized_folder(folder, *QUANTIZED[name])
    if name in ENCODERS:
        _random_encoder(name).save_pretrained(folder)
        return folder
    (random_gpt2 if name == "gpt2" else random_gptj)(**SHAPES[name]).save_pretrained(folder)
    if name == "strided gptj":
        from safetensors.torch import load_file

        weights = load_file(folder / "model.safetensors")
        strided = {key: x.t().contiguous().t() if x.ndim == 2 else x for key, x in weights.items()}
        torch.save(strided, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return folder


def _quantized_folder(folder: Path, shape: str, quantization: str, is_restored: bool) -> Path:
    from gptj_ft.checkpoints.convert import Conversion, convert

    convert(model_folder(shape), folder / quantization, Conversion(quantize=quantization))  # type: ignore[arg-type]
    if is_restored:
        convert(folder / quantization, folder / "restored", Conversion(dtype="fp32"))
    return folder / ("restored" if is_restored else quantization)


def _random_encoder(name: str) -> Any:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    labels = {"id2label": dict(enumerate(LABELS)), "label2id": {label: at for at, label in enumerate(LABELS)}}
    kind = getattr(transformers, ENCODERS[name])
    torch.manual_seed(0)
    model = kind(kind.config_class(vocab_size=61, max_position_embeddings=40, pad_token_id=1, **sizes, **labels))
    for parameter in model.parameters():  # the initial ones are too small for other outputs than zero
        parameter.data += torch.randn(parameter.shape) * 0.2
    return model


def memory() -> str | None:
    """Return a folder in shared memory if the system has one."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def documents(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 61, (length,), generator=generator).tolist() for length in lengths]


# ------------------------------------------------------------------ training


@dataclass(frozen=True)
class Training:
    """A few training steps of the streaming core."""

    model: str = "gptj"  # name of a shape
    options: dict[str, Any] = field(default_factory=dict)  # of the recipe
    places: tuple[str, str, str] = ("host", "host", "host")  # of weights, optimizer state and boundaries
    frozen: str | None = None  # place of frozen weights
    dtype: str = "fp32"  # of the computation
    narrow: bool = False  # bf16 moments, and bf16 gradients if clipping stores them
    kept: int = 0  # blocks whose activations are kept
    late: int = 0  # blocks whose updates are deferred
    fp16_exponent: int = 20  # of the loss scale, which doubles after every step until one is skipped
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    in_memory: tuple[int, ...] = ()  # layers in `memory` instead of on disk
    memory: str = "host"
    moments: torch.dtype | None = None  # instead of those of `narrow`

    def __call__(self, device: torch.device) -> Any:
        """Train; return losses, gradient norms and digests of the state."""
        with self.opened(device) as (model, optimizer, take_step):
            curve = [take_step(step) for step in range(STEPS)]
            optimizer.flush()
            state = [_digest(model.read_chunks(kind, layer)) for layer in model.trained for kind in _state(model)]
        return curve, state

    def waits(self, device: torch.device) -> list[tuple[str, int]]:
        """Count the program's waits in a steady-state step, by place."""
        with self.opened(device) as (model, _, take_step):
            for step in range(STEPS - 1):
                take_step(step)
                _ = model.meter.waited_seconds  # as the loop reads it after each step
            before = accelerator.now().waits.copy()
            take_step(STEPS - 1)
            _ = model.meter.waited_seconds
            found = accelerator.now().waits - before
        return [(f"{what} at {where}", count) for (what, thread, where), count in found.items() if "Main" in thread]

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[tuple[Any, Any, Callable[[int], tuple[float, float]]]]:
        """Open the model; yield it, its optimizer, and a function that takes a step and returns loss and gradient
        norm."""
        from gptj_ft.checkpoints.architecture import read_architecture
        from gptj_ft.checkpoints.model_folder import open_checkpoint
        from gptj_ft.config.resolve import build
        from gptj_ft.data.batches import micro_batches
        from gptj_ft.models.batch import Marks
        from gptj_ft.models.dropout import seed_of
        from gptj_ft.models.layer_sampling import layer_choice
        from gptj_ft.models.trainable import select
        from gptj_ft.streaming.activations import boundary_layout
        from gptj_ft.streaming.adamw import AdamW
        from gptj_ft.streaming.buffers import BufferBudget
        from gptj_ft.streaming.loss_scale import LossScale
        from gptj_ft.streaming.objective import objective_of
        from gptj_ft.streaming.open import load_weights, open_for_training, open_frozen
        from gptj_ft.streaming.step import train_step
        from gptj_ft.streaming.stores.placement import Placement, training_dtypes
        from gptj_ft.training.restore import optimizer_config
        from gptj_ft.training.setup import trained_architecture

        folder, recipe = model_folder(self.model), build(self.options)
        is_encoder = self.model in ENCODERS
        if is_encoder:
            architecture = trained_architecture(recipe, folder, LABELS)
        else:
            architecture = read_architecture(folder).with_dropout(recipe.dropout, recipe.attention_dropout)
        marks = [Marks((len(ids) // 2,), (0,), (at % 3,)) for at, ids in enumerate(documents())] if is_encoder else None
        drops = recipe.method == "lora" or bool(recipe.dropout)
        placement = Placement(*self.places, self.frozen, self.in_memory, self.memory)  # type: ignore[arg-type]
        moments = torch.bfloat16 if self.narrow else torch.float32
        gradients = torch.float32 if recipe.clip_norm is None else moments
        moments = self.moments or moments
        with tempfile.TemporaryDirectory(dir=memory()) as tmp, open_checkpoint(folder) as checkpoint:
            model = open_for_training(
                architecture, placement, training_dtypes(DTYPES[self.dtype], moments, gradients), device,
                Path(tmp) / "state", BufferBudget(num_chunks=3, chunk_numel=1024, num_kept_layers=self.kept),
                recipe.clip_norm is not None or placement.is_durable or self.dtype == "fp16",
                boundary_layout(sum(LENGTHS), architecture.config.n_embd, len(LENGTHS)), select(architecture, recipe),
                choice=layer_choice(recipe, len(architecture.skeleton)),
            )  # fmt: skip
            try:
                open_frozen(model, architecture, checkpoint, placement)
                load_weights(model, architecture, checkpoint, recipe.seed)
                optimizer = AdamW(model, optimizer_config(recipe), BEFORE, self.late)
                if optimizer.loss_scale:
                    optimizer.loss_scale = LossScale(2.0**self.fp16_exponent, growth_interval=1)

                def take_step(step: int) -> tuple[float, float]:
                    optimizer.begin_step(1e-2 * (step + 1) / 10)
                    packed = list(micro_batches(documents(), PROMPTS, self.micro_batch_tokens, marks=marks))
                    if drops:
                        packed = [
                            replace(
                                batch, seeds=tuple(seed_of((step, at, n)) for n in range(len(batch.cu_seqlens) - 1))
                            )
                            for at, batch in enumerate(packed)
                        ]
                    batches = [batch.to(device) for batch in packed]
                    loss = train_step(model, optimizer, batches, objective_of(recipe)).mean
                    return loss, optimizer.finish_step()

                yield model, optimizer, take_step
            finally:
                model.close()


@dataclass(frozen=True)
class Overflow(Training):
    """Steps in fp16 of which every second one overflows: it halves the loss scale and changes no state."""

    num_steps: int = 4

    def __call__(self, device: torch.device) -> Any:
        """Train; return the losses of the first three steps and digests of the state. The fourth changes nothing."""
        curve = []
        with self.opened(device) as (model, optimizer, take_step):
            for step in range(self.num_steps):
                before, (loss, norm) = optimizer.loss_scale, take_step(step)
                overflows = step % 2 == 1
                assert math.isfinite(norm) is not overflows, f"norm {norm} at scale {before.scale}"
                factor, num_skipped = 0.5 if overflows else 2.0, before.num_skipped + overflows
                after = replace(before, scale=factor * before.scale, num_skipped=num_skipped)
                assert optimizer.loss_scale == after, f"{before} became {optimizer.loss_scale}"
                curve.append(loss)
            optimizer.flush()
            state = [_digest(model.read_chunks(kind, layer)) for layer in model.trained for kind in _state(model)]
        return curve[:3], state


def _state(model: Any) -> list[Any]:
    return [kind for kind in model.dtypes if kind != "grad"]


def _digest(parts: Iterator[tuple[int, torch.Tensor]]) -> str:
    found = hashlib.sha256()
    for _, part in parts:
        found.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


KEPT_LATE = ((0, 0), (1, 2), (1, 0), (0, 2))
CLIPPING = {"clipped": 0.1, "not clipped": None}


def full(dtypes: Sequence[str], schedules: Sequence[Schedule]) -> Iterator[Case]:
    """Full fine-tuning: placements, kept activations, deferred updates, with and without clipping.

    Offloaded boundaries include models with more layers than boundary buffers.
    """
    for dtype, (words, clip) in product(dtypes, CLIPPING.items()):
        for number, places in enumerate(EVERYWHERE):
            for kept, late in (KEPT_LATE[number % 2 * 2], KEPT_LATE[number % 2 * 2 + 1]):
                model = "deep gptj" if places[2] != "device" and not kept else "gptj"
                run = Training(model, {"clip_norm": clip}, places, None, dtype, dtype != "fp32", kept, late)
                label = f"{'/'.join(places)}, {kept} kept, {late} late"
                yield from _cases("full", f"{model}, {dtype}, {words}", label, run, schedules)


def overflow(dtypes: Sequence[str], schedules: Sequence[Schedule]) -> Iterator[Case]:
    """Steps that overflow, and the same without the last of them."""
    if "fp16" not in dtypes:
        return
    adapters = {"method": "lora", "lora": LORA}
    for (model, exponent, options), (number, places) in product(
        (("gptj", 20, {"clip_norm": 0.1}), ("gpt2", 20, {"clip_norm": None}), ("gptj", 20, adapters)),
        enumerate(EVERYWHERE),
    ):
        frozen = places[0] if "method" in options else None
        run = Overflow(model, options, places, frozen, "fp16", kept=number % 2, late=number % 3, fp16_exponent=exponent,
                       num_steps=4 - number % 2)  # fmt: skip
        label = f"{'/'.join(places)}, {run.num_steps} steps"
        yield from _cases("overflow", f"{model}, {options.get('method', 'full')}", label, run, schedules)


def moments(dtypes: Sequence[str], schedules: Sequence[Schedule]) -> Iterator[Case]:
    """8-bit moments, whose chunks have other lengths than those of weights."""
    for (words, clip), (number, places) in product(CLIPPING.items(), enumerate(EVERYWHERE)):
        options = {"clip_norm": clip}
        run = Training("gptj", options, places, dtype="bf16", narrow=True, kept=number % 2, late=number % 3,
                       moments=torch.int8)  # fmt: skip
        yield from _cases("moments", words, "/".join(places), run, schedules)


def tied(dtypes: Sequence[str], schedules: Sequence[Schedule]) -> Iterator[Case]:
    """GPT-2, whose head shares the embedding's weights, with dropout."""
    for dtype, (words, clip), places in product(dtypes, CLIPPING.items(), EVERYWHERE[:4]):
        options = {"clip_norm": clip, "dropout": 0.1, "attention_dropout": 0.2}
        run = Training("gpt2", options, places, dtype=dtype, kept=1, fp16_exponent=20)
        yield from _cases("tied", f"{dtype}, {words}", "/".join(places), run, schedules)


def sampled(dtypes: Sequence[str], schedules: Sequence[Schedule]) -> Iterator[Case]:
    """A block at a time: one step without embedding and head, one with both and another block."""
    choice = {"method": "sampled", "sampled": {"layers": 1, "period": 1, "vocabulary_every": 2}, "seed": SAMPLED_SEED}
    for dtype, model, (words, clip) in product(dtypes, ("gptj", "gpt2"), CLIPPING.items()):
        for number, places in enumerate(EVERYWHERE):
            run = Training(model, {**choice, "clip_norm": clip}, places, None, dtype, dtype != "fp32", number % 3)
            yield from _cases("sampled", f"{model}, {dtype}, {words}", "/".join(places), run, schedules)


def lora(dtypes: Sequence[str], schedules: Sequence[Schedule]) -> Iterator[Case]:
    """Adapters with dropout, frozen weights in each place; from a folder, the reader's threads load them."""
    for dtype, frozen, (state, kept) in product(dtypes, PLACES, (("device", 0), ("disk", 1))):
        options = {"method": "lora", "lora": LORA}
        run = Training("gptj", options, (state, state, "device"), frozen, dtype, kept=kept, fp16_exponent=20)
        yield from _cases("lora", dtype, f"frozen on {frozen}, state on {state}, {kept} kept", run, schedules)


def quantized(dtypes: Sequence[str], schedules: Sequence[Schedule]) -> Iterator[Case]:
    """Adapters on quantized weights, in each place, and on a plain model with the same values."""
    for dtype, (name, (shape, _, is_restored)) in product(dtypes, QUANTIZED.items()):
        targets = ["all-linear"] if shape == "gpt2" else LORA["targets"]
        options = {"method": "lora", "lora": {**LORA, "targets": targets}}
        for frozen in PLACES[:1] if is_restored else PLACES:
            run = Training(name, options, ("device", "device", "device"), frozen, dtype, kept=1, fp16_exponent=20)
            yield from _cases("quantized", f"{shape}, {dtype}", f"{name}, frozen on {frozen}", run, schedules)
    for dtype, in_memory in product(dtypes, ((), (1,), (2,))):
        run = Training("gptj nf4", {"method": "lora", "lora": LORA}, ("disk", "disk", "device"), "disk", dtype,
                       fp16_exponent=20, in_memory=in_memory)  # fmt: skip
        yield from _cases("quantized", f"gptj, split, {dtype}", f"{in_memory} in host", run, schedules)


def part(dtypes: Sequence[str], schedules: Sequence[Schedule]) -> Iterator[Case]:
    """Partial training by ``--train``: one block, and parts of others."""
    for dtype, frozen, state in product(dtypes, PLACES, ("host", "disk")):
        options = {"train": ["h.1.*", "h.2.mlp.*", "ln_f.*"]}
        run = Training("gptj", options, (state, state, "host"), frozen, dtype, fp16_exponent=20)
        yield from _cases("part", dtype, f"frozen on {frozen}, state on {state}", run, schedules)


def split(dtypes: Sequence[str], schedules: Sequence[Schedule]) -> Iterator[Case]:
    """Some layers in memory and the others on disk: state, or frozen weights."""
    places = [("device", "disk", "device"), ("host", "disk", "host"), ("disk", "host", "device")]
    for dtype, model in product(dtypes, ("gptj", "gpt2")):
        for number, (of_kinds, memory) in enumerate(product(places, ("host", "device"))):
            for in_memory in ((), (1,), (2,)):
                options = {"clip_norm": 0.1}
                run = Training(model, options, of_kinds, None, dtype, dtype != "fp32", number % 2, 1,
                               in_memory=in_memory, memory=memory, fp16_exponent=20)  # fmt: skip
                label = f"{'/'.join(of_kinds)}, {in_memory} in {memory}"
                yield from _cases("split", f"{model}, {dtype}", label, run, schedules)
    for dtype, memory in product(dtypes, ("host", "device")):
        options = {"method": "lora", "lora": LORA}
        for in_memory in ((), (1,), (2,)):
            run = Training("gptj", options, ("disk", "disk", "device"), "disk", dtype, fp16_exponent=20,
                           in_memory=in_memory, memory=memory)  # fmt: skip
            yield from _cases("split", f"adapters, {dtype}", f"{in_memory} in {memory}", run, schedules)


def newer(dtypes: Sequence[str], schedules: Sequence[Schedule]) -> Iterator[Case]:
    """Every other family: trained whole and by adapters, with losses in inference."""
    for family, name in FIRST_SHAPES.items():
        for dtype, places in product(dtypes, EVERYWHERE[:4]):
            run = Training(name, {"clip_norm": 0.1}, places, dtype=dtype, kept=1, late=1, fp16_exponent=19)
            yield from _cases("newer", f"{family}, {dtype}", "/".join(places), run, schedules)
        for dtype, frozen in product(dtypes, PLACES):
            options = {"method": "lora", "lora": {**LORA, "targets": ["all-linear"]}}
            run = Training(name, options, ("disk", "disk", "device"), frozen, dtype, fp16_exponent=20)
            yield from _cases("newer", f"{family}, adapters, {dtype}", f"frozen on {frozen}", run, schedules)


def encoder(dtypes: Sequence[str], schedules: Sequence[Schedule]) -> Iterator[Case]:
    """Encoders with a classifier, whose tokens see all others: by the ragged kernel; with dropout in buckets."""
    for dtype, model, dropout in product(dtypes, ENCODERS, (0.0, 0.2)):
        options = {"task": "classification", "dropout": dropout, "attention_dropout": dropout, "clip_norm": 0.1}
        for number, places in enumerate(EVERYWHERE[:5]):
            run = Training(model, options, places, None, dtype, dtype != "fp32", number % 2, number % 3)
            yield from _cases("encoder", f"{model}, {dropout} dropped, {dtype}", "/".join(places), run, schedules)


# ------------------------------------------------------------------ reading and writing


def read(dtypes: Sequence[str], schedules: Sequence[Schedule]) -> Iterator[Case]:
    """Losses of a model in inference, and likelihoods of answers that share a prompt, weights in each place."""

    def run(model: str, dtype: str, weights: str) -> Callable[[torch.device], Any]:
        def losses(device: torch.device) -> Any:
            from gptj_ft.data.batches import micro_batches
            from gptj_ft.evaluation.likelihood import log_likelihoods
            from gptj_ft.streaming.open import open_for_inference
            from gptj_ft.streaming.scoring import evaluate_losses

            with open_for_inference(model_folder(model), device, DTYPES[dtype], weights) as (_, stack):
                batches = [batch.to(device) for batch in micro_batches(documents(), PROMPTS, MICRO_BATCH_TOKENS)]
                answers = [[[1, 2, 3], [1, 4, 5, 6], [7]]] * 2
                likely = log_likelihoods(stack, documents((5, 3)), answers, 40, MICRO_BATCH_TOKENS)
                totals = [loss.total for loss in evaluate_losses(stack, batches) for _ in range(2)]
                return [*totals, *(each.total for row in likely for each in row)]

        return losses

    for dtype, model, weights in product(dtypes, ("gptj", "gpt2", "strided gptj"), PLACES):
        yield from _cases("read", f"{model}, {dtype}", f"on {weights}", run(model, dtype, weights), schedules)


class Tokenizer:
    """Provide the tokenizer methods that decoding needs."""

    eos_token_id = 60


SETTINGS = {
    "greedy": {"max_new_tokens": 4},
    "sampled": {"max_new_tokens": 4, "temperature": 0.8},
    "beams": {"max_new_tokens": 4, "num_beams": 3},
}


def write(dtypes: Sequence[str], schedules: Sequence[Schedule], settings: Sequence[str] = tuple(SETTINGS)
          ) -> Iterator[Case]:  # fmt: skip
    """Generated tokens, weights in each place, as the first use of the model."""

    def run(dtype: str, weights: str, setting: str) -> Callable[[torch.device], Any]:
        def rows(device: torch.device) -> Any:
            from gptj_ft.config.options import Generation
            from gptj_ft.generation.decoding import generate_tokens
            from gptj_ft.generation.hf_model import StreamedModel
            from gptj_ft.models import attention
            from gptj_ft.streaming.open import open_for_inference

            torch.manual_seed(0)
            prompts = documents((5, 9, 3))
            with open_for_inference(model_folder("gptj"), device, DTYPES[dtype], weights) as (architecture, stack):
                model = StreamedModel(architecture, stack, 64)
                found = generate_tokens(model, Tokenizer(), prompts, Generation(**SETTINGS[setting]))
            if device.type != "cpu" and dtype != "fp32":
                assert attention.takes_ragged(device, DTYPES[dtype], 8, False), (
                    "the kernel for ragged batches was given up"
                )
                assert attention.takes_ragged.cache_info().misses == 1, "nothing asked for the kernel while writing"
            return found

        return rows

    for dtype, setting, weights in product(dtypes, settings, PLACES):
        run_it = run(dtype, weights, setting)
        yield from _cases("write", f"{setting}, {dtype}", f"on {weights}", run_it, schedules)


# ------------------------------------------------------------------ whole runs


class Stopped(Exception):
    """Interrupt the run here."""


def runs(dtypes: Sequence[str], schedules: Sequence[Schedule]) -> Iterator[Case]:
    """Whole runs with validation and checkpoints, straight and resumed after an error."""
    scales: dict[str, int | None] = dict.fromkeys(dtypes)
    if "fp16" in dtypes:
        scales["fp16, overflowing"] = 21
    for (group, exponent), state, is_cut in product(scales.items(), PLACES, (False, True)):
        label = f"on {state}, {'cut off and resumed' if is_cut else 'straight'}"
        run = WholeRun(state, group.partition(",")[0], is_cut, first_exponent=exponent)
        yield from _cases("run", group, label, run, schedules)
    for state, is_cut in product(PLACES if "fp32" in dtypes else (), (False, True)):
        label = f"adapters on {state}, model on host, {'cut off and resumed' if is_cut else 'straight'}"
        run = WholeRun(state, "fp32", is_cut, {"method": "lora", "weights": "host"})
        yield from _cases("run", "adapters", label, run, schedules)


@dataclass(frozen=True)
class WholeRun:
    """A run of the training loop: four steps, validated and saved after each second one, and exported."""

    state: str  # place of weights and optimizer state
    dtype: str = "fp32"  # of the computation
    is_cut: bool = False  # interrupt the third step and resume
    options: dict[str, Any] = field(default_factory=dict)
    first_exponent: int | None = (
        None  # of a loss scale that grows after every step; with 20, only step 3 is not skipped
    )

    def __call__(self, device: torch.device) -> Any:
        """Train; return the digest of the tuned model and the losses of every step and validation."""
        from gptj_ft.streaming import adamw
        from gptj_ft.streaming.loss_scale import LossScale

        if self.first_exponent is None:
            return self._train(device)
        with patch.object(adamw, "LossScale", partial(LossScale, 2.0**self.first_exponent, growth_interval=1)):
            weights, lines = self._train(device)
        skipped = [line["grad_norm"] is None for line in lines if "grad_norm" in line]
        assert skipped == [True, True, False, True], lines
        return weights, lines

    def _train(self, device: torch.device) -> Any:
        from support.small_run import new_run, small_session, train

        from gptj_ft.training import compute

        with tempfile.TemporaryDirectory(dir=memory()) as tmp:
            options = {
                "weights": self.state, "optimizer_state": self.state, "device": str(device), "precision": self.dtype,
                "validate_every": 2, "save_every": 2, **self.options,
            }  # fmt: skip
            setup, run = small_session(Path(tmp), 4, **options), new_run(Path(tmp))
            if self.is_cut:
                steps, plain = 0, compute.train_step

                def cut(*args: Any) -> Any:
                    nonlocal steps
                    steps += 1
                    if steps == 3:
                        raise Stopped
                    return plain(*args)

                compute.train_step = cut
                try:
                    train(setup, run)
                    raise AssertionError("the run was not cut off")
                except Stopped:
                    setup = small_session(Path(tmp), 4, **options)
                finally:
                    compute.train_step = plain
            train(setup, run)
            weights = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in
                       sorted(run.model.glob("*.safetensors"))}  # fmt: skip
            assert weights
            kept = ("step", "loss", "grad_norm", "validation_loss")
            return weights, [{key: line[key] for key in kept if key in line} for line in run.metrics()]


# ------------------------------------------------------------------ cases and their runner


def _cases(
    scenario: str, group: str, label: str, run: Callable[[torch.device], Any], schedules: Sequence[Schedule]
) -> Iterator[Case]:
    for schedule in schedules:
        yield Case(scenario, group, label, schedule, run)


SCENARIOS = {
    "full": full, "overflow": overflow, "moments": moments, "tied": tied, "sampled": sampled, "lora": lora,
    "quantized": quantized, "part": part, "split": split, "newer": newer, "encoder": encoder, "read": read,
    "write": write, "run": runs,
}  # fmt: skip


def every_case(dtypes: Sequence[str] = tuple(DTYPES), schedules: Sequence[Schedule] = SCHEDULES) -> list[Case]:
    """Return the full matrix."""
    return [case for scenario in SCENARIOS.values() for case in scenario(dtypes, schedules)]


def reduced(names: Sequence[str], dtypes: Sequence[str] = tuple(DTYPES)) -> list[Case]:
    """Return the cases of the test suite: each place and schedule at least once, mostly ``late``."""
    found: list[Case] = []
    for name in names:
        scenario = SCENARIOS[name]
        cases = list(scenario(dtypes, ("late",)))
        steps = {
            "full": 17,
            "overflow": 3,
            "moments": 3,
            "tied": 9,
            "sampled": 19,
            "lora": 5,
            "quantized": 5,
            "part": 7,
            "newer": 122,
            "encoder": 7,
            "read": 8,
            "write": 8,
            "run": 3,
        }
        # Of the splits, one group: it has 18 cases.
        for number, case in enumerate(cases[18:36:4] if name == "split" else cases[:: steps[name]]):
            schedule = SCHEDULES[number // 2 % len(SCHEDULES)] if number % 2 else "late"
            found.append(replace(case, schedule=schedule))
    return found


def is_simulated(device: str) -> bool:
    return device.startswith(accelerator.NAME)


def prepare(device: str = DEVICE) -> None:
    """Set up this process: register the simulated device or choose a real one, and fix the rates."""
    torch.set_num_threads(1)
    if is_simulated(device):
        accelerator.install()
    else:
        from gptj_ft.system.machine import choose_device

        choose_device(device)
    logging.disable(logging.WARNING)
    import conftest
    from support.rates import layers_by

    if "simulated-home-" not in os.environ.get("GPTJ_FT_HOME", ""):  # a fork has its parent's
        os.environ["GPTJ_FT_HOME"] = tempfile.mkdtemp(prefix="simulated-home-", dir=memory())
    from gptj_ft.planning import layer_times, probe

    rates = conftest.assumed_rates()
    probe.measure_compute = lambda device: rates.compute  # type: ignore[assignment]
    layer_times.time_kinds = layers_by(rates.compute)
    probe.measure_disk = lambda folder: rates.disk  # type: ignore[assignment]
    probe.core_load, probe.meter_others = (lambda: 0.0), (lambda: lambda: 0.0)  # other tests are no load
    gc.freeze()


def run_case(case: Case, device: str = DEVICE, **options: Any) -> dict[str, Any]:
    """Run a case in a new simulation; return its findings."""
    forget_tensors()
    gc.freeze()  # cases import modules: a full collection would take a second each time
    simulation = None
    if is_simulated(device):
        simulation = accelerator.start(case.schedule, seed=1, num_devices=case.num_devices, **options)
    found: dict[str, Any] = {
        "scenario": case.scenario, "group": case.group, "case": case.label, "schedule": case.schedule,
        "numbers": None, "error": None,
    }  # fmt: skip
    try:
        found["numbers"] = hashlib.sha256(repr(case.run(torch.device(device))).encode()).hexdigest()[:16]
        torch.get_device_module(torch.device(device)).synchronize()
    except BaseException as error:
        found["error"] = "".join(traceback.format_exception(error)[-3:])
    if simulation is not None:
        found["races"] = [f"{a} | {b}: {simulation.examples[a, b]}" for a, b in simulation.races]
        found["pageable"] = [[*key, count] for key, count in simulation.pageable.items()]
        found["events"] = simulation.num_operations
    return found


def clean_up() -> None:
    """Remove the files of `prepare` and `model_folder`."""
    for folder in FOLDERS:
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(os.environ["GPTJ_FT_HOME"], ignore_errors=True)


def count_waits() -> list[dict[str, Any]]:
    """Count the program's waits in a step, for several models and numbers of micro-batches."""
    found = []
    lora = {"method": "lora", "lora": LORA}
    for model, options, tokens, micro_batches in (
        ("gptj", {}, 16, 3), ("deep gptj", {}, 16, 3), ("gptj", {}, 64, 1), ("gptj", lora, 16, 3),
    ):  # fmt: skip
        accelerator.start("late")
        places = ("device",) * 3 if options else ("host",) * 3
        run = Training(model, options, places, micro_batch_tokens=tokens)  # type: ignore[arg-type]
        waits = run.waits(torch.device(DEVICE))
        method = "lora" if options else "full"
        found.append({"method": method, "model": model, "micro_batches": micro_batches, "waits": waits})
    return found


def agreement(dtype: str, model: str = "gptj", on: str = DEVICE) -> list[list[float]]:
    """Return losses and gradient norms of a device and of the CPU."""
    if is_simulated(on):
        accelerator.start("random")
    options = {"task": "classification", "dropout": 0.0, "attention_dropout": 0.0} if model in ENCODERS else {}
    run = Training(model, options, dtype=dtype, fp16_exponent=8)
    both = [run(torch.device(device))[0] for device in (on, "cpu")]
    return [[number for pair in curve for number in pair] for curve in both]


def misdirected(model: str) -> list[list[float]]:
    """Return the `agreement` in bf16 with the wrong causal flag: an encoder lacks later tokens, a decoder sees them."""
    from gptj_ft.models import attention

    attend = attention.attend_ragged

    def attend_wrongly(*args: Any, is_causal: bool = True, **more: Any) -> torch.Tensor:
        return attend(*args, is_causal=not is_causal, **more)

    with patch.object(attention, "attend_ragged", attend_wrongly):
        return agreement("bf16", model)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="the full matrix")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, help="these scenarios, all of their cases")
    parser.add_argument("--reduced", nargs="+", choices=SCENARIOS, help="these scenarios, some of their cases")
    parser.add_argument("--agreement", action="store_true", help="compare losses with the CPU, and run no cases")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--part", default="0/1", help="I/N: every N-th group from the I-th on")
    parser.add_argument("--device", default=DEVICE, help="a real one, as cuda:0, instead of the simulated one")
    chosen = parser.parse_args(arguments)
    faulthandler.enable()
    prepare(chosen.device)
    is_whole = chosen.all or chosen.only
    if chosen.agreement:
        cases = []
    elif is_whole:
        schedules = SCHEDULES if is_simulated(chosen.device) else SCHEDULES[:1]  # a real device has its own
        cases = every_case(chosen.dtypes, schedules)
        cases = [case for case in cases if not chosen.only or case.scenario in chosen.only]
    else:
        cases = reduced(chosen.reduced or list(SCENARIOS), chosen.dtypes)
    first, stride = map(int, chosen.part.split("/"))
    groups = list(dict.fromkeys((case.scenario, case.group) for case in cases))[first::stride]
    try:
        for case in cases:
            if (case.scenario, case.group) not in groups:
                continue
            print(json.dumps(run_case(case, chosen.device)), flush=True)
        if not (is_whole or chosen.reduced):
            models = product(("gptj", "llama", *ENCODERS), chosen.dtypes)
            found = {f"{model}, {dtype}": agreement(dtype, model, chosen.device) for model, dtype in models}
            print(json.dumps({"agreement": found}), flush=True)
        if is_simulated(chosen.device) and not (is_whole or chosen.reduced or chosen.agreement):
            # Not GPT-J: its attention is too small to show in the loss.
            print(
                json.dumps({"misdirected": {model: misdirected(model) for model in ("llama", *ENCODERS)}}), flush=True
            )
            print(json.dumps({"waits": count_waits()}), flush=True)
    except BrokenPipeError:
        pass
    clean_up()
    os._exit(0)  # do not wait for the simulated device's threads


if __name__ == "__main__":
    main(sys.argv[1:])
