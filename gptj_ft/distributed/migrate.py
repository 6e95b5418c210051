"""Choose the state that a run resumes from, and move layer files to the ranks that own the layers now.

A machine with a disk of its own has the files of the layers that were trained there. On resume, the ranks tell each
other which files they see, agree on a step, and send files to new owners. With a shared file system every rank sees
every file, and nothing moves.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptj_ft.config.run_folder import COMMIT, MANIFEST, Run, owner_of
from gptj_ft.config.saved_values import PeerBest, PeerLayers, PeerStamps, PeerStates, Saved, checked
from gptj_ft.distributed.files import recv_file, send_file
from gptj_ft.distributed.pipeline import Partition
from gptj_ft.errors import DataError
from gptj_ft.streaming.stores.state_file import layer_path, stamp_of
from gptj_ft.system.digests import write_sealed
from gptj_ft.system.files import keep_folder, remove, sync_path
from gptj_ft.training.parallel import ResumePoint
from gptj_ft.training.retention import go_back
from gptj_ft.training.run_state import RunState
from gptj_ft.training.setup import TrainSetup
from gptj_ft.training.verify import stored_form


class Migration:
    """The layer files of a run on all pipeline ranks. Every method is called by all of them together."""

    def __init__(self, setup: TrainSetup, run: Run, partition: Partition) -> None:
        assert setup.whole is not None
        self._layouts = setup.whole.trained
        self._trained = [layer for layer, layout in enumerate(self._layouts) if layout.numel]
        self._recipe, self._run, self._partition, self._choice = setup.recipe, run, partition, setup.choice
        self._group = partition.group

    def find_resume_point(self) -> ResumePoint:
        """Agree on the state to resume from, and fetch the files of the local layers.

        Raises:
            DataError: no rank has the file of some layer, or a file is damaged.
        """
        run, group = self._run, self._group
        commit, checkpoints = run.last_commit(), run.whole_checkpoints()
        manifests = {str(step): run.manifest(step) for step in checkpoints}
        noted = run.record()["saved"] if run.record_file.is_file() else None
        messages = self._gather("saved", PeerStates, {"commit": commit, "manifests": manifests, "noted": noted})
        commits = [each["commit"] for each in messages if each["commit"]]
        last = max(commits, key=lambda each: int(each["step"]), default=None)
        lost = dict[Path, tuple[int, list[int]]]()  # incomplete states, newest first: step and missing layers
        if last:
            step = int(last["step"])
            # A layer in the state before needs its gradient. Earlier files are left from former owners.
            missing = self._missing_layers(run.state, step, allows_behind=True)
            if not missing:
                moved = self._fetch(run.state, step, ("layer", "gradient"))
                if run.writes and (commit is None or commit["step"] != step):
                    # This machine was cut off between the two phases of the commit, or is new: it has the gradients.
                    write_sealed(run.state / COMMIT, {key: last[key] for key in ("step", "facts", "update")})
                moved += self._fetch_best(last)
                group.barrier("agreed on a commit")
                return ResumePoint(last, max(checkpoints, default=None), moved)
            if not self._recipe.mirror:
                raise DataError(self._lost_message(run.state, step, missing))
            lost[run.state / COMMIT] = step, missing
        every = {int(step): manifest for each in messages for step, manifest in each["manifests"].items()}
        noted_paths = {run.folder / each["noted"] for each in messages if each["noted"]}
        for step in sorted(every, reverse=True):
            folder = run.checkpoint(step)
            if missing := self._missing_layers(folder, step):
                lost[folder / MANIFEST] = step, missing
                continue
            # A newer checkpoint that the run's record does not name was not finished: nothing is lost.
            loss = next(
                (each for path, each in lost.items() if path == run.state / COMMIT or path in noted_paths), None
            )
            moved = self._fetch(folder, step, ("layer",), check_digests=loss is not None)
            if run.writes and step not in checkpoints:
                write_sealed(folder / MANIFEST, {key: every[step][key] for key in ("step", "facts")})
                sync_path(folder)
            moved += self._fetch_best(every[step])
            note = f"lost: {self._owners(loss[1])}; the run goes back from step {loss[0]} to {step}" if loss else None
            group.barrier("agreed on a checkpoint")
            if run.writes:
                go_back(run, step)  # a later checkpoint was not finished on every machine
            group.barrier("begins from a checkpoint")
            return ResumePoint(None, step, moved, note)
        # Without a record, the run was cut off while it made its first checkpoint: it starts again.
        if lost and (last or noted_paths):
            path, (step, missing) = next(iter(lost.items()))
            raise DataError(self._lost_message(path.parent, step, missing))
        return ResumePoint(None, None)

    def _gather(self, topic: str, kind: type[Saved], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the facts of every rank.

        Raises:
            DataError: a value of a rank is not of its declared type, range or length.
        """
        advice = "start the run again, and check that rank's machine"
        messages = enumerate(self._group.gather(topic, facts))
        return [checked(kind, each, f"the message '{topic}' of rank {rank}", advice) for rank, each in messages]

    def _stamps(self, folder: Path, prefix: str) -> dict[int, int]:
        """Return the step of each layer file in a local folder."""
        stamps = ((layer, stamp_of(layer_path(folder / prefix, layer))) for layer in self._trained)
        return {layer: stamp for layer, stamp in stamps if stamp is not None}

    def _valid_stamps(self, layer: int, step: int, allows_behind: bool) -> set[int]:
        """Return the stamps of a layer's file in a state after ``step`` steps.

        Args:
            allows_behind: whether the file may lack the last update, whose gradient is stored.
        """
        steps = (step, step - 1) if allows_behind else (step,)
        return {self._choice.last_step(layer, each) for each in steps}

    def _missing_layers(self, folder: Path, step: int, allows_behind: bool = False) -> list[int]:
        """Return the layers of which no rank has a valid file, see `_valid_stamps`."""
        stamps = self._stamps(folder, "layer").items()
        local = [layer for layer, stamp in stamps if stamp in self._valid_stamps(layer, step, allows_behind)]
        messages = self._gather("layers of a step", PeerLayers, {"has": local})
        return sorted(set(self._trained) - {layer for each in messages for layer in each["has"]})

    def _fetch_best(self, saved: Mapping[str, object]) -> int:
        """Fetch the local layers of the best checkpoint, too, if it is complete; return the received bytes."""
        run, best = self._run, RunState.of(dict(saved)).best
        if best is None or not self._recipe.keeps_best:
            return 0
        folder = run.checkpoint(best.step)
        is_local = (folder / MANIFEST).is_file()
        messages = self._gather("best state", PeerBest, {"manifest": run.manifest(best.step) if is_local else None})
        manifest = next((each["manifest"] for each in messages if each["manifest"]), None)
        if manifest is None or self._missing_layers(folder, best.step):
            return 0
        moved = self._fetch(folder, best.step, ("layer",))
        if run.writes and not is_local:
            write_sealed(folder / MANIFEST, {key: value for key, value in manifest.items() if key != "update"})
            sync_path(folder)
        return moved

    def _fetch(self, folder: Path, step: int, prefixes: Sequence[str], check_digests: bool = False) -> int:
        """Move the layer files of a folder to the owners of the layers; return the bytes that this rank receives.

        Args:
            step: step of the state; each layer is on some rank.
            prefixes: kinds of files, of which "layer" is one.
            check_digests: whether to check the files against their digests before anything moves.

        Raises:
            DataError: a file is damaged.
        """
        group, moved = self._group, 0
        local = {prefix: self._stamps(folder, prefix) for prefix in prefixes}
        facts = {prefix: {str(at): stamp for at, stamp in stamps.items()} for prefix, stamps in local.items()}
        stamps_by_rank = self._gather("layers", PeerStamps, facts)
        newest, sources = dict[int, int](), dict[int, int]()
        for layer in self._trained:
            stamps = [each["layer"].get(str(layer)) for each in stamps_by_rank]
            # A file of this step needs no gradient any more: prefer it to one of the step before.
            valid = self._valid_stamps(layer, step, "gradient" in prefixes)
            newest[layer] = max(stamp for stamp in stamps if stamp in valid)
            owner = self._partition.owner(layer)
            # If the owner itself has such a file, nothing has to move.
            sources[layer] = owner if stamps[owner] == newest[layer] else stamps.index(newest[layer])
        if check_digests:
            self._check_digests(folder, [layer for layer, source in sources.items() if source == group.rank])
        sent = list[Path]()
        for layer, source in sources.items():
            owner = self._partition.owner(layer)
            if source == owner:
                continue
            for prefix in prefixes:
                if prefix == "gradient" and newest[layer] == self._choice.last_step(layer, step):
                    continue  # the layer has this update
                path = layer_path(folder / prefix, layer)
                if group.rank == source:
                    send_file(group, owner, path)
                    sent.append(path)
                elif group.rank == owner:
                    keep_folder(path.parent)
                    moved += recv_file(group, source, path)
        group.barrier("layers moved")
        # Only after the barrier are all files on their new disk. A sent checkpoint file may stay as its mirror.
        if "gradient" in prefixes or not self._recipe.mirror:
            for path in sent:
                remove(path)
        return moved

    def _check_digests(self, folder: Path, layers: Sequence[int]) -> None:
        for layer in layers:
            path = layer_path(folder / "layer", layer)
            if damage := stored_form(path, self._layouts[layer]).damage(path):
                raise DataError(
                    f"{path} on {platform.node()} is damaged: {damage[0]}; the run would go back to it, because a disk "
                    "is lost. Restore it from a copy"
                )
        self._group.barrier("layers checked")

    def _lost_message(self, folder: Path, step: int, layers: Sequence[int]) -> str:
        files = ", ".join(f"{folder.name}/*-{layer:03d}.*" for layer in layers)
        return (
            f"on none of these machines at step {step}: {self._owners(layers)}. Start the run on all that have "
            f"trained it, or copy the files ({files}) from there to one of these; if that disk is lost, begin the run "
            "again"
        )

    def _owners(self, layers: Sequence[int]) -> str:
        """Name the last known machine of each layer."""
        local = {str(layer): owner_of(self._run, layer) for layer in layers}
        messages = self._group.gather("owners", {"of": local})
        owners = dict[str, list[str]]()
        for layer in layers:
            names = (each["of"][str(layer)] for each in messages if each["of"][str(layer)])
            owners.setdefault(next(names, "a machine that is not known"), []).append(str(layer))
        return "; ".join(
            f"layer{'s' if len(own) > 1 else ''} {', '.join(own)} of {name}" for name, own in owners.items()
        )
