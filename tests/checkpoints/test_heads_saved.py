"""Test saved models and adapters with a head; `transformers` and `peft` are the oracles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.small_stack import CPU
from support.tiny_wordpiece import write_vocabulary
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

from gptj_ft.checkpoints.adapter import open_adapter, tuned_architecture
from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.metadata import TunedModel, read_metadata
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.checkpoints.push import files_to_push
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.batch import Marks, PackedBatch
from gptj_ft.models.trainable import select
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.objective import objective_of
from gptj_ft.streaming.open import (
    load_weights,
    open_for_inference,
    open_for_training,
    open_frozen,
    trained_parameters,
)
from gptj_ft.streaming.scoring import head_outputs
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.system.digests import damaged_files
from gptj_ft.training.export import write_outcome
from gptj_ft.training.restore import optimizer_config
from gptj_ft.training.setup import trained_architecture

VOCABULARY, LENGTHS, LABELS = 211, (5, 17, 9, 24), ("no", "perhaps", "yes")
BERT = {"vocab_size": VOCABULARY, "max_position_embeddings": 48, "hidden_size": 32, "num_hidden_layers": 2}
BERT |= {"num_attention_heads": 4, "intermediate_size": 64}
ROBERTA = {**BERT, "max_position_embeddings": 50, "type_vocab_size": 1, "pad_token_id": 1}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 4}
GPT2 |= {"bos_token_id": 210, "eos_token_id": 210}
LLAMA = {**BERT, "num_key_value_heads": 2, "tie_word_embeddings": True}  # so that a bare model is whole
TASKS = ("classification", "multi-label", "regression", "token-labels", "spans")
CLASSES = {"token-labels": "AutoModelForTokenClassification", "spans": "AutoModelForQuestionAnswering"}
TASK_TYPES = {"token-labels": "TOKEN_CLS", "spans": "QUESTION_ANS"}
FORMS = [(family, task) for family in ("bert", "gpt2") for task in TASKS]
FORMS += [
    ("llama", "spans"),
    ("roberta", "classification"),
    ("roberta", "token-labels"),
    ("xlm-roberta", "classification"),
]
WORDS = (("good", "pleased"), ("bad", "cross"))
Model = Any


def class_of(task: str) -> Any:
    return getattr(transformers, CLASSES.get(task, "AutoModelForSequenceClassification"))


def labels_of(task: str) -> tuple[str, ...]:
    return () if task in ("regression", "spans") else LABELS


def base_model(folder: Path, family: str) -> Path:
    """Write a random pre-trained model."""
    torch.manual_seed(0)
    own = {"bert": BERT, "gpt2": GPT2, "llama": LLAMA}.get(family, ROBERTA)
    config = transformers.AutoConfig.for_model(family, **own)
    model = (transformers.AutoModelForCausalLM if family == "gpt2" else transformers.AutoModel).from_config(config)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape) * 0.05
    model.save_pretrained(folder)
    return write_vocabulary(folder) if family == "bert" else folder


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCABULARY - 1, (length,), generator=generator).tolist() for length in LENGTHS]


def batches_of(task: str, family: str) -> list[PackedBatch]:
    """Return documents of a task; one end of a text determines its label."""
    marks = []
    for number, length in enumerate(LENGTHS):
        at = (length - 1,) if family == "gpt2" else (0,)
        values = {"multi-label": (1.0, float(number % 2), 0.0), "regression": (number / 2,)}.get(task, ())
        targets: tuple[int, ...] = (number % 3,) if task == "classification" else (0,)
        if task == "token-labels":
            at = tuple(range(1, length, 2))
            targets = tuple(place % 3 for place in at)
        elif task == "spans":
            at, targets = (), (1, length - 2)
        marks.append(Marks((), at, targets, values))
    return micro_batches(documents(), LENGTHS, 40, marks=marks)


def tune(base: Path, folder: Path, family: str, task: str, **options: Any) -> Path:
    """Train for three steps and write the tuned model."""
    recipe = Recipe.model_validate({
        "task": task, "prompt": "{{ text }}", "completion": "{{ label }}", "on_long": "shorten", "dropout": 0.0,
        **options,
    })  # fmt: skip
    architecture = trained_architecture(recipe, base, labels_of(task))
    selection = select(architecture, recipe)
    stack = open_for_training(
        architecture, Placement("device", "device"), training_dtypes(torch.float32), CPU, folder.parent,
        selection=selection,
    )  # fmt: skip
    with open_checkpoint(base) as checkpoint:
        open_frozen(stack, architecture, checkpoint, Placement("device", "device"))
        load_weights(stack, architecture, checkpoint, recipe.seed)
    optimizer, objective = AdamW(stack, optimizer_config(recipe)), objective_of(recipe)
    for _ in range(3):
        optimizer.begin_step(0.02)
        train_step(stack, optimizer, batches_of(task, family), objective)
        optimizer.finish_step()
    optimizer.flush()
    metrics = {"steps": 3, "validation_loss": 0.5, "baseline_validation_loss": 1.5}
    trained = TunedModel(recipe, base, architecture, {"rows": 4}, metrics)
    write_outcome(folder, folder.with_name("merged"), trained, selection, trained_parameters(stack))
    stack.close()
    return folder


def lora(base: Path, folder: Path, family: str, task: str, **options: Any) -> Path:
    return tune(base, folder, family, task, method="lora", lora={"rank": 3, "alpha": 6, **options})


def logits_here(folder: Path, family: str, task: str) -> list[Tensor]:
    """Return the head's outputs for each document."""
    recipe, batches = Recipe.model_validate({"task": task}), batches_of(task, family)
    with open_for_inference(folder, CPU, torch.float32) as (architecture, stack):
        assert architecture.task == task
        assert architecture.labels == labels_of(task)
        outputs = torch.cat(list(head_outputs(stack, batches, objective_of(recipe))))
    rows = [len(places_of(number, family, task)) for number in range(len(LENGTHS))]
    order = [number for batch in batches for number in batch_order(batch)]
    parts = dict(zip(order, outputs.split([rows[number] for number in order]), strict=True))
    return [parts[number] for number in range(len(LENGTHS))]


def batch_order(batch: PackedBatch) -> list[int]:
    """Identify the documents of a batch by their lengths, which all differ."""
    lengths = torch.as_tensor(batch.cu_seqlens).diff().tolist()
    return [LENGTHS.index(length) for length in lengths]


def places_of(number: int, family: str, task: str) -> list[int]:
    length = LENGTHS[number]
    if task == "token-labels":
        return list(range(1, length, 2))
    return list(range(length)) if task == "spans" else [length - 1 if family == "gpt2" else 0]


def logits_there(model: Model, family: str, task: str) -> list[Tensor]:
    found = []
    for number, ids in enumerate(documents()):
        with torch.no_grad():
            out = model.eval()(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)))
        if task == "spans":
            found.append(torch.stack([out.start_logits[0], out.end_logits[0]], -1))
        else:
            found.append(out.logits[0][places_of(number, family, task)] if task == "token-labels" else out.logits)
    return found


def assert_equal(ours: list[Tensor], theirs: list[Tensor], bound: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("family", "task"), FORMS)
def test_tuned_folder_matches_in_transformers(family: str, task: str, tmp_path: Path) -> None:
    folder = tune(base_model(tmp_path / "base", family), tmp_path / "tuned", family, task)
    model, info = class_of(task).from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_equal(logits_here(folder, family, task), logits_there(model, family, task), 1e-6)
    if labels_of(task):
        assert model.config.id2label == dict(enumerate(LABELS))
    problems = {"multi-label": "multi_label_classification", "regression": "regression"}
    if task not in CLASSES:
        assert model.config.problem_type == problems.get(task, "single_label_classification")
    assert not (folder / "generation_config.json").exists()
    assert not damaged_files(folder)
    if family == "gpt2":
        assert model.config.pad_token_id == 210


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("family", "task"), FORMS)
def test_adapter_with_head_matches_peft(family: str, task: str, tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", family)
    folder = lora(base, tmp_path / "adapter", family, task, merge=True)
    ours = logits_here(folder, family, task)
    more = {"num_labels": 1} if task == "regression" else {"num_labels": 3} if task != "spans" else {}
    theirs = PeftModel.from_pretrained(class_of(task).from_pretrained(base, **more), folder)
    assert_equal(ours, logits_there(theirs, family, task), 1e-5)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["task_type"] == TASK_TYPES.get(task, "SEQ_CLS")
    output = "qa_outputs" if task == "spans" else "classifier" if family != "gpt2" or task in CLASSES else "score"
    assert config["modules_to_save"] == [output]
    last = ".out_proj" if "roberta" in family and task not in CLASSES else ""
    assert f"base_model.model.{output}{last}.weight" in load_file(folder / "adapter_model.safetensors")
    assert not damaged_files(folder)
    convert(base, tmp_path / "converted", Conversion(merge=folder))
    for merged in (tmp_path / "merged", tmp_path / "converted"):
        model, info = class_of(task).from_pretrained(merged, output_loading_info=True)
        assert not info["missing_keys"]
        there = logits_there(model, family, task)
        assert_equal(ours, there, 1e-5)
        assert_equal(logits_here(merged, family, task), there, 1e-6)
        if labels_of(task):
            assert model.config.id2label == dict(enumerate(LABELS))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "task"), [("bert", "classification"), ("gpt2", "classification"), ("bert", "spans"),
    ("gpt2", "token-labels"), ("roberta", "classification"), ("roberta", "token-labels")])  # fmt: skip
def test_peft_adapters_open_with_head(family: str, task: str, tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", family)
    more = {} if task == "spans" else {"num_labels": 3}
    torch.manual_seed(3)
    config = LoraConfig(task_type=TASK_TYPES.get(task, "SEQ_CLS"), r=2, fan_in_fan_out=family == "gpt2")
    model = get_peft_model(class_of(task).from_pretrained(base, **more), config)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape) * (0.1 if parameter.requires_grad else 0.0)
    model.save_pretrained(tmp_path / "adapter")
    recipe = Recipe.model_validate({"task": task})
    with open_for_inference(tmp_path / "adapter", CPU, torch.float32) as (architecture, stack):
        assert architecture.labels == (() if task == "spans" else ("LABEL_0", "LABEL_1", "LABEL_2"))
        batches = batches_of(task, family)
        found = torch.cat(list(head_outputs(stack, batches, objective_of(recipe))))
    order = [number for batch in batches for number in batch_order(batch)]
    theirs = logits_there(model, family, task)
    torch.testing.assert_close(found, torch.cat([theirs[number] for number in order]), rtol=1e-5, atol=1e-5)


def test_missing_pooler_is_saved_with_adapter(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", "bert")
    tensors = load_file(base / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
    assert len(kept) == len(tensors) - 2
    save_file(kept, base / "model.safetensors", metadata={"format": "pt"})
    folder = lora(base, tmp_path / "adapter", "bert", "classification")
    assert json.loads((folder / "adapter_config.json").read_text())["modules_to_save"] == ["classifier", "pooler"]
    theirs = PeftModel.from_pretrained(class_of("classification").from_pretrained(base, num_labels=3), folder)
    ours = logits_here(folder, "bert", "classification")
    assert_equal(ours, logits_there(theirs, "bert", "classification"), 1e-5)


def test_head_restarts_only_for_other_labels(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", "bert")
    tuned = tune(base, tmp_path / "tuned", "bert", "classification")
    recipe = Recipe.model_validate({"task": "classification", "method": "lora"})
    assert not trained_architecture(recipe, tuned, LABELS).new
    assert trained_architecture(recipe, tuned, LABELS[::-1]).new == {"classifier.weight", "classifier.bias"}
    folder = lora(tuned, tmp_path / "adapter", "bert", "classification")
    tensors, key = load_file(folder / "adapter_model.safetensors"), "classifier.weight"
    with open_checkpoint(tuned) as checkpoint:
        moved = (tensors[f"base_model.model.{key}"] - checkpoint.read(key)).abs().max()
    assert 0 < moved < 0.1  # it went on from there: three steps of 0.02
    theirs = PeftModel.from_pretrained(class_of("classification").from_pretrained(tuned), folder)
    ours = logits_here(folder, "bert", "classification")
    assert_equal(ours, logits_there(theirs, "bert", "classification"), 1e-5)


def test_lora_targets_exclude_head(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", "bert")
    folder = lora(base, tmp_path / "adapter", "bert", "classification", targets=["*"])
    names = load_file(folder / "adapter_model.safetensors")
    assert "base_model.model.bert.pooler.dense.lora_A.weight" in names
    assert not any("classifier.lora" in name for name in names)
    theirs = PeftModel.from_pretrained(class_of("classification").from_pretrained(base, num_labels=3), folder)
    ours = logits_here(folder, "bert", "classification")
    assert_equal(ours, logits_there(theirs, "bert", "classification"), 1e-5)


def test_train_patterns_select_trunk_with_new_head(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", "bert")
    folder = tune(base, tmp_path / "tuned", "bert", "classification", train=["encoder.layer.1.*"])
    before, changed = load_file(base / "model.safetensors"), set()
    with open_checkpoint(folder) as checkpoint:
        for name in checkpoint.names:
            own = before.get(name.removeprefix("bert."))
            if own is None or not torch.equal(checkpoint.read(name), own):
                changed.add(name.partition("layer.1.")[0])
    assert changed == {"classifier.weight", "classifier.bias", "bert.encoder."}


def test_adapter_with_incomplete_head_is_rejected(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", "bert")
    folder = lora(base, tmp_path / "adapter", "bert", "classification")
    tensors = load_file(folder / "adapter_model.safetensors")

    def refusal(change: Mapping[str, Tensor | None], error: type[Exception]) -> str:
        kept = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
        save_file(kept, folder / "adapter_model.safetensors")
        (folder / "digests.json").unlink(missing_ok=True)
        with pytest.raises(error) as caught, open_for_inference(folder, CPU, torch.float32):
            pass
        return str(caught.value)

    key = "base_model.model.classifier"
    assert "classifier.bias" in refusal({f"{key}.bias": None}, DataError)
    assert "[5, 32], the model's head [3, 32]" in refusal({f"{key}.weight": torch.zeros(5, 32)}, DataError)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["modules_to_save"] = ["classifier", "word_embeddings"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    words = {"base_model.model.bert.embeddings.word_embeddings.weight": torch.zeros(VOCABULARY, 32)}
    assert "word_embeddings" in refusal(words, UsageError)


def test_tuned_model_keeps_task_and_labels(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", "bert")
    whole = tune(base, tmp_path / "tuned", "bert", "multi-label", label_threshold=0.3)
    adapter = lora(base, tmp_path / "adapter", "bert", "multi-label", targets=["query"])
    metadata = read_metadata(whole)
    assert metadata is not None
    assert metadata.head is None
    assert (metadata.template["task"], metadata.template["label_threshold"]) == ("multi-label", 0.3)
    metadata = read_metadata(adapter)
    assert metadata is not None
    assert metadata.head == {"task": "multi-label", "labels": list(LABELS)}
    architecture = tuned_architecture(adapter)
    assert open_adapter(adapter, architecture).whole == {"classifier.weight", "classifier.bias"}
    assert architecture.raw["problem_type"] == "multi_label_classification"
    for folder, kind in ((whole, "text-classification"), (adapter, "text-classification")):
        card = (folder / "README.md").read_text()
        assert f"pipeline_tag: {kind}" in card
        assert "`perhaps`" in card
        assert "gptj-ft predict" in card
    names = [parcel.name for parcel in files_to_push(adapter)]
    assert {"adapter_config.json", "adapter_model.safetensors", "gptj_ft.json", "vocab.txt"} <= set(names)


@pytest.mark.parametrize("task", ["classification", "multi-label", "token-labels"])
def test_transformers_pipelines_return_user_labels(task: str, tmp_path: Path) -> None:
    folder = tune(base_model(tmp_path / "base", "bert"), tmp_path / "tuned", "bert", task)
    kind = "token-classification" if task == "token-labels" else "text-classification"
    pipe = transformers.pipeline(kind, model=str(folder))
    assert pipe.tokenizer.model_max_length == 48
    text = "the lift in the village stops " * 20
    if task == "token-labels":
        assert {each["entity"] for each in pipe("the lift stops")} <= set(LABELS)
        return
    found = {each["label"]: each["score"] for each in pipe(text, top_k=None, truncation=True)}
    ids = pipe.tokenizer(text, truncation=True)["input_ids"]
    assert len(ids) == 48
    with torch.no_grad():
        (logits,) = pipe.model(torch.tensor([ids])).logits
    expected = logits.sigmoid() if task == "multi-label" else logits.softmax(-1)
    assert found == pytest.approx(dict(zip(LABELS, expected.tolist(), strict=True)), abs=1e-6)


def test_cased_vocabulary_stays_cased(tmp_path: Path) -> None:
    for is_cased in (False, True):
        base = base_model(tmp_path / f"base-{is_cased}", "bert")
        write_vocabulary(base, is_cased)
        convert(base, tmp_path / f"model-{is_cased}")
        said = json.loads((tmp_path / f"model-{is_cased}" / "tokenizer_config.json").read_text())
        assert said == {"tokenizer_class": "BertTokenizer", "model_max_length": 48, "do_lower_case": not is_cased}
        words = transformers.AutoTokenizer.from_pretrained(tmp_path / f"model-{is_cased}").tokenize("The lift")
        assert words == (["The", "lift"] if is_cased else ["the", "lift"])


def test_shorter_tokenizer_limit_is_kept(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", "bert")
    (base / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 16, "do_lower_case": False}))
    convert(base, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())["model_max_length"] == 16
    assert read_architecture(tmp_path / "model").config.n_positions == 48


@pytest.mark.thorough
def test_encoder_adapter_works_from_command_line(shell, tmp_path: Path) -> None:
    rows = [{"text": f"the {word} lift {n}", "label": label} for n in range(15) for word, label in WORDS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = "--recipe classification --data rows.jsonl --model tiny-bert --method lora --lr 1e-2 --max-steps 2"
    done = shell(f"finetune {options} --set max_length=64 --output run --json")
    assert done.code == 0, done.err
    assert any("classifier.weight" in note for note in done.json["notes"])
    assert shell("runs verify run").code == 0
    assert shell("predict --model run 'the good lift'").out.split()[0] in dict(WORDS).values()
    assert shell("convert --merge run/model").code == 0
    model = class_of("classification").from_pretrained(tmp_path / "run" / "model-merged")
    assert set(model.config.label2id) == set(dict(WORDS).values())
    done = shell("generate --model run 'the good lift'")
    assert (done.code, "predict" in done.err) == (2, True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "task", "padding"),
    [("gpt2", "classification", None), ("gpt2", "token-labels", None), ("llama", "classification", "<pad>")],
)
def test_tuned_decoder_labels_padded_texts(family: str, task: str, padding: str | None, tmp_path: Path) -> None:
    base, texts = base_model(tmp_path / "base", family), ["ab", "a b c d e f", "efgh a", "c"]
    vocabulary = {letter: number for number, letter in enumerate(["<end>", "<pad>", *"abcdefgh"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="h"))
    tokenizer.pre_tokenizer = Whitespace()
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token=padding, padding_side="left"
    )
    own.save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "eos_token_id": 0, "pad_token_id": None}))
    folder = tune(base, tmp_path / "tuned", family, task)
    pipe = transformers.pipeline(f"{'token' if task == 'token-labels' else 'text'}-classification", str(folder))
    answers = (pipe(texts, batch_size=size) for size in (1, 4))
    alone, together = ([*chain.from_iterable(each)] if task == "token-labels" else each for each in answers)
    assert pipe.tokenizer.pad_token == (padding or "<end>")
    assert pipe.model.config.pad_token_id == pipe.tokenizer.pad_token_id
    for one, other in zip(alone, together, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
