"""Cross-entropy of many classes on a CPU, in the memory of the logits.

`torch.nn.functional.cross_entropy` keeps three more tensors of the logits' size. Each time, the operating system
provides and zeroes their pages: with a large vocabulary and a small model, a quarter of a step's processor time.

Axis letters: S rows, C classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.models.batch import NO_TARGET

PART_BYTES = 4 * 2**20  # of logits: few enough to stay in the processor's cache from one operation to the next


def summed_cross_entropy(logits_SC: Tensor, targets_S: Tensor) -> Tensor:
    """Sum the cross-entropy of rows whose target is not `NO_TARGET`.

    The bits are those of `torch.nn.functional.cross_entropy`.

    Args:
        logits_SC: fp32 on a CPU. If they have a graph they are overwritten, in forward by log-probabilities and in
            backward by the gradient.
    """
    if not (logits_SC.requires_grad and torch.is_grad_enabled()):
        return _sum(target_log_probabilities(logits_SC, targets_S[:, None]), targets_S)
    loss: Tensor = _SummedCrossEntropy.apply(logits_SC, targets_S)  # type: ignore[no-untyped-call]
    return loss


def target_log_probabilities(logits_SC: Tensor, targets_SK: Tensor) -> Tensor:
    """Return the log-probabilities of each row's K targets, [S, K]; on a CPU a few rows at a time."""
    size = _num_rows(logits_SC) if logits_SC.device.type == "cpu" else max(1, len(logits_SC))
    parts = zip(torch.split(logits_SC, size), torch.split(targets_SK, size), strict=True)
    return torch.cat([_own(part_PC.log_softmax(-1), targets_PK) for part_PC, targets_PK in parts])


class _SummedCrossEntropy(torch.autograd.Function):
    """Loss that overwrites its logits. If another operation has saved them, its backward raises an error."""

    @staticmethod
    def forward(ctx: Any, logits_SC: Tensor, targets_S: Tensor) -> Tensor:
        for part_PC in torch.split(logits_SC, _num_rows(logits_SC)):
            torch.log_softmax(part_PC, -1, out=part_PC)
        ctx.save_for_backward(logits_SC, targets_S)
        return _sum(_own(logits_SC, targets_S[:, None]), targets_S)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (logs_SC, targets_S), (gradient,) = ctx.saved_tensors, gradients
        gradient_SC, size = logs_SC.detach(), _num_rows(logs_SC)
        for part_PC, targets_P in zip(torch.split(gradient_SC, size), torch.split(targets_S, size), strict=True):
            is_target_P = targets_P != NO_TARGET
            of_own_P = torch.where(is_target_P, -gradient, 0.0)
            of_logs_PC = torch.zeros_like(part_PC)
            of_logs_PC.scatter_(1, targets_P.where(is_target_P, 0)[:, None], of_own_P[:, None])
            torch._log_softmax_backward_data(of_logs_PC, part_PC, -1, part_PC.dtype, out=part_PC)
        return gradient_SC, None


def _own(logs_SC: Tensor, targets_SK: Tensor) -> Tensor:
    """Return the log-probabilities of each row's targets, [S, K]."""
    return logs_SC.gather(1, targets_SK.where(targets_SK != NO_TARGET, 0))


def _sum(own_S1: Tensor, targets_S: Tensor) -> Tensor:
    """Sum the losses in the order of `torch.nn.functional.cross_entropy`, as if each row had one class."""
    classes_S = torch.zeros_like(targets_S).where(targets_S != NO_TARGET, NO_TARGET)
    return F.nll_loss(own_S1, classes_S, ignore_index=NO_TARGET, reduction="sum")


def _num_rows(logits_SC: Tensor) -> int:
    """Return the number of rows whose logits take at most `PART_BYTES`."""
    return max(1, PART_BYTES // (max(1, logits_SC.shape[1]) * logits_SC.element_size()))
