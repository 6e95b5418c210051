"""Test the tiny random model and its tokenizer."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import check_tensors, open_checkpoint
from gptj_ft.checkpoints.tiny import FAMILIES, TINY_SIZES, make_tiny, train_wordpiece
from gptj_ft.errors import UsageError
from gptj_ft.models.registry import families

TEXTS = ["The clinic opens at eight. The nurse called the patient twice, and the patient called back.\n"] * 3
DECODERS = [name for name in FAMILIES if not families()[name].is_encoder]
SMALL = {"n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4}


def digest(folder: Path) -> str:
    content = b"".join(path.name.encode() + path.read_bytes() for path in sorted(folder.iterdir()))
    return hashlib.sha256(content).hexdigest()


MAKE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_tiny import SMALL, TEXTS
from gptj_ft.checkpoints.tiny import make_tiny
make_tiny(Path(sys.argv[1]), TEXTS, 7, **SMALL)
"""


@pytest.mark.thorough
def test_texts_and_seed_determine_every_byte(tmp_path: Path) -> None:
    make_tiny(tmp_path / "here", TEXTS, 7, **SMALL)
    subprocess.run(
        [sys.executable, "-c", MAKE, tmp_path / "there", Path(__file__).parent],
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )
    assert digest(tmp_path / "here") == digest(tmp_path / "there")
    make_tiny(tmp_path / "other", TEXTS, 8, **SMALL)
    assert digest(tmp_path / "here") != digest(tmp_path / "other")


def test_wordpiece_ids_are_deterministic() -> None:
    texts = [f"Room {n} is cold and dark at night." for n in range(30)]
    vocabularies = [train_wordpiece(texts, 200).get_vocab() for _ in range(6)]
    assert all(each == vocabularies[0] for each in vocabularies)
    assert vocabularies[0].keys() >= {"[PAD]", "##2", "night", "cold"}


def test_transformers_opens_encoder_and_tokenizer(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", TEXTS, 0, model_type="bert")
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert not (folder / "generation_config.json").exists()
    assert model.config.architectures == ["BertModel"]
    assert (model.embeddings.LayerNorm.weight == 1).all()
    assert not model.pooler.dense.bias.any()
    assert tokenizer.convert_ids_to_tokens(tokenizer("The nurse", "called").input_ids) == [
        "[CLS]", "the", "nurse", "[SEP]", "called", "[SEP]",
    ]  # fmt: skip
    assert tokenizer.model_max_length == 512


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta"])
def test_transformers_opens_roberta_like_encoder(tmp_path: Path, family: str) -> None:
    folder = make_tiny(tmp_path / "tiny", TEXTS, 0, model_type=family)
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == family
    assert (model.config.pad_token_id, tokenizer.pad_token_id) == (1, 1)
    found = tokenizer("The nurse", " called")
    assert tokenizer.decode(found.input_ids) == "<s>The nurse</s></s> called</s>"
    assert not any(found.get("token_type_ids", []))
    assert tokenizer.model_max_length == 512
    with torch.no_grad():
        assert model(**tokenizer("nurse " * 900, truncation=True, return_tensors="pt")).pooler_output.shape == (1, 96)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", DECODERS)
def test_transformers_opens_model_and_tokenizer(tmp_path: Path, family: str) -> None:
    folder = make_tiny(tmp_path / "tiny", TEXTS, 0, model_type=family)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    own = {"bos_token_id", "eos_token_id", "vocab_size", "architectures"}
    expected = {key: value for key, value in FAMILIES[family].items() if key not in own}
    assert model.config.architectures == [type(model).__name__]
    assert all(getattr(model.config, name) == value for name, value in expected.items())
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == model.config.eos_token_id
    assert tokenizer.model_max_length == TINY_SIZES["n_positions"]
    assert tokenizer("x<|endoftext|>").input_ids[-1] == tokenizer.eos_token_id
    assert model.config.vocab_size == -(-len(tokenizer) // 64) * 64
    with torch.no_grad():
        assert model(**tokenizer("The clinic", return_tensors="pt")).logits.shape[-1] == model.config.vocab_size


@pytest.mark.parametrize(
    "text", ["The nurse called.", " leading, trailing  ", "naïve 日本 🙂\r\n\ttabs", "it's n't 'll"]
)
def test_any_text_survives_the_tokenizer(tmp_path: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tmp_path / "tiny", TEXTS, 0, **SMALL))
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_frequent_words_become_one_token(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tmp_path / "tiny", TEXTS, 0, **SMALL))
    assert tokenizer.tokenize(" patient") == ["Ġpatient"]


@pytest.mark.parametrize("texts", [[], ["a"], [""]])
def test_one_short_text_is_enough(tmp_path: Path, texts: list[str]) -> None:
    folder = make_tiny(tmp_path / "tiny", texts, 0, **SMALL)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 320  # 256 bytes and one, rounded up


def test_vocabulary_stops_at_target(tmp_path: Path) -> None:
    texts = [f"word{number} twice word{number}" for number in range(500)]
    folder = make_tiny(tmp_path / "tiny", texts, 0, vocab_target=300, **SMALL)
    assert len(AutoTokenizer.from_pretrained(folder)) == 300


@pytest.mark.parametrize("family", DECODERS)
def test_weights_start_as_in_transformers(tmp_path: Path, family: str) -> None:
    folder = make_tiny(tmp_path / "tiny", TEXTS, 0, model_type=family, initializer_range=0.1)
    with open_checkpoint(folder) as checkpoint:
        assert check_tensors(read_architecture(folder), checkpoint) == []
        for name in checkpoint.names:
            tensor = checkpoint.read(name)
            assert tensor.dtype == torch.float32
            if name.endswith("bias"):
                assert torch.all(tensor == 0.0), name
            elif "ln_" in name or "norm" in name:
                # Gemma's norms multiply by 1 + weight.
                assert torch.all(tensor == float("gemma" not in family)), name
            else:
                assert float(tensor.std()) == pytest.approx(0.1, rel=0.05), name
                assert abs(float(tensor.mean())) < 0.5 * tensor.numel() ** -0.5, name  # five standard errors


def test_existing_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists"):
        make_tiny(tmp_path, TEXTS, 0)
