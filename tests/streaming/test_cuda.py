"""On a CUDA device, placements agree bit for bit, and with the CPU up to rounding."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.simulated import NARROW_AGREEMENT, SCENARIOS

from gptj_ft.models import attention
from gptj_ft.models.attention import attend, takes_ragged
from gptj_ft.models.batch import pack
from gptj_ft.system.machine import choose_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; `make test-gpu` uses it"),
]
CUDA = torch.device("cuda", 0)
TESTS = Path(__file__).parents[1]
PARTS = {"newer": 8, "split": 3, "full": 3, "sampled": 3, "encoder": 2}  # long scenarios, whose groups are shared out


def lines(*words: str) -> list[dict[str, Any]]:
    """Run the matrix of the simulated device on the real one, in a process that has not used it."""
    command = [sys.executable, "-m", "support.simulated", "--device", str(CUDA), *words]
    done = subprocess.run(command, cwd=TESTS, text=True, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("scenario", "part"),
    [
        (scenario, f"{part}/{parts}")
        for scenario in SCENARIOS
        for parts in [PARTS.get(scenario, 1)]
        for part in range(parts)
    ],
)
def test_placement_changes_no_bit_on_cuda(scenario: str, part: str) -> None:
    numbers = defaultdict(set)
    for case in lines("--only", scenario, "--part", part):
        assert case["error"] is None, case
        numbers[case["group"]].add(case["numbers"])
    assert numbers
    assert {group for group, found in numbers.items() if len(found) > 1} == set()


def test_cuda_agrees_with_cpu() -> None:
    (found,) = (line["agreement"] for line in lines("--agreement"))
    assert len(found) >= 12
    for case, (ours, theirs) in found.items():
        assert ours == pytest.approx(theirs, rel=1e-4 if "fp32" in case else NARROW_AGREEMENT), case


@pytest.mark.parametrize("width", [64, 256])
def test_ragged_kernel_matches_single_documents(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_device("cuda")
    if not takes_ragged(CUDA, torch.bfloat16, width):
        pytest.skip("no such kernel for this device and width")
    batch = pack([[1] * length for length in (5, 300, 1, 64)]).to(CUDA)
    generator = torch.Generator(CUDA).manual_seed(0)
    shape = (len(batch.tokens_T), 2, width)
    inputs = [torch.randn(shape, device=CUDA, dtype=torch.bfloat16, generator=generator) for _ in range(3)]
    results = []
    for takes in (True, False):
        monkeypatch.setattr(attention, "takes_ragged", lambda *_, takes=takes: takes)
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(*leaves, batch, 0)
        out.sum().backward()
        results.append([out, *(x.grad for x in leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
