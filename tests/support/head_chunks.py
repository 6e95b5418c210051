"""Compute few logits at once, so that the chunks of a small test matter."""

from __future__ import annotations

import pytest

from gptj_ft.streaming import step
from gptj_ft.streaming.offloaded_model import OffloadedModel


def limit_head_chunk(patch: pytest.MonkeyPatch, stack: OffloadedModel, positions: int, vocabulary: int) -> list[int]:
    """Let the head compute this many positions at once; return a list that gets the number of each call."""
    sizes = list[int]()
    stack.layers[-1].register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    patch.setattr(step, "HEAD_CHUNK_BYTES", 4 * positions * vocabulary)
    return sizes
