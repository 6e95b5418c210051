"""Compare cross-entropy in the memory of the logits with torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.models.batch import NO_TARGET
from gptj_ft.streaming.cross_entropy import PART_BYTES, summed_cross_entropy, target_log_probabilities

SHAPES = [(1, 7), (5, 101), (64, 2), (2 * PART_BYTES // (4 * 50257) + 5, 50257), (PART_BYTES // 2**20 + 5, 262_144)]


def rows_of(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return random logits, and targets of which every seventh is missing."""
    torch.manual_seed(shape[0])
    targets_S = torch.randint(shape[1], shape[:1])
    targets_S[6::7] = NO_TARGET
    return 4 * torch.randn(shape), targets_S


def loss_of(logits_SC: Tensor, targets_S: Tensor) -> Tensor:
    return F.cross_entropy(logits_SC, targets_S, ignore_index=NO_TARGET, reduction="sum")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradient_have_torchs_bits(shape: tuple[int, int], threads: int) -> None:
    logits_SC, targets_S = rows_of(shape)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = []
        for loss in (loss_of, summed_cross_entropy):
            leaf = logits_SC.clone().requires_grad_()
            total = loss(leaf * 1.0, targets_S)
            (total / 77 * 1024).backward()
            found.append((total.detach(), leaf.grad, loss(logits_SC, targets_S)))
    finally:
        torch.set_num_threads(before)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_logits_hold_the_gradient() -> None:
    logits_SC, targets_S = rows_of((5, 101))
    output, places = logits_SC.requires_grad_() * 1.0, list[int]()
    output.register_hook(lambda gradient: places.append(gradient.data_ptr()))
    summed_cross_entropy(output, targets_S).backward()
    assert places == [output.data_ptr()]


def test_without_a_graph_logits_stay() -> None:
    logits_SC, targets_S = rows_of((45, 50257))
    kept = logits_SC.clone()
    summed_cross_entropy(logits_SC, targets_S)
    own = target_log_probabilities(logits_SC, targets_S.clamp(min=0)[:, None])[:, 0]
    assert torch.equal(logits_SC, kept)
    assert torch.equal(own, -F.cross_entropy(kept, targets_S.clamp(min=0), reduction="none"))


def test_saved_logits_are_noticed() -> None:
    logits_SC, targets_S = rows_of((5, 101))
    output = logits_SC.requires_grad_().tanh()  # autograd keeps what it returns
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        summed_cross_entropy(output, targets_S).backward()
