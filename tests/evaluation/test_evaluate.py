"""Evaluate models: losses and answers against transformers, resumption, reports, and outputs of other systems."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from safetensors.torch import load_file, save_file
from support.head_chunks import limit_head_chunk
from support.tiny_tokenizer import make_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from gptj_ft import api
from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.options import Recipe
from gptj_ft.config.presets import load_preset
from gptj_ft.config.resolve import build
from gptj_ft.data.batches import Document
from gptj_ft.data.tokenization import load_tokenizer
from gptj_ft.errors import Interrupted, ResourceError, UsageError
from gptj_ft.evaluation.evaluate import EvaluateRequest, PairedEvaluation
from gptj_ft.evaluation.likelihood import _text_size, label_candidates, log_likelihoods, losses, passes, share_prompt
from gptj_ft.evaluation.text_evaluation import EvalSet, EvaluationPlan, make_eval_set
from gptj_ft.generation import hf_model
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import open_for_inference
from gptj_ft.system.paths import home

SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8, "n_positions": 1024}
TEXTS = ["The film was good and I liked it.", "A bad film, no joy at all.", "Summarize the following text. Summary:"]
FP32 = torch.float32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a model whose weights are large enough for clear preferences."""
    return make_tiny(tmp_path / "tiny", TEXTS * 20, seed=3, vocab_target=300, initializer_range=0.3, **SIZES)


@pytest.fixture
def stack(folder: Path) -> Iterator[OffloadedModel]:
    with open_for_inference(folder, torch.device("cpu"), FP32) as (_, stack):
        yield stack


def reference_log_probabilities(folder: Path, ids: list[int]) -> torch.Tensor:
    """Compute log-probabilities with transformers, [tokens, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_row_losses_match_transformers(folder: Path, stack: OffloadedModel) -> None:
    tokenizer = load_tokenizer(folder)
    eos = tokenizer.eos_token_id
    ids = [[*tokenizer.encode(text), eos] for text in (*TEXTS, "é 日本 naïve")]
    documents = [
        Document(ids[0], 3), Document(ids[1], 0), Document(ids[2], 2, (5, 8)), Document(ids[3], 1)
    ]  # fmt: skip
    found = losses(stack, tokenizer, documents, budget_tokens=24)
    for document, loss in zip(documents, found, strict=True):
        theirs = reference_log_probabilities(folder, list(document.ids))
        masked_spans = range(*(document.masked_spans or (0, 0)))
        targets = [at for at in range(max(document.prompt_length, 1), len(document.ids)) if at not in masked_spans]
        expected = -sum(float(theirs[at - 1, document.ids[at]]) for at in targets)
        assert loss.total == pytest.approx(expected, rel=1e-5)
        assert loss.targets == len(targets)
        assert loss.right == sum(int(theirs[at - 1].argmax()) == document.ids[at] for at in targets)
    assert (found[1].words, found[1].bytes) == (6, len(TEXTS[1]) - len(tokenizer.decode(ids[1][:1])))
    assert found[3].bytes == len("é 日本 naïve".encode()) - 1, "all but the first token, which is one byte of é"


def test_bytes_are_counted_for_any_tokenizer() -> None:
    text = "naïve 猫 🙂<|x|> a"
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"naïve"]
    vocabulary = {name: number for number, name in enumerate([*names, "\u2581a"])}
    backend = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    for tokenizer in (PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"), make_tokenizer()):
        tokenizer.add_tokens(["🙂<|x|>"])
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert _text_size(tokenizer, [ids]) == (4, len(text.encode()))
        assert _text_size(tokenizer, [[*ids, 10**6]]) == (None, None)


def test_window_loss_matches_transformers(folder, stack) -> None:
    tokenizer = load_tokenizer(folder)
    ids = [each % 300 for each in range(7, 7 + 5 * 17, 5)]
    [loss] = losses(stack, tokenizer, [Document(ids, window=16)], budget_tokens=16)
    theirs = reference_log_probabilities(folder, ids[:-1])
    assert loss.total == pytest.approx(-sum(float(theirs[at, ids[at + 1]]) for at in range(16)), rel=1e-5)
    assert loss.targets == 16


def test_logits_are_computed_in_chunks(folder: Path, stack: OffloadedModel, monkeypatch) -> None:
    tokenizer = load_tokenizer(folder)
    documents = [Document(tokenizer.encode(text), 1) for text in TEXTS]
    whole = losses(stack, tokenizer, documents, 64)
    sizes = limit_head_chunk(monkeypatch, stack, 3, 320)
    parts = losses(stack, tokenizer, documents, 64)
    assert 0 < max(sizes) <= 3
    assert [part.total for part in parts] == pytest.approx([each.total for each in whole], rel=1e-6)


def test_answers_share_a_row_of_logits(folder: Path, stack: OffloadedModel, monkeypatch) -> None:
    tokenizer, answers = load_tokenizer(folder), [[5], [6], [7, 8], [7, 9]]
    sizes = limit_head_chunk(monkeypatch, stack, 100, 320)
    log_likelihoods(stack, [tokenizer.encode(TEXTS[0])], [answers], 96, budget_tokens=40)
    assert sizes == [2]  # after the prompt, and after 7


@pytest.mark.sampled(3)
@pytest.mark.parametrize("words", [["a", "b"], [" good", " bad", " the film"], ["x y", "x z w", "q"]])
def test_label_likelihoods_match_transformers(words: list[str], folder: Path, stack: OffloadedModel) -> None:
    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    answers = [tokenizer.encode(word) for word in words]
    found = log_likelihoods(stack, prompts, [answers] * 2 + [answers[:1]], 96, budget_tokens=40)
    assert list(map(len, found)) == [len(answers), len(answers), 1]
    for prompt, likely in zip(prompts, found, strict=True):
        for answer, ours in zip(answers, likely, strict=False):
            theirs = reference_log_probabilities(folder, [*prompt, *answer])
            chosen = range(len(prompt) - 1, len(prompt) - 1 + len(answer))
            expected = sum(float(theirs[at, token]) for at, token in zip(chosen, answer, strict=True))
            assert ours.total == pytest.approx(expected, rel=1e-5)
            assert ours.is_argmax == all(
                int(theirs[at].argmax()) == token for at, token in zip(chosen, answer, strict=True)
            )


def test_answers_share_the_tokens_of_their_beginnings() -> None:
    (labels,) = share_prompt([1, 2], [[3], [4], [5]], 64)
    assert labels.query == ([1, 2], [(1, 5), (1, 4), (1, 3)], ())  # no branch: the last tokens are only predicted
    (longer,) = share_prompt([1, 2], [[3], [4, 5], [4, 6, 7], [8, 9], [4, 6]], 64)
    assert longer.query.ids == [1, 2, 8, 4, 6]
    assert longer.query.parents == [-1, 0, 1, 1, 3]
    scored = {answer: [longer.query.pairs[number] for number in numbers] for answer, numbers in longer.scores.items()}
    assert scored == {
        0: [(1, 3)], 1: [(1, 4), (3, 5)], 2: [(1, 4), (3, 6), (4, 7)], 3: [(1, 8), (2, 9)], 4: [(1, 4), (3, 6)],
    }  # fmt: skip


def test_documents_with_several_answers_stay_within_a_size() -> None:
    answers = [[3, 4, 5], [8, 9], [3, 6, 7], [3], [8, 9, 1, 2]]
    shared = share_prompt([1, 2], answers, 5, first=10)
    assert [each.query.ids for each in shared] == [[1, 2, 8, 9, 1], [1, 2, 3, 6, 4]]
    assert [sorted(each.scores) for each in shared] == [[11, 14], [10, 12, 13]]  # common beginnings together
    assert [len(each.query.ids) for each in share_prompt([1, 2], answers, 2)] == [5, 4, 4]  # each longer one alone


def test_passes_cover_all_rows_in_order() -> None:
    assert [list(rows) for rows in passes([4, 6, 1, 30, 2, 2], 10)] == [[0, 1], [2], [3], [4, 5]]
    assert not list(passes([], 10))


def test_nested_label_candidates_end_with_eos(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    sst2 = build({**load_preset("sst2"), "recipe": "sst2"})
    assert list(label_candidates(sst2, tokenizer)) == ["negative", "positive"]
    assert tokenizer.decode(label_candidates(sst2, tokenizer)["negative"]) == " negative"
    assert not label_candidates(Recipe(metrics=("rouge",)), tokenizer)
    assert not label_candidates(sst2.model_copy(update={"labels": {}}), tokenizer)
    nested = label_candidates(sst2.model_copy(update={"labels": {"0": "q", "1": "qx"}}), tokenizer)
    assert all(ids[-1] == tokenizer.eos_token_id for ids in nested.values())


def write(path: str, rows: list[dict]) -> Path:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Path(path)


def reviews(count: int) -> list[dict]:
    return [{"sentence": f"{TEXTS[n % 2]} {n}", "label": n % 3 % 2, "idx": n} for n in range(count)]


def test_classification_chooses_the_most_likely_label(shell, folder: Path) -> None:
    write("reviews.jsonl", reviews(9))
    done = shell(f"evaluate {folder} --recipe sst2 --data reviews.jsonl --baseline none --show 9 --json")
    assert done.code == 0, done.err
    found = done.json["model"]
    assert set(found["answers"]) <= {"negative", "positive"}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = f"Is the sentiment of the following sentence positive or negative?\n\n{TEXTS[1]} 1\n\nSentiment:"
    likely = {}
    for word in ("negative", "positive"):
        ids, answer = tokenizer.encode(prompt), tokenizer.encode(f" {word}")
        theirs = reference_log_probabilities(folder, [*ids, *answer])
        likely[word] = sum(float(theirs[len(ids) - 1 + at, token]) for at, token in enumerate(answer))
    assert found["answers"][1] == max(likely, key=likely.__getitem__)
    right = [answer in of for answer, of in zip(found["answers"], found["references"], strict=True)]
    assert found["scores"]["accuracy"] == pytest.approx(100 * sum(right) / 9)


def test_each_file_has_its_own_scores(shell, folder: Path) -> None:
    Path("mnli").mkdir()
    for name in ("dev_matched", "dev_mismatched"):
        rows = [
            {"sentence1": f"{TEXTS[0]} {n} {name}", "sentence2": TEXTS[1], "gold_label": label}
            for n, label in enumerate(("neutral", "entailment", "-"))
        ]
        write(f"mnli/{name}.jsonl", rows)
    done = shell(f"evaluate {folder} --recipe mnli --data mnli --baseline none --json")
    assert done.code == 0, done.err
    parts = done.json["by_file"]
    assert list(parts) == ["mnli/dev_matched.jsonl", "mnli/dev_mismatched.jsonl"]
    whole = done.json["model"]["scores"]["accuracy"]
    assert whole == pytest.approx(sum(part["scores"]["accuracy"]["value"] for part in parts.values()) / 2)
    assert any("2 rows were left out" in note for note in done.json["model"]["notes"])


OPTIONS = "--recipe summarization --baseline none --set generation.max_new_tokens=6"


def notes(count: int) -> list[dict]:
    return [{"document": f"{TEXTS[n % 2]} {n}", "summary": f"Film {n}.", "id": f"n{n}"} for n in range(count)]


def test_reports_and_outputs_agree_with_json(shell, folder: Path) -> None:
    write("notes.jsonl", notes(6))
    reports = "--report r.json --report r.md --report r.html"
    line = f"evaluate {folder} {OPTIONS} --data notes.jsonl --output out.jsonl {reports}"
    done = shell(f"{line} --json")
    assert done.code == 0, done.err
    scores = done.json["model"]["scores"]
    report = json.loads(Path("r.json").read_text(encoding="utf-8"))
    assert report["model"] == done.json["model"]
    lines = [json.loads(text) for text in Path("out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 6
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    theirs = [scorer.score(row["references"][0], row["prediction"])["rougeL"].fmeasure for row in lines]
    assert [row["scores"]["rougeL"] for row in lines] == pytest.approx([100 * each for each in theirs])
    assert scores["rougeL"] == pytest.approx(100 * sum(theirs) / 6)
    low, high = done.json["model"]["intervals"]["loss"]
    assert low < scores["loss"] < high
    for name in ("r.md", "r.html"):
        text = Path(name).read_text(encoding="utf-8")
        assert f"{scores['loss']:.4f}" in text
        assert "--report r.json" in text, "the command line"
        assert "Film 0" not in text, "texts are private without --show"
    assert "http:" not in (page := Path("r.html").read_text(encoding="utf-8"))
    assert "https:" not in page
    again = shell("evaluate --predictions out.jsonl --recipe summarization --json --allow-empty")
    assert again.code == 0, again.err
    assert {name: again.json["model"]["scores"][name] for name in ("rouge1", "rougeL")} == pytest.approx(
        {name: scores[name] for name in ("rouge1", "rougeL")}
    )
    refused = shell(line)
    assert refused.code == 2
    assert "exists already" in refused.err


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_interrupted_evaluation_resumes_to_equal_scores(temperature: float, tmp_path: Path, folder: Path) -> None:
    rows = write(str(tmp_path / "notes.jsonl"), notes(9))
    generation = {"max_new_tokens": 6, "temperature": temperature}
    recipe = build({**load_preset("summarization"), "recipe": "summarization", "generation": generation})
    request = EvaluateRequest(folder, recipe, "none", str(rows))

    def evaluate(interrupt_after: int = 1000) -> tuple[dict[str, Any], int]:
        """Evaluate, interrupted by the progress callback; return the result and the number of callbacks."""
        calls = []

        def count(*_: object) -> None:
            calls.append(1)
            if len(calls) == interrupt_after:
                raise KeyboardInterrupt

        planned = PairedEvaluation.of(request)
        if not planned.runs["model"].cache.of("together"):
            planned.runs["model"].cache.add("together", {0: 100})  # small batches
            planned = PairedEvaluation.of(request)
        assert planned.plan.together.written == 100, "a resumed evaluation keeps the batches of the first run"
        return planned.run(count).to_dict(texts=True), len(calls)

    whole, num_calls = evaluate()
    assert not list((home() / "evaluations").iterdir()), "generated texts are private"
    with pytest.raises(Interrupted, match="finished rows are kept, and the same command resumes there"):
        evaluate(interrupt_after=2)
    (cache,) = (home() / "evaluations").iterdir()
    with cache.open("a", encoding="utf-8") as file:
        file.write('["answer", {"1": "half a li')  # as after a crash
    torch.manual_seed(99)  # as in another process
    resumed, num_left = evaluate()
    assert resumed == whole
    assert num_left == num_calls - 2
    assert evaluate() == (whole, num_calls), "a finished evaluation starts again"


def test_missed_gate_exits_with_6(shell, folder: Path) -> None:
    write("notes.jsonl", notes(4))
    line = f"evaluate {folder} {OPTIONS} --data notes.jsonl"
    failed_gates = shell(f"{line} --gate 'loss<0.1' --gate 'rougeL>=0' --report r.json")
    assert failed_gates.code == 6
    assert "loss<0.1: it is" in failed_gates.err
    assert "rougeL>=0" not in failed_gates.err
    assert json.loads(Path("r.json").read_text(encoding="utf-8"))["gates_missed"][0].startswith("loss<0.1")
    as_json = shell(f"{line} --gate 'loss<0.1' --json")
    assert as_json.code == 6
    assert len(as_json.json["gates_missed"]) == 1
    assert shell(f"{line} --gate 'loss<1000' --gate 'rougeL <= 100'").code == 0
    unknown = shell(f"{line} --gate 'rougel>=3'")
    assert unknown.code == 2
    assert "did you mean 'rougeL'" in unknown.err
    assert shell(f"{line} --gate 'rougeL=3'").code == 2


def test_output_files_are_checked_before_work(shell, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairedEvaluation, "of", None)
    write("notes.jsonl", notes(2))
    for options, message in (
        ("--report none/s.html", "none/s.html: there is no folder none; make it, or name another"),
        ("--output none/out.jsonl", "there is no folder none"),
        ("--report notes.jsonl/s.md --leaks", "there is no folder notes.jsonl"),
        ("--report s.json --output ./s.json", "s.json is named twice"),
        (f"--report {'s' * 250}.md", "File name too long"),
    ):
        refused = shell(f"evaluate {folder} {OPTIONS} --data notes.jsonl {options}")
        assert (refused.code, message in refused.err) == (2, True), refused.err


def test_results_survive_what_cannot_be_written(shell, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("notes.jsonl", notes(2))
    Path("run").mkdir()
    folder.rename("run/model")
    Path("run/recipe.yaml").write_text("recipe: summarization\n", encoding="utf-8")
    line = f"evaluate run {OPTIONS} --data notes.jsonl --report r.html"

    def refuse(path: Path, *_: object) -> None:
        raise ResourceError(f"cannot write {path}: Read-only file system")

    monkeypatch.setattr("gptj_ft.cli.html.evaluation_page.write_json", refuse)  # as in another user's run
    with monkeypatch.context() as patch:
        patch.setattr("gptj_ft.cli.terminal.evaluation.write_new", refuse)
        assert shell(line).code == 4
    (cache,) = (home() / "evaluations").iterdir()
    done = shell(line)
    assert (done.code, "ROUGE-L" in done.out, Path("r.html").is_file()) == (0, True, True), done.err
    assert f"not recorded in the report of the run: cannot write {Path('run/evaluation.json').resolve()}" in done.said
    assert not cache.exists()


def test_command_line_names_model_and_rows(shell, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("notes.jsonl", notes(2))
    line = f"evaluate {OPTIONS} --set data=notes.jsonl"
    named = f"model {folder} baseline none rows notes.jsonl"
    assert named in shell(f"{line} --set model={folder} --dry-run").said
    monkeypatch.setenv("GPTJ_FT_MODEL", str(folder))
    refused = shell(f"{line} --dry-run")
    said = "environment: model is for training, not for this: add the model to evaluate, or unset GPTJ_FT_MODEL"
    assert (refused.code, said in refused.err) == (2, True), refused.err
    with pytest.raises(UsageError, match="environment: model is for training"):
        api.evaluate(data="notes.jsonl", baseline="none", max_length=64)
    line = f"{line} --set model={folder}"
    monkeypatch.setenv("GPTJ_FT_DATA", "none.jsonl")
    assert named in shell(f"{line} --dry-run").said
    assert "environment: data is for training" in shell(f"evaluate {folder} --dry-run").err
    monkeypatch.delenv("GPTJ_FT_DATA")
    Path("mine.yaml").write_text("model: tiny\ndata: notes.jsonl\n", encoding="utf-8")
    for more, message in (
        ("--data notes.jsonl --set data=notes.jsonl", "set twice"),
        (f"{folder} --data none.jsonl --config mine.yaml", "none.jsonl"),
        (f"{folder} --config mine.yaml", "mine.yaml: data is for training, not for this: add --data FILE, or remove"),
    ):
        refused = shell(f"evaluate {OPTIONS} --dry-run {more}")
        assert (refused.code, message in refused.err) == (2, True), refused.err
    monkeypatch.delenv("GPTJ_FT_MODEL")
    refused = shell("evaluate --data notes.jsonl --config mine.yaml")
    assert (refused.code, "mine.yaml: model is for training" in refused.err) == (2, True), refused.err


def test_better_predictions_have_a_clear_difference(shell) -> None:
    rows = notes(30)
    write("notes.jsonl", rows)
    write("good.jsonl", [{"id": row["id"], "prediction": row["summary"]} for row in reversed(rows)])
    write("poor.jsonl", [{"prediction": "Film" if n % 2 else row["summary"]} for n, row in enumerate(rows)])
    done = shell(
        "evaluate --predictions good.jsonl --baseline poor.jsonl --data notes.jsonl --recipe summarization --json"
    )
    assert done.code == 0, done.err
    assert done.json["model"]["scores"]["rougeL"] == 100
    change = done.json["differences"]["rougeL"]
    assert change["value"] == pytest.approx(100 - done.json["baseline"]["scores"]["rougeL"])
    assert 0 < change["low"] < change["value"] < change["high"]
    assert done.json["by_row"] == {"score": "rougeL", "better": 15, "worse": 0, "same": 15}
    shown = shell("evaluate --predictions good.jsonl --baseline poor.jsonl --data notes.jsonl --recipe summarization")
    assert "15 better, 0 worse, 15 equal" in shown.out
    assert "Film 3" not in shown.out


@pytest.mark.parametrize(
    ("predictions", "complaint"),
    [
        (
            [{"id": "n0", "prediction": "x"}, {"id": "n9", "prediction": "y"}],
            "an id that no row of the data has: p.jsonl:2",
        ),
        ([{"id": "n0", "prediction": "x"}], "no prediction of the row: notes.jsonl:2"),
        ([{"id": "n0", "prediction": "x"}] * 2, "a repeated id: p.jsonl:2"),
        ([{"prediction": "x"}], "1 predictions, the data 2 rows"),
        ([{"id": "n1", "prediction": "x"}, {"prediction": "y"}], "p.jsonl:2 has no id, but other lines have"),
        ([{"id": "n1", "prediction": "x"}, {"id": "n0", "prediction": " "}], "an empty prediction: notes.jsonl:1"),
        ([{"id": "n0", "prediction": None}], "p.jsonl:1: no text in any of prediction, answer"),
        ([{"id": "n0", "sentence": "x"}], "p.jsonl:1: no text in any of prediction, answer"),
        (
            [{"id": "n0", "prediction": "x", "references": "y"}, {"prediction": "x", "references": [1]}],
            "p.jsonl:2: ref",
        ),
    ],
)
def test_unusable_predictions_are_rejected_with_lines(predictions, complaint: str, shell) -> None:
    write("notes.jsonl", notes(2))
    write("p.jsonl", predictions)
    done = shell("evaluate --predictions p.jsonl --data notes.jsonl --recipe summarization")
    assert done.code == 3
    assert complaint in done.err
    assert "Traceback" not in done.err


def test_predictions_without_references_are_rejected(shell) -> None:
    write("p.jsonl", [{"prediction": "x", "references": ["x"]}, {"prediction": "y"}])
    done = shell("evaluate --predictions p.jsonl --recipe summarization")
    assert done.code == 3
    assert "no references: p.jsonl:2" in done.err
    assert shell("evaluate --predictions p.jsonl").code == 2
    Path("none.jsonl").write_text("", encoding="utf-8")
    assert shell("evaluate --predictions none.jsonl --recipe summarization").code == 3
    write("e.jsonl", [{"prediction": "", "references": ["x"]}])
    assert "add --allow-empty" in shell("evaluate --predictions e.jsonl --recipe summarization").err
    assert (
        shell("evaluate --predictions e.jsonl --recipe summarization --allow-empty --json").json["model"]["rows"] == 1
    )


def test_squad_v2_predictions_have_split_scores(shell) -> None:
    qas = [
        {"id": "a", "question": "Who?", "answers": [{"text": "Ann", "answer_start": 0}]},
        {"id": "b", "question": "When?", "answers": [], "is_impossible": True},
        {"id": "c", "question": "Where?", "answers": [], "is_impossible": True},
    ]
    data = {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": "Ann wrote.", "qas": qas}]}]}
    Path("dev.json").write_text(json.dumps(data), encoding="utf-8")
    write(
        "p.jsonl",
        [
            {"id": "c", "prediction": "Bonn"},
            {"id": "a", "prediction": "ann."},
            {"id": "b", "prediction": "Unanswerable"},
        ],
    )
    done = shell("evaluate --predictions p.jsonl --data dev.json --recipe squad --json")
    assert done.code == 0, done.err
    assert done.json["model"]["scores"] == pytest.approx(
        {
            "exact_match": 200 / 3, "f1": 200 / 3, "strict_match": 100 / 3, "HasAns_exact": 100, "HasAns_f1": 100,
            "NoAns_exact": 50, "NoAns_f1": 50,
        }
    )  # fmt: skip
    official = {"b": "", "c": "Bonn", "a": "ann."}
    Path("p.json").write_text(json.dumps(official), encoding="utf-8")
    again = shell("evaluate --predictions p.json --data dev.json --recipe squad --json")
    assert again.code == 0, again.err
    assert again.json["model"]["scores"] == done.json["model"]["scores"]
    assert not again.json["model"]["notes"]
    spans = shell("evaluate --predictions p.json --data dev.json --recipe squad2-bert --json")
    assert spans.json["model"]["scores"] == done.json["model"]["scores"], "a head that answers by spans"
    Path("p.json").write_text(json.dumps({**official, "a": ""}, indent=1), encoding="utf-8")
    said = shell("evaluate --predictions p.json --data dev.json --recipe squad --json").json["model"]
    assert (said["scores"]["HasAns_exact"], said["notes"][0][:24]) == (0.0, "1 predictions are empty,")
    for wrong, complaint in (
        ({**official, "z": "x"}, "p.json (z)"),
        ({"a": "x"}, "no prediction of the row: dev.json"),
    ):
        Path("p.json").write_text(json.dumps(wrong), encoding="utf-8")
        refused = shell("evaluate --predictions p.json --data dev.json --recipe squad")
        assert refused.code == 3
        assert complaint in refused.err


def test_rouge_warns_about_other_alphabets(shell) -> None:
    write("p.jsonl", [{"prediction": "Мама", "references": ["Мама мыла раму"]}])
    done = shell("evaluate --predictions p.jsonl --recipe summarization")
    assert done.code == 0
    assert "not to be trusted for this language" in done.said


def test_nan_loss_names_the_row(shell, folder: Path, monkeypatch) -> None:
    write("notes.jsonl", notes(2))
    score_hidden = hf_model.score_hidden

    def with_nan_score(*arguments):
        scores = score_hidden(*arguments)
        scores[0].log_probabilities_SK[0] = float("nan")
        return scores

    monkeypatch.setattr(hf_model, "score_hidden", with_nan_score)
    generated = shell(f"evaluate {folder} {OPTIONS} --data notes.jsonl")
    with_nan(folder)
    scored = shell(f"evaluate {folder} --recipe trc2 --data notes.jsonl --map text=document --set max_length=64")
    for done in (generated, scored):
        assert done.code == 1
        assert "the loss of notes.jsonl:1 is not a finite number" in done.err


def test_cnn_dailymail_recipe_follows_mlperf(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    recipe = build({**load_preset("cnn-dailymail"), "recipe": "cnn-dailymail", "max_length": 300})
    settings = recipe.generation
    assert (settings.num_beams, settings.min_new_tokens, settings.max_new_tokens) == (4, 30, 128)
    assert (settings.max_prompt_tokens, settings.early_stopping, settings.temperature) == (1919, True, 0)
    articles = ["Short.", "Long article. " * 40]
    write("articles.jsonl", [{"article": text, "highlights": "One.\nTwo."} for text in articles])
    preamble = (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n### Instruction:\n"
        "Summarize the following news article:\n\n### Input:\n"
    )
    prompts = [tokenizer.encode(f"{preamble}{text}\n\n### Response:") for text in articles]
    most = len(prompts[0]) + 20
    assert len(prompts[1]) > most
    recipe = recipe.model_copy(update={"generation": settings.model_copy(update={"max_prompt_tokens": most})})
    task = make_eval_set(recipe, tokenizer, folder, Path("articles.jsonl"), None)
    assert task.prompts == [prompts[0], prompts[1][:most]]
    assert task.references == [["One.\nTwo."]] * 2
    completion = [*tokenizer.encode("\nOne.\nTwo."), tokenizer.eos_token_id]
    room = min(most, 300 - len(completion))
    assert list(task.documents[1].ids) == [*prompts[1][:room], *completion]
    assert task.documents[1].prompt_length == room


def with_nan(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if "h.1.mlp.fc_in.weight" in name:
                tensors[name][0, 0] = float("nan")
                save_file(tensors, path, {"format": "pt"})


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (with_nan, 1),
        (lambda folder: first_shard(folder).write_bytes(first_shard(folder).read_bytes()[:-100]), 3),
        (lambda folder: first_shard(folder).unlink(), 3),
        (lambda folder: (folder / "config.json").write_text("{not json", encoding="utf-8"), 3),
        (lambda folder: (folder / "tokenizer.json").write_text("{}", encoding="utf-8"), 2),
        (lambda folder: (folder / "tokenizer.json").unlink(), 2),
        (lambda folder: (folder / "gptj_ft.json").write_text("{}", encoding="utf-8"), 3),
    ],
    ids=["NaN", "cut short", "shard missing", "config", "tokenizer", "no tokenizer", "template"],
)
def test_corrupt_model_folder_fails_with_one_line(damage, code: int, shell, folder: Path) -> None:
    write("notes.jsonl", notes(2))
    damage(folder)
    for line in (
        f"evaluate {folder} {OPTIONS} --data notes.jsonl",
        f"generate --model {folder} --raw --max-new-tokens 4 x",
    ):
        if "generate" in line and damage is not with_nan and code == 3 and (folder / "gptj_ft.json").exists():
            continue  # --raw needs no template
        done = shell(line)
        assert done.code == code, done.err
        assert len(done.err.strip().splitlines()) <= 12
        assert "Traceback" not in done.err


def test_answers_cut_by_the_context_are_noted(shell, tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 96}
    folder = make_tiny(tmp_path / "gpt2", TEXTS * 20, seed=3, model_type="gpt2", vocab_target=300, **sizes)
    write("notes.jsonl", notes(3))
    line = f"evaluate {folder} --recipe summarization --data notes.jsonl --baseline none --set max_length=96"
    done = shell(f"{line} --set generation.max_new_tokens=90 --json")
    assert done.code == 0, done.err
    assert any("3 prompts leave less than 90 of the model's 96 tokens" in note for note in done.json["model"]["notes"])


def test_model_without_template_measures_only_loss(shell, folder: Path) -> None:
    write("notes.jsonl", notes(2))
    done = shell(f"evaluate {folder} --data notes.jsonl --baseline none --set max_length=64")
    assert done.code == 0, done.err
    assert "this model has no template, and no recipe is named" in done.out


def test_longrope_shares_no_prompt_of_longer_document() -> None:
    documents, prompts = [Document([1] * size, 3) for size in (9, 20, 30)], [[1] * size for size in (3, 3, 18)]
    rows = EvalSet(documents, prompts, [], [], {}, ())
    for switches, shared in (((), (0, 1, 2)), ((16,), (0, 2))):
        setup: Any = SimpleNamespace(recipe=Recipe(), architecture=SimpleNamespace(rotary_switches=switches))
        plan = EvaluationPlan(setup, None, rows, cast(Any, None), cast(Any, None))
        assert tuple(row for row in range(3) if plan._prompt_group([row], is_written=True).documents) == shared
