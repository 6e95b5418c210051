"""Test that the cache of tokenized rows is used exactly when nothing relevant has changed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny_tokenizer import make_tokenizer

from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import resolve
from gptj_ft.data import load as cache
from gptj_ft.data.dataset import Prepared, save_dataset
from gptj_ft.data.load import prepare_once, read_or_prepare
from gptj_ft.data.prepare import TokenizeJob, tokenize_rows
from gptj_ft.data.readers.source import ROWS_MANIFEST
from gptj_ft.errors import UsageError
from gptj_ft.system.paths import make_home


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"document": f"D {n}.", "summary": f"S {n}."}) + "\n" for n in range(30)))
    return path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Collect the paths that `prepare` has tokenized, in a new home folder."""
    monkeypatch.setenv("GPTJ_FT_HOME", str(tmp_path / "home"))
    return []


def prepare(recipe: Recipe, tokenizer, rows: Path, made: list[Path]) -> Prepared:
    def tokenize(job: TokenizeJob, progress) -> Prepared:
        made.append(job.source.path)
        return tokenize_rows(job, progress)

    return prepare_once(TokenizeJob.of(recipe, tokenizer, rows, 50400), tokenize=tokenize)


def recipe(**options: object) -> Recipe:
    return resolve({"recipe": "summarization", **options}, environment={}).recipe


def test_equal_rows_are_prepared_once(rows: Path, made: list[Path]) -> None:
    tokenizer = make_tokenizer()
    first = prepare(recipe(), tokenizer, rows, made)
    again = prepare(recipe(lr=1e-3, batch_size=2, seed=9), tokenizer, rows, made)
    assert made == [rows]
    assert list(again.rows) == list(first.rows)
    assert again.report == first.report
    assert len(cache.cache_entries()) == 1


def test_cached_rows_accept_no_other_options(rows: Path, made: list[Path]) -> None:
    tokenizer, labelled = make_tokenizer(), {"recipe": "classification", "map": "text=document,label=summary"}
    options = recipe(**labelled)
    saved = prepare(options, tokenizer, rows, made)
    save_dataset(saved, Path("rows.prepared"))
    packed = options.model_copy(update={"packing": "joined"})
    for path in (rows, Path("rows.prepared")):
        read_or_prepare(TokenizeJob.of(options, tokenizer, path, 50400))
        with pytest.raises(UsageError, match="packing: windows of several documents are for task=language-model"):
            read_or_prepare(TokenizeJob.of(packed, tokenizer, path, 50400))
    assert made == [rows]


@pytest.mark.parametrize("change", ["data", "tokenizer", "template", "limit", "map", "place"])
def test_relevant_change_prepares_again(change: str, rows: Path, made: list[Path]) -> None:
    prepare(recipe(), make_tokenizer(), rows, made)
    tokenizer, other = make_tokenizer(), recipe()
    if change == "data":
        rows.write_text(rows.read_text().replace("D 3.", "E 3."))
    elif change == "tokenizer":
        tokenizer = make_tokenizer(vocab_size=300)
    elif change == "template":
        other = recipe(prompt="Sum up: {{ document }}\n\nSummary:")
    elif change == "limit":
        other = recipe(max_length=512)
    elif change == "map":
        other = recipe(map="summary=document,document=summary")
    else:
        rows = rows.rename(rows.with_name("others.jsonl"))
    prepare(other, tokenizer, rows, made)
    assert len(made) == 2


def test_disabled_cache_keeps_nothing(rows: Path, made: list[Path]) -> None:
    for _ in range(2):
        prepare(recipe(cache=False), make_tokenizer(), rows, made)
    assert len(made) == 2
    assert not cache.cache_entries()


def test_damaged_cache_entry_is_rebuilt(rows: Path, made: list[Path]) -> None:
    prepare(recipe(), make_tokenizer(), rows, made)
    (kept,) = cache.cache_entries()
    (kept.folder / ROWS_MANIFEST).write_text("{")
    prepare(recipe(), make_tokenizer(), rows, made)
    assert len(made) == 2
    prepare(recipe(), make_tokenizer(), rows, made)
    assert len(made) == 2


@pytest.mark.parametrize("problem", ["full disk", "file in place of the folder"])
def test_unwritable_cache_only_repeats_work(
    problem: str, rows: Path, made: list[Path], fill_disk: Callable[..., None]
) -> None:
    make_home()
    if problem == "full disk":
        fill_disk()
    else:
        cache.cache_folder().write_text("")
    for _ in range(2):
        assert len(prepare(recipe(), make_tokenizer(), rows, made).rows) == 30
    assert len(made) == 2


# Prepares the rows, and gives what it has written its name only when the other process has written the same, too.
ONE_OF_TWO = """
import sys, time
from pathlib import Path
from test_cache import recipe
from support.tiny_tokenizer import make_tokenizer
from gptj_ft.data.table import TokenTable
from gptj_ft.data.load import prepare_once
from gptj_ft.data.prepare import TokenizeJob

me, other = (Path(f"written-{name}") for name in sys.argv[1:3])
write = TokenTable.save

def write_and_wait(rows, path):
    write(rows, path)
    me.touch()
    deadline = time.monotonic() + 60
    while not other.exists():
        assert time.monotonic() < deadline, "the other process has not written"
        time.sleep(0.01)

TokenTable.save = write_and_wait
made = prepare_once(TokenizeJob.of(recipe(), make_tokenizer(), Path("rows.jsonl"), 50400))
print(len(made.rows), sum(map(sum, made.rows["input_ids"])), made.rows.path)
"""


@pytest.mark.thorough
def test_concurrent_preparations_keep_one_result(rows: Path, made: list[Path]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_TWO, *names], cwd=rows.parent, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for names in ("ab", "ba")
    ]  # fmt: skip
    ends = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    (kept,) = cache.cache_entries()
    assert ends[0][0] == ends[1][0], "they have gone on with different rows"
    assert ends[0][0].startswith("30 ")
    assert str(kept.folder) in ends[0][0]
    assert [path.name for path in cache.cache_folder().iterdir()] == [kept.folder.name]
    prepare(recipe(), make_tokenizer(), rows, made)
    assert not made


def test_stale_drafts_are_removed_live_ones_stay(rows: Path, made: list[Path]) -> None:
    prepare(recipe(), make_tokenizer(), rows, made)
    (kept,) = cache.cache_entries()
    name = kept.folder.name
    cache.remove_prepared_rows()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    here = platform.node()
    drafts = {
        at: cache.cache_folder() / f".{name}.{at}.writing" for at in (f"{here}.{ended.pid}", f"{here}.1", "elsewhere.1")
    }
    for draft in drafts.values():
        draft.mkdir(parents=True)
    prepare(recipe(), make_tokenizer(), rows, made)
    left = {path.name for path in cache.cache_folder().iterdir()}
    assert left == {name, drafts[f"{here}.1"].name, drafts["elsewhere.1"].name}


def test_cache_command_lists_and_clears(shell, rows: Path) -> None:
    command = f"prepare-data --data {rows} --recipe summarization --model tiny --show 0"
    assert shell(f"{command} --output a").code == 0
    listed = shell("cache list --json").json["kept"]
    assert [(each["rows"], each["files"]) for each in listed] == [(30, [str(rows)])]
    assert "rows.jsonl" in shell("cache list").out
    assert shell(f"{command} --output b").code == 0
    assert (Path("a") / ROWS_MANIFEST).read_text() == (Path("b") / ROWS_MANIFEST).read_text()
    assert shell("cache clear").code == 0
    assert shell("cache list --json").json["kept"] == []
