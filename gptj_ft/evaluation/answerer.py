"""Predict answers to rows, and score them: the most likely label, else generated text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import Document
from gptj_ft.evaluation.likelihood import documents_of, label_candidates, log_likelihoods, losses, passes
from gptj_ft.evaluation.metrics import Statistic, score
from gptj_ft.evaluation.metrics.language_model import RowLoss
from gptj_ft.evaluation.metrics.squad import unanswered
from gptj_ft.generation.decoding import generate_tokens, in_rounds, text_of
from gptj_ft.generation.hf_model import Prefill, RaggedCache, StreamedModel
from gptj_ft.models.registry import Architecture
from gptj_ft.planning.inference_plan import TokenBudget, batches_by_length
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.accelerator import fork_rng

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")


@dataclass(frozen=True)
class PromptGroup:
    """Prompts that are answered together.

    Attributes:
        prompts: token ids of each.
        seed: number of the group, so that samples do not depend on what was done before.
        documents: rows that begin with them, whose loss is computed in the same pass; none: no loss is.
    """

    prompts: Sequence[Sequence[int]]
    seed: int
    documents: Sequence[Document] = ()


Answers = tuple[list[str], list[RowLoss]]


class Answerer:
    """Predict the answers of prompts as the recipe asks.

    Args:
        recipe: labels, generation settings, seed.
        tokenizer: tokenizer of the model.
        architecture: family and configuration of the model.
        offloaded: the model; nothing of it is changed.
        together: token budget of a pass.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerFast,
        architecture: Architecture,
        offloaded: OffloadedModel,
        together: TokenBudget | None = None,
    ) -> None:
        self._recipe, self._tokenizer, self._architecture, self._offloaded = recipe, tokenizer, architecture, offloaded
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

    def rounds(self, groups: Sequence[T]) -> Iterator[Sequence[T]]:
        """Yield as many groups at a time as processes write; of a group that is only read, all have a share."""
        return in_rounds(groups, self._offloaded.exchange.num_replicas if self.writes else 1)

    def answer(self, groups: Sequence[PromptGroup]) -> list[Answers]:
        """Answer groups of prompts made by `together`, those of a round dealt out to the model's replicas.

        torch's generator is left as it was.

        Returns:
            The answers to each group's prompts, and the losses of its documents.
        """
        exchange = self._offloaded.exchange
        if exchange.num_replicas == 1 or not self.writes:
            return [self._answer(group) for group in groups]
        sizes = [sum(map(len, group.prompts)) for group in groups]
        units = [{**vars(group), "documents": [each._asdict() for each in group.documents]} for group in groups]
        found = exchange.map_units("answers", units, sizes, self.compute)
        return [(texts, [RowLoss(**loss) for loss in of_documents]) for texts, of_documents in found]

    def compute(self, units: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[str], list[dict[str, Any]]]]:
        """Yield texts and losses of this process's share of the groups."""
        for unit in units:
            documents = [Document(**each) for each in unit["documents"]]
            texts, found = self._answer(PromptGroup(unit["prompts"], unit["seed"], documents))
            yield texts, [asdict(loss) for loss in found]

    def _answer(self, group: PromptGroup) -> Answers:
        prompts = group.prompts
        if self._labels:
            answers = [list(self._labels.values())] * len(prompts)
            likely = log_likelihoods(self._offloaded, prompts, answers, self._sizes.computed)
            best = [max(zip(each, self._labels, strict=True), key=lambda pair: pair[0].total) for each in likely]
            return [label for _, label in best], []
        model = StreamedModel(self._architecture, self._offloaded, self._sizes.computed)
        if not group.documents:
            return self._write(model, prompts, group.seed), []
        # The prompts are read once, for the losses and for the answers.
        reading = Prefill(model, [len(prompt) for prompt in prompts], self._recipe.generation.num_beams)
        found = losses(self._offloaded, self._tokenizer, group.documents, self._sizes.computed, reading.score)
        return self._write(model, prompts, group.seed, reading.cache), found

    def _write(
        self, model: StreamedModel, prompts: Sequence[Sequence[int]], seed: int, read: RaggedCache | None = None
    ) -> list[str]:
        device, settings = self._offloaded.device, self._recipe.generation
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
