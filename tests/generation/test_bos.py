"""Test texts of tokenizers that add BOS, as Llama's, Mistral's and Gemma's do; `transformers` is the oracle."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_tokenizer import make_tokenizer
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gptj_ft.checkpoints.metadata import read_metadata
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run
from gptj_ft.data.dataset import check_compatible, load_dataset
from gptj_ft.data.encode import encode_prompt
from gptj_ft.data.tokenization import load_tokenizer
from gptj_ft.errors import DataError

ROWS = [
    {
        "document": f"The lift in house {n} stops.",
        "summary": f"Lift {n} stops.",
        "label": "ab"[n % 2],
        "more": "It is old.",
    }
    for n in range(12)
]
TUNE = "finetune --model llama --data rows.jsonl --set max_length=128 --lr 1e-2 --precision fp32 --device cpu"
NO_BOS, SHORT = "--set bos=false", "--set generation.max_new_tokens=12"


@pytest.fixture(autouse=True)
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a tiny Llama whose tokenizer adds BOS."""
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer(400, eos="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>"]})
    tokenizer.bos_token = "<s>"
    special = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=special
    )
    config = AutoConfig.for_model(
        "llama", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained("llama")
    tokenizer.save_pretrained("llama")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "llama"


def run_program(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> str:
    """Run the program of a model's card with these texts in place of its own; return its output."""
    program = re.search(r"```python\n(.*?)\n```", (folder / "README.md").read_text(), re.DOTALL)[1]  # type: ignore[index]
    for own, text in texts.items():
        program = program.replace(json.dumps(own), json.dumps(text))
    printed = io.StringIO()
    with monkeypatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        exec(program, {})  # our own card, on a model made here
    return printed.getvalue()


def test_raw_prompts_begin_as_in_transformers(llama: Path, shell: Any) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(llama), AutoModelForCausalLM.from_pretrained(llama)
    inputs = tokenizer("The lift stops", return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    said = shell("generate --model llama --raw --max-new-tokens 8 --json", "The lift stops").json
    assert said["texts"] == [tokenizer.decode(written, skip_special_tokens=True).strip()]
    assert said["prompt_tokens"] == inputs["input_ids"].shape[1]
    without = shell(f"generate --model llama --raw --max-new-tokens 8 --json {NO_BOS}", "The lift stops").json
    assert without["prompt_tokens"] == said["prompt_tokens"] - 1


def test_rows_and_answers_begin_with_bos(llama: Path, shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done = shell(f"{TUNE} --recipe summarization {SHORT} --max-steps 3 --output run")
    assert done.code == 0, done.err
    begin = load_tokenizer(llama).bos_token_id
    rows = load_dataset(Run(Path("run")).data / "train").rows
    assert all(row["input_ids"][0] == begin and begin not in row["input_ids"][1:] for row in rows)
    model = Path("run/model")
    assert read_metadata(model).template["bos"] is True  # type: ignore[union-attr]
    said = shell("generate --model run --json", ROWS[0]["document"]).json
    ids = encode_prompt(Recipe(prompt="{{ text }}"), load_tokenizer(llama), {"text": "a"}, 50).ids
    assert ids[0] == begin
    assert said["texts"][0].strip() == run_program(model, monkeypatch, **{"...": ROWS[0]["document"]}).strip()


def test_limits_count_bos(llama: Path) -> None:
    tokenizer, text = load_tokenizer(llama), {"text": "The lift in the house stops. " * 9}
    recipe = Recipe(prompt="{{ text }}", on_long="shorten", shorten="text")
    for room in (2, 9, 30):
        prompt = encode_prompt(recipe, tokenizer, text, room)
        assert (len(prompt.ids), prompt.ids[0], prompt.cut) == (room, tokenizer.bos_token_id, True)
    plain = encode_prompt(Recipe(completion="{{ text }}"), tokenizer, text, 9)
    assert (len(plain.ids), plain.ids[0]) == (9, tokenizer.bos_token_id)
    first = encode_prompt(Recipe(prompt="{{ text }}", generation={"max_prompt_tokens": 5}), tokenizer, text, 60)
    assert (len(first.ids), first.ids[0]) == (5, tokenizer.bos_token_id)


def test_models_and_rows_of_earlier_versions_have_no_bos(llama: Path, shell: Any) -> None:
    prepare = "prepare-data --model llama --data rows.jsonl --recipe summarization"
    assert shell(f"{prepare} {NO_BOS} --output old").code == 0
    prepared, tokenizer = load_dataset(Path("old")), load_tokenizer(llama)
    with pytest.raises(DataError, match="bos is True, was False"):
        check_compatible(prepared, Recipe(recipe="summarization"), tokenizer)
    done = shell(
        f"{TUNE} --recipe summarization {NO_BOS} --max-steps 1 --set generation.max_new_tokens=12 --output run"
    )
    assert done.code == 0, done.err
    said = shell("generate --model run --json --set bos=true", ROWS[0]["document"])
    assert said.code == 0, said.err
    with_bos = said.json["prompt_tokens"]
    file = Path("run/model/gptj_ft.json")
    values = json.loads(file.read_text())
    del values["template"]["bos"]
    file.write_text(json.dumps(values))
    file.with_name("digests.json").unlink()
    said = shell("generate --model run --json", ROWS[0]["document"])
    assert said.code == 0, said.err
    assert said.json["prompt_tokens"] == with_bos - 1


def test_long_rows_keep_bos_and_length(llama: Path, shell: Any) -> None:
    long = [{**row, "document": row["document"] * 20} for row in ROWS]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    tokenizer = load_tokenizer(llama)
    for recipe in ("summarization", "continuous-pretraining --map text=document"):
        output = f"prepared-{len(recipe)}"
        words = "prepare-data --model llama --data rows.jsonl --set max_length=64"
        done = shell(f"{words} --recipe {recipe} --output {output}")
        assert done.code == 0, done.err
        rows = load_dataset(Path(output)).rows
        lengths = [len(row["input_ids"]) for row in rows]
        assert max(lengths) <= 64
        begins = [row["input_ids"][0] == tokenizer.bos_token_id for row in rows]
        assert sum(begins) == len(ROWS), "one for each text, not for each window"


def test_ends_of_config_end_answers(llama: Path, shell: Any) -> None:
    def written() -> list[int]:
        tokenizer, model = AutoTokenizer.from_pretrained(llama), AutoModelForCausalLM.from_pretrained(llama)
        inputs = tokenizer("The lift stops", return_tensors="pt")
        return model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()

    (llama / "generation_config.json").unlink()
    config, whole = json.loads((llama / "config.json").read_text()), written()
    (llama / "config.json").write_text(json.dumps({**config, "eos_token_id": [config["eos_token_id"], whole[3]]}))
    *ids, end = written()
    assert (end, len(ids) < len(whole) - 1) == (whole[3], True)
    said = shell("generate --model llama --raw --max-new-tokens 8 --json", "The lift stops").json
    assert said["text"] == load_tokenizer(llama).decode(ids).strip()


def test_card_program_labels_words_as_in_training(llama: Path, shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"tokens": ["The", "lift", "stops"], "tags": ["O", "B-X", "O"]}] * 8
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert shell(f"{TUNE} --recipe token-labels --max-steps 4 --output run").code == 0
    words = shell("predict --model run --json", "The lift stops").json["tokens"]
    printed = run_program(Path("run/model"), monkeypatch, **{" ...": " The lift stops"})
    scores = [float(score) for score in re.findall(r"'score': (?:np\.float32\()?([0-9.]+)", printed)]
    labelled = [word["probability"] for word in words if word["label"] != "O"]
    assert labelled, "words labelled O are not compared: the pipeline leaves them out"
    for probability in labelled:  # the pipeline labels the further tokens of a word, too
        assert any(score == pytest.approx(probability, abs=1e-4) for score in scores), (labelled, scores)


@pytest.mark.parametrize("recipe", ["classification", "squad-bert"])
def test_card_program_reads_pairs_as_in_training(
    recipe: str, llama: Path, shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recipe == "squad-bert":
        rows = [
            {"id": f"n{n}", "question": "What stops?", "context": row["document"],
             "answers": {"text": ["The lift"], "answer_start": [0]}}
            for n, row in enumerate(ROWS)
        ]  # fmt: skip
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        more = "--set stride=16"
    else:
        more = "--set 'prompt={{ document }}' --set 'pair={{ more }}'"
    done = shell(f"{TUNE} --recipe {recipe} {more} --max-steps 4 --output run")
    assert done.code == 0, done.err
    said = shell("predict --model run --json --pair 'The lift is old.'", "What stops?").json
    texts = {"question": "What stops?", "text": "The lift is old."}
    texts |= {"first text": texts["question"], "second text": texts["text"]}
    printed = run_program(Path("run/model"), monkeypatch, **texts)
    if recipe == "squad-bert":
        assert printed.strip() == said["answer"].strip()
        return
    logits = torch.tensor(json.loads(re.search(r"tensor\((\[\[.*?\]\])", printed, re.DOTALL)[1]))  # type: ignore[index]
    assert logits.softmax(-1)[0].tolist() == pytest.approx(list(said["probabilities"].values()), abs=1e-3)
