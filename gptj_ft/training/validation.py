"""Validate a model during training: its loss on all validation rows, and its answers to some of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import Rows
from gptj_ft.data.dataset import load_dataset
from gptj_ft.data.split import select_rows
from gptj_ft.data.tokenization import load_tokenizer
from gptj_ft.errors import NotFinite, ResourceError
from gptj_ft.evaluation.likelihood import passes
from gptj_ft.evaluation.metrics.statistic import values
from gptj_ft.planning.inference_plan import InferenceWorkload, TokenBudget, token_budget_within
from gptj_ft.streaming.buffers import PASS_TOKENS
from gptj_ft.streaming.objective import CrossEntropy, Objective, StepLoss
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.scoring import evaluate_losses
from gptj_ft.system.files import keep_folder, replace_text
from gptj_ft.training.nonfinite import explain_loss
from gptj_ft.training.parallel import Validated
from gptj_ft.training.setup import TrainSetup


@dataclass(frozen=True)
class ValidationSample:
    """Answers of the model to the sampled rows."""

    scores: dict[str, float]  # metrics over all sampled rows
    expected: str  # references of the first row
    answer: str  # generated answer to the first row


class Validator:
    """Measure loss and scores of a run on its validation rows.

    Args:
        start: known result of the validation before the first step.
    """

    def __init__(self, setup: TrainSetup, run: Run, start: Validated | None = None) -> None:
        self._setup, self._start = setup, start
        self._labelled: LabelledValidation | None = None
        self._samples: ValidationSamples | None = None
        if len(setup.validation) and setup.recipe.task != "language-model":
            self._labelled = LabelledValidation(setup, run)
        elif len(setup.validation) and setup.recipe.sample_rows:
            self._samples = ValidationSamples(setup, run)

    def validate(
        self, offloaded: OffloadedModel, step: int, stop_if_asked: Callable[[], None]
    ) -> tuple[float, ValidationSample | None]:
        """Return the loss, nats per target, and the sample; ``stop_if_asked`` is called between passes.

        Raises:
            NotFinite: the loss; the message names the first such tensor.
        """
        if step == 0 and self._start is not None:
            return self._start
        parallel = self._setup.parallel
        # Other replicas wait for the loss, and cannot agree on a stop before it.
        before_pass = stop_if_asked if parallel.replicas.size == 1 else lambda: None
        return parallel.validate(self._setup, offloaded, partial(self._compute, offloaded, step, before_pass))

    def _compute(
        self, offloaded: OffloadedModel, step: int, before_pass: Callable[[], None]
    ) -> tuple[float, ValidationSample | None]:
        """Validate the model of this rank."""
        setup, tokens = self._setup, self._setup.recipe.micro_batch_tokens
        measure = partial(validate, offloaded, setup.validation, tokens, objective=setup.objective)
        sample = None
        if self._labelled is not None:
            losses, sample = self._labelled.measure(offloaded, before_pass)
        else:
            losses = measure(before_pass)
        loss = losses.mean
        if not math.isfinite(loss):
            if setup.parallel.world.size > 1:  # locating the tensor takes passes that all ranks would have to join
                raise NotFinite(f"the validation loss after step {step} is not finite")
            raise explain_loss("validation loss", step, setup, offloaded, measure)
        return loss, self._samples.take(offloaded, step) if self._samples else sample


def validate(
    offloaded: OffloadedModel,
    rows: Rows,
    budget_tokens: int,
    before_pass: Callable[[], None] = lambda: None,
    objective: Objective = CrossEntropy(),
    span_tokens: int = PASS_TOKENS,
) -> StepLoss:
    """Compute the loss over rows, without training.

    Only the rows decide which of them share a micro-batch. `BufferBudget.pass_tokens` decides how many micro-batches
    share a pass over the weights, and changes no number.

    Args:
        budget_tokens: most tokens of a micro-batch.
        before_pass: called before each pass over the weights; may raise to stop.
        span_tokens: tokens of rows that are in memory at the same time.
    """
    losses: list[StepLoss] = []
    # Two bounds: rows of a span are in memory together, and batches of a pass share one load of the weights.
    for span in passes(rows.lengths, span_tokens):
        batches = rows.batches(span, budget_tokens)
        for some in passes([len(batch.tokens_T) for batch in batches], offloaded.budget.pass_tokens):
            before_pass()
            losses += evaluate_losses(offloaded, [batches[number].to(offloaded.device) for number in some], objective)
    return _total(losses)


def _total(losses: list[StepLoss]) -> StepLoss:
    return StepLoss(sum(loss.total for loss in losses), sum(loss.weight for loss in losses))


class LabelledValidation:
    """Compute loss and scores of a task with labels on all validation rows, in one pass."""

    def __init__(self, setup: TrainSetup, run: Run) -> None:
        from gptj_ft.evaluation.readout import readout_of

        self._setup = setup
        self._table = load_dataset(run.data / "validation").rows
        self._readout = readout_of(setup.recipe, setup.architecture.labels)

    def measure(self, offloaded: OffloadedModel, before_pass: Callable[[], None]) -> tuple[StepLoss, ValidationSample]:
        """Return the loss and the scores; ``before_pass`` may raise to stop."""
        from gptj_ft.evaluation.label_evaluation import answer_rows, outputs_of, row_outputs

        setup, rows, losses = self._setup, self._setup.validation, list[StepLoss]()
        budget = TokenBudget(setup.recipe.micro_batch_tokens, offloaded.budget.pass_tokens)
        outputs = outputs_of(offloaded, rows, setup.objective, budget, before_pass, losses.append)
        answered = answer_rows(setup.recipe, self._readout, list(row_outputs(self._table, rows, outputs)))
        scores = values(answered.figures, len(answered.answers))
        expected = " | ".join(answered.references[0]) if answered.references[0] else ""
        sample = ValidationSample(
            {name: value for name, value in scores.items() if name != "loss"}, expected, answered.answers[0].text
        )
        return _total(losses), sample


class ValidationSamples:
    """Generate answers to the first ``sample_rows`` validation rows, and write them to ``samples/`` of the run."""

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
        workload = InferenceWorkload.of(setup.architecture, setup.dtype, setup.recipe.generation, prompts=lengths)
        # Generation shares memory with the open training stores: use only their unused budget.
        free = min(need.have - need.need for need in plan.needs if need.resource != "disk")
        self._budget = token_budget_within(workload, setup.recipe.micro_batch_tokens, free)

    def take(self, offloaded: OffloadedModel, step: int) -> ValidationSample:
        """Generate, write and score the answers."""
        from gptj_ft.evaluation.answerer import Answerer, scores_of

        setup = self._setup
        answerer = Answerer(setup.recipe, self._tokenizer, setup.architecture, offloaded, self._budget)
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
