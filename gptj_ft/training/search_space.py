"""The candidates of a search: every combination of the values of some options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from gptj_ft.config.options import STRETCHING, LoRA, Recipe
from gptj_ft.config.resolve import build, read_value, suggest_option
from gptj_ft.config.run_folder import deciding_options
from gptj_ft.data.dataset import CHAT_SETTINGS, SETTINGS, TASK_SETTINGS
from gptj_ft.errors import UsageError

# The recipe's rate is in the middle of a factor of 300. More of it lies above: published rates suit large models, and
# small models and adapters learn best at 3 to 30 times as much. Steps of 3 are as fine as a short run can tell apart.
RATE_FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
# Options that change neither rows nor steps nor memory, so that candidates share all three.
SEARCHED = (
    "lr", "schedule", "warmup", "final_lr", "eps", "weight_decay", "clip_norm", "z_loss", "dropout",
    "attention_dropout", "layer_decay", "bias_correction", "class_weights", "lora.alpha", "lora.dropout",
)  # fmt: skip
MOST_CANDIDATES = 100
Over = Mapping[str, Sequence[Any]]  # values by option


@dataclass(frozen=True)
class Candidate:
    """One combination of values."""

    values: Mapping[str, Any]  # by option

    @property
    def name(self) -> str:
        """Name for people, such as ``lr=3e-05``."""
        return ", ".join(f"{key}={_text(value)}" for key, value in self.values.items())

    @property
    def folder(self) -> str:
        """Name of its run folder, such as ``lr-3e-05``."""
        return "_".join(re.sub(r"[^\w.-]", "-", f"{key}-{_text(value)}") for key, value in self.values.items())

    def recipe(self, base: Recipe) -> Recipe:
        """Return a recipe with the values of this candidate."""
        options = base.model_dump()
        for key, value in self.values.items():
            group, _, name = key.rpartition(".")
            (options[group] if group else options)[name] = value
        return build(options, dict.fromkeys(self.values, "--over"))


def parse_over(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse the arguments of ``--over``, such as ``lr=1e-5,3e-5``."""
    over: dict[str, list[Any]] = {}
    for text in texts:
        key, separator, listed = text.partition("=")
        if not separator or not listed:
            raise UsageError(f"--over expects key=a,b,c, not '{text}'")
        if key in over:
            raise UsageError(f"--over {key} is given twice: name all its values together")
        over[key] = [read_value(key, value.strip(), f"--over {key}") for value in listed.split(",")]
    return over


def candidates_of(recipe: Recipe, over: Over) -> list[Candidate]:
    """Return the candidates, in the order of the values; without options, `RATE_FACTORS` times the recipe's rate.

    Raises:
        UsageError: an option cannot be searched, a value is invalid, or there are fewer than two candidates.
    """
    over = over or {"lr": [float(f"{recipe.lr * factor:.2g}") for factor in RATE_FACTORS]}
    for key, values in over.items():
        _check_searched(key, recipe)
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise UsageError(f"{key} is one value, {values!r}: a search needs a list of them")
    candidates = [Candidate(dict(zip(over, values, strict=True))) for values in product(*over.values())]
    if len(candidates) < 2:
        raise UsageError("a search compares at least two candidates: name more values, such as --lr 1e-5,3e-5,1e-4")
    if len(candidates) > MOST_CANDIDATES:
        raise UsageError(f"{len(candidates):,} candidates are more than {MOST_CANDIDATES}: name fewer values")
    seen: dict[str, Candidate] = {}
    for candidate in candidates:
        other = seen.setdefault(str(deciding_options(candidate.recipe(recipe))), candidate)
        if other is not candidate:
            raise UsageError(f"{other.name} and {candidate.name} are the same run: name each value once")
    return candidates


def _check_searched(key: str, recipe: Recipe) -> None:
    group, _, name = key.rpartition(".")
    fields = LoRA.model_fields if group == "lora" else Recipe.model_fields
    if name not in fields or group not in ("", "lora", "generation"):
        raise UsageError(f"--over: unknown option '{key}'{suggest_option(key, fields)}")
    if key in (*SETTINGS, *TASK_SETTINGS, *CHAT_SETTINGS):
        raise UsageError(f"--over {key}: candidates share their rows, and {key} changes these; start a search for each")
    if key not in SEARCHED:
        raise UsageError(f"--over {key}: not an option to search; choose from {', '.join(SEARCHED)}")
    if group == "lora" and recipe.method != "lora":
        raise UsageError(f"--over {key} has no effect without --method lora")
    if key in STRETCHING and not isinstance(recipe.schedule, str):
        raise UsageError(f"--over {key} has no effect, because the schedule is a list of pieces")


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
