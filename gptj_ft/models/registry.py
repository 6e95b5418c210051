"""Describe model families, one module each; `architecture_of` finds the family of a ``config.json``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gptj_ft.config.options import Task
from gptj_ft.errors import DataError, UsageError, listed
from gptj_ft.models.gguf_form import GgufForm
from gptj_ft.models.layout import TIED_SOURCE_LAYER, Layout
from gptj_ft.models.supported import MOST_LABELS, check_supported

PROBLEM_TYPES: Mapping[Task, str] = {  # names in `transformers` of tasks that share a head
    "classification": "single_label_classification",
    "multi-label": "multi_label_classification",
    "regression": "regression",
}
LABEL_KEYS = ("id2label", "label2id", "problem_type")
NAMES_SHOWN = 4  # tensors named in a note
# Position of a checkpoint's tensor: ("embed" | "block" | "head", name inside that layer).
Home = tuple[str, str]
MOST_LAYERS = 10_000  # ten times the deepest published model


@dataclass(frozen=True)
class Leaf:
    """A tensor that other systems store in parts: shards of mesh-transformer-jax; q, k and v of Cerebras."""

    name: str  # Hugging Face's, ``{}`` for the block number
    join: Literal["rows", "columns", "sum", "first", "added"]
    """How to join the parts in Hugging Face's layout: concatenate along the first axis (``rows``) or the second
    (``columns``), ``sum`` them, or use the ``first`` shard's. ``added``: sum them, and add the sum to every row of the
    tensor.
    """
    is_transposed: bool = False  # whether each part has its axes swapped


@dataclass(frozen=True)
class HeadForm:
    """A head that can replace the family's pre-training head."""

    class_name: str  # class of `transformers` with this head
    build: Callable[[Any, int], nn.Module]  # (config, outputs) -> head on the ``meta`` device
    output: str  # submodule that computes the outputs; re-initialised for other labels
    kept: tuple[str, ...]  # parameters that a pre-trained model must have; others may be missing
    tasks: tuple[Task, ...]
    initialise: Callable[[nn.Module, str, Tensor, torch.Generator], None] | None = None
    """Initialises a parameter by name; None: matrices normal as in the config, biases zero."""
    dropouts: tuple[str, ...] = ()  # config fields of dropout rates that only this head uses
    prefix: str | None = None  # in files of this class, in place of `Family.prefix`; None: the same


@dataclass(frozen=True)
class Family:
    """A model family."""

    model_type: str  # in Hugging Face's config.json
    class_name: str  # class of `transformers` with the pre-training head
    read_config: Callable[[Mapping[str, Any]], Any]  # parses config.json; rejects unsupported values
    build_layers: Callable[[Any], list[nn.Module]]  # ``Embed``, blocks, ``Head``, on the ``meta`` device
    keys: Mapping[str, Home | None]
    """Hugging Face's tensor name -> position; ``{}`` stands for the block number, None means dropped on purpose."""
    mesh: Mapping[tuple[str, str], Leaf] = field(default_factory=dict)
    """mesh-transformer-jax's (module, parameter) -> tensor; empty if it has no such model."""
    cerebras: Mapping[str, str | Leaf | None] = field(default_factory=dict)
    """Cerebras' name -> Hugging Face's, in the order in which the parameters were created; None means dropped."""
    residual_outputs: tuple[str, ...] = ()
    """Ends of the names of projections into the residual stream whose random initial weights have a standard deviation
    divided by sqrt(2 * layers).
    """
    heads: tuple[HeadForm, ...] = ()  # heads other than the pre-training head
    prefix: str = "transformer."  # of all names outside the head; missing in files saved without the head
    trunk: frozenset[str] = frozenset({"wte", "wpe", "h", "ln_f"})  # first parts of names after the prefix
    aliases: Mapping[str, str] = field(default_factory=dict)  # endings of names in old files -> current endings
    dropouts: tuple[tuple[str, ...], tuple[str, ...]] = (("resid_pdrop", "embd_pdrop"), ("attn_pdrop",))
    """Config fields of dropout rates: of hidden states, and of attention weights."""
    is_encoder: bool = False  # bidirectional attention; cannot generate
    optional: frozenset[str] = frozenset()  # tensors of the pre-training head that files may lack
    gguf: GgufForm | None = None  # None: llama.cpp has no graph of this family

    @property
    def rates(self) -> frozenset[str]:
        """Config fields of all dropout rates, of the heads too."""
        return frozenset().union(*self.dropouts, *(head.dropouts for head in self.heads))

    def full_name(self, name: str) -> str:
        """Return a tensor's full name, given its name in any file format."""
        for old, new in self.aliases.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        for other in {head.prefix for head in self.heads if head.prefix}:
            own = name.removeprefix(other)
            name = own if own.partition(".")[0] in self.trunk else name
        return self.prefix + name if name.partition(".")[0] in self.trunk else name

    def head_for(self, task: Task) -> HeadForm | None:
        """Return the head of a task; ``None``: the pre-training head."""
        if task == "language-model" and not self.is_encoder:
            return None
        head = next((head for head in self.heads if task in head.tasks), None)
        if head is None:
            known = dict.fromkeys(task for head in self.heads for task in head.tasks)
            raise UsageError(
                f"a {self.model_type} model cannot be trained for task '{task}'; possible tasks: {', '.join(known)}"
            )
        return head

    def locate(self, name: str, num_layers: int) -> tuple[int, str] | None:
        """Return (layer, name inside it) of a checkpoint's tensor; ``None`` if it is dropped on purpose.

        Args:
            name: Hugging Face's name, e.g. ``transformer.h.3.mlp.fc_in.weight``.
            num_layers: all layers, embedding and head included.

        Raises:
            KeyError: the family has no such tensor.
        """
        number = None if name in self.keys else re.search(r"\.(\d+)\.", name)  # heads may have numbered parts too
        home = self.keys[name.replace(number[0], ".{}.", 1) if number else name]
        if home is None:
            return None
        part, local = home
        # Layer 0 is the embedding, so block n is layer n + 1.
        index = {"embed": 0, "head": num_layers - 1}.get(part) if part != "block" else int(number[1]) + 1  # type: ignore[index]
        if index is None or (part == "block" and index >= num_layers - 1):
            raise KeyError(name)
        return index, local

    def name_of(self, layer: int, local: str, num_layers: int) -> str:
        """Return Hugging Face's name of a layer's tensor; the inverse of `locate`."""
        part = "embed" if layer == 0 else "head" if layer == num_layers - 1 else "block"
        return self._names[part, local].format(layer - 1)

    @cached_property
    def _names(self) -> dict[Home, str]:
        return {home: name for name, home in self.keys.items() if home is not None}


@dataclass(frozen=True)
class Architecture:
    """A family with one model's config and head, from ``config.json``."""

    family: Family
    config: Any  # of the family
    raw: Mapping[str, Any]  # content of config.json
    task: Task | None = None  # task of the head; None: pre-training head
    labels: tuple[str, ...] = ()  # class names, in the order of the outputs
    new: frozenset[str] = frozenset()  # tensors that the folder lacks, or has for other labels: initialised randomly
    left_out: tuple[str, ...] = ()  # tensors in the folder that belong to another head

    def layers(self) -> list[nn.Module]:
        """Build the layers on the ``meta`` device, in streaming order."""
        layers = self.family.build_layers(self.config)
        if self.head is not None:
            with torch.device("meta"):
                layers[-1] = self.head.build(self.config, self.num_outputs)
        return layers

    @cached_property
    def skeleton(self) -> tuple[nn.Module, ...]:
        """The layers on the ``meta`` device, read-only; to run or change layers, use `layers`."""
        return tuple(self.layers())

    @property
    def key_width(self) -> int:
        """Width of a token's keys, and of its values, in a block; a config without grouped heads has a key per head."""
        config = self.config
        width = getattr(config, "head_dim", config.n_embd // config.n_head)
        return int(getattr(config, "num_key_value_heads", config.n_head) * width)

    @property
    def rotary_switches(self) -> frozenset[int]:
        """Lengths of a row above which LongRoPE rotates all of its tokens by other angles."""
        rotaries = getattr(self.config, "rotaries", None) or (getattr(self.config, "rotary", None),)
        return frozenset(each.trained_length for each in rotaries if each is not None and each.kind == "longrope")

    @property
    def head(self) -> HeadForm | None:
        """The head that replaces the pre-training head, if any."""
        return None if self.task is None else self.family.head_for(self.task)

    def file_name(self, name: str) -> str:
        """Return the name of a tensor in files of the model's class, given Hugging Face's usual name."""
        prefix = self.family.prefix
        if self.head is None or self.head.prefix is None or not name.startswith(prefix):
            return name
        return self.head.prefix + name.removeprefix(prefix)

    @property
    def trained_whole(self) -> frozenset[str]:
        """Tensors trained in full beside adapters, as in PEFT: new ones, and the outputs of a head."""
        if self.head is None:
            return self.new
        layers, name_of = self.skeleton, self.family.name_of
        names = {local: name_of(len(layers) - 1, local, len(layers)) for local in layers[-1].state_dict()}
        outputs = {name for local, name in names.items() if local.startswith(f"{self.head.output}.")}
        return self.new | outputs

    @property
    def num_outputs(self) -> int:
        """Outputs of the head per row."""
        return {"spans": 2}.get(self.task or "", 1) if not self.labels else len(self.labels)

    @property
    def class_name(self) -> str:
        """Class of `transformers` that opens the model."""
        return self.head.class_name if self.head else self.family.class_name

    def with_head(self, task: Task, labels: Sequence[str] = ()) -> Architecture:
        """Return the model with the head of a task; the caller sets `new`, as only it knows the files."""
        head = self.family.head_for(task)
        if head is None:
            return self if self.task is None else replace(self, task=None, labels=(), raw=self.raw)
        raw = {key: value for key, value in self.raw.items() if key not in ("num_labels", *LABEL_KEYS)}
        if labels:
            raw["id2label"] = {str(number): name for number, name in enumerate(labels)}
            raw["label2id"] = {name: number for number, name in enumerate(labels)}
        elif task == "regression":
            raw |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
        if task in PROBLEM_TYPES:
            raw["problem_type"] = PROBLEM_TYPES[task]
        if not self.family.is_encoder and raw.get("pad_token_id") is None:
            ends = getattr(self.config, "eos_token_id", None)
            # `transformers` finds the last token by it.
            raw["pad_token_id"] = ends[0] if isinstance(ends, list) and ends else ends
        # Not read again: `with_dropout` may have changed it.
        config = self.config
        if not self.family.is_encoder and hasattr(config, "pad_token_id"):
            config = replace(config, pad_token_id=raw.get("pad_token_id"))
        return replace(self, config=config, raw=raw, task=task, labels=tuple(labels))

    def with_dropout(self, hidden: float | None, attention: float | None) -> Architecture:
        """Return the model with other dropout rates; ``None`` keeps a rate, but attention follows a hidden rate of
        0.
        """
        if hidden and not self._rates[0]:
            raise UsageError(
                f"dropout {hidden}: a {self.family.model_type} model drops no hidden states; leave it out, or "
                "--set attention_dropout"
            )
        attention = 0.0 if attention is None and hidden == 0.0 else attention
        rates = {
            name: rate
            for names, rate in zip(self._rates, (hidden, attention), strict=True)
            for name in names
            if rate is not None
        }
        return replace(self, config=replace(self.config, **rates)) if rates else self

    @property
    def _rates(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Config fields of the model's dropout rates: of hidden states, and of attention weights."""
        hidden, attention = self.family.dropouts
        return (*hidden, *(self.head.dropouts if self.head else ())), attention

    @property
    def dropout(self) -> dict[str, float]:
        """The non-zero dropout rates, by their names in ``config.json``."""
        rates = {name: getattr(self.config, name) for names in self._rates for name in names}
        return {name: rate for name, rate in rates.items() if rate}

    @property
    def drops_attention(self) -> bool:
        """Whether training drops attention weights."""
        return any(getattr(self.config, name) for name in self.family.dropouts[1])

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on this model."""
        notes = []
        if self.new:
            notes.append(f"initialised randomly, missing in the model: {listed(sorted(self.new), NAMES_SHOWN)}")
        if self.left_out:
            notes.append(f"ignored tensors of another head: {listed(self.left_out, NAMES_SHOWN)}")
        if self.dropout:
            named = ", ".join(f"{name} {rate}" for name, rate in self.dropout.items())
            notes.append(f"trained with dropout, as config.json says ({named}); --set dropout=0 turns it off")
        return tuple(notes)

    def ties(self) -> dict[str, str]:
        """Map each tied tensor to its source, e.g. a tied head to the embedding."""
        layers, name_of = self.skeleton, self.family.name_of
        return {
            name_of(index, local, len(layers)): name_of(TIED_SOURCE_LAYER, tie.source, len(layers))
            for index, layer in enumerate(layers)
            for local, tie in Layout.of(layer).tied.items()
        }


DECODER_SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "d_inner")


def check_numbers(config: Any, sizes: Sequence[str] = DECODER_SIZES, epsilon: str = "layer_norm_epsilon") -> None:
    """Reject numbers in a config that no model has: they could exhaust memory, or fail anywhere."""
    for name in sizes:
        value = getattr(config, name)
        most = MOST_LAYERS if name in ("n_layer", "num_hidden_layers") else 2**31
        if type(value) is not int or not 1 <= value <= most:
            name = "n_inner" if name == "d_inner" else name
            raise DataError(f"{name} must be a positive integer of plausible size, not {value!r}")
    value = getattr(config, epsilon)
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise DataError(f"{epsilon} must be a number from 0 to 1, not {value!r}")


def full_name(name: str, family: Family | None = None) -> str:
    """Return a tensor's full name, given its name in any file format; without a family, try all families."""
    if family is not None:
        return family.full_name(name)
    # BERT and RoBERTa share the names of a bare trunk. Without a family, BERT's prefix wins.
    return next((full for each in families().values() if (full := each.full_name(name)) != name), name)


def families() -> dict[str, Family]:
    """Return the supported families by ``model_type``."""
    from gptj_ft.models import bert, gemma, gpt2, gpt_neox, gptj, llama, roberta

    known = (
        gptj.FAMILY,
        gpt2.FAMILY,
        gpt_neox.FAMILY,
        *llama.FAMILIES,
        *gemma.FAMILIES,
        bert.FAMILY,
        roberta.ROBERTA,
        roberta.XLM_ROBERTA,
    )
    return {family.model_type: family for family in known}


def architecture_of(raw: Mapping[str, Any], path: Path) -> Architecture:
    """Return the architecture that a config describes.

    Args:
        raw: content of ``config.json``.
        path: its file, for messages.
    """
    check_supported(path, raw)
    raw = {key: value for key, value in raw.items() if key != "quantization_config"}  # a fact of the files
    family = families()[raw["model_type"]]
    for name in ("dtype", "torch_dtype"):  # `transformers` uses them unchecked
        if raw.get(name) is not None and not isinstance(getattr(torch, str(raw[name]), None), torch.dtype):
            raise DataError(f"{path}: {name} {raw[name]!r} is not a data type")
    try:
        if not family.is_encoder and not raw.get("is_causal", True):
            raise DataError(f"is_causal {raw['is_causal']!r} is not supported: this model sees tokens on both sides")
        architecture = Architecture(family, family.read_config(raw), raw, *_head_of(family, raw))
        _check_rates_and_ids(architecture)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return architecture


def _check_rates_and_ids(architecture: Architecture) -> None:
    """Check the fields that every family has: dropout rates, and the ids of special tokens."""
    for name in sorted(architecture.family.rates):
        rate = getattr(architecture.config, name)
        if rate is not None and not (type(rate) in (int, float) and 0 <= rate < 1):
            raise DataError(f"{name} must be a number from 0 to below 1, not {rate!r}")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = architecture.raw.get(name)
        ids = value if isinstance(value, list) else [value]
        if any(number is not None and type(number) is not int for number in ids):
            raise DataError(f"{name} must be a token id or a list of them, not {value!r:.100}")


def _head_of(family: Family, raw: Mapping[str, Any]) -> tuple[Task | None, tuple[str, ...]]:
    """Return task and labels of a config's head; ``None`` for the pre-training head."""
    named = raw.get("architectures")
    class_name = named[0] if isinstance(named, list) and named else None
    head = next((head for head in family.heads if head.class_name == class_name), None)
    if head is None:
        return None, ()
    task = head.tasks[0]
    names = raw.get("id2label")
    if names is None and task != "spans":
        count = raw.get("num_labels", 2)
        names = {str(number): f"LABEL_{number}" for number in range(count if type(count) is int else 0)}
    # One class serves three tasks: problem_type distinguishes them, as in `transformers`.
    if len(head.tasks) > 1:
        by_type = {value: key for key, value in PROBLEM_TYPES.items()}
        default = "regression" if isinstance(names, dict) and len(names) == 1 else task
        task = by_type.get(str(raw.get("problem_type")), default)
    if task in ("spans", "sentences", "regression"):
        return task, ()
    numbers = [str(number) for number in range(len(names) if isinstance(names, dict) else 0)]
    if not numbers or len(numbers) > MOST_LABELS or set(numbers) != {str(key) for key in names}:  # type: ignore[union-attr]
        raise DataError(f"id2label must name every label id, consecutively from 0, not {names!r:.200}")
    by_number = {str(key): str(value) for key, value in names.items()}  # type: ignore[union-attr]
    return task, tuple(by_number[number] for number in numbers)
