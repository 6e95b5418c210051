"""Walk every family through the commands: convert, push, prepare, train, kill, resume, share, use."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_rows
from support.fork_server import ForkServer
from support.hub_server import REPOSITORY, Hub, reachable
from support.small_run import assert_same_weights, weights_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from gptj_ft.checkpoints.tiny import FAMILIES, make_tiny
from gptj_ft.config.run_folder import Run
from gptj_ft.models.registry import families

DECODERS = [name for name in FAMILIES if not families()[name].is_encoder]
every_decoder = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "llama" else pytest.mark.slow) for name in DECODERS]
)
TRAIN = "--lr 1e-2 --batch-size 4 --max-steps 3 --precision fp32 --set holdout=0.1 --seed 3"
FIELDS = "--recipe summarization --map document=note --map summary=short_summary --data rows.jsonl"
TEXTS = f"finetune --model source {FIELDS} {TRAIN}"
LABELS = f"finetune --model source --recipe classification --map text=note --map label=kind --data rows.jsonl {TRAIN}"


@pytest.fixture
def workplace(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Write rows into the working folder, and serve a tiny model of the family as a repository on the Hub."""
    notes = [f"The printer on floor {n} is out of paper." for n in range(40)]
    # Rows are longer than 8 tokens, so that windows matter.
    window = {"sliding_window": 8} if "sliding_window" in FAMILIES[family] else {}
    source = make_tiny(tmp_path / "source", notes, 0, model_type=family, **window)
    rows = [json.loads(line) for line in write_rows(tmp_path / "rows.jsonl").read_text().splitlines()]
    rows = [{**row, "kind": "odd" if row["id"] % 2 else "even"} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with reachable(source, monkeypatch) as hub:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield hub


def run(shell: Any, line: str) -> Any:
    """Run a command that must succeed."""
    done = shell(line)
    assert done.code == 0, done.said
    return done


def trained(shell: Any, line: str, output: str) -> dict[str, torch.Tensor]:
    """Return the weights of a run."""
    run(shell, f"{line} --output {output}")
    return weights_of(Path(output, "model"))


@pytest.mark.thorough
@every_decoder
def test_models_come_from_and_go_to_the_hub(family: str, workplace: Hub, shell) -> None:
    downloaded = Path(run(shell, f"download {REPOSITORY} --json").json["folder"])
    before = weights_of(Path("source"))
    assert_same_weights(weights_of(downloaded), before)
    run(shell, "convert source shards --to huggingface --shard-size 0.1MB")
    assert len(list(Path("shards").glob("*.safetensors"))) > 2
    assert_same_weights(weights_of(Path("shards")), before)
    run(shell, "convert --check source shards")
    run(shell, "convert shards half --dtype bf16 --push me/mine")
    assert_same_weights(weights_of(Path("half")), {name: tensor.bfloat16() for name, tensor in before.items()})
    assert {"config.json", "tokenizer.json"} <= workplace.pushed["me/mine"].files.keys()


@pytest.mark.thorough
@every_decoder
def test_every_method_trains(family: str, workplace: Hub, shell) -> None:
    full = trained(shell, TEXTS, "full")
    on_disk = trained(shell, f"{TEXTS} --weights disk --optimizer-state disk --activations 1", "disk")
    assert_same_weights(on_disk, full)
    before = weights_of(Path("source"))
    part = trained(shell, f"{TEXTS} --train *.1.*", "part")
    assert {name for name in before if not torch.equal(before[name], part[name])} == {n for n in before if ".1." in n}
    run(shell, f"{TEXTS} --method lora --output lora")
    run(shell, "convert source merged --merge lora/model")
    AutoModelForCausalLM.from_pretrained("merged")
    if families()[family].heads:
        trained(shell, LABELS, "labels")
        AutoModelForSequenceClassification.from_pretrained("labels/model")


@every_decoder
@pytest.mark.slow
def test_tuned_models_answer_and_are_scored(family: str, workplace: Hub, shell) -> None:
    run(shell, f"prepare-data {FIELDS} --model source --output prepared")
    run(shell, f"finetune --recipe summarization --model source --data prepared {TRAIN} --output run")
    answers = run(
        shell, "generate --model run --max-new-tokens 4 --temperature 1 --num-return 2 --seed 3 --json Paper."
    )
    assert len(answers.json["texts"]) == 2
    scores = run(shell, f"evaluate run {FIELDS} --limit 4 --baseline source --report report.html --json").json
    assert scores["model"]["scores"].keys() == scores["baseline"]["scores"].keys()
    for line in ("runs verify run", "report run", "plan --model source --set method=lora --json"):
        run(shell, line)


@every_decoder
@pytest.mark.slow
def test_killed_and_shared_runs_end_equal(
    family: str, workplace: Hub, shell, server: ForkServer, tmp_path: Path
) -> None:
    line = f"{TEXTS} --save-every 1 --weights disk --optimizer-state disk"
    straight = trained(shell, line, "straight")
    with server.running(f"{line} --output killed", tmp_path) as process:
        while not any("loss" in record for record in Run(Path("killed")).metrics()):
            assert not process.has_ended(), "the run ended before it could be killed"
            time.sleep(0.001)
    assert not Path("killed/model").exists()
    run(shell, "finetune --resume killed")
    assert_same_weights(weights_of(Path("killed/model")), straight)
    assert server.run(f"{line} --nproc 2 --set share=layers --output shared", tmp_path)[0] == 0
    assert_same_weights(weights_of(Path("shared/model")), straight)
