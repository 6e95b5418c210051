"""Describe model families, one module for each; `architecture_of` finds the one of a ``config.json``."""

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
from gptj_ft.models.layout import TIED_SOURCE_LAYER, Layout
from gptj_ft.models.supported import MOST_LABELS, unsupported_family

PROBLEM_TYPES: Mapping[Task, str] = {  # what `transformers` calls tasks that share a head
    "classification": "single_label_classification",
    "multi-label": "multi_label_classification",
    "regression": "regression",
}
LABEL_KEYS = ("id2label", "label2id", "problem_type")
NAMES_SHOWN = 4  # of tensors, in a note
# Where a tensor of a checkpoint belongs: ("embed" | "block" | "head", name inside that layer).
Home = tuple[str, str]
LARGEST_FIELDS = {"n_layer": 10_000}  # ten times what anybody has trained; making so many takes seconds


@dataclass(frozen=True)
class Leaf:
    """A tensor that another system's checkpoint has in parts: mesh-transformer-jax's shards, Cerebras' q, k and v.

    Attributes:
        name: Hugging Face's, ``{}`` for the number of the block.
        join: way from the parts to the tensor, as Hugging Face has it: one after the other along the first axis
            (``rows``) or the second (``columns``), ``sum``, or ``first``: that of shard 0 counts. ``added``: summed,
            and the sum added to every row of the tensor.
        is_transposed: whether each part has its axes the other way round.
    """

    name: str
    join: Literal["rows", "columns", "sum", "first", "added"]
    is_transposed: bool = False


@dataclass(frozen=True)
class HeadForm:
    """A head that a family can have in the place of the one that it was pre-trained with.

    Attributes:
        class_name: name of the class of `transformers` that has it, for ``architectures`` in ``config.json``.
        build: config, outputs of the head -> its module, on the ``meta`` device.
        output: the module in it that gives the outputs: new wherever the labels are others.
        kept: its parameters that a pre-trained model must have; what else is missing there begins as new.
        tasks: tasks that it can be trained for.
        initialise: gives the parameter of that name in the head its first random values, by a generator; ``None``:
            matrices normal, as the config says, biases zero.
    """

    class_name: str
    build: Callable[[Any, int], nn.Module]
    output: str
    kept: tuple[str, ...]
    tasks: tuple[Task, ...]
    initialise: Callable[[nn.Module, str, Tensor, torch.Generator], None] | None = None


@dataclass(frozen=True)
class Family:
    """An architecture.

    Attributes:
        model_type: Hugging Face's name for it.
        class_name: name of `transformers`' class of the model as it was pre-trained, for ``architectures`` in
            ``config.json``.
        read_config: ``config.json`` as a dictionary -> the family's config; refuses what would compute something else.
        build_layers: config -> the layers, ``Embed``, the blocks, ``Head``, on the ``meta`` device.
        keys: Hugging Face's tensor name -> its home; ``{}`` stands for the block number; ``None`` is dropped on
            purpose.
        mesh: mesh-transformer-jax's (module, parameter) -> tensor; empty where that has no such model.
        cerebras: name in a Cerebras checkpoint -> Hugging Face's, with what makes several one if it is made of them,
            in the order of the table, which is that in which the parameters were made; ``None`` is dropped on purpose.
        lora_targets: the linear layers that get adapters unless others are named: by the ends of their names.
        heads: the other heads that it can have.
        prefix: beginning of all names but the head's; files of a model that was saved without its head lack it.
        trunk: first parts of the names after the prefix.
        aliases: endings of names in old files -> those of today.
        dropouts: fields of its config that are rates of dropout: of hidden states, and of attention's weights.
        is_encoder: whether each token sees those after it, so that nothing can be generated.
        optional: tensors of the head of pre-training that files of a pre-trained model may lack.
    """

    model_type: str
    class_name: str
    read_config: Callable[[Mapping[str, Any]], Any]
    build_layers: Callable[[Any], list[nn.Module]]
    keys: Mapping[str, Home | None]
    mesh: Mapping[tuple[str, str], Leaf] = field(default_factory=dict)
    cerebras: Mapping[str, str | Leaf | None] = field(default_factory=dict)
    lora_targets: tuple[str, ...] = ()
    heads: tuple[HeadForm, ...] = ()
    prefix: str = "transformer."
    trunk: frozenset[str] = frozenset({"wte", "wpe", "h", "ln_f"})
    aliases: Mapping[str, str] = field(default_factory=dict)
    dropouts: tuple[tuple[str, ...], tuple[str, ...]] = (("resid_pdrop", "embd_pdrop"), ("attn_pdrop",))
    is_encoder: bool = False
    optional: frozenset[str] = frozenset()

    def full_name(self, name: str) -> str:
        """Return a tensor's name in a whole model, given that in a file of whichever form."""
        for old, new in self.aliases.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        return self.prefix + name if name.partition(".")[0] in self.trunk else name

    def head_for(self, task: Task) -> HeadForm | None:
        """Return the head of a task; ``None``: the one that the family was pre-trained with.

        Raises:
            UsageError: the family has none.
        """
        if task == "language-model" and not self.is_encoder:
            return None
        found = next((head for head in self.heads if task in head.tasks), None)
        if found is None:
            known = dict.fromkeys(task for head in self.heads for task in head.tasks)
            raise UsageError(
                f"a {self.model_type} model cannot be trained for task '{task}'; it can for: {', '.join(known)}"
            )
        return found

    def locate(self, name: str, num_layers: int) -> tuple[int, str] | None:
        """Return (layer, name inside it) of a checkpoint's tensor; ``None`` if it is dropped on purpose.

        Args:
            name: Hugging Face's name, e.g. ``transformer.h.3.mlp.fc_in.weight``.
            num_layers: layers of the model, embedding and head included.

        Raises:
            KeyError: the architecture has no such tensor.
        """
        number = None if name in self.keys else re.search(r"\.(\d+)\.", name)  # heads have numbered parts, too
        home = self.keys[name.replace(number[0], ".{}.", 1) if number else name]
        if home is None:
            return None
        part, local = home
        index = {"embed": 0, "head": num_layers - 1}.get(part) if part != "block" else int(number[1]) + 1  # type: ignore[index]
        if index is None or (part == "block" and index >= num_layers - 1):
            raise KeyError(name)
        return index, local

    def name_of(self, layer: int, local: str, num_layers: int) -> str:
        """Return Hugging Face's name of a layer's tensor: the inverse of `locate`."""
        part = "embed" if layer == 0 else "head" if layer == num_layers - 1 else "block"
        return self._names[part, local].format(layer - 1)

    @cached_property
    def _names(self) -> dict[Home, str]:
        return {home: name for name, home in self.keys.items() if home is not None}


@dataclass(frozen=True)
class Architecture:
    """A family with one model's config and head: what a model folder's ``config.json`` says.

    Attributes:
        family: family.
        config: config of the family.
        raw: ``config.json``.
        task: task of the head; ``None``: as the family was pre-trained.
        labels: names of the head's classes, in the order of its outputs.
        new: names of tensors that the folder lacks, or has for other labels, and a run begins with random ones.
        left_out: names of tensors of the folder that are of another head.
    """

    family: Family
    config: Any
    raw: Mapping[str, Any]
    task: Task | None = None
    labels: tuple[str, ...] = ()
    new: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()

    def layers(self) -> list[nn.Module]:
        """Return the layers on the ``meta`` device, in streaming order."""
        layers = self.family.build_layers(self.config)
        if self.head is not None:
            with torch.device("meta"):
                layers[-1] = self.head.build(self.config, self.num_outputs)
        return layers

    @cached_property
    def skeleton(self) -> tuple[nn.Module, ...]:
        """The layers on the ``meta`` device, to look at; who runs or changes them makes their own by `layers`."""
        return tuple(self.layers())

    @property
    def head(self) -> HeadForm | None:
        """The head, if it is another than that of pre-training."""
        return None if self.task is None else self.family.head_for(self.task)

    @property
    def trained_whole(self) -> frozenset[str]:
        """Names of what is trained beside adapters, as PEFT does it: what is new, and the outputs of a head."""
        if self.head is None:
            return self.new
        layers, name_of = self.skeleton, self.family.name_of
        names = {local: name_of(len(layers) - 1, local, len(layers)) for local in layers[-1].state_dict()}
        outputs = {name for local, name in names.items() if local.startswith(f"{self.head.output}.")}
        return self.new | outputs

    @property
    def num_outputs(self) -> int:
        """Outputs of the head for each of its rows."""
        return {"spans": 2}.get(self.task or "", 1) if not self.labels else len(self.labels)

    @property
    def class_name(self) -> str:
        """Name of the class of `transformers` that opens the model."""
        return self.head.class_name if self.head else self.family.class_name

    def with_head(self, task: Task, labels: Sequence[str] = ()) -> Architecture:
        """Return the model with the head of a task; `new` is for those to fill in who know what the files have.

        Raises:
            UsageError: the family has no such head.
        """
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
            raw["pad_token_id"] = getattr(self.config, "eos_token_id", None)  # by which `transformers` finds the end
        return replace(self, raw=raw, task=task, labels=tuple(labels))

    def with_dropout(self, hidden: float | None, attention: float | None) -> Architecture:
        """Return the model with other rates of dropout; ``None``: as it is, but attention's is 0 if the others are."""
        attention = 0.0 if attention is None and hidden == 0.0 else attention
        rates = {
            name: rate
            for names, rate in zip(self.family.dropouts, (hidden, attention), strict=True)
            for name in names
            if rate is not None
        }
        return replace(self, config=replace(self.config, **rates)) if rates else self

    @property
    def dropout(self) -> dict[str, float]:
        """The rates of dropout that are not 0, by their names in ``config.json``."""
        rates = {name: getattr(self.config, name) for names in self.family.dropouts for name in names}
        return {name: rate for name, rate in rates.items() if rate}

    @property
    def drops_attention(self) -> bool:
        """Whether training drops weights of attention."""
        return any(getattr(self.config, name) for name in self.family.dropouts[1])

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for users on how this model is treated here."""
        notes = []
        if self.new:
            notes.append(f"begins as random numbers, for the model has none: {listed(sorted(self.new), NAMES_SHOWN)}")
        if self.left_out:
            notes.append(f"left out, of another head: {listed(self.left_out, NAMES_SHOWN)}")
        if self.dropout:
            named = ", ".join(f"{name} {rate}" for name, rate in self.dropout.items())
            notes.append(f"trained with dropout, as config.json says ({named}); --set dropout=0 turns it off")
        return tuple(notes)

    def ties(self) -> dict[str, str]:
        """Return the names of tensors that are others once more: a tied head's, and the embedding's that it is."""
        layers, name_of = self.skeleton, self.family.name_of
        return {
            name_of(index, local, len(layers)): name_of(TIED_SOURCE_LAYER, tie.source, len(layers))
            for index, layer in enumerate(layers)
            for local, tie in Layout.of(layer).tied.items()
        }


def check_numbers(config: Any) -> None:
    """Refuse numbers in a config that no model has: what is made from them could take all memory, or fail anywhere.

    Raises:
        DataError: names the first of them.
    """
    for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "d_inner"):
        value = getattr(config, name)
        if type(value) is not int or not 1 <= value <= LARGEST_FIELDS.get(name, 2**31):
            name = "n_inner" if name == "d_inner" else name
            raise DataError(f"{name} must be a positive integer that a model can have, not {value!r}")
    epsilon = config.layer_norm_epsilon
    if type(epsilon) not in (int, float) or not 0 <= epsilon < 1:
        raise DataError(f"layer_norm_epsilon must be a number from 0 to 1, not {epsilon!r}")


def full_name(name: str, family: Family | None = None) -> str:
    """Return a tensor's name in a whole model, given that in a file of whichever form.

    Args:
        name: name in the file.
        family: architecture; ``None``: any that has such a name.
    """
    if family is not None:
        return family.full_name(name)
    return next((full for each in families().values() if (full := each.full_name(name)) != name), name)


def families() -> dict[str, Family]:
    """Return the supported architectures by ``model_type``."""
    from gptj_ft.models import bert, gpt2, gptj, roberta

    known = (gptj.FAMILY, gpt2.FAMILY, bert.FAMILY, roberta.ROBERTA, roberta.XLM_ROBERTA)
    return {family.model_type: family for family in known}


def architecture_of(raw: Mapping[str, Any], path: Path) -> Architecture:
    """Return the architecture that a config describes.

    Args:
        raw: content of ``config.json``.
        path: file that it was read from.

    Raises:
        UsageError: an architecture that is not supported.
        DataError: it contradicts the architecture.
    """
    model_type, known = str(raw.get("model_type")), families()
    if model_type not in known:
        raise unsupported_family(path, raw.get("model_type"))
    family = known[model_type]
    for name in ("dtype", "torch_dtype"):  # `transformers` believes them when it writes texts
        if raw.get(name) is not None and not isinstance(getattr(torch, str(raw[name]), None), torch.dtype):
            raise DataError(f"{path}: {name} {raw[name]!r} is no type of numbers")
    try:
        return Architecture(family, family.read_config(raw), raw, *_head_of(family, raw))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _head_of(family: Family, raw: Mapping[str, Any]) -> tuple[Task | None, tuple[str, ...]]:
    """Return the task and the labels of the head that a config is of; ``None``, if it is that of pre-training.

    Raises:
        DataError: labels that are none.
    """
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
    if len(head.tasks) > 1:
        by_type = {value: key for key, value in PROBLEM_TYPES.items()}
        default = "regression" if isinstance(names, dict) and len(names) == 1 else task
        task = by_type.get(str(raw.get("problem_type")), default)
    if task in ("spans", "sentences", "regression"):
        return task, ()
    numbers = [str(number) for number in range(len(names) if isinstance(names, dict) else 0)]
    if not numbers or len(numbers) > MOST_LABELS or set(numbers) != {str(key) for key in names}:  # type: ignore[union-attr]
        raise DataError(f"id2label must give a name to each number from 0 on, not {names!r:.200}")
    by_number = {str(key): str(value) for key, value in names.items()}  # type: ignore[union-attr]
    return task, tuple(by_number[number] for number in numbers)
