"""Make small random models with tokenizers for GGUF tests, with `transformers`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from gptj_ft.checkpoints.gguf.splitters import SPLITTERS, Splitter
from gptj_ft.checkpoints.tiny import train_tokenizer

TEXTS = ["The printer on floor 3 is out of paper.", "It blinks twice, then stops for 12 minutes; don't touch it."]
# Enough syllables that most tokens are text: llama.cpp leaves out the probabilities of single bytes that are none.
SYLLABLES = [" ".join(f"{a}{b}{c}" for b in "aeiou" for c in "nrst") for a in "bcdfghjklmnpqrstvwz"]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OWN_SPLITTERS = {"llama": "llama-bpe", "mistral": "tekken", "qwen2": "qwen2", "qwen3": "qwen2", "smollm3": "dbrx"}
OWN_SPLITTERS |= {"gpt_neox": "olmo", "granite": "refact"}
PIECES = ("llama-linear",)  # with a SentencePiece-like tokenizer
ROWS = 720  # of the embedding; more than the tokenizer has tokens
COMMON = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
}  # fmt: skip
# Name -> fields of config.json.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 96,
        "initializer_range": 0.2,
    },
    "llama": {"model_type": "llama", **COMMON, "head_dim": 16},
    "llama-3": {"model_type": "llama", **COMMON, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", **COMMON, "attention_bias": True, "mlp_bias": True},
    "llama-linear": {
        "model_type": "llama", **COMMON,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "mistral": {"model_type": "mistral", **COMMON, "sliding_window": None, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", **COMMON, "tie_word_embeddings": True},
    "qwen2-yarn": {"model_type": "qwen2", **COMMON, "rope_parameters": YARN},
    "qwen3": {"model_type": "qwen3", **COMMON, "head_dim": 16},
    "smollm3": {"model_type": "smollm3", **COMMON, "num_hidden_layers": 4, "pad_token_id": 0},
    "granite": {
        "model_type": "granite", **COMMON, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
        "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    },
    "gpt_neox": {
        "model_type": "gpt_neox", **COMMON, "hidden_act": "gelu", "rotary_pct": 0.5, "use_parallel_residual": True,
    },
    "gpt_neox-serial": {
        "model_type": "gpt_neox", **COMMON, "hidden_act": "gelu", "rotary_pct": 0.5, "use_parallel_residual": False,
    },
    "gemma": {"model_type": "gemma", **COMMON, "head_dim": 16, "initializer_range": 0.1},
    "gemma2": {
        "model_type": "gemma2", **COMMON, "initializer_range": 0.1, "head_dim": 16, "query_pre_attn_scalar": 16,
        "sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", **COMMON, "initializer_range": 0.1, "num_hidden_layers": 7, "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
    "phi3": {"model_type": "phi3", **COMMON, "pad_token_id": 0},
    "phi3-longrope": {
        "model_type": "phi3", **COMMON, "pad_token_id": 0, "rope_parameters": LONGROPE, "max_position_embeddings": 1024,
        "original_max_position_embeddings": 256,
    },
}  # fmt: skip


def make_model(folder: Path, name: str, **fields: Any) -> Path:
    """Write a model folder whose weights, norms and biases are all random; return the folder."""
    raw = {**MODELS[name], **fields, "vocab_size": ROWS, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.5, 0.3)
    model.save_pretrained(folder)
    if name in PIECES:
        write_pieces(folder)
    else:
        write_tokenizer(folder, SPLITTERS[OWN_SPLITTERS.get(raw["model_type"], "gpt-2")])
    return folder


def write_pieces(folder: Path) -> None:
    """Write a SentencePiece-like tokenizer as Llama 2 has it: merges of pieces, bytes for other letters, a BOS."""
    words = [text.replace(" ", "\u2581") for text in TEXTS + SYLLABLES]
    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=440, min_frequency=2, show_progress=False)
    trained.train_from_iterator([word for text in words for word in text.split("\u2581")] + ["\u2581"], trainer)
    content = json.loads(trained.to_str())
    merges = [("\u2581", letter) for letter in "abcdfghjklmnpqrstvwz"] + [
        tuple(each) for each in content["model"]["merges"]
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    letters = sorted({letter for text in words for letter in text})
    tokens += list(dict.fromkeys([*letters, *("".join(pair) for pair in merges)]))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    known = [pair for pair in merges if all(part in vocabulary for part in pair)]
    backend = Tokenizer(models.BPE(vocabulary, known, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))


def write_tokenizer(folder: Path, splitter: Splitter) -> None:
    """Write a byte-level BPE tokenizer with a chat template and two end tokens."""
    content = json.loads(train_tokenizer((TEXTS + SYLLABLES) * 3, 700, SPECIAL).to_str())
    content["normalizer"] = {"type": "NFC"} if splitter.has_nfc else None
    content["pre_tokenizer"] = splitter.to_pre_tokenizer()
    content["model"]["ignore_merges"] = splitter.keeps_words
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), bos_token=SPECIAL[0], eos_token=SPECIAL[2],
        unk_token=SPECIAL[0], pad_token=SPECIAL[0], additional_special_tokens=list(SPECIAL),
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ends = {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(ends))


def quantize_matrices(file: Path, target: Path, kinds: Sequence[str]) -> Path:
    """Copy a GGUF file with its matrices quantized, in turn, as these types of ggml; return the copy."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            is_list = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_list else None)
    turns = itertools.cycle(gguf.GGMLQuantizationType[kind] for kind in kinds)
    for tensor in reader.tensors:
        values = tensor.data.reshape(tensor.shape[::-1])
        if values.ndim < 2 or tensor.name == "position_embd.weight":
            writer.add_tensor(tensor.name, values)
            continue
        kind = next(turns)
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return target


def quantize(values: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """Quantize a matrix, [rows, columns], to bytes; K types, which the package gguf cannot write, get random codes."""
    if not kind.name.endswith("_K"):
        return gguf.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(values.size).integers(0, 256, (values.size // block, size), np.uint8)
    scale = np.array([1e-4], np.float16).view(np.uint8)
    for start in (208,) if kind.name == "Q6_K" else (0, 2):
        blocks[:, start : start + 2] = scale
    return blocks.reshape(len(values), -1)
