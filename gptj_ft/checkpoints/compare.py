"""Compare two checkpoints tensor by tensor: missing, extra, different and renamed ones."""

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
from gptj_ft.system.prefetch import SizedTask, prefetch

_SHOWN = 10  # differences
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of one
# Fields of a config that change nothing of what a model computes.
NOT_COMPUTED = ("initializer_range", "bos_token_id", "eos_token_id", "n_positions")


@dataclass(frozen=True)
class CheckpointComparison:
    """Result of a comparison without differences.

    Attributes:
        tensors: number of tensors compared.
        parameters: number of parameters in them.
        types: stored types of the first and the second: ``float32``, or ``mixed``.
    """

    tensors: int
    parameters: int
    types: tuple[str, str]


def diff_checkpoints(
    first: CheckpointSource, second: CheckpointSource, progress: Callable[[int, int], None] | None = None
) -> CheckpointComparison:
    """Compare all tensors of two checkpoints, and what their configs say of the computation.

    A tensor of the second is the same if it has the bits that the first's has after the change to its type.

    Args:
        first: the reference.
        second: the checkpoint under test.
        progress: callback of bytes done and total bytes, of the first; default: none.

    Raises:
        DataError: they differ, with the names of the first tensors; or a config contradicts its tensors.
    """
    a, b = _parameters(first), _parameters(second)
    shared = [name for name in a if name in b]
    done, total = 0, sum(first.checkpoint.entry(name).num_bytes for name in shared)
    problems = [*_config_differences(first.architecture, second.architecture)]
    missing, extra = [name for name in a if name not in b], [name for name in b if name not in a]
    for name in missing:
        twin = next((other for other in extra if _is_same(first.checkpoint, name, second.checkpoint, other)), None)
        problems.append(f"{name} is missing" + (f"; {twin} holds the same numbers: renamed" if twin else ""))
    problems += [f"{name} is too many" for name in extra]
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
    """Tell how a tensor of the second checkpoint differs from the first's, after the change of type; empty if not."""
    other = other or name
    mine, theirs = first.entry(name), second.entry(other)
    if mine.shape != theirs.shape:
        return f"{name} has shape {list(theirs.shape)}, expected {list(mine.shape)}"
    start = 0
    with closing(prefetch(_reading_both(first, second, name, other))) as tensors:
        for expected, found in zip(tensors, tensors, strict=True):
            expected = _bits(cast(expected, theirs.dtype))
            if not torch.equal(expected, _bits(found)):
                at = int((expected != _bits(found)).nonzero()[0])
                values = (float(each.reshape(-1)[at : at + 1].view(theirs.dtype)) for each in (found, expected))
                return f"{name} differs: number {start + at} is {next(values)!r}, expected {next(values)!r}"
            start += found.numel()
    return ""


def _bits(tensor: Tensor) -> Tensor:
    """Return numbers as integers of as many bits, for a NaN does not equal itself."""
    return tensor.reshape(-1).view(INTEGERS[tensor.dtype.itemsize])


def _reading_both(first: Checkpoint, second: Checkpoint, name: str, other: str) -> Iterator[SizedTask[Tensor]]:
    """Yield the tasks of reading the same rows of both, in turn."""
    for rows in first.row_ranges(name, max(first.rows_at_once(name), second.rows_at_once(other))):
        yield first.read_task(name, rows)
        yield second.read_task(other, rows)


def _is_same(first: Checkpoint, name: str, second: Checkpoint, other: str) -> bool:
    return first.shape(name) == second.shape(other) and not difference(first, second, name, other)


def _parameters(source: CheckpointSource) -> list[str]:
    """Return the tensors of a checkpoint but for those that are dropped on purpose."""
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
    said = {key: value for key, value in vars(config).items() if key not in NOT_COMPUTED}
    if "n_inner" in said:  # null stands for the usual width
        said["n_inner"] = config.n_inner or 4 * config.n_embd
    return {"model_type": architecture.family.model_type, **said}
