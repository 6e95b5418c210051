"""Scores of word labels: entities as in seqeval's default mode, which most published results use.

https://github.com/chakki-works/seqeval
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gptj_ft.evaluation.metrics.statistic import Ratio, Statistic, percent, precision_recall_f1

ENTITY_SCORES = ("entity_f1", "entity_precision", "entity_recall", "word_accuracy")
_TAG = re.compile(r"O|[BIES](-.+)?")


@dataclass(frozen=True, order=True)
class Entity:
    """A span of words with a type."""

    start: int  # first word
    end: int  # word after the last
    type: str  # text after the prefix of its tags; ``_`` if there is none


def are_entity_tags(names: Iterable[str]) -> bool:
    """Tell whether labels are entity tags: ``O``, and ``B``, ``I``, ``E``, ``S``, optionally with a type."""
    names = set(names)
    return names != {"O"} and bool(names) and all(_TAG.fullmatch(name) for name in names)


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """Find the entities of a text, in order.

    An entity starts with ``B-`` or ``S-``, and with ``I-`` or ``E-`` after a word of another type (lenient IOB2). It
    ends with ``E-`` or ``S-``, or before a word that does not continue it.

    Args:
        tags: tag of each word.
    """
    spans: list[Entity] = []
    start, type, is_open = 0, "", False  # of the previous word's entity, and whether another word may continue it
    for word, tag in enumerate([*tags, "O"]):  # the last "O" closes an open entity
        prefix, new = tag[:1], tag[2:] or "_"
        # An I- after O, or of another type, starts an entity: seqeval's lenient mode repairs such tags.
        is_inside = is_open and prefix in ("I", "E") and new == type
        if type and not is_inside:
            spans.append(Entity(start, word, type))
        if not is_inside:
            start, type = word, "" if prefix == "O" else new
        is_open = prefix in ("B", "I")
    return spans


@dataclass(frozen=True)
class EntityCounts:
    """Number of entities of one type in each row: true positives, predicted, expected."""

    true_positives: list[int]
    predicted: list[int]
    expected: list[int]


def entity_counts(tags: Sequence[Sequence[str]], answers: Sequence[Sequence[str]]) -> dict[str, EntityCounts]:
    """Count the entities of each type in each row; an entity is right if its words and its type match.

    Args:
        tags: true tag of each word of each row.
        answers: predicted tag of each word.

    Returns:
        Counts by type, in alphabetical order.
    """
    expected, predicted = ([set(entities_of(row)) for row in rows] for rows in (tags, answers))
    of_rows = [
        tuple(Counter(entity.type for entity in each) for each in (truth & answer, answer, truth))
        for truth, answer in zip(expected, predicted, strict=True)
    ]
    types = sorted({entity.type for row in (*expected, *predicted) for entity in row})
    return {type: EntityCounts(*([row[kind][type] for row in of_rows] for kind in range(3))) for type in types}


def entities(
    tags: Sequence[Sequence[str]], answers: Sequence[Sequence[str]], names: Iterable[str]
) -> dict[str, Statistic]:
    """Compute micro-averaged precision, recall and F1 of entities, and the accuracy over words; times 100.

    If no row has an entity, true or predicted, the three are 100; seqeval says 0. Labels that are not entity tags, such
    as parts of speech, have only an accuracy.

    Args:
        tags: true tag of each word of each row.
        answers: predicted tag of each word.
        names: all tags.
    """
    right = [sum(a == b for a, b in zip(*row, strict=True)) for row in zip(tags, answers, strict=True)]
    words = np.array([len(row) for row in tags], np.float64)
    accuracy: dict[str, Statistic] = {"word_accuracy": Ratio(np.array(right, np.float64), words, percent)}
    if not are_entity_tags(names):
        return accuracy
    counts = entity_counts(tags, answers).values()
    # Micro-average: add the counts of all types in each row.
    true_positives, predicted, expected = (
        np.array([getattr(each, kind) for each in counts], np.float64).reshape(-1, len(words)).sum(0)
        for kind in ("true_positives", "predicted", "expected")
    )
    scores = precision_recall_f1("entity_", true_positives, predicted, expected)
    return {name: scores[name] for name in ENTITY_SCORES[:3]} | accuracy
