"""Chat templates of published models: TRL ships most of them; Mistral's are written here as published."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

from support.tiny_tokenizer import make_tokenizer
from transformers import PreTrainedTokenizerFast

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
_V1 = (
    "{{ bos_token }}{% for message in messages %}" + _ALTERNATE + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ANSWER }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
_V3 = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
    "{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}{{- bos_token }}"
    "{%- for message in loop_messages %}{%- if message['role'] == 'user' %}"
    "{%- if CONDITION and system_message is defined %}"
    "{{- '[INST]BLANK' + system_message + '\n\n' + message['content'] + '[/INST]' }}{%- else %}"
    "{{- '[INST]BLANK' + message['content'] + '[/INST]' }}{%- endif %}{%- else %}"
    "{{- 'BLANK' + message['content'] | trim + eos_token }}{%- endif %}{%- endfor %}"
)
_V7 = (
    "{%- set today = strftime_now('%Y-%m-%d') %}{{- bos_token }}{%- if messages[0]['role'] == 'system' %}"
    "{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}{%- else %}"
    "{%- set system_message = 'Today is ' + today %}{%- set loop_messages = messages %}{%- endif %}"
    "{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}{%- for message in loop_messages %}"
    "{%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}{%- else %}"
    "{{- message['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
MISTRAL = {
    "mistral-v1": _V1.replace("ANSWER", "message['content'] + eos_token + ' '"),
    "mistral-v2": _V1.replace("ANSWER", "' ' + message['content'] + eos_token"),
    "mistral-v3": _V3.replace("CONDITION", "message == user_messages[-1]").replace("BLANK", " "),
    "mistral-v3-tekken": _V3.replace("CONDITION", "message == user_messages[-1]").replace("BLANK", ""),
    "mistral-v7": _V7,
}
LOSES_SYSTEM = _V3.replace("CONDITION", "loop.last").replace("BLANK", " ")  # the first published form of v3
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]"),
    *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
]  # fmt: skip
# Name -> (BOS, end of turn, whether it takes a system message, further variables).
NAMES: dict[str, tuple[str, str, bool, dict[str, Any]]] = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", True, {}),
    "llama3_1": ("<|begin_of_text|>", "<|eot_id|>", True, {}),
    "llama3_2": ("<|begin_of_text|>", "<|eot_id|>", True, {}),
    **dict.fromkeys(MISTRAL, ("<s>", "</s>", True, {})),
    "mistral-v1": ("<s>", "</s>", False, {}),
    "mistral-v2": ("<s>", "</s>", False, {}),
    "qwen2_5": ("", "<|im_end|>", True, {}),
    "qwen3": ("", "<|im_end|>", True, {}),
    "qwen3-no-thinking": ("", "<|im_end|>", True, {"enable_thinking": False}),
    "gemma": ("<bos>", "<end_of_turn>", False, {}),
    "gemma3": ("<bos>", "<end_of_turn>", True, {}),
    "smollm2": ("", "<|im_end|>", True, {}),
}


def template_named(name: str) -> str:
    """Return the source of a template."""
    if name == "smollm2":
        return SMOLLM2
    return MISTRAL[name] if name in MISTRAL else trl_template(name.removesuffix("-no-thinking"))


def trl_template(name: str) -> str:
    """Return a template that TRL ships, without importing it."""
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.submodule_search_locations
    return (Path(found.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def chat_tokenizer(name: str, base: PreTrainedTokenizerFast | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a template and all special tokens; it adds its BOS to texts, as Llama's does."""
    tokenizer = base or make_tokenizer()
    bos, end, _, _ = NAMES[name]
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.bos_token, tokenizer.eos_token = bos or None, end
    tokenizer.chat_template = template_named(name)
    return tokenizer


def conversations(count: int, has_system: bool, seed: int = 0) -> list[list[dict[str, str]]]:
    """Return random conversations of one to five questions, with Unicode and line breaks."""
    draw = random.Random(seed)
    words = [
        "the", "patient", "naïve", "日本語", "👩‍👩‍👧", "مرحبا", "{{ x }}", "\n", "\n\n", "a\tb", "Ω≈ç", "\u200b",
    ]  # fmt: skip

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, 30))).strip() or "x"

    rows = []
    for _ in range(count):
        messages = [{"role": "system", "content": text()}] if has_system and draw.random() < 0.5 else []
        for _ in range(draw.randint(1, 5)):
            messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        rows.append(messages)
    return rows
