"""Answer prompts with the most likely label or with generated text, and score the answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import Document
from gptj_ft.evaluation.likelihood import label_candidates, log_likelihoods, losses, passes, size_of
from gptj_ft.evaluation.metrics import Statistic, score
from gptj_ft.evaluation.metrics.language_model import RowLoss
from gptj_ft.evaluation.metrics.squad import unanswered
from gptj_ft.evaluation.row_job import pending_rounds
from gptj_ft.generation.decoding import generate_tokens, text_of
from gptj_ft.generation.hf_model import Prefill, RaggedCache, StreamedModel
from gptj_ft.models.registry import Architecture
from gptj_ft.planning.inference_plan import TokenBudget, batches_by_length
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.accelerator import fork_rng

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class PromptGroup:
    """Prompts that are answered together."""

    prompts: Sequence[Sequence[int]]  # token ids of each
    seed: int  # seed of the group's samples, so that they do not depend on other groups
    documents: Sequence[Document] = ()
    """Documents that start with the prompts; their losses are computed in the same pass. Empty: no losses."""


Answers = tuple[list[str], list[RowLoss]]


class Answerer:
    """Answer prompts as a recipe says: the most likely of its labels, or generated text.

    Args:
        recipe: labels, generation settings, seed.
        budget: token budget of a pass; default: the recipe's ``micro_batch_tokens``.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerFast,
        architecture: Architecture,
        offloaded: OffloadedModel,
        budget: TokenBudget | None = None,
    ) -> None:
        self._recipe, self._tokenizer, self._architecture, self._offloaded = recipe, tokenizer, architecture, offloaded
        self._budget = budget or TokenBudget(recipe.micro_batch_tokens)
        self._window = int(architecture.config.n_positions)
        self._labels = label_candidates(recipe, tokenizer)

    @property
    def writes(self) -> bool:
        """Whether answers are generated rather than chosen among labels."""
        return not self._labels

    @property
    def round_size(self) -> int:
        """Number of groups to answer at a time: replicas generate one group each, but score one group together."""
        return self._offloaded.exchange.num_replicas if self.writes else 1

    def group(self, prompts: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        """Group rows that share passes over the weights."""
        if self._labels:
            answers = list(self._labels.values())
            return passes([size_of(prompt, answers, self._window) for prompt in prompts], self._budget.read)
        lengths = [len(prompt) for prompt in prompts]
        return batches_by_length(lengths, self._recipe.generation, 1, self._budget.written, self._window)

    def answer_prompts(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Answer all prompts; return the texts in order."""
        groups, texts = list(self.group(prompts)), dict[int, str]()
        for numbers in pending_rounds(groups, set(), self.round_size):
            some = [PromptGroup([prompts[row] for row in groups[number]], groups[number][0]) for number in numbers]
            for number, (answers, _) in zip(numbers, self.answer(some), strict=True):
                texts |= zip(groups[number], answers, strict=True)
        return [texts[row] for row in range(len(prompts))]

    def answer(self, groups: Sequence[PromptGroup]) -> list[Answers]:
        """Answer one round of groups, each on one of the model's replicas. torch's generator keeps its state.

        Returns:
            For each group, the answers to its prompts and the losses of its documents.
        """
        exchange = self._offloaded.exchange
        if exchange.num_replicas == 1 or not self.writes:
            return [self._answer(group) for group in groups]
        sizes = [sum(map(len, group.prompts)) for group in groups]
        units = [{**vars(group), "documents": [each._asdict() for each in group.documents]} for group in groups]
        results = exchange.map_units("answers", units, sizes, self.compute)
        return [(texts, [RowLoss(**loss) for loss in row_losses]) for texts, row_losses in results]

    def compute(self, units: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[str], list[dict[str, Any]]]]:
        """Yield answers and losses of the groups that this process computes; everything is JSON values."""
        for unit in units:
            documents = [Document(**each) for each in unit["documents"]]
            texts, row_losses = self._answer(PromptGroup(unit["prompts"], unit["seed"], documents))
            yield texts, [asdict(loss) for loss in row_losses]

    def _answer(self, group: PromptGroup) -> Answers:
        prompts = group.prompts
        if self._labels:
            answers = [list(self._labels.values())] * len(prompts)
            likelihoods = log_likelihoods(self._offloaded, prompts, answers, self._window, self._budget.computed)
            # max keeps the first of equally likely labels: the order of the recipe decides.
            best = [max(zip(each, self._labels, strict=True), key=lambda pair: pair[0].total) for each in likelihoods]
            return [label for _, label in best], []
        model = StreamedModel(self._architecture, self._offloaded, self._budget.computed)
        if not group.documents:
            return self._write(model, prompts, group.seed), []
        # Prefill the prompts once, for the losses and for the answers.
        prefill = Prefill(model, [len(prompt) for prompt in prompts], self._recipe.generation.num_beams)
        row_losses = losses(self._offloaded, self._tokenizer, group.documents, self._budget.computed, prefill.score)
        return self._write(model, prompts, group.seed, prefill.cache), row_losses

    def _write(
        self, model: StreamedModel, prompts: Sequence[Sequence[int]], seed: int, cache: RaggedCache | None = None
    ) -> list[str]:
        device, settings = self._offloaded.device, self._recipe.generation
        room = max(1, self._window - max(map(len, prompts)))
        # All rows of a group stop where the longest prompt meets the end of the context.
        if settings.max_new_tokens > room:
            fewer = {"max_new_tokens": room, "min_new_tokens": min(settings.min_new_tokens, room)}
            settings = settings.model_copy(update=fewer)
        with fork_rng(device):
            # The stride keeps neighbouring seeds of the recipe from sharing samples with other groups.
            torch.manual_seed((self._recipe.seed * 1_000_003 + seed) % 2**63)
            rows = generate_tokens(model, self._tokenizer, prompts, settings, read=cache)
        return [text_of(self._tokenizer, row, settings) for row in rows]


def scores_of(recipe: Recipe, answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Statistic]:
    """Score answers with the recipe's metrics; its "no answer" text counts as an empty answer.

    Raises:
        DataError: a metric needs a reference and a row has none.
    """
    if "squad" in recipe.metrics:
        answers = unanswered(answers, recipe.no_answer)
        references = [unanswered(texts, recipe.no_answer) for texts in references]
    return score(recipe.metrics, answers, references, recipe.stemming)
