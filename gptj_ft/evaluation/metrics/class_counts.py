"""Scores that follow from the number of rows of each class: F1 in its averages, Matthews' correlation.

Axis letters: B samples of the rows, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gptj_ft.evaluation.metrics.statistic import Vector, divided


@dataclass(frozen=True)
class ClassCounts:
    """Rows of each class in B samples, by what they are and what they were taken for; [B, C].

    Attributes:
        right: rows of the class that were given it.
        expected: rows of the class.
        given: rows that were given the class.
    """

    right: Vector
    expected: Vector
    given: Vector

    @property
    def f1(self) -> Vector:
        """F1 of each class; 0 where there are no rows."""
        rows_BC = self.expected + self.given
        return divided(2.0 * self.right, rows_BC, empty=0.0)

    def macro_f1(self) -> Vector:
        """Average F1 over the classes that are a row's own or given to one, times 100; [B].

        As scikit-learn's ``f1_score(average="macro")`` for one label a row; for several, with ``zero_division=nan``.
        """
        there_BC = self.expected + self.given > 0
        return 100.0 * divided(self.f1.sum(-1), there_BC.sum(-1))

    def weighted_f1(self) -> Vector:
        """Average F1 over the classes, each with the number of its rows as its weight, times 100; [B]."""
        return 100.0 * divided((self.f1 * self.expected).sum(-1), self.expected.sum(-1))

    def matthews(self) -> Vector:
        """Compute Matthews' correlation coefficient, times 100; 0 where it is undefined; [B].

        It is the covariance of labels and answers over the root of the product of their variances, of which one is 0
        where all rows have, or were given, the same class. For several classes see Gorodkin (2004),
        https://doi.org/10.1016/j.compbiolchem.2004.09.006.
        """
        rows_B = self.expected.sum(-1)
        both_B = rows_B * self.right.sum(-1) - (self.expected * self.given).sum(-1)
        expected_B, given_B = (rows_B**2 - (each**2).sum(-1) for each in (self.expected, self.given))
        return 100.0 * divided(both_B, np.sqrt(expected_B * given_B), empty=0.0)
