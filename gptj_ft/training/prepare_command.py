"""Run the command `prepare-data`: repair rows on request, tokenize them, and write them to a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.architecture import vocab_size_of
from gptj_ft.checkpoints.base_model import choose_model
from gptj_ft.checkpoints.model_defaults import with_model_defaults, within_context
from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import Resolved
from gptj_ft.data.checks.repair import RepairReport, choose_target, fix_rows
from gptj_ft.data.dataset import Prepared, save_dataset
from gptj_ft.data.hub_dataset import HUB_PREFIX, is_reference
from gptj_ft.data.load import data_path, prepare_once
from gptj_ft.data.prepare import TokenizeJob
from gptj_ft.data.readers.source import FileOptions, identify, is_prepared
from gptj_ft.data.tokenization import RowTokenizer, load_row_tokenizer
from gptj_ft.errors import UsageError
from gptj_ft.models.supported import TINY_MODELS
from gptj_ft.system.plain_text import command_line
from gptj_ft.training.reporter import Reporter


@dataclass(frozen=True)
class Targets:
    """Output paths."""

    folder: Path  # prepared rows
    fixed: Path | None  # repaired rows, with ``--fix``

    @classmethod
    def of(cls, data: str, output: Path | None, fix: bool, fixed: Path | None) -> Targets:
        """Choose the output paths and check that they do not exist.

        Args:
            data: the rows, as the user named them.
            output: folder; default: next to the rows.
            fix: whether rows are repaired.
            fixed: file of repaired rows; default: next to the rows.
        """
        if fixed is not None and not fix:
            raise UsageError("--fixed names the file that --fix writes: add --fix")
        source = Path(data.removeprefix(HUB_PREFIX).replace("/", "-")) if is_reference(data) else data_path(data)
        if is_prepared(source):
            raise UsageError(f"{source} is prepared already: give it to `gptj-ft finetune --data`")
        target = choose_target(source, fixed) if fix else None
        beside = target or source
        name = re.sub(r"[^\w.+-]+", "_", beside.name)  # of a pattern, too
        folder = output or beside.with_name(name + ".prepared")
        if folder.exists():
            raise UsageError(f"{folder} exists: name another --output or remove it")
        return cls(folder, target)

    def stopped(self) -> str:
        """Return the message after a signal: the complete files, and how to continue."""
        if self.folder.exists():
            return f"stopped; the rows are in {self.folder}, and only the report on them is missing"
        if self.fixed is not None and self.fixed.exists():
            command = command_line("prepare-data", "--data", self.fixed)
            return f"stopped; the repaired rows are in {self.fixed}: continue with the same options and\n{command}"
        return "stopped; nothing was written; repeat the command to start again"


@dataclass(frozen=True)
class Preparation:
    """Prepared rows."""

    recipe: Recipe  # options, with columns that the user was asked for
    targets: Targets  # written files
    model: Path  # folder of the model whose tokenizer was used
    tokenizer: RowTokenizer
    prepared: Prepared
    fixes: RepairReport | None  # None without ``--fix``

    def to_dict(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        return {**self.origin, **self.prepared.report.to_dict()}

    @property
    def origin(self) -> dict[str, Any]:
        """Folder of the rows, model of the tokenizer, and repairs."""
        origin = {"folder": str(self.targets.folder), "model": str(self.model)}
        return {**origin, **({"fixes": self.fixes.to_dict()} if self.fixes else {})}

    def write(self) -> None:
        save_dataset(self.prepared, self.targets.folder)


def prepare_rows(resolved: Resolved, targets: Targets, reporter: Reporter) -> Preparation:
    """Repair the rows that ``data`` names, if ``targets`` says so, and tokenize them."""
    recipe = resolved.recipe
    source = data_path(recipe.data)
    if is_prepared(source):
        raise UsageError(f"{source} is prepared already: give it to `gptj-ft finetune --data`")
    if recipe.model not in TINY_MODELS:
        choose_model(recipe, None)  # fail before anything is written
    rows, fixes = identify(source, FileOptions.of(recipe)), None

    def count(rows: int) -> None:
        reporter.on_count("rows", rows, None, "rows")

    if targets.fixed is not None:
        fixes = fix_rows(recipe, rows, targets.fixed, count)
        rows = identify(targets.fixed, FileOptions.of(recipe))
    model = choose_model(recipe, rows)
    recipe, note = within_context(with_model_defaults(recipe, model), model, resolved.typed)
    if note:
        reporter.on_message(note)
    tokenizer = load_row_tokenizer(model)
    prepared = prepare_once(TokenizeJob(recipe, tokenizer, rows, vocab_size_of(model)), count)
    return Preparation(recipe, targets, model, tokenizer, prepared, fixes)
