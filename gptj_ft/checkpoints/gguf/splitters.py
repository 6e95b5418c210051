"""Name the text splitters of byte-level BPE tokenizers: Hugging Face's ``pre_tokenizer`` and llama.cpp's names for it.

llama.cpp has one C++ function for each name of ``tokenizer.ggml.pre``. Its conversion scripts find the name by a hash
of an encoded text, which also depends on the vocabulary; here the splitting itself decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{WORDS}\p{{N}}{{1,3}}{REST}"
QWEN_2 = rf"{WORDS}\p{{N}}{REST}"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Steps = tuple[str, ...]  # regular expressions, `DIGITS` or `GPT_2`, in order
DIGITS, GPT_2 = "<each digit alone>", "<GPT-2's regular expression>"


@dataclass(frozen=True)
class Splitter:
    """How a tokenizer cuts a text into the pieces that BPE merges within."""

    steps: Steps
    has_nfc: bool = False  # composes Unicode characters first; llama.cpp never does
    keeps_words: bool = False  # a piece that is a token is not built by merges

    def to_pre_tokenizer(self) -> dict[str, Any]:
        """Return the object of ``tokenizer.json``."""
        last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": GPT_2 in self.steps}
        steps = [
            {"type": "Digits", "individual_digits": True}
            if step == DIGITS
            else {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
            for step in self.steps
            if step != GPT_2
        ]
        return {"type": "Sequence", "pretokenizers": [*steps, last]} if steps else last


# Names of ``tokenizer.ggml.pre``. The first name of a splitter is written.
SPLITTERS: Mapping[str, Splitter] = {
    "gpt-2": Splitter((GPT_2,)),
    "olmo": Splitter((GPT_2,), has_nfc=True),  # GPT-NeoX's and Pythia's
    "mpt": Splitter((GPT_2,), has_nfc=True),
    "smollm": Splitter((DIGITS, GPT_2)),
    **dict.fromkeys(("refact", "starcoder", "codeshell"), Splitter((DIGITS, GPT_2))),
    "qwen2": Splitter((QWEN_2,), has_nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), Splitter((QWEN_2,), has_nfc=True)),
    "llama-bpe": Splitter((LLAMA_3,), keeps_words=True),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3"), Splitter((LLAMA_3,), keeps_words=True)),
    "dbrx": Splitter((LLAMA_3,)),
    "smaug-bpe": Splitter((LLAMA_3,)),
    "tekken": Splitter((TEKKEN,), keeps_words=True),
}


def splitter_name(tokenizer: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name for the splitter of a ``tokenizer.json``; ``None`` if it has none."""
    steps = _steps(tokenizer.get("pre_tokenizer") or {})
    has_nfc = (tokenizer.get("normalizer") or {}).get("type") == "NFC"
    if steps is None or (tokenizer.get("normalizer") and not has_nfc):
        return None
    keeps_words = bool(tokenizer["model"].get("ignore_merges"))
    alike = [name for name, splitter in SPLITTERS.items() if splitter.steps == steps]
    # Prefer equal flags. NFC makes no difference to llama.cpp, but merges do: never choose the other `keeps_words`.
    same = [name for name in alike if SPLITTERS[name].keeps_words == keeps_words]
    exact = [name for name in same if SPLITTERS[name].has_nfc == has_nfc]
    return next(iter(exact or same), None)


def _steps(value: Mapping[str, Any]) -> Steps | None:
    """Return the steps of a ``pre_tokenizer``; ``None`` if one is unknown."""
    parts = value.get("pretokenizers", [value])
    steps: list[str] = []
    for part in parts:
        kind = part.get("type")
        if kind == "Digits" and part.get("individual_digits"):
            steps.append(DIGITS)
        elif kind == "Split" and "Regex" in part.get("pattern", {}):
            # Both forms cut at the matches of an expression that leaves nothing between them.
            if (part.get("behavior"), bool(part.get("invert"))) not in (("Isolated", False), ("Removed", True)):
                return None
            steps.append(part["pattern"]["Regex"])
        elif kind == "ByteLevel" and not part.get("add_prefix_space"):
            steps += [GPT_2] if part.get("use_regex", True) else []
        else:
            return None
    return tuple(steps)
