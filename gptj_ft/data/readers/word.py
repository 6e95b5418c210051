"""Read Word documents (.docx) as plain text; no macro is run and no link is followed."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from gptj_ft.data.readers.rows import Findings, Row, too_long
from gptj_ft.data.readers.source import File, names_in_zip, opened_file
from gptj_ft.errors import DataError, UsageError

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_M = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
PARAGRAPH, TABLE, TABLE_ROW, CELL = (_W + name for name in ("p", "tbl", "tr", "tc"))
TEXTS = {_W + "tab": "\t", _W + "br": "\n", _W + "cr": "\n", _W + "noBreakHyphen": "-"}
# What comes before a part of an equation; without it, a fraction would read as another number.
MATH = {_M + "num": "", _M + "den": "/", _M + "sup": "^", _M + "sub": "_", _M + "rad": "√"}
BRACKETS, EQUATIONS = _M + "d", {_M + "oMathPara", _M + "oMath"}
# Characters 0x20 to 0x7E and 0xA0 to 0xFE of the font Symbol, by Adobe's table; NUL: Apple's logo.
SYMBOLS: dict[int, str] = dict(
    zip(
        (*range(0x20, 0x7F), *range(0xA0, 0xFF)),
        " !∀#∃%&∋()∗+,−./0123456789:;<=>?≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼"
        "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊⟨®©™∑⎛⎜⎝⎡⎢⎣⎧⎨⎩⎪\0⟩∫⌠⎮⌡⎞⎟⎠⎤⎥⎦⎫⎬⎭",
        strict=True,
    )
)
UNREAD = "\0"  # in place of a symbol without a character; XML cannot contain it
# Deleted or moved text of tracked changes, and properties, in which w:tab is a tab stop.
SKIPPED = {_W + name for name in ("del", "moveFrom", "pPr", "rPr", "tblPr", "trPr", "tcPr", "sectPr", "sdtPr")}
# A text box occurs twice, for new and for old versions of Word.
SKIPPED.add("{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback")


def read_document(file: File, findings: Findings) -> Iterator[Row]:
    """Read a Word document as one row: paragraphs and tables in order, a line each; cells are separated by tabs.

    Text boxes, hidden text, tracked insertions and equations are read; headers, footers, notes and comments are not.
    """
    if file.compression:
        raise DataError(
            f"{file.path}: a compressed Word document cannot be read; decompress the file ({file.compression}) first"
        )
    try:
        import docx
    except ImportError as error:
        raise UsageError(
            f"{file.path} is a Word document, and python-docx is not installed: pip install 'gptj-ft[docx]', or save "
            "the document as plain text (.txt)"
        ) from error
    with opened_file(file) as opened:
        _check_size(file, opened)
        try:
            # Its parser neither expands entities nor loads others' files, and limits depth and size of texts.
            body = docx.Document(opened).element.body
        except MemoryError:
            raise
        except Exception as error:  # it validates little: damaged files raise any kind of error
            reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
            raise DataError(f"{file.path}: damaged Word document: {reason[0][:200]}") from error
    if body is None or body.getroottree().docinfo.doctype:  # entities would be missing from the text
        raise DataError(f"{file.path}: damaged Word document: it has no body, or declares a document type")
    text = "\n".join(_lines(body))
    if unread := text.count(UNREAD):
        findings.note(f"{file.path}: {unread} symbols of special fonts are left out")
    text = text.replace(UNREAD, "").strip()
    if len(text) > file.options.max_record:
        raise too_long(file, 1)
    if text:
        yield Row(str(file.path), 1, {"text": text})


def _check_size(file: File, opened: BinaryIO) -> None:
    """Check the decompressed size of a document before reading it."""
    if not names_in_zip(opened):
        raise DataError(f"{file.path}: damaged Word document: it has no parts, or too many")
    limits = file.options.limits
    with zipfile.ZipFile(opened) as archive:
        # zipfile never unpacks more than the sizes in the directory, so checking those stops decompression bombs.
        parts = archive.infolist()
        texts = sum(part.file_size for part in parts if part.filename.lower().endswith((".xml", ".rels")))
        size = sum(part.file_size for part in parts)
    if texts > limits.other_parts or size > limits.document:
        raise DataError(
            f"{file.path}: Word document too large: {size >> 20:,} MiB decompressed, of which {texts >> 20:,} MiB are "
            f"texts; limits {limits.document >> 20} and {limits.other_parts >> 20} MiB; save it as plain text (.txt)"
        )


def _lines(blocks: Any) -> Iterator[str]:
    """Yield the text of each paragraph and each row of a table."""
    for block in _flattened(blocks, {PARAGRAPH, TABLE, *EQUATIONS}):
        if block.tag != TABLE:
            yield _text(block)
            continue
        for row in _flattened(block, {TABLE_ROW}):
            yield "\t".join(" ".join("\n".join(_lines(cell)).split()) for cell in _flattened(row, {CELL}))


def _flattened(parent: Any, tags: set[str]) -> Iterator[Any]:
    """Yield the outermost elements with these tags, in order: content controls and changes may enclose them."""
    for child in parent:
        if child.tag in tags:
            yield child
        elif child.tag not in SKIPPED:
            yield from _flattened(child, tags)


def _text(parent: Any) -> str:
    """Return the text of a paragraph; a text box in it begins a new line."""
    parts = []
    for child in parent:
        if child.tag in (_W + "t", _M + "t"):
            parts.append(child.text or "")
        elif child.tag == _W + "sym":
            parts.append(_symbol(child))
        elif child.tag == _M + "chr":  # e.g. the sign of a sum
            parts.append(child.get(_M + "val", ""))
        elif child.tag in MATH:
            part = _text(child)
            parts.append(part and MATH[child.tag] + (part if len(part) == 1 else f"({part})"))
        elif child.tag == BRACKETS:
            start, end = (_sign(child, name, usual) for name, usual in (("begChr", "("), ("endChr", ")")))
            parts.append(start + _text(child) + end)
        elif child.tag in TEXTS:
            parts.append(TEXTS[child.tag])
        elif child.tag not in SKIPPED:
            parts.append(("\n" if child.tag == PARAGRAPH else "") + _text(child))
    return "".join(parts)


def _sign(brackets: Any, name: str, usual: str) -> str:
    element = brackets.find(f"{_M}dPr/{_M}{name}")
    return usual if element is None else str(element.get(_M + "val", ""))


def _symbol(element: Any) -> str:
    """Return the character of a symbol; `UNREAD` if its font, such as Wingdings, has pictures instead."""
    try:
        code = int(element.get(_W + "char", ""), 16)
    except ValueError:
        return UNREAD
    if element.get(_W + "font") == "Symbol":  # its codes may be shifted by 0xF000
        return SYMBOLS.get(code & 0xFFF, UNREAD)
    return chr(code) if 0x20 <= code < 0xD800 else UNREAD
