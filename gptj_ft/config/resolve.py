"""Resolve the options of a run from all sources, and record the origin of each value."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gptj_ft.config.options import GROUPS, STRETCHING, Recipe, field_of, meaning_of
from gptj_ft.config.presets import load_options, load_preset
from gptj_ft.errors import UsageError, did_you_mean
from gptj_ft.system.plain_text import shortened

ENVIRONMENT_PREFIX = "GPTJ_FT_"
COMMAND_LINE, ENVIRONMENT = "command line", "environment"  # origins of an option
NOT_OPTIONS = {
    "GPTJ_FT_HOME", "GPTJ_FT_TEST_DATA", "GPTJ_FT_STORE", "GPTJ_FT_TOKEN", "GPTJ_FT_PORT", "GPTJ_FT_PUBLIC_NETWORK",
    "GPTJ_FT_START_SECONDS", "GPTJ_FT_NCCL",
}  # fmt: skip
# `method: lora` replaces these values of a preset: https://arxiv.org/abs/2106.09685, table 12 (GPT-3 175B).
FOR_LORA: dict[str, Any] = {"lr": 2e-4}
# Names of options in other systems; `--...` is a flag here, not an option.
PEERS_NAMES: Mapping[str, str] = {
    peer: ours
    for ours, peers in {
        "lr": "learning_rate peak_lr max_lr",
        "epochs": "num_train_epochs num_epochs n_epochs train_epochs max_epochs",
        "max_steps": "iters num_iterations num_steps train_steps total_steps max_train_steps",
        "batch_size": "per_device_train_batch_size per_gpu_train_batch_size train_batch_size global_batch_size "
        "gradient_accumulation_steps gradient_accumulation grad_accumulation_steps accumulation_steps",
        "micro_batch_tokens": "micro_batch_size max_tokens_per_batch",
        "max_length": "max_seq_length max_seq_len seq_length sequence_len sequence_length cutoff_len block_size "
        "model_max_length",
        "warmup": "warmup_ratio warmup_steps lr_warmup_steps",
        "final_lr": "min_lr lr_min min_lr_ratio",
        "schedule": "lr_scheduler_type lr_scheduler lr_schedule",
        "betas": "adam_beta1 adam_beta2 beta1 beta2",
        "eps": "adam_epsilon adam_eps",
        "clip_norm": "max_grad_norm gradient_clipping gradient_clip_val grad_clip",
        "method": "finetuning_type train_type tuner_type fine_tune_type peft_type use_peft use_lora lora use_lisa lisa",
        "lora.rank": "lora_r lora_rank",
        "lora.alpha": "lora_alpha",
        "lora.rslora": "use_rslora",
        "lora.dora": "use_dora",
        "lora.dropout": "lora_dropout",
        "lora.targets": "lora_target lora_targets lora_target_modules target_modules",
        "sampled.layers": "lisa_activated_layers lisa_n_layers",
        "sampled.period": "lisa_interval_steps lisa_step_interval",
        "train": "freeze unfrozen_parameters trainable_layers num_layers freeze_trainable_layers",
        "model": "model_name_or_path model_name base_model pretrained_model_name_or_path model_id checkpoint_dir",
        "data": "dataset datasets dataset_name dataset_path train_file train_data train_dataset training_data",
        "val_data": "validation_file val_file valid_data eval_data eval_file eval_dataset val_dataset",
        "holdout": "val_size val_set_size test_size validation_split val_split_fraction eval_split",
        "output": "output_dir out_dir save_dir adapter_path output_path run_name",
        "prompt": "prompt_template prompt_style template",
        "save_every": "save_steps save_interval checkpoint_every ckpt_interval",
        "keep": "save_total_limit",
        "export": "load_best_model_at_end",
        "best_by": "metric_for_best_model",
        "patience": "early_stopping_patience early_stopping_steps",
        "validate_every": "eval_steps eval_every eval_interval val_interval steps_per_eval evaluation_strategy "
        "eval_strategy",
        "precision": "bf16 fp16 dtype torch_dtype mixed_precision",
        "packing": "sample_packing",
        "activations": "gradient_checkpointing activation_checkpointing",
        "weights": "device_map cpu_offload offload_param",
        "optimizer_state": "offload_optimizer optimizer_offload",
        "device": "no_cuda use_cpu use_cuda",
        "report_to": "use_wandb wandb_project logger",
        "generation.max_new_tokens": "max_tokens",
        "--resume RUN": "resume_from_checkpoint resume_adapter_file",
    }.items()
    for peer in peers.split()
}
OPTIONS_IN_GROUPS = {  # by their names in the environment; the pieces of a schedule are no group
    f"{group}_{name}": f"{group}.{name}"
    for group, kind in GROUPS.items()
    if group != "schedule"
    for name in kind.model_fields
}
TASKS_OF = {  # tasks whose loss an option of Recipe changes
    "class_weights": ("classification", "token-labels"),
    "z_loss": ("language-model", "classification", "token-labels"),
}
RESUMED: tuple[str, Mapping[str, Any]] = ("run", {})  # base of the options that a resume changes
VALUE_SHOWN = 80  # characters of a value in a message
TEMPLATES = ("prompt", "completion", "chat_template")  # may be @FILE


@dataclass(frozen=True)
class Resolved:
    """Recipe, and the origin of each value that is not the default."""

    recipe: Recipe
    origins: Mapping[str, str]
    typed: frozenset[str] = frozenset()  # options that the user set, and no preset or model


def peers_option(name: str) -> tuple[str, str] | None:
    """Translate an option name of another system; return our name and its help text, or ``None``."""
    ours = PEERS_NAMES.get(name.lower().replace("-", "_").replace(".", "_"))
    if ours is None:
        return None
    return ours, "" if ours.startswith("--") else meaning_of(ours)


def suggest_option(name: str, known: Iterable[str]) -> str:
    """Suggest an option for an unknown name: the translation from another system, else the nearest name."""
    translation = peers_option(name)
    if translation is None:
        return did_you_mean(name.rpartition(".")[2], known)
    ours, meaning = translation
    return f" (use '{ours}'{': ' + meaning if meaning else ''})"


def resolve(
    flags: Mapping[str, Any],
    config: Path | None = None,
    assignments: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    base: tuple[str, Mapping[str, Any]] | None = None,
) -> Resolved:
    """Combine all sources into one recipe.

    Args:
        flags: options of the command line or of Python; ``None`` is a value, YAML's null.
        config: YAML file of options (``--config``).
        assignments: ``key=value`` or ``group.key=value`` (``--set``), with the precedence of flags.
        environment: environment variables; default ``os.environ``.
        base: (origin, options) used like a preset if no source names one.

    Raises:
        UsageError: an unknown key, an invalid value, a key set twice on the command line, or an ineffective key.
    """
    sources = _typed_sources(flags, config, assignments, environment)
    flagged = sources[0][1]
    typed = frozenset(key for _, values in sources for key in values)
    name = next((values["recipe"] for _, values in sources if "recipe" in values), None)
    if name is not None and name != "custom":
        sources.append((f"recipe {name}", {**load_preset(str(name)), "recipe": name}))
    elif base is not None:
        sources.append((base[0], dict(base[1])))
    if base is None and next((values["method"] for _, values in sources if "method" in values), None) == "lora":
        # Overrides a preset written for another method.
        # Earlier sources win: before the preset, unless the preset itself chose LoRA and its values.
        sources.insert(3 if "method" not in sources[-1][1] else len(sources), ("method lora", FOR_LORA))
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, values in reversed(sources):
        for key, value in values.items():
            _assign(merged, key, value)
            origins[key] = origin
    for key in TEMPLATES:
        # A model's own options may come from anybody: never read the files that they name.
        if str(merged.get(key, "")).startswith("@") and (base is None or origins[key] != base[0]):
            merged[key] = _template_file(str(merged[key])[1:], key, config if origins[key] == str(config) else None)
    if isinstance(merged.get("schedule"), list):
        _drop_stretching_options(merged, origins, sources)
    recipe = build(merged, origins)
    if base is not RESUMED:  # the method is in the run folder
        _check_options_of_methods(recipe.method, flagged)
    return Resolved(recipe, origins, typed)


def typed_name(
    key: str, flag: str, flags: Mapping[str, Any], config: Path | None, assignments: Sequence[str] | None
) -> str | None:
    """Return the model or the rows that the user has named for a command that trains nothing, or ``None``.

    Those of an option file or the environment are to train with: a tuned model would not be meant.

    Args:
        key: ``model`` or ``data``.
        flag: argument or flag with that name, for messages.

    Raises:
        UsageError: nothing on the command line names it, but an option file or the environment; or it is set twice.
    """
    found = [(origin, values[key]) for origin, values in _typed_sources(flags, config, assignments) if key in values]
    origin, name = found[0] if found else ("", None)
    if name is not None and origin != COMMAND_LINE:
        remedy = f"unset GPTJ_FT_{key.upper()}" if origin == ENVIRONMENT else f"remove {key} from the file"
        raise UsageError(f"{origin}: {key} is for training, not for this: add {flag}, or {remedy}")
    return None if name is None else str(name)


def _typed_sources(
    flags: Mapping[str, Any],
    config: Path | None,
    assignments: Sequence[str] | None,
    environment: Mapping[str, str] | None = None,
) -> list[tuple[str, dict[str, Any]]]:
    """Return what the user has set, by origin: command line, environment, option file; see `resolve`."""
    flagged = dict(flags)
    for assignment in assignments or ():
        key, separator, text = assignment.partition("=")
        if not separator:
            raise UsageError(f"--set expects key=value, not '{assignment}'")
        if key in flagged:
            raise UsageError(f"{key} is set twice: by --{key.replace('_', '-')} and by --set {key}")
        flagged[key] = read_value(key, text, f"--set {key}")
    return [
        (COMMAND_LINE, flagged),
        (ENVIRONMENT, _from_environment(os.environ if environment is None else environment)),
        (str(config), load_options(config) if config else {}),
    ]


def build(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Recipe:
    """Validate a mapping of options."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        # Report an unknown key first: other errors may follow from it.
        problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        path = [str(part) for part in problem["loc"] if not str(part).startswith("(")]  # tags of a union
        key = ".".join(path)
        where = (origins or {}).get(key) or (origins or {}).get(path[0], "recipe")
        if problem["type"] == "extra_forbidden":
            group = GROUPS[path[0]] if len(path) > 1 else Recipe
            hint = suggest_option(key, group.model_fields)
            hint = hint or (f" (known: {', '.join(group.model_fields)})" if len(path) > 1 else "")
            raise UsageError(f"{where}: unknown option '{shortened(key, VALUE_SHOWN)}'{hint}") from error
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "string_type" and isinstance(problem["input"], bool):
            message = "expected a string (YAML reads on, off, yes and no as booleans: put the word in quotes)"
        raise UsageError(f"{where}: {key}: {message}, not {shortened(repr(problem['input']), VALUE_SHOWN)}") from error


def dump_recipe(recipe: Recipe, origins: Mapping[str, str]) -> str:
    """Write the recipe as YAML, with the origin of each non-default value as a comment."""
    from gptj_ft.config import yaml

    lines = []
    for key, value in recipe.to_dict().items():
        text = yaml.dump({key: value})
        first, newline, rest = text.partition("\n")
        origin = origins.get(key)
        # A comment inside a block or quoted scalar would become part of it.
        comment = f"  # {origin}" if origin and not newline else ""
        lines.append(first + comment + newline + rest)
    return "\n".join(lines) + "\n"


def _assign(merged: dict[str, Any], key: str, value: Any) -> None:
    """Set ``key`` or ``group.key``; a mapping changes only its own keys of a group, and replaces all labels."""
    group, dot, rest = key.partition(".")
    if dot:
        value, key = {rest: value}, group
    nested = merged.get(key)
    # Labels are the answers to choose among: with those of a preset, a model could choose one that no row has.
    if isinstance(value, dict) and isinstance(nested, dict) and (dot or key != "labels"):
        merged[key] = {**nested, **value}
    else:
        merged[key] = value


def _template_file(name: str, key: str, config: Path | None) -> str:
    """Read the file of a template; its path is relative to the option file that names it."""
    path = (config.parent if config else Path()) / Path(name).expanduser()
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{key}: cannot read the template {path}: {error}") from error


def _check_options_of_methods(method: str, flagged: Mapping[str, Any]) -> None:
    """Reject options of another method; option files and presets may name those of several.

    Args:
        flagged: options of the command line or of Python.
    """
    for key in flagged:
        if (group := key.partition(".")[0]) in ("lora", "sampled") and group != method:
            raise UsageError(
                f"command line: {key} has no effect, because method is {method}: add --method {group}, or leave it out"
            )


def check_effects(resolved: Resolved) -> None:
    """Reject options that the user set for a new run, but that the loss of its task ignores."""
    recipe = resolved.recipe
    for key, tasks in TASKS_OF.items():
        if key in resolved.typed and recipe.task not in tasks and getattr(recipe, key) != field_of(key).default:
            raise UsageError(
                f"{resolved.origins[key]}: {key} has no effect with task={recipe.task}, only with {', '.join(tasks)}: "
                "leave it out"
            )


def check_several(resolved: Resolved) -> None:
    """Reject options for several processes that the user set for one."""
    recipe = resolved.recipe
    several = {"replicas": (recipe.replicas or 1) > 1, "mirror": recipe.mirror}
    if key := next((key for key, has_effect in several.items() if has_effect and key in resolved.typed), None):
        raise UsageError(
            f"{resolved.origins[key]}: {key} has no effect, because this run has one process: start several, e.g. with "
            "--nproc 2, or leave it out"
        )


def _drop_stretching_options(
    merged: dict[str, Any], origins: dict[str, str], sources: list[tuple[str, dict[str, Any]]]
) -> None:
    """Drop the `STRETCHING` options, which a schedule of pieces replaces.

    Raises:
        UsageError: one has the precedence of the pieces or a higher one, so the user expects an effect.
    """
    last = next(index for index, (_, values) in enumerate(sources) if "schedule" in values)
    for origin, values in sources[: last + 1]:
        if clash := next((key for key in STRETCHING if key in values), None):
            raise UsageError(
                f"{origin}: {clash} has no effect, because the schedule ({origins['schedule']}) is a list of pieces: "
                f"remove {clash}, or add --set schedule=cosine"
            )
    for key in STRETCHING:
        merged.pop(key, None)
        origins.pop(key, None)


def read_value(key: str, text: str, where: str) -> Any:
    """Parse a value of the command line or the environment: a string as it is, other types as YAML.

    A string in quotes or with a YAML block mark is still parsed as YAML.

    Args:
        key: name of the option.
        where: origin, for error messages.
    """
    from gptj_ft.config import yaml

    kind = Recipe.model_fields[key].annotation if key in Recipe.model_fields else None
    is_nothing = kind == str | None and text.strip() in ("", "~", "null")
    is_quoted = text.startswith(('"', "'", "|\n", ">\n"))
    return text if kind in (str, str | None) and not is_nothing and not is_quoted else yaml.parse(text, where)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the options set by environment variables."""
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_OPTIONS:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
            key = OPTIONS_IN_GROUPS.get(key, key)
            if key not in Recipe.model_fields and key not in OPTIONS_IN_GROUPS.values():
                raise UsageError(f"environment: unknown option {name}{suggest_option(key, Recipe.model_fields)}")
            values[key] = read_value(key, text, name)
    return values
