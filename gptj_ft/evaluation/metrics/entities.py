"""Scores of labels of words: entities as seqeval finds and counts them.

https://github.com/chakki-works/seqeval, its default mode, which most published results use.
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
    """An entity: its words and its type.

    Attributes:
        start: number of its first word.
        end: number behind its last word.
        type: text after the prefix of its tags; ``_`` where they have none.
    """

    start: int
    end: int
    type: str


def are_entity_tags(names: Iterable[str]) -> bool:
    """Tell whether labels are tags of entities: ``O``, and ``B`` and ``I`` (or ``E``, ``S``), as a rule with a type."""
    names = set(names)
    return names != {"O"} and bool(names) and all(_TAG.fullmatch(name) for name in names)


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """Find the entities of a text, in their order.

    An entity begins with ``B-`` or ``S-``, and also where ``I-`` or ``E-`` follows no word of its type (lenient IOB2);
    ``E-`` and ``S-`` end it.

    Args:
        tags: tag of each word.
    """
    found: list[Entity] = []
    start, type, goes_on = 0, "", False  # of the entity of the word before, and whether it may go on
    for word, tag in enumerate([*tags, "O"]):
        prefix, new = tag[:1], tag[2:] or "_"
        is_inside = goes_on and prefix in ("I", "E") and new == type
        if type and not is_inside:
            found.append(Entity(start, word, type))
        if not is_inside:
            start, type = word, "" if prefix == "O" else new
        goes_on = prefix in ("B", "I")
    return found


@dataclass(frozen=True)
class EntityCounts:
    """Entities of a type: both expected and given, given, expected; one number a row."""

    both: list[int]
    given: list[int]
    expected: list[int]


def entity_counts(tags: Sequence[Sequence[str]], answers: Sequence[Sequence[str]]) -> dict[str, EntityCounts]:
    """Count the entities of each type in each row; an entity is right if its words and its type are.

    Args:
        tags: right tag of each word, for each row.
        answers: tag that the model gives it.

    Returns:
        Counts by type, in alphabetical order.
    """
    expected, given = ([set(entities_of(row)) for row in rows] for rows in (tags, answers))
    of_rows = [
        tuple(Counter(entity.type for entity in found) for found in (right & written, written, right))
        for right, written in zip(expected, given, strict=True)
    ]
    types = sorted({entity.type for row in (*expected, *given) for entity in row})
    return {type: EntityCounts(*([row[kind][type] for row in of_rows] for kind in range(3))) for type in types}


def entities(
    tags: Sequence[Sequence[str]], answers: Sequence[Sequence[str]], names: Iterable[str]
) -> dict[str, Statistic]:
    """Compute micro-averaged precision, recall and F1 of entities, and the accuracy over words; times 100.

    Where nothing was to be found and nothing was, the three are 100; seqeval says 0. Labels that are no tags of
    entities, such as parts of speech, have an accuracy only.

    Args:
        tags: right tag of each word, for each row.
        answers: tag that the model gives it.
        names: all tags that there are.
    """
    right = [sum(a == b for a, b in zip(*row, strict=True)) for row in zip(tags, answers, strict=True)]
    words = np.array([len(row) for row in tags], np.float64)
    accuracy: dict[str, Statistic] = {"word_accuracy": Ratio(np.array(right, np.float64), words, percent)}
    if not are_entity_tags(names):
        return accuracy
    counts = entity_counts(tags, answers).values()
    both, given, expected = (
        np.array([getattr(each, kind) for each in counts], np.float64).reshape(-1, len(words)).sum(0)
        for kind in ("both", "given", "expected")
    )
    found = precision_recall_f1("entity_", both, given, expected)
    return {name: found[name] for name in ENTITY_SCORES[:3]} | accuracy
