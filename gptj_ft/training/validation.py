"""Validate a model while it is trained: its loss on all held-out rows, and its answers to a few of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import Rows
from gptj_ft.data.dataset import load_dataset
from gptj_ft.data.split import select_rows
from gptj_ft.data.tokenization import load_tokenizer
from gptj_ft.errors import ResourceError
from gptj_ft.evaluation.likelihood import passes
from gptj_ft.evaluation.metrics.statistic import values
from gptj_ft.planning.inference_plan import InferenceWorkload, TokenBudget, token_budget_within
from gptj_ft.streaming.buffers import PASS_TOKENS
from gptj_ft.streaming.objective import CrossEntropy, Objective, StepLoss
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.scoring import evaluate_losses
from gptj_ft.system.files import keep_folder, replace_text
from gptj_ft.training.setup import TrainSetup


@dataclass(frozen=True)
class ValidationSample:
    """Answers of the model to the sampled rows.

    Attributes:
        scores: metrics over all sampled rows, by name.
        expected: references of the first row.
        answer: generated answer to the first row.
    """

    scores: dict[str, float]
    expected: str
    answer: str


def validate(
    offloaded: OffloadedModel,
    rows: Rows,
    budget_tokens: int,
    before_pass: Callable[[], None] = lambda: None,
    objective: Objective = CrossEntropy(),
) -> StepLoss:
    """Compute the loss over rows; nothing is trained.

    Rows are read and put on the device as they are needed. Which of them share a micro-batch depends on the rows alone;
    how many micro-batches share a pass over the weights depends on `BufferBudget.pass_tokens`, and changes no number.

    Args:
        offloaded: model.
        rows: rows to compute the loss of.
        budget_tokens: most tokens of a micro-batch.
        before_pass: called before each pass over the weights; may raise to stop.
        objective: objective; default: the next token.
    """
    losses: list[StepLoss] = []
    for span in passes(rows.lengths, PASS_TOKENS):
        batches = rows.batches(span, budget_tokens)
        for some in passes([len(batch.tokens_T) for batch in batches], offloaded.budget.pass_tokens):
            before_pass()
            losses += evaluate_losses(offloaded, [batches[number].to(offloaded.device) for number in some], objective)
    return StepLoss(sum(loss.total for loss in losses), sum(loss.weight for loss in losses))


class LabelledValidation:
    """Validate a model with a head: loss and scores of its task on all validation rows, in one pass.

    Args:
        setup: task, objective and labels.
        run: run that has the rows.
    """

    def __init__(self, setup: TrainSetup, run: Run) -> None:
        from gptj_ft.evaluation.readout import readout_of

        self._setup = setup
        self._table = load_dataset(run.data / "validation").rows
        self._readout = readout_of(setup.recipe, setup.architecture.labels)

    def measure(self, offloaded: OffloadedModel, before_pass: Callable[[], None]) -> tuple[StepLoss, ValidationSample]:
        """Compute the loss over the rows, and their scores; nothing is trained.

        Args:
            offloaded: model.
            before_pass: called before each pass over the weights; may raise to stop.

        Raises:
            NotFinite: a loss.
        """
        from gptj_ft.evaluation.label_evaluation import answer_rows, outputs_of, row_outputs

        setup, rows, losses = self._setup, self._setup.validation, list[StepLoss]()
        together = TokenBudget(setup.recipe.micro_batch_tokens, offloaded.budget.pass_tokens)
        outputs = outputs_of(offloaded, rows, setup.objective, together, before_pass, losses.append)
        answered = answer_rows(setup.recipe, self._readout, list(row_outputs(self._table, rows, outputs)))
        scores = values(answered.figures, len(answered.answers))
        expected = " | ".join(answered.references[0]) if answered.references[0] else ""
        sample = ValidationSample(
            {name: value for name, value in scores.items() if name != "loss"}, expected, answered.answers[0].text
        )
        return StepLoss(sum(loss.total for loss in losses), sum(loss.weight for loss in losses)), sample


class ValidationSamples:
    """Generate answers to the first of the validation rows; each validation writes them to ``samples/``.

    Args:
        setup: number of rows, and metrics, in its recipe.
        run: run that has the rows and gets the answers.
    """

    def __init__(self, setup: TrainSetup, run: Run) -> None:
        self._setup, self._run = setup, run
        prepared = load_dataset(run.data / "validation")
        chosen = select_rows(prepared, range(min(setup.recipe.sample_rows, len(prepared.rows))))
        rows = Rows.of(chosen.rows)
        self._prompts = [list(rows.prompt(row)) for row in range(len(rows))]
        self._references = [list(texts) for texts in chosen.rows["references"]]
        self._places = [f"{file}:{line}" for file, line in zip(chosen.rows["source"], chosen.rows["line"], strict=True)]
        self._tokenizer = load_tokenizer(setup.model)
        plan, lengths = setup.plan, [len(prompt) for prompt in self._prompts]
        reads = InferenceWorkload.of(setup.architecture, setup.dtype, setup.recipe.generation, prompts=lengths)
        spare = min(need.have - need.need for need in plan.needs if need.resource != "disk")
        self._together = token_budget_within(reads, setup.recipe.micro_batch_tokens, spare)

    def take(self, offloaded: OffloadedModel, step: int) -> ValidationSample:
        """Answer the rows, and write the answers down.

        Raises:
            ResourceError: they cannot be written.
        """
        from gptj_ft.evaluation.answerer import Answerer, scores_of

        setup = self._setup
        answerer = Answerer(setup.recipe, self._tokenizer, setup.architecture, offloaded, self._together)
        texts = answerer.answer_prompts(self._prompts)
        self._write(step, texts)
        figures = scores_of(setup.recipe, texts, self._references)
        return ValidationSample(values(figures, len(texts)), " | ".join(self._references[0]), texts[0])

    def _write(self, step: int, texts: list[str]) -> None:
        folder = self._run.folder / "samples"
        keys = ("place", "prediction", "references")
        lines = [dict(zip(keys, row, strict=True)) for row in zip(self._places, texts, self._references, strict=True)]
        try:
            keep_folder(folder)
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            replace_text(folder / f"step-{step:06d}.jsonl", text)
        except OSError as error:
            raise ResourceError(f"cannot write {folder}: {error.strerror}") from error


def validation_samples(setup: TrainSetup, run: Run) -> LabelledValidation | ValidationSamples | None:
    """Build the sampler of a run's validation rows; ``None`` if none is asked for."""
    if not len(setup.validation):
        return None
    if setup.recipe.task != "language-model":
        return LabelledValidation(setup, run)
    return ValidationSamples(setup, run) if setup.recipe.sample_rows else None
