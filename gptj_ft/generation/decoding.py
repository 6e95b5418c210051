"""Generate tokens with `transformers`' search, decode them to answers, and stream an answer while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from gptj_ft.config.options import Generation
from gptj_ft.data.encode import eos_of
from gptj_ft.errors import UsageError
from gptj_ft.generation.hf_model import RaggedCache, StreamedModel
from gptj_ft.system.accelerator import fork_rng

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast
    from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that share each pass over the weights while their continuations are generated."""

    prompts: Sequence[Sequence[int]]  # token ids of each, none empty
    settings: Generation
    seed: int  # own seed, so that samples depend neither on other batches nor on the process that draws them
    num_return: int = 1  # continuations of each prompt
    stops_in_blanks: bool = False  # whether a stop string among leading white space ends an answer, as in lm-eval

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of prompts and continuations."""
        new = self.settings.max_new_tokens * self.num_return
        return sum(len(prompt) + new for prompt in self.prompts)


def generate_batches(
    model: StreamedModel, tokenizer: PreTrainedTokenizerFast, batches: Sequence[PromptBatch]
) -> list[list[list[int]]]:
    """Generate the continuations of batches, scattered over the model's replicas; see `generate_tokens`.

    torch's generator keeps its state.
    """
    exchange = model.offloaded.exchange
    if exchange.num_replicas == 1:
        return [_continue(model, tokenizer, batch) for batch in batches]
    units = [{**vars(batch), "settings": batch.settings.model_dump(mode="json")} for batch in batches]
    sizes = [batch.max_tokens for batch in batches]
    return exchange.map_units("continuations", units, sizes, partial(continuations, model, tokenizer))


def continuations(
    model: StreamedModel, tokenizer: PreTrainedTokenizerFast, units: Sequence[Mapping[str, Any]]
) -> Iterator[list[list[int]]]:
    """Yield the continuations of the batches that this process generates; everything is JSON values."""
    for unit in units:
        settings = Generation.model_validate(unit["settings"])
        yield _continue(model, tokenizer, PromptBatch(**{**unit, "settings": settings}))


def _continue(model: StreamedModel, tokenizer: PreTrainedTokenizerFast, batch: PromptBatch) -> list[list[int]]:
    with fork_rng(model.device):
        torch.manual_seed(batch.seed % 2**63)
        count, in_blanks = batch.num_return, batch.stops_in_blanks
        return generate_tokens(model, tokenizer, batch.prompts, batch.settings, count, stops_in_blanks=in_blanks)


def generate_tokens(
    model: StreamedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Sequence[int]],
    settings: Generation,
    num_return: int = 1,
    streamer: BaseStreamer | None = None,
    read: RaggedCache | None = None,
    stops_in_blanks: bool = False,
) -> list[list[int]]:
    """Generate continuations of prompts, all in each pass over the weights. Finished rows cost nothing.

    Args:
        prompts: token ids of each, none empty.
        settings: greedy at temperature 0, else sampling from torch's default generator.
        num_return: continuations of each prompt; default 1.
        streamer: receiver of new tokens, for a single prompt without beams; default: none.
        read: cache of prompts that are prefilled already, see `hf_model.Prefill`; default: none.
        stops_in_blanks: whether a stop string among leading white space ends an answer; default: False.

    Returns:
        New tokens of each row up to an end token, which is left out; the continuations of a prompt are adjacent.
    """
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        # `transformers` wants padding on the left, so that all rows continue in the same column.
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    # Guesses would be checked by the angles of a longer row.
    most, switches = settings.max_new_tokens, model.rotary_switches
    if any(len(prompt) <= switch < len(prompt) + most for prompt in prompts for switch in switches):
        settings = settings.model_copy(update={"prompt_lookup_num_tokens": 0})
    ends = end_ids(tokenizer, settings)
    # With beams, the search itself drops finished ones, and it needs the logits of a row until all its beams are done.
    stops_rows = settings.num_beams == 1 and not settings.prompt_lookup_num_tokens
    cache = RaggedCache() if read is None else read
    cache.ends = torch.tensor(ends if stops_rows else [], dtype=torch.int64)
    output = model.generate(
        input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        past_key_values=cache,
        eos_token_id=ends,
        pad_token_id=ends[0],  # fills finished rows; cut off below
        num_return_sequences=num_return,
        streamer=streamer,
        logits_processor=_processors(settings, [width - len(prompt) for prompt in prompts]),
        stopping_criteria=[StopStrings(tokenizer, settings, width, ends, stops_in_blanks)] if settings.stop else [],
        **(settings.search_options() | _OWN_RULES),
    )
    return [list(takewhile(lambda token: token not in ends, row)) for row in output[:, width:].tolist()]


# `transformers` applies them to padding and prompt, too; see `_Unpadded` and `StopStrings`.
_OWN_RULES = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "stop_strings": None}


def _processors(settings: Generation, padding: Sequence[int]) -> list[LogitsProcessor]:
    """Return the logits processors that read earlier tokens.

    Args:
        padding: columns of padding before each prompt.
    """
    penalty, size = settings.repetition_penalty, settings.no_repeat_ngram_size
    own = [RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1.0 else []
    own += [NoRepeatNGramLogitsProcessor(size)] if size else []
    return [_Unpadded(each, torch.tensor(padding)) for each in own]


class _Unpadded(LogitsProcessor):  # type: ignore[misc]
    """Hide padding from a logits processor, so that answers do not depend on the other rows of a batch."""

    def __init__(self, processor: LogitsProcessor, padding: Tensor) -> None:
        self._processor, self._padding = processor, padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._padding = self._padding.to(input_ids.device)
        rows, columns = input_ids.shape
        padding = self._padding.repeat_interleave(rows // len(self._padding))  # a prompt's rows are adjacent
        is_padding = torch.arange(columns, device=input_ids.device) < padding[:, None]
        # Padding becomes a token of its own, with a column that exists only here.
        size = scores.shape[-1]
        processed: Tensor = self._processor(input_ids.masked_fill(is_padding, size), F.pad(scores, (0, 1)))
        return processed[:, :size]


class StopStrings(StoppingCriteria):  # type: ignore[misc]
    """Stop the rows whose answer `cut_at` cuts.

    Args:
        width: columns of the prompts.
        ends: ids of the tokens that end an answer; they also fill finished rows.
        stops_in_blanks: see `cut_at`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        settings: Generation,
        width: int,
        ends: Sequence[int],
        stops_in_blanks: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop, self._width, self._ends, self._in_blanks = settings.stop, width, ends, stops_in_blanks
        self._most_new = 1 + settings.prompt_lookup_num_tokens  # tokens of a step

    def __call__(self, input_ids: Tensor, scores: Any, **ignored: Any) -> Tensor:
        rows = input_ids[:, self._width :].tolist()
        return torch.tensor([self._is_complete(row) for row in rows], device=input_ids.device)

    def _is_complete(self, tokens: list[int]) -> bool:
        if tokens[-1] in self._ends:
            return False  # finished before
        # Most steps need not decode the whole answer: only new text completes a stop string. Decoding it alone may lose
        # a leading space and the parts of a character.
        new = " " + self._text(tokens[-self._most_new :])
        if UNFINISHED not in new and not any(string[-1:] in new for string in self._stop):
            return False
        text = self._text(tokens)
        return cut_at(text, self._stop, self._in_blanks) != text

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def end_ids(tokenizer: PreTrainedTokenizerFast, settings: Generation) -> list[int]:
    """Return the ids of the tokens that end an answer, stop strings that are special tokens included.

    Raises:
        UsageError: the tokenizer lacks one, or has no EOS token.
    """
    added = tokenizer.added_tokens_decoder.items() if settings.stop else ()
    # Decoded text has no special tokens, so `cut_at` does not find them.
    stops = [number for number, token in added if token.special and token.content in settings.stop]
    if not settings.end_tokens:
        return [eos_of(tokenizer), *stops]
    known = tokenizer.get_vocab()
    for name in settings.end_tokens:
        if name not in known:
            raise UsageError(f"generation.end_tokens: the tokenizer has no token '{name}'")
    return [*(known[name] for name in settings.end_tokens), *stops]


def text_of(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int], settings: Generation) -> str:
    """Decode new tokens to an answer: cut at the first stop string, without outer white space."""
    return cut_at(tokenizer.decode(tokens, skip_special_tokens=True), settings.stop).strip()


def cut_at(text: str, stop: Sequence[str], in_blanks: bool = False) -> str:
    """Cut a text at the first complete stop string.

    Args:
        in_blanks: whether leading white space counts; default: False.
    """
    # Leading blanks are stripped later: a line break among them must not end the answer.
    start = 0 if in_blanks else len(text) - len(text.lstrip())
    # The string that ends first decides: text that follows must not move the cut.
    found = [(at + len(string), at) for string in stop if (at := text.find(string, start)) >= 0]
    return text[: min(found)[1]] if found else text


UNFINISHED = "\ufffd"  # decoded from the first bytes of a character


class AnswerStreamer(BaseStreamer):  # type: ignore[misc]
    """Show an answer in pieces while it is generated; the pieces add up to the same text as decoding it at once.

    White space is held back until other text follows, since an answer does not end with it. So are characters that may
    begin a stop string.
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
        final = cut_at(text, self._settings.stop)
        if final == text:
            final = text[: len(text) - self._num_held_back(text)]
        self._advance(final.strip().rstrip(UNFINISHED).rstrip())

    def end(self) -> None:
        """Show the remaining text."""
        self._advance(text_of(self._tokenizer, self._tokens, self._settings))

    def _num_held_back(self, text: str) -> int:
        """Count the trailing characters that may begin a stop string."""
        starts = (stop[:length] for stop in self._settings.stop for length in range(1, len(stop)))
        return max((len(start) for start in starts if text.endswith(start)), default=0)

    def _advance(self, text: str) -> None:
        # Further tokens may change the end of the text, e.g. complete a character. Shown text is never taken back.
        if text.startswith(self._shown) and len(text) > len(self._shown):
            self._show(text[len(self._shown) :])
            self._shown = text
