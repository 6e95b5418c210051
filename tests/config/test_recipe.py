"""Options: one home, one precedence, nothing unknown accepted."""

from __future__ import annotations

import re
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gptj_ft.api import resolved_options
from gptj_ft.config.options import GROUPS, Options, Recipe, meaning_of
from gptj_ft.config.presets import load_preset, preset_names
from gptj_ft.config.resolve import build, dump_recipe, resolve
from gptj_ft.config.run_folder import Run, recipe_digest
from gptj_ft.config.yaml import parse
from gptj_ft.data.columns import recipe_fields
from gptj_ft.data.template import fields_of
from gptj_ft.errors import DataError, UsageError

NOWHERE: dict[str, str] = {}


def accepts(options: type[Options], name: str, value: object) -> bool:
    try:
        options.model_validate({name: value})
    except ValidationError:
        return False
    return True


def test_the_three_presets_exist() -> None:
    assert {"summarization", "qa", "continuous-pretraining"} <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_source_and_columns(name: str) -> None:
    recipe = resolve({"recipe": name}, environment=NOWHERE).recipe
    assert recipe.recipe == name
    assert len(recipe.about) > 10
    assert len(recipe.source) > 40
    assert set(recipe_fields(recipe)) == set(recipe.fields)
    assert recipe.shorten in (*fields_of(recipe.prompt), "")


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_restates_no_default(name: str) -> None:
    values, defaults = load_preset(name), Recipe().to_dict()
    resolved = build(values).to_dict()
    said = {key: resolved[key] for key in values if key not in GROUPS or key == "schedule"}
    assert not {key for key, value in said.items() if value == defaults[key]}
    assert not {
        key for key in values.get("generation", ()) if resolved["generation"][key] == defaults["generation"][key]
    }


@pytest.mark.parametrize("name", preset_names())
def test_resolved_recipe_survives_a_yaml_round_trip(name: str) -> None:
    resolved = resolve({"recipe": name, "lr": 3e-5}, environment=NOWHERE)
    assert build(yaml.safe_load(dump_recipe(resolved.recipe, resolved.origins))) == resolved.recipe


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("{{ text }}", "{{ text }}"),
        ("Say: {{ text }} # now", "Say: {{ text }} # now"),
        ('"{{ text }}\\n"', "{{ text }}\n"),
        ("'it''s {{ text }}'", "it's {{ text }}"),
        ("", ""),
        ("17", "17"),
    ],
)
def test_typed_template_needs_no_yaml_quotes(typed: str, read: str) -> None:
    assert resolve({}, None, (f"prompt={typed}",), NOWHERE).recipe.prompt == read
    assert resolve({}, None, (), {"GPTJ_FT_PROMPT": typed}).recipe.prompt == read


def words_of(annotation: object) -> list[str]:
    """Return the words of a Literal, alone or among other types; none for a list."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    return [word for kind in get_args(annotation) if get_origin(annotation) is not tuple for word in words_of(kind)]


WORDS = [
    (f"{group}.{name}".removeprefix("."), word)
    for group, options in [("", Recipe), *GROUPS.items()]
    for name, field in options.model_fields.items()
    if group != "schedule"
    for word in words_of(field.annotation)
]


def test_words_need_no_quotes(tmp_path: Path) -> None:
    assert {("quotes", "off"), ("packing", "off"), ("schedule", "cosine"), ("early_stopping", "never")} <= {
        (option.rpartition(".")[2], word) for option, word in WORDS
    }
    for option, word in WORDS:
        group, _, name = option.rpartition(".")
        config, variable = tmp_path / "c.yaml", f"GPTJ_FT_{option.upper().replace('.', '_')}"
        config.write_text(f"{group}: {{{name}: {word}}}\n" if group else f"{name}: {word}\n", encoding="utf-8")
        for source in (({}, None, (f"{option}={word}",), NOWHERE), ({}, None, (), {variable: word}),
                       ({}, config, (), NOWHERE)):  # fmt: skip
            assert str(attrgetter(option)(resolve(*source).recipe)) == word


@pytest.mark.parametrize("text", ["0.9,0.95", "[0.9, 0.95]", "0.9, 0.95"])
def test_betas_may_be_comma_separated(text: str) -> None:
    assert resolve({}, None, (f"betas={text}",), NOWHERE).recipe.betas == (0.9, 0.95)


NULLABLE = {
    f"{group}.{name}".removeprefix("."): next(value for value in (1, 0.5) if accepts(options, name, value))
    for group, options in [("", Recipe), *GROUPS.items()]
    for name, field in options.model_fields.items()
    if group != "schedule" and NoneType in get_args(field.annotation)
}


NULL_WAYS = {
    (way, option)
    for option in NULLABLE
    for way in ("api", "--set", "--config", "environment", *(["group of api"] if "." in option else []))
}


@pytest.mark.parametrize(("way", "option"), sorted(NULL_WAYS))
def test_null_differs_from_an_absent_option(way: str, option: str, tmp_path: Path, monkeypatch) -> None:
    group, _, name = option.rpartition(".")
    null: dict[str, object] = {group: {name: None}} if group else {name: None}
    lower, config = ("model", {option: NULLABLE[option]}), tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump(null if way == "--config" else lower[1]), encoding="utf-8")
    if way in ("--set", "--config"):
        assignments = [f"{option}=null"] if way == "--set" else []
        recipe = resolve({}, config, assignments, NOWHERE, lower).recipe
    else:
        if way == "environment":
            monkeypatch.setenv(f"GPTJ_FT_{option.upper().replace('.', '_')}", "null")
        keywords = {"api": {option: None}, "group of api": null, "environment": {}}[way]
        recipe = resolved_options(None, {**keywords, "config": config}).recipe
    assert attrgetter(option)(recipe) is None
    assert recipe_digest(recipe) == recipe_digest(build(null))
    assert attrgetter(option)(resolve({}, None, (), NOWHERE, lower).recipe) is not None


def test_run_of_earlier_version_keeps_revision(tmp_path: Path) -> None:
    run, recipe = Run(tmp_path), Recipe(max_steps=10)
    run.start_record(recipe.model_copy(update={"revision": 1}))  # as before the option existed
    text = dump_recipe(recipe, {})
    run.recipe_file.write_text(text.replace("revision: 2\n", ""), encoding="utf-8")
    assert "revision" not in run.record()["recipe"]
    assert run.recipe().revision == 1
    run.check_recipe(run.recipe())
    run.recipe_file.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="revision is 2, but the run started with None"):
        run.check_recipe(run.recipe())


def test_epoch_fractions_round_up_like_transformers() -> None:
    steps = [build({"epochs": epochs, "batch_size": 4}).num_steps(9) for epochs in (0.1, 0.5, 1.0, 1.5, 2.5, 3.0)]
    assert steps == [1, 2, 3, 5, 8, 9]  # of ceil(num_train_epochs * 3): Trainer.set_initial_training_values


@pytest.mark.parametrize("name", preset_names())
def test_shown_recipe_is_commented_yaml(name: str, shell) -> None:
    set_ = "--set generation.top_k=7"
    text = shell(f"recipes show {name} {set_}").out
    recipe = resolve({"recipe": name}, None, ("generation.top_k=7",), environment=NOWHERE).recipe
    assert build(yaml.safe_load(text)) == recipe
    assert max(map(len, text.splitlines())) <= 80
    comments = " ".join(" ".join(line.rpartition("# ")[2] for line in text.splitlines() if "# " in line).split())
    for option in ("lr", "prompt", "batch_size", "generation.top_k", "lora.rank", "data"):
        assert meaning_of(option) in comments
    assert re.search(r"top_k: 7 .*\n? .*\[command line\]", text)


def test_option_sources_have_fixed_precedence(tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    config.write_text("lr: 1e-3\nbatch_size: 3\nseed: 5\nrecipe: qa\n", encoding="utf-8")
    environment = {"GPTJ_FT_BATCH_SIZE": "4", "GPTJ_FT_SEED": "6", "GPTJ_FT_HOME": "/x", "HOME": "/y"}
    resolved = resolve({"seed": 7}, config, (), environment)
    recipe = resolved.recipe
    assert (recipe.seed, recipe.batch_size, recipe.lr) == (7, 4, 1e-3)
    assert recipe.epochs == load_preset("qa")["epochs"]
    assert recipe.read_ahead == Recipe().read_ahead
    assert resolved.origins["seed"] == "command line"
    assert resolved.origins["batch_size"] == "environment"
    assert resolved.origins["lr"] == str(config)
    assert resolved.origins["epochs"] == "recipe qa"


@pytest.mark.parametrize(
    ("method", "option"), [("full", "sampled.layers=1"), ("lora", "sampled.period=2"), ("sampled", "lora.rank=4")]
)
def test_options_of_another_method_are_refused(method: str, option: str, tmp_path: Path) -> None:
    key = option.partition("=")[0]
    with pytest.raises(UsageError, match=rf"^command line: {re.escape(key)} has no effect, because method is {method}"):
        resolve({"method": method}, assignments=(option,), environment={})
    config = tmp_path / "both.yaml"  # a whole recipe has the options of every method
    config.write_text("sampled: {layers: 1, period: 2}\nlora: {rank: 4}\n")
    assert resolve({"method": method}, config, environment={}).recipe.lora.rank == 4
    own = {"full": (), "lora": ("lora.rank=2",), "sampled": ("sampled.layers=3",)}[method]
    resolve({"method": method}, assignments=own, environment={})


def test_set_changes_one_option_of_a_group() -> None:
    recipe = resolve({"recipe": "qa"}, assignments=("generation.top_k=7", "clip_norm=null"), environment=NOWHERE).recipe
    assert (recipe.generation.top_k, recipe.generation.max_new_tokens) == (7, 32)
    assert recipe.clip_norm is None


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "0.00001", ".00001", "1.0e-5"])
def test_learning_rates_parse_in_any_notation(text: str) -> None:
    assert resolve({}, assignments=(f"lr={text}",), environment=NOWHERE).recipe.lr == 1e-5


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8h", 28800), ("90m", 5400), ("1h30m", 5400), ("2d", 172800), ("45s", 45), ("3600", 3600), ("0.5h", 1800)],
)
def test_durations_are_written_as_people_write_them(text: str, seconds: float) -> None:
    assert resolve({"max_time": text}, environment=NOWHERE).recipe.max_time == seconds
    assert resolve({}, assignments=(f"max_time={text}",), environment=NOWHERE).recipe.max_time == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("6GB", 6 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("500MB", 500 * 10**6),
        ("512MiB", 2**29),
        ("2TB", 2 * 10**12),
        ("123456789", 123456789),
        ("8e9", 8 * 10**9),
        ("null", None),
    ],
)
def test_memory_cap_accepts_any_unit(text: str, size: int | None) -> None:
    for source in ({"assignments": (f"host_memory={text}",)}, {"environment": {"GPTJ_FT_HOST_MEMORY": text}}):
        resolved = resolve({}, **{"environment": NOWHERE, **source})
        assert resolved.recipe.host_memory == size
        assert build(yaml.safe_load(dump_recipe(resolved.recipe, resolved.origins))).host_memory == size
    if text not in ("null", "8e9"):
        assert resolve({"device_memory": text}, environment=NOWHERE).recipe.device_memory == size


@pytest.mark.parametrize("text", ["8 apples", "GiB", "-1GB", "8GiBs", "1,5GB", "0", "0GB", "-5", "''"])
def test_invalid_memory_cap_is_rejected_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"command line: disk_space: .*, not ") as error:
        resolve({}, assignments=(f"disk_space={text}",), environment=NOWHERE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("batchsize=3", "unknown option 'batchsize' (did you mean 'batch_size'?)"),
        ("generation.topk=1", "unknown option 'generation.topk' (did you mean 'top_k'?)"),
        ("lr=-1", "lr: Input should be greater than 0, not -1"),
        ("weights=moon", "weights: "),
        ("betas=[0.9, 1.0]", "betas.1: Input should be less than 1, not 1.0"),
        ("eps=0", "eps: Input should be greater than 0, not 0"),
        ("weight_decay=-1", "weight_decay: Input should be greater than or equal to 0"),
        ("clip_norm=0", "clip_norm: Input should be greater than 0, not 0"),
        ("lr=.inf", "lr: Input should be a finite number, not inf"),
        ("z_loss=.nan", "z_loss: Input should be "),
        ("max_time=8x", "max_time: expected a duration: seconds, or e.g. 8h, 90m, 1h30m or 2d, not '8x'"),
        ("max_time=0", "max_time: Input should be greater than 0, not 0"),
        ("lr", "--set expects key=value"),
        ("labels={no: maybe}", "expected a string (YAML reads on, off, yes and no as booleans: put the word"),
    ],
)
def test_invalid_option_is_rejected_by_name(assignment: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve({}, assignments=(assignment,), environment=NOWHERE)
    assert message in str(error.value)


def test_unknown_option_in_any_source_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'summarization'"):
        resolve({"recipe": "sumarisation"}, environment=NOWHERE)
    config = tmp_path / "c.yaml"
    config.write_text("learning_rat: 1\nlr: 1\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"c\.yaml: unknown option 'learning_rat'"):
        resolve({}, config, environment=NOWHERE)
    with pytest.raises(UsageError, match=r"unknown option GPTJ_FT_EPOCH.*did you mean 'epochs'"):
        resolve({}, environment={"GPTJ_FT_EPOCH": "3"})


def test_invalid_yaml_error_names_file_and_line(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("lr: 1\nseed: [1\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"c\.yaml:\d+: not YAML"):
        resolve({}, config, environment=NOWHERE)
    config.write_text("just text\n", encoding="utf-8")
    with pytest.raises(UsageError, match="expected `option: value`"):
        resolve({}, config, environment=NOWHERE)


def test_option_set_twice_is_rejected() -> None:
    with pytest.raises(UsageError, match="set twice"):
        resolve({"lr": 1e-3}, assignments=("lr=1e-4",), environment=NOWHERE)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in pairwise("abcdefgh")
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB + "lr: *h\n", "aliases expand to more than 100,000 values"),
        (BOMB.replace("x,", "{p: q},") + "lr: {<<: [*h, *h]}\n", "aliases expand to more than 100,000 values"),
        ("lr: &a [*a]\n", "nested too deeply, or an alias contains itself"),
        ("lr: " + "[" * 1000 + "]" * 1000 + "\n", "nested too deeply"),
        ("lr: " + "{a: " * 5000 + "1" + "}" * 5000 + "\n", "nested too deeply"),
        (f"lr: {'9' * 5000}\n", "limit"),
        (f"lr: 0x{'f' * 5000}\n", r":1: not YAML: a number with too many digits"),
        (f"{'0x' + 'f' * 1000}: 1\n", "too many digits"),
        ("seed: 2020-13-45\n", "month must be in 1..12"),
        ("seed: !!int ''\n", "not YAML"),
        ("seed: !!bool x\n", "not YAML"),
        ("seed: !!timestamp x\n", "not YAML"),
        ("seed: !!python/object/apply:os.system ['true']\n", ":1: not YAML: could not determine a constructor"),
        ("seed: \x1b[2J\n", "not YAML"),
        (f"seed: '{'word ' * 100_000}'\n", r"seed: .*, not 'word word .*\.\.\.$"),
        (f"lr: [{'x, ' * 9000}x]\n", r"lr: .*, not \['x', 'x', .*\.\.\.$"),
        (f"{'word ' * 100}: 1\n", r"unknown option 'word word .*\.\.\.'"),
    ],
)
def test_odd_yaml_is_refused_in_a_line(text: str, said: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=said) as caught:
        resolve({}, config, environment=NOWHERE)
    assert len(str(caught.value)) < 400 + len(str(config))
    assert str(caught.value).isprintable()


YAML_PIECES = st.sampled_from(
    ["lr: ", "seed: ", "prompt: ", "&a ", "*a", "[", "]", "{", "}", ", ", ": ", "\n", "  ", "- ", "1e-5", "2020-13-45",
     "0x" + "f" * 300, "!!int ", "!!bool ", "!!set ", "!!omap ", "!!pairs ", "!!binary ", "!!timestamp ", "<<: ", "'",
     '"', "|\n", ">\n", "x", "\t", "? ", "---\n", "%YAML 9.9\n", "\x07", "\\ud800", "\ud800", "null", "~", ".nan",
     "-.inf", "1:2:3", "generation: ", "schedule: ", "fields: ", "map: "]
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=10_000, derandomize=True, database=None, deadline=None)
@given(text=st.lists(YAML_PIECES, max_size=25).map("".join))
def test_random_yaml_never_crashes(text: str) -> None:
    try:
        build(as_options(parse(text, "c.yaml")), {})
    except UsageError as error:
        message = str(error)
    else:
        message = ""
    assert len(message) < 1000
    assert "\n" not in message


def as_options(value: object) -> dict[str, object]:
    return {str(key): each for key, each in value.items()} if isinstance(value, dict) else {"lr": value}


def test_labels_replace_those_of_a_preset() -> None:
    own = {"0": "bad", "1": "good"}
    replaced = resolve({"recipe": "sentiment"}, assignments=['labels={"0": bad, "1": good}'])
    assert replaced.recipe.labels == own
    one = resolve({"recipe": "sentiment"}, assignments=["labels.neutral=mixed"]).recipe
    assert one.labels == {**load_preset("sentiment")["labels"], "neutral": "mixed"}
    named = resolve({"recipe": "sentiment"}, assignments=["fields={label: [mood]}"]).recipe
    assert set(named.fields) == {"text", "label"}
