"""Declare the values in the files of a run folder: type, range and length of each.

A checksum proves only that a file is as somebody wrote it, and a run may come from anybody. `checked` is called where
a file is read, before any value is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gptj_ft.config.options import MOST_STEPS
from gptj_ft.errors import DataError
from gptj_ft.system.plain_text import shortened

Step = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(ge=0.0)]
Name = Annotated[str, Field(max_length=255)]
Text = Annotated[str, Field(max_length=100_000)]


class Saved(BaseModel):
    """Values of a file; numbers are finite, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Best(Saved):
    """Best validated state, see `BestState`; the deciding score has its own name as key."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float] = Field(init=False)
    step: Step
    validation_loss: float


class _LossScale(Saved):
    """See `LossScale`."""

    scale: Annotated[float, Field(gt=0.0)]
    growth_tracker: Step
    num_skipped: Step
    growth_interval: Annotated[int, Field(ge=1, le=MOST_STEPS)]


class _Facts(Saved):
    """See `RunState`; earlier versions wrote fewer keys."""

    loss_before: float | None = None
    updates_before: Step = 0
    recipe: Annotated[str, Field(max_length=128)] | None = None
    best: _Best | None = None
    loss_scale: _LossScale | None = None
    layer_updates: Annotated[list[Step], Field(max_length=100_000)] | None = None


class _Update(Saved):
    """See `Update`."""

    step: Step
    lr: Positive
    clip: Positive
    scale: Annotated[float, Field(gt=0.0)] = 1.0
    num_skipped: Step = 0
    is_skipped: bool = False


class SavedState(Saved):
    """Commit of a run on disk, or manifest of a checkpoint, which has no update."""

    step: Step
    facts: _Facts
    update: _Update | None = None
    is_regular: bool = False  # a checkpoint made every `save_every` steps


SavedName = Annotated[str, Field(pattern=r"^(state/commit|checkpoints/step-[0-9]{1,18}/manifest)[.]json$")]
LayerName = Annotated[str, Field(pattern=r"^[0-9]{1,5}$")]
Score = Annotated[float, Field(allow_inf_nan=True)] | None  # null, or NaN in files of earlier versions: undefined
Layers = Annotated[list[Annotated[int, Field(ge=0, lt=100_000)]], Field(max_length=100_000)]


class Record(Saved):
    """``run.json``."""

    recipe: dict[Name, Any]  # compared with the recipe of the run, which is checked
    saved: SavedName | None


class PeerStates(Saved):
    """States of a run on another rank, see `migrate`."""

    commit: SavedState | None
    manifests: dict[Annotated[str, Field(pattern=r"^[0-9]{1,18}$")], SavedState]
    noted: SavedName | None


class PeerLayers(Saved):
    """Layers of which another rank has a file."""

    has: Layers


class PeerStamps(Saved):
    """Steps of the files of layers on another rank."""

    layer: dict[LayerName, Step]
    gradient: dict[LayerName, Step] = {}


class PeerBest(Saved):
    """Manifest of the best checkpoint on another rank."""

    manifest: SavedState | None


class MetricsLine(Saved):
    """Line of ``metrics.jsonl`` of a step or a validation; a later version may write more."""

    model_config = ConfigDict(extra="allow")
    step: Step
    # Of a validation.
    validation_loss: float = 0.0
    scores: dict[Name, Score] = {}
    # Of a step; null: it overflowed fp16.
    loss: float | None = None
    z_loss: float | None = None
    lr: Positive | None = None
    grad_norm: Positive | None = None
    loss_scale: Annotated[float, Field(gt=0.0)] = 1.0
    skipped: bool = False
    tokens: Count = 0
    target_tokens: Count = 0
    seconds: Positive = 0.0
    waited_seconds: Positive = 0.0
    bytes_read: Count = 0
    bytes_written: Count = 0
    memory_bytes: Count = 0
    device_memory_bytes: Count = 0
    device_reserved_bytes: Count = 0
    target_tokens_per_second: Positive = 0.0
    tokens_per_second: Positive = 0.0
    model_gflops: Positive = 0.0
    hardware_gflops: Positive = 0.0
    mfu: Positive = 0.0
    hfu: Positive = 0.0
    stall: Positive = 0.0


class Environment(Saved):
    """``environment.json``: people read it, and it may have any facts."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Text | float | bool | None] = Field(init=False)
    command: Annotated[list[Text], Field(min_length=1, max_length=10_000)] = ["gptj-ft"]


class _SampledFile(Saved):
    """See `fingerprint.sampled_file`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Name | Count] = Field(init=False)


class BaseDigests(Saved):
    """``base.json``: facts of each file of the base model."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[Name, _SampledFile] = Field(init=False)


class _Evaluated(Saved):
    """Scores of a model, see `evaluation.comparison`."""

    model_config = ConfigDict(extra="allow")
    model: Text
    rows: Count
    notes: Annotated[list[Text], Field(max_length=10_000)]
    scores: dict[Name, Score]
    intervals: dict[Name, Annotated[list[Score], Field(min_length=2, max_length=2)]]


class _Sample(Saved):
    """See `evaluation_page.row_samples`."""

    place: Text
    change: Text
    texts: dict[Name, Text]


class RecordedEvaluation(Saved):
    """``evaluation.json``."""

    model_config = ConfigDict(extra="allow")
    model: _Evaluated
    baseline: _Evaluated | None
    differences: dict[Name, Annotated[dict[Name, Score], Field(min_length=3, max_length=3)]]
    by_row: dict[Name, Any] | None
    samples: dict[Name, Annotated[list[_Sample], Field(max_length=1000)]]
    command: Text


class _Occurrences(Saved):
    """See `rows.Occurrences`."""

    count: Count
    first: Annotated[list[Text], Field(max_length=1000)]


class _Settings(Saved):
    """See `dataset.settings_of`; most are only compared with those of a recipe, which are checked."""

    model_config = ConfigDict(extra="allow")
    max_length: Annotated[int, Field(ge=1, lt=2**31)]
    template_date: Name = ""


class RowsCount(Saved):
    """Size of prepared rows, in manifests of earlier versions, too."""

    model_config = ConfigDict(extra="allow")
    windows: Count


class RowsReport(RowsCount):
    """Manifest of prepared rows, see `dataset.Report`."""

    files: Annotated[list[Text], Field(max_length=1_000_000)]
    rows_read: Count
    rows_kept: Count
    rows_skipped: Annotated[dict[Text, _Occurrences], Field(max_length=10_000)]
    warnings: Annotated[dict[Text, _Occurrences], Field(max_length=10_000)]
    rows_cut: Count
    tokens_cut: Count
    tokens: Count
    target_tokens: Count
    longest: Count
    columns: Annotated[dict[Text, Text], Field(max_length=10_000)]
    data_sha256: Name
    tokenizer_sha256: Name
    notes: Annotated[list[Text], Field(max_length=10_000)]
    settings: _Settings
    labels: Annotated[list[Text], Field(max_length=100_000)] = []
    label_counts: Annotated[list[Count], Field(max_length=100_000)] = []
    cut_places: Annotated[list[Text], Field(max_length=1_000)] = []
    rows_xxh3_128: Annotated[dict[Name, Name], Field(min_length=1, max_length=1)]


def is_valid(kind: type[Saved], values: Mapping[str, Any]) -> bool:
    """Tell whether values are of their declared types, ranges and lengths."""
    try:
        kind.model_validate(values)
    except (ValidationError, OverflowError, RecursionError):
        return False
    return True


def checked(
    kind: type[Saved], values: dict[str, Any], path: Path | str, advice: str = "restore it from a copy"
) -> dict[str, Any]:
    """Return values of a file unchanged.

    Args:
        path: file, or other source of the values, for the message.
        advice: end of the message.

    Raises:
        DataError: a value is not of its declared type, range or length.
    """
    try:
        kind.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = shortened(".".join(map(str, problem["loc"])), 80)
        raise DataError(f"{path} is damaged: {where}: {problem['msg']}; {advice}") from error
    except (OverflowError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}; {advice}") from error
    return values


class _Budget(Saved):
    """See `halving.Budget`."""

    seconds_per_step: Positive
    seconds_per_rung: Positive
    seconds_at_start: Positive
    seconds_per_end: Positive
    limit: Positive | None


class _Estimate(Saved):
    """See `Estimate`."""

    value: float | None
    low: float | None
    high: float | None


class _Standing(Saved):
    """See `halving.Standing`."""

    candidate: Text
    fate: Literal["best", "kept", "worse", "budget", "diverged"]
    score: float | None
    difference: _Estimate | None
    reason: Text


class _Decision(Saved):
    """See `halving.Decision`."""

    step: Step
    standings: Annotated[list[_Standing], Field(min_length=1, max_length=100)]
    has_learned: bool = True


class SavedSearch(Saved):
    """``search.json``."""

    request: Annotated[str, Field(max_length=128)]
    recipe: dict[Name, Any]  # validated as any recipe
    candidates: Annotated[list[dict[Name, Any]], Field(min_length=2, max_length=100)]
    by: Name
    rungs: Annotated[list[Step], Field(min_length=1, max_length=10)]
    max_time: Positive | None
    budget: _Budget
    decisions: Annotated[list[_Decision], Field(max_length=10)]


class SavedRowScores(Saved):
    """Scores of a candidate at a rung, see `RowScores`, or the reason of its divergence."""

    diverged: Text | None = None
    losses: list[float] = []
    weights: list[float] = []
    right: list[int] = []
    texts: list[Text] = []
    expected: list[Any] = []
    predicted: list[Any] = []
