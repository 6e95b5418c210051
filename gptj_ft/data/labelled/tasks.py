"""Choose the reader of a task's rows."""

from __future__ import annotations

from collections.abc import Mapping

from gptj_ft.data.labelled.encoder import LabelledEncoder, Setting, TaskReader
from gptj_ft.data.labelled.sentences import SentenceReader
from gptj_ft.data.labelled.spans import SpanReader
from gptj_ft.data.labelled.texts import NumberReader, SetReader, TextReader
from gptj_ft.data.labelled.words import WordReader

READERS: Mapping[str, type[TaskReader]] = {
    "classification": TextReader,
    "multi-label": SetReader,
    "regression": NumberReader,
    "token-labels": WordReader,
    "spans": SpanReader,
    "sentences": SentenceReader,
}


def labelled_encoder(setting: Setting, vocab_size: int) -> LabelledEncoder:
    """Build the encoder of a labelling task's rows.

    Args:
        vocab_size: rows of the model's embedding; every token id must be smaller.
    """
    return LabelledEncoder(setting, READERS[setting.recipe.task](setting), vocab_size)
