"""Find tensors that the first update leaves unchanged, before hours of training without effect."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from gptj_ft.models.layout import Layout
from gptj_ft.models.lora import A, name_of
from gptj_ft.models.registry import Family


class UnchangedParameters:
    """Find the parameters that the first update leaves unchanged.

    Args:
        layers: layers without the update.
    """

    def __init__(self, layouts: Sequence[Layout], layers: Collection[int]) -> None:
        self._layouts = layouts
        # Unchanged tensors so far, and whether their gradient was zero everywhere. Without a LoRA adapter's A: its
        # gradient is zero until B, which starts as zeros, has changed.
        self._same = {(layer, name): True for layer in layers for name in layouts[layer].shapes if not name.endswith(A)}

    def observe(self, layer: int, span: slice, before: Tensor, after: Tensor, gradient: Tensor) -> None:
        """Compare a span of a layer's parameters before and after the update."""
        layout = self._layouts[layer]
        for name, offset in layout.offsets.items():
            begin = max(offset - span.start, 0)
            end = min(offset + layout.shapes[name].numel(), span.stop) - span.start
            if begin >= end or (layer, name) not in self._same:
                continue
            if bool((before[begin:end] != after[begin:end]).any()):
                del self._same[layer, name]
            elif bool(gradient[begin:end].any()):
                self._same[layer, name] = False

    def warning(self, family: Family, lr: float) -> str | None:
        """Name the unchanged tensors and the reason; None if every tensor has changed."""
        if not self._same:
            return None
        without, too_little = (
            [name_of(family, *place, len(self._layouts)) for place, is_zero in self._same.items() if is_zero == wanted]
            for wanted in (True, False)
        )
        reasons = []
        if without:
            reasons.append(f"no gradient reaches {_some(without)}")
        if too_little:
            reasons.append(f"at a learning rate of {lr:.1e} the change of {_some(too_little)} is lost in rounding")
        return f"the first step left {len(self._same)} tensors unchanged: {'; '.join(reasons)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
