"""The model card: ``README.md`` of a tuned model folder, as the Hub shows it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gptj_ft import __version__
from gptj_ft.checkpoints.download import Origin
from gptj_ft.config import yaml
from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import is_chat
from gptj_ft.data.jinja_template import fields_of

# The options that made the weights what they are; none of them can hold a name of the user's.
HYPER_PARAMETERS = (
    "method", "train", "epochs", "max_steps", "batch_size", "max_length", "on_long", "packing", "lr", "schedule",
    "warmup", "final_lr", "betas", "eps", "weight_decay", "clip_norm", "z_loss", "seed", "precision", "moments",
    "gradients",
)  # fmt: skip


@dataclass(frozen=True)
class Card:
    """What the card tells.

    Attributes:
        recipe: of the run.
        origin: which repository the base is from, if that is known.
        model_type: the architecture.
        data: ``rows``, ``validation_rows``, ``sha256``.
        metrics: ``validation_loss``, ``baseline_validation_loss``, ``steps``, perhaps ``updates_before``.
        end: the token that ends an answer.
        has_chat_template: whether messages can be sent to the model.
        is_adapter: whether the folder holds an adapter in PEFT's format, for the base model, and no model.
    """

    recipe: Recipe
    origin: Origin | None
    model_type: str
    data: Mapping[str, Any]
    metrics: Mapping[str, Any]
    end: str | None
    has_chat_template: bool
    is_adapter: bool = False


def write_card(card: Card) -> str:
    """Return the text of the card."""
    parts = [_head(card), _about(card), _prompt(card), _use(card), _training(card), _result(card)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(card: Card) -> str:
    library = "peft" if card.is_adapter else "transformers"
    values: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["gptj-ft"]}
    if card.origin is not None:
        known = {"license": card.origin.license} if card.origin.license else {}
        values = {**known, "base_model": card.origin.repository, **values}
        values["base_model_relation"] = "adapter" if card.is_adapter else "finetune"
    return f"---\n{yaml.dump(values).rstrip()}\n---"


def _about(card: Card) -> str:
    origin = card.origin
    base = f"[{origin.repository}](https://huggingface.co/{origin.repository})" if origin else f"A {card.model_type}"
    at = f" at commit `{origin.commit}`" if origin else " model that is not on the Hub"
    terms = f"License of the base model: {origin.license if origin and origin.license else 'not known'}."
    title = f"# {origin.repository.split('/')[-1] if origin else card.model_type}, fine-tuned: {card.recipe.recipe}"
    return f"{title}\n\n{base}{at}, fine-tuned with gptj-ft {__version__}.\n{terms}"


def _prompt(card: Card) -> str:
    recipe, end = card.recipe, f"`{card.end}`" if card.end else "the end-of-text token"
    if not recipe.prompt:
        return f"## Prompt\n\nNone: the model was trained on whole texts, each ended by {end}, and goes on with yours."
    chat = "`chat_template.jinja` makes it of messages" if card.has_chat_template else ""
    if chat and not is_chat(recipe):
        chat += ": the last one of the user is the field, and no other is looked at"
    return (
        "## Prompt\n\nTrained on prompts of exactly this form ([Jinja](https://jinja.palletsprojects.com); "
        f"fields: {', '.join(fields_of(recipe.prompt))}).{f' {chat}.' if chat else ''}\n\n"
        f"{_block(recipe.prompt, 'jinja')}\n\nand answers of this one, ended by {end}:\n\n"
        + _block(recipe.completion, "jinja")
    )


def _use(card: Card) -> str:
    settings, fields = card.recipe.generation, fields_of(card.recipe.prompt)
    how = f"{'Sampled' if settings.temperature else 'Greedy'}, at most {settings.max_new_tokens} tokens"
    how += f", {settings.num_beams} beams" if settings.num_beams > 1 else ""
    how += f", up to the first of {', '.join(map(repr, settings.stop))}" if settings.stop else ""
    more = "".join(f' --field {field}="..."' for field in fields[:-1])
    # vLLM takes the temperature from the settings, but not that there is none.
    greedy = "" if settings.temperature else """ --override-generation-config '{"temperature": 0}'"""
    server = "or from a server" + ("" if card.has_chat_template else ", which is sent the whole prompt")
    server += "; of vLLM, ask for the same `stop` in each request" if settings.stop else ""
    folder, merge = ("merged", "gptj-ft convert --merge . BASE merged\n") if card.is_adapter else (".", "")
    return "\n\n".join(
        (
            f"## Use\n\n{how} (`generation_config.json`). On a machine that it does not fit, with gptj-ft:",
            _block(f'gptj-ft generate --model . "..."{more}', "sh"),
            "with `transformers` and `peft`, where the base model is what `adapter_config.json` names:"
            if card.is_adapter
            else "with `transformers`:",
            _block(_code(card), "python"),
            f"{server}:",
            _block(f"{merge}transformers serve {folder}\nvllm serve {folder} --dtype bfloat16{greedy}", "sh"),
        )
    )


def _code(card: Card) -> str:
    """Return a program that asks the model with `transformers`, as it was asked in training."""
    template = card.recipe.prompt
    if card.has_chat_template:
        prompt = """tokenizer.apply_chat_template([{"role": "user", "content": "..."}], tokenize=False)"""
    elif template:
        values = ", ".join(f'{field}="..."' for field in fields_of(template))
        prompt = f"jinja2.Template({template!r}, keep_trailing_newline=True).render({values})"
    else:
        prompt = '"..."'
    return f"""{"import jinja2" if prompt.startswith("jinja2") else ""}
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its name on the Hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
prompt = {prompt}
inputs = tokenizer(prompt, return_tensors="pt")
written = model.generate(**inputs, tokenizer=tokenizer)
print(tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))""".lstrip()


def _training(card: Card) -> str:
    options, updates_before = card.recipe.to_dict(), card.metrics.get("updates_before", 0)
    lora = {f"lora.{key}": value for key, value in options["lora"].items()} if options["method"] == "lora" else {}
    options = {key: options[key] for key in HYPER_PARAMETERS if options.get(key) not in (None, [])} | lora
    rows = {
        "training rows": f"{card.data['rows']:,}",
        "validation rows": f"{card.data.get('validation_rows') or 0:,}",
        "SHA-256 of the data": f"`{card.data['sha256']}`" if card.data.get("sha256") else "not known",
        "optimizer steps": f"{card.metrics['steps']:,}",
        **({"updates of its moments before": f"{updates_before:,}"} if updates_before else {}),
        **{f"`{key}`": f"`{value}`" for key, value in options.items()},
    }
    return "## Training\n\n| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _result(card: Card) -> str:
    before, after = card.metrics.get("baseline_validation_loss"), card.metrics.get("validation_loss")
    if before is None or after is None:
        return ""
    losses = [float(before), float(after)]
    loss = " | ".join(f"{each:.4f}" for each in losses)
    perplexity = " | ".join(f"{math.exp(min(each, 700.0)):.2f}" for each in losses)
    return (
        "## Result\n\n| on the validation rows | before | after |\n|---|---|---|\n"
        f"| loss per token | {loss} |\n| perplexity | {perplexity} |"
    )


def _block(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
