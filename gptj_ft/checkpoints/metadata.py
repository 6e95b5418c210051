"""Read and write the texts of a tuned model folder: ``gptj_ft.json``, model card, chat template, generation settings.

They describe how to prompt the model. They may be published, so they contain no local paths and no training data.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template

from gptj_ft import __version__
from gptj_ft.checkpoints.download import read_origin
from gptj_ft.checkpoints.fingerprint import sampled_digest
from gptj_ft.checkpoints.model_folder import GENERATION_CONFIG, METADATA_FILE, Checkpoint, open_checkpoint
from gptj_ft.config.options import Generation, Recipe, Task
from gptj_ft.data.chat import chat_template, is_chat
from gptj_ft.data.chat_template import has_template
from gptj_ft.data.labelled.assembly import JOINT
from gptj_ft.data.template import fields_of
from gptj_ft.data.tokenization import frame_of, has_tokenizer, load_tokenizer
from gptj_ft.data.wordpiece import splits_at_blanks
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.registry import Architecture
from gptj_ft.system.digests import check_file, read_json
from gptj_ft.system.paths import name_in_home

# Options of a recipe that define prompts, generation and metrics.
TEMPLATE_KEYS = (
    "recipe", "prompt", "completion", "fields", "map", "documents", "quotes", "sentences", "labels", "no_answer",
    "shorten", "on_long", "cut", "max_length", "metrics", "stemming", "generation",
)  # fmt: skip
CHAT_KEYS = ("chat_template", "template_options", "template_date")  # further ones with a chat template
HEAD_KEYS = (  # further ones for models with a head
    "task", "pair", "stride", "label_threshold", "max_answer_tokens", "num_best", "null_threshold", "num_sentences",
    "block_trigrams",
)  # fmt: skip

# Options that determined the weights. None of them can hold a local path or a name.
HYPER_PARAMETERS = (
    "method", "train", "epochs", "max_steps", "batch_size", "max_length", "on_long", "packing", "lr", "schedule",
    "warmup", "final_lr", "betas", "eps", "weight_decay", "clip_norm", "z_loss", "class_weights", "dropout",
    "attention_dropout", "layer_decay", "bias_correction", "seed", "precision", "moments", "gradients",
)  # fmt: skip
PIPELINES: Mapping[Task, str] = {  # pipeline tags of the Hub and `transformers`
    "classification": "text-classification",
    "multi-label": "text-classification",
    "regression": "text-classification",
    "token-labels": "token-classification",
    "spans": "question-answering",
    "sentences": "summarization",
}
LOSSES = ("baseline_validation_loss", "validation_loss")


@dataclass(frozen=True)
class ModelMetadata:
    """Content of ``gptj_ft.json``."""

    base_model: str
    """Name in `paths.models` of the base model; empty for one outside, because the file must not name local folders."""
    template: Mapping[str, Any]  # the recipe's `TEMPLATE_KEYS`
    data: Mapping[str, Any]  # numbers of training and validation rows, digest of the data
    metrics: Mapping[str, Any]  # validation loss before and after, steps
    base_digest: str | None = None  # of an adapter's base model, see `fingerprint.sampled_digest`
    head: Mapping[str, Any] | None = None  # task and labels of an adapter with a head; a model's are in config.json
    base_quantization: str | None = None  # of an adapter's base model; None: not quantized

    def to_dict(self) -> dict[str, Any]:
        values = {"format": 1, **self.__dict__}
        if self.base_quantization is None:
            del values["base_quantization"]
        return values


def template_of(recipe: Recipe) -> dict[str, Any]:
    """Return the options of a recipe that a tuned model stores."""
    options = recipe.model_dump(mode="json")
    keys: tuple[str, ...] = TEMPLATE_KEYS if recipe.task == "language-model" else (*TEMPLATE_KEYS, *HEAD_KEYS)
    keys += CHAT_KEYS if has_template(recipe) else ()
    keys += ("bos",) if recipe.task == "language-model" else ()
    if not recipe.generation.end_tokens:
        del options["generation"]["end_tokens"]
    return {key: options[key] for key in keys}


def read_metadata(model: Path) -> ModelMetadata | None:
    """Read ``gptj_ft.json``; return ``None`` for a model without it."""
    path = model / METADATA_FILE
    if not path.is_file():
        return None
    check_file(path)
    values = read_json(path)
    try:
        if isinstance(template := values.get("template"), dict) and "task" not in template:
            template.setdefault("bos", False)  # before there was this option, no text began with BOS
        return ModelMetadata(**{key: values[key] for key in ModelMetadata.__dataclass_fields__ if key in values})
    except TypeError as error:
        raise DataError(f"{path} is damaged: {error!r}") from error


def check_base(adapter: Path, architecture: Architecture, checkpoint: Checkpoint) -> None:
    """Check that a model is the base of an adapter. One of another program records no digest and always passes."""
    metadata = read_metadata(adapter)
    if not metadata or not metadata.base_digest or sampled_digest(architecture, checkpoint) == metadata.base_digest:
        return
    now, then = checkpoint.quantization, metadata.base_quantization
    if now != then:
        raise DataError(
            f"the adapter in {adapter} was trained on a model that is {_form_of(then)}, but {checkpoint.folder} is "
            f"{_form_of(now)}: name the model that it was trained on, or merge it into this one with `gptj-ft "
            "convert --merge ADAPTER MODEL --any-base`"
        )
    raise DataError(
        f"{checkpoint.folder} is not the base model of the adapter in {adapter}, but another one of its shape, or "
        "the same in another type: put the right one there"
    )


def _form_of(quantization: str | None) -> str:
    return f"quantized as {quantization}" if quantization else "not quantized"


@dataclass(frozen=True)
class TunedModel:
    """Facts of a finished run that go into the texts of its model folder."""

    recipe: Recipe
    base: Path  # folder of the base model
    architecture: Architecture
    data: Mapping[str, Any]  # ``rows`` for training, ``validation_rows``, ``sha256`` of the file
    metrics: Mapping[str, Any]  # ``validation_loss``, ``baseline_validation_loss``, ``steps``


def metadata_files(trained: TunedModel, is_adapter: bool = False) -> dict[str, str]:
    """Return the text files of a model folder or, if ``is_adapter``, of an adapter folder, by file name.

    Raises:
        DataError: the base model's ``source.json`` is damaged.
    """
    recipe, architecture = trained.recipe, trained.architecture
    base_digest, quantization = None, None
    if is_adapter:
        with open_checkpoint(trained.base) as checkpoint:
            base_digest, quantization = sampled_digest(architecture, checkpoint), checkpoint.quantization
    has_labels = is_adapter and architecture.task is not None
    tuning = ModelMetadata(
        name_in_home(trained.base), template_of(recipe), trained.data, trained.metrics, base_digest,
        {"task": architecture.task, "labels": list(architecture.labels)} if has_labels else None,
        quantization,
    )  # fmt: skip
    metadata = json.dumps(tuning.to_dict(), indent=2, ensure_ascii=False) + "\n"
    if architecture.task is not None:
        return {METADATA_FILE: metadata, "README.md": _label_card(trained, is_adapter)}
    ends = dict[str, Any]()
    try:
        tokenizer = load_tokenizer(trained.base)
        end, token = tokenizer.eos_token_id, tokenizer.eos_token
        if names := recipe.generation.end_tokens:
            pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
            ends = {"eos_token_id": tokenizer.convert_tokens_to_ids(list(names)), "pad_token_id": pad}
            token = names[0]
    except UsageError:  # a model without a tokenizer
        end, token = getattr(architecture.config, "eos_token_id", None), None
    begin = architecture.raw.get("bos_token_id")
    settings = _generation_config(recipe.generation, end) | ({} if begin is None else {"bos_token_id": begin}) | ends
    template = recipe.chat_template if has_template(recipe) else chat_template(recipe)
    files = {
        METADATA_FILE: metadata,
        GENERATION_CONFIG: json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
        "README.md": _model_card(trained, token, bool(template), is_adapter),
    }
    return files | ({"chat_template.jinja": template} if template else {})


def _generation_config(settings: Generation, end: int | None) -> dict[str, Any]:
    """Return the recipe's generation settings for `transformers`, without its defaults.

    Args:
        end: id of the token that ends a document and pads.
    """
    # Leave out prompt lookup: it changes only the speed, and not every reader of this file supports it.
    plain = Generation.model_validate({}).search_options() | {
        "prompt_lookup_num_tokens": settings.prompt_lookup_num_tokens
    }
    always = {"max_new_tokens", "do_sample"}
    options = {
        key: value for key, value in settings.search_options().items() if key in always or value != plain.get(key)
    }
    return options | ({} if end is None else {"eos_token_id": end, "pad_token_id": end})


def _model_card(trained: TunedModel, end: str | None, has_chat_template: bool, is_adapter: bool) -> str:
    """Return ``README.md`` from ``model_card.md.jinja``.

    Args:
        end: token that ends an answer; ``None``: unknown.
    """
    recipe, losses = trained.recipe, _losses(trained)
    return _card(
        trained,
        is_adapter,
        "model_card.md.jinja",
        "text-generation",
        end=end,
        has_chat_template=has_chat_template,
        is_chat=is_chat(recipe),
        is_models_own=has_template(recipe),
        adds_bos=recipe.bos and not has_template(recipe),
        fields=fields_of(recipe.prompt),
        prompt=repr(recipe.prompt),
        stop=", ".join(map(repr, recipe.generation.stop)),
        # math.exp raises OverflowError above 709.
        perplexities=[math.exp(min(loss, 700.0)) for loss in losses],
    )


def _label_card(trained: TunedModel, is_adapter: bool) -> str:
    """Return ``README.md`` of a model with a head, from ``model_card_labels.md.jinja``."""
    architecture = trained.architecture
    assert architecture.task is not None
    kind = PIPELINES.get(architecture.task)
    tokenizer = load_tokenizer(trained.base) if has_tokenizer(trained.base) else None
    return _card(
        trained,
        is_adapter,
        "model_card_labels.md.jinja",
        kind,
        kind=None if architecture.task == "sentences" else kind,  # transformers has no class for it
        task=architecture.task,
        labels=architecture.labels,
        is_plain=re.fullmatch(r"\{\{ *\w+ *\}\}", trained.recipe.prompt.strip()) is not None,
        # A decoder's tokenizer would write a pair in another form than the rows of training.
        is_joined=bool(trained.recipe.pair) and tokenizer is not None and not frame_of(tokenizer).exists,
        joint=repr(JOINT),
        needs_blank=tokenizer is not None and not splits_at_blanks(tokenizer),
    )


def _losses(trained: TunedModel) -> list[float]:
    """Return the validation losses before and after; an empty list if one is unknown."""
    before, after = map(trained.metrics.get, LOSSES)
    return [] if before is None or after is None else [float(before), float(after)]


def _card(trained: TunedModel, is_adapter: bool, template: str, pipeline: str | None, **values: Any) -> str:
    """Return ``README.md`` from a template.

    Args:
        template: file name.
        pipeline: the Hub's tag of the task.
        **values: further values for the template.
    """
    from huggingface_hub import ModelCardData

    origin = read_origin(trained.base)
    library = "peft" if is_adapter else "transformers"
    head: dict[str, Any] = {"library_name": library, "pipeline_tag": pipeline, "tags": ["gptj-ft"]}
    if origin is not None:
        head |= {"base_model": origin.repository, "license": origin.license or None}
        head["base_model_relation"] = "adapter" if is_adapter else "finetune"
    written = _template(template).render(
        card_data=ModelCardData(**head).to_yaml(),
        recipe=trained.recipe,
        origin=origin,
        model_type=trained.architecture.family.model_type,
        is_adapter=is_adapter,
        version=__version__,
        block=_block,
        training=_training(trained),
        losses=_losses(trained),
        **values,
    )
    return f"{written.rstrip()}\n"


@cache
def _template(name: str) -> Template:
    """Compile a template of model cards; cached, because compiling takes ten times as long as rendering."""
    compiled: Template = Template(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return compiled


def _training(trained: TunedModel) -> dict[str, str]:
    """Return the rows of the card's training table."""
    options, updates_before = trained.recipe.to_dict(), trained.metrics.get("updates_before", 0)
    method = options["method"]
    own = {f"{method}.{key}": value for key, value in options[method].items()} if method in options else {}
    options = {key: options[key] for key in HYPER_PARAMETERS if options.get(key) not in (None, [])} | own
    return {
        "training rows": f"{trained.data['rows']:,}",
        "validation rows": f"{trained.data.get('validation_rows') or 0:,}",
        "SHA-256 of the data": f"`{trained.data['sha256']}`" if trained.data.get("sha256") else "not known",
        "optimizer steps": f"{trained.metrics['steps']:,}",
        **({"updates of its moments before": f"{updates_before:,}"} if updates_before else {}),
        **{f"`{key}`": f"`{value}`" for key, value in options.items()},
    }


def _block(text: str, language: str) -> str:
    """Return a code block whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
