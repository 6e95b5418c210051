"""Load the rows of a run: prepared ones as they are, others prepared on the spot."""

from __future__ import annotations

from pathlib import Path

from gptj_ft.config.options import Recipe
from gptj_ft.data.cache import prepare_once
from gptj_ft.data.hub_dataset import is_reference, local_folder
from gptj_ft.data.prepare import Prepared, check_compatible, is_prepared, load
from gptj_ft.data.token_checks import check_tokens
from gptj_ft.data.tokenizer import RowTokenizer
from gptj_ft.errors import UsageError


def data_path(data: str | None) -> Path:
    """Return the path of the rows; of those on the Hub, where they have been fetched to.

    Raises:
        UsageError: none were named, or they have not been fetched.
    """
    if data is None:
        raise UsageError(
            "no rows are named: add --data FILE (jsonl, json, csv, tsv, xlsx, parquet, txt, tfrecords, h5, a folder, "
            "or prepared) or --data hub:owner/name"
        )
    return local_folder(data) if is_reference(data) else Path(data).expanduser()


def read_or_prepare(recipe: Recipe, tokenizer: RowTokenizer, vocab_size: int, source: Path) -> Prepared:
    """Load prepared rows, and check that they fit this recipe and tokenizer; else prepare them from a file."""
    if is_prepared(source):
        prepared = load(source)
        check_compatible(prepared, recipe, tokenizer)
        check_tokens(prepared, source, vocab_size, recipe.max_length)
        return prepared
    return prepare_once(recipe, tokenizer, source, vocab_size)
