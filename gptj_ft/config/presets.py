"""Find and load recipe presets and option files."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from gptj_ft.errors import UsageError, did_you_mean
from gptj_ft.system.plain_text import shortened


def recipes_folder() -> Path:
    """Return the folder of presets: inside the installed package, or next to it in a checkout."""
    packaged = Path(__file__).parents[1] / "recipes"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "recipes"


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def preset_file(name: str) -> Path:
    """Return the file of a preset."""
    if name not in preset_names():
        raise UsageError(
            f"no recipe '{shortened(name)}'{did_you_mean(name, preset_names())}; `gptj-ft recipes list` shows: "
            + ", ".join(preset_names())
        )
    return recipes_folder() / f"{name}.yaml"


def load_preset(name: str) -> dict[str, Any]:
    """Load the options of a preset."""
    # The cached mapping is shared: callers may change theirs.
    return copy.deepcopy(_options_of(preset_file(name)))


@functools.cache
def _options_of(preset: Path) -> dict[str, Any]:
    """Load the options of a preset once; a command needs them several times."""
    return load_options(preset)


def load_options(path: Path) -> dict[str, Any]:
    """Load a YAML mapping."""
    from gptj_ft.config import yaml

    try:
        loaded = yaml.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: expected `option: value` lines, found {type(loaded).__name__}")
    return {str(key): value for key, value in loaded.items()}
