"""Which tensors the first update has left as they were: seen after one step, not after hours that trained nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from gptj_ft.models.layout import Layout
from gptj_ft.models.lora import A, name_of
from gptj_ft.models.registry import Family


class UnchangedParameters:
    """Find the parameters that the first update leaves unchanged.

    Args:
        layouts: layout of each layer.
        layers: layers that the update has not reached yet.
    """

    def __init__(self, layouts: Sequence[Layout], layers: Collection[int]) -> None:
        self._layouts = layouts
        # Each tensor, and whether its gradient was zero everywhere so far.
        # An adapter's A has none before its B has moved.
        self._left = {(layer, name): True for layer in layers for name in layouts[layer].shapes if not name.endswith(A)}

    def observe(self, layer: int, span: slice, before: Tensor, after: Tensor, gradient: Tensor) -> None:
        """Compare a span of a layer's parameters with its values before the update."""
        layout = self._layouts[layer]
        for name, offset in layout.offsets.items():
            begin = max(offset - span.start, 0)
            end = min(offset + layout.shapes[name].numel(), span.stop) - span.start
            if begin >= end or (layer, name) not in self._left:
                continue
            if bool((before[begin:end] != after[begin:end]).any()):
                del self._left[layer, name]
            elif bool(gradient[begin:end].any()):
                self._left[layer, name] = False

    def warning(self, family: Family, lr: float) -> str | None:
        """Name the tensors that are left, and why; ``None`` if every tensor has moved."""
        if not self._left:
            return None
        without, too_little = (
            [name_of(family, *place, len(self._layouts)) for place, is_zero in self._left.items() if is_zero == wanted]
            for wanted in (True, False)
        )
        reasons = []
        if without:
            reasons.append(f"no gradient reaches {_some(without)}")
        if too_little:
            reasons.append(f"at a learning rate of {lr:.1e} the change of {_some(too_little)} is lost in rounding")
        return f"the first step has left {len(self._left)} tensors as they were: {'; '.join(reasons)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
