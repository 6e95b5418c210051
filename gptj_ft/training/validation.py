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
from gptj_ft.data.table import TokenTable
from gptj_ft.data.tokenization import load_tokenizer
from gptj_ft.errors import NotFinite, ResourceError
from gptj_ft.evaluation.metrics.statistic import values
from gptj_ft.planning.inference_plan import InferenceWorkload, token_budget_within
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.files import keep_folder, replace_text
from gptj_ft.training.nonfinite import explain_loss
from gptj_ft.training.parallel import Validated
from gptj_ft.training.row_scores import RowScores, references_of, score_rows, validate
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
        by_row: whether to set `row_scores` for a language model, too.
    """

    def __init__(self, setup: TrainSetup, run: Run, start: Validated | None = None, by_row: bool = False) -> None:
        self._setup, self._start = setup, start
        self._table: TokenTable | None = None
        self._samples: ValidationSamples | None = None
        self.row_scores: RowScores | None = None  # of the latest validation
        self.start_scores: RowScores | None = None  # of the validation before the first step
        has_labels = setup.recipe.task != "language-model"
        if len(setup.validation) and (has_labels or by_row):
            self._table = load_dataset(run.data / "validation").rows
        if len(setup.validation) and setup.recipe.sample_rows and not has_labels:
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
        result = parallel.validate(self._setup, offloaded, partial(self._compute, offloaded, step, before_pass))
        if step == 0:
            self.start_scores = self.row_scores
        return result

    def _compute(
        self, offloaded: OffloadedModel, step: int, before_pass: Callable[[], None]
    ) -> tuple[float, ValidationSample | None]:
        """Validate the model of this rank."""
        setup, tokens = self._setup, self._setup.recipe.micro_batch_tokens
        measure = partial(validate, offloaded, setup.validation, tokens, objective=setup.objective)
        if self._table is not None:
            losses, self.row_scores = score_rows(setup, self._table, offloaded, before_pass)
        else:
            losses = measure(before_pass)
        loss = losses.mean
        if not math.isfinite(loss):
            if setup.parallel.world.size > 1:  # locating the tensor takes passes that all ranks would have to join
                raise NotFinite(f"the validation loss after step {step} is not finite")
            raise explain_loss("validation loss", step, setup, offloaded, measure)
        return loss, self._samples.take(offloaded, step) if self._samples else self._labelled_sample()

    def _labelled_sample(self) -> ValidationSample | None:
        """Return the scores of a task with labels on all rows; None for a language model."""
        if self._table is None or self.row_scores is None or self._setup.recipe.task == "language-model":
            return None
        references = references_of(self._table)
        figures = self.row_scores.figures(self._setup.recipe, self._setup.architecture.labels, references)
        scores = {name: value for name, value in values(figures, len(references)).items() if name != "loss"}
        return ValidationSample(scores, " | ".join(references[0]), self.row_scores.texts[0])


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
        # Generation shares the device with the open training stores: use only their unused budget.
        memory = plan.needs[0]
        free = memory.have - memory.need
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
