"""Open one model on every rank, and compute its read-only work on all of them.

Rank 0 reads the rows and writes the results. The other ranks serve: they open the models that rank 0 announces and
compute the units of work that it scatters.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptj_ft.checkpoints.adapter import tokenizer_folder
from gptj_ft.checkpoints.fingerprint import tuned_fingerprint
from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import build
from gptj_ft.data.tokenization import load_tokenizer
from gptj_ft.distributed.environment import check_same_environment, local_environment
from gptj_ft.distributed.exchange import scattered
from gptj_ft.distributed.scatter import Compute, on_units, serve
from gptj_ft.errors import UsageError
from gptj_ft.evaluation.answerer import Answerer
from gptj_ft.generation.decoding import continuations
from gptj_ft.generation.generator import InferenceSetup
from gptj_ft.generation.hf_model import StreamedModel
from gptj_ft.generation.workers import Workers
from gptj_ft.models.registry import Architecture
from gptj_ft.streaming.objective import objective_of
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.scoring import compute_outputs, compute_scores
from gptj_ft.system.group import Group
from gptj_ft.system.paths import is_tuned

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ServingRanks(Workers):
    """The other ranks of a group, each in `serve_models`."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def announce(self, folder: Path, recipe: Recipe, weights: str, cap: int | None) -> None:
        if self.group.size == 1:
            return
        request: dict[str, Any] = {"folder": str(folder.resolve()), "recipe": recipe.model_dump(mode="json")}
        request |= {"weights": weights, "cap": cap, "files": tuned_fingerprint(folder)}
        messages = self.group.gather("model", {"facts": local_environment(), "model": request})
        check_same_environment(messages, recipe.threads)
        self.group.gather("agreed", {})

    @contextmanager
    def attached(self, model: OffloadedModel) -> Iterator[None]:
        with scattered(model, self.group):
            yield

    def dismiss(self) -> None:
        """End `serve_models` on the other ranks."""
        if self.group.size > 1:
            self.group.gather("model", {"facts": local_environment(), "model": None})


def serve_models(group: Group) -> None:
    """Open each model that rank 0 announces, and compute the work that it scatters, until it has no more."""
    while (request := receive_model(group)) is not None:
        folder, recipe = Path(request["folder"]), build(request["recipe"])
        # This rank has no workers of its own: without a group, `open` announces nothing.
        setup = InferenceSetup.of(folder, recipe, local_rank=group.local_rank)
        with setup.open(request["weights"], request["cap"]) as (architecture, offloaded):
            serve(group, Replica(setup.recipe, setup.folder, architecture, offloaded).works)


def receive_model(group: Group) -> dict[str, Any] | None:
    """Receive the next model that rank 0 opens; None after the last."""
    messages = group.gather("model", {"facts": local_environment(), "model": None})
    request = messages[0]["model"]
    if request is None:
        return None
    check_same_environment(messages, request["recipe"]["threads"])
    folder, host = Path(request["folder"]), platform.node()
    if not is_tuned(folder):
        raise UsageError(f"the model is not in {folder} on {host}: every machine needs it at the same place")
    if tuned_fingerprint(folder) != request["files"]:
        raise UsageError(f"the model in {folder} on {host} is not the one of process 1: copy it from there")
    group.gather("agreed", {})
    return dict(request)


@dataclass(frozen=True)
class Replica:
    """The model of rank 0, open on another rank."""

    recipe: Recipe
    folder: Path  # has the tokenizer
    architecture: Architecture
    offloaded: OffloadedModel

    @property
    def works(self) -> Mapping[str, Compute]:
        """The function for each kind of work that rank 0 scatters."""
        device = self.offloaded.device
        return {
            "scores": on_units(partial(compute_scores, self.offloaded), device),
            "outputs": on_units(partial(compute_outputs, self.offloaded, objective_of(self.recipe)), device),
            "continuations": lambda units: continuations(self._model, self._tokenizer, units),
            "answers": lambda units: self._answerer.compute(units),
        }

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(tokenizer_folder(self.folder))

    @cached_property
    def _model(self) -> StreamedModel:
        return StreamedModel(self.architecture, self.offloaded, self.recipe.micro_batch_tokens)

    @cached_property
    def _answerer(self) -> Answerer:
        return Answerer(self.recipe, self._tokenizer, self.architecture, self.offloaded)
