"""Read documents whose sentences are selected for a summary, with BERTSUM's preprocessing.

https://github.com/nlpyang/PreSumm (``data_builder.py``, ``data_loader.py``); Liu and Lapata 2019,
https://arxiv.org/abs/1908.08345.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from gptj_ft.data.columns import FieldTexts, is_unicode
from gptj_ft.data.dataset import content_hash
from gptj_ft.data.encoder import EncodedDocument, EncodedRow, Setting, TaskReader
from gptj_ft.data.labelled.words import only_field
from gptj_ft.data.readers.rows import Row
from gptj_ft.data.tokenization import backend_of
from gptj_ft.data.wordpiece import splits_at_blanks
from gptj_ft.errors import DataError, RowSkipped, UsageError
from gptj_ft.system.plain_text import shortened

MAX_SENTENCES = 100  # of a document; PreSumm's default
SHORT_WORDS, LONG_WORDS = 5, 200  # sentences of at most 5 words are dropped, those above 200 truncated
FEWEST_SENTENCES, FEWEST_PIECES = 3, 5  # of a document, and of a summary with its two markers
BREAK = "<q>"  # between the sentences of a summary in PreSumm's files
SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+(?=[\"'“‘(\[]*[A-Z0-9])")
# A full stop after these does not end a sentence.
ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|Sen|Rep|Gov|Gen|Lt|Col|Sgt|Capt|St|Jr|Sr|vs|etc|No|Inc|Co|Corp|Ltd|Jan|Feb|Mar|Apr|Aug"
    r"|Sept|Oct|Nov|Dec)|\b[A-Z])\.$"
)
_WHITE = str.maketrans("\t\n\v\f\r", "     ")
_FOREIGN = re.compile("[^a-zA-Z0-9 ]")


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences: at line ends, and after full stops followed by an upper-case letter or a number.

    >>> split_sentences("It rains. Dr. J. Smith said: “Go!” He left at 5 p.m. today.\\nThe end")
    ['It rains.', 'Dr. J. Smith said: “Go!”', 'He left at 5 p.m. today.', 'The end']
    """
    sentences = []
    for line in text.split("\n"):
        start = 0
        for end in SENTENCE_END.finditer(line):
            whole = line[start : end.end()].strip()
            if not ABBREVIATION.search(whole):
                sentences.append(whole)
                start = end.end()
        sentences.append(line[start:].strip())
    return [sentence for sentence in sentences if sentence]


def oracle_sentences(sentences: Sequence[str], summary: str | Sequence[str], most: int = 3) -> list[int]:
    """Select greedily the sentences that raise ROUGE-1 F + ROUGE-2 F most, until none raises it.

    The oracle labels of PreSumm (``greedy_selection``; Liu and Lapata 2019, section 3.1). N-grams are sets, without
    stemming. All characters except ASCII letters, digits and blanks are deleted before splitting into words, so "don't"
    is one word. Case matters: PreSumm's corpora are in lower case. Bigrams do not cross the ends of selected sentences,
    but do cross those of the summary's sentences. The first of equally good sentences wins.

    Args:
        sentences: the document; the first `MAX_SENTENCES` are candidates.
        summary: a text or its sentences.
        most: largest number of sentences.

    Returns:
        Ascending sentence numbers; empty if no sentence shares a word with the summary.
    """
    goal = _ngrams(_words(summary if isinstance(summary, str) else " ".join(summary)))
    candidates = [_ngrams(_words(sentence)) for sentence in sentences[:MAX_SENTENCES]]
    shared = [[each & of_goal for each, of_goal in zip(grams, goal, strict=True)] for grams in candidates]
    chosen: list[int] = []
    selected, correct = _ngrams([]), _ngrams([])  # n-grams of the chosen sentences: all, and those in the summary
    best = 0.0
    while len(chosen) < most:
        pick = None
        for number, (grams, of_goal) in enumerate(zip(candidates, shared, strict=True)):
            if number in chosen:
                continue
            score = sum(
                _f1(
                    len(correct[size]) + len(of_goal[size] - correct[size]),
                    len(selected[size]) + len(grams[size] - selected[size]),
                    len(goal[size]),
                )
                for size in range(len(goal))
            )
            if score > best:
                best, pick = score, number
        if pick is None:
            break
        chosen.append(pick)
        for size in range(len(goal)):
            selected[size] |= candidates[pick][size]
            correct[size] |= shared[pick][size]
    return sorted(chosen)


class _Read(NamedTuple):
    sentences: list[str]
    labels: list[int]
    summary: list[str]
    are_words: bool  # tokenize each word between blanks by itself


class SentenceReader(TaskReader):
    """Read documents and summaries; the targets are the sentences that together resemble the summary most.

    A document is a list of sentences, a list of lists of words, or a text, which is split. Lists of words are tokenized
    word by word, as in PreSumm; other texts by the tokenizer. Rows of PreSumm's own files keep their tokens.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        recipe = setting.recipe
        self._document = only_field(recipe.prompt, "prompt", "{{ document }}")
        self._summary = only_field(recipe.completion, "completion", "{{ summary }}")
        if not setting.frame.exists:
            raise UsageError(f"{setting.tokenizer.name_or_path} has no [CLS] and [SEP], which task=sentences needs")
        if recipe.on_long == "split":
            raise UsageError("on_long: task=sentences does not support 'split'; use shorten, skip or error")
        self._pieces: dict[str, list[int]] = {}
        self._backend = backend_of(setting.tokenizer)
        self._is_lower = bool(getattr(self._backend.normalizer, "lowercase", False))
        self._is_wordpiece = splits_at_blanks(setting.tokenizer)

    def read(self, row: Row) -> tuple[list[str], Any]:
        if _is_tokenized(row):
            return [], None
        columns, needs_target = self.setting.columns, self.setting.needs_target
        words = _sentences(columns[self._document], row.values.get(columns[self._document]))
        every = [" ".join(sentence) for sentence in words]
        summary, chosen = list[str](), set[int]()
        if needs_target:
            cell = row.values.get(columns[self._summary])
            summary = [" ".join(sentence) for sentence in _sentences(columns[self._summary], cell)]
            lower = [text.lower() for text in every]
            # As in PreSumm, short sentences are candidates too, and dropped only afterwards.
            chosen = set(oracle_sentences(lower, [text.lower() for text in summary]))
        kept = [number for number, sentence in enumerate(words) if len(sentence) > SHORT_WORDS][:MAX_SENTENCES]
        if len(kept) < FEWEST_SENTENCES and needs_target:
            raise RowSkipped(f"fewer than {FEWEST_SENTENCES} sentences of more than {SHORT_WORDS} words")
        kept = kept or list(range(min(len(words), MAX_SENTENCES)))
        sentences = [" ".join(words[number][:LONG_WORDS]) for number in kept]
        checked = FieldTexts({self._document: "\n".join(every), self._summary: "\n".join(summary)}, summary)
        self.setting.checks.check_row(row, checked, "\n".join(every), "\n".join(summary))
        labels = [int(number in chosen) for number in kept]
        are_words = self._is_wordpiece and _are_words(row.values.get(columns[self._document]))
        read = _Read(sentences, labels, summary, are_words)
        return ([] if are_words else [*sentences, *summary]), read

    def row_of(self, row: Row, read: Any, tokens: list[Any]) -> EncodedRow:
        if read is None:
            return self._tokenized(row)
        if read.are_words:
            tokens = [self._by_word(text) for text in (*read.sentences, *read.summary)]
        count, frame = len(read.sentences), self.setting.frame
        pieces = sum(map(len, tokens[count:])) + len(read.summary) + 1  # markers begin, end and separate
        if self.setting.needs_target and pieces < FEWEST_PIECES:
            raise RowSkipped(f"a summary of fewer than {FEWEST_PIECES - 2} tokens")
        ids, marks = list[int](), list[int]()
        for each in tokens[:count]:
            marks.append(len(ids))
            ids += [*frame.first, *each, *frame.last]
        return self._row(ids, marks, read.labels, read.sentences, "\n".join(read.summary))

    def _by_word(self, text: str) -> list[int]:
        """Tokenize each word between blanks by itself, keeping accents."""
        ids: list[int] = []
        for word in text.split():
            pieces = self._pieces.get(word)
            if pieces is None:
                # Like PreSumm, skip the tokenizer's normalizer, which would strip accents.
                cased = word.lower() if self._is_lower else word
                pieces = self._pieces[word] = [piece.id for piece in self._backend.model.tokenize(cased)]
            ids += pieces
        return ids

    def _tokenized(self, row: Row) -> EncodedRow:
        """Return the document of a row from PreSumm's files."""
        values = row.values
        summary = "\n".join(part.strip() for part in str(values.get("tgt_txt", "")).split(BREAK))
        marks, sentences = values["clss"], [str(text) for text in values.get("src_txt", ())]
        labels = values.get("src_sent_labels", values.get("labels", []))
        if not (len(marks) == len(labels) == len(sentences)):
            raise RowSkipped("the numbers of labels, texts and sentences differ")
        if not is_unicode("".join((*sentences, summary))):
            raise RowSkipped("unpaired surrogate (invalid Unicode)")
        return self._row(values["src"], marks, labels, sentences, summary)

    def _row(
        self, ids: Sequence[int], marks: Sequence[int], labels: Sequence[int], sentences: Sequence[str], summary: str
    ) -> EncodedRow:
        """Return a row, truncated to `max_length` tokens but keeping its last one, with the sentences that begin
        within.
        """
        recipe, excess = self.setting.recipe, max(len(ids) - self.setting.recipe.max_length, 0)
        if excess and recipe.on_long == "skip":
            raise RowSkipped("longer than max_length")
        if excess and recipe.on_long == "error":
            raise DataError(
                f"{len(ids)} tokens, max_length is {recipe.max_length}; raise it, or set on_long to shorten or skip"
            )
        group = content_hash("\n".join(sentences).encode())
        if excess:
            ids = [*ids[: recipe.max_length - 1], ids[-1]]
            marks = [mark for mark in marks if mark < len(ids)]
        count = len(marks)
        # Token types alternate from sentence to sentence (the paper's interval segment embeddings).
        borders = marks[1:] if self.setting.frame.has_types else ()
        targets = labels[:count] if self.setting.needs_target else [0] * count
        document = EncodedDocument(ids, borders, marks, targets, texts=sentences[:count])
        return EncodedRow([document], group, "", (summary,) if self.setting.needs_target else (), excess)


def _is_tokenized(row: Row) -> bool:
    """Tell whether a row comes from PreSumm's files: token ids and the positions of [CLS]."""
    lists = [row.values.get(name) for name in ("src", "clss")]
    return all(isinstance(each, list) and each and all(type(one) is int for one in each) for each in lists)


def _are_words(cell: Any) -> bool:
    return isinstance(cell, list) and bool(cell) and all(isinstance(sentence, list) for sentence in cell)


def _sentences(column: str, cell: Any) -> list[list[str]]:
    """Return the words of each sentence in a cell.

    Raises:
        RowSkipped: the cell has no sentences, or is not text.
    """
    if isinstance(cell, str):
        cell = split_sentences(cell.replace(BREAK, "\n"))
    if not isinstance(cell, list):
        raise RowSkipped(f"no value for column '{shortened(column)}'")
    words = []
    for sentence in cell:
        parts = sentence if isinstance(sentence, list) else [sentence]
        if not all(isinstance(part, str) for part in parts):
            raise RowSkipped(f"column '{shortened(column)}': the list has items that are not sentences")
        words.append(" ".join(parts).split())
    words = [sentence for sentence in words if sentence]
    if not words:
        raise RowSkipped(f"no value for column '{shortened(column)}'")
    if not is_unicode(" ".join(map(" ".join, words))):
        raise RowSkipped(f"column '{shortened(column)}': unpaired surrogate (invalid Unicode)")
    return words


def _words(text: str) -> list[str]:
    return _FOREIGN.sub("", text.translate(_WHITE)).split()


def _ngrams(words: Sequence[str]) -> list[set[tuple[str, ...]]]:
    """Collect unigrams and bigrams."""
    return [{(word,) for word in words}, set(pairwise(words))]


def _f1(both: int, selected: int, expected: int) -> float:
    """Compute F1 with PreSumm's 1e-8 in the divisor, which decides between nearly equal candidates."""
    precision = both / selected if selected else 0.0
    recall = both / expected if expected else 0.0
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))
