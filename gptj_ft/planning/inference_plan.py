"""Plan inference before it starts: placement, memory, and the token budget of a pass. Refuse a job that cannot fit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from gptj_ft.config.options import Generation, Recipe
from gptj_ft.errors import ResourceError
from gptj_ft.models.kv_cache import slots_taken
from gptj_ft.models.layout import NO_PARAMETERS, Layout
from gptj_ft.models.registry import Architecture
from gptj_ft.planning.constants import COUNTED_LIVE, LISTED_TOKEN_BYTES, LIVE_LOGITS, LIVE_TENSORS, PROCESS_BYTES
from gptj_ft.planning.layer_cost import LayerInput, measure_block
from gptj_ft.planning.memory import Free, Requirements, reserve
from gptj_ft.planning.plan import allowed_places
from gptj_ft.planning.suggestions import Candidate, Knob, halves, lift_caps, read_less_ahead, stream_more, suggest
from gptj_ft.streaming.buffers import PASS_TOKENS
from gptj_ft.streaming.step import HEAD_CHUNK_BYTES
from gptj_ft.streaming.stores.placement import Place
from gptj_ft.system.block_reader import STAGING_BYTES

BATCH_TOKENS = 16384  # most tokens of prompts and answers that share the passes over the weights
ENOUGH_TOKENS = BATCH_TOKENS // 8  # more tokens gain less than resident weights
LEAST_TOKENS = 256  # that a suggestion leaves to a row, and to be computed together
LEAST_NEW_TOKENS = 32
WRITTEN_TOKEN_BYTES = 8  # on disk


@dataclass(frozen=True)
class TokenBudget:
    """Token budgets of a pass; a longer row goes alone."""

    computed: int  # through a layer at once
    read: int = PASS_TOKENS  # in a pass that only scores
    written: int = BATCH_TOKENS  # prompts and answers that share passes while generating


@dataclass(frozen=True)
class InferenceWorkload:
    """Workload of an evaluation or generation."""

    layouts: Sequence[Layout]  # of each layer
    width: int  # of the hidden states
    vocabulary: int
    dtype: torch.dtype
    settings: Generation
    documents: Sequence[int] = ()  # tokens of each document to score
    prompts: Sequence[int] = ()  # tokens of each prompt to answer
    num_return: int = 1  # answers per prompt
    adapter_bytes: int = 0
    key_width: int = 0  # of a token's keys in a block, and of its values; 0: the hidden states'
    live_tensors: int = LIVE_TENSORS  # of [tokens computed together, width] in a block
    rotary_switches: Collection[int] = ()  # see `Architecture`

    @classmethod
    def of(cls, architecture: Architecture, dtype: torch.dtype, settings: Generation, **more: Any) -> InferenceWorkload:
        """Build a workload from a model and the fields after ``settings``; ``layouts`` may have sizes in files."""
        config, layouts = architecture.config, more.pop("layouts", None) or model_layouts(architecture)
        more = {
            "key_width": architecture.key_width, "live_tensors": _live_tensors(architecture),
            "rotary_switches": architecture.rotary_switches, **more,
        }  # fmt: skip
        return cls(layouts, int(config.n_embd), int(config.vocab_size), dtype, settings, **more)

    @property
    def rows_of_prompt(self) -> int:
        """Rows generated together for each prompt."""
        return max(self.settings.num_beams, self.num_return)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a token's hidden state."""
        return self.width * self.dtype.itemsize

    def weight_bytes(self, place: Place) -> int:
        """Return the size of the model in a place, in bytes."""
        return sum(layout.bytes_in(place, self.dtype) for layout in self.layouts)

    @property
    def is_quantized(self) -> bool:
        return any(layout.is_quantized for layout in self.layouts)

    def slot_bytes(self, read_ahead: int) -> int:
        """Return the size of the buffers of streamed weights, in bytes."""
        return (read_ahead + 1) * max(layout.numel for layout in self.layouts) * self.dtype.itemsize

    def working_bytes(self, together: TokenBudget) -> int:
        """Return the peak of device memory without the weights, of a scoring pass or of generation, in bytes."""
        most = max((*self.documents, *self.prompts, 1))
        computed = min(max(together.computed, most), max(sum(self.documents), sum(self.prompts)))
        head = 3 * min(HEAD_CHUNK_BYTES, 4 * self.vocabulary * computed) if self.documents else 0
        layer = self.live_tensors * computed * self.hidden_bytes + head
        passed = min(max(together.read, most), sum(self.documents))
        return max(2 * passed * self.hidden_bytes + layer, self._writing_bytes(together, layer))

    def _writing_bytes(self, together: TokenBudget, layer: int) -> int:
        settings, blocks, most = self.settings, len(self.layouts) - 2, 0
        for rows in batches_by_length(self.prompts, settings, self.num_return, together.written):
            of_slot = 2 * (self.key_width or self.width) * self.dtype.itemsize * len(rows)
            prompt = self.prompts[rows[0]]
            read = sum((self.documents or self.prompts)[row] for row in rows)
            reading = blocks * of_slot * slots_taken(prompt, 0, 1) + 2 * read * self.hidden_bytes + layer
            # When the cache grows, one layer's keys and values exist twice.
            slots = slots_taken(prompt, settings.max_new_tokens, self.rows_of_prompt)
            logits = LIVE_LOGITS * 4 * self.vocabulary * len(rows) * self.rows_of_prompt
            # Rows that outgrow a length of LongRoPE are computed again, one after another.
            new, sizes = range(settings.max_new_tokens), [self.prompts[row] for row in rows]
            again = max((at + 1 for at in self.rotary_switches if any(at - size in new for size in sizes)), default=0)
            logits += again * (self.live_tensors + 2 * len(rows) * self.rows_of_prompt) * self.hidden_bytes
            most = max(most, reading, (blocks + 1) * of_slot * slots + logits)
        return most


def model_layouts(architecture: Architecture) -> list[Layout]:
    """Return the layout of each layer of a model."""
    return [Layout.of(layer) for layer in architecture.skeleton]


def _live_tensors(architecture: Architecture) -> int:
    """Return the memory of a block without gradients, in tensors of [tokens, width]."""
    # Gated MLPs and wide heads need more than the blocks to which the constant was fitted.
    shape = LayerInput((256,), architecture.config.n_embd, torch.float32)
    measured = measure_block(architecture.skeleton[1], NO_PARAMETERS, shape).forward_bytes
    hidden_bytes = shape.tokens * shape.width * torch.float32.itemsize
    return LIVE_TENSORS + max(0, measured // hidden_bytes - COUNTED_LIVE)


@dataclass(frozen=True)
class InferencePlan(Requirements):
    """Placement, token budgets and memory of inference; bytes."""

    weights: Place
    precision: str
    together: TokenBudget
    device_bytes: int
    host_bytes: int
    disk_bytes: int  # of the results
    have: Free = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "precision": self.precision,
            "together": asdict(self.together),
            "needs": [asdict(need) for need in self.needs],
        }


def batches_by_length(
    lengths: Sequence[int],
    settings: Generation,
    num_return: int = 1,
    most_tokens: int = BATCH_TOKENS,
    window: int | None = None,
) -> Iterator[list[int]]:
    """Group rows into passes by prompt length, longest first.

    A row whose answer the model's window may cut short goes alone, so that it cuts no other.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        most = longest + settings.max_new_tokens * max(settings.num_beams, num_return)
        is_alone = settings.prompt_lookup_num_tokens or (window and longest + settings.max_new_tokens > window)
        end = start + (1 if is_alone else max(1, most_tokens // most))
        yield order[start:end]
        start = end


def token_budget_within(workload: InferenceWorkload, computed: int, free_bytes: int) -> TokenBudget:
    """Return the largest token budget for the device memory that the weights leave; at least one row."""
    budgets = list(_token_budgets(computed, None))
    fitting = (each for each in budgets if workload.working_bytes(each) <= free_bytes)
    return next(fitting, budgets[-1])


def plan_inference(
    recipe: Recipe, workload: InferenceWorkload, free: Free, written: int | None = None
) -> InferencePlan:
    """Choose the fastest inference plan that fits.

    Args:
        written: `TokenBudget.written` of an earlier part of the same job.

    Raises:
        ResourceError: no allowed plan fits. The message names the missing bytes and options that help.
    """
    plans = list(_plans(recipe, workload, free, written))
    fitting = [plan for plan in plans if not plan.lack]
    enough = [plan for plan in fitting if plan.together.written >= ENOUGH_TOKENS]
    if fitting:
        # The fastest place that leaves room for enough tokens; if none does, tokens matter more than the place.
        return next(iter(enough), max(fitting, key=lambda plan: plan.together.written))
    nearest = min(plans, key=lambda plan: plan.lack)

    def lack(recipe: Recipe, workload: InferenceWorkload) -> int:
        return min(plan.lack for plan in _plans(recipe, workload, free, None))

    hint = suggest(Candidate(recipe, workload), KNOBS, lack)
    raise ResourceError(f"does not fit: with weights on {nearest.weights} {nearest.shortage(free)}; {hint}")


def _plans(recipe: Recipe, workload: InferenceWorkload, free: Free, written: int | None) -> Iterator[InferencePlan]:
    """Yield the plans that the recipe allows, fastest first."""
    have = free.capped(recipe)
    for place in allowed_places(recipe.weights, free.is_shared, workload.is_quantized):
        for together in _token_budgets(recipe.micro_batch_tokens, written):
            yield _plan(recipe, workload, have, place, together)


def _token_budgets(computed: int, written: int | None) -> Iterator[TokenBudget]:
    """Yield token budgets by halving, so that small changes of free memory change nothing."""
    together = TokenBudget(computed, max(PASS_TOKENS, computed), written or BATCH_TOKENS)
    yield together
    while together.read > computed or (written is None and together.written > 1):
        together = replace(
            together,
            read=max(computed, together.read // 2),
            written=written or max(1, together.written // 2),
        )
        yield together


def _plan(
    recipe: Recipe, workload: InferenceWorkload, have: Free, place: Place, together: TokenBudget
) -> InferencePlan:
    weights = workload.weight_bytes(place) if place == "device" else workload.slot_bytes(recipe.read_ahead)
    texts = LISTED_TOKEN_BYTES * (sum(workload.documents) or sum(workload.prompts))
    staging = STAGING_BYTES if place == "disk" else 0
    tensors = weights + workload.adapter_bytes + workload.working_bytes(together)
    answers = len(workload.prompts) * workload.num_return * workload.settings.max_new_tokens
    return InferencePlan(
        weights=place,
        precision=str(workload.dtype).removeprefix("torch."),
        together=together,
        device_bytes=tensors + (0 if have.is_shared else reserve(tensors)),
        host_bytes=PROCESS_BYTES + texts + staging + (workload.weight_bytes(place) if place == "host" else 0),
        disk_bytes=WRITTEN_TOKEN_BYTES * (answers + 16 * len(workload.documents)),
        have=have,
    )


def _compute_less_at_once(now: Candidate[InferenceWorkload]) -> Iterator[Candidate[InferenceWorkload]]:
    for tokens in halves(now.recipe.micro_batch_tokens, LEAST_TOKENS):
        yield now.with_options(f"--set micro_batch_tokens={tokens}", micro_batch_tokens=tokens)


def _without_beams(now: Candidate[InferenceWorkload]) -> Iterator[Candidate[InferenceWorkload]]:
    if now.workload.settings.num_beams > 1:
        settings = now.workload.settings.model_copy(update={"num_beams": 1})
        yield now.with_options("--set generation.num_beams=1", replace(now.workload, settings=settings))


def _shorter_answers(now: Candidate[InferenceWorkload]) -> Iterator[Candidate[InferenceWorkload]]:
    for tokens in halves(now.workload.settings.max_new_tokens, LEAST_NEW_TOKENS):
        settings = now.workload.settings.model_copy(update={"max_new_tokens": tokens})
        workload = replace(now.workload, settings=settings)
        yield now.with_options(f"--set generation.max_new_tokens={tokens}", workload)


def _shorter_rows(now: Candidate[InferenceWorkload]) -> Iterator[Candidate[InferenceWorkload]]:
    for length in halves(now.recipe.max_length, LEAST_TOKENS):
        cut = ([min(each, length) for each in each] for each in (now.workload.documents, now.workload.prompts))
        documents, prompts = cut
        workload = replace(now.workload, documents=documents, prompts=prompts)
        yield now.with_options(f"--set max_length={length}", workload)


KNOBS: Sequence[Knob[InferenceWorkload]] = (
    stream_more, read_less_ahead, _compute_less_at_once, lift_caps, _without_beams, _shorter_answers, _shorter_rows,
)  # fmt: skip
