"""Join tensors of a foreign checkpoint into the one that Hugging Face stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gptj_ft.checkpoints.weight_file import Shard, TensorInfo
from gptj_ft.errors import DataError
from gptj_ft.models.registry import Leaf
from gptj_ft.system.memory import contiguous


class JoinedShard:
    """Tensor concatenated from several along their first axis, or from one; transposed if the leaf says so."""

    def __init__(self, leaf: Leaf, parts: Sequence[tuple[Shard, str]]) -> None:
        self.path, self._leaf, self._parts = parts[0][0].path, leaf, parts
        entries = [shard.entries[name] for shard, name in parts]
        first, shape = entries[0], list(entries[0].shape)
        for entry, (_, name) in zip(entries, parts, strict=True):
            if entry.shape[1:] != first.shape[1:] or entry.dtype != first.dtype or not entry.shape:
                raise DataError(
                    f"{self.path}: {name} differs in shape or type from the other parts of {leaf.name}; get the file "
                    "again"
                )
        shape[0] = sum(entry.rows for entry in entries)
        self.entries: Mapping[str, TensorInfo] = {
            leaf.name: TensorInfo(first.dtype, tuple(shape[::-1] if leaf.is_transposed else shape))
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        whole = torch.cat([shard.read(own) for shard, own in self._parts])
        return contiguous(whole.t() if self._leaf.is_transposed else whole)[start:stop]

    def rows_at_once(self, name: str) -> int:
        # `read` joins the whole tensor each time.
        return self.entries[name].rows
