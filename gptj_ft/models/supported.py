"""Name the supported model families and the default model, without importing torch."""

from __future__ import annotations

from pathlib import Path

from gptj_ft.errors import UsageError
from gptj_ft.system.plain_text import one_line

MODEL_TYPES = (  # keys of `registry.families`
    "gptj", "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "phi3", "bert", "roberta",
    "xlm-roberta",
)  # fmt: skip
TINY_MODELS = {  # random models made from the rows of a run: name -> ``model_type``
    "tiny": "gptj", "tiny-gpt2": "gpt2", "tiny-gpt-neox": "gpt_neox",
    "tiny-llama": "llama", "tiny-mistral": "mistral", "tiny-qwen2": "qwen2",
    "tiny-qwen3": "qwen3", "tiny-smollm3": "smollm3", "tiny-granite": "granite", "tiny-phi3": "phi3",
    "tiny-bert": "bert", "tiny-roberta": "roberta",
    "tiny-xlm-roberta": "xlm-roberta",
}  # fmt: skip
MOST_LABELS = 100_000  # of a task
DEFAULT_REPOSITORY = "EleutherAI/gpt-j-6b"
DEFAULTS = (DEFAULT_REPOSITORY, f"{DEFAULT_REPOSITORY}-fp16")  # as `download --variant fp16` calls its folder


def unsupported_family(config: Path, model_type: object) -> UsageError:
    """Return the error for a model of an unsupported family."""
    problem = f"this is a {one_line(str(model_type))} model" if model_type else "it names no model_type"
    return UsageError(
        f"{config}: {problem}; supported: {', '.join(MODEL_TYPES)} (GPT-J, GPT-2, Cerebras-GPT, BERT, RoBERTa, XLM-R)\n"
        "for other models there are TRL, LLaMA-Factory, Axolotl and, on a Mac, mlx-lm"
    )
