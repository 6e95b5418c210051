"""How the source hangs together: import order, a light start, a wheel that finds its recipes."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gptj_ft"

# Each module may import modules of its own line and of the lines above.
ORDER = [
    ("__init__", "errors", "stopping", "streams"),
    (
        "recipe",
        "pages",
        "plain_text",
        "yaml_text",
        "schedule",
        "kv_cache",
        "layers",
        "linear",
        "runner",
        "home",
        "hub",
        "hub_files",
        "origin",
        "durable",
        "digests",
        "lock",
    ),
    ("machine", "stores", "families", "lora", "formats", "data"),
    ("buffers", "measure", "selection"),
    ("boundaries",),
    ("stack",),
    ("passage",),
    ("meters", "rates", "screen"),
    ("bars",),
    ("progress", "demand"),
    ("scaling", "published"),
    (
        "streaming",
        "plan",
        "costs",
        "knobs",
        "tuning",
        "metrics",
        "tiny",
        "compare",
        "proof",
        "copying",
        "convert",
        "inputs",
        "model",
        "unchanged",
    ),
    ("hub_models", "download", "card"),
    ("movement", "reading"),
    ("likelihood", "journal"),
    ("optimizer", "deadline", "run", "checkpoint", "session", "keeping", "verify", "state"),
    ("streamed_model", "decoding", "answering", "samples", "task"),
    ("guard", "trackers", "trainer", "typewriter", "tuned", "outcome"),
    (
        "finetune",
        "preparing",
        "evaluate",
        "generate",
        "answers_file",
        "answer_rows",
        "dialogue",
        "runs",
        "inventory",
        "push",
        "export",
    ),
    ("verdict", "predictions", "harness_model", "harness"),
    ("report", "data_report", "evaluation_report", "options"),
    ("run_report",),
    ("commands",),
    ("cli",),
    ("__main__",),
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def part_of(module: str) -> str:
    """`gptj_ft.stores.disk` -> `stores`."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    own = relative.parts[0].removesuffix(".py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gptj_ft"):
            targets = [
                f"{node.module}.{alias.name}" if node.module == "gptj_ft" else node.module for alias in node.names
            ]
        elif isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names if alias.name.startswith("gptj_ft")]
        for target in targets:
            part = part_of(str(target))
            part = part if part in RANK else "__init__"
            assert RANK[part] <= RANK[own], f"{relative}:{node.lineno} imports {target}"


def test_the_streaming_core_names_no_family() -> None:
    from gptj_ft.families import families

    for name in ("stack", "passage", "streaming", "optimizer", "trainer", "checkpoint", "model", "session", "state"):
        text = (PACKAGE / f"{name}.py").read_text(encoding="utf-8").lower()
        words = text.replace("gptj_ft", "").replace("gptj-ft", "").replace("gptjfterror", "")
        assert not [family for family in families() if family in words]


def test_help_and_completion_import_no_torch() -> None:
    code = (
        "import os, sys; sys.argv = ['gptj-ft', 'finetune', '--help']\n"
        "from gptj_ft.cli import main\n"
        "def run():\n"
        "    try: main()\n"
        "    except SystemExit as stop: assert not stop.code, stop.code\n"
        "run()\n"
        "words = 'gptj-ft finetune --model t'\n"
        "os.environ.update(_GPTJ_FT_COMPLETE='complete_bash', COMP_WORDS=words, COMP_CWORD='3')\n"
        "sys.argv = ['gptj-ft']; run()\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'pandas', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "--recipe" in done.stdout
    assert done.stdout.endswith("tiny\ntiny-gpt2\n")


def test_rows_are_prepared_without_torch_and_transformers_and_datasets(tmp_path: Path) -> None:
    from test_data_tokenizer import make_tokenizer

    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gptj", "vocab_size": 60000}', encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"document": "The lift stops.", "summary": "Lift."}\n' * 9, encoding="utf-8")
    code = (
        f"import sys; sys.argv = ['gptj-ft', 'prepare-data', '--model', {str(tmp_path)!r}, '--recipe', 'summarization'"
        f", '--data', {str(tmp_path / 'rows.jsonl')!r}]\n"
        "from gptj_ft.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_the_built_wheel_finds_its_recipes(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "from gptj_ft import recipe; print(recipe.__file__, *recipe.preset_names()); recipe.load_preset('qa')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    location, *names = done.stdout.split()
    assert location.startswith(str(tmp_path)), "this tested the checkout, not the wheel"
    assert "summarization" in names


def test_the_readme_has_a_line_for_every_source_file() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [
        str(path.relative_to(PACKAGE)) for path in modules()
        if path.name not in ("__init__.py", "__main__.py") and f"`{path.relative_to(PACKAGE)}`" not in readme
    ]  # fmt: skip
    assert not missing
