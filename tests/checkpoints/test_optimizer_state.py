"""Test converting optimizer state from other programs, and training from it."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from conftest import random_gptj
from safetensors.torch import save_file
from support import mesh_reference as reference
from support.cerebras_reference import GPT2, PARAMS, gpt2_state, gpt2_theirs, theirs
from support.checkpoint_files import State, make_state, write_source
from support.small_run import Power, PowerCut, assert_same_weights, new_run, small_session, train, weights_of
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.data.batches import rows_of_step
from gptj_ft.errors import DataError, UsageError
from gptj_ft.training.setup import TrainSetup

KINDS = ("exp_avg", "exp_avg_sq")
WITH_OPTIMIZER = Conversion(with_optimizer=True)


def tensors_of(folder: Path) -> State:
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def squared(leaves: reference.Leaves) -> reference.Leaves:
    return {key: array**2 for key, array in leaves.items()}


@pytest.mark.thorough
def test_full_mesh_moments_join_like_weights(tmp_path: Path, shell) -> None:
    config = tmp_path / "mesh.json"
    config.write_text(json.dumps(reference.SHAPE))
    first, second = reference.random_shards(5), [squared(leaves) for leaves in reference.random_shards(6)]
    source = reference.write(tmp_path / "mesh", reference.random_shards(), step=70, moments=(first, second))
    done = shell(f"convert {source} model --config mesh.json --with-optimizer --json")
    assert (done.code, done.json["updates"], done.json["has_left_moments"]) == (0, 70, False)
    for kind, shards in zip(KINDS, (first, second), strict=True):
        # As weights they would be joined the same way, but that shards' biases add up; a moment is each shard's alike.
        for number, leaves in enumerate(shards):
            for key in leaves:
                is_added = key == ("embedding_shard/~/linear", "b")
                if is_added or (number and key[0].endswith("linear_5") and key[1] == "b"):
                    leaves[key] = np.zeros_like(leaves[key])
        convert(reference.write(tmp_path / kind, shards), tmp_path / f"{kind}-as-weights", Conversion(config=config))
        expected, found = tensors_of(tmp_path / f"{kind}-as-weights"), tensors_of(tmp_path / "model/optimizer" / kind)
        assert_same_weights(found, expected)
    again = convert(tmp_path / "model", tmp_path / "bf16", Conversion(dtype="bf16", with_optimizer=True))
    assert (again.dtype, again.updates) == ("bfloat16", 70)
    for kind in KINDS:
        copy = tensors_of(tmp_path / "bf16/optimizer" / kind)
        assert_same_weights(copy, tensors_of(tmp_path / "model/optimizer" / kind))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").num_parameters() == again.parameters


class Theirs(nn.Module):
    """Modules of a Cerebras model in their order of creation; the values do not matter."""

    def __init__(self, named: State) -> None:
        super().__init__()
        has_biases = any(name.endswith("proj_q_dense_layer.bias") for name in named)
        width, vocabulary = named["model.lm_head.weight"].t().shape
        inner = len(named["model.transformer_decoder.layers.0.ffn.ffn.0.linear_layer.weight"])
        self.embedding_layer = nn.Module()
        self.embedding_layer.word_embeddings = nn.Embedding(vocabulary, width)
        if has_biases:
            self.embedding_layer.position_embeddings = nn.Embedding(32, width)
        self.ln_f = nn.LayerNorm(width)
        self.transformer_decoder = nn.Module()
        self.transformer_decoder.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.transformer_decoder.layers:
            layer.self_attn = nn.Module()
            for part in ("q", "k", "v", "output"):
                layer.self_attn.add_module(f"proj_{part}_dense_layer", nn.Linear(width, width, bias=has_biases))
            layer.norm1 = nn.LayerNorm(width)
            if has_biases:
                layer.norm3 = nn.LayerNorm(width)
            layer.ffn = nn.Module()
            layer.ffn.ffn = nn.ModuleList(nn.Module() for _ in range(2))
            for one, sizes in zip(layer.ffn.ffn, ((width, inner), (inner, width)), strict=True):
                one.linear_layer = nn.Linear(*sizes)
        self.transformer_decoder.norm = self.ln_f
        self.lm_head = nn.Linear(width, vocabulary, bias=not has_biases)
        if torch.equal(named["model.lm_head.weight"], named["model.embedding_layer.word_embeddings.weight"]):
            self.lm_head.weight = self.embedding_layer.word_embeddings.weight

    def keys(self, form: str) -> dict[str, str]:
        """Return the optimizer's key of each parameter."""
        names = {id(parameter): f"model.{name}" for name, parameter in self.named_parameters()}
        if form == "named":
            return {name: name for name in names.values()}
        is_norm = [id(p) for module in self.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()]
        groups: list[list[nn.Parameter]] = [[], []]
        for name, parameter in self.named_parameters():
            groups["bias" in name or id(parameter) in is_norm].append(parameter)
        groups = groups if form == "in two groups" else [list(self.parameters())]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups])
        numbered = optimizer.state_dict()["param_groups"]
        return {
            names[id(parameter)]: str(number)
            for ours, group in zip(groups, numbered, strict=True)
            for parameter, number in zip(ours, group["params"], strict=True)
        }


def write_moments_mdl(path: Path, named: tuple[State, State, State], form: str, power: float | None) -> Path:
    """Write weights and moments under Cerebras' names, with the power of beta2 after some updates."""
    keys = Theirs(named[0]).keys(form)
    with h5py.File(path, "w") as file:
        for name, tensor in named[0].items():
            file[name] = tensor.numpy()
        for kind, state in zip(KINDS, named[1:], strict=True):
            for name, key in keys.items():
                file[f"optimizer.state.{key}.{kind}"] = state[name].numpy()
        if power is not None:
            file[f"optimizer.state.{next(iter(keys.values()))}.beta2_power"] = np.float32(power)
            file["optimizer.param_groups.0.betas"] = np.array([0.9, 0.95])
        file["global_step"] = 250
    return path


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("model", "form"),
    [
        *(("gptj", form) for form in ("named", "in two groups", "in one group")),
        *((model, form) for model in ("gpt2", "tied gpt2") for form in ("named", "in two groups")),
    ],
)
def test_mdl_moments_match_parameters(tmp_path: Path, model: str, form: str) -> None:
    params, is_tied = tmp_path / "params.yaml", model == "tied gpt2"
    params.write_text(PARAMS if model == "gptj" else GPT2.replace("TIED", str(is_tied).lower()))
    state = make_state()[1] if model == "gptj" else gpt2_state(is_tied)
    first = {name: tensor * 0.5 for name, tensor in state.items()}
    second = {name: tensor**2 for name, tensor in state.items()}
    positions = "embedding_layer.position_embeddings.weight"
    named = tuple(theirs(each) if model == "gptj" else gpt2_theirs(each, positions) for each in (state, first, second))
    power = 0.95 ** (40 + 1) if form == "named" else None  # it starts as the decay itself
    source = write_moments_mdl(tmp_path / "checkpoint.mdl", named, form, power)  # type: ignore[arg-type]
    report = convert(source, tmp_path / "model", Conversion(config=params, with_optimizer=True))
    assert report.updates == (40 if form == "named" else 250)
    for kind, expected in zip(KINDS, (first, second), strict=True):
        if is_tied:
            del expected["lm_head.weight"]
        assert_same_weights(tensors_of(tmp_path / "model/optimizer" / kind), expected)


def test_misfit_moments_are_rejected(tmp_path: Path) -> None:
    params, state = tmp_path / "params.yaml", make_state()[1]
    params.write_text(PARAMS)

    def refused(form: str, reason: str, error: type[Exception], **changes: State) -> None:
        squares = {name: tensor**2 for name, tensor in state.items()}
        moments = [theirs({**squares, **changes.get(kind, {})}) for kind in KINDS]
        source = write_moments_mdl(tmp_path / "c.mdl", (theirs(state), *moments), form, None)  # type: ignore[arg-type]
        with pytest.raises(error, match=reason):
            convert(source, tmp_path / "model", Conversion(config=params, with_optimizer=True))
        assert not list(tmp_path.glob("*model*"))

    bias = "transformer.h.0.mlp.fc_in.bias"
    refused("in two groups", "so they cannot be assigned", UsageError, exp_avg={bias: torch.zeros(3)})
    refused("named", rf"{bias} in c\.mdl has shape \[3\]", DataError, exp_avg={bias: torch.zeros(3)})
    refused("named", rf"second moment of {bias} holds -1", DataError, exp_avg_sq={bias: -torch.ones_like(state[bias])})
    source = write_source(tmp_path / "source", state)
    for conversion, reason in (
        (WITH_OPTIMIZER, "holds no optimizer state"),
        (Conversion(to="huggingface", with_optimizer=True), "--to folder"),
    ):
        with pytest.raises(UsageError, match=reason):
            convert(source, tmp_path / "model", conversion)


UPDATES = 7


def model_with_moments(folder: Path) -> dict[str, State]:
    """Save a model with plausible moments after seven updates; return the moments."""
    model = random_gptj(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, rotary_dim=4)
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(3)
    drawn = {n: 0.02 * torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
    moments = {"exp_avg": drawn, "exp_avg_sq": {name: 0.02 * tensor**2 + 1e-6 for name, tensor in drawn.items()}}
    for kind, tensors in moments.items():
        (folder / "optimizer" / kind).mkdir(parents=True)
        save_file(tensors, folder / "optimizer" / kind / "model.safetensors")
    (folder / "optimizer/state.json").write_text(json.dumps({"updates": UPDATES}))
    return moments


OPTIONS = {"schedule": "constant", "warmup": 0, "weight_decay": 0.1, "clip_norm": 0.5}


def oracle_weights(session: TrainSetup, moments: dict[str, State]) -> State:
    """Train the reference: `transformers` and `torch.optim.AdamW` with these moments and their step."""
    model = AutoModelForCausalLM.from_pretrained(session.model)
    named, recipe = dict(model.named_parameters()), session.recipe
    groups = [
        {"params": [p for p in named.values() if (p.ndim > 1) is decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)
    for name, parameter in named.items():
        state = {kind: moments[kind][name].clone() for kind in KINDS}
        optimizer.state[parameter] = {"step": torch.tensor(float(UPDATES)), **state}
    for step in range(session.num_steps):
        optimizer.zero_grad()
        total, count = torch.zeros(()), 0
        for row in rows_of_step(step, len(session.train), recipe.batch_size, recipe.seed):
            ids, prompt = list(session.train.documents[row]), session.train.prompt_lengths[row]
            logits, targets = model(torch.tensor([ids])).logits[0, prompt - 1 : -1], torch.tensor(ids[prompt:])
            total, count = total + F.cross_entropy(logits, targets, reduction="sum"), count + len(targets)
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def test_run_continues_moments_as_torch(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    moments = model_with_moments(tmp_path / "model")
    session = small_session(tmp_path / "model", **OPTIONS)
    run = new_run(tmp_path)
    train(session, run)
    ours, expected = weights_of(run.model), oracle_weights(session, moments)
    for name, tensor in expected.items():
        assert torch.linalg.vector_norm(ours[name] - tensor) <= 1e-5 * torch.linalg.vector_norm(tensor), name
    assert f"| updates of its moments before | {UPDATES} |" in (run.model / "README.md").read_text()
    for place in ("device", "host"):
        (tmp_path / place).mkdir()
        other = new_run(tmp_path / place)
        train(small_session(tmp_path / "model", weights=place, optimizer_state=place, **OPTIONS), other)
        assert_same_weights(weights_of(other.model), ours, place)
    for last in (9, 30, 60):
        (tmp_path / str(last)).mkdir()
        cut = new_run(tmp_path / str(last))
        with pytest.MonkeyPatch.context() as patch:
            Power(patch, last)
            with pytest.raises(PowerCut):
                train(session, cut)
        train(session, cut)
        assert_same_weights(weights_of(cut.model), ours, last)
    (tmp_path / "fresh").mkdir()
    fresh = new_run(tmp_path / "fresh")
    train(small_session(tmp_path / "model", initial_moments="zero", **OPTIONS), fresh)
    name = "transformer.h.0.mlp.fc_in.weight"
    assert not torch.allclose(weights_of(fresh.model)[name], ours[name], rtol=1e-3)


@pytest.mark.thorough
def test_damaged_moments_fail_before_training(tmp_path: Path) -> None:
    model_with_moments(tmp_path)
    session = small_session(tmp_path, train="h.1.mlp.*", **OPTIONS)
    assert session.updates_before == UPDATES
    train(session, new_run(tmp_path))  # those of what is trained, and no others
    state = tmp_path / "optimizer/state.json"
    state.write_text('{"updates": "7"}')
    with pytest.raises(DataError, match="not a number of updates"):
        small_session(tmp_path)
    state.write_text('{"updates": 7}')
    (tmp_path / "optimizer/exp_avg_sq/model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(DataError, match=r"exp_avg_sq/model\.safetensors"):
        small_session(tmp_path)
    assert small_session(tmp_path, method="lora").updates_before is None
