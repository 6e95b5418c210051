"""Take part in an evaluation, a prediction or a generation that process 0 leads: compute what it deals out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from gptj_ft.checkpoints.adapter import tokenizer_folder
from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import build
from gptj_ft.data.tokenization import load_tokenizer
from gptj_ft.distributed.batches import on_units
from gptj_ft.distributed.scatter import Compute, serve
from gptj_ft.distributed.served_model import hear_model
from gptj_ft.evaluation.answerer import Answerer
from gptj_ft.generation.decoding import continuations
from gptj_ft.generation.generator import InferenceSetup
from gptj_ft.generation.hf_model import StreamedModel
from gptj_ft.models.registry import Architecture
from gptj_ft.streaming.objective import objective_of
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.scoring import compute_outputs, compute_scores
from gptj_ft.system.group import Group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def serve_models(group: Group) -> None:
    """Open the models that process 0 opens, and compute what it deals out, until it is done.

    Raises:
        GptjFtError: this process does not have the model, or it does not fit; or another one has failed.
    """
    while (told := hear_model(group)) is not None:
        setup = InferenceSetup.of(Path(told["folder"]), build(told["recipe"]), number_here=group.number_here)
        with setup.open(told["weights"], told["cap"]) as (
            architecture,
            offloaded,
        ):  # in a group of its own: it leads none
            serve(group, Replica(setup.recipe, setup.folder, architecture, offloaded).works)


@dataclass(frozen=True)
class Replica:
    """A model that is open in this process as in the first.

    Attributes:
        recipe: task, and options of computing and generating.
        folder: folder with its tokenizer.
        architecture: family and configuration of the model.
        offloaded: the model.
    """

    recipe: Recipe
    folder: Path
    architecture: Architecture
    offloaded: OffloadedModel

    @property
    def works(self) -> Mapping[str, Compute]:
        """What computes each kind of work, by the name under which it is dealt out."""
        device = self.offloaded.device
        return {
            "scores": on_units(partial(compute_scores, self.offloaded), device),
            "outputs": on_units(partial(compute_outputs, self.offloaded, objective_of(self.recipe)), device),
            "continuations": lambda units: continuations(self._model, self._tokenizer, units),
            "answers": lambda units: self._predictor.compute(units),
        }

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(tokenizer_folder(self.folder))

    @cached_property
    def _model(self) -> StreamedModel:
        return StreamedModel(self.architecture, self.offloaded, self.recipe.micro_batch_tokens)

    @cached_property
    def _predictor(self) -> Answerer:
        return Answerer(self.recipe, self._tokenizer, self.architecture, self.offloaded)
