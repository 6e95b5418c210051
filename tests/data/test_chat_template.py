"""Test chat templates of models: tokens, masks, dates, ends, and templates that cannot be trained."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import (
    LOSES_SYSTEM,
    NAMES,
    SMOLLM2,
    chat_tokenizer,
    conversations,
    template_named,
    trl_template,
)
from transformers import PreTrainedTokenizerFast

from gptj_ft.checkpoints.model_defaults import with_model_defaults
from gptj_ft.config.options import Generation, Recipe
from gptj_ft.config.resolve import resolve
from gptj_ft.data.chat import Conversation, read_conversation
from gptj_ft.data.chat_template import ChatTemplate, trained_borders
from gptj_ft.data.encode import encode_prompt
from gptj_ft.data.prepare import TokenizeJob, tokenize_rows
from gptj_ft.data.tokenization import load_tokenizer
from gptj_ft.errors import DataError, RowSkipped, UsageError
from gptj_ft.generation.chat import check_is_chat
from gptj_ft.generation.decoding import end_ids

HELLO = [{"role": "user", "content": "Who came?"}, {"role": "assistant", "content": "A patient."}]
MORE = [*HELLO, {"role": "user", "content": "With what?"}, {"role": "assistant", "content": "A cough."}]
SUPPLIED = {"qwen2_5": ("\n",), "qwen3-no-thinking": ("<think>", "</think>", "\n", "\n\n")}
SPLITTING = ("qwen3", "qwen3-no-thinking", "mistral-v3", "mistral-v3-tekken")


def calling(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def template_of(name: str, tokenizer: PreTrainedTokenizerFast) -> ChatTemplate:
    return ChatTemplate(tokenizer, template_named(name), NAMES[name][3], date.today().isoformat())


def check_template(name: str, tokenizer: PreTrainedTokenizerFast, count: int) -> int:
    """Compare tokens and masks with `transformers` and TRL; return the number of conversations that were split."""
    template, (bos, end, has_system, options), num_split = template_of(name, tokenizer), NAMES[name], 0
    training = name if name.startswith(("llama3", "qwen", "gemma")) else ""
    training = "llama3" if training.startswith("llama3") else training.removesuffix("-no-thinking")
    for messages in conversations(count, has_system):
        rows = template.rows_of(read_conversation(messages, for_template=True))
        num_split += len(rows) > 1
        assert sum(len(row.trained) for row in rows) == len(messages) // 2
        for row, written in zip(rows, template.encode([row.text for row in rows]), strict=True):
            part = list(row.messages)
            expected = tokenizer.apply_chat_template(part, **options)
            assert written.ids == expected["input_ids"]
            assert not bos or written.ids.count(tokenizer.convert_tokens_to_ids(bos)) == 1
            borders = trained_borders(written, row.trained)
            spans = [written.ids[first:stop] for first, stop in zip(borders[::2], borders[1::2], strict=True)]
            answers = [message["content"] for message in part if message["role"] == "assistant"]
            for answer, span in zip(answers[-len(spans) :], spans, strict=True):
                text = tokenizer.decode(span)
                assert answer.strip() in text
                assert text.rstrip().endswith(end)
            asked = {"add_generation_prompt": True, "tokenize": False, **options}
            assert tokenizer.decode(written.ids[: borders[-2]]) == tokenizer.apply_chat_template(part[:-1], **asked)
            if training and len(rows) == 1 and name not in ("llama3_1", "llama3_2"):
                marked = tokenizer.apply_chat_template(
                    part,
                    chat_template=trl_template(f"{training}_training"),
                    return_assistant_tokens_mask=True,
                    **options,
                )
                assert marked["input_ids"] == written.ids
                mask = [span for pair in zip(borders[::2], borders[1::2], strict=True) for span in range(*pair)]
                theirs = [at for at, is_on in enumerate(marked["assistant_masks"]) if is_on]
                # TRL trains tokens, too, that the prompt for generation supplies.
                supplied = [at for at in theirs if at not in mask]
                assert [at for at in theirs if at not in supplied] == mask
                assert {tokenizer.decode(written.ids[at]) for at in supplied} <= set(SUPPLIED.get(name, ()))
    return num_split


def prepared(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, rows: list[Any], source: str, **options: Any) -> Any:
    """Tokenize rows of messages by a template."""
    file = tmp_path / "rows.jsonl"
    lines = (json.dumps(row if isinstance(row, dict) else {"messages": row}) for row in rows)
    file.write_text("\n".join(lines), encoding="utf-8")
    return tokenize_rows(TokenizeJob.of(recipe(chat_template=source, **options), tokenizer, file, 1000))


def recipe(**options: Any) -> Recipe:
    return resolve({"recipe": "chat", **options}, environment={}).recipe


def texts(tokenizer: PreTrainedTokenizerFast, done: Any) -> list[list[str]]:
    """Return the trained spans of every row."""
    rows = []
    for row in done.rows.select(range(len(done.rows))):
        borders = [row["prompt_length"], *row["untrained"], len(row["input_ids"])]
        spans = zip(borders[::2], borders[1::2], strict=True)
        rows.append([tokenizer.decode(row["input_ids"][first:end]) for first, end in spans])
    return rows


@pytest.mark.parametrize("name", NAMES)
def test_template_tokens_and_masks_match_oracles(name) -> None:
    num_split = check_template(name, chat_tokenizer(name), 4)
    assert bool(num_split) == (name in SPLITTING)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_200_conversations_match_oracles(name) -> None:
    num_split = check_template(name, chat_tokenizer(name), 200)
    assert bool(num_split) == (name in SPLITTING)


def test_changed_history_makes_a_row_per_answer(tmp_path) -> None:
    tokenizer = chat_tokenizer("qwen3")
    done = prepared(tmp_path, tokenizer, [MORE], template_named("qwen3"))
    empty = "<think>\n\n</think>\n\n"
    assert texts(tokenizer, done) == [[f"{empty}A patient.<|im_end|>\n"], [f"{empty}A cough.<|im_end|>\n"]]
    assert list(done.rows["references"]) == [["A patient."], ["A cough."]]
    assert list(done.rows["continues"]) == [False, False]
    assert len(set(done.rows["group"])) == 1
    assert any("each answer is a row" in warning for warning in done.report.warnings)
    no_thinking = prepared(
        tmp_path, tokenizer, [HELLO], template_named("qwen3"), template_options={"enable_thinking": False}
    )
    assert texts(tokenizer, no_thinking) == [["A patient.<|im_end|>\n"]]


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_answer_with_weight_0_is_read_but_not_trained(tmp_path, name) -> None:
    tokenizer = chat_tokenizer(name)
    first, source = next(at for at, each in enumerate(MORE) if each["role"] == "assistant"), template_named(name)
    silent = [{**each, "weight": 0} if at == first else each for at, each in enumerate(MORE)]
    whole, done = (prepared(tmp_path, tokenizer, [rows], source) for rows in (MORE, silent))
    assert texts(tokenizer, done) == [texts(tokenizer, whole)[-1][-1:]]
    assert list(done.rows["input_ids"])[-1] == list(whole.rows["input_ids"])[-1]


def test_thoughts_of_the_last_answer_are_trained(tmp_path) -> None:
    tokenizer = chat_tokenizer("qwen3")
    thought = [HELLO[0], {**HELLO[1], "reasoning_content": "Hm."}]
    done = prepared(tmp_path, tokenizer, [thought], template_named("qwen3"))
    assert texts(tokenizer, done) == [["<think>\nHm.\n</think>\n\nA patient.<|im_end|>\n"]]
    with pytest.raises(DataError, match="look at template_options"):
        prepared(tmp_path, tokenizer, [thought], template_named("qwen3"), template_options={"enable_thinking": False})


@pytest.mark.parametrize(
    ("row", "source", "reason"),
    [
        ([{"role": "system", "content": "Be brief."}, *HELLO], "gemma", "rejects it: System role not supported"),
        ([*HELLO[:1], {"role": "assistant", "content": "x <|im_end|>"}], "smollm2", r"contains <\|im_end\|>"),
        ([{"role": "system", "content": "x"}, *HELLO], LOSES_SYSTEM, "starts an answer otherwise"),
        (HELLO, SMOLLM2.replace("in messages %", "in messages[:1] %"), "leaves out an answer"),
        ({"messages": HELLO, "tools": [{"name": "f"}]}, "smollm2", "the chat template takes none"),
        ([HELLO[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "smollm2", "calls a tool"),
        ([HELLO[0], {**HELLO[1], "content": "x \ud83d"}], "smollm2", "unpaired surrogate"),
        ([HELLO[0], {**HELLO[1], "thinking": "x \ud83d"}], "smollm2", "unpaired surrogate"),
        ([HELLO[0], calling({"q": ["x \ud83d"]})], "qwen2_5", "unpaired surrogate"),
        ({"messages": HELLO, "tools": [{"name": "\ud83d"}]}, "qwen2_5", "unpaired surrogate"),
        ([HELLO[0], calling({"q": ["x<|im_end|>"]})], "qwen2_5", r"contains <\|im_end\|>"),
        ([HELLO[0], calling({"x<|im_end|>": 1})], "qwen2_5", r"contains <\|im_end\|>"),
        ([{**HELLO[0], "name": "x<|im_end|>"}, HELLO[1]], "smollm2", r"contains <\|im_end\|>"),
        ({"messages": HELLO, "tools": [{"name": "x<|im_end|>"}]}, "qwen2_5", r"tools contain <\|im_end\|>"),
    ],
)  # fmt: skip
def test_unusable_conversation_is_skipped_with_reason(tmp_path, row, source, reason) -> None:
    with pytest.raises(DataError, match=rf"{reason}.*first at .*rows.jsonl:1"):
        prepared(tmp_path, chat_tokenizer("smollm2"), [row], template_named(source) if "{" not in source else source)


def test_tools_and_their_calls_reach_the_template(tmp_path) -> None:
    tokenizer = chat_tokenizer("qwen2_5")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [HELLO[0], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "Sun."}, HELLO[1]]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    done = prepared(
        tmp_path, tokenizer, [{"messages": messages, "tools": json.dumps(tools)}], template_named("qwen2_5")
    )
    assert list(done.rows["input_ids"][0]) == tokenizer.apply_chat_template(messages, tools=tools)["input_ids"]
    (answers,) = texts(tokenizer, done)
    assert answers[0].startswith("<tool_call>\n")
    assert answers[1] == "A patient.<|im_end|>\n"


def test_long_conversation_loses_oldest_messages(tmp_path) -> None:
    tokenizer = chat_tokenizer("smollm2")
    whole = prepared(tmp_path, tokenizer, [MORE], SMOLLM2)
    short = prepared(tmp_path, tokenizer, [MORE], SMOLLM2, max_length=whole.report.longest - 1)
    assert texts(tokenizer, short) == [["A cough.<|im_end|>\n"]]
    assert short.report.tokens_cut == whole.report.longest - short.report.longest
    with pytest.raises(DataError, match="no room for the last question"):
        prepared(tmp_path, tokenizer, [MORE], SMOLLM2, max_length=9)


def test_prompt_of_generation_equals_training_prompt(tmp_path) -> None:
    tokenizer = chat_tokenizer("smollm2")
    done = prepared(tmp_path, tokenizer, [MORE], SMOLLM2)
    asked = encode_prompt(recipe(chat_template=SMOLLM2), tokenizer, {"messages": Conversation(MORE[:-1])}, 500)
    assert asked.ids == list(done.rows["input_ids"][0])[: done.rows["untrained"][0][-1]]
    fewer = encode_prompt(
        recipe(chat_template=SMOLLM2), tokenizer, {"messages": Conversation(MORE[:-1])}, len(asked.ids) - 1
    )
    assert fewer.cut
    injected = Conversation([{"role": "user", "content": "<|im_end|>"}])
    with pytest.raises(RowSkipped, match="special token"):
        encode_prompt(recipe(chat_template=SMOLLM2), tokenizer, {"messages": injected}, 500)


def test_summaries_can_use_the_chat_template(tmp_path) -> None:
    tokenizer, document = chat_tokenizer("smollm2"), "The patient came with a cough. " * 9
    options = {"recipe": "summarization"}
    row = {"document": document, "summary": "A cough."}
    whole = prepared(tmp_path, tokenizer, [row], SMOLLM2, **options)
    messages = [{"role": "user", "content": f"Summarize the following text.\n\n{document.strip()}\n\nSummary:"}]
    messages.append({"role": "assistant", "content": "A cough."})
    assert list(whole.rows["input_ids"][0]) == tokenizer.apply_chat_template(messages)["input_ids"]
    assert list(whole.rows["references"]) == [["A cough."]]
    short = prepared(tmp_path, tokenizer, [row], SMOLLM2, max_length=whole.report.longest - 20, **options)
    assert whole.report.longest - 40 < short.report.longest <= whole.report.longest - 20
    text = tokenizer.decode(short.rows["input_ids"][0])
    assert text.endswith("\n\nSummary:<|im_end|>\n<|im_start|>assistant\nA cough.<|im_end|>\n")


def model_folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, ends: Any = None) -> Path:
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    if ends is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def test_chat_recipe_takes_the_models_template(tmp_path) -> None:
    tokenizer = chat_tokenizer("llama3_2")
    number = tokenizer.convert_tokens_to_ids
    folder = model_folder(tmp_path, tokenizer, [number("</s>"), number("<|eot_id|>")])
    completed = with_model_defaults(recipe(), folder)
    assert completed.chat_template == template_named("llama3_2")
    assert completed.generation.end_tokens == ("<|eot_id|>", "</s>")
    assert end_ids(tokenizer, completed.generation) == [number("<|eot_id|>"), number("</s>")]
    assert completed.generation.stop == ()
    stopped = Generation(stop=("<|eot_id|>", "\n"))
    assert end_ids(tokenizer, stopped) == [tokenizer.eos_token_id, number("<|eot_id|>")], "decoding leaves it out"
    assert completed.template_date == date.today().isoformat()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": number("</s>")}))
    plain = with_model_defaults(recipe(chat_template="none"), folder)
    assert plain.generation.end_tokens == ("</s>", tokenizer.eos_token), "one end that is not the tokenizer's"
    assert with_model_defaults(completed, folder) == completed
    check_is_chat(completed)
    frozen = completed.model_copy(update={"template_date": "2024-02-29"})
    template = ChatTemplate.of(frozen, tokenizer)
    assert template
    # The program's own tokenizer splits special tokens in texts of users, but not those of the template.
    (row,) = template.rows_of(Conversation(HELLO))
    own = ChatTemplate.of(frozen, load_tokenizer(folder))
    assert own
    assert own.encode([row.text])[0].ids == template.encode([row.text])[0].ids
    assert "Today Date: 29 Feb 2024" in template.prompt(Conversation(HELLO[:1]))
    for options in ({"prompt": "{{ messages }}:"}, {"chat_template": "none"}, {"recipe": "summarization"}):
        assert with_model_defaults(recipe(**options), folder).chat_template == "none"
    (folder / "gptj_ft.json").write_text(json.dumps({"base_model": "", "template": {}, "data": {}, "metrics": {}}))
    assert with_model_defaults(recipe(), folder).chat_template == "none"


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (None, {"chat_template": "model"}, "has no chat template; add --set chat_template=none"),
        (SMOLLM2, {"chat_template": "chatml"}, "expected auto, model, none or @FILE"),
        (SMOLLM2, {"template_options": {"thinking": True}}, "no variable 'thinking'"),
        (SMOLLM2.replace("<|im_end|>", "###"), {}, "ends answers without a special token"),
        (SMOLLM2.replace("in messages %", "in messages[:1] %"), {}, "leaves out an answer"),
    ],
)
def test_unusable_template_fails_before_reading_rows(tmp_path, source, options, message) -> None:
    tokenizer = chat_tokenizer("smollm2")
    tokenizer.chat_template = source
    with pytest.raises(UsageError, match=message):
        with_model_defaults(recipe(**options), model_folder(tmp_path, tokenizer))
