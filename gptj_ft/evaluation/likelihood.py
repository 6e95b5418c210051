"""Score given texts: the loss of each row, and the log-likelihoods of candidate answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import Document, first_fit
from gptj_ft.data.columns import LABEL
from gptj_ft.data.encode import eos_of
from gptj_ft.data.loss_mask import span_borders
from gptj_ft.data.template import fields_of, render
from gptj_ft.data.tokenization import bytes_of_tokens, tokenize
from gptj_ft.evaluation.metrics.language_model import RowLoss
from gptj_ft.models.batch import NO_TARGET, PackedBatch, pack
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.scoring import TokenQuery, TokenScores, score_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Score = Callable[[Sequence[PackedBatch], Sequence[TokenQuery]], list[TokenScores]]
BRANCHED_PER_ROOT = 64
"""Most answer tokens in a document with several answers, divided by the square root of the prompt's tokens.

Attention computes the scores of all pairs of answer tokens and masks those of different answers; but each further
document computes the prompt again. With P prompt tokens, B answer tokens and width D, a layer spends 4 D B operations
an answer token on attention, and 24 D^2 P / B on the prompt: equal at B = sqrt(6 P D), which is 64 sqrt(P) for D = 683.
"""
MOST_BRANCHED = 1024  # most answer tokens however long the prompt is: the mask has a row for each


class Query(NamedTuple):
    """Tokens of a document to score."""

    ids: Sequence[int]
    pairs: Sequence[tuple[int, int]]  # position, and the token after it
    parents: Sequence[int] = ()  # position before each token if it is not the previous one, see `PackedBatch`


class QueryScores(NamedTuple):
    """Scores of the tokens of a `Query`."""

    log_probabilities_S: Tensor
    is_argmax_S: Tensor


def passes(sizes: Sequence[int], max_tokens: int) -> Iterator[range]:
    """Group rows, in order, into passes over the weights of at most ``max_tokens``; at least one row each.

    Args:
        sizes: tokens of each row.
    """
    start = tokens = 0
    for row, size in enumerate(sizes):
        if row > start and tokens + size > max_tokens:
            yield range(start, row)
            start, tokens = row, 0
        tokens += size
    if start < len(sizes):
        yield range(start, len(sizes))


def losses(
    offloaded: OffloadedModel,
    tokenizer: PreTrainedTokenizerFast | None,
    documents: Sequence[Document],
    budget_tokens: int,
    score: Score | None = None,
) -> list[RowLoss]:
    """Compute the loss of each document in one pass over the weights.

    Args:
        tokenizer: tokenizer that counts the words and bytes of the targets, or None.
        documents: documents with at least one target each.
        budget_tokens: tokens computed at once.
        score: scorer of token queries; default: `score_tokens`.
    """
    targets = [target_spans(document) for document in documents]
    queries = [
        Query(document.ids[: document.num_inputs], [(at - 1, document.ids[at]) for span in spans for at in span])
        for document, spans in zip(documents, targets, strict=True)
    ]
    rows = []
    for document, spans, scores in zip(
        documents, targets, run_queries(offloaded, queries, budget_tokens, score), strict=True
    ):
        words, num_bytes = _text_size(tokenizer, [document.ids[span.start : span.stop] for span in spans])
        rows.append(
            RowLoss(
                # fsum rounds only once, so the total does not depend on the order.
                total=-math.fsum(scores.log_probabilities_S.tolist()),
                targets=len(scores.log_probabilities_S),
                right=int(scores.is_argmax_S.sum()),
                words=words,
                bytes=num_bytes,
            )
        )
    return rows


def label_candidates(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> dict[str, list[int]]:
    """Return the tokens of each label that a recipe chooses among; empty if its answers are free text.

    The label's words alone are compared, as in GPT-3's evaluation (https://arxiv.org/abs/2005.14165, section 2.4).
    """
    if "accuracy" not in recipe.metrics or not recipe.labels or fields_of(recipe.completion) != (LABEL,):
        return {}
    texts = dict.fromkeys(render(recipe.completion, {LABEL: word}) for word in recipe.labels.values())
    tokens = tokenize(tokenizer, list(texts))
    # A label that starts with another label's tokens can never be more likely than that one. EOS makes them comparable.
    if any(one is not other and other[: len(one)] == one for one in tokens for other in tokens):
        tokens = [[*each, eos_of(tokenizer)] for each in tokens]
    return {text.strip(): ids for text, ids in zip(texts, tokens, strict=True)}


@dataclass(frozen=True)
class SharedPrompt:
    """Document that scores answers to one prompt: a trie, in which the tokens that answers begin with occur once."""

    last: int  # position of the prompt's last token
    ids: list[int]
    parents: list[int]  # position before each token; -1: none
    positions: dict[tuple[int, int], int]  # of each answer token that is read, by the position before it and its id
    numbers: dict[tuple[int, int], int]  # of each score, by the position that predicts the token and its id
    scores: dict[int, list[int]]  # of each answer, by its number: the numbers of its tokens' scores

    @classmethod
    def of(cls, prompt: Sequence[int]) -> SharedPrompt:
        return cls(len(prompt) - 1, list(prompt), list(range(-1, len(prompt) - 1)), {}, {}, {})

    @property
    def query(self) -> Query:
        is_branched = self.parents != list(range(-1, len(self.ids) - 1))
        return Query(self.ids, list(self.numbers), self.parents if is_branched else ())

    def size_with(self, answer: Sequence[int]) -> int:
        """Return the number of tokens with another answer."""
        at, known = self.last, 0
        for token in answer[:-1]:
            if (at, token) not in self.positions:
                break
            at, known = self.positions[at, token], known + 1
        return len(self.ids) + len(answer) - 1 - known

    def add(self, number: int, answer: Sequence[int]) -> None:
        """Add an answer and its number."""
        at, scores = self.last, []
        for index, token in enumerate(answer):
            scores.append(self.numbers.setdefault((at, token), len(self.numbers)))
            if index == len(answer) - 1:  # only predicted, never read
                break
            if (at, token) not in self.positions:
                self.positions[at, token] = len(self.ids)
                self.ids.append(token)
                self.parents.append(at)
            at = self.positions[at, token]
        self.scores[number] = scores


def share_prompt(
    prompt: Sequence[int], answers: Sequence[Sequence[int]], most_tokens: int, first: int = 0
) -> list[SharedPrompt]:
    """Build the documents that score the answers to a prompt.

    Args:
        most_tokens: maximum number of tokens of a document with several answers.
        first: number of the first answer.
    """
    branched = min(MOST_BRANCHED, int(BRANCHED_PER_ROOT * math.sqrt(len(prompt))))
    most_tokens, shared = min(most_tokens, len(prompt) + branched), list[SharedPrompt]()
    # Sorted, so that answers with a common beginning are in one document; longer ones first, since an answer that is
    # itself the beginning of another one then adds no token.
    for number, answer in sorted(enumerate(answers, first), key=lambda each: list(each[1]), reverse=True):
        if not shared or shared[-1].size_with(answer) > max(most_tokens, len(shared[-1].ids)):
            shared.append(SharedPrompt.of(prompt))
        shared[-1].add(number, answer)
    return shared


def size_of(prompt: Sequence[int], answers: Sequence[Sequence[int]], most_tokens: int) -> int:
    """Return the number of tokens that score the answers to a prompt, see `share_prompt`."""
    return sum(len(each.ids) for each in share_prompt(prompt, answers, most_tokens))


@dataclass(frozen=True)
class Likelihood:
    """Log-probability of an answer in nats, and whether greedy decoding would generate it."""

    total: float
    is_argmax: bool


def log_likelihoods(
    offloaded: OffloadedModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[Sequence[int]]],
    most_tokens: int,
    budget_tokens: int,
) -> list[list[Likelihood]]:
    """Compute the log-likelihood of each prompt's answers in one pass over the weights.

    Args:
        prompts: token ids of each, none empty.
        answers: token ids of the answers to each prompt.
        most_tokens: tokens of the model's context.
        budget_tokens: tokens computed at once.
    """
    shared = [share_prompt(*each, most_tokens) for each in zip(prompts, answers, strict=True)]
    scores = iter(run_queries(offloaded, [one.query for each in shared for one in each], budget_tokens))
    found = [
        {
            answer: _likelihood(own, numbers)
            for one, own in zip(each, islice(scores, len(each)), strict=True)
            for answer, numbers in one.scores.items()
        }
        for each in shared
    ]
    return [[each[answer] for answer in range(len(each))] for each in found]


def _likelihood(scores: QueryScores, numbers: Sequence[int]) -> Likelihood:
    total = math.fsum(scores.log_probabilities_S[numbers].tolist())
    return Likelihood(total, bool(scores.is_argmax_S[numbers].all()))


def target_spans(document: Document) -> list[range]:
    """Return the spans of target tokens, without the document's first token: it has no context to predict it from."""
    row = {"input_ids": document.ids, "prompt_length": document.prompt_length, "untrained": document.masked_spans}
    spans = [range(max(start, 1), end) for start, end in list(pairwise(span_borders(row)))[1::2]]
    return [span for span in spans if span]


def _text_size(
    tokenizer: PreTrainedTokenizerFast | None, spans: Sequence[Sequence[int]]
) -> tuple[int, int] | tuple[None, None]:
    """Count the words and bytes of token spans; None if an id has no token.

    GPT-J has 143 ids without a token, which other systems use as separators.
    """
    if tokenizer is None:
        return None, None
    special = set(tokenizer.all_special_ids)
    sizes = bytes_of_tokens(tokenizer)
    plain = [each for ids in spans for each in ids if each not in special]
    if not all(each in sizes for each in plain):
        return None, None
    texts = [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in spans]
    # Not the bytes of the texts: decoding replaces a character whose bytes are split between spans.
    return sum(len(text.split()) for text in texts), sum(sizes[each] for each in plain)


def run_queries(
    offloaded: OffloadedModel, queries: Sequence[Query], budget_tokens: int, score: Score | None = None
) -> list[QueryScores]:
    """Score the token queries of each document in one pass over the weights.

    Args:
        budget_tokens: tokens computed at once.
        score: scorer of token queries; default: `score_tokens`.
    """
    groups, batches, batch_queries, places_of = list[list[int]](), [], [], []
    for is_branched in (False, True):  # apart: with branches, attention has another kernel, so other bits
        numbers = [number for number, query in enumerate(queries) if bool(query.parents) == is_branched]
        for some in first_fit([len(queries[number].ids) for number in numbers], budget_tokens):
            group = [numbers[each] for each in some]
            parents = [queries[number].parents for number in group] if is_branched else None
            batch = pack([queries[number].ids for number in group], document_ids=group, parents=parents)
            starts = zip(batch.cu_seqlens, group, strict=False)
            pairs = [(start + at, token) for start, number in starts for at, token in queries[number].pairs]
            query, places_S = _token_query(pairs)
            groups.append(group)
            batches.append(batch.to(offloaded.device))
            batch_queries.append(TokenQuery(*(each.to(offloaded.device) for each in query)))
            places_of.append(places_S)
    results: dict[int, QueryScores] = {}
    batch_scores = score(batches, batch_queries) if score else score_tokens(offloaded, batches, batch_queries)
    for group, places_S, scores in zip(groups, places_of, batch_scores, strict=True):
        log_probabilities_S, is_argmax_S = (each.flatten()[places_S] for each in scores)
        ends = list(accumulate((len(queries[number].pairs) for number in group), initial=0))
        for number, (start, end) in zip(group, pairwise(ends), strict=True):
            results[number] = QueryScores(log_probabilities_S[start:end], is_argmax_S[start:end])
    return [results[number] for number in range(len(queries))]


def _token_query(pairs: Sequence[tuple[int, int]]) -> tuple[TokenQuery, Tensor]:
    """Query the tokens of all pairs, one row of logits a position; return also the index of each pair's score."""
    rows: dict[int, list[int]] = {}
    at = []
    for position, token in pairs:
        tokens = rows.setdefault(position, [])
        at.append((position, len(tokens)))
        tokens.append(token)
    width = max(map(len, rows.values()), default=1)
    starts = {position: row * width for row, position in enumerate(rows)}
    padded = [[*tokens, *[NO_TARGET] * (width - len(tokens))] for tokens in rows.values()]
    query = TokenQuery(torch.tensor(list(rows), dtype=torch.int64), torch.tensor(padded, dtype=torch.int64))
    return query, torch.tensor([starts[position] + column for position, column in at], dtype=torch.int64)
