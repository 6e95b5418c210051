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
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.gguf_models import MODELS, SYLLABLES, make_model
from support.gguf_models import TEXTS as GGUF_TEXTS
from support.smollm2 import smollm2_folder
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
            num_layers = reference.config.num_hidden_layers
            best = sorted(exact)[PROMPTS // num_layers]
            print(f"{name}: {best:.2g} at 1/{num_layers} of the prompts, most {max(exact):.2g} with llama.cpp's GELU")
            # Not the worst prompts: an input at the border of two fp16 numbers may round to the other one. The more
            # layers, the fewer prompts are without such an input.
            assert best < 1e-5
            reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        assert same >= PROMPTS - (3 if uses_table else 0)
    print(name, {dtype: f"{value:.2g}" for dtype, value in found.items()})
    # 2e-3 for two layers with the table. Its errors add up: Gemma 3 has seven here.
    assert found["fp32"] < (1e-3 * reference.config.num_hidden_layers if uses_table else 1e-5)
    assert found["fp16"] < 2e-2


def test_real_model_matches_llama_cpp(tmp_path: Path) -> None:
    """Compare SmolLM2 with `transformers` in fp64.

    llama.cpp's server adds the 49,152 probabilities of a position one by one in fp32, which shifts all of its
    log-probabilities by up to 2.6e-4. Normalised in fp64 they are 7e-6 off, `transformers` in fp32 2e-5.
    """
    folder = smollm2_folder(tmp_path / "smollm2")
    convert(folder, tmp_path / "model.gguf", Conversion(to="gguf", dtype="fp32"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [f"{text} {SYLLABLES[number]}" for number, text in enumerate(GGUF_TEXTS * 3)]
    prompts = [tokenizer(f"{text} {text}"[: 30 * (number + 1)])["input_ids"] for number, text in enumerate(texts)]
    single, double = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        for dtype in (torch.float32, torch.float64)
    )
    size = double.config.vocab_size
    answers = ask(model=str(tmp_path / "model.gguf"), prompts=prompts, predict=8, num_probs=size)
    served, errors, torchs = 0.0, 0.0, 0.0
    for prompt, ids, top in zip(prompts, answers["ids"], answers["top"], strict=True):
        with torch.no_grad():
            scores = [model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 :] for model in (single, double)]
        assert scores[1][: len(ids)].argmax(-1).tolist() == ids
        torch_scores, exact = (each[0].double().log_softmax(-1) for each in scores)
        best = exact.topk(8).indices
        given = torch.full((size,), -torch.inf, dtype=torch.float64)
        given[[int(number) for number in top]] = torch.tensor(list(top.values()), dtype=torch.float64)
        served = max(served, float((given - exact)[best].abs().max()))
        errors = max(errors, float((given.log_softmax(-1) - exact)[best].abs().max()))
        torchs = max(torchs, float((torch_scores - exact)[best].abs().max()))
    print(f"SmolLM2: {errors:.2g}, as served {served:.2g}, transformers in fp32 {torchs:.2g}")
    assert errors < 1e-5


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
