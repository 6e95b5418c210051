"""The same few validation rows, answered at each validation: their scores, and the answers in ``samples/``."""

from __future__ import annotations

import json
from dataclasses import dataclass

from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import Rows
from gptj_ft.data.dataset import load
from gptj_ft.data.split import select
from gptj_ft.data.tokenizer import load_tokenizer
from gptj_ft.errors import ResourceError
from gptj_ft.evaluation.metrics.statistic import values
from gptj_ft.planning.inference_plan import InferenceWorkload, token_budget_within
from gptj_ft.streaming.model import OffloadedModel
from gptj_ft.system.files import keep_folder, replace_text
from gptj_ft.training.setup import TrainSetup


@dataclass(frozen=True)
class ValidationSample:
    """What a state of the model answers.

    Attributes:
        scores: of all the rows, by name.
        expected: in the first row.
        answer: to the first row.
    """

    scores: dict[str, float]
    expected: str
    answer: str


class ValidationSamples:
    """Answers the first of the validation rows.

    Args:
        setup: its recipe says how many rows, and how they are scored.
        run: has the rows, and gets the answers.
    """

    def __init__(self, setup: TrainSetup, run: Run) -> None:
        self._setup, self._run = setup, run
        prepared = load(run.data / "validation")
        chosen = select(prepared, range(min(setup.recipe.sample_rows, len(prepared.rows))))
        rows = Rows.of(chosen.rows)
        self._prompts = [list(rows.prompt(row)) for row in range(len(rows))]
        self._references = [list(texts) for texts in chosen.rows["references"]]
        self._places = [f"{file}:{line}" for file, line in zip(chosen.rows["source"], chosen.rows["line"], strict=True)]
        self._tokenizer = load_tokenizer(setup.model)
        plan, lengths = setup.plan, [len(prompt) for prompt in self._prompts]
        reads = InferenceWorkload.of(setup.architecture, setup.dtype, setup.recipe.generation, prompts=lengths)
        spare = min(need.have - need.need for need in plan.needs if need.resource != "disk")
        self._together = token_budget_within(reads, setup.recipe.micro_batch_tokens, spare)

    def take(self, stack: OffloadedModel, step: int) -> ValidationSample:
        """Answer the rows, and write the answers down.

        Raises:
            ResourceError: they cannot be written.
        """
        from gptj_ft.evaluation.predict import Predictor, scores_of

        setup = self._setup
        answerer = Predictor(setup.recipe, self._tokenizer, setup.architecture, stack, self._together)
        answers: dict[int, str] = {}
        for rows in answerer.together(self._prompts):
            found = answerer.answer([self._prompts[row] for row in rows], seed=rows[0])
            answers |= dict(zip(rows, found, strict=True))
        texts = [answers[row] for row in range(len(self._prompts))]
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
