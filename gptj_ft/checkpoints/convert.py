"""Convert a checkpoint to another format, tensor by tensor, and verify the result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch

import gptj_ft
from gptj_ft.checkpoints import optimizer_state as moments_of_model
from gptj_ft.checkpoints.adapter import MergedCheckpoint, open_adapter, tuned_architecture, with_head_of
from gptj_ft.checkpoints.average import average_adapters, averaged
from gptj_ft.checkpoints.gguf.codes import KeptCodes
from gptj_ft.checkpoints.gguf.export import GgufExport, export_adapter
from gptj_ft.checkpoints.gguf.writer import NewTensor
from gptj_ft.checkpoints.metadata import check_base
from gptj_ft.checkpoints.model_folder import (
    DESCRIPTION,
    GENERATION_CONFIG,
    METADATA_FILE,
    Checkpoint,
    check_tensors,
    copy_files,
    copy_origin,
    heads_left_out,
    write_companions,
    write_json_file,
)
from gptj_ft.checkpoints.open import FORMATS, files_of, open_source
from gptj_ft.checkpoints.optimizer_state import Moments
from gptj_ft.checkpoints.quantize import PartsCheckpoint, Quantization, QuantizedCheckpoint, open_stored
from gptj_ft.checkpoints.source import CheckpointSource, FormatName
from gptj_ft.checkpoints.transfer import TensorTransfer
from gptj_ft.checkpoints.weight_file import TensorInfo, dtype_name
from gptj_ft.data.tokenization import has_tokenizer
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.models.layout import Kind
from gptj_ft.models.registry import Architecture
from gptj_ft.system.atomic import atomic_folder
from gptj_ft.system.digests import read_json
from gptj_ft.system.dtypes import PRECISIONS
from gptj_ft.system.files import files_in, remove
from gptj_ft.system.machine import free_disk
from gptj_ft.system.paths import is_adapter
from gptj_ft.system.scratch import scratch_folder
from gptj_ft.system.units import gigabytes

DtypeChoice = Literal["keep", "fp32", "bf16", "fp16", "q8_0"]
OutputFormat = Literal["folder", "huggingface", "mesh", "gguf"]
UNPACKED = "unpacked"  # staging folder of an archive's content
COMPANION_BYTES = 16 << 20  # upper bound of tokenizer, configs and headers


@dataclass(frozen=True)
class Conversion:
    """Settings of a conversion."""

    format: FormatName | None = None  # of the source; None: detected
    config: Path | None = None  # file with the model's shape, if the source has none
    to: OutputFormat = "folder"
    """``folder``: one shard per layer; ``huggingface``: files of `shard_bytes`; ``mesh``: a slim checkpoint; ``gguf``:
    one file for llama.cpp and a Modelfile for Ollama."""
    dtype: DtypeChoice = "keep"  # ``q8_0`` for ``gguf`` only
    shard_bytes: int = 5 * 10**9  # size limit of a Hugging Face file; a model that fits into one is not sharded
    mesh_shards: int = 8
    quantize: Quantization | Literal["keep"] | None = None
    """quantization of the linear layers of the blocks, for LoRA and inference; ``keep``: the codes of a GGUF file"""
    tokenizer: Path | None = None  # folder of the tokenizer files to copy; None: the source's
    verify: bool = True  # read every tensor back and compare it
    merge: Path | None = None  # folder of an adapter to merge; its metadata is kept
    any_base: bool = False  # merge into another model than the adapter was trained on, such as the unquantized one
    average: tuple[Path, ...] = ()  # folders of models or adapters to average the source with
    with_optimizer: bool = False  # convert the optimizer state, too, for a run that continues from it


@dataclass(frozen=True)
class ConvertReport:
    """Result of a conversion."""

    tensors: int  # number of tensors
    parameters: int  # number of parameters in them
    bytes: int  # size of the stored weights, without optimizer state
    dtype: str  # stored type, or ``mixed``
    dropped: tuple[str, ...]  # tensors that the model does not need: masks of old files, heads of pre-training
    left_out: tuple[str, ...]  # those of `dropped` that are weights
    missing: tuple[str, ...]  # optional tensors that the source lacks; a run that needs them initializes them randomly
    not_finite: tuple[str, ...]  # tensors with NaN or infinity, converted unchanged
    has_left_moments: bool  # the source's optimizer state was not converted
    updates: int | None  # number of updates that the converted moments have seen; None: no moments
    is_verified: bool  # every tensor was read back and compared
    seconds: float  # reading, writing and comparing


def convert(
    source: Path,
    target: Path,
    conversion: Conversion = Conversion(),
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Convert a checkpoint into a new folder. Memory use is about the largest tensor at most.

    By default every tensor of the result is compared with the source, bit by bit after the cast, before the folder gets
    its final name. After a kill or Ctrl-C, the same call resumes.

    Args:
        source: checkpoint of any format in `open.FORMATS`.
        progress: callback of bytes done and total bytes, written and compared.

    Raises:
        UsageError: the source holds no checkpoint or not the requested optimizer state; or the target exists or cannot
            be written.
        DataError: the source is damaged or contradicts its config, a value does not fit the type, or the result
            differs from the source.
        ResourceError: not enough disk space.
    """
    start = time.monotonic()
    if conversion.quantize is not None:
        _check_quantization(source, conversion)
    if conversion.average:
        if conversion.merge is not None or conversion.with_optimizer or conversion.to == "gguf":
            raise UsageError(
                "--average excludes --merge, --with-optimizer and --to gguf: convert the average afterwards"
            )
        if is_adapter(source):
            return _average_adapters(source, target, conversion)
    if conversion.to == "gguf":
        return _convert_to_gguf(source, target, conversion, progress)
    if conversion.dtype == "q8_0":
        raise UsageError("--dtype q8_0 needs --to gguf: other formats have no such type")
    with (
        # The staging folder survives a kill or Ctrl-C. A later call uses it only if the resume key is equal.
        atomic_folder(target, resume=_resume_key(source, conversion)) as draft,
        open_source(source, conversion.format, conversion.config, draft / UNPACKED) as single,
        averaged(single, conversion.average, conversion.dtype != "keep") as opened,
    ):
        moments = _moments_of(opened, conversion)
        opened, dropped = _merged(opened, conversion)
        plain = opened.checkpoint
        if conversion.quantize is not None:
            opened = replace(opened, checkpoint=_quantized(plain, opened.architecture, conversion))
        work = _Work(opened, moments, target, conversion, progress)
        work.check_space(draft)
        work.write(draft)
        if conversion.verify:
            work.verify(draft)
        remove(draft / UNPACKED)
        return ConvertReport(
            tensors=len(work.weights.entries),
            parameters=_num_parameters(opened.architecture, plain),
            bytes=work.weights.bytes,
            dtype=_stored_type(opened.checkpoint, work.weights.entries.values()),
            dropped=tuple(dropped),
            left_out=heads_left_out(opened.architecture, dropped),
            missing=tuple(sorted(opened.architecture.family.optional - work.weights.entries.keys()))
            if opened.architecture.task is None
            else (),
            not_finite=tuple(sorted(work.not_finite())),
            has_left_moments=opened.open_moments is not None and moments is None,
            updates=None if moments is None else moments.updates,
            is_verified=conversion.verify,
            seconds=time.monotonic() - start,
        )


def _stored_type(checkpoint: Checkpoint, entries: Iterable[TensorInfo]) -> str:
    return checkpoint.quantization_name if isinstance(checkpoint, PartsCheckpoint) else dtype_name(entries)


def _quantized(plain: Checkpoint, architecture: Architecture, conversion: Conversion) -> PartsCheckpoint:
    """Quantize a checkpoint as it is read, or keep the codes that it has."""
    dtype, name = PRECISIONS.get(conversion.dtype), conversion.quantize
    assert name is not None
    if name == "keep":
        return KeptCodes(plain, architecture, dtype)
    return QuantizedCheckpoint(plain, architecture, name, dtype)


def _check_quantization(source: Path, conversion: Conversion) -> None:
    if conversion.to not in ("folder", "huggingface"):
        raise UsageError(f"--quantize writes model folders: leave out --to {conversion.to}")
    if conversion.with_optimizer:
        raise UsageError("--quantize excludes --with-optimizer: quantized weights are never trained, only adapters are")
    if conversion.quantize == "keep" and (conversion.merge is not None or conversion.average):
        raise UsageError("--quantize keep excludes --merge and --average, which change the values: name nf4 or int8")
    if is_adapter(source):
        raise UsageError(f"{source} is an adapter: quantize its base model, or merge it with --merge first")


def _num_parameters(architecture: Architecture, checkpoint: Checkpoint) -> int:
    names = (checkpoint.names_of(architecture, layer).values() for layer in range(len(architecture.skeleton)))
    return sum(torch.Size(checkpoint.shape(name)).numel() for own in names for name in own if name in checkpoint.names)


def _merged(source: CheckpointSource, conversion: Conversion) -> tuple[CheckpointSource, list[str]]:
    """Check a checkpoint and merge an adapter, if any; return the names of dropped tensors, too."""
    dropped, adapter_folder = check_tensors(source.architecture, source.checkpoint), conversion.merge
    if adapter_folder is None:
        return source, dropped
    architecture = with_head_of(adapter_folder, source.architecture)
    adapter = open_adapter(adapter_folder, architecture)
    if not conversion.any_base:
        check_base(adapter_folder, architecture, source.checkpoint)
    merged = MergedCheckpoint(source.checkpoint, adapter, is_fp32=conversion.dtype != "keep")
    source = replace(source, architecture=replace(architecture, new=frozenset()), checkpoint=merged)
    return source, check_tensors(source.architecture, merged)


def _convert_to_gguf(
    source: Path, target: Path, conversion: Conversion, progress: Callable[[int, int], None] | None
) -> ConvertReport:
    """Write a GGUF file and its Modelfile, or an adapter's GGUF file; a killed conversion starts again."""
    start = time.monotonic()
    if conversion.with_optimizer:
        raise UsageError("--with-optimizer needs --to folder, the only format that stores optimizer state")
    if is_adapter(source):
        return _adapter_to_gguf(source, target, conversion)
    with (
        scratch_folder() as scratch,
        open_source(source, conversion.format, conversion.config, scratch / UNPACKED) as opened,
    ):
        opened, dropped = _merged(opened, conversion)
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None:
                progress(min(done, 2 * export.bytes), 2 * export.bytes)

        dtype: torch.dtype | Literal["q8_0"] | None = (
            "q8_0" if conversion.dtype == "q8_0" else PRECISIONS.get(conversion.dtype)
        )
        export = GgufExport(opened, dtype, _tokenizer_of(conversion, opened), target.stem, advance)
        free, needed = free_disk(target.parent), export.bytes + COMPANION_BYTES
        if free < needed:
            raise ResourceError(
                f"{target} needs {gigabytes(needed)}, but {target.parent} has {gigabytes(free)} free; "
                "name a target on another disk, or convert with --dtype q8_0"
            )
        export.write(target)
        return replace(
            _report_of(export.tensors, export.kind, start),
            dropped=tuple(dropped),
            left_out=heads_left_out(opened.architecture, dropped),
            not_finite=tuple(sorted(export.transfer.not_finite)),
            has_left_moments=opened.open_moments is not None,
        )


def _adapter_to_gguf(folder: Path, target: Path, conversion: Conversion) -> ConvertReport:
    start = time.monotonic()
    if conversion.dtype not in ("keep", "fp32") or conversion.merge is not None:
        raise UsageError(
            f"{folder} is an adapter, which becomes a GGUF file of its own in fp32: leave out --dtype; to merge it, "
            f"type `gptj-ft convert --merge {folder} --to gguf`"
        )
    architecture = tuned_architecture(folder)
    tensors = export_adapter(open_adapter(folder, architecture), architecture, target, lambda num_bytes: None)
    return _report_of(tensors, "F32", start)


def _report_of(tensors: Collection[NewTensor | TensorInfo], kind: str, start: float) -> ConvertReport:
    return ConvertReport(
        tensors=len(tensors),
        parameters=sum(torch.Size(tensor.shape).numel() for tensor in tensors),
        bytes=sum(tensor.num_bytes for tensor in tensors),
        dtype=kind.lower(),
        dropped=(),
        left_out=(),
        missing=(),
        not_finite=(),
        has_left_moments=False,
        updates=None,
        is_verified=True,
        seconds=time.monotonic() - start,
    )


def _average_adapters(source: Path, target: Path, conversion: Conversion) -> ConvertReport:
    if (conversion.to, conversion.dtype) != ("folder", "keep"):
        raise UsageError(f"{source} is an adapter, which has one format: leave out --to and --dtype")
    start = time.monotonic()
    entries = average_adapters((source, *conversion.average), target).values()
    return _report_of(entries, dtype_name(entries), start)


def _tokenizer_of(conversion: Conversion, source: CheckpointSource) -> Path:
    """Return the folder of the tokenizer: the named one, else the adapter's, which has its chat template, or the
    source's.
    """
    folders = [conversion.tokenizer, conversion.merge, source.folder]
    return next((folder for folder in folders if folder is not None and has_tokenizer(folder)), source.folder)


class _Work:
    """Conversion in progress: writes and verifies one staging folder."""

    def __init__(
        self,
        source: CheckpointSource,
        moments: Moments | None,
        target: Path,
        conversion: Conversion,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.source, self.target, self.conversion = source, target, conversion
        architecture = source.architecture
        dtype = None if conversion.quantize else PRECISIONS.get(conversion.dtype)
        self.weights = TensorTransfer(architecture, source.checkpoint, dtype, self._advance)
        self.updates = moments.updates if moments else 0
        self.moments: dict[Kind, TensorTransfer] = {}
        for kind, checkpoint in moments.checkpoints.items() if moments else ():
            check_tensors(architecture, checkpoint)
            self.moments[kind] = TensorTransfer(architecture, checkpoint, None, self._advance, kind == "exp_avg_sq")
        self.bytes = sum(copy.bytes for copy in (self.weights, *self.moments.values()))
        self._done, self._total = 0, self.bytes * (2 if conversion.verify else 1)
        self._progress = progress

    def check_space(self, draft: Path) -> None:
        """Check that the rest of the result fits on the disk."""
        written = sum(path.stat().st_size for path in files_in(draft) if UNPACKED not in path.parts)
        free, needed = free_disk(draft), self.bytes + COMPANION_BYTES - written
        if free < needed:
            raise ResourceError(
                f"{self.target} needs {gigabytes(needed)}, but {self.target.parent} has {gigabytes(free)} free; "
                "name a target on another disk, or convert to bf16"
            )

    def write(self, draft: Path) -> None:
        source, options, weights = self.source, self.conversion, self.weights
        if options.to == "mesh":
            write = FORMATS["mesh"].write
            assert write is not None
            write(draft, source, weights, options.mesh_shards)
        else:
            weights.write(draft, options.shard_bytes if options.to == "huggingface" else None)
        for kind, copy in self.moments.items():
            copy.write(draft / moments_of_model.FOLDER / kind)
        if self.moments:
            write_json_file(draft / moments_of_model.FOLDER / moments_of_model.STATE, {"updates": self.updates})
        quantized = source.checkpoint if isinstance(source.checkpoint, PartsCheckpoint) else None
        stored = reduce(torch.promote_types, weights.types if quantized is None else quantized.value_types)
        copy_origin(source.folder, draft)
        companions = _tokenizer_of(options, source)
        if options.merge is None:
            copy_files(source.folder, draft, DESCRIPTION)
        else:  # the base's card and chat template are those of another model
            copy_files(source.folder, draft, ("LICENSE",))
            for folder in (companions, options.merge):  # the adapter's last: it replaces the other
                copy_files(folder, draft, ("chat_template.jinja",))
        if (metadata := (options.merge or source.folder) / METADATA_FILE).is_file():
            write_json_file(draft / METADATA_FILE, read_json(metadata))
        # Last, because config.json makes the folder a model.
        quantization = None if quantized is None else quantized.quantization_config(stored)
        folders = (folder for folder in (options.merge, companions, source.folder) if folder is not None)
        generation = next((folder for folder in folders if (folder / GENERATION_CONFIG).is_file()), None)
        write_companions(draft, source.architecture, stored, companions, quantization, generation)

    def verify(self, draft: Path) -> None:
        """Compare each written tensor with its source."""
        name: FormatName = "mesh" if self.conversion.to == "mesh" else "huggingface"
        with open_source(draft, name, None, draft) as written:
            check_tensors(written.architecture, written.checkpoint)
            if self.conversion.quantize:
                with open_stored(draft, written.architecture) as stored:
                    self._compare(self.weights, stored)
            else:
                self._compare(self.weights, written.checkpoint)
        if self.moments:
            moments = moments_of_model.open_moments(draft)
            for kind, copy in self.moments.items():
                self._compare(copy, moments.checkpoints[kind])

    def not_finite(self) -> set[str]:
        """Return the names of tensors and moments with NaN or infinity."""
        moments = {f"{kind} of {name}" for kind, copy in self.moments.items() for name in copy.not_finite}
        return self.weights.not_finite | moments

    def _compare(self, copy: TensorTransfer, written: Checkpoint) -> None:
        try:
            copy.compare(written)
        except DataError as error:
            raise DataError(f"{self.target}: {error}") from error

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


def _moments_of(source: CheckpointSource, conversion: Conversion) -> Moments | None:
    """Open the optimizer state to convert, if requested.

    Raises:
        UsageError: the source has none, or the target format cannot hold it.
    """
    if not conversion.with_optimizer:
        return None
    if conversion.to != "folder" or conversion.merge is not None:
        raise UsageError(
            "--with-optimizer needs --to folder, the only format that stores optimizer state, and excludes --merge, "
            "which changes the weights that the state belongs to"
        )
    if source.open_moments is None:
        raise UsageError(
            f"{source.path} holds no optimizer state: leave out --with-optimizer. A full checkpoint of "
            "mesh-transformer-jax, a .mdl of Cerebras, or a folder converted with this option can hold it"
        )
    return source.open_moments()


def _resume_key(source: Path, conversion: Conversion) -> dict[str, Any]:
    """Return the settings that identify a resumable conversion, with size and time of each source file."""
    files = files_of(source)
    files += [file for folder in (conversion.merge, *conversion.average) if folder for file in sorted(folder.iterdir())]
    versions = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.is_file()]
    # Verification changes no file: a resumed call may do without it.
    options = {key: str(value) for key, value in asdict(conversion).items() if key != "verify"}
    config = conversion.config.read_text(errors="replace") if conversion.config and conversion.config.is_file() else ""
    # Through JSON, like the stored key that it is compared with: tuples become lists.
    return json.loads(json.dumps({"version": gptj_ft.__version__, "source": versions, **options, "config": config}))  # type: ignore[no-any-return]
