"""An answer, shown while it is being written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from gptj_ft.config.options import Generation
from gptj_ft.generation.decoding import cut_at, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNFINISHED = "\ufffd"  # what half a character is decoded to


class AnswerStreamer(BaseStreamer):  # type: ignore[misc]
    """Takes tokens and shows text; what has been shown in the end is the answer as it is without.

    Blanks wait for what follows them, because an answer ends without; so does what may become a stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, settings: Generation, show: Callable[[str], object]) -> None:
        self._tokenizer, self._settings, self._show = tokenizer, settings, show
        self._tokens: list[int] = []
        self._has_prompt = False
        self._shown = ""

    def put(self, value: Tensor) -> None:
        """Take the prompt, the first time, then the tokens that are new."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._tokens += value.flatten().tolist()
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        sure = cut_at(text, self._settings.stop)
        if sure == text:
            sure = text[: len(text) - self._held_back(text)]
        self._advance(sure.strip().rstrip(UNFINISHED).rstrip())

    def end(self) -> None:
        """Show the rest."""
        self._advance(text_of(self._tokenizer, self._tokens, self._settings))

    def _held_back(self, text: str) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        starts = (stop[:length] for stop in self._settings.stop for length in range(1, len(stop)))
        return max((len(start) for start in starts if text.endswith(start)), default=0)

    def _advance(self, text: str) -> None:
        if text.startswith(self._shown) and len(text) > len(self._shown):
            self._show(text[len(self._shown) :])
            self._shown = text
