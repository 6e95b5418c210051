"""Compare span answers with transformers' run_qa, and thresholds with SQuAD's script, both reimplemented here."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
import pytest
from support.real_data import real_data

from gptj_ft.evaluation.metrics.squad import f1_v2, normalize_answer, squad
from gptj_ft.evaluation.metrics.statistic import values
from gptj_ft.evaluation.readout import _shown
from gptj_ft.evaluation.spans import (
    NO_ANSWER,
    SpanAnswer,
    SpanCandidate,
    SpanSettings,
    Window,
    best_answer,
    best_thresholds,
)

CONTEXT = " ".join(f"word{number}" for number in range(200))


def question(seed: int, num_windows: int = 3, length: int = 40, ties: bool = False) -> list[Window]:
    """Return windows of a context, each between a question of five tokens and one closing token."""
    generator = np.random.default_rng(seed)
    starts = [CONTEXT.index(f"word{number}") for number in range(200)]
    windows = []
    for number in range(num_windows):
        first = number * (length - 16)
        words = range(first, first + length - 6)
        offsets = [(-1, -1)] * 5 + [(starts[word], starts[word] + len(f"word{word}")) for word in words] + [(-1, -1)]
        logits = generator.normal(size=(2, length)).astype(np.float32)
        if ties:
            logits = np.round(logits)
        windows.append(Window(logits[0], logits[1], np.array(offsets)))
    return windows


def run_qa(windows: list[Window], settings: SpanSettings) -> tuple[str, list[dict[str, Any]], float | None]:
    """Compute run_qa's answer, n-best list and null odds by a loop over token pairs."""
    found, nulls = [], []
    for at, window in enumerate(windows):
        nulls.append((window.starts_L[0] + window.ends_L[0], at))
        best = [
            sorted(range(len(logits)), key=lambda token, logits=logits: (-logits[token], token))[: settings.num_best]
            for logits in (window.starts_L, window.ends_L)
        ]
        for start in best[0]:
            for end in best[1]:
                if -1 in (window.offsets_L2[start][0], window.offsets_L2[end][0]):
                    continue
                if start <= end < start + settings.max_answer_tokens:
                    text = CONTEXT[window.offsets_L2[start][0] : window.offsets_L2[end][1]]
                    logits = float(window.starts_L[start]), float(window.ends_L[end])
                    found.append((-sum(logits), at, start, end - start, text, logits))
    answers = [(-score, text, logits) for score, _, _, _, text, logits in sorted(found)]
    if settings.may_abstain:
        window = windows[min(nulls)[1]]
        null = float(window.starts_L[0]), float(window.ends_L[0])
        answers.append((sum(null), "", null))
        answers.sort(key=lambda answer: -answer[0])
    cut = answers[: settings.num_best]
    if settings.may_abstain and all(text for _, text, _ in cut):
        cut.append(next(answer for answer in answers if not answer[1]))
    if not any(text for _, text, _ in cut):
        cut.insert(0, (0.0, "empty", (0.0, 0.0)))
    total = sum(math.exp(score - cut[0][0]) for score, _, _ in cut)
    nbest = [
        {"text": text, "probability": math.exp(score - cut[0][0]) / total, "start_logit": a, "end_logit": b}
        for score, text, (a, b) in cut
    ]
    score, text, _ = next(answer for answer in cut if answer[1])
    if not settings.may_abstain:
        return text, nbest, None
    odds = sum(null) - score
    return ("" if odds > settings.null_threshold else text), nbest, odds


SETTINGS = [
    SpanSettings(),
    SpanSettings(num_best=5, max_answer_tokens=3),
    SpanSettings(may_abstain=True),
    SpanSettings(num_best=4, may_abstain=True, null_threshold=-2.0),
    SpanSettings(num_best=1, max_answer_tokens=2, may_abstain=True),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("ties", [False, True])
def test_answers_follow_run_qa(settings: SpanSettings, ties: bool) -> None:
    kinds = set()
    for seed in range(60):
        windows = question(seed, num_windows=1 + seed % 4, ties=ties)
        if seed % 3 == 0:  # make "no answer" likely
            windows = [Window(w.starts_L + 4 * (np.arange(40) == 0), w.ends_L, w.offsets_L2) for w in windows]
        text, nbest, odds = run_qa(windows, settings)
        found = best_answer(windows, CONTEXT, settings)
        assert found.text == text
        assert found.null_odds == pytest.approx(odds, abs=1e-12)
        assert [each["text"] for each in nbest] == [each.text for each in found.candidates]
        for expected, each in zip(nbest, found.candidates, strict=True):
            assert each.to_dict() == expected | {"probability": pytest.approx(expected["probability"], rel=1e-12)}
            if each.start >= 0:
                assert CONTEXT[each.start : each.end] == each.text
        kinds.add("none" if not text else "empty" if text == NO_ANSWER else "span")
    assert "span" in kinds
    if settings.may_abstain:
        assert "none" in kinds


def test_question_without_allowed_span_answers_empty() -> None:
    window = Window(np.array([1.0, 0.5]), np.array([2.0, 0.5]), np.full((2, 2), -1))
    found = best_answer([window], "context", SpanSettings())
    assert (found.text, found.best.start) == (NO_ANSWER, -1)
    found = best_answer([window], "context", SpanSettings(may_abstain=True))
    assert (found.text, found.null_odds) == ("", 3.0)
    assert [each.text for each in found.candidates] == [NO_ANSWER, ""]
    found = best_answer([window], "context", SpanSettings(may_abstain=True, null_threshold=3.0))
    assert found.text == NO_ANSWER


def test_no_answer_takes_its_lowest_window_score() -> None:
    offsets = np.array([[-1, -1], [0, 1]])
    windows = [
        Window(np.array([at, 1.0], np.float32), np.array([at, 1.0], np.float32), offsets) for at in (5.0, 0.5, 3.0)
    ]
    found = best_answer(windows, "x", SpanSettings(may_abstain=True))
    assert (found.text, found.null_odds) == ("x", -1.0)
    assert [each.text for each in found.candidates] == ["x", "x", "x", ""]


def test_equal_scores_prefer_earlier_and_shorter_spans() -> None:
    offsets = np.array([[-1, -1], [0, 1], [2, 3], [4, 5]])
    flat = Window(np.zeros(4), np.zeros(4), offsets)
    later = Window(np.zeros(4), np.zeros(4), np.array([[-1, -1], [6, 7], [8, 9], [10, 11]]))
    found = best_answer([flat, later], "a b c d e f", SpanSettings(may_abstain=True))
    texts = [each.text for each in found.candidates]
    assert texts == ["a", "a b", "a b c", "b", "b c", "c", "d", "d e", "d e f", "e", "e f", "f", ""]
    assert found.text == "a", "no answer must score strictly better"


def answered(text: str, odds: float) -> SpanAnswer:
    best = SpanCandidate(text, 1.0, 0.0, 0.0, 0, len(text))
    return SpanAnswer(text, best, (best,), odds)


def official_threshold(
    scores: list[float], texts: list[str], odds: list[float], has: list[bool]
) -> tuple[float, float]:
    """Find the best threshold as SQuAD v2.0's script does, question by question."""
    total = best = float(sum(not each for each in has))
    threshold = math.ceil(min(odds)) - 1.0  # the script has 0, above which no probability is
    for row in sorted(range(len(odds)), key=lambda row: odds[row]):
        total += scores[row] if has[row] else (-1 if texts[row] else 0)
        if total > best:
            best, threshold = total, odds[row]
    return 100 * best / len(odds), threshold


def test_best_thresholds_match_the_official_search() -> None:
    words = ["red", "red cat", "a dog", "blue dog", "cat"]
    for seed in range(40):
        generator = np.random.default_rng(seed)
        number = int(generator.integers(2, 12))
        texts = [words[at] for at in generator.integers(0, 5, number)]
        golds = [[words[at] for at in generator.integers(0, 5, generator.integers(0, 3))] for _ in range(number)]
        golds[0] = []
        odds = (generator.integers(-4, 4, number) / 2).tolist()
        has = [bool(each) for each in golds]
        exact = [
            float(any(normalize_answer(a) == normalize_answer(b) for b in g)) for a, g in zip(texts, golds, strict=True)
        ]
        f1 = [max((f1_v2(a, b) for b in g), default=0.0) for a, g in zip(texts, golds, strict=True)]
        found = best_thresholds(list(map(answered, texts, odds)), golds)
        expected = (*official_threshold(exact, texts, odds, has), *official_threshold(f1, texts, odds, has))
        assert (
            found.best_exact, found.best_exact_threshold, found.best_f1, found.best_f1_threshold,
        ) == pytest.approx(expected)  # fmt: skip


def test_never_answering_can_be_best() -> None:
    answers = [answered("x", -1.0), answered("y", 1.0)]
    found = best_thresholds(answers, [[], ["z"]])
    assert found.best_exact == 50.0
    assert all(answer.null_odds > found.best_exact_threshold for answer in answers)


def test_shown_threshold_separates_the_same_questions() -> None:
    for threshold, odds in ((-1.2345678, [-1.2345678, -1.2345]), (-1.00000000001, [-1.0, 2.0])):
        shown = float(_shown(threshold, odds))
        assert [each > shown for each in odds] == [each > threshold for each in odds]
    assert _shown(0.123456, [0.1, 0.123456, 3.0]) == "0.1235"


def test_1000_windows_take_seconds() -> None:
    windows = question(0, num_windows=1, length=200)
    start = time.perf_counter()
    for _ in range(1000):
        best_answer(windows, CONTEXT, SpanSettings(may_abstain=True))
    assert time.perf_counter() - start < 3  # about 0.2 on a quiet machine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "num_windows", "exact", "f1"),
    [("dev-v1.1.json", 10_784, 99.697, 99.746), ("train-v1.1-subset.json", 9_319, 98.994, 99.045)],
)
def test_perfect_logits_reach_the_known_ceiling(file: str, num_windows: int, exact: float, f1: float) -> None:
    from transformers import BertTokenizerFast

    tokenizer = BertTokenizerFast.from_pretrained(real_data("tokenizers/bert-base-uncased/vocab.txt").parent)
    articles = json.loads(real_data(f"squad/{file}").read_text(encoding="utf-8"))["data"]
    texts, references, seen = [], [], 0
    for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
        context = paragraph["context"]
        asked = tokenizer(
            [each["question"].lstrip() for each in paragraph["qas"]], [context] * len(paragraph["qas"]),
            truncation="only_second", max_length=384, stride=128, return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )  # fmt: skip
        of_question: list[list[Window]] = [[] for _ in paragraph["qas"]]
        for at, number in enumerate(asked["overflow_to_sample_mapping"]):
            gold = paragraph["qas"][number]["answers"][0]
            offsets = np.array(
                [
                    pair if part == 1 else (-1, -1)
                    for pair, part in zip(asked["offset_mapping"][at], asked.sequence_ids(at), strict=True)
                ]
            )
            of_question[number].append(perfect(offsets, gold["answer_start"], gold["answer_start"] + len(gold["text"])))
            seen += 1
        texts += [best_answer(windows, context, SpanSettings()).text for windows in of_question]
        references += [[answer["text"] for answer in each["answers"]] for each in paragraph["qas"]]
    assert seen == num_windows
    found = values(squad(texts, references), len(texts))
    assert found["exact_match"] == pytest.approx(exact, abs=5e-4)
    # For targets of more than 30 tokens, the answer is arbitrary: all other logits are equal.
    assert found["f1"] == pytest.approx(f1, abs=0.01)


def perfect(offsets: np.ndarray, start: int, end: int) -> Window:
    """Return logits that point to the window's target: token 0 if the answer is outside the window."""
    inside = np.flatnonzero(offsets[:, 0] >= 0)
    first = last = 0
    if offsets[inside[0], 0] <= start and offsets[inside[-1], 1] >= end:
        first = inside[offsets[inside, 0] <= start][-1]
        last = inside[offsets[inside, 1] >= end][0]
    places = np.arange(len(offsets))
    return Window(10.0 * (places == first), 10.0 * (places == last), offsets)
