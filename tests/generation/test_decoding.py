"""Generate with `transformers`' search on streamed weights; compare with `transformers` models."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from conftest import SHAPES, random_gptj

from gptj_ft.config.options import Generation
from gptj_ft.config.resolve import build
from gptj_ft.errors import NotFinite, UsageError
from gptj_ft.generation.decoding import StopStrings, _processors, cut_at, generate_tokens
from gptj_ft.generation.hf_model import ForwardPasses, RaggedCache, StreamedModel
from gptj_ft.models import linear as products_of
from gptj_ft.models.batch import HeadRows
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.functional import FunctionalLayer
from gptj_ft.models.linear import Conv1D, Linear, project_by_all
from gptj_ft.models.lora import LoRALinear, Rank
from gptj_ft.planning.inference_plan import batches_by_length
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import open_for_inference
from gptj_ft.streaming.stores.device import DeviceStore

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 3], [7], [11, 2, 40, 8, 13, 21, 34], [6, 6]]

# Search settings, as recipes and `transformers` name them. Penalties and bans also act on padding in `transformers`, so
# each row is compared with a batch of its own.
SEARCHES = {
    "at least": {"min_new_tokens": 9},
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated pair": {"no_repeat_ngram_size": 2},
    "beams": {"num_beams": 3},
    "beams, early": {"num_beams": 4, "early_stopping": True, "min_new_tokens": 5},
    "beams, never early": {"num_beams": 2, "early_stopping": "never", "length_penalty": 2.0},
    "beams, short": {"num_beams": 3, "length_penalty": -1.0},
    "beams, no repeats": {"num_beams": 3, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
}
SAMPLINGS = {
    "temperature": {"temperature": 0.7},
    "top-p": {"temperature": 1.5, "top_p": 0.8},
    "top-k": {"temperature": 2.0, "top_k": 5},
    "min-p": {"temperature": 1.5, "min_p": 0.2},
    "beams": {"temperature": 1.0, "num_beams": 3},
}


one_shape = pytest.mark.parametrize("oracle", ["wide"], indirect=True)
two_shapes = pytest.mark.parametrize("oracle", ["wide", "gpt2"], indirect=True)


class Words:
    """A minimal tokenizer: tokens are numbers."""

    added_tokens_decoder: ClassVar[dict[int, object]] = {}

    def __init__(self, eos_token_id: int = 0) -> None:
        self.eos_token_id = eos_token_id

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return " ".join(str(token) for token in tokens)


@pytest.fixture(params=["device", "host", "disk"])
def streamed(request: pytest.FixtureRequest, model_folder: Path):
    with open_for_inference(model_folder, CPU, torch.float32, request.param) as (architecture, stack):
        yield StreamedModel(architecture, stack)


@pytest.fixture
def resident(model_folder: Path):
    with open_for_inference(model_folder, CPU, torch.float32, "device") as (architecture, stack):
        yield StreamedModel(architecture, stack)


def alone(oracle, prompt: list[int], **settings: object) -> list[int]:
    """Generate after one prompt with `transformers`, in a batch of its own."""
    output = oracle.generate(torch.tensor([prompt]), pad_token_id=0, eos_token_id=0, **settings)[0, len(prompt) :]
    tokens = output.tolist()
    return tokens[: tokens.index(0)] if 0 in tokens else tokens


@pytest.mark.sampled(2)
@two_shapes
def test_greedy_decoding_matches_transformers(oracle, streamed) -> None:
    ours = generate_tokens(streamed, Words(), PROMPTS, Generation(max_new_tokens=10))
    assert ours == [alone(oracle, prompt, max_new_tokens=10, do_sample=False) for prompt in PROMPTS]


@pytest.mark.sampled(3)
@one_shape
@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_matches_transformers(oracle, resident, name: str) -> None:
    options = SEARCHES[name]
    ours = generate_tokens(resident, Words(), PROMPTS, Generation(max_new_tokens=12, **options))
    assert ours == [alone(oracle, prompt, max_new_tokens=12, do_sample=False, **options) for prompt in PROMPTS]


@one_shape
@pytest.mark.parametrize("num_beams", [1, 3])
def test_answers_do_not_depend_on_padding(resident, num_beams: int) -> None:
    settings = Generation(max_new_tokens=30, min_new_tokens=30, num_beams=num_beams, no_repeat_ngram_size=1)
    apart = [generate_tokens(resident, Words(89), [prompt], settings)[0] for prompt in PROMPTS[:2]]
    assert generate_tokens(resident, Words(89), PROMPTS[:2], settings) == apart
    assert 0 in apart[1], "padding, of id 0, is a token like any other"


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.7}, *({"no_repeat_ngram_size": n} for n in (1, 2, 3))])
def test_processors_read_no_padding(options: dict[str, float]) -> None:
    settings, generator = Generation(**options), torch.Generator().manual_seed(0)
    for width in range(1, 9):
        prompts = [torch.randint(3, (length,), generator=generator) for length in (width, 1, (width + 1) // 2)]
        scores = torch.randn(6, 3, generator=generator)  # of two beams each
        padded = torch.stack([F.pad(prompt, (width - len(prompt), 0)) for prompt in prompts for _ in range(2)])
        (together,) = _processors(settings, [width - len(prompt) for prompt in prompts])
        (alone,) = _processors(settings, [0])
        rows = [alone(prompts[row // 2][None], scores[row][None])[0] for row in range(6)]
        assert torch.equal(together(padded, scores), torch.stack(rows))


@pytest.mark.sampled(6)
@one_shape
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampling_matches_transformers(oracle, resident, name: str) -> None:
    options = SAMPLINGS[name]
    for prompt in PROMPTS:
        torch.manual_seed(3)
        (ours,) = generate_tokens(resident, Words(), [prompt], Generation(max_new_tokens=12, **options))
        torch.manual_seed(3)
        # The default of top_k in transformers is 50.
        assert ours == alone(oracle, prompt, max_new_tokens=12, do_sample=True, **{"top_k": 0, **options})


@one_shape
def test_ragged_sampling_matches_a_padded_batch(oracle, resident) -> None:
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    torch.manual_seed(3)
    theirs = oracle.generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=True, top_k=0, num_return_sequences=2, pad_token_id=0,
    )[:, width:].tolist()  # fmt: skip
    torch.manual_seed(3)
    ours = generate_tokens(resident, Words(), PROMPTS, Generation(max_new_tokens=12, temperature=1.0), num_return=2)
    assert ours == [row[: row.index(0)] if 0 in row else row for row in theirs]


@pytest.mark.sampled(6)
@two_shapes
@pytest.mark.parametrize("num_return", [1, 3])
def test_beam_search_matches_transformers(oracle, streamed, num_return: int) -> None:
    settings = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "num_return_sequences": num_return}
    for prompt in PROMPTS[1:3]:
        ids = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": 0, **settings}
        assert streamed.generate(ids, **given).tolist() == oracle.generate(ids, **given).tolist()


@pytest.mark.sampled(2)
@two_shapes
def test_prompt_lookup_changes_no_token(oracle, streamed) -> None:
    for prompt in ([5, 9, 3, 5, 9, 3, 5], [6, 6, 6, 6]):
        settings = Generation(max_new_tokens=12, prompt_lookup_num_tokens=3)
        assert generate_tokens(streamed, Words(), [prompt], settings) == [
            alone(oracle, prompt, max_new_tokens=12, do_sample=False)
        ]


@pytest.mark.sampled(2)
def test_logits_match_transformers_for_every_placement(oracle, model_folder) -> None:
    ids = torch.tensor([[3, 1, 4, 1, 5], [0, 0, 9, 2, 6]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    following = torch.tensor([[8], [2]])
    found = []
    for place in ("device", "host", "disk"):
        with open_for_inference(model_folder, CPU, torch.float32, place) as (architecture, stack):
            model = StreamedModel(architecture, stack)
            first = model(ids, attention_mask=mask)
            second = model(following, past_key_values=first.past_key_values)
            found.append(torch.cat((first.logits, second.logits), dim=1))
    assert all(torch.equal(found[0], each) for each in found)
    whole = torch.cat((ids, following), dim=1)
    with torch.no_grad():
        for row, start in enumerate((0, 2)):
            theirs = oracle(whole[row : row + 1, start:]).logits[0]
            torch.testing.assert_close(found[0][row, start:], theirs, rtol=1e-5, atol=1e-5)


class RecordingPasses(ForwardPasses):
    """Forward passes that record the number of their tokens and of the positions with logits."""

    def __init__(self, offloaded: OffloadedModel) -> None:
        super().__init__(offloaded)
        self.num_tokens: list[int] = []
        self.num_logits: list[int] = []

    def read(self, batches, positions, queries=()):
        self.num_tokens.append(sum(len(batch.tokens_T) for batch in batches))
        self.num_logits.append(sum(map(len, positions)))
        return super().read(batches, positions, queries)


@one_shape
def test_finished_rows_are_not_computed(oracle, resident) -> None:
    written = [alone(oracle, prompt, max_new_tokens=30, do_sample=False) for prompt in PROMPTS]
    longest = max(written, key=len)
    end = longest[5]
    resident.passes = RecordingPasses(resident.offloaded)
    ours = generate_tokens(resident, Words(end), PROMPTS, Generation(max_new_tokens=30))
    assert ours[written.index(longest)] == longest[: longest.index(end)]
    steps = [min(len(tokens) + 1, 30) for tokens in ours]
    assert len(set(steps)) > 1
    assert resident.passes.num_logits == [sum(step >= n for step in steps) for n in range(1, max(steps) + 1)]


@one_shape
def test_beams_share_their_prompts_prefill(resident) -> None:
    resident.passes = RecordingPasses(resident.offloaded)
    generate_tokens(resident, Words(), PROMPTS, Generation(max_new_tokens=2, min_new_tokens=2, num_beams=3))
    assert resident.passes.num_tokens == [sum(map(len, PROMPTS)), 3 * len(PROMPTS)]


@two_shapes
def test_shared_beams_keep_their_own_logits(resident) -> None:
    shared, generator = RaggedCache(), torch.Generator().manual_seed(0)
    texts = [list(prompt) for prompt in PROMPTS[:2] for _ in range(4)]
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    resident.forward(ids, mask, shared, 1)
    for _ in range(50):
        beams = torch.randint(4, (2, 4), generator=generator) + torch.tensor([[0], [4]])
        tokens = torch.randint(1, 50, (8, 1), generator=generator)
        shared.reorder_cache(beams.flatten())
        logits = resident.forward(tokens, None, shared, 1).logits[:, 0]
        texts = [[*texts[beam], int(token)] for beam, token in zip(beams.flatten(), tokens, strict=True)]
    assert shared.kv.num_slots < 50 * 4 * 0.9, "dropped beams still take slots"
    for text, ours in zip(texts, logits, strict=True):
        apart = resident.forward(torch.tensor([text]), logits_to_keep=1).logits[0, 0]
        torch.testing.assert_close(ours, apart, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(3)
@one_shape
def test_sampling_repeats_with_its_seed(streamed) -> None:
    def sample(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return generate_tokens(streamed, Words(), PROMPTS, Generation(max_new_tokens=8, temperature=5.0, top_p=0.99))

    assert sample(1) == sample(1) != sample(2)


@one_shape
def test_top_k_1_is_greedy(streamed) -> None:
    greedy = generate_tokens(streamed, Words(), PROMPTS, Generation(max_new_tokens=12))
    assert (
        generate_tokens(streamed, Words(), PROMPTS, Generation(max_new_tokens=12, temperature=9.0, top_k=1)) == greedy
    )


@one_shape
def test_prefill_in_parts_gives_equal_answers(streamed) -> None:
    settings = Generation(max_new_tokens=6)
    together = generate_tokens(streamed, Words(), PROMPTS, settings)
    streamed.budget_tokens = 1
    assert generate_tokens(streamed, Words(), PROMPTS, settings) == together


def test_batches_group_rows_by_length() -> None:
    settings = Generation(max_new_tokens=6)
    assert list(batches_by_length([3, 9, 4], settings, most_tokens=30)) == [[1, 2], [0]]
    assert list(batches_by_length([3, 9, 4], settings, num_return=2, most_tokens=30)) == [[1], [2], [0]]
    assert list(batches_by_length([3, 9, 4], settings, most_tokens=1)) == [[1], [2], [0]]


@one_shape
def test_generation_works_after_an_evaluation(streamed) -> None:
    from gptj_ft.models.batch import pack
    from gptj_ft.streaming.scoring import evaluate_losses

    def write() -> list[list[int]]:
        return generate_tokens(streamed, Words(), PROMPTS, Generation(max_new_tokens=6))

    before = write()
    evaluate_losses(streamed.offloaded, [pack(PROMPTS, [0] * len(PROMPTS))])
    assert write() == before


@one_shape
def test_weights_with_shared_inputs_are_one_product(resident, monkeypatch: pytest.MonkeyPatch) -> None:
    products, fetched = [], []
    project, own = products_of.project, DeviceStore.own
    monkeypatch.setattr(
        products_of,
        "project",
        lambda x, w, *rest, **more: products.append(tuple(w.shape)) or project(x, w, *rest, **more),
    )
    monkeypatch.setattr(DeviceStore, "own", lambda store, *rest: fetched.append(rest[1]) or own(store, *rest))
    cache = resident(torch.tensor([[1, 2, 3]])).past_key_values
    fetched.clear(), products.clear()
    for _ in range(3):
        resident(torch.tensor([[4]]), past_key_values=cache)
    assert products == 3 * [*2 * [(64 * 7, 64), (64, 64), (64, 64 * 4)], (90, 64)]
    assert fetched == []


@one_shape
def test_end_of_pass_prefetches_the_next(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_for_inference(model_folder, CPU, torch.float32, "disk") as (architecture, stack):
        model, reads = StreamedModel(architecture, stack), []
        read = stack.transfers.read
        monkeypatch.setattr(stack.transfers, "read", lambda span, out: reads.append(span.layer) or read(span, out))
        model(torch.tensor([[1, 2]]))
        head = len(stack.layers) - 1
        assert reads == [*range(1, head + 1), 1], "the first block of the next pass is read during this pass"
        model(torch.tensor([[1, 2]]))
        assert reads == [*range(1, head + 1), *range(1, head + 1), 1], "the prefetched block is not read again"


def test_nan_logits_raise_not_finite(tmp_path: Path) -> None:
    model = random_gptj(**SHAPES["narrow"])
    model.transformer.h[1].mlp.fc_in.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    with (
        open_for_inference(tmp_path / "model", CPU, torch.float32) as (architecture, stack),
        pytest.raises(NotFinite, match="weights are damaged"),
    ):
        generate_tokens(StreamedModel(architecture, stack), Words(), PROMPTS, Generation(max_new_tokens=4))


def test_contradictory_settings_are_rejected() -> None:
    with pytest.raises(UsageError, match="min_new_tokens"):
        build({"generation": {"min_new_tokens": 9, "max_new_tokens": 3}})
    with pytest.raises(UsageError, match="num_beams"):
        build({"generation": {"prompt_lookup_num_tokens": 3, "num_beams": 2}})


def test_text_is_cut_at_stop_strings() -> None:
    assert cut_at("\n yes\nQuestion: more", ("\n",)) == "\n yes"
    assert cut_at("\n yes", ("\n",), in_blanks=True) == ""
    assert cut_at("yes", ("\n",)) == "yes"
    assert cut_at("to be or not to be", ("be or not to be", "or")) == "to be "


class Pieces(Words):
    """A tokenizer with these texts of tokens, in turn."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self._texts = texts

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(self._texts[token % len(self._texts)] for token in tokens)


STOPS = [(["\n", "a", " "], ("\n",)), (["EN", "D", "a "], ("END",)), (["\ufffd", "b\n", "\n"], ("b\n\n", "\n\n"))]


@pytest.mark.parametrize(
    ("prompt", "answer", "is_complete"),
    [
        ([1], [0], False), ([1], [0, 1], False), ([1], [2, 0], False), ([1], [0, 1, 2], False), ([1], [1, 0], True),
        ([0], [1], False), ([0], [0, 1, 0], True), ([1, 0], [0], False),
    ],
)  # fmt: skip
def test_leading_line_break_does_not_stop(prompt: list[int], answer: list[int], is_complete: bool) -> None:
    stopping = StopStrings(Pieces(STOPS[0][0]), Generation(stop=STOPS[0][1]), len(prompt), [9])
    rows = torch.tensor([[*prompt, *answer], [*prompt, *answer[:-1], 9]])  # the other has ended
    assert stopping(rows, None).tolist() == [is_complete, False]


@pytest.mark.parametrize(
    ("prompt", "answer", "is_complete"),
    [([0], [1], False), ([2, 0], [1, 2], False), ([1], [2, 0, 1], True), ([1], [0, 1], True), ([1], [0, 2, 1], False)],
)
def test_stop_string_lies_within_the_answer(prompt: list[int], answer: list[int], is_complete: bool) -> None:
    stopping = StopStrings(Pieces(STOPS[1][0]), Generation(stop=STOPS[1][1]), len(prompt), [9])
    assert stopping(torch.tensor([prompt + answer]), None).tolist() == [is_complete]


@one_shape
@pytest.mark.parametrize("more", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}])
def test_stopped_answer_equals_the_cut_longer_one(resident, more: dict[str, int]) -> None:
    prompts = PROMPTS[: 1 if "prompt_lookup_num_tokens" in more else 2]
    for texts, stop in STOPS:
        tokenizer, found = Pieces(texts), list[list[list[int]]]()
        for each in (stop, ()):
            torch.manual_seed(3)
            settings = Generation(max_new_tokens=12, min_new_tokens=12, temperature=5.0, stop=each, **more)
            found.append(generate_tokens(resident, tokenizer, prompts, settings))
        for stopped, whole in zip(*found, strict=True):
            before, text, rest = (tokenizer.decode(each, True) for each in (stopped[:-1], stopped, whole))
            assert cut_at(before, stop) == before
            assert len(stopped) == 12 or cut_at(text, stop) != text
            if "num_beams" not in more:  # a stopped beam makes room for others
                assert cut_at(text, stop) == cut_at(rest, stop)
        assert any(len(stopped) < 12 for stopped in found[0])


@pytest.mark.parametrize("count", [1, 2, 32, 33, 128, 129])
def test_decoding_products_match_torch(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    flat, x = torch.randn(3, 48, 48, generator=generator), torch.randn(count, 48, generator=generator)
    linears = [Linear(48, 48, bias=False) for _ in range(3)]
    for linear, weight in zip(linears, flat, strict=True):
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    transposed, biased = Conv1D(48, 48), Linear(48, 40)
    with torch.no_grad():
        transposed.weight.copy_(flat[1].t()), transposed.bias.fill_(0.5)
        expected = [F.linear(x, weight) for weight in flat]
        with_bias = F.linear(x, biased.weight, biased.bias)
    with torch.inference_mode():
        together = list(project_by_all(x, linears, HeadRows("decoding")))
        torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(transposed(x, HeadRows("decoding")), expected[1] + 0.5, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(biased(x, HeadRows("decoding")), with_bias, rtol=1e-5, atol=1e-5)
        adapted = LoRALinear(linears[2], Rank(1, 2.0), Dropout(0.0, "adapter"))
        adapted.lora_A, adapted.lora_B = (torch.nn.Parameter(torch.ones(shape)) for shape in ((1, 48), (48, 1)))
        with_adapter = expected[2] + 2 * x.sum(1, keepdim=True)
        apart = list(project_by_all(x, [*linears[:2], adapted], HeadRows("decoding")))
        torch.testing.assert_close(apart[2], with_adapter, rtol=1e-5, atol=1e-4)


def test_functional_layer_keeps_no_tensors() -> None:
    layer = torch.nn.Linear(2, 2, device="meta")
    runner, tensors = FunctionalLayer(layer), {"weight": torch.eye(2), "bias": torch.ones(2)}
    assert runner.run(tensors, torch.zeros(1, 2)).tolist() == [[1.0, 1.0]]
    with pytest.raises(RuntimeError):
        runner.run(tensors, torch.zeros(1, 3))
    assert all(parameter.device.type == "meta" for parameter in layer.parameters())
