"""Prepare rows as a folder of tokens: repair them if asked to, tokenize them, write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.architecture import vocab_size_of
from gptj_ft.checkpoints.base_model import choose_model
from gptj_ft.config.options import Recipe
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
    """What is to be written.

    Attributes:
        folder: the prepared rows.
        fixed: the mended rows, if they are asked for.
    """

    folder: Path
    fixed: Path | None

    @classmethod
    def of(cls, data: str, output: Path | None, fix: bool, fixed: Path | None) -> Targets:
        """Choose them, and check that none of them is there.

        Args:
            data: the rows, as the user named them.
            output: folder; by default beside the rows.
            fix: whether rows are mended.
            fixed: file for these; by default beside the rows.

        Raises:
            UsageError: one exists, or nothing can be written so.
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
        """Return the message after a signal: the files that are there, all of them whole, and how to go on."""
        if self.folder.exists():
            return f"stopped; the rows are in {self.folder}, and only the report on them is missing"
        if self.fixed is not None and self.fixed.exists():
            command = command_line("prepare-data", "--data", self.fixed)
            return f"stopped; the mended rows are in {self.fixed}: go on with the options of before and\n{command}"
        return "stopped; nothing was written, and the same command begins again"


@dataclass(frozen=True)
class Preparation:
    """What was done.

    Attributes:
        recipe: options, with the columns if they were asked for.
        targets: folder and files written.
        model: model folder whose tokenizer was used.
        tokenizer: tokenizer of that model.
        prepared: the rows.
        fixes: report on repaired rows; ``None`` without ``--fix``.
    """

    recipe: Recipe
    targets: Targets
    model: Path
    tokenizer: RowTokenizer
    prepared: Prepared
    fixes: RepairReport | None

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values, those that `--json` prints."""
        return {**self.origin, **self.prepared.report.to_dict()}

    @property
    def origin(self) -> dict[str, Any]:
        """Where the rows are, whose tokens they are, and what was mended."""
        origin = {"folder": str(self.targets.folder), "model": str(self.model)}
        return {**origin, **({"fixes": self.fixes.to_dict()} if self.fixes else {})}

    def write(self) -> None:
        """Write the rows."""
        save_dataset(self.prepared, self.targets.folder)


def prepare_rows(recipe: Recipe, targets: Targets, reporter: Reporter) -> Preparation:
    """Mend rows if that is asked for, and turn them into tokens.

    Args:
        recipe: options; ``data`` names the rows.
        targets: folder and files to write.
        reporter: receiver of the rows done.

    Raises:
        UsageError, DataError: as its parts.
    """
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
    tokenizer = load_row_tokenizer(model)
    prepared = prepare_once(TokenizeJob(recipe, tokenizer, rows, vocab_size_of(model)), count)
    return Preparation(recipe, targets, model, tokenizer, prepared, fixes)
