"""Every preset: it prepares a row as it is meant to, and the published files of its data."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.tiny_tokenizer import encode, make_tokenizer

from gptj_ft.config.presets import preset_names
from gptj_ft.config.resolve import resolve
from gptj_ft.data.columns import choose_columns, read_fields
from gptj_ft.data.encode import check_templates, parts
from gptj_ft.errors import RowSkipped

ROWS = {
    "summarization": ({"document": "A long text.", "summary": "Short."}, " Short."),
    "dialogsum": ({"dialogue": "#Person1#: Hello.", "summary": "A greeting.", "topic": "x"}, " A greeting."),
    "cnn-dailymail": ({"article": "News.", "highlights": ["One.", "Two."]}, "\nOne.\nTwo."),
    "qa": ({"context": "It rains.", "question": "Does it?", "answers": ["yes", "Yes"]}, " yes"),
    "squad": ({"context": "It rains.", "question": "Why?", "answers": []}, " unanswerable"),
    "sentiment": ({"review": "Good.", "label": 1}, " positive"),
    "sst2": ({"sentence": "good .", "label": "0"}, " negative"),
    "entailment": ({"premise": "It rains.", "hypothesis": "It is wet.", "label": 0.0}, " true"),
    "mnli": ({"sentence1": "It rains.", "sentence2": "It is dry.", "gold_label": "contradiction"}, " false"),
    "autocorrect": ({"wrong": "Helo", "corrected": "Hello"}, " Hello"),
    "autocomplete": ({"text": "Dear all, thank you."}, "Dear all, thank you."),
    "relation-extraction": ({"text": "Ann met Bo.", "triples": ["Ann | met | Bo", "Bo | met | Ann"]},
                            "\nAnn | met | Bo\nBo | met | Ann"),
    "chat": ({"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]}, " Hello."),
    "continuous-pretraining": ({"text": "Some news."}, "Some news."),
    "trc2": ({"text": "Some news."}, "Some news."),
}  # fmt: skip


def test_every_preset_is_tried_here() -> None:
    assert set(ROWS) == set(preset_names())


@pytest.mark.parametrize("name", ROWS)
def test_a_preset_finds_its_columns_and_trains_on_what_it_should(name: str) -> None:
    row, completion = ROWS[name]
    recipe = resolve({"recipe": name}, environment={}).recipe
    check_templates(recipe)
    found = read_fields(row, choose_columns(row, recipe), recipe)
    assert parts(recipe, found.values)[-1] == (completion, True)
    tokenizer = make_tokenizer()
    encoded = encode(recipe, tokenizer, found.values)
    (ids,) = encoded.documents
    assert tokenizer.decode(ids[encoded.prompt_length : -1]) == completion
    assert ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("name", ROWS)
def test_a_prompt_ends_without_a_blank_and_its_completion_begins_with_one(name: str) -> None:
    recipe = resolve({"recipe": name}, environment={}).recipe
    assert recipe.about
    assert recipe.source
    if recipe.prompt:
        assert recipe.prompt == recipe.prompt.rstrip()
        assert recipe.completion[0].isspace()


@pytest.mark.parametrize("label", ["2", "positiv", "-", ""])
def test_a_label_outside_the_set_leaves_the_row_out_and_is_named(label: str) -> None:
    recipe = resolve({"recipe": "sst2"}, environment={}).recipe
    with pytest.raises(RowSkipped, match=f"label '{label}' is none of 0, 1"):
        read_fields({"sentence": "x", "label": label}, {"sentence": "sentence", "label": "label"}, recipe)


def test_what_has_no_answer_is_left_out_unless_the_recipe_says_what_to_answer() -> None:
    row, columns = {"context": "c", "question": "q", "answers": []}, ("context", "question", "answers")
    plain = resolve({"recipe": "squad"}, assignments=("no_answer=''",), environment={}).recipe
    with pytest.raises(RowSkipped, match="no value for column 'answers'"):
        read_fields(row, {column: column for column in columns}, plain)


def test_a_preset_is_copied_to_be_changed_and_never_over_a_file(shell, tmp_path: Path) -> None:
    done = shell("recipes copy sst2")
    assert done.code == 0, done.err
    assert "--config sst2.yaml" in done.out
    text = Path("sst2.yaml").read_text()
    Path("sst2.yaml").write_text(text.replace("batch_size: 32", "batch_size: 8"))
    assert shell("plan --config sst2.yaml --model tiny --json").code in (0, 2)
    again = shell("recipes copy sst2")
    assert again.code == 2
    assert "nothing is overwritten" in again.err
    assert shell("recipes copy sst3").code == 2
    assert "batch_size: 8" in Path("sst2.yaml").read_text()


FILES = {
    "sentiment/sst2/dev.tsv": ("sst2",),
    "nli/mnli/dev_matched.tsv": ("mnli", "entailment"),
    "summarization/dialogsum/val.jsonl": ("dialogsum", "summarization"),
    "summarization/scitldr-a/val.jsonl": ("summarization",),
    "summarization/mts-dialog/val.csv": ("summarization",),
    "summarization/xsum-sample/sample.json": ("summarization",),
    "summarization/cnndm-sample/cnndm_sample.train.0.json": ("cnn-dailymail",),
    "squad/hf-fixture-sample.json": ("squad",),
    "lm/tinyshakespeare/input.txt": ("autocomplete",),
    "lm/wikitext-2/valid.txt": ("continuous-pretraining",),
}


@pytest.mark.parametrize(("name", "preset"), [(name, preset) for name, presets in FILES.items() for preset in presets])
def test_published_files_need_no_option_but_the_preset(name: str, preset: str, shell, tmp_path: Path) -> None:
    folder = Path(os.environ.get("GPTJ_FT_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")
    if not (folder / name).exists():
        pytest.skip(f"real data not found: {folder / name} (set GPTJ_FT_TEST_DATA)")
    make_model(tmp_path / "model")
    done = shell(f"prepare-data --data {folder / name} --recipe {preset} --model model --output out --json")
    assert done.code == 0, done.err
    report = done.json
    assert report["rows_read"] == report["rows_kept"] + sum(x["count"] for x in report["rows_skipped"].values())
    assert report["rows_kept"] >= 0.97 * report["rows_read"], report["rows_skipped"]


def make_model(folder: Path) -> None:
    """A model folder as far as `prepare-data` looks at it."""
    make_tokenizer().save_pretrained(folder)
    config = {"model_type": "gptj", "n_embd": 64, "n_head": 2, "n_layer": 1, "rotary_dim": 32, "vocab_size": 50400}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
