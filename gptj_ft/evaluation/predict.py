"""Predict answers to rows, and score them: the most likely label, else generated text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import Document
from gptj_ft.evaluation.likelihood import documents_of, label_candidates, log_likelihoods, losses, passes
from gptj_ft.evaluation.metrics import Statistic, score
from gptj_ft.evaluation.metrics.language_model import RowLoss
from gptj_ft.evaluation.metrics.squad import unanswered
from gptj_ft.generation.decoding import generate_tokens, text_of
from gptj_ft.generation.hf_model import Prefill, RaggedCache, StreamedModel
from gptj_ft.models.registry import Architecture
from gptj_ft.planning.inference_plan import TokenBudget, batches_by_length
from gptj_ft.streaming.model import OffloadedModel
from gptj_ft.system.accelerator import fork_rng

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Predictor:
    """Predict the answers of prompts as the recipe asks.

    Args:
        recipe: labels, generation settings, seed.
        tokenizer: tokenizer of the model.
        architecture: family and configuration of the model.
        stack: the model; nothing of it is changed.
        together: token budget of a pass.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerFast,
        architecture: Architecture,
        stack: OffloadedModel,
        together: TokenBudget | None = None,
    ) -> None:
        self._recipe, self._tokenizer, self._architecture, self._stack = recipe, tokenizer, architecture, stack
        self._sizes = together or TokenBudget(recipe.micro_batch_tokens)
        self._window = int(architecture.config.n_positions)
        self._labels = label_candidates(recipe, tokenizer)

    @property
    def writes(self) -> bool:
        """Whether answers are generated rather than chosen among labels."""
        return not self._labels

    def together(self, prompts: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        """Group rows that share passes over the weights."""
        if self._labels:
            answers = list(self._labels.values())
            return passes([sum(map(len, documents_of(prompt, answers))) for prompt in prompts], self._sizes.read)
        lengths = [len(prompt) for prompt in prompts]
        return batches_by_length(lengths, self._recipe.generation, 1, self._sizes.written, self._window)

    def answer(self, prompts: Sequence[Sequence[int]], seed: int) -> list[str]:
        """Answer a group of prompts made by `together`.

        torch's generator is left as it was.

        Args:
            prompts: token ids of each.
            seed: number of the group, so that samples do not depend on what was done before.
        """
        if self._labels:
            answers = [list(self._labels.values())] * len(prompts)
            found = log_likelihoods(self._stack, prompts, answers, self._sizes.computed)
            return [max(zip(each, self._labels, strict=True), key=lambda pair: pair[0].total)[1] for each in found]
        return self._write(self._model(), prompts, seed)

    def answer_and_score(
        self, prompts: Sequence[Sequence[int]], documents: Sequence[Document], seed: int
    ) -> tuple[list[str], list[RowLoss]]:
        """Answer prompts and compute the loss of the documents that begin with them, reading the prompts once."""
        model, settings = self._model(), self._recipe.generation
        reading = Prefill(model, [len(prompt) for prompt in prompts], settings.num_beams)
        found = losses(self._stack, self._tokenizer, documents, self._sizes.computed, reading.score)
        return self._write(model, prompts, seed, reading.cache), found

    def _model(self) -> StreamedModel:
        return StreamedModel(self._architecture, self._stack, self._sizes.computed)

    def _write(
        self, model: StreamedModel, prompts: Sequence[Sequence[int]], seed: int, read: RaggedCache | None = None
    ) -> list[str]:
        device, settings = self._stack.device, self._recipe.generation
        room = max(1, self._window - max(map(len, prompts)))
        if settings.max_new_tokens > room:
            fewer = {"max_new_tokens": room, "min_new_tokens": min(settings.min_new_tokens, room)}
            settings = settings.model_copy(update=fewer)
        with fork_rng(device):
            torch.manual_seed((self._recipe.seed * 1_000_003 + seed) % 2**63)
            rows = generate_tokens(model, self._tokenizer, prompts, settings, read=read)
        return [text_of(self._tokenizer, row, settings) for row in rows]


def scores_of(recipe: Recipe, answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Statistic]:
    """Score answers with the recipe's metrics; the recipe's "no answer" text counts as an empty answer.

    Raises:
        DataError: a row without what a metric needs.
    """
    if "squad" in recipe.metrics:
        answers = unanswered(answers, recipe.no_answer)
        references = [unanswered(texts, recipe.no_answer) for texts in references]
    return score(recipe.metrics, answers, references, recipe.stemming)
