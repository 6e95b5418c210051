"""Test that plans count grouped heads, wide heads and windows as attention computes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gptj_ft.config.options import Generation
from gptj_ft.models.attention import attend
from gptj_ft.models.kv_cache import KVCache, slots_taken
from gptj_ft.models.registry import Architecture, architecture_of
from gptj_ft.planning.inference_plan import InferenceWorkload, TokenBudget
from gptj_ft.planning.layer_cost import LayerInput, Meter

HEADS, KEY_HEADS, WIDTH = 4, 2, 24  # heads wider than 64 / 4


def architecture(**fields: Any) -> Architecture:
    raw = {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50,
        "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": WIDTH, **fields,
    }  # fmt: skip
    return architecture_of(raw, Path("config.json"))


@pytest.mark.parametrize("key_heads", [KEY_HEADS, HEADS])
def test_planned_cache_has_the_key_heads(key_heads: int) -> None:
    assert architecture(num_key_value_heads=key_heads).key_width == key_heads * WIDTH
    workload = InferenceWorkload.of(
        architecture(num_key_value_heads=key_heads), torch.float32, Generation(max_new_tokens=30), prompts=(1000, 900)
    )
    cache = KVCache()
    cache.begin((1000, 900), 1, torch.device("cpu"))
    keys = torch.zeros(1900, key_heads, WIDTH)
    cache.put(0, keys, keys, (0, 1000, 1900))
    stored = sum(x.nbytes for x in cache._layers[0])
    assert stored == 2 * 2 * 4 * workload.key_width * slots_taken(1000, 30, 1)
    wider, together = replace(workload, key_width=2 * workload.key_width), TokenBudget(2048)
    assert wider.working_bytes(together) - workload.working_bytes(together) == 2 * stored, "two blocks"


@pytest.mark.parametrize("window", [None, 8])
def test_metered_attention_counts_visible_pairs(window: int | None) -> None:
    given = LayerInput((40, 5), HEADS * WIDTH, torch.bfloat16)
    q, k, v = (
        torch.empty(45, heads, WIDTH, dtype=given.dtype, device="meta") for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    batch = given.batch()
    with Meter(given.documents) as meter:
        attend(q.requires_grad_(), k, v, batch, 0, window=window).backward(q.detach())
    attention = [kernel.flops for kernel in meter.kernels[0] if kernel.is_attention]
    pairs = 15 + sum(min(count, window or 40) for count in range(1, 41))
    assert attention == [4 * pairs * HEADS * WIDTH, 10 * pairs * HEADS * WIDTH]
