"""Test downloads against a local Hub server."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from support.hub_server import COMMIT, REPOSITORY, Hub, Revision, reachable, serve, set_hub_constants

from gptj_ft.checkpoints.base_model import default_download
from gptj_ft.checkpoints.download import DownloadRequest, download
from gptj_ft.errors import NetworkError, ResourceError, UsageError
from gptj_ft.system import paths
from gptj_ft.system.lock import LOCK, locked

SMALL = ("config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json", "vocab.json", "merges.txt")
UNWANTED = ("flax_model.msgpack", "tf_model.h5", "rust_model.ot", "model.onnx", "README.md", ".gitattributes")
LARGE = 100_000
CONFIG = {
    "model_type": "gptj", "vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16,
    "rotary_dim": 64, "activation_function": "gelu_new", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in (*SMALL, *UNWANTED):
        (folder / name).write_text(f'{{"file": "{name}"}}')
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("model.safetensors", "pytorch_model.bin"):
        (folder / name).write_bytes(hashlib.shake_256(name.encode()).digest(LARGE))
    return folder


@pytest.fixture
def hub(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with reachable(repository, monkeypatch) as running:
        yield running


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_needed_files_only_safetensors_preferred(hub: Hub, repository: Path) -> None:
    steps: list[tuple[int, int]] = []
    report = download(progress=lambda done, total: steps.append((done, total)))
    assert report.folder == paths.models() / "EleutherAI--gpt-j-6b"
    assert names(report.folder) == {*SMALL, "model.safetensors", "source.json"}
    assert sorted(hub.fetched()) == sorted(
        ["config.json", *SMALL, "model.safetensors"]
    )  # config.json first, too: is it a model?
    assert all((report.folder / name).read_bytes() == (repository / name).read_bytes() for name in hub.fetched())
    assert report.commit == COMMIT
    assert report.license == "apache-2.0"
    assert report.bytes == report.fetched == sum(file.bytes for file in report.files)
    assert steps[-1] == (report.bytes, report.bytes)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    source = json.loads((report.folder / "source.json").read_text())
    assert (source["repository"], source["commit"], source["license"]) == (REPOSITORY, COMMIT, "apache-2.0")


def test_bin_is_fallback_for_safetensors(hub: Hub, repository: Path) -> None:
    (repository / "model.safetensors").unlink()
    assert names(download().folder) == {*SMALL, "pytorch_model.bin", "source.json"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stem", "suffix"), [("model", "safetensors"), ("pytorch_model", "bin")])
def test_shards_are_fetched_with_index(hub: Hub, repository: Path, stem: str, suffix: str) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        (repository / name).unlink()
    weights = {f"{stem}.{suffix}.index.json", *(f"{stem}-0000{n}-of-00002.{suffix}" for n in (1, 2))}
    for name in (*weights, "other-00001-of-00002.bin"):
        (repository / name).write_text(name)
    assert names(download().folder) == {*SMALL, *weights, "source.json"}


def test_config_is_fetched_last(hub: Hub) -> None:
    download()
    assert hub.fetched()[-1] == "config.json"
    assert hub.fetched()[1:-1] == sorted(hub.fetched()[1:-1], key=[*SMALL[1:], "model.safetensors"].index)


def test_second_download_fetches_nothing(hub: Hub) -> None:
    report = download()
    hub.requests.clear()
    again = download()
    assert hub.fetched() == []
    assert (again.folder, again.files, again.fetched) == (report.folder, report.files, 0)


def test_dry_run_lists_and_writes_nothing(hub: Hub) -> None:
    report = download(dry_run=True)
    assert {file.name for file in report.files} == {*SMALL, "model.safetensors"}
    assert report.bytes > LARGE
    assert hub.fetched() == ["config.json"]
    assert not paths.home().exists()


def test_cut_connection_resumes_in_same_call(hub: Hub, repository: Path) -> None:
    hub.cut_after, hub.cuts = 30_500, 2
    folder = download().folder
    assert (folder / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
    assert ranges(hub) == [None, "bytes=30000-", "bytes=60000-"]


def test_second_process_does_not_download_into_the_same_folder(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with locked(folder, "downloading into"), pytest.raises(UsageError, match="is downloading into it; wait"):
        download(target=folder)
    assert [path.name for path in folder.iterdir()] == [LOCK], "nothing was written"
    download(target=folder)
    assert LOCK not in [path.name for path in folder.iterdir()]


def ranges(hub: Hub) -> list[str | None]:
    return [request.headers.get("range") for request in hub.requests if request.path.startswith("/cdn/")]


def test_next_call_resumes_partial_file(hub: Hub, repository: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > 60_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(progress=stop)
    folder = paths.download_folder(REPOSITORY)
    partial = (folder / "model.safetensors.partial").stat().st_size
    assert 50_000 < partial < LARGE
    assert not paths.is_model(folder)
    hub.requests.clear()
    report = download()
    assert ranges(hub) == [f"bytes={partial}-"]
    assert report.fetched < report.bytes - 50_000
    assert (folder / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
    assert names(folder) == {*SMALL, "model.safetensors", "source.json"}


def test_repeated_disconnects_are_network_error(hub: Hub) -> None:
    hub.cut_after, hub.cuts = 0, 1000
    with pytest.raises(NetworkError, match="type the same command again"):
        download()
    assert not paths.is_model(paths.download_folder(REPOSITORY))


def test_hash_mismatch_is_reported(hub: Hub) -> None:
    hub.damage = True
    with pytest.raises(NetworkError, match=r"config\.json arrived damaged"):
        download()
    hub.damage = False
    assert paths.is_model(download().folder)


def test_server_down_is_network_error(hub: Hub, tmp_path: Path) -> None:
    with serve(tmp_path) as other:
        pass
    with pytest.raises(NetworkError, match=f"no connection to {other.url}.*check the network"):
        download(DownloadRequest(endpoint=other.url))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (500, None, "answered 500 .*again later"),
        (503, None, "answered 503 .*again later"),
        (401, None, "answered 401 .*set HF_TOKEN"),
        (404, "RepoNotFound", "no repository EleutherAI/gpt-j-6b .*check the name"),
        (403, "GatedRepo", "is gated: accept its terms .*HF_TOKEN"),
        (403, None, "answered 403 .*set HF_TOKEN"),
        (429, None, "answered 429 .*wait some minutes"),
        (200, None, "does not answer as a Hugging Face Hub"),
    ],
)
def test_http_errors_become_one_actionable_line(hub: Hub, status: int, code: str | None, message: str) -> None:
    hub.status, hub.error_code = status, code
    with pytest.raises(NetworkError, match=message) as caught:
        download()
    assert "\n" not in str(caught.value)


def test_unknown_or_invalid_repository_is_reported(hub: Hub) -> None:
    with pytest.raises(NetworkError, match="no repository EleutherAI/gpt-k"):
        download(DownloadRequest("EleutherAI/gpt-k"))
    with pytest.raises(NetworkError, match="has no such revision"):
        download(DownloadRequest(revision="float17"))
    with pytest.raises(UsageError, match="'a/b/c' is not a repository's name"):
        download(DownloadRequest("a/b/c"))


@pytest.mark.parametrize("lacking", ["config.json", "weights"])
def test_repository_without_model_is_rejected(hub: Hub, repository: Path, lacking: str) -> None:
    for name in {"config.json": ["config.json"], "weights": ["model.safetensors", "pytorch_model.bin"]}[lacking]:
        (repository / name).unlink()
    with pytest.raises(UsageError, match=f"not a usable model: it has no {lacking}"):
        download()


def test_offline_reuses_download_without_requests(hub: Hub, forbid_network: Callable[[], None]) -> None:
    with pytest.raises(UsageError, match=r"EleutherAI/gpt-j-6b is not in .*--offline forbids"):
        download(offline=True)
    assert hub.requests == []
    report = download()
    hub.requests.clear()
    for wanted in (DownloadRequest(), DownloadRequest(revision=COMMIT[:7])):
        again = download(wanted, offline=True)
        assert (again.folder, again.files, again.commit, again.fetched) == (report.folder, report.files, COMMIT, 0)
    forbid_network()
    assert download().commit == COMMIT
    with pytest.raises(UsageError, match=r"revision float16 is not in .*HF_HUB_OFFLINE forbids"):
        download(DownloadRequest(revision="float16"))
    (report.folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"lacks model\.safetensors, and"):
        download(offline=True)
    assert hub.requests == []


def test_low_disk_fails_before_fetching(hub: Hub, set_free_space: Callable[[int], None]) -> None:
    set_free_space(1000)
    with pytest.raises(ResourceError, match=r"needs 0\.0 GB, but"):
        download()
    assert hub.fetched() == ["config.json"]


def test_foreign_folder_is_never_written(hub: Hub, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("mine")
    with pytest.raises(UsageError, match="mine exists and is no download"):
        download(target=tmp_path / "mine")
    download(target=tmp_path / "theirs")
    (repository / "merges.txt").write_text("another version")
    with pytest.raises(UsageError, match=f"theirs holds another version; to finish that one, name revision {COMMIT}"):
        download(target=tmp_path / "theirs")
    with pytest.raises(UsageError, match=r"cannot write .*vocab\.json"):
        download(target=repository / "vocab.json" / "folder")


def test_token_comes_from_environment_only(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("hf_stored")
    set_hub_constants(monkeypatch, HF_TOKEN_PATH=str(tmp_path / "token"))
    download(target=tmp_path / "a")
    assert not any("authorization" in request.headers for request in hub.requests)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    report = download(target=tmp_path / "b")
    assert {r.headers.get("authorization") for r in hub.requests if "/resolve/" in r.path} == {None, "Bearer hf_secret"}
    assert "hf_secret" not in repr(report) + (report.folder / "source.json").read_text()


def test_requests_reveal_nothing_about_caller(hub: Hub) -> None:
    download()
    agents = {request.headers["user-agent"] for request in hub.requests}
    assert all("torch" not in agent and "agent/" not in agent for agent in agents), agents
    assert all(request.path.startswith(("/api/models/", f"/{REPOSITORY}/", "/cdn/")) for request in hub.requests)


@pytest.mark.thorough
def test_hf_endpoint_is_respected(hub: Hub, tmp_path: Path) -> None:
    code = "from gptj_ft.checkpoints.download import download; print(download(dry_run=True).commit)"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == f"{COMMIT}\n"


@pytest.fixture
def float16(hub: Hub, repository: Path, tmp_path: Path) -> Path:
    """Add the branch `float16`."""
    folder = tmp_path / "float16"
    shutil.copytree(repository, folder)
    (folder / "model.safetensors").write_bytes(b"half" * (LARGE // 8))
    hub.branches["float16"] = Revision(folder, "f" * 40)
    return folder


def test_fp16_branch_gets_its_own_folder(hub: Hub, float16: Path, repository: Path) -> None:
    half, whole = download(DownloadRequest(variant="fp16")), download(DownloadRequest(variant="fp32"))
    assert half.folder == paths.models() / "EleutherAI--gpt-j-6b-fp16"
    assert (half.commit, whole.commit) == ("f" * 40, COMMIT)
    assert (half.folder / "model.safetensors").read_bytes() == (float16 / "model.safetensors").read_bytes()
    assert (whole.folder / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
    assert default_download() == whole.folder
    shutil.rmtree(whole.folder)
    assert default_download() == half.folder


def test_fp16_file_is_stored_under_plain_name(hub: Hub, repository: Path) -> None:
    (repository / "model.fp16.safetensors").write_bytes(b"half" * (LARGE // 8))
    folder = download(DownloadRequest(variant="fp16")).folder
    assert names(folder) == {*SMALL, "model.safetensors", "source.json"}
    assert (folder / "model.safetensors").read_bytes() == (repository / "model.fp16.safetensors").read_bytes()
    assert download(DownloadRequest(variant="fp16")).fetched == 0


def test_missing_variant_suggests_convert(hub: Hub, repository: Path) -> None:
    with pytest.raises(UsageError, match=r"has no fp16 variant: its weights are float32.*convert --dtype fp16"):
        download(DownloadRequest(variant="fp16"))
    (repository / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "float16"}))
    assert download(DownloadRequest(variant="fp16")).commit == COMMIT
    with pytest.raises(UsageError, match="has no fp32 variant: its weights are float16"):
        download(DownloadRequest(variant="fp32"))


def test_unsupported_model_fails_before_weights(hub: Hub, repository: Path) -> None:
    (repository / "config.json").write_text('{"model_type": "mpt"}')
    with pytest.raises(
        UsageError, match=r"^EleutherAI/gpt-j-6b/config\.json: this is a mpt model; supported: gptj, gpt2"
    ):
        download()
    assert hub.fetched() == ["config.json"]
    assert not paths.home().exists()


@pytest.mark.thorough
def test_killed_download_resumes_at_byte(hub: Hub, repository: Path) -> None:
    hub.stall_after = 61_000
    code = (
        "from huggingface_hub import constants\n"
        "constants.DOWNLOAD_CHUNK_SIZE = 1000\n"
        "from gptj_ft.checkpoints.download import download; download()"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    partial = paths.download_folder(REPOSITORY) / "model.safetensors.partial"
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        until = time.monotonic() + 60
        while not (partial.exists() and partial.stat().st_size > 50_000):
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    there = partial.stat().st_size
    assert 50_000 < there < LARGE
    hub.stall_after = None
    hub.requests.clear()
    report = download()
    assert ranges(hub) == [f"bytes={there}-"]
    assert report.fetched == report.bytes - there - sum((repository / name).stat().st_size for name in SMALL[1:])
    assert (report.folder / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()


def test_silent_server_times_out(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    set_hub_constants(monkeypatch, HF_HUB_DOWNLOAD_TIMEOUT=0.1)
    hub.stall_after = 0
    with pytest.raises(NetworkError, match=r"no connection to .*timed out.*type the same command again") as caught:
        download()
    assert "\n" not in str(caught.value)
    assert not paths.is_model(paths.download_folder(REPOSITORY))


def test_full_disk_during_download_is_reported(hub: Hub, fill_disk: Callable[..., None]) -> None:
    folder = paths.download_folder(REPOSITORY)
    download()
    (folder / "model.safetensors").unlink()
    fill_disk()
    with pytest.raises(ResourceError, match=r"no space left on the disk while writing .*make room"):
        download()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxy_error_hides_password(hub: Hub, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    hub.status = 407
    monkeypatch.setenv(f"{scheme.upper()}_PROXY", hub.url.replace("//", "//me:secret@"))
    huggingface_hub.close_session()
    with pytest.raises(NetworkError, match=r"407.*HTTPS_PROXY") as caught:
        download(DownloadRequest(endpoint=f"{scheme}://hub.invalid"))
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_mirror_error_hides_password(hub: Hub) -> None:
    hub.status = 503
    with pytest.raises(NetworkError, match="http://127") as caught:
        download(DownloadRequest(endpoint=hub.url.replace("//", "//me:secret@")))
    assert "secret" not in str(caught.value)


def test_token_is_not_sent_to_redirects(hub: Hub, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serve(repository) as storage:
        hub.storage = storage.url
        download()
    assert [request.path.rpartition("/")[2] for request in storage.requests] == ["model.safetensors"]
    assert not any("authorization" in request.headers for request in storage.requests)
    assert all(request.headers["authorization"] == "Bearer hf_secret" for request in hub.requests)


def test_rejected_token_is_not_shown(hub: Hub, shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.status = 403
    done = shell("download --json")
    assert done.code == NetworkError.exit_code
    assert "whether HF_TOKEN is a token that may read it" in done.err
    assert "hf_secret" not in done.out + done.err


def test_command_shows_files_license_space_next_step(hub: Hub, float16: Path, shell) -> None:
    done = shell("download --dry-run")
    assert "model.safetensors" in done.out
    assert "license apache-2.0" in done.said
    assert "would go into" in done.said
    assert shell("download").out.endswith("next: gptj-ft convert\n")
    assert "--variant fp8: expected fp32 or fp16" in shell("download --variant fp8").err
    assert shell("download --variant fp16 --json").json["commit"] == "f" * 40
