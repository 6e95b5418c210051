"""The tokenizer of a model folder, and what identifies it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gptj_ft.errors import UsageError
from gptj_ft.models.supported import MODEL_TYPES
from gptj_ft.system.digests import check_file
from gptj_ft.system.files import read_text, require_plain
from gptj_ft.system.paths import TOKENIZER_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Classes that add nothing to what tokenizer.json says.
GENERIC = ("GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")
# What decides which ids a text becomes; truncation, padding and post-processing are not used here.
_PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens")


class RowTokenizer(Protocol):
    """What it takes to turn rows into tokens, and back: a fast tokenizer of `transformers`, or a `PlainTokenizer`."""

    @property
    def backend_tokenizer(self) -> Any:
        """What tokenises: a `tokenizers.Tokenizer`."""

    @property
    def split_special_tokens(self) -> bool:
        """Whether a special token's name inside a text is text."""

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a document."""

    @property
    def name_or_path(self) -> str:
        """Where it is from."""

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token."""

    def decode(self, ids: Any, /) -> Any:
        """Return what token ids say."""

    def __hash__(self) -> int:
        """Tell it from others."""


class NoTokenizer:
    """Stands for the tokenizer of a model folder that has none: rows that are tokens already need none."""

    split_special_tokens, eos_token_id = True, None

    def __init__(self, folder: Path) -> None:
        self._folder, self.name_or_path = folder, str(folder)

    @property
    def backend_tokenizer(self) -> Any:
        """Refuse to tokenise.

        Raises:
            UsageError: always.
        """
        raise no_tokenizer(self._folder)

    def get_vocab(self) -> dict[str, int]:
        """Return no token."""
        return {}

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the ids themselves."""
        return "".join(f"[{number}]" for number in ids)


def no_tokenizer(folder: Path) -> UsageError:
    """Return the error of a model folder that has no tokenizer where one is needed."""
    return UsageError(
        f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt\n"
        "copy these files from the original model (for GPT-J: `gptj-ft download` has them); only rows that are tokens "
        "already need none"
    )


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a model folder has the files of a tokenizer."""
    return (folder / "tokenizer.json").exists() or all(
        (folder / name).exists() for name in ("vocab.json", "merges.txt")
    )


def load_row_tokenizer(folder: Path) -> RowTokenizer:
    """Load what rows are tokenised with: as `load_tokenizer` does, but without `transformers` where that adds nothing.

    Raises:
        UsageError: as `load_tokenizer`, but that there is none is said only where one is needed.
        DataError: as `load_tokenizer`.
    """
    from gptj_ft.data.plain_tokenizer import read_plain

    for name in TOKENIZER_FILES:
        check_file(folder / name)
    if folder.is_dir() and not has_tokenizer(folder):
        return NoTokenizer(folder)
    require_plain(folder)
    return read_plain(folder, GENERIC) or load_tokenizer(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a folder's fast tokenizer; never from the network.

    Raises:
        UsageError: no tokenizer files in it, or none that can be read; says what is missing.
        DataError: the folder has a link to elsewhere.
    """
    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder}")
    if not has_tokenizer(folder):
        raise no_tokenizer(folder)
    require_plain(folder)
    present = {path.name for path in folder.iterdir()}
    for name in TOKENIZER_FILES:
        check_file(folder / name)
    try:
        tokenizer = _loader(folder, present).from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # The Rust library raises bare Exception on a broken tokenizer.json.
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"cannot read the tokenizer in {folder}: {reason}") from error
    if not tokenizer.is_fast:
        raise UsageError(f"{folder}: {type(tokenizer).__name__} is not a fast tokenizer; it needs a tokenizer.json")
    # "<|endoftext|>" in somebody's text is text: a document must not end because its author wrote of one.
    tokenizer.split_special_tokens = True
    return tokenizer


def _loader(folder: Path, present: set[str]) -> Any:
    """Return the class that reads a folder's tokenizer."""
    if present >= {"tokenizer.json", "tokenizer_config.json"} and _class_of(folder) in GENERIC:
        # All of it is in tokenizer.json, and this class comes without torch, which takes seconds to load.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer, GPT2TokenizerFast

    # Without one of these AutoTokenizer cannot know the class; bare vocabulary and merges are GPT-2's, as GPT-J's are.
    return AutoTokenizer if present & {"tokenizer_config.json", "config.json", "tokenizer.json"} else GPT2TokenizerFast


def _class_of(folder: Path) -> str | None:
    try:
        config = json.loads(read_text(folder / "tokenizer_config.json"))
    except (ValueError, OSError):
        return None
    return str(config.get("tokenizer_class")) if isinstance(config, dict) else None


@lru_cache(maxsize=4)
def tokenizer_digest(tokenizer: RowTokenizer) -> str:
    """Return what tells two tokenizers apart: a SHA-256 of vocabulary, merges, text splitting and the EOS id.

    Of none it is empty.
    """
    if isinstance(tokenizer, NoTokenizer):
        return ""
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = {name: saved.get(name) for name in _PARTS} | {"eos": tokenizer.eos_token_id}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def vocab_size_of(folder: Path) -> int:
    """Return how many token ids a model folder's model has, without what it takes to build one.

    Raises:
        UsageError, DataError: as `families.read_architecture`.
    """
    try:
        raw = json.loads(read_text(folder / "config.json"))
    except (ValueError, OSError):
        raw = None
    if isinstance(raw, dict) and raw.get("model_type") in MODEL_TYPES:
        size = raw.get("vocab_size")
        if type(size) is int and size > 0:
            return size
    from gptj_ft.models.registry import read_architecture

    return int(read_architecture(folder).config.vocab_size)
