"""Memory forecasts for encoders with attention dropout."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from gptj_ft.config.options import Recipe
from gptj_ft.models.attention import attend_in_buckets
from gptj_ft.models.batch import Documents, padded_length
from gptj_ft.models.bert import FAMILY, read_config
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.layout import Layout
from gptj_ft.planning.memory import Free, forecast_memory
from gptj_ft.planning.workload import RowLengths, StepTokens, Workload
from gptj_ft.streaming.stores.placement import Placement

LENGTHS, HEADS, HEAD_WIDTH = (100, 30, 64, 1), 4, 12
RESIDENT = Placement("device", "device")


def make_workload(**different: int) -> Workload:
    layers = FAMILY.build_layers(read_config({"hidden_size": 64, "num_attention_heads": HEADS, "num_hidden_layers": 3}))
    layouts = [Layout.of(layer) for layer in layers]
    pairs = sum(padded_length(length) ** 2 for length in LENGTHS)
    workload = Workload(
        layouts,
        64,
        torch.float32,
        StepTokens(2048, 195, 195, 4, pairs=pairs),
        1,
        RowLengths(max(LENGTHS)),
        layers=layers,
    )
    return replace(workload, **different)


def test_planned_attention_weights_match_the_graph() -> None:
    ends, kept = tuple(accumulate(LENGTHS, initial=0)), dict[int, int]()
    inputs = [torch.randn(ends[-1], HEADS, HEAD_WIDTH, requires_grad=True) for _ in range(3)]

    def note(tensor: Tensor) -> Tensor:
        if tensor.ndim == 3 and tensor.shape[1] == tensor.shape[2]:  # of the weights' shape
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = attend_in_buckets(*inputs, Documents(ends, (1, 2, 3, 4), torch.device("cpu")), None, Dropout(0.1, 1))
    workload = make_workload(dropped_heads=HEADS)
    assert sum(kept.values()) == workload.weights_bytes(workload.step.pairs)
    assert output.requires_grad


def test_kept_blocks_add_their_attention_weights() -> None:
    have = Free(device=10**12, host=10**12, disk=10**12, is_shared=True)
    recipe = Recipe.model_validate({"activations": "keep"})
    needs = [
        forecast_memory(RESIDENT, make_workload(dropped_heads=heads), recipe, have).device_bytes for heads in (0, HEADS)
    ]
    workload = make_workload(dropped_heads=HEADS)
    kept = workload.num_backward_blocks * workload.weights_bytes(workload.step.pairs)
    assert needs[1] - needs[0] >= kept + workload.weights_bytes(workload.micro_batch_pairs)
