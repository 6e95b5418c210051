"""Test reading numbers of any type and offset in blocks, and single rows of embeddings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from conftest import random_gptj

from gptj_ft.errors import DataError
from gptj_ft.models.batch import pack
from gptj_ft.streaming.open import open_for_inference
from gptj_ft.streaming.scoring import evaluate_losses
from gptj_ft.system.block_reader import MARGIN, BlockReader, Extent, in_blocks

CPU = torch.device("cpu")
BLOCK = 8192


def write(path: Path, tensors: list[torch.Tensor], begin: int) -> list[Extent]:
    """Write tensors one behind the other; return where they are."""
    data, extents = b"x" * begin, []
    for tensor in tensors:
        extents.append(Extent(path, len(data), tensor.dtype))
        data += tensor.view(torch.uint8).numpy().tobytes()
    path.write_bytes(data)
    return extents


@pytest.mark.parametrize("begin", [1, 4096, BLOCK - 3])
def test_read_converts_any_type_and_offset(tmp_path: Path, begin: int) -> None:
    types = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float32]
    tensors = [torch.randn(size).to(dtype) for size, dtype in zip((700, 1, 40000, 3, 9000), types, strict=True)]
    extents, reader = write(tmp_path / "file", tensors, begin), BlockReader(CPU, BLOCK, 3)
    for wanted in (torch.float32, torch.bfloat16):
        found = [torch.zeros(tensor.shape, dtype=wanted) for tensor in tensors]
        reader.read(extent.to(out) for extent, out in zip(extents, found, strict=True))
        assert all(torch.equal(out, tensor.to(wanted)) for out, tensor in zip(found, tensors, strict=True))
    part = torch.zeros(5000)
    reader.read([extents[2].to(part, start=123)])
    assert torch.equal(part, tensors[2][123:5123].float())
    reader.close()


def test_block_is_one_bounded_request() -> None:
    path = Path("file")
    pieces = [Extent(path, offset, torch.float32).to(torch.empty(size)) for offset, size in ((30001, 9), (3, 7000))]
    blocks = in_blocks(pieces, BLOCK)
    assert [[(piece.offset, piece.end) for piece in block] for block in blocks] == [
        [(3, 8195)], [(8195, 16387)], [(16387, 24579)], [(30001, 30037), (24579, 28003)],
    ]  # fmt: skip
    for block in blocks:
        begin, end = min(piece.offset for piece in block), max(piece.end for piece in block)
        assert -(-end // 4096) * 4096 - begin // 4096 * 4096 <= BLOCK + MARGIN


def test_truncated_file_is_named_others_read(tmp_path: Path) -> None:
    tensors = [torch.randn(9000), torch.randn(50)]
    (one,), (other,) = (write(tmp_path / str(n), [tensor], 8) for n, tensor in enumerate(tensors))
    one.path.write_bytes(one.path.read_bytes()[:-4])
    reader, out = BlockReader(CPU, BLOCK, 2), torch.zeros(50)
    for _ in range(3):
        with pytest.raises(DataError, match=f"{re.escape(str(one.path))}: truncated"):
            reader.read([one.to(torch.zeros(9000))])
    one.path.unlink()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        reader.read([one.to(torch.zeros(9000))])
    reader.read([other.to(out)])
    assert torch.equal(out, tensors[1])
    reader.close()


@pytest.mark.parametrize("place", ["host", "disk"])
def test_only_used_embedding_rows_are_read(tmp_path: Path, place: str) -> None:
    random_gptj(vocab_size=90, n_embd=64, n_layer=2, n_head=2, rotary_dim=4).save_pretrained(tmp_path)
    batches, losses = [pack([[7, 80, 7, 3], [3, 89]], [0, 0]), pack([[0, 7]], [0])], []
    for where in ("device", place):
        with open_for_inference(tmp_path, CPU, torch.float32, where) as (_, stack):
            losses.append([each.total for each in evaluate_losses(stack, batches)])
            if where == place:
                rest = sum(layout.numel for layout in stack.frozen[1:])
                assert stack.meter.bytes_read == 4 * (rest + 5 * 64)
                with pytest.raises(IndexError, match="rows 0 to 89"):
                    evaluate_losses(stack, [pack([[90]], [0])])
    assert losses[0] == losses[1]
