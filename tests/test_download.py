"""Downloading, against a small Hub on this machine."""

import hashlib
import json
import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, REPOSITORY, Hub, reachable, serve
from huggingface_hub import constants

from gptj_ft import home, hub_files
from gptj_ft.download import download
from gptj_ft.errors import NetworkError, ResourceError, UsageError

SMALL = ("config.json", "generation_config.json", "tokenizer.json", "vocab.json", "merges.txt")
UNWANTED = ("flax_model.msgpack", "tf_model.h5", "rust_model.ot", "model.onnx", "README.md", ".gitattributes")
LARGE = 100_000


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in (*SMALL, *UNWANTED):
        (folder / name).write_text(f'{{"file": "{name}"}}')
    for name in ("model.safetensors", "pytorch_model.bin"):
        (folder / name).write_bytes(hashlib.shake_256(name.encode()).digest(LARGE))
    return folder


@pytest.fixture
def hub(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with reachable(repository, monkeypatch) as running:
        yield running


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_only_what_is_needed_is_fetched_and_safetensors_win(hub: Hub, repository: Path) -> None:
    steps: list[tuple[int, int]] = []
    report = download(progress=lambda done, total: steps.append((done, total)))
    assert report.folder == home.models() / "EleutherAI--gpt-j-6b"
    assert names(report.folder) == {*SMALL, "model.safetensors", "source.json"}
    assert sorted(hub.fetched()) == sorted([*SMALL, "model.safetensors"])
    assert all((report.folder / name).read_bytes() == (repository / name).read_bytes() for name in hub.fetched())
    assert report.commit == COMMIT
    assert report.license == "apache-2.0"
    assert report.bytes == report.fetched == sum(file.bytes for file in report.files)
    assert steps[-1] == (report.bytes, report.bytes)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    source = json.loads((report.folder / "source.json").read_text())
    assert (source["repository"], source["commit"], source["license"]) == (REPOSITORY, COMMIT, "apache-2.0")


def test_bin_is_fetched_where_there_are_no_safetensors(hub: Hub, repository: Path) -> None:
    (repository / "model.safetensors").unlink()
    assert names(download().folder) == {*SMALL, "pytorch_model.bin", "source.json"}


@pytest.mark.parametrize(("stem", "suffix"), [("model", "safetensors"), ("pytorch_model", "bin")])
def test_shards_are_fetched_with_their_index(hub: Hub, repository: Path, stem: str, suffix: str) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        (repository / name).unlink()
    weights = {f"{stem}.{suffix}.index.json", *(f"{stem}-0000{n}-of-00002.{suffix}" for n in (1, 2))}
    for name in (*weights, "other-00001-of-00002.bin"):
        (repository / name).write_text(name)
    assert names(download().folder) == {*SMALL, *weights, "source.json"}


def test_config_comes_last_so_that_half_a_download_is_no_model(hub: Hub) -> None:
    download()
    assert hub.fetched()[-1] == "config.json"


def test_a_second_download_fetches_nothing(hub: Hub) -> None:
    report = download()
    hub.requests.clear()
    again = download()
    assert hub.fetched() == []
    assert (again.folder, again.files, again.fetched) == (report.folder, report.files, 0)


def test_dry_run_lists_and_writes_nothing(hub: Hub) -> None:
    report = download(dry_run=True)
    assert {file.name for file in report.files} == {*SMALL, "model.safetensors"}
    assert report.bytes > LARGE
    assert hub.fetched() == []
    assert not home.home().exists()


def test_a_cut_connection_is_resumed_within_the_call(hub: Hub, repository: Path) -> None:
    hub.cut_after, hub.cuts = 30_500, 2
    folder = download().folder
    assert (folder / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
    assert ranges(hub) == [None, "bytes=30000-", "bytes=60000-"]


def ranges(hub: Hub) -> list[str | None]:
    return [request.headers.get("range") for request in hub.requests if request.path.startswith("/cdn/")]


def test_a_new_call_goes_on_where_the_last_one_stopped(hub: Hub, repository: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > 60_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(progress=stop)
    folder = home.download_folder(REPOSITORY)
    partial = (folder / "model.safetensors.partial").stat().st_size
    assert 50_000 < partial < LARGE
    assert not home.is_model(folder)
    hub.requests.clear()
    report = download()
    assert ranges(hub) == [f"bytes={partial}-"]
    assert report.fetched < report.bytes - 50_000
    assert (folder / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
    assert names(folder) == {*SMALL, "model.safetensors", "source.json"}


def test_a_connection_that_keeps_breaking_is_a_network_error(hub: Hub) -> None:
    hub.cut_after, hub.cuts = 0, 1000
    with pytest.raises(NetworkError, match="type the same command again"):
        download()
    assert not home.is_model(home.download_folder(REPOSITORY))


def test_a_damaged_transfer_is_found_by_its_hash(hub: Hub) -> None:
    hub.damage = True
    with pytest.raises(NetworkError, match=r"generation_config\.json arrived damaged"):
        download()
    hub.damage = False
    assert home.is_model(download().folder)


def test_a_server_that_is_down_is_a_network_error(hub: Hub, tmp_path: Path) -> None:
    with serve(tmp_path) as other:
        pass
    with pytest.raises(NetworkError, match=f"no connection to {other.url}.*check the network"):
        download(endpoint=other.url)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (500, None, "answered 500 .*again later"),
        (503, None, "answered 503 .*again later"),
        (401, None, "answered 401 .*set HF_TOKEN"),
        (404, "RepoNotFound", "no repository EleutherAI/gpt-j-6b .*check the name"),
        (403, "GatedRepo", "is gated: accept its terms .*HF_TOKEN"),
        (403, None, "answered 403 .*set HF_TOKEN"),
        (200, None, "does not answer as a Hugging Face Hub"),
    ],
)
def test_each_answer_of_the_server_is_one_line_that_says_what_to_do(
    hub: Hub, status: int, code: str | None, message: str
) -> None:
    hub.status, hub.error_code = status, code
    with pytest.raises(NetworkError, match=message) as caught:
        download()
    assert "\n" not in str(caught.value)


def test_an_unknown_repository_or_revision_or_a_wrong_name_is_said(hub: Hub) -> None:
    with pytest.raises(NetworkError, match="no repository EleutherAI/gpt-k"):
        download("EleutherAI/gpt-k")
    with pytest.raises(NetworkError, match="has no such revision"):
        download(revision="float17")
    with pytest.raises(UsageError, match="'a/b/c' is not a repository's name"):
        download("a/b/c")


@pytest.mark.parametrize("lacking", ["config.json", "weights"])
def test_a_repository_that_is_no_model_is_refused(hub: Hub, repository: Path, lacking: str) -> None:
    for name in {"config.json": ["config.json"], "weights": ["model.safetensors", "pytorch_model.bin"]}[lacking]:
        (repository / name).unlink()
    with pytest.raises(UsageError, match=f"not a model that can be used: it has no {lacking}"):
        download()


def test_offline_is_refused_without_a_request(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--offline"):
        download(offline=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        download()
    assert hub.requests == []


def test_too_little_disk_is_found_before_anything_is_fetched(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(hub_files.shutil, "disk_usage", lambda path: usage(0, 0, 1000))
    with pytest.raises(ResourceError, match=r"needs 0\.0 GB, but"):
        download()
    assert hub.fetched() == []


def test_a_folder_that_holds_something_else_is_never_written_to(hub: Hub, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("mine")
    with pytest.raises(UsageError, match="mine exists and is no download"):
        download(target=tmp_path / "mine")
    download(target=tmp_path / "theirs")
    (repository / "merges.txt").write_text("another version")
    with pytest.raises(UsageError, match=f"theirs holds another version; to finish that one name revision {COMMIT}"):
        download(target=tmp_path / "theirs")
    with pytest.raises(UsageError, match=r"cannot write .*vocab\.json"):
        download(target=repository / "vocab.json" / "folder")


def test_the_token_comes_from_the_environment_only_and_stays_with_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("hf_stored")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    download(target=tmp_path / "a")
    assert not any("authorization" in request.headers for request in hub.requests)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    report = download(target=tmp_path / "b")
    assert {r.headers.get("authorization") for r in hub.requests if "/resolve/" in r.path} == {None, "Bearer hf_secret"}
    assert "hf_secret" not in repr(report) + (report.folder / "source.json").read_text()


def test_nothing_is_told_about_the_caller(hub: Hub) -> None:
    download()
    agents = {request.headers["user-agent"] for request in hub.requests}
    assert all("torch" not in agent and "agent/" not in agent for agent in agents), agents
    assert all(request.path.startswith(("/api/models/", f"/{REPOSITORY}/", "/cdn/")) for request in hub.requests)


def test_hf_endpoint_is_respected_in_a_fresh_process(hub: Hub, tmp_path: Path) -> None:
    code = "from gptj_ft.download import download; print(download(dry_run=True).commit)"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == f"{COMMIT}\n"
