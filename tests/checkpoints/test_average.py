"""Average checkpoints, compared with torch's mean."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.checkpoint_files import State, make_state, write_source
from transformers import AutoModelForCausalLM

from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.errors import UsageError


def weights_of(folder: Path) -> State:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def sources(tmp_path: Path, dtype: torch.dtype = torch.float32, count: int = 3) -> tuple[list[Path], list[State]]:
    """Write models of one shape with other weights; the last one has several files."""
    generator = torch.Generator().manual_seed(0)
    states = [
        {name: (tensor + torch.randn(tensor.shape, generator=generator)).to(dtype) for name, tensor in state.items()}
        for state in [make_state()[1]] * count
    ]
    forms = ["safetensors"] * (count - 1) + ["bin sharded"]
    return [
        write_source(tmp_path / f"m{number}", state, form)
        for number, (state, form) in enumerate(zip(states, forms, strict=True))
    ], states


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "options", "stored"), [
    (torch.float32, "", torch.float32), (torch.bfloat16, "", torch.bfloat16),
    (torch.bfloat16, "--dtype fp32", torch.float32), (torch.float32, "--to huggingface --dtype bf16", torch.bfloat16),
])  # fmt: skip
def test_average_is_torchs_mean_bit_for_bit(dtype, options: str, stored, shell, tmp_path: Path) -> None:
    folders, states = sources(tmp_path, dtype)
    done = shell(f"convert --average {folders[1]} --average {folders[2]} {options} {folders[0]} out --json")
    assert done.code == 0, done.err
    written = weights_of(Path("out"))
    assert written.keys() == states[0].keys()
    for name, tensor in written.items():
        mean = torch.stack([state[name].float() for state in states]).mean(0).to(stored)
        assert (tensor.dtype, torch.equal(tensor, mean)) == (stored, True), name
    assert AutoModelForCausalLM.from_pretrained("out").dtype == stored


def test_only_equal_architectures_are_averaged(shell, tmp_path: Path) -> None:
    (first, other), _ = sources(tmp_path, count=2)
    config = json.loads((other / "config.json").read_text())
    for change, says in [
        ({"rotary_dim": 2}, f"{other} differs from {first} in rotary_dim: 2, not 4"),
        ({"attn_pdrop": 0.5}, ""),  # changes no tensor
    ]:
        (other / "config.json").write_text(json.dumps({**config, **change}))
        done = shell(f"convert --average {other} {first} out")
        assert (done.code, says in done.err) == (2 if says else 0, True), done.err
        assert Path("out").exists() != bool(says)
    assert "--average excludes --merge" in shell(f"convert --average {other} --with-optimizer {first} new").err
    assert "needs two checkpoints" in shell(f"convert --average {other}").err


def adapter(base: Path, folder: Path, seed: int, **options: object) -> Path:
    torch.manual_seed(seed)
    options = {"target_modules": ["q_proj", "fc_in"], **options}
    config = LoraConfig(init_lora_weights=False, **options)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(folder)
    return folder


def test_adapter_of_the_head_opens(tmp_path: Path) -> None:
    base = write_source(tmp_path / "base", make_state()[1])
    folder = adapter(base, tmp_path / "a", 0, r=2, target_modules=["q_proj", "lm_head"])
    file, name = "adapter_model.safetensors", "base_model.model.lm_head.base_layer.weight"
    tensors = load_file(folder / file)
    assert name in tensors, "PEFT writes the head's own weight, too"
    convert(base, tmp_path / "merged", Conversion(merge=folder))
    ids = torch.tensor([[1, 7, 3, 9]])
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)
    save_file({**tensors, name: tensors[name] + 1}, folder / file)
    with pytest.raises(UsageError, match=r"its copy of lm_head\.weight differs from the base model's"):
        convert(base, tmp_path / "other", Conversion(merge=folder))


def test_adapters_of_one_shape_are_averaged(shell, tmp_path: Path) -> None:
    base = write_source(tmp_path / "base", make_state()[1])
    first, second = (adapter(base, tmp_path / f"a{seed}", seed, r=2) for seed in (0, 1))
    done = shell(f"convert --average {second} {first} --json")
    assert done.code == 0, done.err
    folder = tmp_path / "a0-average"
    one, two, means = (load_file(each / "adapter_model.safetensors") for each in (first, second, folder))
    assert means.keys() == one.keys()
    assert all(torch.equal(mean, torch.stack([one[name], two[name]]).mean(0)) for name, mean in means.items())
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)

    for options, says in [({"r": 3}, "in r: 3, not 2"), ({"r": 2, "lora_alpha": 4}, "in lora_alpha: 4, not 8")]:
        shutil.rmtree(second)
        done = shell(f"convert --average {adapter(base, second, 1, **options)} {first} out")
        assert (done.code, says in done.err) == (2, True), done.err
    shutil.rmtree(second)
    adapter(base, second, 1, r=2)
    file = second / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "h.1" not in name}, file)
    done = shell(f"convert --average {second} {first} out")
    assert (done.code, "in base_model.model.transformer.h.1." in done.err) == (2, True), done.err
    done = shell(f"convert --average {first} {base} out")
    assert (done.code, f"{first} is an adapter, {base} a model" in done.err) == (2, True), done.err
    assert not Path("out").exists()
