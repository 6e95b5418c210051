"""Compare lm-eval tasks on the streamed model with lm-eval's own `transformers` model of the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.models.registry import families

SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8, "n_positions": 64}
TEXTS = ["The film was good and I liked it.", "A bad film, no joy at all.", "What was it? It was a film. \n\n"]
ROWS = [
    {
        "question": f"{text} {n}",
        "choices": ["good", "bad", " no joy at"],
        "answer": n % 3,
        "text": (text + " ") * (n + 1),
    }
    for n, text in enumerate(TEXTS * 3)
]
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
"""
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}} Answer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "writing": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: " film"
generation_kwargs: {until: ["\\n\\n", "e"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list:
  - {name: strict, filter: [{function: take_first}]}
  - {name: words, filter: [{function: regex, regex_pattern: "(film)"}, {function: take_first}]}
""",
}


@pytest.fixture
def family() -> str:
    return "gptj"  # default of tests without a parameter


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    sizes = {**(SIZES if family == "gptj" else {}), "initializer_range": 0.3}
    return make_tiny(tmp_path / "tiny", TEXTS * 20, 3, model_type=family, vocab_target=300, **sizes)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'gptj-ft[harness]'")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    own = tmp_path / "tasks"
    own.mkdir()
    for name, text in TASKS.items():
        (own / f"{name}.yaml").write_text(f"task: own_{name}{COMMON.format(rows=rows)}{text}", encoding="utf-8")
    group = (
        "group: own\ntask: [own_choice, own_rolling]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    (own / "own.yaml").write_text(group, encoding="utf-8")
    return own


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name == "gptj" else pytest.mark.slow)
     for name, family in families().items() if not family.is_encoder],
)  # fmt: skip
def test_scores_and_answers_match_lm_evals_model(shell, folder: Path, tasks: Path) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    names = [f"own_{name}" for name in TASKS]
    lm = HFLM(pretrained=str(folder), batch_size=2, device="cpu", dtype="float32")
    theirs = simple_evaluate(
        lm, tasks=names, task_manager=TaskManager(include_path=str(tasks), include_defaults=False), bootstrap_iters=0
    )
    done = shell(
        f"evaluate {folder} --tasks {','.join(names)} --include-path {tasks} --baseline none --output out.jsonl --json"
    )
    assert done.code == 0, done.err
    found = {
        f"{task}.{metric}" + ("" if filter_name == "none" else f".{filter_name}"): value
        for task, values in theirs["results"].items()
        for (metric, comma, filter_name), value in ((key.partition(","), value) for key, value in values.items())
        if comma and not metric.endswith("_stderr")
    }
    assert len(found) == 7
    assert done.json["model"]["scores"] == pytest.approx(found, rel=1e-5)
    low, high = done.json["model"]["intervals"]["own_rolling.word_perplexity"]
    assert low < found["own_rolling.word_perplexity"] < high
    lines = [json.loads(line) for line in Path("out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 3 * len(ROWS)
    written = {line["place"]: line["prediction"] for line in lines if line["place"].startswith("own_writing")}
    assert any(written.values())
    for sample in theirs["samples"]["own_writing"]:
        if sample["filter"] == "strict":
            assert written[f"own_writing {sample['doc_id']}"] == sample["filtered_resps"][0]
    likely = {line["place"]: line["prediction"] for line in lines if line["place"].startswith("own_choice")}
    for sample in theirs["samples"]["own_choice"]:
        ours = [float(each) for each in likely[f"own_choice {sample['doc_id']}"].split(", ")]
        assert ours == pytest.approx([each[0] for each in sample["filtered_resps"]], abs=1e-4)


def test_group_with_baseline_reports_and_gate(shell, folder: Path, tasks: Path) -> None:
    line = f"evaluate {folder} --baseline {folder} --tasks own --limit 4 --include-path {tasks}"
    done = shell(f"{line} --gate own_choice.acc>=2 --gate own.acc<=1 --report r.md --report r.html --json")
    assert done.code == 6, done.err
    assert done.json["gates_missed"] == [
        f"own_choice.acc>=2: it is {done.json['model']['scores']['own_choice.acc']:.4f}"
    ]
    assert done.json["differences"]["own_rolling.bits_per_byte"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert done.json["model"]["scores"]["own.acc"] == done.json["model"]["scores"]["own_choice.acc"]
    assert done.json["model"]["rows"] == 8
    for name in ("r.md", "r.html"):
        assert "own_rolling.bits_per_byte" in Path(name).read_text(encoding="utf-8")


def test_impossible_tasks_fail_with_one_line(shell, folder: Path, tasks: Path) -> None:
    line = f"evaluate {folder} --baseline none --include-path {tasks}"
    unknown = shell(f"{line} --tasks own_choise")
    assert unknown.code == 2
    assert "did you mean 'own_choice'?" in unknown.err
    gate = shell(f"{line} --tasks own_choice --gate own_choice.accuracy>=1")
    assert gate.code == 2
    assert "there are own_choice.acc, own_choice.acc_norm" in gate.err
    (tasks / "far.yaml").write_text("task: far\ndataset_path: nobody/nothing\ntest_split: test\n", encoding="utf-8")
    far = shell(f"{line} --tasks far")
    assert far.code == 5, far.err
    assert "Traceback" not in far.err
    long = TASKS["writing"].replace("max_gen_toks: 12", "max_gen_toks: 64")
    own = f"task: long{COMMON.format(rows=tasks.parent / 'rows.jsonl')}{long}"
    (tasks / "long.yaml").write_text(own, encoding="utf-8")
    assert "64 new tokens, but the model's context has 64" in shell(f"{line} --tasks long").err
    (tasks / "long.yaml").write_text(own.replace("max_gen_toks", "diversity_penalty"), encoding="utf-8")
    assert "diversity_penalty, which gptj-ft does not support" in shell(f"{line} --tasks long").err


def test_missing_lm_eval_names_the_install_command(shell, folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.tasks", None)
    done = shell(f"evaluate {folder} --tasks arc_easy")
    assert done.code == 2
    assert "pip install 'gptj-ft[harness]'" in done.err
    assert shell(f"evaluate {folder} --tasks arc_easy --data rows.jsonl").code == 2
