"""Adapt a streamed model to lm-eval: many requests share a pass over the weights.

Texts become tokens, and windows of them, as lm-eval's own model of `transformers` makes them, so that the figures are
the same. Only `lm_eval.tasks`, which needs the extra of that name, imports this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from gptj_ft.evaluation.likelihood import Likelihood, documents_of, log_likelihoods, passes
from gptj_ft.evaluation.row_job import ResultCache
from gptj_ft.generation.decoding import PromptBatch, generate_batches, in_rounds
from gptj_ft.generation.hf_model import StreamedModel
from gptj_ft.planning.inference_plan import TokenBudget, batches_by_length

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerFast

NEW_TOKENS = 256  # lm-eval's, where a task does not say
TOP_K = 50  # `transformers`' when it samples, likewise
OWN_NAMES = {"max_gen_toks": "max_new_tokens"}
Pair = tuple[list[int], list[int]]  # what comes before, and what is asked about


@dataclass
class KeptResults:
    """Cache of answers to lm-eval's requests.

    Attributes:
        facts: settings that determine the answers besides the requests.
        journals: list that gets the caches, to be removed once the results are saved.
        progress: callback for (requests done, requests of the kind); default: none.
    """

    facts: Mapping[str, Any]
    journals: list[ResultCache]
    progress: Callable[[int, int], None] | None = None

    def of(self, kind: str, requests: Sequence[Instance]) -> ResultCache:
        """Return cached answers of some requests, by number."""
        digest = sha256(json.dumps([request.args for request in requests], default=str).encode()).hexdigest()
        journal = ResultCache({**self.facts, "kind": kind, "requests": digest})
        self.journals.append(journal)
        return journal

    def show(self, done: int, total: int) -> None:
        """Report progress."""
        if self.progress:
            self.progress(done, total)


class StreamedLM(TemplateLM):  # type: ignore[misc]
    """Answer lm-eval's requests with a `StreamedModel`.

    Args:
        model: the model.
        tokenizer: tokenizer of the model.
        together: token budget of a pass.
        findings: cache of answers.
        seed: seed of sampling.
    """

    def __init__(
        self,
        model: StreamedModel,
        tokenizer: PreTrainedTokenizerFast,
        together: TokenBudget,
        findings: KeptResults,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self._together, self._findings, self._seed = (
            model, tokenizer, together, findings, seed,
        )  # fmt: skip
        self.max_length = int(model.config.n_positions)

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
        journal = self._findings.of("loglikelihood", requests)
        pairs = [self._pair(*request.args) for request in requests]
        return [(total, bool(greedy)) for total, greedy in self._score(pairs, journal)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Compute the log-likelihood of each text, with as much context per token as fits."""
        journal = self._findings.of("rolling", requests)
        windows = [list(self._windows(str(request.args[0]))) for request in requests]
        found = iter(self._score([pair for each in windows for pair in each], journal))
        return [math.fsum(next(found)[0] for _ in each) for each in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Generate after each context, up to the first stop string of the task."""
        journal = self._findings.of("generate", requests)
        known = journal.of("text")
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(number)
        for numbers in by_settings.values():
            settings, until = _settings_of(requests[numbers[0]].args[1], self._eos)
            room = self.max_length - settings.max_new_tokens
            if room < 1:
                raise UsageError(
                    f"the task asks for {settings.max_new_tokens} new tokens, and the model was made for "
                    f"{self.max_length} in all"
                )
            prompts = [self.tok_encode(str(requests[number].args[0]))[-room:] for number in numbers]
            batches = batches_by_length([len(ids) for ids in prompts], settings, 1, self._together.written)
            left = [batch for batch in batches if not known.keys() >= {numbers[each] for each in batch}]
            for some in in_rounds(left, self.model.offloaded.exchange.num_replicas):
                seeds = [self._seed * 1_000_003 + numbers[batch[0]] for batch in some]
                asked = [
                    PromptBatch([prompts[each] for each in batch], settings, seed)
                    for batch, seed in zip(some, seeds, strict=True)
                ]
                for batch, found in zip(some, generate_batches(self.model, self.tokenizer, asked), strict=True):
                    texts = [str(self.tokenizer.decode(row, skip_special_tokens=True)) for row in found]
                    cut = [postprocess_generated_text(text, until, None) for text in texts]
                    journal.add("text", dict(zip([numbers[each] for each in batch], cut, strict=True)))
                self._findings.show(len(known), len(requests))
        return [str(known[number]) for number in range(len(requests))]

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        raise AssertionError("loglikelihood asks itself")

    @property
    def _eos(self) -> str:
        return str(self.tokenizer.decode([self.eot_token_id]))

    def _pair(self, context: str, continuation: str) -> Pair:
        if context:
            before, asked = self._encode_pair(context, continuation)
        else:
            before, asked = [self.prefix_token_id], self.tok_encode(continuation)
            if asked[:1] == before:
                asked = asked[1:]
        if not asked:
            raise DataError("a task asks how likely an empty text is")
        if len(asked) > self.max_length:
            raise DataError(
                f"a task asks for a continuation of {len(asked):,} tokens; the model was made for {self.max_length:,}"
            )
        return before[-(self.max_length + 1 - len(asked)) :], asked

    def _windows(self, text: str) -> Iterator[Pair]:
        tokens = self.tok_encode(text)
        windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
        yield from map(make_disjoint_window, windows)

    def _score(self, pairs: Sequence[Pair], journal: ResultCache) -> list[tuple[float, int]]:
        """Score continuations; pairs with the same context share it."""
        known = journal.of("score")
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, (before, _) in enumerate(pairs):
            groups.setdefault(tuple(before), []).append(number)
        contexts, members = list(groups), list(groups.values())
        answers = [[pairs[number][1] for number in numbers] for numbers in members]
        sizes = [sum(map(len, documents_of(*each))) for each in zip(contexts, answers, strict=True)]
        for span in passes(sizes, self._together.read):
            numbers = [number for group in members[span.start : span.stop] for number in group]
            if not known.keys() >= set(numbers):
                asked = slice(span.start, span.stop)
                found = log_likelihoods(self.model.offloaded, contexts[asked], answers[asked], self._together.computed)
                flat = [_checked(each) for group in found for each in group]
                journal.add(
                    "score", {n: [each.total, int(each.is_argmax)] for n, each in zip(numbers, flat, strict=True)}
                )
            self._findings.show(len(known), len(pairs))
        return [(float(known[n][0]), int(known[n][1])) for n in range(len(pairs))]


def _settings_of(asked: Mapping[str, Any], eos: str) -> tuple[Generation, list[str]]:
    """Translate a task's ``generation_kwargs`` into generation settings and stop strings.

    Raises:
        UsageError: one that is not known.
    """
    options = dict(normalize_gen_kwargs(dict(asked), NEW_TOKENS))
    until = handle_stop_sequences(options.pop("until", None), eos=eos)
    if options.pop("do_sample", False):
        options = {"top_k": TOP_K, **options}
    else:
        options["temperature"] = 0.0
    own = {OWN_NAMES.get(name, name): value for name, value in options.items()}
    unknown = [str(name) for name in own if name not in Generation.model_fields]
    if unknown:
        raise UsageError(f"the task's generation_kwargs has {', '.join(unknown)}, which is not known here")
    stop = tuple(text for text in until if text and text != eos)
    try:
        return Generation.model_validate({**own, "stop": stop}), until
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"the task's generation_kwargs: {first['loc']}: {first['msg']}") from error


def _checked(found: Likelihood) -> Likelihood:
    if not math.isfinite(found.total):
        raise NotFinite("a likelihood is not a finite number: the model is damaged; try --precision fp32")
    return found
