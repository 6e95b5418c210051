"""Test reading, masking and shortening conversations."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.tiny_tokenizer import encode, make_tokenizer
from transformers import PreTrainedTokenizerFast

from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import resolve
from gptj_ft.data.chat import read_conversation
from gptj_ft.data.columns import FieldTexts, choose_columns, read_fields
from gptj_ft.data.dataset import document_hash
from gptj_ft.data.encode import encode_prompt
from gptj_ft.errors import RowSkipped, UsageError
from gptj_ft.generation.generator import fill_fields

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who came?"},
    {"role": "assistant", "content": "A patient."},
    {"role": "user", "content": "With what?"},
    {"role": "assistant", "content": "A cough."},
]
SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def chat(**options: Any) -> Recipe:
    return resolve({"recipe": "chat", **options}, environment={}).recipe


def read(row: dict[str, Any]) -> FieldTexts:
    return read_fields(row, choose_columns(row, chat()), chat())


def trained(tokenizer: PreTrainedTokenizerFast, recipe: Recipe, values: dict[str, Any]) -> tuple[str, list[str]]:
    """Return a row's text, and its trained spans."""
    encoded = encode(recipe, tokenizer, values)
    (ids,) = encoded.documents
    borders = [encoded.prompt_length, *encoded.masked_spans, len(ids)]
    spans = [ids[start:end] for start, end in zip(borders[::2], borders[1::2], strict=True)]
    return tokenizer.decode(ids), [tokenizer.decode(span) for span in spans]


def test_every_assistant_answer_is_a_target(tokenizer) -> None:
    text, answers = trained(tokenizer, chat(), read({"messages": MESSAGES}).values)
    assert text == (
        "System: Be brief.\n\nUser: Who came?\n\nAssistant: A patient.\n\n"
        "User: With what?\n\nAssistant: A cough.<|endoftext|>"
    )
    assert answers == [" A patient.", " A cough.<|endoftext|>"]


def test_answer_with_weight_0_is_read_but_not_trained(tokenizer) -> None:
    weighted = [{**message, "weight": number} for number, message in enumerate(MESSAGES) if number < 2]
    weighted += [{**MESSAGES[2], "weight": 0}, MESSAGES[3], {**MESSAGES[4], "weight": 1}]
    with pytest.raises(RowSkipped, match=r"has the weight 0\.5, neither 0 nor 1"):
        read({"messages": [*weighted[:4], {**MESSAGES[4], "weight": 0.5}]})
    text, answers = trained(tokenizer, chat(), read({"messages": weighted}).values)
    assert text == trained(tokenizer, chat(), read({"messages": MESSAGES}).values)[0]
    assert answers == [" A cough.<|endoftext|>"]
    last = [*MESSAGES[:4], {**MESSAGES[4], "weight": 0}]
    assert trained(tokenizer, chat(), read({"messages": last}).values)[1] == [" A patient.<|endoftext|>"]
    with pytest.raises(RowSkipped, match="each message of the assistant has the weight 0"):
        read({"messages": [{**message, "weight": 0} for message in MESSAGES]})


def test_inference_prompt_equals_training_prompt(tokenizer) -> None:
    values = read({"messages": MESSAGES}).values
    encoded = encode(chat(), tokenizer, values)
    asked = encode_prompt(chat(), tokenizer, {"messages": values["messages"][:-1]}, 500)
    assert asked.ids == encoded.documents[0][: encoded.masked_spans[-1]]
    alone = fill_fields(chat(), "Who came?", {})
    assert tokenizer.decode(encode_prompt(chat(), tokenizer, alone, 500).ids) == "User: Who came?\n\nAssistant:"
    assert not asked.cut
    shorter = encode_prompt(chat(), tokenizer, {"messages": values["messages"][:-1]}, len(asked.ids) - 1)
    assert shorter.cut
    assert len(shorter.ids) < len(asked.ids)


@pytest.mark.parametrize(
    "cell",
    [
        MESSAGES,
        json.dumps(MESSAGES),
        {"messages": MESSAGES},
        [{"from": SHAREGPT[m["role"]], "value": m["content"]} for m in MESSAGES],
        [{"role": m["role"].upper(), "content": [{"type": "text", "text": f" {m['content']}\n"}]} for m in MESSAGES],
    ],
)  # fmt: skip
def test_usual_message_formats_are_equivalent(cell) -> None:
    assert list(read_conversation(cell)) == MESSAGES


def test_instruction_input_output_is_a_conversation() -> None:
    row = {"instruction": "Sum up.", "input": "A long note.", "output": "A note."}
    found = read(row)
    assert list(found.values["messages"]) == [
        {"role": "user", "content": "Sum up.\n\nA long note."},
        {"role": "assistant", "content": "A note."},
    ]
    assert found.references == ["A note."]
    assert read({**row, "input": ""}).values["messages"][0]["content"] == "Sum up."


def test_list_of_answers_trains_the_first() -> None:
    found = read({"question": "capital?", "answer": ["Paris ", "City of Paris", ""]})
    assert found.values["messages"][-1]["content"] == "Paris"
    assert found.references == ["Paris", "City of Paris"]
    for answers, reason in ((["", None], "a message is empty"), (["Paris", "\ud800"], "unpaired surrogate")):
        with pytest.raises(RowSkipped, match=reason):
            read({"question": "capital?", "answer": answers})


def test_conversations_with_one_opening_are_one_document() -> None:
    def document(*messages: dict[str, Any]) -> int:
        return document_hash(chat(), read({"messages": list(messages)}).values)

    *beginning, answer = MESSAGES[:3]
    same = [[answer], MESSAGES[2:], [{**answer, "content": "No one."}], [answer, answer]]
    assert len({document(*beginning, *others) for others in same}) == 1
    assert document(*MESSAGES) != document(*MESSAGES[1:])
    # A greeting, or instructions that many conversations share, are no document.
    for common in ([answer], [MESSAGES[0], answer]):
        first, other = ([*common, {"role": "user", "content": text}, answer] for text in ("Who?", "When?"))
        assert document(*first) != document(*other)


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("hello", "a text, not a list"),
        (3, "not a list"),
        (["hello"], "not an object with role and content"),
        ([{"role": "tool", "content": "x"}], "the role 'tool'"),
        ([{"role": "user", "content": " "}], "a message is empty"),
        ([{"role": "user", "content": [{"type": "image"}]}], "parts other than text"),
        ([{"role": "user", "content": "x"}], "no message of the assistant"),
        ([{"role": "assistant", "content": "x"}], "nothing comes before"),
    ],
)
def test_malformed_conversation_is_skipped_with_reason(cell, reason) -> None:
    with pytest.raises(RowSkipped, match=reason):
        read({"messages": cell})


def test_messages_after_last_answer_are_dropped() -> None:
    found = read({"messages": [*MESSAGES, {"role": "user", "content": "Thanks."}]})
    assert list(found.values["messages"]) == MESSAGES
    assert found.warnings == ("messages after the assistant's last one, which are left out",)


def test_long_conversation_loses_oldest_messages(tokenizer) -> None:
    values = read({"messages": MESSAGES}).values
    whole = len(encode(chat(), tokenizer, values).documents[0])
    text, answers = trained(tokenizer, chat(max_length=whole - 1), values)
    assert text == "System: Be brief.\n\nUser: With what?\n\nAssistant: A cough.<|endoftext|>"
    assert answers == [" A cough.<|endoftext|>"]
    short = encode(chat(max_length=whole - 1), tokenizer, values)
    assert short.tokens_cut == whole - len(short.documents[0])
    with pytest.raises(RowSkipped, match="no room for the last question"):
        encode(chat(max_length=5), tokenizer, values)


def test_template_rewriting_history_is_rejected(tokenizer) -> None:
    count = chat(prompt="{{ messages | length }} messages\n\nAssistant:")
    with pytest.raises(UsageError, match="must only append text for further messages"):
        encode(count, tokenizer, read({"messages": MESSAGES}).values)
