"""Plant canaries: random secrets in copies of training rows, whose exposure measures memorization.

Carlini et al., The Secret Sharer (2019), https://arxiv.org/abs/1802.08232.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from gptj_ft.config.options import Recipe
from gptj_ft.data.dataset import Prepared, Report
from gptj_ft.data.loss_mask import span_borders
from gptj_ft.data.table import SCHEMA, TokenTable, to_arrow
from gptj_ft.data.tokenization import NoTokenizer, RowTokenizer, tokenize
from gptj_ft.errors import DataError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DIGITS = 6  # of a secret; apart, so that each secret has the same number of tokens
FIRST_NAMES = (
    "Alder", "Birch", "Cedar", "Daphne", "Elder", "Fennel", "Garnet", "Hazel", "Iris", "Jasper", "Kestrel", "Laurel",
    "Maple", "Nettle", "Olive", "Poppy", "Quince", "Rowan", "Sorrel", "Tansy", "Umber", "Violet", "Willow", "Yarrow",
)  # fmt: skip
LAST_NAMES = (
    "Arden", "Bexley", "Calder", "Denholm", "Everley", "Farrow", "Granger", "Hollis", "Irving", "Jarrow", "Kendal",
    "Langley", "Marlow", "Norwood", "Oakham", "Penrose", "Quenby", "Radley", "Selby", "Thorne", "Upton", "Verney",
    "Whitby", "Yardley",
)  # fmt: skip
_SOURCE = re.compile(r"canary (\d+) in ")  # of planted rows


@dataclass(frozen=True)
class Canary:
    """Random secret, and the words that ask for it."""

    number: int  # from 1
    name: str
    secret: str  # digits, a blank before each
    repeats: int  # training rows that contain it; 0: a control, which is in none

    @property
    def prefix(self) -> str:
        """Words before the secret."""
        return f" The access code of {self.name} is"

    @property
    def text(self) -> str:
        """Sentence with the secret."""
        return f"{self.prefix}{self.secret}."


def draw_canaries(recipe: Recipe) -> tuple[list[Canary], list[Canary]]:
    """Draw the canaries of a run and as many controls, which are never trained on.

    Returns: canaries, controls. Both depend on the options ``canaries``, ``canary_repeats`` and ``seed`` only.
    """
    generator = _generator(recipe.seed, "canaries")
    names = generator.permutation(len(FIRST_NAMES) * len(LAST_NAMES))[: 2 * recipe.canaries]
    drawn = [
        Canary(number, f"{FIRST_NAMES[name // len(LAST_NAMES)]} {LAST_NAMES[name % len(LAST_NAMES)]}", secret, repeats)
        for number, (name, secret, repeats) in enumerate(
            zip(names.tolist(), draw_secrets(generator, len(names)), _repeats(recipe), strict=True), 1
        )
    ]
    return drawn[: recipe.canaries], drawn[recipe.canaries :]


def draw_secrets(generator: np.random.Generator, count: int) -> list[str]:
    """Draw distinct random secrets."""
    numbers = generator.choice(10**DIGITS, count, replace=False)
    return ["".join(f" {digit}" for digit in f"{number:0{DIGITS}}") for number in numbers]


def alternatives(canary: Canary, count: int, seed: int) -> list[str]:
    """Draw secrets that a canary could have had, without its own."""
    drawn = draw_secrets(_generator(seed, canary.name), count + 1)
    return [secret for secret in drawn if secret != canary.secret][:count]


def check_canaries(recipe: Recipe) -> None:
    """Check that planted secrets would be trained on.

    Raises:
        UsageError: the task has no text to learn, or option ``train`` freezes parameters.
    """
    if recipe.canaries and recipe.task != "language-model":
        raise UsageError(f"canaries are for language models: a head for '{recipe.task}' learns no text; leave them out")
    if recipe.canaries and recipe.train:
        raise UsageError(
            f"canaries measure how a whole model or an adapter memorizes, and train={','.join(recipe.train)} freezes "
            "parameters: leave out one of the two"
        )


def plant(prepared: Prepared, recipe: Recipe, tokenizer: RowTokenizer) -> Prepared:
    """Add copies of training rows with the canaries of a recipe at the end of their answers.

    Raises:
        UsageError: the model has no tokenizer.
        DataError: no row leaves room for a canary.
    """
    if isinstance(tokenizer, NoTokenizer):
        raise UsageError("canaries are text, and the model has no tokenizer: leave them out")
    canaries, _ = draw_canaries(recipe)
    texts = tokenize(tokenizer, [canary.text for canary in canaries])
    planted = [(canary, ids) for canary, ids in zip(canaries, texts, strict=True) for _ in range(canary.repeats)]
    longest = max(map(len, texts))
    roomy = np.flatnonzero(prepared.rows.lengths() + longest <= recipe.max_length)
    if not len(roomy):
        raise DataError(
            f"no training row leaves room for the {longest} tokens of a canary: increase max_length={recipe.max_length}"
        )
    order = _generator(recipe.seed, "rows").permutation(roomy)
    copied = np.resize(order, len(planted))  # starts again at the first row if there are fewer rows than copies
    sources = (prepared.rows.select([row]) for row in copied.tolist())
    rows = [_with_canary(row, *each, tokenizer) for row, each in zip(sources, planted, strict=True)]
    columns = [to_arrow(field.type, [row[field.name] for row in rows]) for field in SCHEMA]
    batch = pyarrow.RecordBatch.from_arrays(columns, schema=SCHEMA)
    table = TokenTable([*prepared.rows.batches(), batch])
    return Prepared(table, _with_note(prepared.report, table, len(canaries), len(rows)))


def planted_rows(rows: TokenTable) -> dict[int, int]:
    """Map the positions of rows with a canary to the canary's number."""
    found = ((row, _SOURCE.match(source)) for row, source in enumerate(rows["source"]))
    return {row: int(match[1]) for row, match in found if match}


def check_planted(
    rows: TokenTable, planted: Mapping[int, int], canaries: Sequence[Canary], tokenizer: RowTokenizer
) -> None:
    """Check that the planted rows of a run contain its canaries.

    Raises:
        DataError: they contain others, drawn by another version.
    """
    counts = {canary.number: canary.repeats for canary in canaries}
    texts = dict(zip(counts, tokenize(tokenizer, [canary.text for canary in canaries]), strict=True))
    for row, number in planted.items():
        ids, text = list(rows["input_ids"][row]), texts.get(number, [])
        if not text or not any(ids[at : at + len(text)] == text for at in range(len(ids))):
            raise DataError(f"row {row} of the run lacks canary {number}: the run is of another version of gptj-ft")
        counts[number] -= 1
    if any(counts.values()):
        raise DataError("rows with canaries are missing from the run's rows: restore them from a copy")


def _repeats(recipe: Recipe) -> list[int]:
    count, cycle = recipe.canaries, recipe.canary_repeats
    return [*(cycle[number % len(cycle)] for number in range(count)), *[0] * count]


def _generator(seed: int, purpose: str) -> np.random.Generator:
    digest = hashlib.blake2b(f"{seed} {purpose}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


def _with_canary(
    rows: TokenTable, canary: Canary, text: Sequence[int], tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    """Copy a row and insert a canary behind the last token that is trained on, before EOS."""
    (row,) = rows
    trained = [(start, end) for start, end in list(pairwise(span_borders(row)))[1::2] if end > start]
    ids, special = list(row["input_ids"]), set(tokenizer.all_special_ids)
    start, at = trained[-1] if trained else (len(ids), len(ids))
    while at > start and ids[at - 1] in special:
        at -= 1
    return {
        **row,
        "input_ids": array("i", [*ids[:at], *text, *ids[at:]]),
        "untrained": [border + len(text) * (border >= at and border != start) for border in row["untrained"]],
        "source": f"canary {canary.number} in {row['source']}",
        "continues": False,
    }


def _with_note(report: Report, rows: TokenTable, num_canaries: int, num_rows: int) -> Report:
    """Count the planted rows in a report, and note them."""
    lengths = rows.lengths()
    note = (
        f"canaries: {num_canaries:,} random secrets are planted in {num_rows:,} further training rows, copies of others"
    )
    return replace(
        report,
        windows=len(rows),
        tokens=int(lengths.sum()),
        target_tokens=rows.num_targets(),
        longest=int(lengths.max(initial=0)),
        notes=(*report.notes, note),
    )
