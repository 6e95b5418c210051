"""Make a tiny random model with its own tokenizer, for demonstrations and tests.

Nothing is downloaded. The same texts and seed give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

from gptj_ft.checkpoints.model_folder import write_model
from gptj_ft.checkpoints.published_configs import GPT2, GPTJ_6B
from gptj_ft.models.registry import Architecture, families
from gptj_ft.system.scratch import scratch_folder

VOCAB_TARGET = 1536  # maximum vocabulary; a small corpus gives a smaller one
TINY_SIZES: Mapping[str, int | float] = {
    "n_embd": 96,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 2048,
    "initializer_range": 0.05,
}
TINY_BERT: Mapping[str, Any] = {
    "model_type": "bert", "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 384, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0,
    "initializer_range": 0.05,
}  # fmt: skip
TINY_ROBERTA: Mapping[str, Any] = {
    "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2,
}  # fmt: skip
TINY_GPT_NEOX: Mapping[str, Any] = {
    "model_type": "gpt_neox", "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 384, "hidden_act": "gelu", "max_position_embeddings": 2048, "initializer_range": 0.05,
    "layer_norm_eps": 1e-5, "use_parallel_residual": True, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
TINY_LLAMA: Mapping[str, Any] = {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.05, "tie_word_embeddings": True,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "pad_token_id": None,
}  # fmt: skip
TINY_GEMMA: Mapping[str, Any] = {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048, "initializer_range": 0.05,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "pad_token_id": None,
}  # fmt: skip
TINY_GEMMA2: Mapping[str, Any] = {
    **TINY_GEMMA, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 32,
}  # fmt: skip
# Config fields of each family, without token ids and size of the vocabulary.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gptj": {**GPTJ_6B, "rotary_dim": 12, **TINY_SIZES},
    "gpt2": {**GPT2, "activation_function": "gelu", **TINY_SIZES},
    "gpt_neox": TINY_GPT_NEOX,
    "llama": {**TINY_LLAMA, "model_type": "llama"},
    "mistral": {**TINY_LLAMA, "model_type": "mistral", "sliding_window": 64, "tie_word_embeddings": False},
    "qwen2": {**TINY_LLAMA, "model_type": "qwen2"},
    "qwen3": {**TINY_LLAMA, "model_type": "qwen3", "head_dim": 32},
    "smollm3": {**TINY_LLAMA, "model_type": "smollm3", "no_rope_layer_interval": 2},
    "granite": {
        **TINY_LLAMA, "model_type": "granite", "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.04, "logits_scaling": 8.0,
    },
    "phi3": {
        **TINY_LLAMA, "model_type": "phi3",
        "rope_parameters": {**TINY_LLAMA["rope_parameters"], "partial_rotary_factor": 0.5},
    },
    "gemma": {**TINY_GEMMA, "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {
        **TINY_GEMMA2, "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {**TINY_GEMMA2, "model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
    "bert": TINY_BERT,
    "roberta": {**TINY_BERT, **TINY_ROBERTA, "model_type": "roberta"},
    "xlm-roberta": {**TINY_BERT, **TINY_ROBERTA, "model_type": "xlm-roberta"},
}  # fmt: skip
MARKS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # BERT's special tokens
END_OF_TEXT = "<|endoftext|>"
VOCAB_MULTIPLE = 64  # GPT-J pads its embedding, too: 50400 rows for 50257 tokens


def make_tiny(
    folder: Path,
    texts: Iterable[str],
    seed: int,
    *,
    model_type: str = "gptj",
    vocab_target: int = VOCAB_TARGET,
    **sizes: int | float,
) -> Path:
    """Write a new model folder with random fp32 weights and a tokenizer trained on texts: byte-level BPE or WordPiece.

    Args:
        texts: corpus of the tokenizer; one short text is enough, because every byte is a token.
        model_type: family, one of `FAMILIES`.
        vocab_target: maximum vocabulary; at least 257: the bytes and ``<|endoftext|>``.
        sizes: other values for fields of ``config.json``; ``vocab_size`` may exceed the tokenizer's.

    Returns:
        The folder.

    Raises:
        UsageError: the folder exists, or cannot be written.
        ResourceError: the disk is full.
    """
    family = families()[model_type]
    train = {"bert": train_wordpiece, "roberta": train_framed, "xlm-roberta": train_framed}
    tokenizer = train.get(model_type, train_tokenizer)(texts, vocab_target)
    num_tokens, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(END_OF_TEXT)
    ends = {} if family.is_encoder else {"bos_token_id": end, "eos_token_id": end}
    ids = {**ends, "vocab_size": -(-num_tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE}
    raw = {**FAMILIES[model_type], **ids, **sizes}
    architecture = Architecture(family, family.read_config(raw), raw)
    with scratch_folder() as temporary:
        _save_tokenizer(temporary, tokenizer, architecture.config.n_positions)
        write_model(folder, architecture, _random_layers(architecture, seed), dtype=torch.float32, source=temporary)
    return folder


def train_framed(texts: Iterable[str], vocab_target: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer like RoBERTa's, which puts ``<s>`` and ``</s>`` around texts."""
    tokenizer = train_tokenizer(texts, vocab_target, tuple(MARKS.values()))
    ends = [(tokenizer.token_to_id(MARKS[role]), MARKS[role]) for role in ("bos_token", "eos_token")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[(name, number) for number, name in ends]
    )
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_target: int, special: tuple[str, ...] = (END_OF_TEXT,)) -> Tokenizer:
    """Train a byte-level BPE tokenizer like GPT-2's, by default with ``<|endoftext|>`` as its only special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_target,
        min_frequency=2,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_wordpiece(texts: Iterable[str], vocab_target: int) -> Tokenizer:
    """Train a WordPiece tokenizer like that of uncased BERT."""
    normalizer, pre_tokenizer, texts = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), list(texts)

    def with_model(model: models.WordPiece) -> Tokenizer:
        tokenizer = Tokenizer(model)
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
        return tokenizer

    # The trainer numbers letters inside words in the order of a hash table, which differs in each process, and breaks
    # ties between pairs by these numbers. Special tokens come first, in a fixed order: so pass the letters as such.
    normal = (normalizer.normalize_str(text) for text in texts)
    words = {word for text in normal for word, _ in pre_tokenizer.pre_tokenize_str(text)}
    inner = sorted({f"##{letter}" for word in words for letter in word[1:]})
    trained = with_model(models.WordPiece(unk_token=PIECES[1]))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_target, min_frequency=2, special_tokens=[*PIECES, *inner], show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    # In the trained tokenizer, letters are special tokens, which match anywhere: use only its vocabulary.
    tokenizer = with_model(models.WordPiece(vocab=trained.get_vocab(), unk_token=PIECES[1]))
    tokenizer.add_special_tokens(list(PIECES))
    return tokenizer


def _save_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    if isinstance(tokenizer.model, models.WordPiece):
        vocabulary = tokenizer.get_vocab()
        lines = "".join(f"{token}\n" for token in sorted(vocabulary, key=vocabulary.__getitem__))
        (folder / "vocab.txt").write_text(lines, encoding="utf-8")
        settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": max_length}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        special = {**MARKS, "cls_token": MARKS["bos_token"], "sep_token": MARKS["eos_token"]}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    for name, content in (("tokenizer_config.json", settings), ("special_tokens_map.json", special)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _random_layers(architecture: Architecture, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield each layer's weights, initialized as in `transformers`: normal weights, zero biases, unit norms."""
    generator = torch.Generator().manual_seed(seed)
    std = architecture.config.initializer_range
    for layer in architecture.skeleton:
        tensors = {}
        for name, like in layer.state_dict().items():
            path = name.rpartition(".")[0]
            if name.endswith("bias"):
                tensors[name] = torch.zeros(like.shape)
            elif "ln_" in name or "norm" in name:
                # Norms that multiply by offset + weight are the identity at 1 - offset.
                tensors[name] = torch.full(like.shape, 1.0 - getattr(layer.get_submodule(path), "offset", 0.0))
            else:
                tensors[name] = torch.empty(like.shape).normal_(0.0, std, generator=generator)
        yield tensors
