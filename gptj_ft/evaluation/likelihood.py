"""Score given texts: the loss of each row, and the log-likelihoods of candidate answers."""

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
Query = tuple[Sequence[int], Sequence[tuple[int, int]]]  # document; pairs of a position and the token after it to score


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
        (document.ids[: document.num_inputs], [(at - 1, document.ids[at]) for span in spans for at in span])
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


def documents_of(prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> list[list[int]]:
    """Build the fewest documents that contain the context of every answer token."""
    # The last token of an answer is only predicted, never read. So answers of one token need only the prompt, and an
    # answer whose context starts another one's is scored in that document.
    contexts = {tuple(answer[:-1]) for answer in answers}
    longest = [each for each in contexts if not any(each != other and other[: len(each)] == each for other in contexts)]
    return [[*prompt, *each] for each in sorted(longest)]


@dataclass(frozen=True)
class Likelihood:
    """Log-probability of an answer in nats, and whether greedy decoding would generate it."""

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
        prompts: token ids of each, none empty.
        answers: token ids of the answers to each prompt.
        budget_tokens: tokens computed at once.
    """
    queries: list[Query] = []
    places = []  # of each answer to each prompt: number of its document, index of its first score, number of tokens
    for prompt, own_answers in zip(prompts, answers, strict=True):
        documents = documents_of(prompt, own_answers)
        scored: list[list[tuple[int, int]]] = [[] for _ in documents]
        for answer in own_answers:
            context = [*prompt, *answer[:-1]]
            own = next(n for n, document in enumerate(documents) if document[: len(context)] == context)
            places.append((len(queries) + own, len(scored[own]), len(answer)))
            # The token before predicts: the prompt's last one predicts the answer's first.
            scored[own] += [(len(prompt) - 1 + at, token) for at, token in enumerate(answer)]
        queries += zip(documents, scored, strict=True)
    scores = run_queries(offloaded, queries, budget_tokens)
    likelihoods = iter([_likelihood(scores[n], slice(first, first + count)) for n, first, count in places])
    return [list(islice(likelihoods, len(own_answers))) for own_answers in answers]


def _likelihood(scores: TokenScores, span: slice) -> Likelihood:
    return Likelihood(math.fsum(scores.log_probabilities_S[span].tolist()), bool(scores.is_argmax_S[span].all()))


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
    names = tokenizer.convert_ids_to_tokens([each for ids in spans for each in ids if each not in special])
    if None in names:
        return None, None
    texts = [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in spans]
    # GPT-2's and GPT-J's token names have one character per byte. Decoding instead would replace a character whose
    # bytes are split between spans, and count the replacement.
    return sum(len(text.split()) for text in texts), sum(map(len, names))


def run_queries(
    offloaded: OffloadedModel, queries: Sequence[Query], budget_tokens: int, score: Score | None = None
) -> list[TokenScores]:
    """Score the token queries of each document in one pass over the weights.

    Args:
        queries: documents with their pairs of a position and the token after it.
        budget_tokens: tokens computed at once.
        score: scorer of token queries; default: `score_tokens`.
    """
    groups = first_fit([len(ids) for ids, _ in queries], budget_tokens)
    batches, batch_queries = [], []
    for group in groups:
        batch = pack([queries[index][0] for index in group], document_ids=group)
        starts = zip(batch.cu_seqlens, group, strict=False)
        pairs = [(start + at, token) for start, index in starts for at, token in queries[index][1]]
        positions_S, tokens_S = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).to(offloaded.device).unbind(1)
        batches.append(batch.to(offloaded.device))
        batch_queries.append(TokenQuery(positions_S, tokens_S))
    results: dict[int, TokenScores] = {}
    batch_scores = score(batches, batch_queries) if score else score_tokens(offloaded, batches, batch_queries)
    for group, scores in zip(groups, batch_scores, strict=True):
        ends = list(accumulate((len(queries[index][1]) for index in group), initial=0))
        for index, (start, end) in zip(group, pairwise(ends), strict=True):
            results[index] = TokenScores(scores.log_probabilities_S[start:end], scores.is_argmax_S[start:end])
    return [results[index] for index in range(len(queries))]
