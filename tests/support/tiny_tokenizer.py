"""Train a byte-level BPE tokenizer on a few words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gptj_ft.config.options import Recipe
from gptj_ft.data.encode import Encoded, assemble, eos_of, parts
from gptj_ft.data.tokenization import tokenize

TEXT = (
    "Summarize the following text. Answer the question from the passage. The patient came with a cough and was given "
    "water, rest and a second visit. Where did the patient come from? From the village by the river. Summary: Passage: "
    "\n\n\n\n \n\n\n"
)


def make_tokenizer(vocab_size=400, text=TEXT, eos="<|endoftext|>"):
    """Return a byte-level BPE like GPT-J's: it merges inside words, never across blanks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos] if eos else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 2, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)


def encode(recipe: Recipe, tokenizer, values: Mapping[str, Any], answer_at: int | None = None) -> Encoded:
    """Encode one row, as `tokenize_rows` does in batches."""
    texts = parts(recipe, values)
    ids = tokenize(tokenizer, [text for text, _ in texts])
    encoded = assemble(recipe, tokenizer, eos_of(tokenizer), values, texts, ids, answer_at)
    return encoded._replace(documents=tuple(map(list, encoded.documents)))
