"""Report how much of its training rows a language model gives away: continuations, membership, canaries.

One pass over the weights scores every row. It gives the row's loss, and whether each token is the most likely one:
greedy decoding repeats a span word for word if and only if each of its tokens is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gptj_ft.checkpoints.adapter import base_folder, tokenizer_folder
from gptj_ft.checkpoints.architecture import context_in, vocab_size_of
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import Document, Rows
from gptj_ft.data.canaries import Canary, alternatives, check_planted, draw_canaries, planted_rows
from gptj_ft.data.dataset import Prepared, content_hash, load_dataset
from gptj_ft.data.encode import tokens_digest
from gptj_ft.data.load import data_path, read_or_prepare
from gptj_ft.data.prepare import TokenizeJob
from gptj_ft.data.readers.source import is_prepared
from gptj_ft.data.tokenization import has_tokenizer, load_row_tokenizer, load_tokenizer, tokenize
from gptj_ft.errors import NotFinite, UsageError
from gptj_ft.evaluation.evaluate import STOPPED, Count, choose_baseline
from gptj_ft.evaluation.leak_report import (
    ANSWER,
    TEXT,
    ExaminedRow,
    ExposedCanary,
    LeakReport,
    RowScores,
    estimate_leaks,
    warnings_of,
)
from gptj_ft.evaluation.likelihood import Query, SharedPrompt, passes, run_queries, share_prompt, target_spans
from gptj_ft.evaluation.metrics.memorization import exposure
from gptj_ft.evaluation.row_job import Progress, ResultCache, check_complete
from gptj_ft.evaluation.text_evaluation import DAMAGED, evaluation_settings
from gptj_ft.generation.generator import InferenceSetup, check_writes
from gptj_ft.generation.workers import NO_WORKERS, Workers
from gptj_ft.planning.inference_plan import InferencePlan
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.paths import home, is_adapter
from gptj_ft.system.signals import stop_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_ROWS = 1000  # of each kind, by default
PREFIX, LENGTH = 50, 50  # tokens, as in most of the literature
SHORT_ANSWER = 10  # tokens; shorter answers are right by chance
ALTERNATIVES = 127  # of each canary, so that an exposure is at most 7 bits; each costs a pass over a short text


@dataclass(frozen=True)
class LeakRequest:
    """Model to examine, and the rows to examine it on."""

    model: Path  # model folder of a run
    recipe: Recipe  # device, memory and precision; templates for ``data``
    baseline: str = "auto"  # untuned model; ``auto``: the model it was tuned from; ``none``
    data: str | None = None  # rows that the model has never seen; None: the held-out rows of the run
    limit: int | None = None  # maximum number of rows of each kind, drawn by the seed; default: `MOST_ROWS`
    prefix: int | None = None  # tokens given before a continuation; default: `PREFIX`
    length: int | None = None  # tokens of a continuation; default: `LENGTH`
    workers: Workers = NO_WORKERS  # ranks that share the rows


@dataclass(frozen=True)
class Probe:
    """Row to examine."""

    place: str  # file and line
    is_trained: bool
    document: Document
    targets: Sequence[range]  # spans that are trained on
    spans: Mapping[str, range]  # continuations to check, by kind

    @cached_property
    def positions(self) -> list[int]:
        """Positions of the tokens to score."""
        return sorted({at for span in (*self.targets, *self.spans.values()) for at in span})

    @property
    def lengths(self) -> dict[str, int]:
        """Number of tokens of each continuation."""
        return {kind: len(span) for kind, span in self.spans.items()}

    @property
    def query(self) -> Query:
        """Document, and the tokens to score with the positions that predict them."""
        ids = self.document.ids
        return Query(ids[: self.document.num_inputs], [(at - 1, ids[at]) for at in self.positions])

    def read(self, log_probabilities: Sequence[float], is_right: Sequence[bool]) -> RowScores:
        """Sum up the scores of the positions."""
        at = {position: index for index, position in enumerate(self.positions)}
        losses = [-log_probabilities[at[position]] for span in self.targets for position in span]
        repeated = {
            # Index of the first wrong token: greedy decoding leaves the text there.
            kind: next((index for index, position in enumerate(span) if not is_right[at[position]]), len(span))
            for kind, span in self.spans.items()
        }
        return RowScores(math.fsum(losses) / len(losses), repeated)


@dataclass(frozen=True)
class LeakJob:
    """Planned pass of one model over the rows, with the results that an interrupted one has left."""

    setup: InferenceSetup
    probes: Sequence[Probe]
    candidates: Sequence[SharedPrompt]  # secrets to score; empty for the untuned model
    queries: Sequence[Query]  # of the rows, then of the candidates
    cache: ResultCache
    plan: InferencePlan

    @classmethod
    def of(
        cls, request: LeakRequest, folder: Path, probes: Sequence[Probe], candidates: Sequence[SharedPrompt]
    ) -> LeakJob:
        """Plan a pass, or resume an interrupted one.

        Raises:
            UsageError: the model writes no text.
            ResourceError: the model does not fit in memory.
        """
        setup = InferenceSetup.of(folder, request.recipe, workers=request.workers)
        check_writes(setup)
        queries = [*(probe.query for probe in probes), *(each.query for each in candidates)]
        scored = [tuple(map(list, query)) for query in queries], [dict(probe.spans) for probe in probes]
        digest = content_hash(repr(scored).encode())
        used = {"dtype": str(setup.dtype), "device": setup.device.type, "leaks": digest}
        cache = ResultCache({**evaluation_settings(folder, request.recipe), **used})
        plan = setup.plan(home(), documents=[len(query.ids) for query in queries])
        return cls(setup, probes, candidates, queries, cache, plan)

    def run(self, progress: Progress) -> tuple[list[RowScores], dict[int, float]]:
        """Score the rows and the candidates.

        Returns: scores of each row, log-probability of each secret by its number.

        Raises:
            NotFinite: a loss is not finite.
            DataError: a row got no result.
        """
        queries, done, rows = self.queries, self.cache.of("leaks"), len(self.probes)
        with self.setup.open(self.plan.weights) as (_, offloaded):
            for span in passes([len(query.ids) for query in queries], self.plan.together.read):
                # Passes depend on the rows only. A resumed examination skips those that are complete.
                if not done.keys() >= set(span):
                    self._score(offloaded, span)
                progress(span.stop, len(queries))
        check_complete(done.keys(), len(queries), lambda row: self.probes[row].place if row < rows else "a canary")
        logs = {
            secret: log
            for number, candidate in enumerate(self.candidates, rows)
            for secret, log in zip(candidate.scores, done[number], strict=True)
        }
        return [RowScores(**done[row]) for row in range(rows)], logs

    def _score(self, offloaded: OffloadedModel, span: range) -> None:
        results: dict[int, Any] = {}
        scores = run_queries(offloaded, [self.queries[number] for number in span], self.plan.together.computed)
        for number, (log_probabilities, is_right) in zip(span, scores, strict=True):
            if number >= len(self.probes):
                secrets = self.candidates[number - len(self.probes)].scores
                results[number] = [math.fsum(log_probabilities[numbers].tolist()) for numbers in secrets.values()]
                continue
            probe = self.probes[number]
            row = probe.read(log_probabilities.tolist(), is_right.tolist())
            if not math.isfinite(row.loss):
                raise NotFinite(f"the loss of {probe.place} is not a finite number: {DAMAGED}")
            results[number] = {"loss": row.loss, "repeated": row.repeated}
        self.cache.add("leaks", results)


@dataclass(frozen=True)
class LeakExamination:
    """Planned examination of a model, and of the model before tuning."""

    request: LeakRequest
    baseline: Path | None
    jobs: Mapping[str, LeakJob]  # by ``baseline`` and ``model``, in the order of computation
    probes: Sequence[Probe]
    canaries: Sequence[Canary]  # planted ones and controls
    lengths: tuple[int, int]  # tokens of prefix and continuation
    notes: tuple[str, ...]

    @classmethod
    def of(cls, request: LeakRequest) -> LeakExamination:
        """Read the rows of a model's run, and plan the passes.

        Raises:
            UsageError: the rows of the run or unseen rows are missing, or none is long enough for the continuation.
            DataError: the rows are damaged.
            ResourceError: a model does not fit in memory.
        """
        run = _run_of(request.model)
        trained, own = load_dataset(run.data / "train"), run.recipe()
        planted, canaries, candidates = dict[int, int](), list[Canary](), list[SharedPrompt]()
        if own.canaries:
            tokenizer = load_tokenizer(tokenizer_folder(request.model))
            planted, (drawn, controls) = planted_rows(trained.rows), draw_canaries(own)
            check_planted(trained.rows, planted, drawn, tokenizer)
            canaries = [*drawn, *controls]
            first, context = trained.rows["input_ids"][0][0], context_in(base_folder(request.model))
            candidates = _candidates(canaries, tokenizer, first, context, request.recipe.seed)
        lengths = (request.prefix or PREFIX, request.length or LENGTH)
        draw = _Draw(request.limit or MOST_ROWS, request.recipe.seed, *lengths)
        own_rows = [row for row in range(len(trained.rows)) if row not in planted]
        probes = draw.probes(trained, own_rows, is_trained=True)
        if (request.prefix or request.length) and not any(probe.spans for probe in probes):
            raise UsageError(_too_short(probes, *lengths))
        unseen, copies = _without_copies(_unseen_rows(request, run), trained)
        if not unseen[1]:
            raise UsageError("every unseen row is also a training row: name others with --data FILE")
        probes += draw.probes(*unseen, is_trained=False)
        notes = [f"{copies:,} unseen rows are copies of training rows and were left out"] if copies else []
        if not any(probe.spans for probe in probes if probe.is_trained):
            notes.append(f"continuations are not measured: {_too_short(probes, *lengths)}")
        baseline = choose_baseline(request.model, request.baseline)
        jobs = {}
        if baseline:
            _check_same_tokenizer(baseline, trained, own)
            jobs["baseline"] = LeakJob.of(request, baseline, probes, ())
        jobs["model"] = LeakJob.of(request, request.model, probes, candidates)
        return cls(request, baseline, jobs, probes, canaries, lengths, tuple(notes))

    @property
    def plan(self) -> InferencePlan:
        """Plan of the model that needs more memory."""
        return max((each.plan for each in self.jobs.values()), key=lambda plan: plan.device_bytes + plan.host_bytes)

    def run(self, count: Count) -> LeakReport:
        """Score the rows with both models, and report, see `measure`; then delete the cached scores."""
        report = self.measure(count)
        self.close()
        return report

    def measure(self, count: Count) -> LeakReport:
        """Score the rows with both models, and report; the scores stay cached until `close`.

        Raises:
            Interrupted: a signal; finished rows are cached.
            NotFinite: a loss is not finite.
        """
        results = {}
        for name, job in self.jobs.items():
            with stop_message(lambda: STOPPED):
                results[name] = job.run(lambda done, total, name=name: count(name, done, total, "texts"))  # type: ignore[misc]
        tuned, logs = results["model"]
        before: Sequence[RowScores | None] = results["baseline"][0] if self.baseline else [None] * len(tuned)
        rows = [
            ExaminedRow(probe.place, probe.is_trained, probe.lengths, new, old)
            for probe, new, old in zip(self.probes, tuned, before, strict=True)
        ]
        each = ALTERNATIVES + 1
        exposed = [
            ExposedCanary(canary, exposure(logs[start], [logs[start + n] for n in range(1, each)]))
            for start, canary in zip(range(0, len(logs), each), self.canaries, strict=True)
        ]
        report = LeakReport(
            model=str(self.request.model),
            baseline=str(self.baseline) if self.baseline else None,
            prefix=self.lengths[0],
            length=self.lengths[1],
            rows=rows,
            canaries=exposed,
            scores=estimate_leaks(rows, exposed, self.request.recipe.seed),
        )
        return replace(report, notes=(*self.notes, *warnings_of(report)))

    def close(self) -> None:
        """Delete the cached scores; call it once the report is saved: until then, the same command reads them."""
        for job in self.jobs.values():
            job.cache.close()


@dataclass(frozen=True)
class _Draw:
    """Sample of rows, and the continuations to check in each."""

    most: int
    seed: int
    prefix: int
    length: int

    def probes(self, prepared: Prepared, candidates: Sequence[int], is_trained: bool) -> list[Probe]:
        """Draw rows among candidates, in the order of the file."""
        generator = np.random.Generator(np.random.PCG64(self.seed))
        chosen = sorted(generator.permutation(np.asarray(candidates, np.int64))[: self.most].tolist())
        table = prepared.rows.select(chosen)
        rows = Rows.of(table, length=int(prepared.report.settings["max_length"]))
        places = (f"{source}:{line}" for source, line in zip(table["source"], table["line"], strict=True))
        documents = ((place, rows.row(index)[0]) for index, place in enumerate(places))
        probes = (Probe(place, is_trained, each, target_spans(each), self._spans(each)) for place, each in documents)
        return [probe for probe in probes if probe.targets]

    def _spans(self, document: Document) -> dict[str, range]:
        spans, targets = {}, target_spans(document)
        if len(document.ids) >= self.prefix + self.length:
            spans[TEXT] = range(self.prefix, self.prefix + self.length)
        # Text without a prompt starts at token 1.
        if targets and targets[0].start > 1 and len(answer := targets[0][: self.length]) >= SHORT_ANSWER:
            spans[ANSWER] = answer
        return spans


def _run_of(model: Path) -> Run:
    """Return the run that tuned a model.

    Raises:
        UsageError: the model has no run with rows, or it is for a task with labels.
    """
    run = Run(model.resolve().parent)
    if not run.recipe_file.is_file() or not is_prepared(run.data / "train"):
        raise UsageError(
            f"{model} has no run with training rows beside it, and --leaks examines these: name a run of `finetune`"
        )
    if (task := run.recipe().task) != "language-model":
        raise UsageError(f"{model} is for task '{task}', and --leaks examines language models")
    return run


def _unseen_rows(request: LeakRequest, run: Run) -> Prepared:
    """Read the rows that the model has never seen."""
    if request.data is not None:
        folder = base_folder(request.model) if is_adapter(request.model) else request.model
        tokenizer = load_row_tokenizer(tokenizer_folder(request.model))
        job = TokenizeJob.of(request.recipe, tokenizer, data_path(request.data), vocab_size_of(folder))
        return read_or_prepare(job)
    if not is_prepared(run.data / "validation"):
        raise UsageError(f"{run.folder} has no held-out rows: add --data FILE with rows that the model has never seen")
    return load_dataset(run.data / "validation")


def _without_copies(unseen: Prepared, trained: Prepared) -> tuple[tuple[Prepared, list[int]], int]:
    """Leave out unseen rows with the tokens of a training row; return the positions of the others, and the count."""
    known = set(map(_digest, trained.rows["input_ids"]))
    others = [row for row, ids in enumerate(unseen.rows["input_ids"]) if _digest(ids) not in known]
    return (unseen, others), len(unseen.rows) - len(others)


def _digest(ids: Iterable[int]) -> int:
    return content_hash(np.fromiter(ids, np.int32).tobytes())


def _too_short(probes: Sequence[Probe], prefix: int, length: int) -> str:
    longest = max((len(probe.document.ids) for probe in probes if probe.is_trained), default=0)
    return (
        f"no training row has {prefix} + {length} tokens, or a prompt and an answer of {SHORT_ANSWER}; the longest has "
        f"{longest}: lower --leak-prefix and --leak-tokens"
    )


def _check_same_tokenizer(baseline: Path, trained: Prepared, own: Recipe) -> None:
    folder = tokenizer_folder(baseline)
    digest = tokens_digest(own, load_row_tokenizer(folder)) if has_tokenizer(folder) else ""
    if digest and trained.report.tokenizer_sha256 and digest != trained.report.tokenizer_sha256:
        raise UsageError(f"{baseline} has another tokenizer than the run: name another --baseline, or none")


def _candidates(
    canaries: Sequence[Canary], tokenizer: PreTrainedTokenizerFast, first: int, context: int, seed: int
) -> list[SharedPrompt]:
    """Build the documents that score each canary: by number, its secret and then its alternatives.

    Args:
        first: first token of a training row; texts start with it if it is BOS.
        context: tokens of the model's context.
    """
    start = [first] if first == tokenizer.bos_token_id else []
    shared = list[SharedPrompt]()
    for number, canary in enumerate(canaries):
        secrets = [canary.secret, *alternatives(canary, ALTERNATIVES, seed)]
        texts = tokenize(tokenizer, [canary.prefix, *(canary.prefix + secret for secret in secrets)])
        known = next((at for at, ids in enumerate(zip(*texts, strict=False)) if len(set(ids)) > 1), len(texts[0]))
        answers = [text[known:] for text in texts[1:]]
        shared += share_prompt([*start, *texts[0][:known]], answers, context, number * len(answers))
    return shared
