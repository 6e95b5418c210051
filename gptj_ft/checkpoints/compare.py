"""Compare two checkpoints tensor by tensor; report missing, extra, renamed and different tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptj_ft.checkpoints.model_folder import Checkpoint, check_tensors, is_dropped
from gptj_ft.checkpoints.source import CheckpointSource
from gptj_ft.checkpoints.weight_file import dtype_name
from gptj_ft.errors import DataError
from gptj_ft.models.registry import Architecture
from gptj_ft.system.memory import cast
from gptj_ft.system.ordered_tasks import SizedTask, run_ordered

_SHOWN = 10  # differences in a message
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their size in bytes
# Fields of a config that do not change the computation.
NOT_COMPUTED = ("initializer_range", "bos_token_id", "eos_token_id", "n_positions")


@dataclass(frozen=True)
class CheckpointComparison:
    """Result of a comparison without differences."""

    tensors: int  # number of tensors compared
    parameters: int  # number of parameters in them
    types: tuple[str, str]  # stored types of the first and the second: ``float32``, ..., or ``mixed``


def diff_checkpoints(
    first: CheckpointSource, second: CheckpointSource, progress: Callable[[int, int], None] | None = None
) -> CheckpointComparison:
    """Compare all tensors of two checkpoints, and the config fields that change the computation.

    Tensors are equal if the first one's, cast to the second one's type, has the same bits.

    Args:
        progress: callback of bytes done and total bytes, of the first.

    Raises:
        DataError: they differ, with the names of the first tensors; or a config contradicts its tensors.
    """
    a, b = _parameters(first), _parameters(second)
    shared = [name for name in a if name in b]
    done, total = 0, sum(first.checkpoint.entry(name).num_bytes for name in shared)
    problems = [*_config_differences(first.architecture, second.architecture)]
    missing, extra = [name for name in a if name not in b], [name for name in b if name not in a]
    for name in missing:
        # A renamed tensor shows as one missing and one extra: look for equal content.
        twin = next((other for other in extra if _is_same(first.checkpoint, name, second.checkpoint, other)), None)
        problems.append(f"{name} is missing" + (f"; {twin} holds the same numbers: renamed" if twin else ""))
    problems += [f"{name} is extra" for name in extra]
    for name in shared:
        if problem := difference(first.checkpoint, second.checkpoint, name):
            problems.append(problem)
        done += first.checkpoint.entry(name).num_bytes
        if progress is not None:
            progress(done, total)
    if problems:
        more = f"\n... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise DataError(f"{second.path} is not {first.path}:\n" + "\n".join(problems[:_SHOWN]) + more)
    for source in (first, second):
        check_tensors(source.architecture, source.checkpoint)
    types = [dtype_name(map(each.checkpoint.entry, shared)) for each in (first, second)]
    numel = sum(torch.Size(first.checkpoint.shape(name)).numel() for name in shared)
    return CheckpointComparison(len(shared), numel, (types[0], types[1]))


def difference(first: Checkpoint, second: Checkpoint, name: str, other: str | None = None) -> str:
    """Describe how a tensor of the second checkpoint differs from the first's after its cast; empty if it does not."""
    other = other or name
    reference, tested = first.entry(name), second.entry(other)
    if reference.shape != tested.shape:
        return f"{name} has shape {list(tested.shape)}, expected {list(reference.shape)}"
    start = 0
    with closing(run_ordered(_reading_both(first, second, name, other))) as tensors:
        for expected, actual in zip(tensors, tensors, strict=True):  # one iterator: takes pairs
            expected = _bits(cast(expected, tested.dtype))
            if not torch.equal(expected, _bits(actual)):
                at = int((expected != _bits(actual)).nonzero()[0])
                values = (float(each.reshape(-1)[at : at + 1].view(tested.dtype)) for each in (actual, expected))
                return f"{name} differs: number {start + at} is {next(values)!r}, expected {next(values)!r}"
            start += actual.numel()
    return ""


def _bits(tensor: Tensor) -> Tensor:
    """View numbers as integers of the same size: a NaN does not equal itself."""
    return tensor.reshape(-1).view(INTEGERS[tensor.dtype.itemsize])


def _reading_both(first: Checkpoint, second: Checkpoint, name: str, other: str) -> Iterator[SizedTask[Tensor]]:
    """Yield tasks that read the same rows of both, alternating."""
    # Both must be read in the same ranges. The larger suits both, as some files cannot be read by fewer rows.
    for rows in first.row_ranges(name, max(first.rows_at_once(name), second.rows_at_once(other))):
        yield first.read_task(name, rows)
        yield second.read_task(other, rows)


def _is_same(first: Checkpoint, name: str, second: Checkpoint, other: str) -> bool:
    return first.shape(name) == second.shape(other) and not difference(first, second, name, other)


def _parameters(source: CheckpointSource) -> list[str]:
    """Return the names of a checkpoint's tensors, except ties and tensors that are dropped on purpose."""
    family, num_layers = source.architecture.family, len(source.architecture.skeleton)
    ties = source.architecture.ties()
    names = source.checkpoint.names
    return [name for name in names if name not in ties and not is_dropped(family, name, num_layers)]


def _config_differences(first: Architecture, second: Architecture) -> Iterator[str]:
    a, b = _computed(first), _computed(second)
    for key in a.keys() | b.keys():
        if a.get(key) != b.get(key):
            yield f"config: {key} is {b.get(key)!r}, expected {a.get(key)!r}"


def _computed(architecture: Architecture) -> Mapping[str, Any]:
    config = architecture.config
    fields = {key: value for key, value in vars(config).items() if key not in NOT_COMPUTED}
    if "n_inner" in fields:  # null means the usual width
        fields["n_inner"] = config.n_inner or 4 * config.n_embd
    return {"model_type": architecture.family.model_type, **fields}
