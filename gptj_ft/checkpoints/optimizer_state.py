"""Open an optimizer's two moments: beside the weights of a model folder, or in a Cerebras checkpoint.

``optimizer/exp_avg/`` and ``optimizer/exp_avg_sq/`` hold them under the names of their parameters, and in
``optimizer/state.json`` stands how many updates they have seen, from where the correction of their bias goes on.

In Cerebras checkpoints, newer releases name moments by their parameters. Older ones number them, and nothing that can
be read without unpickling says how; but the model zoo's code does (releases 1.7 to 2.1): parameters that decay come
first, then biases and norms, both as their modules were made. Other shapes in that order are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gptj_ft.checkpoints.formats.cerebras import checkpoint_of, own_name, pattern_of
from gptj_ft.checkpoints.formats.cerebras_hdf5 import MdlFile, MdlShard
from gptj_ft.checkpoints.model_folder import Checkpoint, open_checkpoint
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.layout import MOMENTS, Kind
from gptj_ft.models.registry import Family
from gptj_ft.system.digests import read_json

FOLDER = "optimizer"
STATE = "state.json"
CEREBRAS_PREFIX = "optimizer.state."
HEAD = "lm_head.weight"
LEAST_POWER = 1e-37  # below, fp32 keeps fewer digits


@dataclass(frozen=True)
class Moments:
    """Opened moments of an optimizer.

    Attributes:
        updates: number of updates that they have seen.
        checkpoints: first and second moment, under Hugging Face's names of their parameters.
    """

    updates: int
    checkpoints: Mapping[Kind, Checkpoint]


def has_moments(folder: Path) -> bool:
    """Tell whether a model folder holds an optimizer's moments."""
    return (folder / FOLDER / STATE).is_file()


def count_updates(folder: Path) -> int:
    """Return the number of updates that the moments in a model folder have seen.

    Raises:
        DataError: it does not say.
    """
    path = folder / FOLDER / STATE
    updates = read_json(path).get("updates")
    if type(updates) is not int or updates < 0:
        raise DataError(f"{path}: updates is {updates!r}, not a number of updates; convert the model again")
    return updates


def open_moments(folder: Path) -> Moments:
    """Open the moments in a model folder.

    Raises:
        DataError, UsageError: a file is damaged or missing.
    """
    return Moments(count_updates(folder), {kind: open_checkpoint(folder / FOLDER / kind) for kind in MOMENTS})


def has_cerebras_moments(file: MdlFile) -> bool:
    """Tell whether a file holds an optimizer's moments."""
    return any(name.startswith(CEREBRAS_PREFIX) and name.endswith(f".{MOMENTS[0]}") for name in file.names)


def read_cerebras_moments(file: MdlFile, family: Family) -> Moments:
    """Open the moments in a file.

    Raises:
        UsageError: it says neither whose they are nor how many updates they have seen.
        DataError: it is damaged.
    """
    found = {kind: _keys(file, kind) for kind in MOMENTS}
    if found["exp_avg"].keys() != found["exp_avg_sq"].keys():
        raise DataError(f"{file.path}: some parameters have one of Adam's two moments, but not the other")
    names = _names(file, found["exp_avg"], family)
    opened: dict[Kind, Checkpoint] = {}
    for kind, data_sets in found.items():
        shard = MdlShard(file.path, {names[key]: name for key, name in data_sets.items()})
        opened[kind] = checkpoint_of(file.path, dict.fromkeys(shard.entries, shard), family)
    return Moments(_updates(file), opened)


def _keys(file: MdlFile, kind: Kind) -> dict[str, str]:
    """Return the data sets of a moment by what the optimizer calls the parameter."""
    form = re.compile(rf"{re.escape(CEREBRAS_PREFIX)}(.+)\.{kind}")
    return {found[1]: name for name in file.names if (found := form.fullmatch(name))}


def _names(file: MdlFile, data_sets: Mapping[str, str], family: Family) -> dict[str, str]:
    """Return the parameters' names by what the optimizer calls them: the same, or their numbers."""
    if not all(key.isdigit() for key in data_sets):
        # Of the last norm's copies, of which the model's weights lack none, the optimizer has the one made first.
        return {key: key if norm_of(key) in data_sets else norm_of(key) for key in data_sets}
    keys = sorted(data_sets, key=int)
    shapes = {name: entry.shape for name, entry in file.parameters.entries.items()}
    numbered = MdlShard(file.path, data_sets).entries
    for order in _orders(list(shapes), family):
        if [shapes[name] for name in order] == [numbered[key].shape for key in keys]:
            return dict(zip(keys, order, strict=True))
    raise UsageError(
        f"{file.path}: its moments have numbers, and their shapes are not those of the parameters in the order of the "
        "model zoo, so that whose they are is not known: leave out --with-optimizer"
    )


def norm_of(name: str) -> str:
    """Return the name of the decoder's last norm for its copy's, and any other as it is."""
    return re.sub(r"(^|\.)ln_f\.", r"\1transformer_decoder.norm.", name)


def _orders(names: Sequence[str], family: Family) -> Iterator[list[str]]:
    """Yield the orders in which the parameters of a model may be numbered."""
    table = list(family.cerebras)
    blocks = next(place for place, pattern in enumerate(table) if "{}" in pattern)

    def place(name: str) -> tuple[int, int, int]:
        pattern, number = pattern_of(own_name(name))
        rank = table.index(pattern) if pattern in table else len(table)
        return (blocks, int(number), rank) if number else (rank, 0, 0)

    def is_decayed(name: str) -> bool:
        return name.endswith(".weight") and not re.search(r"\.norm\d?\.weight$", name)

    # The last norm's copies, and a head that is the embedding, are one parameter.
    unique = [name for name in names if family.cerebras.get(own_name(name), name) is not None]
    made = sorted(unique, key=place)
    for order in (made, [name for name in made if own_name(name) != HEAD]):
        yield sorted(order, key=lambda name: not is_decayed(name))  # stable
        yield order


def _updates(file: MdlFile) -> int:
    """Return the number of updates that the moments have seen.

    The power of the second decay starts at it and is multiplied by it with each update. The file need not say the
    decay, nor have the power where the optimizer does not correct the bias; then the step of the run has to do.
    """
    powers = (name for name in file.names if name.startswith(CEREBRAS_PREFIX) and name.endswith(".beta2_power"))
    power = next(powers, None)
    beta2 = _beta2(file)
    if power is not None and beta2 is not None and 0 < beta2 < 1:
        value = file.value(power)
        if LEAST_POWER < value < 1:
            return max(0, round(math.log(value) / math.log(beta2)) - 1)
    if file.step is None:
        raise UsageError(
            f"{file.path} does not say how many updates its moments have seen (global_step): leave out --with-optimizer"
        )
    return file.step


def _beta2(file: MdlFile) -> float | None:
    both, second = "optimizer.param_groups.0.betas", "optimizer.param_groups.0.betas.1"
    if both in file.names:
        return file.value(both, 1)
    return file.value(second) if second in file.names else None
