"""Define the work that all compared trainers share: one model, one list of steps, one loss.

A process that cannot import `gptj_ft` reads it too: nothing here needs more than torch and `transformers`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTJConfig, GPTJForCausalLM

if TYPE_CHECKING:
    from peft import PeftModel

    from gptj_ft.config.run_folder import Run

NO_TARGET = -100
RANK, ALPHA, ADAPTER_SEED = 16, 32, 0
# 203,992,288 parameters.
SHAPE = {"vocab_size": 50400, "n_positions": 1024, "n_embd": 1024, "n_layer": 8, "n_head": 16, "rotary_dim": 32}
# Depths and widths, under the names of GPT-2's models of these sizes.
GPT2_SHAPES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"n_layer": 4, "n_embd": 128, "n_head": 4},
    "124M": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "350M": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
    "760M": {"n_layer": 24, "n_embd": 1536, "n_head": 16},
    "1.0B": {"n_layer": 18, "n_embd": 2048, "n_head": 16},
    "1.3B": {"n_layer": 24, "n_embd": 2048, "n_head": 16},
}
GPT2_PLAIN = {
    "model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "activation_function": "gelu", "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
# Configs of released models; their weights are random here.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    **{name: {**GPT2_PLAIN, **shape} for name, shape in GPT2_SHAPES.items()},
    "SmolLM2-135M": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """The rows and the learning rate of one optimizer step.

    Attributes:
        lr: learning rate.
        documents: token ids of each row, EOS included; of windows that hold several documents, of each of these.
        prompt_lengths: tokens at each row's start that are not trained on, at least 1.
    """

    lr: float
    documents: list[list[int]]
    prompt_lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.documents))

    @property
    def num_padded(self) -> int:
        """Number of tokens if every row is padded to the longest."""
        return len(self.documents) * max(map(len, self.documents))

    @property
    def num_targets(self) -> int:
        return self.num_tokens - sum(self.prompt_lengths)

    def rows(self) -> list[Step]:
        """Return its rows one by one."""
        return [Step(self.lr, [row], [prompt]) for row, prompt in zip(self.documents, self.prompt_lengths, strict=True)]


@dataclass(frozen=True)
class Work:
    """The steps of a `gptj-ft` run and its optimizer's settings."""

    steps: list[Step]
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float

    @classmethod
    def of(cls, run: Run) -> Work:
        """Read the work from the folder of a run with ``max_steps``."""
        from gptj_ft.data.batches import Rows, rows_of_step
        from gptj_ft.data.dataset import load_dataset
        from gptj_ft.training.schedule import Schedule

        recipe = run.recipe()
        rows = Rows.of(load_dataset(run.data / "train").rows, recipe.packing, recipe.max_length)
        assert recipe.max_steps is not None
        schedule, steps = Schedule.of(recipe, recipe.max_steps), []
        for step in range(recipe.max_steps):
            chosen = rows_of_step(step, len(rows), recipe.batch_size, recipe.seed)
            documents = [document for row in chosen for document in rows.row(row)]
            prompts = [max(document.prompt_length, 1) for document in documents]
            steps.append(Step(schedule.lr(step + 1), [list(document.ids) for document in documents], prompts))
        return cls(steps, recipe.betas, recipe.eps, recipe.weight_decay, recipe.clip_norm or float("inf"))

    def save(self, path: Path) -> None:
        """Write it for another process."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Work:
        """Read what `save` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "steps": [Step(**step) for step in values["steps"]]})

    def write_losses(self, losses: Iterable[float], path: Path) -> None:
        """Write a line per step, as soon as its loss is there, with the keys of `gptj-ft`'s metrics."""
        with path.open("w", encoding="utf-8", buffering=1) as lines:
            for number, (step, loss) in enumerate(zip(self.steps, losses, strict=True), start=1):
                line = {"step": number, "loss": loss, "tokens": step.num_tokens, "target_tokens": step.num_targets}
                lines.write(json.dumps(line) + "\n")


def shape_of(width: int) -> Mapping[str, int]:
    """Return the benchmarks' model shape with another width."""
    return {**SHAPE, "n_embd": width, "rotary_dim": min(SHAPE["rotary_dim"], width // SHAPE["n_head"])}


def make_model(folder: Path, tokenizer: Path, shape: Mapping[str, int] = SHAPE) -> None:
    """Write a random GPT-J with GPT-2's tokenizer (a folder with vocab.json and merges.txt)."""
    torch.manual_seed(0)
    config = GPTJConfig(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    GPTJForCausalLM(config).save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(tokenizer / name, folder / name)


def open_model(folder: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Any:
    """Open a model for training; `transformers` has no other attention than "eager" for GPT-J on a CPU."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).train()


def adapter_options(targets: Sequence[str], seed: int = ADAPTER_SEED) -> tuple[str, ...]:
    """Return the options of `gptj-ft finetune` for the adapters of `with_adapters`."""
    values = {"method": "lora", "lora.rank": RANK, "lora.alpha": ALPHA, "lora.targets": f"[{','.join(targets)}]"}
    return tuple(f"{key}={value}" for key, value in {**values, "seed": seed, "optimizer_state": "auto"}.items())


def with_adapters(model: Any, targets: Sequence[str], seed: int = ADAPTER_SEED) -> PeftModel:
    """Add PEFT adapters to a `transformers` model, with `gptj-ft`'s initial values.

    Args:
        model: model; its layers are changed in place.
        targets: names of the linear layers of a block that get one.
    """
    from peft import LoraConfig, get_peft_model

    from gptj_ft.models.lora import initialise

    adapted = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets)))
    for name, parameter in adapted.named_parameters():
        if found := re.search(r"\.(?:h|layers)\.(\d+)\.(.+\.lora_[AB])\.", name):
            initialise(found[2], parameter.data, (seed, int(found[1]) + 1))
    return adapted.train()


def pad(documents: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad rows on the right to the longest of them.

    Returns: token ids, attention mask, and at each position the token to predict there or `NO_TARGET`; all [B, L].
    """
    width = max(map(len, documents))
    ids, mask = (torch.zeros(len(documents), width, dtype=torch.int64) for _ in range(2))
    targets = torch.full((len(documents), width), NO_TARGET)
    for i, (document, prompt) in enumerate(zip(documents, prompt_lengths, strict=True)):
        tokens = torch.tensor(document)
        ids[i, : len(tokens)], mask[i, : len(tokens)] = tokens, 1
        targets[i, prompt - 1 : len(tokens) - 1] = tokens[prompt:]
    return ids, mask, targets


def _padded(model: Any, step: Step) -> tuple[Tensor, ...]:
    """Return the padded rows of a step on the model's device."""
    return tuple(each.to(getattr(model, "device", "cpu")) for each in pad(step.documents, step.prompt_lengths))


def loss_of_all_positions(model: Callable[..., Any], step: Step) -> Tensor:
    """Return the mean loss over a step's targets, from logits at every position, as ``model(labels=...)`` does.

    The targets are shifted and not the logits: in fp32 there is no copy of a [tokens, vocabulary] tensor.
    """
    ids, mask, targets = _padded(model, step)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=NO_TARGET)


def loss_of_targets(model: Any, step: Step) -> Tensor:
    """Return the mean loss over a step's targets; the head runs on their positions only.

    Args:
        model: decoder of `transformers` whose logits are the output embeddings' product, without caps or factors.
        step: rows of a step.
    """
    ids, mask, targets = _padded(model, step)
    hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    chosen = targets != NO_TARGET
    return F.cross_entropy(model.get_output_embeddings()(hidden[chosen]).float(), targets[chosen])


LOSSES: Mapping[str, Callable[[Any, Step], Tensor]] = {"targets": loss_of_targets, "all": loss_of_all_positions}


Clip = Callable[[Iterable[torch.nn.Parameter], float], Any]
"""Clips the gradients of parameters to a norm."""


def clip_exactly(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> None:
    """Clip as `torch.nn.utils.clip_grad_norm_`, by a norm in fp64.

    On a CPU torch's norm in fp32 of 28 million elements is 0.2 % too small: after 50 steps the losses have parted.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt().float()
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def take_steps(
    model: torch.nn.Module,
    work: Work,
    add_gradients: Callable[[Step], float],
    clip: Clip = torch.nn.utils.clip_grad_norm_,
) -> Iterator[float]:
    """Train with a plain loop, fused AdamW and clipping; yield the loss of each step.

    Args:
        model: model; what of it needs no gradient is not trained.
        work: steps and settings.
        add_gradients: adds the gradients of the mean loss of a step, and returns that loss.
    """
    groups = decay_groups(model, work.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=work.betas, eps=work.eps, fused=True)
    for step in work.steps:
        for group in optimizer.param_groups:
            group["lr"] = step.lr
        loss = add_gradients(step)
        clip(model.parameters(), work.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters as `torch.optim` takes them; biases and norms are not decayed."""
    # DeepSpeed leaves an empty tensor in a parameter's place and its shape in ds_shape.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dims = {parameter: len(getattr(parameter, "ds_shape", parameter.shape)) for parameter in trained}
    groups = [
        {"params": [p for p, dim in dims.items() if dim > 1], "weight_decay": weight_decay},
        {"params": [p for p, dim in dims.items() if dim == 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
