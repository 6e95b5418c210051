"""Rows without a token to train on are refused before a run starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gptj_ft.config.options import Recipe
from gptj_ft.data.load import read_or_prepare
from gptj_ft.data.prepare import TokenizeJob
from gptj_ft.errors import DataError


def test_tokenizer_that_knows_no_word_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"word {n}", "summary": "short"}) + "\n" for n in range(3)))
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"<eos>": 0}, [])), eos_token="<eos>")
    recipe = Recipe(prompt="{{ text }}", completion="{{ summary }}", on_long="error", cache=False)
    with pytest.raises(DataError, match=r"rows.jsonl: no row has a token to train on; the tokenizer makes"):
        read_or_prepare(TokenizeJob.of(recipe, empty, rows, 1))
