"""Answers to rows, and their scores: of labels the likeliest, else what the model writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

import torch

from gptj_ft.decoding import StreamedModel, batches_by_length, write_answers
from gptj_ft.families import Architecture
from gptj_ft.likelihood import candidates, documents_of, log_likelihoods, passes
from gptj_ft.metrics import Figure, score
from gptj_ft.metrics.squad import unanswered
from gptj_ft.recipe import Recipe
from gptj_ft.stack import LayerStack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Answerer:
    """Answers prompts as a recipe wants it.

    Args:
        recipe: labels, generation settings, seed.
        tokenizer: of the model.
        architecture: of the model.
        stack: the model; nothing of it is changed.
    """

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, architecture: Architecture, stack: LayerStack
    ) -> None:
        self._recipe, self._tokenizer, self._architecture, self._stack = recipe, tokenizer, architecture, stack
        self._labels = candidates(recipe, tokenizer)

    def together(self, prompts: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        """Yield the rows that share the passes over the weights."""
        if self._labels:
            answers = list(self._labels.values())
            return passes([sum(map(len, documents_of(prompt, answers))) for prompt in prompts])
        return batches_by_length([len(prompt) for prompt in prompts], self._recipe.generation)

    def answer(self, prompts: Sequence[Sequence[int]], seed: int) -> list[str]:
        """Return an answer to each of some prompts that `together` has put together.

        torch's generator is left as it was.

        Args:
            prompts: token ids of each.
            seed: tells them from others, so that what is sampled does not depend on what was done before.
        """
        if self._labels:
            found = log_likelihoods(self._stack, prompts, list(self._labels.values()), self._recipe.micro_batch_tokens)
            return [max(zip(each, self._labels, strict=True), key=itemgetter(0))[1] for each in found]
        device = self._stack.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed((self._recipe.seed * 1_000_003 + seed) % 2**63)
            model = StreamedModel(self._architecture, self._stack)
            return [text for _, text in sorted(write_answers(model, self._tokenizer, prompts, self._recipe.generation))]


def scores_of(recipe: Recipe, answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Figure]:
    """Return the recipe's scores of answers; where there is no answer, to say so is as good as to say nothing.

    Raises:
        DataError: a row without what a metric needs.
    """
    if "squad" in recipe.metrics:
        answers = unanswered(answers, recipe.no_answer)
        references = [unanswered(texts, recipe.no_answer) for texts in references]
    return score(recipe.metrics, answers, references)
