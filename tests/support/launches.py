"""Count the kernel launches of one optimizer step on the simulated device, without data; needs a separate process.

    python -m support.launches [--small | MODEL ...]

Each operation that torch would hand to a device is a launch: views, allocations, empty tensors and copies between host
and device are none. `scaled_dot_product_attention` counts as one in each direction, as with CUDA's fused kernels. It
prints a JSON line per model; with ``--small`` the counts of small models with few and with many documents.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from support import accelerator
from support.accelerator.ghost import GPTJ_6B, forget_tensors
from support.accelerator.simulation import Operation, now
from torch.overrides import TorchFunctionMode

BERT_BASE = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "type_vocab_size": 2, "pad_token_id": 0,
}  # fmt: skip
GEMMA_2 = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0, "tie_word_embeddings": True,
}  # fmt: skip
LENGTHS = tuple(12 + 37 * row % 117 for row in range(32))  # 12 to 128 tokens
MICRO_BATCH_TOKENS = 2048
CHUNKS_AT_ONCE = 4  # of an update, as plans for an accelerator choose
ALLOCATIONS = ("aten::empty", "aten::new_empty")


@dataclass(frozen=True)
class Counted:
    """A model whose step is counted."""

    family: str
    shape: Mapping[str, Any]  # fields of its config.json
    dtype: torch.dtype
    is_classifier: bool = False
    method: str = "full"


MODELS = {
    "GPT-J 6B, bf16": Counted("gptj", GPTJ_6B, torch.bfloat16),
    "GPT-J 6B, fp32": Counted("gptj", GPTJ_6B, torch.float32),
    "Gemma 2 2B, bf16": Counted("gemma2", GEMMA_2, torch.bfloat16),
    "BERT-base with dropout, bf16": Counted("bert", BERT_BASE, torch.bfloat16, is_classifier=True),
    "BERT-base with dropout, fp32": Counted("bert", BERT_BASE, torch.float32, is_classifier=True),
    "SmolLM2 135M, fp32": Counted("llama", SMOLLM2, torch.float32),
    "SmolLM2 135M with LoRA, fp32": Counted("llama", SMOLLM2, torch.float32, method="lora"),
}

SMALL = {
    "gptj": {"vocab_size": 61, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4},
    "gemma2": {
        **GEMMA_2, "vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    },
    "bert": {**BERT_BASE, "vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2},
}  # fmt: skip
SMALL_CASES = ("gptj fp32", "gemma2 bf16", "bert bf16")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _Fused(torch.autograd.Function):
    """Imitate a device's fused attention by one operation in each direction."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        _launch("attention")
        return torch.empty_like(query)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _launch("attention backward")
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def _launch(label: str) -> None:
    made = Operation(label)
    made.num_bytes = 1
    now().stream().put(made)


class _Replaced(TorchFunctionMode):
    """Replace fused attention, and count draws that the simulated device leaves to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _Fused.apply(*args[:3])  # type: ignore[no-untyped-call]
        if func is torch.Tensor.random_:
            _launch("random_")
        return func(*args, **(kwargs or {}))


def count_step(model: Counted, lengths: Sequence[int] = LENGTHS, budget_tokens: int = MICRO_BATCH_TOKENS) -> Any:
    """Return the launches of a step: in forward with the head, in backward, and in updates; the most frequent ones.

    Everything is on the device. Adam's moments, master weights and gradients are fp32.
    """
    accelerator.install()
    simulation = accelerator.start("eager", ghost=True, total_bytes=1 << 50)
    from gptj_ft.config.resolve import build
    from gptj_ft.data.batches import micro_batches
    from gptj_ft.models.batch import Marks
    from gptj_ft.models.layout import FROZEN
    from gptj_ft.models.registry import Architecture, families
    from gptj_ft.models.trainable import select
    from gptj_ft.streaming import step as step_module
    from gptj_ft.streaming.activations import boundary_layout
    from gptj_ft.streaming.adamw import AdamW
    from gptj_ft.streaming.buffers import BufferBudget
    from gptj_ft.streaming.open import open_for_training
    from gptj_ft.streaming.stores.placement import Placement, memory_store, training_dtypes
    from gptj_ft.training.restore import optimizer_config

    forget_tensors()
    recipe, device, kind = build({"method": model.method}), torch.device(accelerator.NAME, 0), families()[model.family]
    task, labels = ("classification", ("0", "1")) if model.is_classifier else (None, ())
    architecture = Architecture(kind, kind.read_config(dict(model.shape)), dict(model.shape), task, labels)  # type: ignore[arg-type]
    rows = [[1 + place % 100 for place in range(length)] for length in lengths]
    marks = [Marks(marks=(0,), targets=(row % 2,)) for row in range(len(rows))] if model.is_classifier else None
    boundary = boundary_layout(sum(lengths), architecture.config.n_embd, len(rows))
    phases = {"backward": list[tuple[int, int]](), "update": list[tuple[int, int]]()}

    def noted(phase: str, work: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = len(simulation.trace or ())
            result = work(*args, **kwargs)
            phases[phase].append((start, len(simulation.trace or ())))
            return result

        return run

    with ExitStack() as context:
        context.enter_context(torch.autograd.set_multithreading_enabled(False))
        context.enter_context(_Replaced())
        context.enter_context(patch.object(step_module, "backward", noted("backward", step_module.backward)))
        context.enter_context(patch.object(AdamW, "apply", noted("update", AdamW.apply)))
        dtypes = training_dtypes(model.dtype, torch.float32, torch.float32)
        budget = BufferBudget(chunks_at_once=CHUNKS_AT_ONCE)
        opened = open_for_training(
            architecture, Placement("device", "device"), dtypes, device, Path("none"), budget, True, boundary,
            select(architecture, recipe),
        )  # fmt: skip
        if model.method == "lora":
            opened.stores[FROZEN] = memory_store("device", opened.frozen, {FROZEN: model.dtype}, device)
        optimizer = AdamW(opened, optimizer_config(recipe), step=1)
        seeds = range(len(rows)) if any(getattr(architecture.config, name) for name in names_of(kind)) else None
        packed = micro_batches(rows, [1] * len(rows), budget_tokens, marks=marks, seeds=seeds)
        for _ in range(2):  # the second one applies the first one's update
            for found in phases.values():
                found.clear()
            simulation.trace = []
            batches = [batch.to(device) for batch in packed]
            optimizer.begin_step(1e-5)
            step_module.train_step(opened, optimizer, batches)
            optimizer.finish_step()
        recorded, simulation.trace = simulation.trace, None
        opened.close()
    return summary(recorded, phases, len(packed))


def names_of(family: Any) -> tuple[str, ...]:
    """Return the fields of a family's config that are rates of dropout."""
    return tuple(name for names in family.dropouts for name in names)


def summary(recorded: Sequence[Any], phases: Mapping[str, Sequence[tuple[int, int]]], num_batches: int) -> Any:
    """Count the launches among recorded actions, by phase and by operation."""
    counts, labels, copies = Counter[str](), Counter[str](), 0
    for place, (_, action, what) in enumerate(recorded):
        if action != "put" or what.kind in ("wait", "record", "sleep"):
            continue
        if what.kind != "op":
            copies += 1
        elif what.num_bytes and not what.label.startswith(ALLOCATIONS):
            counts[phase_of(place, phases)] += 1
            labels[what.label] += 1
    return {
        "micro_batches": num_batches, "launches": sum(counts.values()), **counts, "copies": copies,
        "labels": dict(labels.most_common()),
    }  # fmt: skip


def phase_of(place: int, phases: Mapping[str, Sequence[tuple[int, int]]]) -> str:
    inside = [name for name, found in phases.items() if any(start <= place < end for start, end in found)]
    return inside[-1] if inside else "forward"


def count_small(family: str, dtype: str) -> list[Any]:
    """Count the launches of a small model for 4 and for 16 documents with padding, 48 tokens in all."""
    model = Counted(family, SMALL[family], DTYPES[dtype], is_classifier=family == "bert")
    return [count_step(model, (48 // number,) * number) for number in (4, 16)]


@contextmanager
def separate_process() -> Iterator[None]:
    """Set up the process, and end it without waiting for the simulated device's threads."""
    torch.set_num_threads(1)
    accelerator.install()
    yield
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    with separate_process():
        if sys.argv[1:] == ["--small"]:
            for name in SMALL_CASES:
                print(json.dumps({"model": name, "counts": count_small(*name.split())}), flush=True)
        else:
            for name in sys.argv[1:] or MODELS:
                print(json.dumps({"model": name, **count_step(MODELS[name])}), flush=True)
