"""Every preset prepares sample rows and the published files of its dataset."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.tiny_tokenizer import encode, make_tokenizer
from support.tiny_wordpiece import make_wordpiece

from gptj_ft.config.presets import preset_names
from gptj_ft.config.resolve import resolve
from gptj_ft.data.columns import choose_columns, read_fields
from gptj_ft.data.encode import check_templates, parts
from gptj_ft.data.prepare import TokenizeJob, tokenize_rows
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


PAIR = {"sentence1": "It rains.", "sentence2": "It is wet."}
STORY = ["It rains on the whole village .", "The patient came with a cough .", "So it is good to rest ."]
# Of tasks with labels: a row, its texts, and its label or number.
LABELLED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "classification": ({"text": "It rains.", "category": "weather"}, ("It rains.",), "weather"),
    "multi-label": ({"text": "It rains.", "labels": ["weather", "news"]}, ("It rains.",), "news; weather"),
    "regression": ({"review": "Good.", "stars": 4}, ("Good.",), "4.0"),
    "pairs": ({"question": "Why?", "answer": "So.", "label": 1}, ("Why?", "So."), "1"),
    "sst2-bert": ({"sentence": "good .", "label": "1"}, ("good .",), "positive"),
    "cola-bert": ({"source": "gj04", "label": "0", "star": "*", "sentence": "It it."}, ("It it.",), "unacceptable"),
    "mrpc-bert": ({"Quality": "1", "#1 ID": "1", "#2 ID": "2", "#1 String": "It", "#2 String": "is"}, ("It", "is"),
                  "equivalent"),
    "stsb-bert": ({**PAIR, "score": "3.800"}, tuple(PAIR.values()), "3.8"),
    "qqp-bert": ({"question1": "Why?", "question2": "How?", "is_duplicate": "0"}, ("Why?", "How?"), "not_duplicate"),
    "mnli-bert": ({**PAIR, "label1": "neutral", "gold_label": "neutral"}, tuple(PAIR.values()), "neutral"),
    "qnli-bert": ({"question": "Why?", "sentence": "So.", "label": "entailment"}, ("Why?", "So."), "entailment"),
    "rte-bert": ({**PAIR, "label": "not_entailment"}, tuple(PAIR.values()), "not_entailment"),
    "token-labels": ({"tokens": ["It", "rains"], "ner_tags": ["O", "B-X"]}, ("It rains",), "O B-X"),
    "squad-bert": ({"question": " Why?", "context": "It rains.", "answers": {"text": ["rains"], "answer_start": [3]}},
                   ("Why?", "It rains."), "rains"),
    "squad2-bert": ({"question": "Why?", "context": "It rains.", "answers": {"text": [], "answer_start": []}},
                    ("Why?", "It rains."), ""),
    "bertsum": ({"article": STORY, "highlights": "It rains on the village."}, tuple(STORY), "It rains on the village."),
    "wnli-bert": ({**PAIR, "label": "1"}, tuple(PAIR.values()), "entailment"),
}  # fmt: skip


def test_every_preset_is_tried_here() -> None:
    assert {*ROWS, *LABELLED} == set(preset_names())


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_preset_reads_texts_and_labels(name: str, tmp_path: Path) -> None:
    row, texts, label = LABELLED[name]
    recipe = resolve({"recipe": name}, environment={}).recipe
    assert recipe.about
    assert recipe.source
    assert recipe.schedule == ("inverse_sqrt" if recipe.task == "sentences" else "linear")
    assert recipe.on_long == ("split" if recipe.task in ("token-labels", "spans") else "shorten")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n", encoding="utf-8")
    tokenizer = make_wordpiece(tmp_path)
    names = (
        ()
        if recipe.task in ("regression", "spans")
        else tuple(recipe.labels.values()) or ("1", "weather", "news", "O", "B-X")
    )
    done = tokenize_rows(TokenizeJob.of(recipe, tokenizer, tmp_path / "rows.jsonl", 1000, labels=names))
    (first, second) = done.rows
    if recipe.task == "sentences":
        tokens = [token for text in texts for token in tokenizer(text)["input_ids"]]
    else:
        tokens = tokenizer(*texts)["input_ids"]
    assert first["input_ids"] == second["input_ids"] == tokens
    assert (first["label"] or first["references"][0]) == label
    if recipe.task == "classification":
        assert names[first["targets"][0]] == label


GLUE = {
    "cola-bert": ("gj04\t1\t\tOur friends won't buy \"it\".\ngj04\t0\t*\tOne more and I'm.\n", 2, {}),
    "mrpc-bert": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t12\t34\tHe said \" no .\tHe said no .\n"
                  "0\t12\t35\tShe\tIt\n", 2, {}),
    "stsb-bert": ("index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
                  "0\tmain\tvideo\t2012\t1\tnone\tnone\tA plane.\tAn air plane.\t5.000\n", 1, {}),
    "qqp-bert": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tWhy?\tHow?\t0\n2\t3\tWhat\n"
                 "4\t5\t6\tWhere?\tAt what place?\t1\n", 2, {"cannot be read: 3 cells, the header has 6": 1}),
    "mnli-bert": ("index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tIt\tis\tneutral\t-\n"
                  "1\tIt\twas\tneutral\tneutral\n2\tThey\twere\tcontradiction\tcontradiction\n", 2,
                  {"label '-' is none of 0, 1, 2": 1}),
    "qnli-bert": ("index\tquestion\tsentence\tlabel\n0\tWhen?\tIn 1990.\tentailment\n"
                  "1\tWho?\tIn 1990.\tnot_entailment\n", 2, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", GLUE)
def test_glues_files_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    text, kept, skipped = GLUE[name]
    (tmp_path / "train.tsv").write_text(text, encoding="utf-8")
    recipe = resolve({"recipe": name}, environment={}).recipe
    report = tokenize_rows(TokenizeJob.of(recipe, make_wordpiece(tmp_path), tmp_path / "train.tsv", 1000)).report
    assert report.rows_kept == kept
    assert {reason: of.count for reason, of in report.rows_skipped.items()} == skipped
    assert report.labels == tuple(dict.fromkeys(recipe.labels.values()))


def test_column_names_in_the_file_beat_header(tmp_path: Path) -> None:
    recipe = resolve({"recipe": "cola-bert"}, environment={}).recipe
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\tBill whistled.\n", encoding="utf-8")
    done = tokenize_rows(
        TokenizeJob.of(recipe, make_wordpiece(tmp_path), tmp_path / "test.tsv", 1000, needs_target=False)
    )
    assert [row["line"] for row in done.rows] == [2]
    (tmp_path / "named.tsv").write_text(
        "source\tlabel\tstar\tsentence\ngj04\t1\t\tBill.\nx\t0\t\tB\n", encoding="utf-8"
    )
    done = tokenize_rows(TokenizeJob.of(recipe, make_wordpiece(tmp_path), tmp_path / "named.tsv", 1000))
    assert [row["line"] for row in done.rows] == [2, 3]


@pytest.mark.parametrize("name", ROWS)
def test_preset_finds_columns_and_targets(name: str) -> None:
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
def test_blank_starts_the_completion_not_the_prompt(name: str) -> None:
    recipe = resolve({"recipe": name}, environment={}).recipe
    assert recipe.about
    assert recipe.source
    if recipe.prompt:
        assert recipe.prompt == recipe.prompt.rstrip()
        assert recipe.completion[0].isspace()


@pytest.mark.parametrize("label", ["2", "positiv", "-", ""])
def test_row_with_unknown_label_is_skipped(label: str) -> None:
    recipe = resolve({"recipe": "sst2"}, environment={}).recipe
    with pytest.raises(RowSkipped, match=f"label '{label}' is none of 0, 1"):
        read_fields({"sentence": "x", "label": label}, {"sentence": "sentence", "label": "label"}, recipe)


def test_unanswerable_row_is_skipped_without_no_answer() -> None:
    row, columns = {"context": "c", "question": "q", "answers": []}, ("context", "question", "answers")
    plain = resolve({"recipe": "squad"}, assignments=("no_answer=''",), environment={}).recipe
    with pytest.raises(RowSkipped, match="no value for column 'answers'"):
        read_fields(row, {column: column for column in columns}, plain)


def test_copied_preset_overwrites_no_file(shell, tmp_path: Path) -> None:
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
    "sentiment/sst2/dev.tsv": ("sst2", "sst2-bert", "classification"),
    "nli/mnli/dev_matched.tsv": ("mnli", "entailment", "mnli-bert", "pairs"),
    "nli/mrpc-sample/train.tsv": ("mrpc-bert",),
    "summarization/dialogsum/val.jsonl": ("dialogsum", "summarization"),
    "summarization/scitldr-a/val.jsonl": ("summarization",),
    "summarization/mts-dialog/val.csv": ("summarization",),
    "summarization/xsum-sample/sample.json": ("summarization",),
    "summarization/cnndm-sample/cnndm_sample.train.0.json": ("cnn-dailymail",),
    "squad/hf-fixture-sample.json": ("squad", "squad2-bert"),
    "lm/tinyshakespeare/input.txt": ("autocomplete",),
    "lm/wikitext-2/valid.txt": ("continuous-pretraining",),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "preset"), [(name, preset) for name, presets in FILES.items() for preset in presets])
def test_published_files_need_only_a_preset(name: str, preset: str, shell, tmp_path: Path) -> None:
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
    """Write the files of a model folder that `prepare-data` reads."""
    make_tokenizer().save_pretrained(folder)
    config = {"model_type": "gptj", "n_embd": 64, "n_head": 2, "n_layer": 1, "rotary_dim": 32, "vocab_size": 50400}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
