"""Compare every family with `transformers`, at tiny sizes: `support.family_shapes` lists the configs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.family_models import FamilyModel, random_of_family
from support.family_shapes import FAMILY_SHAPES, FIRST_SHAPES
from support.small_run import assert_same_weights, weights_of
from support.small_stack import (
    CPU,
    PROMPTS,
    STEPS,
    assert_identical,
    documents,
    lr_of,
    next_token_logits,
    oracle_loss,
    relative,
    train_oracle,
)
from support.small_stack import train as train_ours
from transformers import AutoModelForCausalLM

from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.tiny import FAMILIES
from gptj_ft.config.options import Generation, Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.evaluation.likelihood import log_likelihoods
from gptj_ft.generation.decoding import generate_tokens
from gptj_ft.generation.hf_model import StreamedModel
from gptj_ft.models.batch import pack
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.lora import Rank, adapted_layers, is_adapter_parameter, linear_layers, name_of
from gptj_ft.models.registry import architecture_of, families
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import open_for_inference
from gptj_ft.streaming.step import train_step
from gptj_ft.training.restore import optimizer_config

ROW = 40  # tokens; longer than the windows of the shapes that have some


def shapes(always: Collection[str]) -> pytest.MarkDecorator:
    """Parametrise over all shapes; those outside ``always`` are slow."""
    names = [pytest.param(name, marks=() if name in always else pytest.mark.slow) for name in FAMILY_SHAPES]
    return pytest.mark.parametrize("name", names)


every_shape = shapes(FIRST_SHAPES.values())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FamilyModel]:
    """Return a function that makes each shape's model once."""
    models: dict[str, FamilyModel] = {}

    def build(name: str) -> FamilyModel:
        if name not in models:
            model, folder = random_of_family(name), tmp_path_factory.mktemp("family")
            model.save_pretrained(folder)
            models[name] = FamilyModel(model, folder)
        return models[name]

    return build


@pytest.fixture(scope="module")
def resident(built, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Recipe], Any]:
    """Return a function that trains each shape once with everything on the device."""
    runs: dict[tuple[str, str], Any] = {}

    def run(name: str, recipe: Recipe) -> Any:
        key = name, recipe.method
        if key not in runs:
            folder = tmp_path_factory.mktemp("resident")
            runs[key] = trained(built(name).open_training(folder, recipe=recipe), recipe)
        return runs[key]

    return run


def trained(stack: OffloadedModel, recipe: Recipe, late: int = 0) -> Any:
    """Train; return (loss, norm) of each step and the trained weights of each layer."""
    curve, layers = train_ours(stack, recipe, late=late)
    if recipe.method == "lora":
        layers = [{name: x for name, x in layer.items() if is_adapter_parameter(name)} for layer in layers]
        assert sum(map(len, layers)) == sum(len(layout.shapes) for layout in stack.layouts)
    return curve, layers


class Words:
    """A minimal tokenizer: tokens are numbers."""

    eos_token_id = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return " ".join(str(token) for token in tokens)


@every_shape
def test_logits_match_transformers(name: str, built) -> None:
    case = built(name)
    docs = [*documents(case.model.config.vocab_size), [number % 30 for number in range(ROW)]]
    with open_for_inference(case.folder, CPU, torch.float32) as (_, stack), torch.no_grad():
        ours = next_token_logits(stack, pack(docs))
        theirs = torch.stack([case.model(torch.tensor([ids])).logits[0, -1] for ids in docs])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@every_shape
def test_answers_to_one_prompt_match_transformers(name: str, built) -> None:
    case = built(name)
    answers = [[1, 2, 3, 4], [1, 2, 9], [5], [1, 2, 3, 7, 8], [6, 6, 6]]
    prompts = [[number % 30 for number in range(size)] for size in (ROW, 3)]
    with open_for_inference(case.folder, CPU, torch.float32) as (_, stack), torch.no_grad():
        found = log_likelihoods(stack, prompts, [answers] * 2, most_tokens=64, budget_tokens=60)
        for prompt, likely in zip(prompts, found, strict=True):
            for answer, ours in zip(answers, likely, strict=True):
                logs = case.model(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
                theirs = logs.gather(1, torch.tensor(answer)[:, None]).sum()
                assert ours.total == pytest.approx(float(theirs), rel=1e-5)
                assert ours.is_argmax == (logs.argmax(-1).tolist() == answer)


@every_shape
def test_loss_and_gradients_match_transformers(name: str, built, tmp_path: Path) -> None:
    case = built(name)
    docs = [[(7 * number + size) % 30 for number in range(size)] for size in (ROW, 5, 17, 2)]
    prompts = (2, 3, 1, 0)
    double = copy.deepcopy(case.model).double()
    case.model.zero_grad()
    for model in (double, case.model):
        expected = oracle_loss(model, docs, prompts=prompts)
        expected.backward()
    stack = case.open_training(tmp_path)
    loss = train_step(stack, AdamW(stack, optimizer_config(Recipe())), micro_batches(docs, prompts, 64))
    assert loss.mean == pytest.approx(expected.item(), rel=1e-6)
    theirs, exact, num_layers = case.of(case.model), case.of(double), len(stack.layers)
    # Scores that saturate make gradients of queries and keys that are small beside the whole, up to zero for keys'
    # biases without rotary positions. There torch in fp32 is off by 1e-5, too.
    floor = 1e-8 * torch.stack([value.grad.norm() for value in exact.values()]).norm()
    compared = 0
    for layer in range(num_layers):
        flat = torch.cat([part.clone() for _, part in stack.read_chunks("grad", layer)])
        for local, gradient in stack.layouts[layer].views(flat).items():
            named = case.architecture.family.name_of(layer, local, num_layers)
            right, error = exact[named].grad, (gradient - exact[named].grad).norm()
            allowed = 1e-5 * right.norm() + (theirs[named].grad - right).norm()
            assert error < allowed + floor, named
            compared += 1
    assert compared == len(list(case.model.parameters()))


@shapes(["gpt_neox"])
def test_ten_adamw_steps_match_torch(name: str, built, tmp_path: Path) -> None:
    case, recipe = built(name), Recipe(clip_norm=0.2, weight_decay=0.1)
    curve, weights = train_ours(case.open_training(tmp_path, recipe=recipe), recipe, steps=STEPS)
    single, double = copy.deepcopy(case.model), copy.deepcopy(case.model).double()
    docs = documents(double.config.vocab_size)
    oracle_loss(double, docs).backward()
    # Keys' biases shift all scores of a query equally, or nearly so where rotary positions turn slowly. Their gradients
    # are rounding noise in fp32, and AdamW divides by their size.
    largest = max(float(value.grad.abs().max()) for value in case.of(double).values())
    noise = {key: value.grad.abs() < 1e-5 * largest for key, value in case.of(double).items()}
    exact_curve = torch.tensor(train_oracle(double, recipe))
    ours, torchs = ((torch.tensor(each) / exact_curve - 1).abs() for each in (curve, train_oracle(single, recipe)))
    assert (ours[:4] < 5e-6).all()
    # AdamW amplifies the rounding noise of early steps in the norms of late ones: torch in fp32 is off by 5e-5, too.
    assert (ours.amax(0) < 1e-5 + 4 * torchs.amax(0)).all()
    theirs, exact = case.of(single), case.of(double)
    for layer, tensors in enumerate(weights):
        for local, values in tensors.items():
            named = case.architecture.family.name_of(layer, local, len(weights))
            kept = ~noise[named]
            # AdamW divides by the gradient's size: near rounding noise, torch in fp32 is off by 1e-5, too.
            allowed = 1e-5 + 2 * relative(theirs[named].double()[kept], exact[named][kept])
            assert relative(values.double()[kept], exact[named][kept]) < allowed, named


def test_every_family_has_a_shape() -> None:
    decoders = {name for name, family in families().items() if not family.is_encoder}
    assert FIRST_SHAPES.keys() == decoders - {"gptj", "gpt2"}, "those two are tested in tests/streaming"


@shapes(["gpt_neox"])
def test_adapters_match_peft(name: str, built, tmp_path: Path) -> None:
    case, recipe = built(name), Recipe(method="lora", lora={"rank": 4, "alpha": 6}, clip_norm=0.05)
    stack = case.open_training(tmp_path, recipe=recipe)
    generator = torch.Generator().manual_seed(2)
    for layer in stack.trained:  # not as LoRA begins: with B = 0, the gradients of A are 0
        stack.write_chunks("weight", layer, lambda _, chunk: chunk.normal_(0.0, 0.1, generator=generator))
    matrices, docs = adapters_of(case, stack), documents(case.model.config.vocab_size)
    peers = [Peer(copy.deepcopy(case.model).to(dtype), matrices, recipe) for dtype in (torch.float32, torch.float64)]
    ours = AdamW(stack, optimizer_config(recipe))
    for step in range(5):
        single, double = (peer.step(docs, lr_of(step)) for peer in peers)
        ours.begin_step(lr_of(step))
        loss = train_step(stack, ours, micro_batches(docs, PROMPTS, 40)).mean
        assert loss == pytest.approx(single, rel=1e-6)
        assert loss == pytest.approx(double, rel=1e-6)
        if not step:  # later, differences are those of the weights: AdamW divides by the size of the gradients
            theirs, exact = (peer.gradients for peer in peers)
            floor = 1e-7 * torch.stack([gradient.norm() for gradient in exact.values()]).norm()
            for key, gradient in adapters_of(case, stack, "grad").items():
                allowed = 1e-5 * exact[key].norm() + (theirs[key] - exact[key]).norm()
                assert (gradient - exact[key]).norm() < allowed + floor, key
        ours.finish_step()
    stack.close()


class Peer:
    """The model with the same adapters in PEFT, trained by torch's AdamW."""

    def __init__(self, model: Any, matrices: Mapping[str, torch.Tensor], recipe: Recipe) -> None:
        self.model = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
        named = self.model.named_parameters()
        named = {key.removeprefix("base_model.model.").replace(".default", ""): value for key, value in named}
        self.trained = {key: value for key, value in named.items() if value.requires_grad}
        assert self.trained.keys() == matrices.keys()
        for key, parameter in self.trained.items():
            parameter.data = matrices[key].to(model.dtype)
        self.clip_norm, self.gradients = recipe.clip_norm, dict[str, torch.Tensor]()
        options = {"eps": recipe.eps, "betas": recipe.betas, "weight_decay": recipe.weight_decay}
        self.optimizer = torch.optim.AdamW(self.trained.values(), **options)

    def step(self, docs: list[list[int]], lr: float) -> float:
        """Take a step; return the loss, and keep the gradients before clipping."""
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.zero_grad()
        loss = oracle_loss(self.model, docs)
        loss.backward()
        self.gradients = {key: parameter.grad.clone() for key, parameter in self.trained.items()}
        torch.nn.utils.clip_grad_norm_(self.trained.values(), self.clip_norm)
        self.optimizer.step()
        return loss.item()


def adapters_of(case: FamilyModel, stack: OffloadedModel, kind: str = "weight") -> dict[str, torch.Tensor]:
    """Return the matrices of adapters, or their gradients, by PEFT's names."""
    found = {}
    for layer in stack.trained:
        flat = torch.cat([part.clone() for _, part in stack.read_chunks(kind, layer)])
        for local, view in stack.layouts[layer].views(flat).items():
            found[name_of(case.architecture.family, layer, local, len(stack.layers))] = view
    return found


@pytest.mark.sampled(10)
@shapes(["gpt_neox", "llama"])
@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("weights", "state", "kept", "late"), [("disk", "disk", 0, 1), ("host", "disk", 1, 0), ("disk", "host", 3, 2)]
)
def test_placement_and_kept_activations_change_no_bit(
    name: str, method: str, weights: str, state: str, kept: int, late: int, built, resident, tmp_path: Path
) -> None:
    recipe = Recipe(method=method)
    budget = BufferBudget(1, num_gradients=1, num_chunks=3, chunk_numel=2048, num_kept_layers=kept)
    stack = built(name).open_training(tmp_path, (weights, state), recipe, budget)
    assert_identical(trained(stack, recipe, late), resident(name, recipe))


@pytest.mark.sampled(10)
@every_shape
@pytest.mark.parametrize("beams", [1, 4])
def test_searches_match_transformers(name: str, beams: int, built) -> None:
    # No shape has a window of 1: there transformers' cache keeps all keys, and its searches differ from its own without
    # a cache. Ours agree with the latter.
    case = built(name)
    prompts = [[5, 9, 3], [7], [number % 30 for number in range(ROW)]]
    with open_for_inference(case.folder, CPU, torch.float32) as (architecture, stack):
        ours = generate_tokens(
            StreamedModel(architecture, stack), Words(), prompts, Generation(max_new_tokens=10, num_beams=beams)
        )
    for prompt, tokens in zip(prompts, ours, strict=True):
        output = case.model.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, num_beams=beams, pad_token_id=0, eos_token_id=0
        )[0, len(prompt) :].tolist()
        assert tokens == (output[: output.index(0)] if 0 in output else output)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "num_return": 2}, {"num_beams": 3}], ids=str)
def test_rows_outgrow_trained_length_of_longrope(settings: dict[str, Any], built) -> None:
    case, new = built("phi3, in part"), 8
    trained, padding, width = case.model.config.original_max_position_embeddings, 0, 20
    prompts = [[(7 * number) % 100 + 1 for number in range(size)] for size in (5, 10, 14, trained, width)]
    given = {
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": padding, "eos_token_id": 0,
        "do_sample": "temperature" in settings, "num_beams": settings.get("num_beams", 1),
        "num_return_sequences": (each := settings.get("num_return", 1)), "return_dict_in_generate": True,
        "output_logits": True, "output_scores": True,
    }  # fmt: skip
    with open_for_inference(case.folder, CPU, torch.float32) as (architecture, stack):
        model = StreamedModel(architecture, stack)
        ids = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts])
        found = model.generate(ids, **given)
    for row, tokens in enumerate(found.sequences):
        prompt = prompts[row // each]
        if each == 1:
            alone = {**given, "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64)}
            theirs = case.model.generate(torch.tensor([prompt]), **alone)
            assert theirs.sequences[0].tolist() == tokens[width - len(prompt) :].tolist()
        if "num_beams" in settings:
            torch.testing.assert_close(found.sequences_scores[row], theirs.sequences_scores[0], rtol=1e-5, atol=1e-5)
        else:
            for step, logits in enumerate(found.logits):
                with torch.no_grad():
                    whole = case.model(tokens[None, width - len(prompt) : width + step]).logits[0, -1]
                torch.testing.assert_close(logits[row], whole, rtol=1e-5, atol=1e-5)


def test_prompt_lookup_follows_longrope(built) -> None:
    case = built("phi3, in part")
    with open_for_inference(case.folder, CPU, torch.float32) as (architecture, stack):
        for prompt in ([5, 9, 3, 5, 9, 3, 5, 9], [6] * 15):
            plain, guessed = (
                generate_tokens(
                    StreamedModel(architecture, stack), Words(), [prompt],
                    Generation(max_new_tokens=12, min_new_tokens=12, prompt_lookup_num_tokens=count),
                )
                for count in (0, 3)
            )  # fmt: skip
            assert guessed == plain


@pytest.mark.sampled(6)
@every_shape
def test_folder_returns_the_same_bits(name: str, built, tmp_path: Path) -> None:
    case = built(name)
    convert(case.folder, tmp_path / "streamed")
    convert(tmp_path / "streamed", tmp_path / "back", Conversion(to="huggingface"))
    assert_same_weights(weights_of(tmp_path / "back"), weights_of(case.folder))
    for folder in ("streamed", "back"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        assert_same_weights(dict(model.state_dict()), dict(case.model.state_dict()))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_dropout_has_its_own_masks(family: str) -> None:
    architecture = architecture_of({**FAMILIES[family], "vocab_size": 64}, Path("config.json"))
    adapters = dict.fromkeys(linear_layers(architecture), Rank(2, 1.0))
    layers = adapted_layers(architecture, adapters, 0.1)
    sites = [module.site for layer in layers for module in layer.modules() if isinstance(module, Dropout)]
    assert len(set(sites)) == len(sites) > len(adapters)
