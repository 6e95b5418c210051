"""Stream an answer while it is generated."""

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
    """Decode tokens incrementally; the pieces shown add up to the answer that decoding at once gives.

    Blanks wait for what follows them, because an answer ends without; so does what may become a stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, settings: Generation, show: Callable[[str], object]) -> None:
        self._tokenizer, self._settings, self._show = tokenizer, settings, show
        self._tokens: list[int] = []
        self._has_prompt = False
        self._shown = ""

    def put(self, value: Tensor) -> None:
        """Receive the prompt first, then new tokens."""
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
        """Show the remaining text."""
        self._advance(text_of(self._tokenizer, self._tokens, self._settings))

    def _held_back(self, text: str) -> int:
        """Count the trailing characters that may begin a stop string."""
        starts = (stop[:length] for stop in self._settings.stop for length in range(1, len(stop)))
        return max((len(start) for start in starts if text.endswith(start)), default=0)

    def _advance(self, text: str) -> None:
        if text.startswith(self._shown) and len(text) > len(self._shown):
            self._show(text[len(self._shown) :])
            self._shown = text
