"""Adapt a streamed model to lm-eval: many requests share a pass over the weights.

Tokenization and windows follow lm-eval's own `transformers` model, so scores are equal. Only `lm_eval.tasks` imports
this module, because it needs the extra ``harness``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from pydantic import ValidationError

from gptj_ft.config.options import Generation
from gptj_ft.data.tokenization import tokenize
from gptj_ft.errors import DataError, NotFinite, UsageError
from gptj_ft.evaluation.likelihood import Likelihood, log_likelihoods, passes, size_of
from gptj_ft.evaluation.row_job import Progress, ResultCache, pending_rounds
from gptj_ft.generation.decoding import PromptBatch, generate_batches
from gptj_ft.generation.hf_model import StreamedModel
from gptj_ft.planning.inference_plan import TokenBudget, batches_by_length

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerFast

NEW_TOKENS = 256  # default of lm-eval
TOP_K = 50  # default of `transformers` for sampling
OWN_NAMES = {"max_gen_toks": "max_new_tokens"}
Pair = tuple[list[int], list[int]]  # context; continuation to score


@dataclass
class KeptResults:
    """Caches of answers to lm-eval's requests."""

    facts: Mapping[str, Any]  # settings that determine the answers, except the requests
    caches: list[ResultCache]  # gets the opened caches, for deletion once the results are saved
    progress: Progress | None = None

    def of(self, kind: str, requests: Sequence[Instance]) -> ResultCache:
        """Open the cache of some requests; its rows are their numbers."""
        digest = sha256(json.dumps([request.args for request in requests], default=str).encode()).hexdigest()
        cache = ResultCache({**self.facts, "kind": kind, "requests": digest})
        self.caches.append(cache)
        return cache

    def show(self, done: int, total: int) -> None:
        """Report progress."""
        if self.progress:
            self.progress(done, total)


class StreamedLM(TemplateLM):  # type: ignore[misc]
    """Answer lm-eval's requests with a `StreamedModel`.

    Args:
        budget: token budget of a pass.
        results: caches of answers.
        seed: seed of sampling.
    """

    def __init__(
        self,
        model: StreamedModel,
        tokenizer: PreTrainedTokenizerFast,
        budget: TokenBudget,
        results: KeptResults,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self._budget, self._results, self._seed = model, tokenizer, budget, results, seed
        self.max_length = model.context

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token that precedes a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenize a text."""
        return tokenize(self.tokenizer, [string])[0]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Compute the log-likelihood of each continuation, and whether it is the greedy one."""
        cache = self._results.of("loglikelihood", requests)
        pairs = [self._pair(*request.args) for request in requests]
        return [(total, bool(greedy)) for total, greedy in self._score(pairs, cache)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Compute the log-likelihood of each text, with as much context per token as fits."""
        cache = self._results.of("rolling", requests)
        windows = [list(self._windows(str(request.args[0]))) for request in requests]
        scores = iter(self._score([pair for each in windows for pair in each], cache))
        return [math.fsum(next(scores)[0] for _ in each) for each in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Generate after each context, up to the first stop string of the task."""
        cache = self._results.of("generate", requests)
        text_of = cache.of("text")
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(number)
        for numbers in by_settings.values():
            settings, until = _settings_of(requests[numbers[0]].args[1], self._eos)
            room = self.max_length - settings.max_new_tokens
            if room < 1:
                raise UsageError(
                    f"the task asks for {settings.max_new_tokens} new tokens, but the model's context has "
                    f"{self.max_length} for prompt and answer"
                )
            # Like lm-eval, cut long contexts on the left: the question stands at the end.
            prompts = [self.tok_encode(str(requests[number].args[0]))[-room:] for number in numbers]
            prompt_of = dict(zip(numbers, prompts, strict=True))
            groups = batches_by_length([len(ids) for ids in prompts], settings, 1, self._budget.written)
            batches = [[numbers[index] for index in group] for group in groups]
            for some in pending_rounds(batches, text_of.keys(), self.model.offloaded.exchange.num_replicas):
                prompt_batches = [
                    PromptBatch(
                        [prompt_of[n] for n in batches[b]],
                        settings,
                        self._seed * 1_000_003 + batches[b][0],
                        stops_in_blanks=True,
                    )
                    for b in some
                ]
                outputs = generate_batches(self.model, self.tokenizer, prompt_batches)
                for b, rows in zip(some, outputs, strict=True):
                    texts = [str(self.tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
                    cut = [postprocess_generated_text(text, until, None) for text in texts]
                    cache.add("text", dict(zip(batches[b], cut, strict=True)))
                self._results.show(len(text_of), len(requests))
        return [str(text_of[number]) for number in range(len(requests))]

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        raise AssertionError("loglikelihood computes scores without this method")

    @property
    def _eos(self) -> str:
        return str(self.tokenizer.decode([self.eot_token_id]))

    def _pair(self, context: str, continuation: str) -> Pair:
        if context:
            before, scored = self._encode_pair(context, continuation)
        else:
            before, scored = [self.prefix_token_id], self.tok_encode(continuation)
            # As lm-eval does: a continuation that starts with the prefix token is not given a second one.
            if scored[:1] == before:
                scored = scored[1:]
        if not scored:
            raise DataError("the task asks for the likelihood of an empty text")
        if len(scored) > self.max_length:
            raise DataError(
                f"the task asks for the likelihood of {len(scored):,} tokens; the model's context has "
                f"{self.max_length:,}"
            )
        # The last token is only predicted, so both together may be one token longer than the model's context.
        return before[-(self.max_length + 1 - len(scored)) :], scored

    def _windows(self, text: str) -> Iterator[Pair]:
        tokens = self.tok_encode(text)
        windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
        yield from map(make_disjoint_window, windows)

    def _score(self, pairs: Sequence[Pair], cache: ResultCache) -> list[tuple[float, int]]:
        """Score continuations; pairs with the same context share it."""
        score_of = cache.of("score")
        # The choices of a multiple-choice question have the same context: read it once.
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, (before, _) in enumerate(pairs):
            groups.setdefault(tuple(before), []).append(number)
        contexts, members = list(groups), list(groups.values())
        answers = [[pairs[number][1] for number in numbers] for numbers in members]
        sizes = [size_of(*each, self.max_length) for each in zip(contexts, answers, strict=True)]
        for span in passes(sizes, self._budget.read):
            numbers = [number for group in members[span.start : span.stop] for number in group]
            if not score_of.keys() >= set(numbers):
                part = slice(span.start, span.stop)
                likelihoods = log_likelihoods(
                    self.model.offloaded, contexts[part], answers[part], self.max_length, self._budget.computed
                )
                flat = [_checked(each) for group in likelihoods for each in group]
                cache.add(
                    "score", {n: [each.total, int(each.is_argmax)] for n, each in zip(numbers, flat, strict=True)}
                )
            self._results.show(len(score_of), len(pairs))
        return [(float(score_of[n][0]), int(score_of[n][1])) for n in range(len(pairs))]


def _settings_of(kwargs: Mapping[str, Any], eos: str) -> tuple[Generation, list[str]]:
    """Translate a task's ``generation_kwargs`` into generation settings and stop strings."""
    options = dict(normalize_gen_kwargs(dict(kwargs), NEW_TOKENS))
    until = handle_stop_sequences(options.pop("until", None), eos=eos)
    if options.pop("do_sample", False):
        options = {"top_k": TOP_K, **options}
    else:
        options["temperature"] = 0.0
    own = {OWN_NAMES.get(name, name): value for name, value in options.items()}
    unknown = [str(name) for name in own if name not in Generation.model_fields]
    if unknown:
        raise UsageError(f"the task's generation_kwargs has {', '.join(unknown)}, which gptj-ft does not support")
    # Generation ends at the EOS token anyway, so its text is no stop string.
    stop = tuple(text for text in until if text and text != eos)
    try:
        return Generation.model_validate({**own, "stop": stop}), until
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"the task's generation_kwargs: {first['loc']}: {first['msg']}") from error


def _checked(likelihood: Likelihood) -> Likelihood:
    if not math.isfinite(likelihood.total):
        raise NotFinite("a likelihood is not a finite number: the model is damaged; try --precision fp32")
    return likelihood
