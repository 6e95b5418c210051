"""Running a layer that has no memory of its own: its tensors are handed in each time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gptj_ft.models.embedding import EmbeddingRows


class FunctionalLayer:
    """Runs a layer with other tensors in the place of its parameters and buffers.

    That is what `torch.func.functional_call` does, without its search for ties: it takes 0.2 ms, and a layer that
    writes one token may take 2.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._places: dict[str, tuple[dict[str, Any], str, Tensor]] = {
            f"{path}.{name}".lstrip("."): (own, name, tensor)
            for path, module in layer.named_modules()
            for own in (module._parameters, module._buffers)
            for name, tensor in own.items()
            if tensor is not None
        }

    def run(self, tensors: Mapping[str, Tensor | EmbeddingRows], *inputs: Any) -> Tensor:
        """Call the layer with tensors, or rows of them, in the place of its parameters, by name."""
        places = [self._places[name] for name in tensors]
        try:
            for (own, name, _), tensor in zip(places, tensors.values(), strict=True):
                own[name] = tensor
            output: Tensor = self._layer(*inputs)
            return output
        finally:
            for own, name, empty in places:
                own[name] = empty
