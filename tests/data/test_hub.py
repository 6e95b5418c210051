"""Test datasets of the Hub against a local server, and the choice of files against `datasets`."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from huggingface_hub import constants
from pyarrow import parquet
from support.hub_server import CONVERTED, Hub, Revision, reachable, set_hub_constants

from gptj_ft.config.presets import load_options
from gptj_ft.data.hub_dataset import datasets, fetch, layout_of, local_folder, parse_reference
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.source import identify
from gptj_ft.errors import NetworkError, Unreachable, UsageError
from gptj_ft.system import hub as hub_module
from gptj_ft.system import hub_download, paths

NAME = "some/notes"
FIRST, SECOND, THIRD = ("1" * 40, "2" * 40, "3" * 40)


def parts(names: str, card: dict[str, Any] | None = None) -> dict[str, dict[str, tuple[str, ...]]]:
    return {name: dict(splits) for name, splits in layout_of(NAME, names.split(), card or {}).configs.items()}


def configs(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"configs": list(entries)}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            "README.md data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet data/odd-00000-of-00001.csv",
            {"default": {"train": 2, "odd": 1}},
        ),
        ("train.csv dev.csv test_v2.csv", {"default": {"train": 1, "validation": 1, "test": 1}}),
        ("train.jsonl.gz val.jsonl.zst", {"default": {"train": 1, "validation": 1}}),
        ("train/a.json train/b.json eval/a.json", {"default": {"train": 2, "test": 1}}),
        ("a.parquet sub/b.parquet", {"default": {"train": 2}}),
        ("pretraining.jsonl restrain.jsonl", {"default": {"train": 2}}),
        ("en/train.jsonl fr/train.jsonl", {"en": {"train": 1}, "fr": {"train": 1}}),
        ("cola/test-00000-of-00001.parquet", {"cola": {"test": 1}}),
        ("en/train/0000.parquet en/partial-train/0000.parquet", {"en": {"train": 1, "partial-train": 1}}),
        ("LICENSE.txt requirements.txt", {}),
        ("train.txt LICENSE.txt", {"default": {"train": 1}}),
        ("rows.csv notes.py", {}),
        ("dataset_infos.json config.json .hidden/train.json train.zip", {}),
    ],
)
def test_names_tell_splits_and_configurations(names: str, expected: dict[str, dict[str, int]]) -> None:
    found = {config: {s: len(files) for s, files in splits.items()} for config, splits in parts(names).items()}
    assert found == expected


def test_best_format_of_a_split_wins() -> None:
    names = "train.csv train.jsonl data/train-00000-of-00001.parquet test.csv test.json.gz"
    assert parts(names)["default"] == {"train": ("data/train-00000-of-00001.parquet",), "test": ("test.json.gz",)}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"data_files": "x/a.csv"}, {"train": ("x/a.csv",)}),
        ({"data_files": ["*.csv", "y/*"]}, {"train": ("top.csv", "y/c.csv")}),
        ({"data_files": [{"split": "s", "path": ["x/?.csv", "**/d.csv"]}]}, {"s": ("x/a.csv", "x/b.csv", "x/z/d.csv")}),
        ({"data_files": [{"split": "s", "path": "x/**"}]}, {"s": ("x/a.csv", "x/b.csv", "x/z/d.csv")}),
        ({"data_dir": "y", "data_files": "*.csv"}, {"train": ("y/c.csv",)}),
        ({"data_dir": "y"}, {"train": ("y/c.csv",)}),
        ({"data_files": [{"split": "s", "path": "gone-*"}, 7, {"path": None}]}, {}),
        ({"data_files": "hf://datasets/x/y/z.csv"}, {}),
    ],
)
def test_card_names_files_of_a_configuration(entry: dict[str, Any], expected: dict[str, Any]) -> None:
    names = "top.csv x/a.csv x/b.csv x/z/d.csv y/c.csv train.py"
    assert parts(names, configs({"config_name": "c", **entry})) == {"c": expected}


def test_card_patterns_match_like_datasets(tmp_path: Path) -> None:
    from datasets.data_files import resolve_pattern

    names = "a.csv b-1.csv x/a.csv x/b-00000-of-00001.csv x/y/a.csv x/y/z/c.csv train-1/t.csv"
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a\n1\n")
    for pattern in ("*.csv", "*", "**", "x/*", "x/**", "**/a.csv", "x/**/*.csv", "x/b-*", "?.csv", "[ab]*", "*/[!a]*"):
        theirs = {Path(path).relative_to(tmp_path).as_posix() for path in resolve_pattern(pattern, str(tmp_path))}
        ours = parts(names, configs({"config_name": "c", "data_files": pattern}))["c"].get("train", ())
        assert set(ours) == theirs, pattern


def test_named_splits_match_datasets(tmp_path: Path) -> None:
    from datasets.data_files import DataFilesDict, get_data_patterns

    for number, names in enumerate(
        (
            "data/train-00000-of-00001.csv data/other-00000-of-00001.csv",
            "train.csv dev.csv test.csv",
            "my_training_rows.csv my.validation.csv",
            "train/1.csv train/2.csv val/3.csv",
            "data/train_1.csv data/evaluation-2.csv",
            "one.csv two.csv",
        )
    ):
        folder = tmp_path / str(number)
        for name in names.split():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("a\n1\n")
        found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
        theirs = {str(s): {Path(f).relative_to(folder).as_posix() for f in files} for s, files in found.items()}
        assert {split: set(files) for split, files in parts(names)["default"].items()} == theirs, names


def test_default_configuration_is_single_or_marked() -> None:
    def default(*entries: dict[str, Any]) -> str | None:
        return layout_of(NAME, ["train.csv"], configs(*entries)).default

    a, b = {"config_name": "a"}, {"config_name": "b"}
    assert default(a) == "a"
    assert default(a, b) is None
    assert default(a, {**b, "default": True}) == "b"
    assert default(a, {"config_name": "default"}) == "default"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("hub:o/n", "hub:o/n:train"),
        ("hub:o/n/c:dev@main", "hub:o/n/c:dev@main"),
        ("hub:o/n@refs/pr/1", "hub:o/n:train@refs/pr/1"),
        ("hub:o/n/3.0.0", "hub:o/n/3.0.0:train"),
    ],
)
def test_references_have_full_and_short_forms(data: str, expected: str) -> None:
    assert str(parse_reference(data)) == expected


@pytest.mark.parametrize("data", ["hub:", "hub:name", "hub:/n", "hub:o/", "hub:o/n:", "hub:o/n@", "hub:o//n"])
def test_malformed_reference_is_rejected(data: str) -> None:
    with pytest.raises(UsageError, match="write hub:owner/name"):
        parse_reference(data)


def write_split(path: Path, count: int, word: str) -> None:
    """Write rows as parquet, large enough for the Hub's LFS storage."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"note": f"The {word} number {n} waits." + f" {n * 7919 % 997}" * 40, "short_summary": f"{word} {n}."}
            for n in range(count)]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="none")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a dataset of two training files, a validation file, and other files."""
    folder = tmp_path / "repository"
    for part in range(2):
        write_split(folder / f"data/train-0000{part}-of-00002.parquet", 60, "parcel")
    write_split(folder / "data/validation-00000-of-00001.parquet", 12, "letter")
    (folder / "README.md").write_text("notes")
    (folder / "train.csv").write_text("note,short_summary\na,b\n")
    with reachable(tmp_path / "no-model", monkeypatch) as running:
        running.datasets[NAME] = {"main": Revision(folder, FIRST)}
        monkeypatch.setattr(hub_module, "_closed_here", False)
        yield running


@pytest.fixture
def said() -> list[str]:
    return []


def disable_hub_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the constant that `huggingface_hub` reads from the environment on import."""
    set_hub_constants(monkeypatch, HF_HUB_OFFLINE=True)


@pytest.fixture
def typed(shell, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Run a command whose environment does not mention the network."""

    def run(line: str) -> Any:
        disable_hub_library(monkeypatch)  # as if imported after `close_network`
        for name in hub_module.OFFLINE:
            monkeypatch.setenv(name, "0")
        return shell(line)

    return run


def rows_of(pinned: str) -> list[str]:
    return [row.values["short_summary"] for row in read_rows(identify(local_folder(pinned)))]


def test_only_files_of_the_split_are_downloaded(hub: Hub, said: list[str]) -> None:
    steps: list[tuple[int, int]] = []
    pinned = fetch(f"hub:{NAME}", False, said.append, lambda done, total: steps.append((done, total)))
    assert pinned == f"hub:{NAME}/default:train@{FIRST}"
    assert hub.fetched() == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert local_folder(pinned) == paths.home() / "datasets" / f"some--notes@{FIRST}" / "default" / "train"
    assert rows_of(pinned) == [f"parcel {n}." for n in range(60)] * 2
    assert steps[-1][0] == steps[-1][1] > 0
    assert "2 files" in said[0]
    assert rows_of(fetch(f"hub:{NAME}:validation", False, said.append)) == [f"letter {n}." for n in range(12)]


def test_second_use_downloads_nothing(hub: Hub, said: list[str]) -> None:
    pinned = fetch(f"hub:{NAME}", False, said.append)
    hub.requests.clear()
    assert fetch(f"hub:{NAME}", False, said.append) == pinned
    assert [request.path for request in hub.requests] == [f"/api/datasets/{NAME}"]
    hub.requests.clear()
    assert fetch(pinned, False, said.append) == pinned
    assert hub.requests == [], "a commit never changes, so there is nothing to ask"


def test_new_commit_keeps_the_old_one(hub: Hub, said: list[str], tmp_path: Path) -> None:
    old = fetch(f"hub:{NAME}", False, said.append)
    write_split(tmp_path / "new" / "train.parquet", 5, "box")
    hub.datasets[NAME] = {"main": Revision(tmp_path / "new", SECOND)}
    new = fetch(f"hub:{NAME}", False, said.append)
    assert (len(rows_of(old)), len(rows_of(new))) == (120, 5)
    assert fetch(f"hub:{NAME}", True, said.append) == new


@pytest.mark.parametrize("way", ["--offline", "down", "HF_HUB_OFFLINE", "503"])
def test_offline_use_takes_last_download(way: str, hub: Hub, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="has not been downloaded yet, and --offline forbids it"):
        fetch(f"hub:{NAME}", True, said.append)
    pinned = fetch(f"hub:{NAME}", False, said.append)
    said.clear()
    hub.requests.clear()
    if way == "down":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    elif way == "HF_HUB_OFFLINE":
        disable_hub_library(monkeypatch)
    elif way == "503":
        hub.status = 503
    assert fetch(f"hub:{NAME}", way == "--offline", said.append) == pinned
    assert FIRST in said[0]
    assert "as downloaded on 20" in said[0]
    assert (len(hub.requests) > 0) == (way == "503")
    with pytest.raises((UsageError, Unreachable)):
        fetch(f"hub:{NAME}:validation", way == "--offline", said.append)


def test_interrupted_download_resumes(hub: Hub, said: list[str]) -> None:
    def stop(done: int, total: int) -> None:
        if done > 0.7 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(f"hub:{NAME}", False, said.append, stop)
    with pytest.raises(UsageError, match="is not on this machine"):
        local_folder(f"hub:{NAME}")
    hub.requests.clear()
    assert len(rows_of(fetch(f"hub:{NAME}", False, said.append))) == 120
    assert hub.fetched() == ["train-00001-of-00002.parquet"]
    assert any("range" in request.headers for request in hub.requests)


def test_removed_files_are_downloaded_again(hub: Hub, said: list[str]) -> None:
    pinned = fetch(f"hub:{NAME}", False, said.append)
    next(local_folder(pinned).rglob("*-00001-*.parquet")).unlink()
    hub.requests.clear()
    assert len(rows_of(fetch(pinned, False, said.append))) == 120
    assert hub.fetched() == ["train-00001-of-00002.parquet"]


def test_several_configurations_are_listed(hub: Hub, said: list[str], tmp_path: Path) -> None:
    card = configs(
        *({"config_name": c, "data_files": [{"split": "train", "path": f"{c}/t*"}]} for c in ("de", "en/us"))
    )
    for name in ("de", "en/us"):
        write_split(tmp_path / "both" / name / "t.parquet", 3, name)
    hub.datasets[NAME] = {"main": Revision(tmp_path / "both", FIRST, card)}
    with pytest.raises(UsageError, match=f"has several configurations: de, en/us; choose one, e.g. hub:{NAME}/de"):
        fetch(f"hub:{NAME}", False, said.append)
    with pytest.raises(UsageError, match=r"no configuration 'dee' \(did you mean 'de'\?\); there are de, en/us"):
        fetch(f"hub:{NAME}/dee", False, said.append)
    assert hub.fetched() == []
    assert rows_of(fetch(f"hub:{NAME}/en/us", False, said.append))[0] == "en/us 0."


def test_missing_split_lists_existing_ones(hub: Hub, said: list[str]) -> None:
    with pytest.raises(UsageError, match=r"no split 'test'; there are train, validation: write hub:some/notes:train"):
        fetch(f"hub:{NAME}:test", False, said.append)


def test_script_is_rejected_unless_hub_converted(hub: Hub, said: list[str], tmp_path: Path) -> None:
    scripted = tmp_path / "scripted"
    scripted.mkdir()
    (scripted / "notes.py").write_text("raise SystemExit('run')")
    hub.datasets[NAME] = {"main": Revision(scripted, FIRST)}
    with pytest.raises(UsageError, match=r"has only a loading script \(notes.py\).* `to_parquet`, and name the files"):
        fetch(f"hub:{NAME}", False, said.append)
    for config in ("large", "small"):
        write_split(tmp_path / f"converted/{config}/train/0000.parquet", 4, config)
    hub.datasets[NAME][CONVERTED] = Revision(tmp_path / "converted", THIRD)
    with pytest.raises(UsageError, match="several configurations: large, small"):
        fetch(f"hub:{NAME}", False, said.append)
    pinned = fetch(f"hub:{NAME}/small", False, said.append)
    assert (pinned, len(rows_of(pinned))) == (f"hub:{NAME}/small:train@{THIRD}", 4)
    with pytest.raises(UsageError, match="no split 'test'; there are train: write hub:some/notes/small:train"):
        fetch(f"hub:{NAME}/small:test", False, said.append)
    with pytest.raises(UsageError, match="only a loading script"):  # the conversion is of the main branch
        fetch(f"hub:{NAME}/small@{FIRST}", False, said.append)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "GatedRepo", "some/notes is gated: accept its terms at .*/datasets/some/notes, then set HF_TOKEN"),
        (401, "RepoNotFound", "no repository some/notes .*if it is private, set HF_TOKEN"),
    ],
)
def test_missing_access_is_reported_despite_cache(
    hub: Hub, said: list[str], status: int, code: str, message: str
) -> None:
    fetch(f"hub:{NAME}", False, said.append)
    hub.status, hub.error_code = status, code
    with pytest.raises(NetworkError, match=message):
        fetch(f"hub:{NAME}", False, said.append)


def test_names_leaving_the_folder_are_ignored(hub: Hub) -> None:
    hub.datasets[NAME]["main"].unsafe_files = [
        {"rfilename": name, "size": 1, "blobId": "0"}
        for name in ("../train.parquet", "/train.parquet", "data/../../train.parquet")
    ]
    assert len(hub_download.look_up(NAME, kind="dataset").files) == 5


def test_configuration_cannot_leave_the_folder(hub: Hub, said: list[str], tmp_path: Path) -> None:
    card = configs({"config_name": "..", "data_files": "train.csv"})
    hub.datasets[NAME]["main"].card = card
    pinned = fetch(f"hub:{NAME}", False, said.append)
    assert local_folder(pinned).resolve().is_relative_to(datasets() / f"some--notes@{FIRST}")


def test_commands_accept_a_hub_reference(hub: Hub, typed) -> None:
    done = typed(f"prepare-data --data hub:{NAME}:validation --recipe summarization --model tiny --json")
    assert done.code == 0, done.err
    assert (done.json["folder"], done.json["rows_kept"]) == ("some-notes_validation.prepared", 12)
    assert FIRST in json.dumps(done.json)
    line = (
        f"finetune --recipe summarization --model tiny --max-steps 1 --data hub:{NAME} --val-data hub:{NAME}:validation"
    )
    done = typed(f"{line} --output out")
    assert done.code == 0, done.err
    saved = load_options(Path("out/recipe.yaml"))
    assert saved["data"] == f"hub:{NAME}/default:train@{FIRST}"
    assert saved["val_data"] == f"hub:{NAME}/default:validation@{FIRST}"
    hub.requests.clear()
    limits = "--limit 2 --baseline none --set generation.max_new_tokens=2 --json"
    done = typed(f"evaluate out --data hub:{NAME}:validation {limits}")
    assert (done.code, done.json["model"]["rows"]) == (0, 2), done.err
    assert len(hub.requests) == 1
    assert typed(f"evaluate out --data hub:{NAME}:validation --offline {limits}").code == 0
    assert typed(f"plan --recipe summarization --model tiny --data {saved['data']}").code == 0
    assert len(hub.requests) == 1


def test_hub_errors_have_exit_codes(hub: Hub, typed, shell, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "prepare-data --recipe summarization --model tiny --data"
    done = typed(f"{line} hub:some/thing")
    assert (done.code, "no repository some/thing" in done.err) == (5, True)
    done = typed(f"{line} hub:{NAME}:tset")
    assert (done.code, "no split 'tset'" in done.err) == (2, True)
    done = typed(f"{line} hub:{NAME} --offline")
    assert (done.code, "--offline forbids it" in done.err) == (2, True)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    disable_hub_library(monkeypatch)
    done = shell(f"{line} hub:{NAME}")
    assert (done.code, "HF_HUB_OFFLINE, which is set in the environment, forbids it" in done.err) == (2, True)
    assert hub.requests == []


def test_missing_file_suggests_hub_reference(shell, tmp_path: Path) -> None:
    line = "prepare-data --recipe summarization --model tiny --data"
    assert f"for a dataset on the Hugging Face Hub write hub:{NAME}" in shell(f"{line} {NAME}").err
    for data in ("some/notes.jsonl", "notes", "/some/notes", "a/b/c"):
        assert "hub:" not in shell(f"{line} {data}").err
    Path("some").mkdir()
    Path("some/note").touch()
    assert "did you mean 'note'" in shell(f"{line} {NAME}").err


def test_sockets_open_only_for_hub_references(
    hub: Hub, typed, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    make = socket.socket.__init__

    def watched(self: socket.socket, family: int = -1, *rest: object, **named: object) -> None:
        if family != socket.AF_UNIX:
            opened.append(family)
        make(self, family, *rest, **named)

    monkeypatch.setattr(socket.socket, "__init__", watched)
    run = "--recipe summarization --model tiny --max-steps 1"
    for line in (
        "prepare-data --data rows.jsonl --recipe summarization --model tiny",
        f"finetune {run} --data rows.jsonl --output out",
        "evaluate out --data rows.jsonl --limit 2 --set generation.max_new_tokens=2",
        "generate text --model out --max-new-tokens 2",
        "plan --recipe summarization --model tiny --data rows.jsonl",
        f"finetune {run} --data {NAME}",
    ):
        done = typed(line)
        assert done.code == (2 if NAME in line else 0), done.err
        assert constants.HF_HUB_OFFLINE
        assert not opened, line
    assert hub.requests == []
    assert typed(f"plan --recipe summarization --model tiny --data hub:{NAME}").code == 0
    assert opened, "the watch sees nothing"
    assert constants.HF_HUB_OFFLINE, "the network is closed again"
    monkeypatch.setenv("GPTJ_FT_DATA", f"hub:{NAME}:validation")
    assert typed("plan --recipe summarization --model tiny").code == 0
    assert hub.fetched()[-1].startswith("validation")


def test_hub_notes_contain_no_token(hub: Hub, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(f"hub:{NAME}", False, said.append)
    assert all("hf_secret" not in path.read_text() for path in datasets().glob("*.json"))
    assert json.loads(next(datasets().glob("*.json")).read_text())["pinned"].endswith(FIRST)
    assert {r.headers.get("authorization") for r in hub.requests if "/cdn/" not in r.path} == {"Bearer hf_secret"}
