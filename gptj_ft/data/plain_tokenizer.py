"""A tokenizer that is all in its tokenizer.json, read without `transformers`, which takes a second to load."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from gptj_ft.system.files import read_text

# What tokenizer_config.json may say without a change to the tokens of a text, but for the tokens it names.
HARMLESS = {
    "added_tokens_decoder", "additional_special_tokens", "backend", "chat_template", "errors", "extra_special_tokens",
    "from_slow", "is_local", "local_files_only", "model_input_names", "model_max_length", "name_or_path",
    "padding_side", "special_tokens_map_file", "tokenizer_class", "truncation_side",
}  # fmt: skip
NAMED = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
MOST_TOKENS = 100_000  # from which on `transformers` may mend how texts are split
FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


class PlainTokenizer:
    """What `transformers` makes of the same folder, as far as rows are concerned; see `tokenizer.RowTokenizer`."""

    split_special_tokens = True  # "<|endoftext|>" in somebody's text is text

    def __init__(self, folder: Path, backend: Tokenizer, eos: str | None) -> None:
        self.name_or_path, self.backend_tokenizer = str(folder), backend
        self.eos_token_id: int | None = None if eos is None else backend.token_to_id(eos)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token."""
        return dict(self.backend_tokenizer.get_vocab())

    def decode(self, ids: Sequence[int], /) -> str:
        """Return what token ids say."""
        return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=False))


def read_plain(folder: Path, classes: Collection[str]) -> PlainTokenizer | None:
    """Read a folder's tokenizer; ``None`` if it takes `transformers` to say what it is, or what is wrong with it.

    Args:
        folder: of a model.
        classes: of tokenizers that add nothing to what tokenizer.json says.
    """
    try:
        config = _object(folder / "tokenizer_config.json")
        if config is None or config.get("tokenizer_class") not in classes:
            return None
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # The older files are read where the configuration does not hold all that was added.
        is_old = "added_tokens_decoder" not in config
        named = config | ((_object(folder / "special_tokens_map.json") or {}) if is_old else {})
        added = (_object(folder / "added_tokens.json") or {}) if is_old else {}
        is_plain = _is_harmless(named, backend) and _has_all(named, added, backend)
    except Exception:  # the Rust library raises bare Exception
        return None
    if not is_plain or backend.get_vocab_size() > MOST_TOKENS:
        return None
    backend.encode_special_tokens = True
    eos = named.get("eos_token")
    return PlainTokenizer(folder, backend, None if eos is None else _content(eos))


def _object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; ``None`` if there is no such file."""
    if not path.exists():
        return None
    values = json.loads(read_text(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path}: no object")
    return values


def _is_harmless(config: Mapping[str, Any], backend: Tokenizer) -> bool:
    """Tell whether a configuration says nothing that changes the tokens of a text, or the text of tokens."""
    splitter = backend.pre_tokenizer
    is_gpt2 = isinstance(splitter, ByteLevel) and splitter.use_regex and backend.normalizer is None
    if str(config["tokenizer_class"]).startswith("GPT2") and not is_gpt2:
        return False  # `transformers` splits texts as GPT-2 does, whatever the file says
    blank = config.get("add_prefix_space", False)
    others = config.keys() - HARMLESS - NAMED - {"add_prefix_space"}
    return not any(config[name] for name in others) and (not blank or (is_gpt2 and splitter.add_prefix_space))


def _has_all(config: Mapping[str, Any], added: Mapping[str, int], backend: Tokenizer) -> bool:
    """Tell whether all tokens that other files name are in tokenizer.json, as what they are there."""
    known = backend.get_added_tokens_decoder()
    by_content = {token.content: token for token in known.values()}
    listed = config.get("added_tokens_decoder") or {}
    return (
        all(name in by_content and by_content[name].special for name in _special(config))
        and all(number in known and known[number].content == name for name, number in added.items())
        and all(_is_same(known.get(int(number)), token) for number, token in listed.items())
    )


def _special(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the special tokens that a configuration names."""
    yield from (_content(config[name]) for name in NAMED & config.keys() if config[name] is not None)
    for name in ("additional_special_tokens", "extra_special_tokens"):
        several = config.get(name) or []
        yield from map(_content, several.values() if isinstance(several, dict) else several)


def _content(token: Any) -> str:
    text = token["content"] if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise TypeError("no token")
    return text


def _is_same(known: AddedToken | None, token: Mapping[str, Any]) -> bool:
    return known is not None and all(getattr(known, flag) == token.get(flag, flag == "normalized") for flag in FLAGS)
