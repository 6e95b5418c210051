"""Detect a text's encoding (UTF-8, UTF-16, UTF-32, Windows-1252) and convert it to UTF-8 as a stream."""

from __future__ import annotations

import codecs
import io
import re
import unicodedata
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

from gptj_ft.errors import DataError

DETECT = "auto"  # value of the options encoding, quotes and delimiter
UTF8, WINDOWS = "utf-8", "cp1252"
RECODED_BYTES = 2**16
_MARKS = {  # longest first: the mark of UTF-32 begins like that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
ENCODING_NAMES = {"utf-16-le": "UTF-16", "utf-16-be": "UTF-16", "utf-32-le": "UTF-32", "utf-32-be": "UTF-32"}
OTHERS = "cp1250 (Central Europe), cp1251 (Cyrillic), cp932 (Japan), mac_roman (old Macs)"
HOW_TO_SAY = (
    "save it as UTF-8 (in Excel: Save as, CSV UTF-8; elsewhere `iconv -t UTF-8 -f ...`), or name its encoding: "
    f"--set encoding=cp1252 (Western Europe), {OTHERS}"
)
# UTF-16 without a mark: at least this share of every second byte is zero. Pure ASCII bytes need a larger share, since
# they may be an 8-bit text with some zeros.
LEAST_ZEROS, LEAST_ZEROS_IN_ASCII = 0.1, 0.4
MOST_ODD = 0.05  # share of non-ASCII characters that may match `ODD` in a Windows-1252 text
UNDEFINED = b"\x81\x8d\x8f\x90\x9d\0"  # undefined in Windows-1252, or NUL
ASCII = bytes(range(128))
# Sequences that Western European texts lack and wrongly decoded texts have: a capital right after a small letter, a
# sign (except apostrophe, dash, point) between two letters, four accented letters in a row.
ODD = re.compile(
    "[a-zß-ÿœšž](?=[À-ÖØ-ÞŠŒŽŸ][a-zß-ÿœšž])|(?<=[^\\W\\d_])[‚ƒ„†‡ˆ‰‹“”•˜™›¡-©«¬®-³¸¹»-¿](?=[^\\W\\d_])|[À-ÖØ-öø-ÿ]{4}"
)


def encoding_by_head(head: bytes) -> str:
    """Detect UTF-16 and UTF-32 from the first bytes of a text; "" for any other encoding."""
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    least = LEAST_ZEROS_IN_ASCII if head.isascii() else LEAST_ZEROS
    # Latin letters have their zero byte second in little-endian UTF-16, first in big-endian.
    for encoding, zeros, others in (("utf-16-le", head[1::2], head[::2]), ("utf-16-be", head[::2], head[1::2])):
        count = zeros.count(0)
        if count >= max(2, least * len(zeros)) and count > others.count(0) and _is_text(head, encoding):
            return encoding
    return ""


def _is_text(head: bytes, encoding: str) -> bool:
    """Tell whether bytes decode to assigned characters; the last one may be truncated."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    return all(each in "\t\r\n" or unicodedata.category(each) not in ("Cc", "Cn", "Co", "Cs") for each in set(text))


def guess_encoding(pieces: Callable[[], Iterable[bytes]]) -> str:
    """Guess between UTF-8 and Windows-1252.

    Windows-1252 needs more invalid UTF-8 bytes than valid non-ASCII UTF-8 characters: otherwise the text is damaged
    UTF-8.

    Args:
        pieces: starts reading the bytes.
    """
    # Text in an 8-bit encoding is hardly ever valid UTF-8 by chance, unless it is ASCII.
    if _is_utf8(pieces()):
        return UTF8
    # Invalid bytes become lone surrogates, which encoding with "ignore" drops again: this counts them.
    decoder = codecs.getincrementaldecoder(UTF8)("surrogateescape")
    wrong = characters = beyond_ascii = odd = 0
    for piece in chain(pieces(), [b""]):
        # Undefined bytes rule out Windows-1252. Reading the text as UTF-8 then names the bad line.
        if len(piece.translate(None, UNDEFINED)) < len(piece):
            return UTF8
        escaped = decoder.decode(piece, final=not piece)
        wrong += len(escaped) - len(without_wrong := escaped.encode(UTF8, "ignore").decode(UTF8))
        characters += len(without_wrong) - len(without_wrong.encode("ascii", "ignore"))
        beyond_ascii += len(piece.translate(None, ASCII))
        # This decoding cannot fail: undefined bytes have returned above.
        odd += sum(1 for _ in ODD.finditer(piece.decode(WINDOWS)))
    return WINDOWS if characters < wrong and odd <= MOST_ODD * beyond_ascii else UTF8


def _is_utf8(pieces: Iterable[bytes]) -> bool:
    decoder = codecs.getincrementaldecoder(UTF8)()
    try:
        for piece in pieces:
            # ASCII pieces need no decoding, unless the piece before ends within a character.
            if decoder.getstate()[0] or not piece.isascii():
                decoder.decode(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def as_utf8(raw: BinaryIO, encoding: str, path: Path) -> BinaryIO:
    """Return a stream that converts a text to UTF-8; invalid bytes raise DataError with the line."""
    # Compare the codec's own name: users also write utf8 or U8.
    if codecs.lookup(encoding).name == UTF8:
        return raw
    return cast(BinaryIO, io.BufferedReader(_Recoded(raw, encoding, path)))


class _Recoded(io.RawIOBase):
    def __init__(self, raw: BinaryIO, encoding: str, path: Path) -> None:
        super().__init__()
        self._raw, self._encoding, self._path = raw, encoding, path
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._ready, self._line, self._is_ended = b"", 1, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready and not self._is_ended:
            piece = self._raw.read(RECODED_BYTES)
            self._is_ended = not piece
            try:
                text = self._decoder.decode(piece, final=not piece)
                self._ready = text.encode(UTF8)
            except UnicodeError as error:
                raise self._error(error) from error
            # Pieces that fail do not get here: `_error` counts the lines before their bad byte.
            self._line += text.count("\n")
        piece, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)

    def _error(self, error: UnicodeError) -> DataError:
        problem, line = str(error), self._line
        if isinstance(error, UnicodeDecodeError):
            before = error.object[: error.start]
            line += before.decode(self._encoding, "ignore").count("\n")
            problem = f"invalid byte 0x{error.object[error.start]:02x}"
        name = ENCODING_NAMES.get(self._encoding, self._encoding)
        return DataError(f"{self._path}:{line}: not {name}: {problem}\n{HOW_TO_SAY}")
