"""Test the shapes of published models."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptj_ft.checkpoints.base_model import find_model
from gptj_ft.errors import UsageError
from gptj_ft.models.layout import Layout
from gptj_ft.models.published import DECODERS, PYTHIA_SIZES, find_published, names_of
from gptj_ft.models.registry import families

# Of the model cards and papers.
PARAMETERS = {
    "pythia-14m": 14_067_712, "pythia-31m": 30_494_720, "pythia-70m-deduped": 70_426_624, "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016, "pythia-1b": 1_011_781_632, "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960, "pythia-6.9b": 6_857_302_016, "pythia-12b": 11_846_072_320,
    "Llama-2-7b-hf": 6_738_415_616, "Llama-2-13b-chat-hf": 13_015_864_320, "Llama-2-70b-hf": 68_976_648_192,
    "TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "Meta-Llama-3-8B": 8_030_261_248, "Llama-3.1-8B-Instruct": 8_030_261_248, "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400, "Llama-3.2-3B-Instruct": 3_212_749_824, "Llama-3.3-70B-Instruct": 70_553_706_496,
    "SmolLM2-135M-Instruct": 134_515_008, "SmolLM2-360M": 361_821_120, "SmolLM2-1.7B": 1_711_376_384,
    "Yi-6B": 6_061_035_520, "Yi-1.5-34B-Chat": 34_388_917_248,
    "Mistral-7B-v0.1": 7_241_732_096, "Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "Qwen2.5-0.5B": 494_032_768, "Qwen2.5-1.5B-Instruct": 1_543_714_304, "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B-Instruct": 7_615_616_512, "Qwen2.5-14B": 14_770_033_664,
    "Qwen3-0.6B": 596_049_920, "Qwen3-1.7B": 1_720_574_976, "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "granite-3.1-2b-base": 2_533_531_648, "granite-3.1-8b-instruct": 8_170_848_256,
    "gemma-2b": 2_506_172_416, "gemma-7b-it": 8_537_680_896, "gemma-2-2b-it": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320, "gemma-3-270m": 268_098_176,
    "gemma-3-1b-it": 999_885_952,
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PARAMETERS)
def test_published_shapes_have_published_parameter_counts(name: str) -> None:
    published = find_published(name)
    assert published is not None
    assert published.architecture.config.n_layer == published.config["num_hidden_layers"]
    # Blocks are equal: one of them stands for all.
    layers = published.architecture.skeleton
    embed, block, head = (Layout.of(layers[index]).num_parameters for index in (0, 1, -1))
    assert embed + block * (len(layers) - 2) + head == PARAMETERS[name]


def test_published_names_are_unique_and_of_known_families() -> None:
    names = [name for _, rows in DECODERS for pattern in rows for name in names_of(pattern)]
    assert len(set(names)) == len(names)
    assert {shared["model_type"] for shared, _ in DECODERS} <= families().keys()
    assert len(PYTHIA_SIZES) == 10


def test_missing_model_is_named_with_its_owner(own_home: Path) -> None:
    with pytest.raises(UsageError, match=r"no model 'qwen3-0\.6b'.* type `gptj-ft download Qwen/Qwen3-0\.6B`"):
        find_model("qwen3-0.6b")
