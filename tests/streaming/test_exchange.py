"""Test the single-process exchange, and that the training step does not know any other."""

from __future__ import annotations

import inspect
import re
import weakref
from types import SimpleNamespace

import torch

from gptj_ft.streaming import step
from gptj_ft.streaming.exchange import LOCAL, Channel

SHARING = r"\b\w*(relay|lane|route|rank|process|replica|group)s?\b"


def test_training_step_names_no_other_ranks() -> None:
    assert re.findall(SHARING, inspect.getsource(step), re.IGNORECASE) == []
    assert len(inspect.getsource(step).splitlines()) <= 350
    assert len(inspect.signature(step.backward).parameters) <= 5


def test_local_channel_frees_consumed_tensors() -> None:
    tensors = [torch.ones(1), torch.ones(2)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    received = []
    for tensor in Channel().inputs(1, tensors):
        received.append(len(tensor))
        del tensor
        assert [reference() is None for reference in alive].count(True) == len(received)
    assert received == [1, 2]


def test_local_reducer_consumes_only_layers_with_gradients() -> None:
    consumed = []
    reducer = LOCAL.open_reducer(consumed.append)
    trained, frozen = (SimpleNamespace(task=SimpleNamespace(gradient=use)) for use in ("write", None))
    for layer in (trained, frozen):
        reducer.end(layer)
    assert consumed == [trained]


def test_local_exchange_has_every_layer() -> None:
    assert LOCAL.has(0)
    assert LOCAL.has(27)
    assert not LOCAL.open_channel([0, 1], [3], torch.float32, torch.device("cpu")).send(0, torch.ones(1))
