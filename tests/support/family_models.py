"""Random models of every family: `transformers`' model beside ours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from support.family_shapes import FAMILY_SHAPES
from support.small_stack import CPU, LENGTHS
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Recipe
from gptj_ft.models.layer_sampling import layer_choice
from gptj_ft.models.registry import Architecture
from gptj_ft.models.trainable import select
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import load_weights, open_for_training, open_frozen
from gptj_ft.streaming.stores.placement import Placement, training_dtypes


def random_of_family(name: str, seed: int = 0, **more: Any) -> Any:
    """Return a random model of a shape, with non-trivial norms and biases; attention is eager, as Gemma 2 needs."""
    shape = {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.1, **FAMILY_SHAPES[name], **more}
    config = AutoConfig.for_model(**shape)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.3, std=0.3)
    return model


@dataclass
class FamilyModel:
    """A random model of `transformers` and its folder."""

    model: Any
    folder: Path

    @cached_property
    def architecture(self) -> Architecture:
        return read_architecture(self.folder)

    def open_training(
        self, tmp: Path, placement: tuple[str, str] = ("device", "device"), recipe: Recipe = Recipe(),
        budget: BufferBudget = BufferBudget(chunk_numel=2048, num_chunks=3),
    ) -> OffloadedModel:  # fmt: skip
        """Open the model for training; chunks are small, so that a layer has more chunks than the pool has buffers."""
        places = Placement(*placement)  # type: ignore[arg-type]
        stack = open_for_training(
            self.architecture, places, training_dtypes(torch.float32), CPU, tmp / "-".join(placement), budget,
            keep_gradients=recipe.clip_norm is not None, selection=select(self.architecture, recipe),
            boundary=boundary_layout(sum(LENGTHS), self.architecture.config.n_embd, len(LENGTHS)),
            choice=layer_choice(recipe, len(self.architecture.skeleton)),
        )  # fmt: skip
        checkpoint = open_checkpoint(self.folder)
        open_frozen(stack, self.architecture, checkpoint, places)
        load_weights(stack, self.architecture, checkpoint)
        return stack

    def of(self, model: Any) -> dict[str, Tensor]:
        """Return the parameters of a `transformers` model under their names in files."""
        keys, head = self.architecture.family.keys, "lm_head.weight"
        own = head if head in keys else "embed_out.weight"  # GPT-NeoX's name in files
        return {own if name == head else name: value for name, value in model.named_parameters(remove_duplicate=False)}
