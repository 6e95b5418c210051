"""Check the structure of the source: imports, start-up cost, the wheel, docstring references."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gptj_ft"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@cache
def text_of(node: ast.AST) -> str:
    return ast.unparse(node)


def test_streaming_core_names_no_family() -> None:
    from gptj_ft.models.registry import families

    for path in [*(PACKAGE / "streaming").rglob("*.py"), PACKAGE / "training/loop.py", PACKAGE / "training/setup.py"]:
        text = path.read_text(encoding="utf-8").lower()
        words = text.replace("gptj_ft", "").replace("gptj-ft", "").replace("gptjfterror", "")
        assert not [family for family in families() if family in words], path


def test_torch_free_family_list_is_complete() -> None:
    from gptj_ft.models.registry import families
    from gptj_ft.models.supported import MODEL_TYPES, TINY_MODELS

    assert set(MODEL_TYPES) == set(TINY_MODELS.values()) == set(families())


def test_public_names_are_unique_per_package() -> None:
    """Allow what each family defines by its contract, and a command with the name of the function it calls."""
    idioms, families = {"T", "log", "main"}, PACKAGE / "models"
    places: dict[tuple[str, str], set[Path]] = {}
    for path in PACKAGE.rglob("*.py"):
        package = path.relative_to(PACKAGE).parts[0]
        for node in tree_of(path).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            names += [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            for name in names:
                if not name.startswith("_") and name not in idioms and path.stem != name:
                    places.setdefault((package, name), set()).add(path)
    repeated = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not {name: paths for name, paths in repeated.items() if {path.parent for path in paths} != {families}}


def test_planted_bugs_fit_the_source() -> None:
    for each in json.loads((ROOT / "tests/support/planted_bugs.json").read_text(encoding="utf-8")):
        source = (PACKAGE / each["file"]).read_text(encoding="utf-8")
        assert source.count(each["before"]) == 1, each["bug"]
        assert all((ROOT / "tests" / name).is_file() for name in each["tests"]), each["bug"]


def test_no_test_imports_another() -> None:
    # A search first: to parse all tests takes 20 times as long.
    may_import = re.compile(r"^\s*(?:from|import)\s+(?:[\w.]+,\s*)*test_", re.MULTILINE)
    for path in (ROOT / "tests").rglob("*.py"):
        for node in nodes_of(path) if may_import.search(path.read_text(encoding="utf-8")) else ():
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.startswith("test_")], f"{path}: what it shares is for support/"


def test_scripts_import_existing_names() -> None:
    scripts = [path for folder in ("benchmarks", "examples", "docs") for path in (ROOT / folder).rglob("*.py")]
    assert scripts
    for path in scripts:
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gptj_ft":
                module = importlib.import_module(str(node.module))
                for name in (alias.name for alias in node.names):
                    is_module = (
                        importlib.util.find_spec(f"{node.module}.{name}") if hasattr(module, "__path__") else None
                    )
                    assert hasattr(module, name) or is_module, f"{path}: {node.module} has no {name}"


def test_help_and_completion_import_no_torch() -> None:
    code = (
        "import os, sys; sys.argv = ['gptj-ft', 'finetune', '--help']\n"
        "from gptj_ft.cli.app import main\n"
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
    assert done.stdout.endswith(
        "tiny\ntiny-gpt2\ntiny-gpt-neox\ntiny-llama\ntiny-mistral\ntiny-qwen2\ntiny-qwen3\ntiny-smollm3\ntiny-granite\ntiny-phi3\ntiny-gemma\ntiny-gemma2\ntiny-gemma3\ntiny-bert\ntiny-roberta\ntiny-xlm-roberta\n"
    )


def test_prepare_data_imports_no_torch(tmp_path: Path) -> None:
    from support.tiny_tokenizer import make_tokenizer

    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "gptj", "n_positions": 2048, "vocab_size": 60000}', encoding="utf-8"
    )
    (tmp_path / "rows.jsonl").write_text('{"document": "The lift stops.", "summary": "Lift."}\n' * 9, encoding="utf-8")
    code = (
        f"import sys; sys.argv = ['gptj-ft', 'prepare-data', '--model', {str(tmp_path)!r}, '--recipe', 'summarization'"
        f", '--data', {str(tmp_path / 'rows.jsonl')!r}]\n"
        "from gptj_ft.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'torch', 'datasets', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


# Distributions whose import name differs.
MODULES = {"protobuf": "google", "python_docx": "docx", "pyyaml": "yaml"}
# Declared for another package that imports it if installed.
INDIRECT = {"defusedxml": "openpyxl"}


def imported_modules() -> set[str]:
    """Return the third-party top-level modules that the package imports."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).partition(".")[0])
    return found - sys.stdlib_module_names - {"gptj_ft"}


def test_dependencies_match_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    extras = {name: lines for name, lines in extras.items() if name not in ("dev", "docs")}
    lines = [*project["dependencies"], *(line for group in extras.values() for line in group)]
    names = [re.split("[<>=]", line)[0].replace("-", "_") for line in lines]
    assert sorted(MODULES.get(name, name) for name in names if name not in INDIRECT) == sorted(imported_modules())
    assert set(INDIRECT.values()) <= set(names)


def test_built_wheel_finds_its_recipes(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "from gptj_ft.config import presets; "
        "print(presets.__file__, *presets.preset_names()); presets.load_preset('qa')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    location, *names = done.stdout.split()
    assert location.startswith(str(tmp_path)), "this tested the checkout, not the wheel"
    assert "summarization" in names


def documented_arguments(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Return the names under ``Args`` in a docstring."""
    section = (ast.get_docstring(node) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = [line.partition(":")[0] for line in section.splitlines() if re.match(r"    [*\w]", line)]
    return {name.strip(" *") for entry in entries for name in entry.split(",")}


def arguments(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Return the parameters of a function, or the constructor parameters of a class."""
    if isinstance(node, ast.FunctionDef):
        given = node.args
        return {
            each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if each
        }
    makers = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    fields = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return arguments(makers[0]) if makers else fields


def test_docstring_arguments_exist() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {name}"
        for path in sorted((ROOT / "gptj_ft").rglob("*.py"))
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        for name in sorted(documented_arguments(node) - arguments(node))
    ]
    assert wrong == []


def described(docstring: str) -> list[str]:
    """Return the descriptions under ``Args`` and ``Attributes`` in a docstring, as far as their first lines go."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:    .*(?:\n|$))+)", docstring, re.M)
    return re.findall(r"^    [*\w][^:]*: (.*)", "".join(f"{each}\n" for each in sections), re.M)


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every docstring of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                name = "" if isinstance(node, ast.Module) else f":{node.lineno} {node.name}"
                yield f"{path.relative_to(ROOT)}{name}", ast.get_docstring(node) or ""


def test_argument_descriptions_are_noun_phrases() -> None:
    no_noun = re.compile(r"(?:of|what|how|which|where|when|why|that|it|who|by|for|on)\b")
    entries = [(place, entry) for place, text in docstrings() for entry in described(text)]
    assert entries
    assert not [f"{place}: {entry}" for place, entry in entries if no_noun.match(entry)]


def names_in(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return the names that a body defines, and where."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [each.id for target in targets if target for each in ast.walk(target) if isinstance(each, ast.Name)]
        found |= dict.fromkeys((*names, getattr(node, "name", "")), node)
    return found


def defines(names: dict[str, ast.stmt], dotted: list[str]) -> bool:
    """Return whether these names include a dotted one, given as its parts."""
    if not dotted:
        return True
    node = names.get(dotted[0])
    if not isinstance(node, ast.ClassDef):
        return node is not None and len(dotted) == 1
    return defines(names_in(node.body), dotted[1:]) or (len(dotted) == 2 and f"self.{dotted[1]}" in text_of(node))


def test_docstring_references_exist() -> None:
    trees = {path.relative_to(ROOT).with_suffix("").parts: tree_of(path) for path in PACKAGE.rglob("*.py")}
    modules = {parts[:-1] if parts[-1] == "__init__" else parts: names_in(tree.body) for parts, tree in trees.items()}

    def is_there(names: list[str]) -> bool:
        if any(defines(known, names) for known in modules.values()):
            return True
        splits = [(tuple(names[:number]), names[number:]) for number in range(1, len(names) + 1)]
        return any(
            parts[-len(module) :] == module and defines(known, rest)
            for parts, known in modules.items()
            for module, rest in splits
        )

    own = {parts[-1] for parts in modules}
    references = [
        (place, name)
        for place, text in docstrings()
        for name in re.findall(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)+)`(?!`)", text)
    ]
    assert len(references) > 50
    gone = []
    for place, name in references:
        first = name.partition(".")[0]
        is_foreign = first not in own and importlib.util.find_spec(first)
        if not is_foreign and not is_there(name.split(".")):
            gone.append(f"{place}: {name}")
    assert not gone
