"""Convert a checkpoint to another form, tensor by tensor, and prove that nothing was lost."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import gptj_ft
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.formats import mesh_writing
from gptj_ft.formats.adapters import MergedCheckpoint, open_adapter
from gptj_ft.formats.draft import draft_name, drafted
from gptj_ft.formats.entries import Entry
from gptj_ft.formats.huggingface import check
from gptj_ft.formats.mesh_writing import MeshWriter
from gptj_ft.formats.sources import Form, Source, open_source
from gptj_ft.formats.streamed import Rows, Watch, write_streamed
from gptj_ft.formats.writing import INDEX, TUNING, copy_description, copy_origin, write_companions, write_json, writing
from gptj_ft.proof import Proof

DtypeChoice = Literal["keep", "fp32", "bf16", "fp16"]
Target = Literal["folder", "huggingface", "mesh"]
DTYPES: dict[DtypeChoice, torch.dtype | None] = {
    "keep": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
COMPANION_BYTES = 16 << 20  # tokenizer, configs, headers: more than GPT-J's take


@dataclass(frozen=True)
class Conversion:
    """What is to become of a checkpoint.

    Attributes:
        form: what the source is; ``None``: whatever it looks like.
        config: the shape of the model, where the source does not say it.
        to: a model folder (one shard per layer), Hugging Face's usual files, or mesh-transformer-jax's slim checkpoint.
        dtype: the type to store; ``keep`` leaves each tensor as it is.
        shard_bytes: of a file of Hugging Face's; what fits into one is not sharded.
        mesh_shards: of mesh-transformer-jax.
        tokenizer: a folder whose tokenizer files are copied; ``None``: the source's.
        verify: whether every tensor is read back and compared.
        merge: folder of an adapter that is added; what it remembers of its training is kept.
    """

    form: Form | None = None
    config: Path | None = None
    to: Target = "folder"
    dtype: DtypeChoice = "keep"
    shard_bytes: int = 5 * 10**9
    mesh_shards: int = 8
    tokenizer: Path | None = None
    verify: bool = True
    merge: Path | None = None


@dataclass(frozen=True)
class ConvertReport:
    """What `convert` wrote.

    Attributes:
        tensors: how many.
        parameters: numbers in them.
        bytes: their size as stored.
        dtype: the stored type, or ``mixed``.
        dropped: names of the source's tensors that a model does not need (masks of old files).
        not_finite: names of tensors that hold NaN or infinity, which were carried over as they are.
        has_left_moments: whether the source holds an optimizer's moments, which were left out.
        is_verified: whether each was read back and compared.
        seconds: reading, writing and comparing together.
    """

    tensors: int
    parameters: int
    bytes: int
    dtype: str
    dropped: tuple[str, ...]
    not_finite: tuple[str, ...]
    has_left_moments: bool
    is_verified: bool
    seconds: float


def convert(
    source: Path,
    target: Path,
    conversion: Conversion = Conversion(),
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Write a checkpoint in another form; memory use is about its largest tensor at most.

    Unless it is asked not to, every tensor of the result is compared with its source, bit for bit after the change of
    type, before the result appears under its name. After a kill or Ctrl-C the same call goes on where it was.

    Args:
        source: a checkpoint of any form that `sources.open_source` reads.
        target: the folder to write; it must not exist.
        conversion: what to write.
        progress: called with bytes done and bytes in all: what is written, and what is compared.

    Raises:
        UsageError: no checkpoint in the source, or the target exists or cannot be written.
        DataError: the source is damaged or does not fit its config, a value does not fit the type, or the result
            differs from the source.
        ResourceError: not enough space on the disk.
    """
    start = time.monotonic()
    plan = _plan(source, conversion)
    with (
        _scratch(target, plan) as scratch,
        open_source(source, conversion.form, conversion.config, scratch) as opened,
    ):
        dropped = check(opened.architecture, opened.checkpoint)
        if conversion.merge is not None:
            adapter = open_adapter(conversion.merge, opened.architecture)
            opened = replace(opened, checkpoint=MergedCheckpoint(opened.checkpoint, adapter))
        work = _Work(opened, target, conversion, dropped, progress)
        work.check_space()
        with drafted(target, plan) as draft:
            with writing(target):
                work.write(draft)
            if conversion.verify:
                work.verify(draft)
        types = {entry.dtype for entry in work.entries.values()}
        return ConvertReport(
            tensors=len(work.entries),
            parameters=sum(torch.Size(entry.shape).numel() for entry in work.entries.values()),
            bytes=work.bytes,
            dtype=str(types.pop()).removeprefix("torch.") if len(types) == 1 else "mixed",
            dropped=tuple(work.dropped),
            not_finite=tuple(sorted(work.not_finite)),
            has_left_moments=opened.has_moments,
            is_verified=conversion.verify,
            seconds=time.monotonic() - start,
        )


class _Work:
    """A conversion under way."""

    def __init__(
        self,
        source: Source,
        target: Path,
        conversion: Conversion,
        dropped: list[str],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.source, self.target, self.conversion, self.dropped = source, target, conversion, dropped
        stored = DTYPES[conversion.dtype]
        self.entries: dict[str, Entry] = {}
        for layer in range(len(source.architecture.layers())):
            for name in source.checkpoint.names_of(source.architecture, layer).values():
                entry = source.checkpoint.entry(name)
                self.entries[name] = Entry(stored or entry.dtype, entry.shape)
        self.bytes = sum(entry.num_bytes for entry in self.entries.values())
        self.not_finite: set[str] = set()
        self.proof = Proof()
        self._done, self._total = 0, self.bytes * (2 if conversion.verify else 1)
        self._progress = progress

    def check_space(self) -> None:
        """Check that the result fits on the disk, with what is there of it already."""
        there = next(folder for folder in (self.target, *self.target.absolute().parents) if folder.is_dir())
        draft = draft_name(self.target)
        written = sum(path.stat().st_size for path in draft.rglob("*") if path.is_file())
        free, needed = shutil.disk_usage(there).free, self.bytes + COMPANION_BYTES - written
        if free < needed:
            raise ResourceError(
                f"{self.target} needs {needed / 1e9:.1f} GB, but {there} has {free / 1e9:.1f} GB free; "
                "name a target on another disk, or convert to bf16"
            )

    def write(self, draft: Path) -> None:
        """Write all files."""
        source, kept = self.source, self.conversion
        watch = Watch(self._inspect, self._written)
        if kept.to == "mesh":
            types = {entry.dtype for entry in self.entries.values()}
            if not types <= set(mesh_writing.DTYPES):
                raise UsageError("mesh-transformer-jax stores fp32 or bf16: add --dtype fp32 or --dtype bf16")
            folder = draft / f"step_{source.step}"
            writer = MeshWriter(folder, source.architecture, source.checkpoint, kept.mesh_shards, self.entries)
            writer.write(source.step, watch)
            write_json(
                draft / "meta.json",
                {"step": source.step, "checkpoints": [source.step], "aux": {str(source.step): {}}},
            )
        else:
            files = self._files()
            entries = {draft / file: {name: self.entries[name] for name in names} for file, names in files.items()}
            write_streamed(entries, source.checkpoint, watch)
            if len(files) > 1 or kept.to == "folder":
                weight_map = {name: file for file, names in files.items() for name in names}
                write_json(draft / INDEX, {"metadata": {"total_size": self.bytes}, "weight_map": weight_map})
        stored = next(iter(self.entries.values())).dtype
        for entry in self.entries.values():
            stored = torch.promote_types(stored, entry.dtype)
        copy_origin(source.folder, draft)
        copy_description(source.folder, draft)
        write_companions(
            draft, source.architecture, stored, kept.tokenizer or source.folder, _tuning(kept.merge or source.folder)
        )

    def verify(self, draft: Path) -> None:
        """Compare each tensor that was written with its source."""
        form: Form = "mesh" if self.conversion.to == "mesh" else "huggingface"
        with open_source(draft, form, None, draft) as written:
            check(written.architecture, written.checkpoint)
            for name, problem in self.proof.problems(self.source.checkpoint, written.checkpoint, self.entries):
                if problem:
                    raise DataError(
                        f"{self.target}: {problem}: what was read back is not what {self.source.path} holds; "
                        "is the disk faulty?"
                    )
                self._advance(self.entries[name].num_bytes)

    def _files(self) -> dict[str, list[str]]:
        """Return which tensors go into which file."""
        source = self.source
        groups: list[list[str]] = []
        if self.conversion.to == "folder":
            num_layers = len(source.architecture.layers())
            groups = [
                list(source.checkpoint.names_of(source.architecture, layer).values()) for layer in range(num_layers)
            ]
        else:
            room = 0
            for name, entry in self.entries.items():
                if entry.num_bytes > room or not groups:
                    groups.append([])
                    room = self.conversion.shard_bytes
                groups[-1].append(name)
                room -= entry.num_bytes
            if len(groups) == 1:
                return {"model.safetensors": groups[0]}
        return {
            f"model-{number:05d}-of-{len(groups):05d}.safetensors": names
            for number, names in enumerate(groups, start=1)
        }

    def _inspect(self, name: str, piece: Tensor) -> None:
        """Note what is not finite in a piece of a tensor, in any thread; refuse what its type cannot hold."""
        if not piece.numel():
            return
        dtype = self.entries[name].dtype
        low, high = piece.aminmax()
        largest = max(abs(float(low)), abs(float(high)))
        if not largest < float("inf"):  # NaN, too
            self.not_finite.add(name)
        if dtype is torch.float16 and torch.finfo(dtype).max < largest < float("inf"):
            raise DataError(f"{self.source.path}: {name} holds {largest:.6g}, too large for fp16; use bf16 or fp32")

    def _written(self, name: str, rows: Rows, digest: str) -> None:
        self.proof.note(name, rows, digest)
        entry = self.entries[name]
        self._advance(entry.num_bytes * (rows[1] - rows[0]) // max(1, entry.rows))

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


@contextmanager
def _scratch(target: Path, plan: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the hidden name of a folder for what has to be unpacked; after a kill it stays, for the same conversion."""
    start = f".{target.name}.unpacked-"
    scratch = target.with_name(start + hashlib.sha256(json.dumps(plan["source"]).encode()).hexdigest()[:12])
    for old in target.parent.glob(f"{start}*") if target.parent.is_dir() else ():
        if old != scratch:
            shutil.rmtree(old, ignore_errors=True)
    try:
        yield scratch
    except Exception:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)


def _plan(source: Path, conversion: Conversion) -> dict[str, Any]:
    """Return all that decides what is written, the versions of the source's files by size and time."""
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    files += sorted(conversion.merge.iterdir()) if conversion.merge else []
    found = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.is_file()]
    chosen = {key: str(value) for key, value in asdict(conversion).items() if key != "verify"}
    config = conversion.config.read_text(errors="replace") if conversion.config and conversion.config.is_file() else ""
    return json.loads(json.dumps({"version": gptj_ft.__version__, "source": found, **chosen, "config": config}))  # type: ignore[no-any-return]


def _tuning(source: Path) -> dict[str, object] | None:
    """Return what a fine-tuned source says about its prompt and its training."""
    path = source / TUNING
    if not path.is_file():
        return None
    try:
        loaded: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    return loaded
