"""Complete a recipe with facts of the model: its chat template, the tokens that end its answers, its context."""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import date
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.architecture import context_in
from gptj_ft.config.options import Recipe
from gptj_ft.config.presets import load_preset
from gptj_ft.data.chat import MESSAGES, REPLY, is_chat
from gptj_ft.data.chat_template import AUTO, MODEL, NONE, ChatTemplate, has_template
from gptj_ft.data.dataset import load_dataset
from gptj_ft.data.readers.source import is_prepared
from gptj_ft.data.tokenization import NoTokenizer, RowTokenizer, load_row_tokenizer
from gptj_ft.errors import DataError, UsageError
from gptj_ft.system.digests import read_json
from gptj_ft.system.files import read_text
from gptj_ft.system.paths import is_adapter

# Also in `model_folder`, which imports torch; preparing rows must not.
METADATA_FILE, GENERATION_CONFIG = "gptj_ft.json", "generation_config.json"
CHAT = "chat"  # preset whose prompt stands for a model without a chat template
TEMPLATE_FILE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
DATED = "strftime_now"  # function of templates that write today's date


def with_model_defaults(recipe: Recipe, folder: Path, data: Path | None = None) -> Recipe:
    """Choose the chat template, its date and the end tokens that a recipe leaves to the model.

    A recipe that is complete already stays as it is.

    Args:
        folder: model or adapter.
        data: rows; prepared ones determine the template's date.

    Raises:
        UsageError: the model has no chat template and ``chat_template`` is ``model``, or its template is unusable.
    """
    if recipe.task != "language-model":
        return recipe
    source = _source_of(recipe, folder)
    ends = () if recipe.generation.end_tokens else _configured_ends(folder)
    changes: dict[str, Any] = {"chat_template": source or NONE}
    if source is None and not ends:
        return recipe.model_copy(update=changes)
    tokenizer = load_row_tokenizer(_tokenizer_folder(folder))
    generation = dict[str, Any]()
    if source is not None:
        for name in recipe.template_options:
            if name not in source:
                raise UsageError(f"template_options: the chat template has no variable '{name}'")
        if DATED in source and not recipe.template_date:
            changes["template_date"] = _date_of(data)
        if is_chat(recipe):
            changes |= {"prompt": f"{{{{ {MESSAGES} }}}}", "completion": f"{{{{ {REPLY} }}}}"}
            if list(recipe.generation.stop) == load_preset(CHAT)["generation"]["stop"]:
                generation["stop"] = ()
    completed = recipe.model_copy(update=changes)
    if not recipe.generation.end_tokens:
        generation["end_tokens"] = _end_tokens(completed, tokenizer, ends)
    return completed.model_copy(update={"generation": recipe.generation.model_copy(update=generation)})


def within_context(recipe: Recipe, folder: Path, typed: Collection[str]) -> tuple[Recipe, str]:
    """Lower a ``max_length`` that the user did not set to the model's context, and the stride with it.

    Args:
        folder: model.
        typed: options that the user set.

    Returns:
        The recipe, and a note on the change; empty: it is unchanged.
    """
    context, length = context_in(folder), recipe.max_length
    if length <= context or "max_length" in typed:
        return recipe, ""
    note, changes = f"max_length is {context:,}, the context of the model, and not {length:,}", {"max_length": context}
    if recipe.task in ("spans", "token-labels") and "stride" not in typed:
        changes["stride"] = recipe.stride * context // length
        note += f"; stride is {changes['stride']:,}, and not {recipe.stride:,}"
    return recipe.model_copy(update=changes), note


def chat_template_of(folder: Path) -> str | None:
    """Return the chat template that a model was published or tuned with; ``None``: it has none.

    A model that was tuned without one has a file for other programs, which repeats the recipe's prompt.
    """
    if (folder / METADATA_FILE).is_file():
        template = read_json(folder / METADATA_FILE).get("template", {}).get("chat_template", NONE)
        return None if template in (AUTO, MODEL, NONE) else str(template)
    folder = _tokenizer_folder(folder)
    try:
        if (folder / TEMPLATE_FILE).is_file():
            return read_text(folder / TEMPLATE_FILE)
        config = json.loads(read_text(folder / TOKENIZER_CONFIG)) if (folder / TOKENIZER_CONFIG).is_file() else {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: cannot read the chat template: {error}") from error
    template = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(template, list):  # several, with names
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and template.strip() else None


def _tokenizer_folder(folder: Path) -> Path:
    if not is_adapter(folder):
        return folder
    from gptj_ft.checkpoints.adapter import tokenizer_folder  # imports torch

    return tokenizer_folder(folder)


def _source_of(recipe: Recipe, folder: Path) -> str | None:
    """Return the template that writes the recipe's prompts; ``None``: the recipe's own prompt and completion."""
    if recipe.chat_template == NONE:
        return None
    if has_template(recipe):
        if "{" not in recipe.chat_template:
            raise UsageError(
                f"chat_template: expected {AUTO}, {MODEL}, {NONE} or @FILE, not '{recipe.chat_template[:60]}'"
            )
        return recipe.chat_template
    # A prompt that the user wrote has priority over the model's template.
    if recipe.chat_template == AUTO and (not is_chat(recipe) or recipe.prompt != load_preset(CHAT)["prompt"]):
        return None
    source = chat_template_of(folder)
    if source is None and recipe.chat_template == MODEL:
        raise UsageError(
            f"chat_template: {folder} has no chat template; add --set chat_template=none for the recipe's own prompt, "
            "or --set chat_template=@FILE"
        )
    return source


def _date_of(data: Path | None) -> str:
    if data is not None and is_prepared(data):
        return str(load_dataset(data).report.settings.get("template_date") or date.today().isoformat())
    return date.today().isoformat()


def _configured_ends(folder: Path) -> tuple[int, ...]:
    """Return the end tokens of generation_config.json; without it, of config.json, as transformers reads them."""
    path = next((path for name in (GENERATION_CONFIG, "config.json") if (path := folder / name).is_file()), None)
    try:
        ends = read_json(path).get("eos_token_id") if path else None
    except (DataError, ValueError, OSError):
        return ()
    numbers = ends if isinstance(ends, list) else [ends]
    return tuple(number for number in numbers if type(number) is int)


def _end_tokens(recipe: Recipe, tokenizer: RowTokenizer, configured: tuple[int, ...]) -> tuple[str, ...]:
    """Return all tokens that end an answer; empty if EOS is the only one."""
    if isinstance(tokenizer, NoTokenizer):
        return ()
    template = ChatTemplate.of(recipe, tokenizer)
    names = [template.end_of_turn()] if template else []
    names += [name for number in configured if isinstance(name := tokenizer.convert_ids_to_tokens(number), str)]
    names += [tokenizer.eos_token] if tokenizer.eos_token else []
    unique = tuple(dict.fromkeys(names))
    return () if unique == (tokenizer.eos_token,) else unique
