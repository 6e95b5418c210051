"""Test GGUF files in llama.cpp; slow, and only where an interpreter has its package xllamacpp.

``LLAMA_CPP_PYTHON`` names the interpreter; by default it is the one that runs the tests.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.gguf_models import MODELS, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from gptj_ft.checkpoints.convert import Conversion, convert

RUNNER = Path(__file__).parents[1] / "support/llama_cpp_runner.py"
PYTHON = os.environ.get("LLAMA_CPP_PYTHON") or (sys.executable if importlib.util.find_spec("xllamacpp") else None)
GELU = ("gpt2", "gpt_neox", "gemma")  # families whose activation llama.cpp takes from a table of fp16 numbers
PROMPTS = 50
CHATS = [
    [{"role": "user", "content": "Is it out of paper?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
    ],
]
TEXTS = ["The printer's 123 pages;\n\n\tdon't   stop.", " naïve 日本 🙂 <|im_start|>user\n12.5%", "I'LL go\r\n  x"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="needs llama.cpp: set LLAMA_CPP_PYTHON to a Python with xllamacpp"),
]


def ask(**job: Any) -> Any:
    """Return the answers of llama.cpp, see its runner."""
    assert PYTHON is not None
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, RUNNER], input=json.dumps(job), capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(done.stdout)


def make_prompts(longest: int = 30) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(3, 700) for _ in range(generator.randrange(4, longest))] for _ in range(PROMPTS)]


def differences(model: torch.nn.Module, prompts: list[list[int]], answers: Any) -> tuple[list[float], int]:
    """Return the largest difference of log-probabilities of each prompt, and the number continued greedily alike."""
    worst, same = [], 0
    for prompt, ids, top in zip(prompts, answers["ids"], answers["top"], strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([prompt + ids])).logits[0].float().log_softmax(-1)[len(prompt) - 1 :]
        worst.append(max((abs(float(scores[0, int(number)]) - value) for number, value in top.items()), default=0.0))
        same += scores[: len(ids)].argmax(-1).tolist() == ids
    assert sum(map(len, answers["top"])) > 4 * PROMPTS  # of 8; single bytes have no probabilities
    return worst, same


def gelu_of_llama_cpp(x: torch.Tensor) -> torch.Tensor:
    """Compute GELU as ggml's table does: the tanh form, of and as fp16 numbers."""
    table = F.gelu(x.half().float(), approximate="tanh").half().float()
    return torch.where(x <= -10, torch.zeros_like(x), torch.where(x >= 10, x, table))


class TableGelu(torch.nn.Module):
    """GELU of llama.cpp as a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu_of_llama_cpp(x)


def with_table(model: torch.nn.Module) -> torch.nn.Module:
    """Replace a model's activations by llama.cpp's."""
    for module in model.modules():
        for name in ("act", "act_fn"):
            if hasattr(module, name):
                setattr(module, name, TableGelu())
    return model


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_match_llama_cpp(tmp_path: Path, name: str) -> None:
    folder, prompts = make_model(tmp_path / name, name), make_prompts()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    uses_table = MODELS[name]["model_type"].startswith(GELU)
    found = {}
    for dtype in ("fp32", "fp16", "q8_0"):
        file = tmp_path / f"{name}-{dtype}.gguf"
        convert(folder, file, Conversion(to="gguf", dtype=dtype))  # type: ignore[arg-type]
        asked = {"prompts": prompts, "predict": 20 if dtype == "fp32" else 1, "context": 256}
        answers = ask(model=str(file), texts=TEXTS, chats=CHATS, **asked)
        each, same = differences(reference, prompts, answers)
        found[dtype] = max(each)
        if dtype != "fp32":
            continue
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rendered = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
        assert answers["chats"] == rendered
        assert answers["tokens"] == [tokenizer(text)["input_ids"] for text in TEXTS]
        if uses_table:
            exact, same = differences(with_table(reference), prompts, answers)
            print(f"{name}: median {median(exact):.2g}, most {max(exact):.2g} with llama.cpp's GELU")
            # The median: an input at the border of two fp16 numbers may round to the other one.
            assert median(exact) < 1e-5
            reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        assert same >= PROMPTS - (3 if uses_table else 0)
    print(name, {dtype: f"{value:.2g}" for dtype, value in found.items()})
    assert found["fp32"] < (2e-3 if uses_table else 1e-5)
    assert found["fp16"] < 2e-2


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_adapter_matches_peft_in_llama_cpp(tmp_path: Path, name: str) -> None:
    from peft import LoraConfig, get_peft_model

    targets = {"gpt2": ["c_attn", "c_proj", "c_fc"]}.get(name, ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"])
    folder, prompts = make_model(tmp_path / name, name), make_prompts()
    convert(folder, tmp_path / "model.gguf", Conversion(to="gguf"))
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, use_rslora=name == "qwen3", task_type="CAUSAL_LM",
        rank_pattern={"k_proj": 2}, fan_in_fan_out=name == "gpt2",
    )  # fmt: skip
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)
    torch.manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    convert(tmp_path / "adapter", tmp_path / "adapter.gguf", Conversion(to="gguf"))
    answers = ask(model=str(tmp_path / "model.gguf"), lora=str(tmp_path / "adapter.gguf"), prompts=prompts, predict=20)
    worst, _ = differences(model.eval(), prompts, answers)
    print(f"adapter of {name}: {max(worst):.2g}")
    assert max(worst) < 1e-3
    without = ask(model=str(tmp_path / "model.gguf"), prompts=prompts, predict=1)
    assert max(differences(model, prompts, without)[0]) > 0.1
