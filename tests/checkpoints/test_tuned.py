"""Test the texts of a tuned model folder: settings, chat template, card; no private paths."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import yaml
from conftest import NOTES
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from gptj_ft.checkpoints.adapter import write_adapter
from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.download import Origin, read_origin
from gptj_ft.checkpoints.metadata import TunedModel, metadata_files
from gptj_ft.checkpoints.model_folder import layer_tensors, open_checkpoint, write_model
from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.options import Recipe
from gptj_ft.config.presets import load_preset, preset_names
from gptj_ft.config.resolve import build, resolve
from gptj_ft.data.chat import chat_template, read_conversation
from gptj_ft.data.encode import encode_prompt
from gptj_ft.data.template import fields_of, stripped
from gptj_ft.data.tokenization import load_tokenizer
from gptj_ft.evaluation.evaluate import choose_baseline

DATA = {"rows": 38, "validation_rows": 2, "sha256": "ab" * 32}
METRICS = {"steps": 10, "validation_loss": 1.25, "baseline_validation_loss": 6.5}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = make_tiny(tmp_path / "base", [note for note, _ in NOTES], seed=0)
    (folder / "source.json").write_text(Origin("EleutherAI/gpt-j-6b", "c" * 40, "apache-2.0").to_text())
    return folder


def tuned(base: Path, recipe: Recipe, target: Path) -> Path:
    """Write the base model as if a recipe had tuned it."""
    architecture = read_architecture(base)
    files = metadata_files(TunedModel(recipe, base, architecture, DATA, METRICS))
    with open_checkpoint(base) as checkpoint:
        layers = [layer_tensors(architecture, checkpoint, index) for index in range(len(architecture.layers()))]
    write_model(target, architecture, layers, dtype=None, source=base, files=files)
    return target


def preset(name: str, **options: object) -> Recipe:
    return resolve({"recipe": name, **options}, environment={}).recipe


def program_of(card: str) -> str:
    return re.search(r"```python\n(.*?)\n```", card, re.DOTALL)[1]


@pytest.mark.parametrize("name", preset_names())
def test_chat_template_produces_training_tokens(name: str, base: Path) -> None:
    recipe, messages = preset(name), [{"role": "user", "content": "Is it {{ here }}?\n\n{% No %}. \n"}]
    fields = fields_of(recipe.prompt)
    template = chat_template(recipe)
    assert (template is not None) == (len(fields) == 1)
    if template is None:
        return
    tokenizer = load_tokenizer(base)
    text = messages[0]["content"]
    values = {fields[0]: read_conversation(messages)} if name == "chat" else stripped(recipe, {fields[0]: text})
    theirs = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=True)["input_ids"]
    assert theirs == encode_prompt(recipe, tokenizer, values, 2000).ids


@pytest.mark.parametrize(
    "prompt",
    [
        "{{ document }}\n",
        "\n  {{ document }}",
        "{% if document %}\n  {{ document }}\n{% endif %}\n\nSummary:",
        "a\n  {%- if document %}  {{ document }}\n  {% endif -%}\n b {# a\nnote #}\n c",
        "{% for line in document.splitlines() %}\n> {{ line }}\n{% endfor %}\n",
        "{% raw %}{{ kept }}{% endraw %} {{ document }}",
    ],
)
def test_template_white_space_is_kept(prompt: str, base: Path) -> None:
    recipe, text = build({"prompt": prompt, "completion": "{{ summary }}"}), "one\ntwo"
    tokenizer, template = load_tokenizer(base), chat_template(recipe)
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": text}]
    assert template is not None
    theirs = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert tokenizer(theirs)["input_ids"] == encode_prompt(recipe, tokenizer, {"document": text}, 2000).ids


def test_unportable_chat_template_is_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = preset("summarization")
    assert chat_template(recipe) is not None
    monkeypatch.setattr("gptj_ft.data.chat._portable", lambda source: source + " ")
    assert chat_template(recipe) is None


def test_generation_config_matches_recipe(base: Path, tmp_path: Path) -> None:
    end = read_architecture(base).raw["eos_token_id"]
    sampled = GenerationConfig.from_pretrained(tuned(base, preset("chat"), tmp_path / "a"))
    sampled.validate(strict=True)
    assert (sampled.do_sample, sampled.temperature, sampled.top_p, sampled.top_k) == (True, 0.7, 0.95, 0)
    assert (sampled.max_new_tokens, sampled.stop_strings) == (256, ["\n\nUser:"])
    greedy = GenerationConfig.from_pretrained(tuned(base, preset("summarization"), tmp_path / "b"))
    greedy.validate(strict=True)
    assert (greedy.do_sample, greedy.temperature, greedy.stop_strings) == (False, None, None)
    beams = preset("summarization", generation={"num_beams": 4, "length_penalty": 0.8, "max_new_tokens": 9})
    searched = GenerationConfig.from_pretrained(tuned(base, beams, tmp_path / "c"))
    searched.validate(strict=True)
    assert (searched.num_beams, searched.length_penalty, searched.max_new_tokens) == (4, 0.8, 9)
    chosen = {"min_p": 0.1, "min_new_tokens": 2, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "top_k": 7}
    drawn = GenerationConfig.from_pretrained(
        tuned(base, preset("summarization", generation={"temperature": 0.9, **chosen}), tmp_path / "d")
    )
    drawn.validate(strict=True)
    assert {key: getattr(drawn, key) for key in chosen} == chosen
    assert (greedy.eos_token_id, greedy.pad_token_id, greedy.bos_token_id) == (end, end, end)


def test_other_tools_read_the_folder(base: Path, tmp_path: Path) -> None:
    folder = tuned(base, preset("summarization"), tmp_path / "tuned")
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.architectures == ["GPTJForCausalLM"]
    assert AutoTokenizer.from_pretrained(folder).chat_template == (folder / "chat_template.jinja").read_text()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in folder.glob("*.safetensors")}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("summarization", 'generate "..."'),
        ("qa", 'generate "..." --field context="..."'),
        ("autocomplete", "generate ..."),
    ],
)
def test_card_program_matches_generate(
    base: Path, tmp_path: Path, shell, monkeypatch: pytest.MonkeyPatch, name: str, line: str
) -> None:
    recipe = preset(name, generation={"max_new_tokens": 24, "stop": ["e"], "temperature": 0.0})
    folder = tuned(base, recipe, tmp_path / "tuned")
    card = (folder / "README.md").read_text()
    monkeypatch.chdir(folder)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(program_of(card), {})  # our own card, on a model made here
    said = json.loads(shell(f"{line} --model . --json").out)
    assert printed.getvalue().strip().startswith(said["text"])
    assert printed.getvalue().strip()[len(said["text"]) :].strip()[:1] in ("", "e")
    assert "--field context" in card if name == "qa" else "--field" not in card


def test_card_describes_model_and_training(base: Path, tmp_path: Path) -> None:
    folder = tuned(base, preset("qa"), tmp_path / "tuned")
    card = (folder / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert (head["license"], head["base_model"]) == ("apache-2.0", "EleutherAI/gpt-j-6b")
    assert load_preset("qa")["prompt"] in card
    for fact in (
        "c" * 40,
        "| 38 |",
        "| 2 |",
        "ab" * 32,
        "| `lr` | `2e-05` |",
        "| 6.5000 | 1.2500 |",
        "transformers serve",
    ):
        assert fact in card, fact
    assert read_origin(folder) == Origin("EleutherAI/gpt-j-6b", "c" * 40, "apache-2.0")


def test_prompt_with_fences_survives_in_card(base: Path, tmp_path: Path) -> None:
    prompt = "```\n{{ document }}\n```\nSummary:"
    recipe = build({"prompt": prompt, "completion": "{{ summary }}"})
    assert f"````jinja\n{prompt}\n````" in (tuned(base, recipe, tmp_path / "tuned") / "README.md").read_text()


def test_conversion_keeps_card_template_and_origin(base: Path, tmp_path: Path) -> None:
    folder = tuned(base, preset("summarization"), tmp_path / "tuned")
    convert(folder, tmp_path / "half", Conversion(dtype="bf16"))
    for name in ("README.md", "chat_template.jinja", "generation_config.json", "gptj_ft.json", "source.json"):
        assert (tmp_path / "half" / name).read_bytes() == (folder / name).read_bytes()


def adapter(base: Path, folder: Path) -> Path:
    """Write an adapter of the first block's queries as if a recipe had trained it."""
    trained = TunedModel(preset("summarization", method="lora"), base, read_architecture(base), DATA, METRICS)
    name, matrices = "transformer.h.0.attn.q_proj", (("lora_A", torch.randn(2, 96)), ("lora_B", torch.randn(96, 2)))
    layers = [{f"{name}.{part}.weight": matrix for part, matrix in matrices}]
    write_adapter(folder, base, {"r": 2, "lora_alpha": 3}, layers, metadata_files(trained, is_adapter=True))
    return folder


@pytest.mark.parametrize("to", ["folder", "huggingface"])
def test_merged_folder_describes_the_adapter(base: Path, tmp_path: Path, to: str) -> None:
    for name in ("README.md", "chat_template.jinja", "LICENSE"):
        (base / name).write_text("the base's")
    own = adapter(base, tmp_path / "own")
    convert(base, tmp_path / "merged", Conversion(to=to, merge=own))
    for name in ("chat_template.jinja", "generation_config.json", "gptj_ft.json", "tokenizer.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (own / name).read_bytes(), name
    assert (tmp_path / "merged" / "LICENSE").is_file()
    assert not (tmp_path / "merged" / "README.md").exists()


def test_merge_of_bare_adapter_keeps_settings(base: Path, tmp_path: Path) -> None:
    bare = adapter(base, tmp_path / "bare")
    for path in bare.iterdir():
        if not path.name.startswith("adapter_"):
            path.unlink()
    (base / "chat_template.jinja").write_text("the base's")
    (base / "generation_config.json").write_text('{"eos_token_id": 7}')
    convert(base, tmp_path / "merged", Conversion(merge=bare))
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes(), name


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_merge_rounds_to_requested_type_only(base: Path, tmp_path: Path, quantize: str | None) -> None:
    convert(base, tmp_path / "half", Conversion(dtype="bf16"))
    convert(tmp_path / "half", tmp_path / "wide", Conversion(dtype="fp32"))
    own = adapter(base, tmp_path / "own")
    for name in ("half", "wide"):
        conversion = Conversion(merge=own, any_base=True, dtype="fp32", quantize=quantize)
        convert(tmp_path / name, tmp_path / f"{name}-merged", conversion)
    for shard in (tmp_path / "wide-merged").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "half-merged" / shard.name).read_bytes(), shard.name


def test_tuned_model_names_no_private_paths(
    rows_file: Path, tmp_path: Path, shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmp_path / "Acme-GmbH"
    private.mkdir()
    rows_file.rename(private / "complaints.jsonl")
    base = make_tiny(private / "acme-base", ["some text"], seed=0)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "_name_or_path": str(base)}))
    done = shell(
        f"finetune --recipe summarization --data {private}/complaints.jsonl --model {base} --max-steps 2 "
        f"--batch-size 2 --output {private}/run --keep all --save-every 1 --json"
    )
    assert done.code == 0, done.err
    assert shell(f"runs export {private}/run {tmp_path}/exported --from step-000001").code == 0
    for folder in (private / "run" / "model", tmp_path / "exported"):
        assert (folder / "README.md").is_file()
        content = b"".join(path.read_bytes() for path in folder.iterdir()).decode("utf-8", "replace").lower()
        texts = [text.format(n=n) for n in range(40) for text in NOTES[n % 3]]
        names = ["complaints", str(tmp_path), *(str(path.name) for path in (private, base)), str(Path.home())]
        for secret in (*names, *texts):
            assert secret.lower() not in content, secret
        texts_only = b"".join(
            path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".md", ".jinja")
        )
        assert b"acme" not in texts_only.lower()
    assert choose_baseline(private / "run" / "model", "auto") == base.resolve()
    assert choose_baseline(tmp_path / "exported", "auto") is None
