"""Translate a tokenizer, its chat template and its end tokens between GGUF metadata and Hugging Face's files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.gguf.header import GgufHeader
from gptj_ft.checkpoints.gguf.splitters import SPLITTERS, splitter_name
from gptj_ft.checkpoints.model_folder import GENERATION_CONFIG, write_json_file
from gptj_ft.data.tokenization import has_tokenizer, load_tokenizer
from gptj_ft.errors import DataError, UsageError
from gptj_ft.system.digests import read_json
from gptj_ft.system.files import SHARED_FILE, read_text, write_file

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, NO_TOKEN, BYTE = range(1, 7)  # ``tokenizer.ggml.token_type``
PADDING = re.compile(r"\[PAD\d+\]")  # llama.cpp's name of an id without a token
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "\u2581"  # SentencePiece's
TEMPLATE_FILE = "chat_template.jinja"
TOKEN_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
BPE, SENTENCE_PIECES = "gpt2", "llama"  # ``tokenizer.ggml.model``: byte-level BPE, SentencePiece-like BPE


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write ``tokenizer.json``, its configuration, the chat template and the generation settings of a GGUF file.

    A file without a tokenizer gives none of them.

    Raises:
        UsageError: a tokenizer of another kind.
        DataError: the metadata contradict each other.
    """
    own = {key.removeprefix("tokenizer."): value for key, value in header.metadata.items()}
    kind = own.get("ggml.model")
    if kind in (None, "no_vocab"):
        return
    tokens = own.get("ggml.tokens")
    if kind not in (BPE, SENTENCE_PIECES) or not isinstance(tokens, list) or not tokens:
        raise UsageError(
            f"{header.path}: its tokenizer, {str(kind)!r:.100}, is not supported, only {BPE!r} and "
            f"{SENTENCE_PIECES!r}: start from the folder of the original model"
        )
    types = own.get("ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise DataError(f"{header.path}: {len(tokens)} tokens, but {len(types)} token types; get the file again")
    ids: dict[str, int | None] = {role: own.get(f"ggml.{role}_token_id") for role in TOKEN_ROLES}
    for role, number in ids.items():
        if number is not None and not 0 <= number < len(tokens):
            raise DataError(f"{header.path}: {role}_token_id {number} is no token; get the file again")
    content = _byte_level(header.path, own, tokens, types) if kind == BPE else _pieces(own, tokens, types, ids)
    bos = ids["bos"]
    adds_bos = bos is not None and bool(own.get("ggml.add_bos_token", kind == SENTENCE_PIECES))
    if bos is not None and adds_bos:
        content["post_processor"] = _with_bos(tokens[bos], bos)
    write_file(folder / "tokenizer.json", json.dumps(content, ensure_ascii=False), SHARED_FILE)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos,
        **{TOKEN_ROLES[role]: _spelled(kind, tokens[number]) for role, number in ids.items() if number is not None},
    }
    write_json_file(folder / "tokenizer_config.json", settings)
    if template := own.get("chat_template"):
        write_file(folder / TEMPLATE_FILE, template, SHARED_FILE)
    ends = [ids["eos"], *(own.get(f"ggml.{role}_token_id") for role in ("eot", "eom"))]
    ends = list(dict.fromkeys(number for number in ends if number is not None))
    generation = {
        "bos_token_id": bos,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": ids["padding"],
    }
    write_json_file(
        folder / GENERATION_CONFIG, {key: value for key, value in generation.items() if value not in (None, [])}
    )


def _byte_level(path: Path, own: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Return ``tokenizer.json`` of a byte-level BPE tokenizer."""
    name = own.get("ggml.pre", "gpt-2")
    if name not in SPLITTERS:
        raise UsageError(
            f"{path}: its tokenizer splits texts by {name!r:.100}, which is not known; known are "
            f"{', '.join(SPLITTERS)}: start from the folder of the original model"
        )
    splitter = SPLITTERS[name]
    added = [number for number, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)]
    merges = [merge.split(" ") for merge in own.get("ggml.merges", ())]
    if any(len(merge) != 2 for merge in merges):
        raise DataError(f"{path}: a merge of its tokenizer is no pair of tokens; get the file again")
    return {
        "version": "1.0",
        "added_tokens": _added(BPE, tokens, types, added),
        "normalizer": {"type": "NFC"} if splitter.has_nfc else None,
        "pre_tokenizer": splitter.to_pre_tokenizer(),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(_vocabulary(BPE, tokens, types), merges, ignore_merges=splitter.keeps_words),
    }


def _pieces(
    own: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int | None]
) -> dict[str, Any]:
    """Return ``tokenizer.json`` of a SentencePiece-like tokenizer; its merges follow from the tokens' scores."""
    vocabulary = _vocabulary(SENTENCE_PIECES, tokens, types)
    scores = own.get("ggml.scores") or [-number for number in range(len(tokens))]
    ranks = {
        piece: (-scores[number], number)
        for piece, number in vocabulary.items()
        if types[number] in (NORMAL, USER_DEFINED, NO_TOKEN)
    }
    added = [number for number, kind in enumerate(types) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    unknown = ids["unknown"]
    prefix: list[dict[str, Any]] = (
        [{"type": "Prepend", "prepend": SPACE}] if own.get("ggml.add_space_prefix", True) else []
    )
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "version": "1.0",
        "added_tokens": _added(SENTENCE_PIECES, tokens, types, added),
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, replace]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _model(
            vocabulary,
            list(_merges(ranks)),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _model(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]], **options: Any) -> dict[str, Any]:
    defaults = {
        "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return {"type": "BPE", **defaults, **options, "vocab": vocabulary, "merges": merges}


def _vocabulary(kind: str, tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Map tokens to ids, without the placeholders at the ids that no token has."""
    numbered = enumerate(zip(tokens, types, strict=True))
    return {
        _spelled(kind, token): number
        for number, (token, role) in numbered
        if not (role == NO_TOKEN and PADDING.fullmatch(token))
    }


def _spelled(kind: str, token: str) -> str:
    """Return a token as Hugging Face spells it: llama.cpp's files hold tokens of nothing but blanks as blanks."""
    return SPACE * len(token) if kind == SENTENCE_PIECES and token and not token.strip(" ") else token


def _added(kind: str, tokens: Sequence[str], types: Sequence[int], numbers: Sequence[int]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": _spelled(kind, tokens[number]), **flags, "special": types[number] != USER_DEFINED}
        for number in numbers
    ]


def _merges(ranks: Mapping[str, tuple[float, int]]) -> Iterator[tuple[str, str]]:
    """Yield the merges of pieces: all pairs of pieces that form a piece, the best pieces first."""
    for piece in sorted((piece for piece in ranks if len(piece) > 1), key=ranks.__getitem__):
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _with_bos(token: str, number: int) -> dict[str, Any]:
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    sequences = [{"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB")]
    second = {"SpecialToken": {"id": token, "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, sequences[0]],
        "pair": [bos, sequences[0], second, sequences[1]],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in llama.cpp's terms."""

    metadata: Mapping[str, Any]  # by key, without the prefix ``tokenizer.``
    tokens: Sequence[str]  # spelling of each id
    ends: tuple[int, ...]  # ids that end an answer
    template: str | None  # chat template, in Jinja
    adds_bos: bool
    bos: str | None


def read_vocabulary(folder: Path, num_rows: int, raw: Mapping[str, Any]) -> Vocabulary:
    """Read a folder's tokenizer for a model whose embedding has a number of rows.

    Args:
        raw: content of ``config.json``.

    Raises:
        UsageError: no tokenizer, or one that llama.cpp does not have.
        DataError: more tokens than rows.
    """
    if not has_tokenizer(folder):
        raise UsageError(f"{folder} has no tokenizer, and llama.cpp needs one: repeat with --tokenizer FOLDER")
    tokenizer = load_tokenizer(folder)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = content["model"], {each["id"]: each for each in content["added_tokens"]}
    if model.get("type") != "BPE":
        raise UsageError(f"{folder}: llama.cpp has no tokenizer of type {model.get('type')} for this model, only BPE")
    spelled = {number: token for token, number in model["vocab"].items()}
    spelled |= {number: each["content"] for number, each in added.items()}
    if (highest := max(spelled)) >= num_rows:
        raise DataError(f"{folder}: token id {highest} has no row in the embedding of {num_rows} rows")
    is_pieces = bool(model.get("byte_fallback"))
    unknown = model.get("unk_token")
    tokens, types = [], []
    for number in range(num_rows):
        token = spelled.get(number, f"[PAD{number}]")
        tokens.append(token.replace(SPACE, " ") if is_pieces and number in added else token)
        types.append(_type(number, token, spelled, added, unknown if is_pieces else None, is_pieces))
    specific = _pieces_metadata(folder, content, tokens, types) if is_pieces else _byte_level_metadata(folder, content)
    template = _template(folder)
    # A config.json may keep the ids of another vocabulary: GPT-2's are its family's defaults.
    ends = tuple(end for end in _ends(folder, tokenizer.eos_token_id, raw) if end < num_rows)
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else raw.get("bos_token_id")
    bos = None if bos is None or bos >= num_rows else bos
    adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    ids = {
        "bos": bos, "eos": next(iter(ends), None), "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
        "eot": next((end for end in ends[1:] if template and tokens[end] in template), None),
    }  # fmt: skip
    metadata = {
        **specific,
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        **{f"ggml.{role}_token_id": number for role, number in ids.items() if number is not None},
        "ggml.add_bos_token": adds_bos,
        **({"chat_template": template} if template else {}),
    }
    return Vocabulary(metadata, tokens, ends, template, adds_bos, None if bos is None else tokens[bos])


def _type(
    number: int,
    token: str,
    spelled: Mapping[int, str],
    added: Mapping[int, Mapping[str, Any]],
    unknown: str | None,
    is_pieces: bool,
) -> int:
    if number not in spelled:
        return NO_TOKEN
    if token == unknown:
        return UNKNOWN
    if number in added:
        return CONTROL if added[number]["special"] else USER_DEFINED
    return BYTE if is_pieces and BYTE_TOKEN.fullmatch(token) else NORMAL


def _byte_level_metadata(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    name = splitter_name(content)
    if name is None:
        raise UsageError(
            f"{folder}: llama.cpp has no name for how this tokenizer splits texts (pre_tokenizer of tokenizer.json); "
            f"known are {', '.join(SPLITTERS)}"
        )
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in content["model"]["merges"]]
    return {"ggml.model": BPE, "ggml.pre": name, "ggml.merges": merges}


def _pieces_metadata(
    folder: Path, content: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> dict[str, Any]:
    """Return scores in the order of the merges: llama.cpp merges the pair that forms the token with the best score."""
    normalizer, pre_tokenizer = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    kinds = [step.get("type") for step in steps]
    is_metaspace = pre_tokenizer.get("type") == "Metaspace"
    if set(kinds) - {"Prepend", "Replace"} or (
        pre_tokenizer and pre_tokenizer.get("type") not in ("Metaspace", "Split")
    ):
        raise UsageError(f"{folder}: llama.cpp has no tokenizer that normalizes texts like this one")
    adds_space = "Prepend" in kinds or (is_metaspace and pre_tokenizer.get("prepend_scheme", "always") != "never")
    scores: dict[str, float] = {}
    for merge in content["model"]["merges"]:
        scores.setdefault("".join(merge if isinstance(merge, list) else merge.split(" ")), -float(len(scores)))
    worst = -float(len(scores))
    return {
        "ggml.model": SENTENCE_PIECES,
        "ggml.pre": "default",
        "ggml.scores": [
            scores.get(token, worst) if role == NORMAL else 0.0 for token, role in zip(tokens, types, strict=True)
        ],
        "ggml.add_space_prefix": adds_space,
    }


def _template(folder: Path) -> str | None:
    """Read the chat template: a file of its own, or a field of ``tokenizer_config.json``."""
    if (folder / TEMPLATE_FILE).is_file():
        return read_text(folder / TEMPLATE_FILE)
    path = folder / "tokenizer_config.json"
    template = read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(template, list):  # several by name
        template = next((each.get("template") for each in template if each.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _ends(folder: Path, end: int | None, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end an answer, the tokenizer's first."""
    path = folder / GENERATION_CONFIG
    listed = (read_json(path) if path.is_file() else {}).get("eos_token_id", raw.get("eos_token_id"))
    others = listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(number for number in (end, *others) if type(number) is int))
