"""Help at 80 columns, translated names of other systems, shell completion."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
from typer.main import get_command

from gptj_ft.cli.app import app
from gptj_ft.cli.options import SetOptions, takes_options
from gptj_ft.config.options import GROUPS, Recipe, flag_spec
from gptj_ft.config.presets import load_preset, preset_names
from gptj_ft.config.resolve import PEERS_NAMES, resolve
from gptj_ft.errors import UsageError
from gptj_ft.models.supported import TINY_MODELS

SUMMARY_WIDTH = 58


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every command of the program with the words that name it."""
    yield " ".join(path), command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*path, name))


COMMANDS = dict(commands(get_command(app)))


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_every_help_fits_80_columns(shell) -> None:
    for name, command in COMMANDS.items():
        for flag in ("--help", "--help-all"):
            if flag == "--help-all" and not any(flag in parameter.opts for parameter in command.params):
                continue
            done = shell(f"{name} {flag}")
            assert (done.code, done.err) == (0, ""), name
            assert max(map(len, done.out.splitlines())) <= 80, name
            for each in getattr(command, "commands", {}).values():
                assert each.get_short_help_str(200) in done.out, name
        summary = command.get_short_help_str(200)
        assert 10 < len(summary) <= SUMMARY_WIDTH or not name, (name, summary)
        assert not name or " " in name or command.epilog, f"{name} has no example"


def test_commands_are_grouped_with_an_example(shell) -> None:
    text = shell("--help").out
    start = text.partition("\nStart:\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in start.splitlines()] == [
        "download",
        "convert",
        "finetune",
        "search",
        "evaluate",
        "generate",
        "predict",
    ]
    assert text.index("Start:") < text.index("Data:") < text.index("Manage files:") < text.index("Examples:")
    assert "gptj-ft finetune --recipe summarization --data my.jsonl --model tiny" in text
    assert shell("--version").out.strip() == "0.1.0"


def test_every_help_example_parses() -> None:
    for name, command in COMMANDS.items():
        for line in (command.epilog or "").splitlines():
            program, *words = shlex.split(line)
            assert program == "gptj-ft"
            if name and "COMMAND" not in words:
                group = words[0] if " ".join(words[:2]) not in COMMANDS else " ".join(words[:2])
                COMMANDS[group].make_context(group, words[len(group.split()) :]).close()


def test_help_hides_advanced_options(shell) -> None:
    for line in ("finetune", "evaluate", "generate", "plan", "prepare-data"):
        first, whole = shell(f"{line} --help").out, shell(f"{line} --help-all").out
        assert len(first.splitlines()) < 60, line
        assert "More options" not in first, line
        assert "--help-all" in first, line
        assert "--precision" in whole or line == "prepare-data"
        assert "--device" in whole or line == "prepare-data"
        assert set(first.split()) <= set(whole.split()), line
    first = shell("finetune --help").out
    for flag in ("--recipe", "--data", "--model", "--lr", "--epochs", "--dry-run", "--resume", "--host-memory"):
        assert flag in first, flag
    assert "--optimizer-state" not in first


@pytest.mark.parametrize(
    ("line", "phrase"),
    [
        ("evaluate --help", "rows to measure on; default: the held-out rows of the run"),
        ("evaluate --help", "task; default: the task that the model was tuned for"),
        ("generate --help", "same seed, same samples"),
        ("generate --help", "task; default: the task that the model was tuned for"),
        ("finetune --help", "peak learning rate [default: the recipe's]"),
        ("finetune --help", "rows per optimizer step [default: the recipe's]"),
        ("finetune --help-all", "where the weights live (device: GPU memory, host: RAM)"),
    ],
)
def test_flag_help_fits_its_command(line: str, phrase: str, shell) -> None:
    assert phrase in shell(line).said


def test_help_omits_defaults_that_presets_replace(shell) -> None:
    set_by_presets = {key for name in preset_names() for key in load_preset(name)}
    shown = shell("finetune --help-all").out + shell("plan --help-all").out
    flags = {key for key in Recipe.model_fields if f"--{key.replace('_', '-')} " in shown}
    marked = {key for key in Recipe.model_fields if flag_spec(key).set_by_presets}
    assert set_by_presets & flags - marked - {"recipe", "map", "packing"} == set()


def test_foreign_option_names_suggest_ours(shell, tmp_path) -> None:
    for peer, ours in PEERS_NAMES.items():
        group, _, key = ours.rpartition(".")
        assert ours.startswith("--") or key in (GROUPS[group] if group else Recipe).model_fields, peer
        assert peer not in Recipe.model_fields or peer == "lora", "a flag of others, a group of options here"
    for typed, ours in (
        ("--learning_rate 1e-5", "use --lr (peak learning rate)"),
        ("--num-train-epochs 3", "use --epochs"),
        ("--per_device_train_batch_size 4", "use --batch-size"),
        ("--gradient_accumulation_steps 4", "use --batch-size"),
        ("--output_dir x", "use --output"),
        ("--save_steps 5", "use --save-every"),
        ("--eval_steps 5", "use --validate-every"),
        ("--max_seq_length 5", "use --max-length"),
        ("--warmup_ratio 0.1", "use --set warmup=VALUE"),
        ("--lora_r 8", "use --set lora.rank=VALUE"),
        ("--lora_alpha 8", "use --set lora.alpha=VALUE"),
        ("--bf16", "use --precision"),
        ("--resume_from_checkpoint x", "use --resume RUN"),
        ("--set learning_rate=1e-5", "unknown option 'learning_rate' (use 'lr': peak learning rate)"),
        ("--set lora.r=8", "(use 'lora.rank'"),
    ):
        done = shell(f"finetune {typed}")
        assert (done.code, ours in done.said) == (2, True), (typed, done.said)
    assert "did you mean" in shell("finetune --set epoch=3").said.lower()
    assert "--epochs" in shell("finetune --epoch 3").said
    config = tmp_path / "my.yaml"
    config.write_text("max_seq_length: 512\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"my\.yaml: unknown option 'max_seq_length' \(use 'max_length'"):
        resolve({}, config, environment={})
    with pytest.raises(UsageError, match=r"GPTJ_FT_LEARNING_RATE \(use 'lr'"):
        resolve({}, environment={"GPTJ_FT_LEARNING_RATE": "1"})


def test_foreign_command_names_suggest_ours(shell) -> None:
    for typed, ours in (("serve", "transformers serve"), ("export", "runs export"), ("train", "gptj-ft finetune")):
        done = shell(f"{typed} something")
        assert (done.code, ours in done.err) == (2, True), done.err
    assert "'finetune'" in shell("finetun").err


def test_shell_completes_commands_and_values(shell, monkeypatch, tmp_path) -> None:
    (tmp_path / "runs" / "qa-1").mkdir(parents=True)
    (tmp_path / "runs" / "qa-1" / "recipe.yaml").touch()
    (tmp_path / "home" / "models" / "gpt-j-6b").mkdir(parents=True)
    (tmp_path / "home" / "models" / "gpt-j-6b" / "config.json").touch()
    monkeypatch.setenv("_GPTJ_FT_COMPLETE", "complete_bash")
    for words, expected in (
        ("fine", {"finetune"}),
        ("finetune --recipe dial", {"dialogsum"}),
        ("finetune --resume ru", {"runs/qa-1"}),
        ("finetune --model gp", {"gpt-j-6b"}),
        ("evaluate runs/", {"runs/qa-1"}),
        ("generate --model t", set(TINY_MODELS)),
        ("runs verify r", {"runs/qa-1"}),
        ("recipes show summ", {"summarization"}),
    ):
        line = f"gptj-ft {words}"
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
        assert set(shell("").out.split()) == expected, words
    monkeypatch.delenv("_GPTJ_FT_COMPLETE")
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    assert "_GPTJ_FT_COMPLETE=complete_bash" in shell("--show-completion").out


def test_command_receives_only_options_that_are_set() -> None:
    got: list[object] = []

    def command(*, first: int = 1, options: SetOptions, last: bool = False) -> None:
        """Do nothing."""
        got.append((first, dict(options), last))

    call = takes_options("lr", "generation.top_k", "cache", "val_data", meanings={"lr": "how fast"})(command)
    assert list(signature(call).parameters) == ["first", "lr", "top_k", "cache", "val_data", "last", "help_all"]
    call(first=2, lr=0.5, top_k=None, cache=False, val_data=None, last=True)
    assert got == [(2, {"lr": 0.5, "cache": False}, True)]
    with pytest.raises(KeyError):
        takes_options("no_such_option")(command)
