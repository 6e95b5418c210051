"""Compare task heads and dropout with `transformers` and torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.bertsum_reference import BertSumExt
from support.small_stack import CPU, LITTLE
from torch import Tensor

from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.models.batch import Marks, PackedBatch
from gptj_ft.models.dropout import Dropout, Noise, NoiseSpan, seed_of
from gptj_ft.models.trainable import select
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.objective import objective_of
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import load_weights, open_for_training
from gptj_ft.streaming.prefetch import Prefetcher
from gptj_ft.streaming.schedule import inference_tasks
from gptj_ft.streaming.scoring import evaluate_losses, head_outputs
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.training.restore import optimizer_config
from gptj_ft.training.setup import trained_architecture

LENGTHS = (5, 17, 33, 8, 48, 9, 2)
LABELS = ("no", "perhaps", "yes")
SIZES = {"vocab_size": 211, "max_position_embeddings": 48, "hidden_size": 32, "num_hidden_layers": 3}
BERT = {**SIZES, "num_attention_heads": 4, "intermediate_size": 64, "hidden_dropout_prob": 0.0}
BERT |= {"attention_probs_dropout_prob": 0.0}
ROBERTA = {**BERT, "max_position_embeddings": 50, "type_vocab_size": 1, "pad_token_id": 1}
GPT2 = {"vocab_size": 211, "n_positions": 48, "n_embd": 32, "n_layer": 3, "n_head": 4}
MISTRAL = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "pad_token_id": 0}
MISTRAL |= {"sliding_window": None}
GPT_NEOX = {**SIZES, "num_attention_heads": 4, "intermediate_size": 64, "pad_token_id": 0, "classifier_dropout": 0.0}
LLAMA = {**MISTRAL, "use_sliding_window": False}
WITH_OLD_PREFIX = ("Llama", "Qwen2", "Qwen3", "SmolLM3")  # `transformer.` beside the head for spans
OWN = {"Bert": BERT, "Mistral": MISTRAL, "GPTNeoX": GPT_NEOX, **dict.fromkeys(WITH_OLD_PREFIX, LLAMA)}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TASKS = ("classification", "multi-label", "regression", "token-labels", "spans")
CLASSES = {
    "classification": "ForSequenceClassification",
    "multi-label": "ForSequenceClassification",
    "regression": "ForSequenceClassification",
    "token-labels": "ForTokenClassification",
    "spans": "ForQuestionAnswering",
    "sentences": "SumExt",
}
Oracle = Any


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS]


def marks_of(task: str, is_encoder: bool = True) -> list[Marks]:
    """Return targets for the documents, different for each."""
    marks = []
    for number, length in enumerate(LENGTHS):
        borders = (length // 2,) if is_encoder else ()
        at = (0,) if is_encoder else (length - 1,)
        if task == "classification":
            marks.append(Marks(borders, at, (number % 3,)))
        elif task == "multi-label":
            marks.append(Marks(borders, at, (0,), (float(number % 2), float(number % 3 == 0), 1.0)))
        elif task == "regression":
            marks.append(Marks(borders, at, (0,), (number / 3 - 1,)))
        elif task == "sentences":
            places = tuple(range(0, length, 2 + number % 4))
            marks.append(Marks(places[1:], places, tuple(place % 2 for place in places)))
        elif task == "token-labels":
            marks.append(Marks((), tuple(range(1, length, 3)), tuple(place % 3 for place in range(1, length, 3))))
        else:
            marks.append(Marks(borders, (), (length // 3, length // 2)))
    return marks


def make(folder: Path, task: str, family: str, **fields: Any) -> Oracle:
    """Write a random `transformers` model with the task's head and more fields of its config, and return it."""
    problem = {"multi-label": "multi_label_classification", "regression": "regression"}.get(task)
    labels = {0: "score"} if task == "regression" else dict(enumerate(LABELS))
    more = {"id2label": labels, "label2id": {name: number for number, name in labels.items()}, "problem_type": problem}
    more = {} if task in ("spans", "sentences") else more
    own = {**OWN, "GPT2": {**GPT2, **NO_DROPOUT, "pad_token_id": 0}}.get(family, ROBERTA)
    config: Any = getattr(transformers, f"{family}Config")(**{**own, **more, **fields})
    torch.manual_seed(0)
    oracle = BertSumExt(config) if task == "sentences" else getattr(transformers, family + CLASSES[task])(config)
    oracle.eval()
    for name, parameter in oracle.named_parameters():
        parameter.data += torch.randn(parameter.shape) * (0.1 if "orm" in name or "ln_" in name else 0.05)
    oracle.save_pretrained(folder)
    return oracle


def open_training(
    folder: Path,
    scratch: Path,
    recipe: Recipe,
    places: tuple[str, ...] = ("device", "device"),
    budget: BufferBudget = BufferBudget(),
) -> OffloadedModel:
    labels = () if recipe.task in ("regression", "spans", "sentences") else LABELS
    architecture = trained_architecture(recipe, folder, labels)
    placement: Any = Placement(*places)
    selection = select(architecture, recipe)
    dtypes = training_dtypes(torch.float32)
    stack = open_for_training(architecture, placement, dtypes, CPU, scratch, budget, selection=selection, boundary=None)
    with open_checkpoint(folder) as checkpoint:
        load_weights(stack, architecture, checkpoint, recipe.seed)
    return stack


def batches_of(task: str, budget: int = 60, is_encoder: bool = True) -> list[PackedBatch]:
    docs = documents()
    return micro_batches(docs, [len(ids) for ids in docs], budget, marks=marks_of(task, is_encoder))


def oracle_loss(oracle: Oracle, task: str, is_encoder: bool = True) -> Tensor:
    """Return the loss of `transformers` on padded rows, from its own forward."""
    config = (oracle.bert if task == "sentences" else oracle).config
    padding, has_types = config.pad_token_id, getattr(config, "type_vocab_size", 1) > 1
    docs, marks, longest = documents(), marks_of(task, is_encoder), max(LENGTHS)
    rows = len(docs)
    ids, mask, types = (torch.full((rows, longest), each) for each in (padding, 0, 0))
    words = torch.full((rows, longest), -100)
    for row, (tokens, mark) in enumerate(zip(docs, marks, strict=True)):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
        for border in mark.borders:
            types[row, border : len(tokens)] ^= 1
        if task == "token-labels":
            words[row, list(mark.marks)] = torch.tensor(mark.targets)
    inputs = {"input_ids": ids, "attention_mask": mask, **({"token_type_ids": types} if has_types else {})}
    if task == "spans":
        first, last = (torch.tensor([mark.targets[end] for mark in marks]) for end in (0, 1))
        out = oracle(**inputs)  # its own loss includes padding among the possible starts of an answer
        scores = [logits.masked_fill(mask == 0, -1e30) for logits in (out.start_logits, out.end_logits)]
        return (F.cross_entropy(scores[0], first) + F.cross_entropy(scores[1], last)) / 2
    if task == "token-labels":
        return oracle(**inputs, labels=words).loss
    if task == "sentences":
        return oracle(inputs, [mark.marks for mark in marks], [mark.targets for mark in marks])
    values = torch.tensor([mark.values for mark in marks])
    classes = torch.tensor([mark.targets[0] for mark in marks])
    labels = {"classification": classes, "multi-label": values, "regression": values.flatten()}[task]
    return oracle(**inputs, labels=labels).loss


FORMS = [(family, task) for family in ("Bert", "GPT2", "Roberta", "XLMRoberta") for task in TASKS]
FORMS += [("Bert", "sentences"), *(("Mistral", task) for task in ("classification", "token-labels", "spans"))]
FORMS += [pytest.param("GPTNeoX", task, marks=pytest.mark.slow) for task in TASKS]
FORMS += [
    pytest.param(family, "spans", marks=() if family == "Llama" else pytest.mark.slow) for family in WITH_OLD_PREFIX
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("family", "task"), FORMS)
def test_losses_and_steps_are_those_of_transformers(family: str, task: str, tmp_path: Path) -> None:
    oracle = make(tmp_path / "model", task, family)
    recipe = Recipe.model_validate({"task": task, "weight_decay": 0.01, "clip_norm": 1.0})
    stack = open_training(tmp_path / "model", tmp_path, recipe)
    objective, is_encoder = objective_of(recipe), family not in ("GPT2", "Mistral", "GPTNeoX", *WITH_OLD_PREFIX)
    optimizer = AdamW(stack, optimizer_config(recipe))
    parameters = list(oracle.parameters())
    theirs = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        eps=recipe.eps,
        betas=recipe.betas,
    )
    for step in range(4):
        lr = 1e-3 * (step + 1)
        batches = batches_of(task, 60, is_encoder)
        measured = evaluate_losses(stack, batches, objective) if step == 0 else []
        optimizer.begin_step(lr)
        loss = train_step(stack, optimizer, batches, objective)
        norm = optimizer.finish_step()
        theirs.zero_grad()
        expected = oracle_loss(oracle, task, is_encoder)
        expected.backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in theirs.param_groups:
            group["lr"] = lr
        theirs.step()
        assert loss.mean == pytest.approx(expected.item(), rel=1e-5)
        assert norm == pytest.approx(expected_norm.item(), rel=1e-4)
        if step == 0:
            total = sum(each.total for each in measured) / sum(each.weight for each in measured)
            assert total == pytest.approx(loss.mean, rel=1e-5)
    optimizer.flush()
    stack.close()


def train(
    folder: Path, scratch: Path, recipe: Recipe, places: tuple[str, ...], budget: BufferBudget, tokens: int
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Take three steps with dropout; return their losses and the weights."""
    stack = open_training(folder, scratch, recipe, places, budget)
    optimizer, objective, losses = AdamW(stack, optimizer_config(recipe)), objective_of(recipe), []
    docs = documents()
    for step in range(3):
        seeds = [seed_of((0, step, number)) for number in range(len(docs))]
        batches = micro_batches(docs, LENGTHS, tokens, marks=marks_of(recipe.task), seeds=seeds)
        optimizer.begin_step(1e-2)
        losses.append(train_step(stack, optimizer, batches, objective).mean)
        optimizer.finish_step()
    optimizer.flush()
    loads: Iterator[Any] = Prefetcher(stack, inference_tasks(range(len(stack.layers))))
    weights = [{name: view.clone() for name, view in load.parameters().items()} for load in loads]
    stack.close()
    return losses, weights


def test_placement_and_recomputation_keep_dropout_masks(tmp_path: Path) -> None:
    make(tmp_path / "model", "classification", "Bert")
    recipe = Recipe.model_validate({"task": "classification", "dropout": 0.2, "attention_dropout": 0.2})
    expected = train(tmp_path / "model", tmp_path / "one", recipe, ("device", "device"), BufferBudget(), 60)
    for number, (places, budget) in enumerate(
        [(("host", "disk"), LITTLE), (("disk", "disk"), replace(LITTLE, num_kept_layers=3))]
    ):
        losses, weights = train(tmp_path / "model", tmp_path / str(number), recipe, places, budget, 60)
        assert losses == expected[0]
        for ours, others in zip(weights, expected[1], strict=True):
            assert all(torch.equal(ours[name], others[name]) for name in others)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("task", ["token-labels", "sentences"])
def test_dropout_is_independent_of_micro_batches(tmp_path: Path, task: str) -> None:
    make(tmp_path / "model", task, "Bert")
    recipe = Recipe.model_validate({"task": task, "dropout": 0.2, "attention_dropout": 0.1})
    results = [
        train(tmp_path / "model", tmp_path / str(tokens), recipe, ("device", "device"), BufferBudget(), tokens)
        for tokens in (48, 1000)
    ]
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    without = recipe.model_copy(update={"dropout": 0.0, "attention_dropout": 0.0})
    other = train(tmp_path / "model", tmp_path / "off", without, ("device", "device"), BufferBudget(), 1000)
    assert abs(other[0][0] - results[0][0][0]) > 1e-3


def test_dropout_steps_match_transformers(tmp_path: Path, monkeypatch) -> None:
    oracle = make(tmp_path / "model", "classification", "Bert")
    recipe = Recipe.model_validate({"task": "classification", "dropout": 0.25, "attention_dropout": 0.0})
    stack = open_training(tmp_path / "model", tmp_path, recipe)
    docs, marks = documents(), marks_of("classification")
    seeds = [seed_of((3, number)) for number in range(len(docs))]
    batches = micro_batches(docs, LENGTHS, 60, marks=marks, seeds=seeds)
    optimizer = AdamW(stack, optimizer_config(recipe))
    optimizer.begin_step(0.0)
    loss = train_step(stack, optimizer, batches, objective_of(recipe)).mean
    norm = optimizer.finish_step()
    stack.close()

    sites: list[tuple[object, ...]] = [("embedding",)]
    sites += [(layer, what) for layer in range(3) for what in ("attention", "mlp")]
    sites += [("classifier",)]
    calls: Iterator[tuple[object, ...]] = iter(sites)

    def masked(module: torch.nn.Dropout, x: Tensor) -> Tensor:
        if x.ndim == 4:
            return x
        site, keep = next(calls), torch.zeros_like(x)
        for row, (seed, length) in enumerate(zip(seeds, LENGTHS, strict=True)):
            rows = 1 if x.ndim == 2 else length
            mask = Dropout(0.25, *site).mask(Noise((NoiseSpan(seed, 0, rows, rows),)), (x.shape[-1],), CPU)
            if x.ndim == 2:
                keep[row] = mask[0]
            else:
                keep[row, :length] = mask
        return x * keep / 0.75

    monkeypatch.setattr(torch.nn.Dropout, "forward", masked)
    expected = oracle_loss(oracle, "classification")
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    total = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 1e9)
    assert norm == pytest.approx(total.item(), rel=1e-5)


WORD_RATES = [
    (family, fields, option)
    for family in ("GPT2", "Mistral")
    for fields, option in (({"classifier_dropout": 0.3, "hidden_dropout": 0.2}, None), ({"hidden_dropout": 0.2}, None),
        ({}, None), ({}, 0.0))
]  # fmt: skip
WORD_RATES += [("GPTNeoX", {"classifier_dropout": 0.3}, None)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "fields", "option"), WORD_RATES, ids=str)
def test_word_labels_drop_like_transformers(family, fields, option, tmp_path: Path, monkeypatch) -> None:
    oracle = make(tmp_path / "model", "token-labels", family, **fields)
    chosen = {} if option is None else {"dropout": option}
    recipe = Recipe.model_validate({"task": "token-labels", "clip_norm": None, **chosen})
    docs, marks = documents(), marks_of("token-labels", is_encoder=False)
    stack, seeds = open_training(tmp_path / "model", tmp_path, recipe), [seed_of((3, row)) for row in range(len(docs))]
    optimizer = AdamW(stack, optimizer_config(recipe))
    optimizer.begin_step(0.0)
    batches = micro_batches(docs, LENGTHS, 60, marks=marks, seeds=seeds)
    loss, norm = train_step(stack, optimizer, batches, objective_of(recipe)).mean, optimizer.finish_step()
    stack.close()
    rate = oracle.dropout.p if option is None else option
    assert trained_architecture(recipe, tmp_path / "model", LABELS).dropout.get("classifier_dropout", 0.0) == rate

    def masked(module: torch.nn.Dropout, x: Tensor) -> Tensor:
        if module is not oracle.dropout:
            return x
        keep, site = torch.ones_like(x), Dropout(rate, "classifier")
        for row, (seed, mark) in enumerate(zip(seeds, marks, strict=True)):
            count = len(mark.marks)
            noise = Noise((NoiseSpan(seed, 0, count, count),))
            keep[row, list(mark.marks)] = site.mask(noise, (x.shape[-1],), CPU) * 1.0
        return x * keep * site.scale

    monkeypatch.setattr(torch.nn.Dropout, "forward", masked)
    expected = oracle_loss(oracle, "token-labels", is_encoder=False)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    total = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 1e9)
    assert norm == pytest.approx(total.item(), rel=1e-5)


def test_first_revision_keeps_word_dropout(tmp_path: Path) -> None:
    make(tmp_path / "model", "token-labels", "Mistral", classifier_dropout=0.3)
    rates = [
        trained_architecture(recipe, tmp_path / "model", LABELS).dropout
        for options in ({"revision": 2}, {"revision": 1}, {"revision": 1, "attention_dropout": 0.2})
        for recipe in [Recipe.model_validate({"task": "token-labels", **options})]
    ]
    assert rates == [{"classifier_dropout": 0.3}, {}, {"classifier_dropout": 0.1, "attention_dropout": 0.2}]


def test_dropout_masks_have_rate_and_differ() -> None:
    shape, masks = (64,), {}
    for seed in (seed_of((0, 1, 2)), seed_of((0, 2, 2)), seed_of((0, 1, 3))):
        for site in ((0, "mlp"), (1, "mlp"), (0, "attention")):
            masks[seed, site] = Dropout(0.1, *site).mask(Noise((NoiseSpan(seed, 0, 400, 400),)), shape, CPU)
    for mask in masks.values():
        dropped = 1 - mask.float().mean().item()
        assert abs(dropped - 0.1) < 5 * (0.1 * 0.9 / mask.numel()) ** 0.5
    for one, other in zip(list(masks.values()), list(masks.values())[1:], strict=False):
        both = (~one & ~other).float().mean().item()
        assert abs(both - 0.01) < 5 * (0.01 / one.numel()) ** 0.5


def test_class_weights_are_those_of_torch(tmp_path: Path) -> None:
    make(tmp_path / "model", "classification", "Bert")
    recipe = Recipe.model_validate({"task": "classification"})
    stack = open_training(tmp_path / "model", tmp_path, recipe)
    batches, weights = batches_of("classification", 60), (0.5, 2.0, 1.0)
    losses = [evaluate_losses(stack, batches, objective_of(recipe, given)) for given in ((), weights)]
    stack.close()
    assert sum(each.weight for each in losses[0]) == len(LENGTHS)
    counted = sum(weights[mark.targets[0]] for mark in marks_of("classification"))
    assert sum(each.weight for each in losses[1]) == pytest.approx(counted)


def test_missing_head_is_initialized_from_seed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**BERT)).save_pretrained(tmp_path / "base")
    recipe = Recipe.model_validate({"task": "classification", "seed": 5})
    architecture = trained_architecture(recipe, tmp_path / "base", LABELS)
    assert architecture.new == {"classifier.weight", "classifier.bias"}
    heads = []
    for number, seed in enumerate((5, 5, 6)):
        stack = open_training(tmp_path / "base", tmp_path / str(number), recipe.model_copy(update={"seed": seed}))
        *_, head = Prefetcher(stack, inference_tasks(range(len(stack.layers))))
        heads.append({name: view.clone() for name, view in head.parameters().items()})
        stack.close()
    assert torch.equal(heads[0]["classifier.weight"], heads[1]["classifier.weight"])
    assert not torch.equal(heads[0]["classifier.weight"], heads[2]["classifier.weight"])
    assert not heads[0]["classifier.bias"].any()
    assert torch.equal(heads[0]["pooler.weight"], heads[2]["pooler.weight"])


def test_sentence_head_is_initialized_as_in_bertsum(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**BERT)).save_pretrained(tmp_path / "base")
    stack = open_training(tmp_path / "base", tmp_path, Recipe.model_validate({"task": "sentences"}))
    *_, head = Prefetcher(stack, inference_tasks(range(len(stack.layers))))
    values = {name: view.clone() for name, view in head.parameters().items()}
    stack.close()
    inner, width = values["transformer_inter.1.feed_forward.w_1.weight"].shape
    bounds = {"feed_forward.w_1.weight": (6 / (inner + width)) ** 0.5, "feed_forward.w_2.bias": inner**-0.5}
    for name, bound in bounds.items():
        largest = values[f"transformer_inter.1.{name}"].abs().max().item()
        assert 0.8 * bound < largest <= bound
    assert torch.equal(values["layer_norm.weight"], torch.ones(width))
    assert not values["layer_norm.bias"].any()


def test_sentence_head_separates_documents(tmp_path: Path) -> None:
    make(tmp_path / "model", "sentences", "Bert")
    recipe = Recipe.model_validate({"task": "sentences"})
    stack = open_training(tmp_path / "model", tmp_path, recipe)
    together, apart = (
        torch.cat(list(head_outputs(stack, batches_of("sentences", budget), objective_of(recipe))))
        for budget in (1000, 1)
    )
    stack.close()
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-6)


def steps_of(folder: Path, scratch: Path, **options: Any) -> list[dict[str, Tensor]]:
    """Take two steps without decay and clipping; return the weights."""
    fixed = {"task": "classification", "weight_decay": 0.0, "clip_norm": None}
    recipe = Recipe.model_validate({**fixed, **options})
    stack = open_training(folder, scratch, recipe)
    optimizer = AdamW(stack, optimizer_config(recipe))
    for _ in range(2):
        optimizer.begin_step(1e-3)
        train_step(stack, optimizer, batches_of("classification"), objective_of(recipe))
        optimizer.finish_step()
    optimizer.flush()
    loads: Iterator[Any] = Prefetcher(stack, inference_tasks(range(len(stack.layers))))
    weights = [{name: view.clone() for name, view in load.parameters().items()} for load in loads]
    stack.close()
    return weights


def test_layer_decay_scales_learning_rates(tmp_path: Path) -> None:
    oracle = make(tmp_path / "model", "classification", "Bert")
    ours = steps_of(tmp_path / "model", tmp_path / "ours", layer_decay=0.5)
    groups = [
        {"params": list(oracle.bert.embeddings.parameters()), "lr": 1e-3 * 0.5**4},
        *(
            {"params": list(b.parameters()), "lr": 1e-3 * 0.5 ** (3 - n)}
            for n, b in enumerate(oracle.bert.encoder.layer)
        ),
        {"params": [*oracle.bert.pooler.parameters(), *oracle.classifier.parameters()], "lr": 1e-3},
    ]
    theirs = torch.optim.AdamW(groups, weight_decay=0.0)
    for _ in range(2):
        theirs.zero_grad()
        oracle_loss(oracle, "classification").backward()
        theirs.step()
    blocks = oracle.bert.encoder.layer
    torch.testing.assert_close(ours[1]["mlp.output.weight"], blocks[0].output.dense.weight.data, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(ours[3]["mlp.output.weight"], blocks[2].output.dense.weight.data, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(ours[4]["classifier.weight"], oracle.classifier.weight.data, rtol=1e-5, atol=2e-6)


def test_uncorrected_adam_matches_googles_optimizer(tmp_path: Path) -> None:
    oracle = make(tmp_path / "model", "classification", "Bert")
    ours = steps_of(tmp_path / "model", tmp_path / "ours", bias_correction=False, eps=1e-6)
    weight = oracle.bert.encoder.layer[0].output.dense.weight
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in oracle.named_parameters()}
    for _ in range(2):
        oracle.zero_grad()
        oracle_loss(oracle, "classification").backward()
        with torch.no_grad():
            for name, parameter in oracle.named_parameters():
                first, second = moments[name]
                first.mul_(0.9).add_(0.1 * parameter.grad)
                second.mul_(0.999).add_(0.001 * parameter.grad**2)
                parameter -= 1e-3 * first / (second.sqrt() + 1e-6)
    torch.testing.assert_close(ours[1]["mlp.output.weight"], weight.data, rtol=1e-4, atol=5e-5)
    corrected = steps_of(tmp_path / "model", tmp_path / "other", eps=1e-6)
    assert (corrected[1]["mlp.output.weight"] - weight).abs().max() > 1e-3
