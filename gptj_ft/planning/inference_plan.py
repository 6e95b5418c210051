"""Plan inference: placement, memory, and the token budget of a pass.

Computed before it starts, like the forecast of a training run; what cannot fit is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from gptj_ft.config.options import Generation, Recipe
from gptj_ft.errors import ResourceError
from gptj_ft.models.kv_cache import slots_taken
from gptj_ft.models.layout import Layout
from gptj_ft.models.registry import Architecture
from gptj_ft.planning.plan import PLACES_FASTEST_FIRST, PROCESS_BYTES, Free, Need, needs_of, shortage
from gptj_ft.planning.suggestions import Candidate, Knob, halves, lift_caps, read_less_ahead, stream_more, suggest
from gptj_ft.streaming.buffers import PASS_TOKENS
from gptj_ft.streaming.step import HEAD_CHUNK_BYTES
from gptj_ft.streaming.stores.placement import Place
from gptj_ft.system.block_reader import STAGING_BYTES

BATCH_TOKENS = 16384  # of prompts and answers that share the passes over the weights, at most
ENOUGH_TOKENS = BATCH_TOKENS // 8  # from which on more of them gain less than weights that need not be read again
_TOKEN_BYTES = 2 * 36  # of a token in Python's lists: of a document, and once more of its prompt
LIVE_TENSORS = 16  # of [tokens computed at once, width] that a block has at once, its MLP's counted by 4
LIVE_LOGITS = 5  # of [rows, vocabulary], fp32, while the next tokens are chosen
LEAST_TOKENS = 256  # suggested: of a row, and computed at once
LEAST_NEW_TOKENS = 32  # suggested
WRITTEN_TOKEN_BYTES = 8  # on the disk of a token written


@dataclass(frozen=True)
class TokenBudget:
    """Token budgets of a pass; a longer row goes alone.

    Attributes:
        computed: through a layer at once.
        read: tokens of a pass that only scores.
        written: tokens of prompts and answers that share passes while generating.
    """

    computed: int
    read: int = PASS_TOKENS
    written: int = BATCH_TOKENS


@dataclass(frozen=True)
class InferenceWorkload:
    """Workload of an evaluation or generation.

    Attributes:
        layouts: layout of each layer.
        width: width of the hidden states.
        vocabulary: tokens that there are.
        dtype: data type of the computation.
        settings: generation settings.
        documents: tokens of each document whose loss is wanted.
        prompts: tokens of each prompt that an answer is written to.
        num_return: answers to each prompt.
        adapter_bytes: size of the adapter.
    """

    layouts: Sequence[Layout]
    width: int
    vocabulary: int
    dtype: torch.dtype
    settings: Generation
    documents: Sequence[int] = ()
    prompts: Sequence[int] = ()
    num_return: int = 1
    adapter_bytes: int = 0

    @classmethod
    def of(cls, architecture: Architecture, dtype: torch.dtype, settings: Generation, **more: Any) -> InferenceWorkload:
        """Build a workload from a model and the attributes after ``settings``."""
        config, layouts = architecture.config, [Layout.of(layer) for layer in architecture.skeleton]
        return cls(layouts, int(config.n_embd), int(config.vocab_size), dtype, settings, **more)

    @property
    def rows_of_prompt(self) -> int:
        """Number of rows generated from each prompt."""
        return max(self.settings.num_beams, self.num_return)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a token's hidden state."""
        return self.width * self.dtype.itemsize

    def weight_bytes(self) -> int:
        """Compute the size of the whole model, in bytes."""
        return sum(layout.numel for layout in self.layouts) * self.dtype.itemsize

    def slot_bytes(self, read_ahead: int) -> int:
        """Compute the size of the buffers of streamed weights, in bytes."""
        return (read_ahead + 1) * max(layout.numel for layout in self.layouts) * self.dtype.itemsize

    def working_bytes(self, together: TokenBudget) -> int:
        """Compute the peak of device memory beside the weights, in bytes: of a pass, or of generation and its cache."""
        most = max((*self.documents, *self.prompts, 1))
        computed = min(max(together.computed, most), max(sum(self.documents), sum(self.prompts)))
        head = 3 * min(HEAD_CHUNK_BYTES, 4 * self.vocabulary * computed) if self.documents else 0
        layer = LIVE_TENSORS * computed * self.hidden_bytes + head
        passed = min(max(together.read, most), sum(self.documents))
        return max(2 * passed * self.hidden_bytes + layer, self._writing_bytes(together, layer))

    def _writing_bytes(self, together: TokenBudget, layer: int) -> int:
        settings, blocks, most = self.settings, len(self.layouts) - 2, 0
        for rows in batches_by_length(self.prompts, settings, self.num_return, together.written):
            prompt, of_slot = self.prompts[rows[0]], 2 * self.hidden_bytes * len(rows)
            read = sum((self.documents or self.prompts)[row] for row in rows)
            reading = blocks * of_slot * slots_taken(prompt, 0, 1) + 2 * read * self.hidden_bytes + layer
            # One layer's keys and values are there twice when they need more room.
            slots = slots_taken(prompt, settings.max_new_tokens, self.rows_of_prompt)
            logits = LIVE_LOGITS * 4 * self.vocabulary * len(rows) * self.rows_of_prompt
            most = max(most, reading, (blocks + 1) * of_slot * slots + logits)
        return most


@dataclass(frozen=True)
class InferencePlan:
    """Placement, token budget and memory of inference; bytes.

    Attributes:
        weights: place of the model's weights.
        precision: type of the computation.
        together: token budgets.
        device_bytes: bytes needed on the device.
        host_bytes: bytes needed in host memory.
        disk_bytes: bytes needed on the disk for the results.
        have: available resources.
    """

    weights: Place
    precision: str
    together: TokenBudget
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    have: Free = field(repr=False)

    @property
    def needs(self) -> list[Need]:
        """Needed and available bytes of each resource."""
        return needs_of(self.device_bytes, self.host_bytes, self.disk_bytes, self.have)

    @property
    def lack(self) -> int:
        """Bytes that are missing, over all resources; 0 if it fits."""
        return sum(max(0, each.need - each.have) for each in self.needs)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
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

    A row whose answer may be cut short by the model's window is alone, so that it cuts no other.
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


def token_budget_within(reads: InferenceWorkload, computed: int, free_bytes: int) -> TokenBudget:
    """Compute the token budget for the device memory left beside the weights; at least one row."""
    shares = list(_shares(computed, None))
    fitting = (x for x in shares if reads.working_bytes(x) <= free_bytes)
    return next(fitting, shares[-1])


def plan_inference(recipe: Recipe, reads: InferenceWorkload, free: Free, written: int | None = None) -> InferencePlan:
    """Choose the fastest inference plan that fits.

    Args:
        recipe: recipe with ``weights`` (a place or ``auto``) and memory caps.
        reads: workload.
        free: free resources of the machine.
        written: tokens of prompts and answers that go together, where that was decided before.

    Raises:
        ResourceError: nothing allowed fits; says by how much, and what would help.
    """
    plans = list(_plans(recipe, reads, free, written))
    fitting = [plan for plan in plans if not plan.lack]
    enough = [plan for plan in fitting if plan.together.written >= ENOUGH_TOKENS]
    if fitting:
        return next(iter(enough), max(fitting, key=lambda plan: plan.together.written))
    nearest = min(plans, key=lambda plan: plan.lack)

    def lack(recipe: Recipe, reads: InferenceWorkload) -> int:
        return min(plan.lack for plan in _plans(recipe, reads, free, None))

    hint = suggest(Candidate(recipe, reads), KNOBS, lack)
    raise ResourceError(f"does not fit: with weights on {nearest.weights} {shortage(nearest.needs, free)}; {hint}")


def _plans(recipe: Recipe, reads: InferenceWorkload, free: Free, written: int | None) -> Iterator[InferencePlan]:
    """Enumerate the plans that the recipe allows, fastest first."""
    have = free.capped(recipe)
    for place in PLACES_FASTEST_FIRST:
        # Where the device is the CPU, "host" is its own memory with a copy on top, and only for those who ask for it.
        if recipe.weights == place or (recipe.weights == "auto" and not (free.is_shared and place == "host")):
            for together in _shares(recipe.micro_batch_tokens, written):
                yield _plan(recipe, reads, have, place, together)


def _shares(computed: int, written: int | None) -> Iterator[TokenBudget]:
    """Enumerate token budgets by halving, so that small changes of free memory change nothing."""
    together = TokenBudget(computed, max(PASS_TOKENS, computed), written or BATCH_TOKENS)
    yield together
    while together.read > computed or (written is None and together.written > 1):
        together = replace(
            together,
            read=max(computed, together.read // 2),
            written=written or max(1, together.written // 2),
        )
        yield together


def _plan(recipe: Recipe, reads: InferenceWorkload, have: Free, place: Place, together: TokenBudget) -> InferencePlan:
    slots = 0 if place == "device" else reads.slot_bytes(recipe.read_ahead)
    own = reads.weight_bytes() if place == "device" else slots
    texts = _TOKEN_BYTES * (sum(reads.documents) or sum(reads.prompts))
    staging = STAGING_BYTES if place == "disk" else 0
    answers = len(reads.prompts) * reads.num_return * reads.settings.max_new_tokens
    return InferencePlan(
        weights=place,
        precision=str(reads.dtype).removeprefix("torch."),
        together=together,
        device_bytes=own + reads.adapter_bytes + reads.working_bytes(together),
        host_bytes=PROCESS_BYTES + texts + staging + (reads.weight_bytes() if place == "host" else 0),
        disk_bytes=WRITTEN_TOKEN_BYTES * (answers + 16 * len(reads.documents)),
        have=have,
    )


def _compute_less_at_once(now: Candidate[InferenceWorkload]) -> Iterator[Candidate[InferenceWorkload]]:
    for tokens in halves(now.recipe.micro_batch_tokens, LEAST_TOKENS):
        yield now.with_options(f"--set micro_batch_tokens={tokens}", micro_batch_tokens=tokens)


def _without_beams(now: Candidate[InferenceWorkload]) -> Iterator[Candidate[InferenceWorkload]]:
    if now.load.settings.num_beams > 1:
        settings = now.load.settings.model_copy(update={"num_beams": 1})
        yield now.with_options("--set generation.num_beams=1", replace(now.load, settings=settings))


def _shorter_answers(now: Candidate[InferenceWorkload]) -> Iterator[Candidate[InferenceWorkload]]:
    for tokens in halves(now.load.settings.max_new_tokens, LEAST_NEW_TOKENS):
        settings = now.load.settings.model_copy(update={"max_new_tokens": tokens})
        yield now.with_options(f"--set generation.max_new_tokens={tokens}", replace(now.load, settings=settings))


def _shorter_rows(now: Candidate[InferenceWorkload]) -> Iterator[Candidate[InferenceWorkload]]:
    for length in halves(now.recipe.max_length, LEAST_TOKENS):
        documents, prompts = ([min(each, length) for each in of] for of in (now.load.documents, now.load.prompts))
        yield now.with_options(f"--set max_length={length}", replace(now.load, documents=documents, prompts=prompts))


KNOBS: Sequence[Knob[InferenceWorkload]] = (
    stream_more, read_less_ahead, _compute_less_at_once, lift_caps, _without_beams, _shorter_answers, _shorter_rows,
)  # fmt: skip
