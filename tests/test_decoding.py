"""Generation through `transformers`' own search, on streamed weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptj_ft.decoding import StreamedModel, cut_at, generate_tokens, write_answers
from gptj_ft.model import reading_stack
from gptj_ft.recipe import Generation

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 3], [7], [11, 2, 40, 8, 13, 21, 34], [6, 6]]


class Words:
    """A tokenizer of the least kind: a token is a number, written out."""

    eos_token_id = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return " ".join(str(token) for token in tokens)


@pytest.fixture(params=["device", "disk"])
def streamed(request: pytest.FixtureRequest, model_folder: Path):
    with reading_stack(model_folder, CPU, torch.float32, request.param) as (architecture, stack):
        yield StreamedModel(architecture, stack)


def alone(oracle, prompt: list[int], **settings: object) -> list[int]:
    """What `transformers` writes after one prompt, in a batch of its own."""
    output = oracle.generate(torch.tensor([prompt]), pad_token_id=0, eos_token_id=0, **settings)[0, len(prompt) :]
    tokens = output.tolist()
    return tokens[: tokens.index(0)] if 0 in tokens else tokens


def test_greedy_decoding_of_a_ragged_batch_equals_transformers_on_each_prompt(oracle, streamed) -> None:
    ours = generate_tokens(streamed, Words(), PROMPTS, Generation(max_new_tokens=20))
    assert ours == [alone(oracle, prompt, max_new_tokens=20, do_sample=False) for prompt in PROMPTS]


def test_beam_search_follows_the_beams_as_transformers_does(oracle, streamed) -> None:
    from gptj_ft.decoding import RaggedCache

    settings = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        ours = streamed.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=RaggedCache(),
            pad_token_id=0,
            eos_token_id=0,
            **settings,
        )
        theirs = oracle.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=0, **settings)
        assert ours.tolist() == theirs.tolist()


def test_sampling_repeats_with_the_seed_and_only_with_it(streamed) -> None:
    def sample(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return generate_tokens(streamed, Words(), PROMPTS, Generation(max_new_tokens=20, temperature=5.0, top_p=0.99))

    assert sample(1) == sample(1) != sample(2)


def test_top_k_one_is_greedy_at_any_temperature(streamed) -> None:
    greedy = generate_tokens(streamed, Words(), PROMPTS, Generation(max_new_tokens=12))
    assert (
        generate_tokens(streamed, Words(), PROMPTS, Generation(max_new_tokens=12, temperature=9.0, top_k=1)) == greedy
    )


def test_answers_come_back_under_their_own_row_whatever_the_batches(streamed, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Generation(max_new_tokens=6)
    together = dict(write_answers(streamed, Words(), PROMPTS, settings))
    monkeypatch.setattr("gptj_ft.decoding.BATCH_TOKENS", 1)
    one_by_one = dict(write_answers(streamed, Words(), PROMPTS, settings))
    assert together == one_by_one
    assert sorted(together) == [0, 1, 2, 3]


def test_text_ends_before_a_stop_string_but_not_before_it_says_something() -> None:
    assert cut_at("\n yes\nQuestion: more", ("\n",)) == "\n yes"
    assert cut_at("yes", ("\n",)) == "yes"
