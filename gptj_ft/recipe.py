"""Every option of a run: its type, default, unit and meaning. This is the only place an option is declared.

A preset (``recipes/*.yaml``) holds only what differs from these defaults. Values are taken, in order of precedence,
from flags, the environment (``GPTJ_FT_LR=1e-5``), a ``--config`` file, the preset, and the defaults below.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gptj_ft.errors import UsageError, did_you_mean

ENVIRONMENT_PREFIX = "GPTJ_FT_"
NOT_OPTIONS = {"GPTJ_FT_HOME", "GPTJ_FT_TEST_DATA"}

Place = Literal["device", "host", "disk", "auto"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def _words(value: Any) -> Any:
    """Take ``best,last``, and a bare number, for the list that they mean."""
    return str(value).split(",") if isinstance(value, str | int) else value


def _keep_words(value: tuple[str, ...]) -> tuple[str, ...]:
    words = tuple(word.strip() for word in value)
    wrong = [word for word in words if word not in ("last", "best", "all") and not re.fullmatch("[1-9][0-9]*", word)]
    if wrong or not words:
        raise ValueError("use last, best, all or a number, with commas between them")
    return words


Keep = Annotated[tuple[str, ...], BeforeValidator(_words), AfterValidator(_keep_words)]


class Options(BaseModel):
    """Frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, coerce_numbers_to_str=True)


class Generation(Options):
    """How the tuned model writes: the settings that `evaluate` and `generate` use unless told otherwise."""

    max_new_tokens: int = Field(128, ge=1, description="most tokens to write")
    temperature: float = Field(0.0, ge=0.0, description="0 is greedy; above, sampling")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="sample from the smallest set with this probability")
    top_k: int = Field(0, ge=0, description="sample from the k most likely tokens; 0 is all")
    stop: tuple[str, ...] = Field((), description="strings at which writing ends; they are not part of the answer")


class Recipe(Options):
    """A whole run as one value; saved as ``recipe.yaml`` in the run folder."""

    # What for
    recipe: str = Field("custom", description="preset that the run starts from")
    about: str = Field("", description="one line: what the preset is for")
    source: str = Field("", description="where its hyper-parameters come from")

    # What on
    model: str | None = Field(None, description="model folder, name of a downloaded model, or 'tiny'")
    data: str | None = Field(None, description="training rows: .jsonl, .json, .csv, .tsv, .txt or prepared data")
    val_data: str | None = Field(None, description="validation rows; none: a share of the data is held out")
    holdout: Fraction = Field(0.05, description="share of the rows held out when no validation rows are given")
    output: str | None = Field(None, description="run folder, which must not exist; default runs/RECIPE-N")

    # How a row becomes tokens
    prompt: str = Field("", description="text before the answer, with {fields}; empty: train on every token")
    completion: str = Field("{text}", description="the text that is trained on, with {fields}; EOS follows")
    fields: dict[str, tuple[str, ...]] = Field(
        {"text": ("text", "content", "body", "article", "document")},
        description="for each field of the templates, the column names recognised, best first",
    )
    shorten: str = Field("", description="the one field that may be cut when a row is too long")
    too_long: Literal["cut-end", "cut-start", "split", "skip", "error"] = Field(
        "split", description="rows above max_length: cut the `shorten` field, split plain text, skip, or stop"
    )
    max_length: int = Field(2048, ge=2, description="tokens of prompt, answer and EOS together")

    # How it is judged
    metrics: tuple[Literal["rouge", "squad"], ...] = Field((), description="scores of written answers")
    generation: Generation = Field(default_factory=Generation)  # type: ignore[arg-type]

    # How it learns
    method: Literal["full"] = Field("full", description="full: every parameter is trained")
    epochs: float = Field(1.0, gt=0.0, description="passes over the rows")
    max_steps: int | None = Field(None, ge=1, description="optimizer steps; overrides epochs")
    batch_size: int = Field(16, ge=1, description="rows per optimizer step")
    micro_batch_tokens: int = Field(
        2048, ge=1, description="tokens computed at once; changes memory and rounding, never the batch"
    )
    lr: float = Field(1e-5, gt=0.0, description="peak learning rate")
    schedule: Literal["linear", "cosine", "constant"] = Field("cosine", description="after the warm-up")
    warmup: float = Field(0.1, ge=0.0, description="below 1: share of all steps; 1 and above: steps")
    final_lr: Fraction = Field(0.1, description="learning rate at the last step, as a share of the peak")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="decay of Adam's two moments")
    eps: float = Field(1e-8, gt=0.0, description="added to the root of the second moment (torch's formula)")
    weight_decay: float = Field(0.1, ge=0.0, description="decoupled; biases and layer norms are left out")
    clip_norm: float | None = Field(1.0, gt=0.0, description="global gradient norm; null: no clipping")
    seed: int = Field(0, ge=0, lt=2**63, description="order of the rows, the held-out share, the tiny model")

    # Where it runs
    device: str = Field("auto", description="auto, cpu or cuda")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="type of the computation; master weights fp32"
    )
    weights: Place = Field("auto", description="where the weights live")
    optimizer_state: Place = Field("auto", description="where gradients, moments and master weights live")
    read_ahead: int = Field(1, ge=0, le=8, description="layers read before they are needed")

    # What it leaves behind
    validate_every: int = Field(0, ge=0, description="steps between validations; 0: before and after only")
    save_every: int = Field(
        0, ge=0, description="steps between checkpoints; 0: by time only. A run on disk loses no step anyway"
    )
    keep: Keep = Field(
        ("last",),
        description="checkpoints kept: last, best (lowest validation loss), all of save_every, or the newest N of them",
    )
    export: Literal["last", "best"] = Field("last", description="whose state the tuned model has")
    save_minutes: float = Field(
        30.0, gt=0.0, description="minutes after which a checkpoint is due; Ctrl-C saves at once"
    )

    def num_steps(self, num_rows: int) -> int:
        """Return the optimizer steps of a run on so many rows; the last step of an epoch may take fewer than others."""
        return self.max_steps or max(1, round(self.epochs * -(-num_rows // self.batch_size)))

    @property
    def keeps_best(self) -> bool:
        """Whether the state with the lowest validation loss is kept."""
        return "best" in self.keep or self.export == "best"

    @property
    def num_newest_kept(self) -> int | None:
        """How many of the checkpoints of ``save_every`` are kept; ``None``: all."""
        return None if "all" in self.keep else max((int(word) for word in self.keep if word.isdigit()), default=0)


# What a run was told about its surroundings may change on resume without changing a number of it.
FREE_ON_RESUME = frozenset(
    {"device", "weights", "optimizer_state", "read_ahead", "save_every", "save_minutes", "keep", "export", "output"}
)


@dataclass(frozen=True)
class Resolved:
    """A recipe and, for each key that is not a default, where its value came from."""

    recipe: Recipe
    origins: Mapping[str, str]


def recipes_folder() -> Path:
    """Return the registry of presets: inside the installed package, or beside it in a checkout."""
    packaged = Path(__file__).parent / "recipes"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "recipes"


def preset_names() -> list[str]:
    """Return the names that ``--recipe`` takes."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def load_preset(name: str) -> dict[str, Any]:
    """Return what a preset says.

    Raises:
        UsageError: no such preset; names the nearest.
    """
    path = recipes_folder() / f"{name}.yaml"
    if name not in preset_names():
        raise UsageError(
            f"no recipe '{name}'{did_you_mean(name, preset_names())}; `gptj-ft recipes list` shows: "
            + ", ".join(preset_names())
        )
    return load_options(path)


def load_options(path: Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        UsageError: unreadable, not YAML (with the line), or not a mapping.
    """
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_OptionLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise UsageError(
            f"{path}:{mark.line + 1 if mark else 1}: not YAML: {getattr(error, 'problem', error)}"
        ) from error
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: expected `option: value` lines, found {type(loaded).__name__}")
    return {str(key): value for key, value in loaded.items()}


def resolve(
    flags: Mapping[str, Any],
    config: Path | None = None,
    assignments: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    base: tuple[str, Mapping[str, Any]] | None = None,
) -> Resolved:
    """Combine all sources into one recipe.

    Args:
        flags: options given on the command line; ``None`` means not given.
        config: a YAML file of options (``--config``).
        assignments: ``key=value`` or ``group.key=value`` (``--set``); they rank with flags.
        environment: defaults to ``os.environ``.
        base: (origin, options) that stand in for a preset when no source names one.

    Raises:
        UsageError: an unknown key (with the nearest), a wrong value, or a key given twice on the command line.
    """
    environ = os.environ if environment is None else environment
    flagged = {key: value for key, value in flags.items() if value is not None}
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        if not separator:
            raise UsageError(f"--set takes key=value, not '{assignment}'")
        if key in flagged:
            raise UsageError(f"{key} is given twice: as --{key.replace('_', '-')} and as --set {key}")
        flagged[key] = _parse(text, f"--set {key}")
    sources = [
        ("command line", flagged),
        ("environment", _from_environment(environ)),
        (str(config), load_options(config) if config else {}),
    ]
    name = next((values["recipe"] for _, values in sources if "recipe" in values), None)
    if name is not None and name != "custom":
        sources.append((f"recipe {name}", {**load_preset(str(name)), "recipe": name}))
    elif base is not None:
        sources.append((base[0], dict(base[1])))
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, values in reversed(sources):
        for key, value in values.items():
            _assign(merged, key, value, origin)
            origins[key] = origin
    return Resolved(build(merged, origins), origins)


def build(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Recipe:
    """Validate a mapping of options.

    Raises:
        UsageError: the first problem, with the place it came from.
    """
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        where = (origins or {}).get(key) or (origins or {}).get(str(problem["loc"][0]), "recipe")
        if problem["type"] == "extra_forbidden":
            known = Generation.model_fields if key.startswith("generation.") else Recipe.model_fields
            raise UsageError(f"{where}: unknown option '{key}'{did_you_mean(key.split('.')[-1], known)}") from error
        message = problem["msg"].removeprefix("Value error, ")
        raise UsageError(f"{where}: {key}: {message}, not {problem['input']!r}") from error


def dump(recipe: Recipe, origins: Mapping[str, str]) -> str:
    """Return the resolved recipe as YAML, each value that is not a default with its origin as a comment."""
    lines = []
    for key, value in recipe.model_dump(mode="json").items():
        text = yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, width=1000).rstrip("\n")
        first, newline, rest = text.partition("\n")
        origin = origins.get(key)
        # A comment inside a block or quoted scalar would become part of it.
        comment = f"  # {origin}" if origin and not newline else ""
        lines.append(first + comment + newline + rest)
    return "\n".join(lines) + "\n"


def _assign(merged: dict[str, Any], key: str, value: Any, origin: str) -> None:
    """Set ``key`` or ``group.key``; a group given as a mapping changes only the keys it names."""
    group, dot, rest = key.partition(".")
    if dot:
        value, key = {rest: value}, group
    nested = merged.get(key)
    if isinstance(value, dict) and isinstance(nested, dict):
        merged[key] = {**nested, **value}
    else:
        merged[key] = value


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, text in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_OPTIONS:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
            if key not in Recipe.model_fields:
                raise UsageError(f"environment: unknown option {name}{did_you_mean(key, Recipe.model_fields)}")
            found[key] = _parse(text, name)
    return found


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_OptionLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"{where}: cannot read the value '{text}'") from error


class _OptionLoader(yaml.SafeLoader):
    """YAML 1.1 reads ``1e-5`` as a string; people who write learning rates do not."""


_OptionLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)$|^[-+]?(?:\d+\.\d*|\.\d+)$"),
    list("-+.0123456789"),
)
