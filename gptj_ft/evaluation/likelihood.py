"""Score given texts: per-row loss, and log-likelihoods of candidate answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import Document, first_fit
from gptj_ft.data.columns import LABEL
from gptj_ft.data.encode import eos_of
from gptj_ft.data.loss_mask import span_borders
from gptj_ft.data.template import fields_of, render
from gptj_ft.data.tokenization import tokenize
from gptj_ft.evaluation.metrics.language_model import RowLoss
from gptj_ft.models.batch import PackedBatch, pack
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.scoring import TokenQuery, TokenScores, score_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Score = Callable[[Sequence[PackedBatch], Sequence[TokenQuery]], list[TokenScores]]
Asked = tuple[Sequence[int], Sequence[tuple[int, int]]]  # a document; of it, positions and the tokens asked for after


def passes(sizes: Sequence[int], most_tokens: int) -> Iterator[range]:
    """Group rows, in order, into passes over the weights within a token budget; at least one row each.

    Args:
        sizes: tokens of each row.
        most_tokens: token budget of a pass.
    """
    start = tokens = 0
    for row, size in enumerate(sizes):
        if row > start and tokens + size > most_tokens:
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
        offloaded: the model.
        tokenizer: tokenizer for counting words and bytes of the targets, or ``None``.
        documents: each with at least one target.
        budget_tokens: tokens computed at once.
        score: scorer of token queries; default: `score_tokens`.
    """
    targets = [_targets(document) for document in documents]
    asked = [
        (each.ids[: each.num_inputs], [(at - 1, each.ids[at]) for span in spans for at in span])
        for each, spans in zip(documents, targets, strict=True)
    ]
    found = []
    for each, spans, scores in zip(documents, targets, _ask(offloaded, asked, budget_tokens, score), strict=True):
        words, num_bytes = _text_size(tokenizer, [each.ids[span.start : span.stop] for span in spans])
        found.append(
            RowLoss(
                total=-math.fsum(scores.log_probabilities_S.tolist()),
                targets=len(scores.log_probabilities_S),
                right=int(scores.is_argmax_S.sum()),
                words=words,
                bytes=num_bytes,
            )
        )
    return found


def label_candidates(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> dict[str, list[int]]:
    """Return the labels of a recipe with their tokens; empty if answers are free text.

    The words alone are compared, as GPT-3's authors did (https://arxiv.org/abs/2005.14165, 2.4). EOS counts only where
    one label's tokens begin another's, which could never be as likely as its own beginning.
    """
    if "accuracy" not in recipe.metrics or not recipe.labels or fields_of(recipe.completion) != (LABEL,):
        return {}
    texts = dict.fromkeys(render(recipe.completion, {LABEL: word}) for word in recipe.labels.values())
    tokens = tokenize(tokenizer, list(texts))
    if any(one is not other and other[: len(one)] == one for one in tokens for other in tokens):
        tokens = [[*each, eos_of(tokenizer)] for each in tokens]
    return {text.strip(): ids for text, ids in zip(texts, tokens, strict=True)}


def documents_of(prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> list[list[int]]:
    """Build the fewest documents that contain the context of every answer token."""
    beginnings = {tuple(answer[:-1]) for answer in answers}
    longest = [
        each for each in beginnings if not any(each != other and other[: len(each)] == each for other in beginnings)
    ]
    return [[*prompt, *each] for each in sorted(longest)]


@dataclass(frozen=True)
class Likelihood:
    """Log-probability of an answer in nats, and whether greedy decoding would produce it."""

    total: float
    is_argmax: bool


def log_likelihoods(
    offloaded: OffloadedModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[Sequence[int]]],
    budget_tokens: int,
) -> list[list[Likelihood]]:
    """Compute the log-likelihood of each prompt's answers in one pass over the weights.

    Args:
        offloaded: the model.
        prompts: token ids of each, none empty.
        answers: token ids of the answers of each prompt.
        budget_tokens: tokens computed at once.
    """
    asked: list[Asked] = []
    places = []  # of each answer after each prompt: its document and where its first score is
    for prompt, own_answers in zip(prompts, answers, strict=True):
        documents = documents_of(prompt, own_answers)
        queries: list[list[tuple[int, int]]] = [[] for _ in documents]
        for answer in own_answers:
            begins = [*prompt, *answer[:-1]]
            own = next(n for n, document in enumerate(documents) if document[: len(begins)] == begins)
            places.append((len(asked) + own, len(queries[own]), len(answer)))
            queries[own] += [(len(prompt) - 1 + at, token) for at, token in enumerate(answer)]
        asked += zip(documents, queries, strict=True)
    scores = _ask(offloaded, asked, budget_tokens)
    found = iter([_likelihood(scores[n], slice(first, first + count)) for n, first, count in places])
    return [list(islice(found, len(own_answers))) for own_answers in answers]


def _likelihood(scores: TokenScores, span: slice) -> Likelihood:
    return Likelihood(math.fsum(scores.log_probabilities_S[span].tolist()), bool(scores.is_argmax_S[span].all()))


def _targets(document: Document) -> list[range]:
    """Return the spans of target tokens; never the first token, which nothing predicts."""
    row = {"input_ids": document.ids, "prompt_length": document.prompt_length, "untrained": document.masked_spans}
    spans = [range(max(start, 1), end) for start, end in list(pairwise(span_borders(row)))[1::2]]
    return [span for span in spans if span]


def _text_size(
    tokenizer: PreTrainedTokenizerFast | None, spans: Sequence[Sequence[int]]
) -> tuple[int, int] | tuple[None, None]:
    """Count words and bytes of token spans; ``None`` if an id has no token.

    GPT-J has 143 such ids, which other systems use as separators. Bytes are counted token by token, as decoded, half a
    character would count as another: the tokenizers of GPT-2 and GPT-J write a token with a character for each byte.
    """
    if tokenizer is None:
        return None, None
    special = set(tokenizer.all_special_ids)
    names = tokenizer.convert_ids_to_tokens([each for ids in spans for each in ids if each not in special])
    if None in names:
        return None, None
    texts = [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in spans]
    return sum(len(text.split()) for text in texts), sum(map(len, names))


def _ask(
    offloaded: OffloadedModel, asked: Sequence[Asked], budget_tokens: int, score: Score | None = None
) -> list[TokenScores]:
    """Score the token queries of each document in one pass over the weights."""
    groups = first_fit([len(ids) for ids, _ in asked], budget_tokens)
    batches, wanted = [], []
    for group in groups:
        batch = pack([asked[index][0] for index in group], document_ids=group)
        starts = zip(batch.cu_seqlens, group, strict=False)
        queries = [(start + at, token) for start, index in starts for at, token in asked[index][1]]
        positions_S, tokens_S = torch.tensor(queries, dtype=torch.int64).reshape(-1, 2).to(offloaded.device).unbind(1)
        batches.append(batch.to(offloaded.device))
        wanted.append(TokenQuery(positions_S, tokens_S))
    found: dict[int, TokenScores] = {}
    read = score(batches, wanted) if score else score_tokens(offloaded, batches, wanted)
    for group, scores in zip(groups, read, strict=True):
        ends = list(accumulate((len(asked[index][1]) for index in group), initial=0))
        for index, (start, end) in zip(group, pairwise(ends), strict=True):
            found[index] = TokenScores(scores.log_probabilities_S[start:end], scores.is_argmax_S[start:end])
    return [found[index] for index in range(len(asked))]
