"""Read the optimizer state of a Cerebras ``.mdl``.

Newer releases name moments by their parameters. Older ones (1.7 to 2.1) number them, and nothing that can be read
without unpickling gives the order. It follows from the model zoo's code: parameters with weight decay come first, then
biases and norms, each group in the order in which the modules were created. Shapes that contradict it are rejected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from gptj_ft.checkpoints.foreign.cerebras_mdl import MdlFile, MdlShard
from gptj_ft.checkpoints.foreign.cerebras_names import hugging_face_checkpoint, own_name, pattern_of
from gptj_ft.checkpoints.model_folder import Checkpoint
from gptj_ft.checkpoints.optimizer_state import Moments
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.layout import MOMENTS, Kind
from gptj_ft.models.registry import Family

STATE_PREFIX = "optimizer.state."
HEAD = "lm_head.weight"
LEAST_POWER = 1e-37  # smaller values are subnormal in fp32 and have fewer digits


def has_cerebras_moments(file: MdlFile) -> bool:
    """Tell whether a file holds optimizer moments."""
    return any(name.startswith(STATE_PREFIX) and name.endswith(f".{MOMENTS[0]}") for name in file.names)


def open_cerebras_moments(file: MdlFile, family: Family) -> Moments:
    """Open the moments in a file.

    Raises:
        UsageError: the parameters of the moments, or their number of updates, cannot be determined.
    """
    keys = {kind: _keys(file, kind) for kind in MOMENTS}
    if keys["exp_avg"].keys() != keys["exp_avg_sq"].keys():
        raise DataError(f"{file.path}: some parameters have one of Adam's two moments, but not the other")
    names = _parameter_names(file, keys["exp_avg"], family)
    checkpoints: dict[Kind, Checkpoint] = {}
    for kind, data_sets in keys.items():
        shard = MdlShard(file.path, {names[key]: name for key, name in data_sets.items()})
        checkpoints[kind] = hugging_face_checkpoint(file.path, dict.fromkeys(shard.entries, shard), family)
    return Moments(_updates(file), checkpoints)


def _keys(file: MdlFile, kind: Kind) -> dict[str, str]:
    """Map the optimizer's key of each parameter to the data set of its moment."""
    form = re.compile(rf"{re.escape(STATE_PREFIX)}(.+)\.{kind}")
    return {match[1]: name for name in file.names if (match := form.fullmatch(name))}


def _parameter_names(file: MdlFile, data_sets: Mapping[str, str], family: Family) -> dict[str, str]:
    """Map the optimizer's keys to parameter names. A key is the name itself or a number."""
    if not all(key.isdigit() for key in data_sets):
        # The weights hold the last norm twice. The optimizer state holds only the copy that was created first.
        return {key: key if norm_of(key) in data_sets else norm_of(key) for key in data_sets}
    keys = sorted(data_sets, key=int)
    shapes = {name: entry.shape for name, entry in file.parameters.entries.items()}
    numbered = MdlShard(file.path, data_sets).entries
    for order in _orders(list(shapes), family):
        if [shapes[name] for name in order] == [numbered[key].shape for key in keys]:
            return dict(zip(keys, order, strict=True))
    raise UsageError(
        f"{file.path}: its moments are numbered, and their shapes do not match the parameters in the model zoo's "
        "order, so they cannot be assigned: leave out --with-optimizer"
    )


def norm_of(name: str) -> str:
    """Return the name of the decoder's last norm for the name of its copy; any other name unchanged."""
    return re.sub(r"(^|\.)ln_f\.", r"\1transformer_decoder.norm.", name)


def _orders(names: Sequence[str], family: Family) -> Iterator[list[str]]:
    """Yield the orders in which releases of the model zoo number the parameters."""
    table = list(family.cerebras)
    blocks = next(place for place, pattern in enumerate(table) if "{}" in pattern)

    def place(name: str) -> tuple[int, int, int]:
        pattern, number = pattern_of(own_name(name))
        rank = table.index(pattern) if pattern in table else len(table)
        return (blocks, int(number), rank) if number else (rank, 0, 0)

    def is_decayed(name: str) -> bool:
        return name.endswith(".weight") and not re.search(r"\.norm\d?\.weight$", name)

    # The two copies of the last norm count as one parameter, and so does a head tied to the embedding.
    unique = [name for name in names if family.cerebras.get(own_name(name), name) is not None]
    created = sorted(unique, key=place)
    # Releases differ in whether a tied head counts, and whether parameters with weight decay come first.
    for order in (created, [name for name in created if own_name(name) != HEAD]):
        yield sorted(order, key=lambda name: not is_decayed(name))  # a stable sort keeps the order of creation
        yield order


def _updates(file: MdlFile) -> int:
    """Return the number of updates that the moments have seen.

    Raises:
        UsageError: the file does not record it.
    """
    # Adam's state holds beta2 to the power of (updates + 1), so the number follows from a logarithm. Without bias
    # correction there is no such power, and beta2 may be missing: then take the run's step.
    powers = (name for name in file.names if name.startswith(STATE_PREFIX) and name.endswith(".beta2_power"))
    power, beta2 = next(powers, None), _beta2(file)
    if power is not None and beta2 is not None and 0 < beta2 < 1:
        value = file.value(power)
        if LEAST_POWER < value < 1:
            return max(0, round(math.log(value) / math.log(beta2)) - 1)
    if file.step is None:
        raise UsageError(
            f"{file.path} does not record how many updates its moments have seen (global_step): leave out "
            "--with-optimizer"
        )
    return file.step


def _beta2(file: MdlFile) -> float | None:
    both, second = "optimizer.param_groups.0.betas", "optimizer.param_groups.0.betas.1"
    if both in file.names:
        return file.value(both, 1)
    return file.value(second) if second in file.names else None
