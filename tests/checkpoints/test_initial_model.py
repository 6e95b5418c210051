"""Test the random model that pre-training from a config starts from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_rows
from support.small_run import weights_of
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from gptj_ft.checkpoints.base_model import choose_model
from gptj_ft.checkpoints.initial_model import initial_model
from gptj_ft.checkpoints.tiny import FAMILIES, make_tiny
from gptj_ft.config.options import Recipe
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.registry import families


def write_config(folder: Path, model_type: str = "gpt2", **fields: Any) -> Path:
    """Write a config of a tiny family, with a tokenizer next to it."""
    make_tiny(folder, ["The lift stops."] * 3, 0, model_type=model_type)
    for path in folder.glob("model*"):
        path.unlink()
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    return config


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_initial_weights_are_distributed_as_in_transformers(model_type: str, tmp_path: Path, own_home: Path) -> None:
    padding = {} if model_type == "gptj" else {"pad_token_id": 1}
    config = write_config(tmp_path / "source", model_type, **padding)
    ours = weights_of(initial_model(config, 3))
    kind = AutoModel if families()[model_type].is_encoder else AutoModelForCausalLM
    theirs = kind.from_config(AutoConfig.from_pretrained(config.parent)).state_dict()
    prefix = families()[model_type].prefix
    assert len(ours) > 5
    for name, values in ours.items():
        expected = theirs.get(name, theirs.get(name.removeprefix(prefix)))
        expected = theirs["lm_head.weight"] if expected is None else expected  # of GPT-NeoX, renamed in files
        assert values.shape == expected.shape
        if expected.std() == 0:
            assert torch.equal(values, expected), name
        else:
            assert torch.equal(values.ne(0).any(-1), expected.ne(0).any(-1)), f"{name}: other rows are zero"
            assert abs(math.log(values.std() / expected.std())) < 6 / math.sqrt(values.numel()), name
            assert abs(values.mean()) < 6 * values.std() / math.sqrt(values.numel()), name


def test_seed_and_name_decide_initial_weights(tmp_path: Path, own_home: Path) -> None:
    config = write_config(tmp_path / "source")
    first, second = weights_of(initial_model(config, 1)), weights_of(initial_model(config, 2))
    assert initial_model(config, 1) == initial_model(config, 1)
    assert not torch.equal(first["transformer.wte.weight"], second["transformer.wte.weight"])
    blocks = [first[f"transformer.h.{block}.mlp.c_fc.weight"] for block in (0, 1)]
    assert not torch.equal(*blocks)
    assert not (initial_model(config, 1) / "README.md").exists()


def test_config_without_tokenizer_is_rejected(tmp_path: Path, own_home: Path) -> None:
    config = write_config(tmp_path / "source")
    (config.parent / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"holds no tokenizer, which a model made from config\.json needs: copy"):
        choose_model(Recipe(model=str(config)), None)
    assert not (own_home / "models").exists()


def test_vocabulary_below_tokenizer_ids_is_rejected(tmp_path: Path, own_home: Path) -> None:
    with pytest.raises(DataError, match="vocab_size is 200, but the tokenizer next to it has ids up to 2"):
        initial_model(write_config(tmp_path / "source", vocab_size=200), 0)
    assert not (own_home / "models").exists()


def test_finetune_trains_from_a_config(tmp_path: Path, shell) -> None:
    rows, config = write_rows(tmp_path / "rows.jsonl"), write_config(tmp_path / "source")
    command = f"finetune --recipe summarization --data {rows} --model {config} --max-steps 2 --map document=note"
    result = shell(f"{command} --max-length 512 --output out")
    assert "training starts from random weights, since --model names the config" in result.said
    assert (tmp_path / "out" / "model" / "config.json").is_file()
    assert json.loads(shell(f"plan --model {config} --max-length 512 --json").out)["num_parameters"]
