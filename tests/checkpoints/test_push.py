"""Test pushing a model folder to a local Hub server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import NOTES
from support.hub_server import COMMIT, Hub, Pushed, reachable

from gptj_ft.checkpoints.adapter import write_adapter
from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.download import Origin
from gptj_ft.checkpoints.metadata import ModelMetadata, TunedModel, metadata_files
from gptj_ft.checkpoints.push import files_to_push, push
from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.resolve import resolve
from gptj_ft.errors import DataError, NetworkError, UsageError

NAME = "me/mine"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with reachable(tmp_path / "nothing", monkeypatch) as running:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield running


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a tuned model among private files, with local paths in its config."""
    folder = make_tiny(tmp_path / "Acme" / "model", [note for note, _ in NOTES], seed=0)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    old = ModelMetadata(
        str(folder.parent / "base"), {"prompt": "{{ text }}"}, {"file": "/Acme/rows.jsonl", "rows": 3}, {}
    )
    (folder / "gptj_ft.json").write_text(json.dumps(old.to_dict()))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "name_or_path": str(folder)}))
    (folder / "rows.jsonl").write_text("private")
    (folder / ".env").write_text("private")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "state").write_text("private")
    return folder


def sent_to(hub: Hub) -> dict[str, bytes]:
    return hub.pushed[NAME].files


def test_push_sends_only_model_files(hub: Hub, model: Path) -> None:
    steps: list[tuple[int, int]] = []
    parcels = files_to_push(model)
    pushed = push(parcels, NAME, progress=lambda done, total: steps.append((done, total)))
    assert (pushed.url, pushed.commit, pushed.is_private) == (f"{hub.url}/{NAME}", COMMIT, True)
    sent = sent_to(hub)
    stays = {"rows.jsonl", ".env", "checkpoints"}
    assert set(sent) == {path.name for path in model.iterdir()} - stays == {parcel.name for parcel in parcels}
    cleaned = {"gptj_ft.json", "tokenizer_config.json"}
    assert all(content == (model / name).read_bytes() for name, content in sent.items() if name not in cleaned)
    assert steps[-1] == (sum(len(content) for content in sent.values()),) * 2
    assert hub.pushed[NAME].commits == ["Model, by gptj-ft"]


def test_pushed_files_name_no_local_paths(hub: Hub, model: Path) -> None:
    push(files_to_push(model), NAME)
    bodies = b"".join(request.body for request in hub.requests)
    assert not [name for name, content in sent_to(hub).items() if b"Acme" in content]
    assert b"Acme" not in bodies
    assert b"private" not in b"".join(sent_to(hub).values())
    tuning = json.loads(sent_to(hub)["gptj_ft.json"])
    assert (tuning["base_model"], tuning["data"], tuning["template"]) == ("", {"rows": 3}, {"prompt": "{{ text }}"})


def test_push_never_shows_token(hub: Hub, model: Path, shell) -> None:
    done = shell(f"convert {model} --push {NAME} --json")
    assert done.code == 0, done.err
    assert {request.headers.get("authorization") for request in hub.requests} == {None, "Bearer hf_secret"}
    assert not any("authorization" in request.headers for request in hub.requests if request.method == "PUT")
    assert "hf_secret" not in done.out + done.err


def test_missing_token_or_network_sends_nothing(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, forbid_network: Callable[[], None]
) -> None:
    with pytest.raises(UsageError, match="'mine' is not a repository name; write owner/name"):
        push(files_to_push(model), "mine")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match="set HF_TOKEN to a token with write access"):
        push(files_to_push(model), NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    forbid_network()
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        push(files_to_push(model), NAME)
    assert hub.requests == []


def test_dry_run_lists_files_without_requests(hub: Hub, model: Path, shell) -> None:
    done = shell(f"convert {model} --push {NAME} --dry-run --json")
    names = [file["name"] for file in done.json["files"]]
    assert {"config.json", "README.md", "model-00001-of-00004.safetensors"} <= set(names)
    assert done.json["stays"] == [".env", "checkpoints", "rows.jsonl"]
    left_out = {file["name"]: file["left_out"] for file in done.json["files"]}
    assert left_out["gptj_ft.json"] == ["base_model", "data"]
    shown = shell(f"convert {model} --push {NAME} --dry-run").said
    assert "would upload" in shown
    assert f"to {NAME}, private" in shown
    assert "not uploaded: .env, checkpoints, rows.jsonl" in shown
    assert hub.requests == []


def test_files_are_listed_before_upload(hub: Hub, model: Path, shell) -> None:
    hub.status = 503
    done = shell(f"convert {model} --push {NAME}")
    assert done.code == NetworkError.exit_code
    assert done.err.index(f"to {NAME}, private") < done.err.index("answered 503")


def test_public_repository_needs_public_option(hub: Hub, model: Path, shell) -> None:
    hub.pushed[NAME] = Pushed(private=False)
    with pytest.raises(UsageError, match="me/mine is public, so everybody would see the model: add --public"):
        push(files_to_push(model), NAME)
    assert hub.stored == {}
    assert sent_to(hub) == {}
    assert shell(f"convert {model} --push {NAME} --public").out.startswith(f"{hub.url}/{NAME}, public")
    assert shell(f"convert {model} --push me/other --public --json").json["is_private"] is False
    assert shell("convert --public").code == 2


def test_interrupted_push_resumes(hub: Hub, model: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        push(files_to_push(model), NAME, progress=stop)
    assert len(hub.stored) == 1
    assert sent_to(hub) == {}
    hub.requests.clear()
    push(files_to_push(model), NAME)
    assert len([request for request in hub.requests if request.method == "PUT"]) == 3
    assert len(hub.stored) == 4


def test_rejected_upload_is_one_line(hub: Hub, model: Path) -> None:
    hub.cuts = 1
    with pytest.raises(
        NetworkError, match=f"answered 403 for {NAME}; .*HF_TOKEN is a token that may write it"
    ) as caught:
        push(files_to_push(model), NAME)
    assert "\n" not in str(caught.value)
    assert "hf_secret" not in str(caught.value)


def test_non_models_and_links_are_rejected(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (model / "source.json").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=r"source\.json is a link to .*secret, out of the folder"):
        files_to_push(model)
    (model / "source.json").unlink()
    (model / "model-00003-of-00004.safetensors").write_bytes(b"cut")
    with pytest.raises(DataError, match=r"model-00003-of-00004\.safetensors"):
        files_to_push(model)
    with pytest.raises(UsageError, match=r"no config\.json"):
        files_to_push(tmp_path)


def test_pushed_adapter_names_its_hub_base(hub: Hub, model: Path, tmp_path: Path, shell) -> None:
    architecture, recipe = read_architecture(model), resolve({"method": "lora"}, environment={}).recipe
    (model / "source.json").write_text(Origin("EleutherAI/gpt-j-6b", COMMIT, "apache-2.0").to_text())
    metrics = {"steps": 1, "validation_loss": 1.0, "baseline_validation_loss": 2.0}
    files = metadata_files(TunedModel(recipe, model, architecture, {"rows": 1, "sha256": ""}, metrics), is_adapter=True)
    settings = {"r": 2, "lora_alpha": 2.0, "lora_dropout": 0.0, "target_modules": ["q_proj"], "fan_in_fan_out": False}
    matrices = {"lora_A": torch.zeros(2, 96), "lora_B": torch.zeros(96, 2)}
    layers = [
        {f"transformer.h.{n}.attn.q_proj.{name}.weight": matrix for name, matrix in matrices.items()} for n in (0, 1)
    ]
    write_adapter(tmp_path / "adapter", model, settings, layers, files)
    assert "Acme" in (tmp_path / "adapter" / "adapter_config.json").read_text()
    done = shell(f"convert {tmp_path}/adapter --push {NAME} --json")
    assert done.code == 0, done.err
    sent = sent_to(hub)
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "gptj_ft.json"} <= set(sent)
    assert json.loads(sent["adapter_config.json"])["base_model_name_or_path"] == "EleutherAI/gpt-j-6b"
    assert b"Acme" not in b"".join(sent.values())
    card = sent["README.md"].decode()
    for fact in ("base_model_relation: adapter", "| `lora.rank` | `16` |", "convert --merge . BASE merged"):
        assert fact in card, fact


def test_merged_push_sends_only_result(model: Path, shell) -> None:
    done = shell(f"convert {model} --merge {model} --push {NAME} --dry-run")
    assert done.code == 2
    assert "--push without DEST uploads SRC unchanged" in done.err
    for change in ("--dtype bf16", "--tokenizer folder", "--with-optimizer", "--config config.json"):
        done = shell(f"convert {model} {change} --push {NAME}")
        assert (done.code, "uploads SRC unchanged" in done.err) == (2, True), done.err


def test_push_is_refused_before_converting(
    hub: Hub, model: Path, tmp_path: Path, shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, said in (
        (f"--push {NAME} --to gguf", "leave out --to gguf"), (f"--push {NAME} --to mesh", "leave out --to mesh"),
        ("--push mine", "write owner/name"), (f"--push {NAME}", "set HF_TOKEN"),
    ):  # fmt: skip
        if "HF_TOKEN" in said:
            monkeypatch.delenv("HF_TOKEN")
        done = shell(f"convert {model} {tmp_path}/out {options}")
        assert (done.code, said in done.err) == (2, True), done.err
    assert [path.name for path in tmp_path.glob("*out*")] == []


def test_convert_and_push_in_one_command(hub: Hub, model: Path, tmp_path: Path, shell) -> None:
    done = shell(f"convert {model} {tmp_path}/half --dtype bf16 --push {NAME} --json")
    assert done.code == 0, done.err
    assert json.loads(sent_to(hub)["config.json"])["dtype"] == "bfloat16"
    weights = (tmp_path / "half" / "model-00002-of-00004.safetensors").read_bytes()
    assert sent_to(hub)["model-00002-of-00004.safetensors"] == weights
