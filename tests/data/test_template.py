import pytest
from support.tiny_tokenizer import encode, make_tokenizer

from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import resolve
from gptj_ft.data.columns import UnknownColumn, alternatives_of, cell_text, choose_columns, is_column_for, read_fields
from gptj_ft.data.encode import Encoded, check_templates, encode_prompt, from_tokens, parts
from gptj_ft.data.template import fields_of, render
from gptj_ft.errors import DataError, RowSkipped, UsageError
from gptj_ft.generation.generator import fill_fields

WORDS = "the patient came from the village with a cough and was given water "


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def recipe(name="summarization", **options):
    return resolve({"recipe": name, **options}, environment={}).recipe


def decode(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


# Placeholders


def test_braces_in_documents_stay():
    values = {"a": "{{ b }} {% if %} <&>", "b": "{{}}"}
    assert render("{x} {{ a }}|{{b}}\n", values) == "{x} {{ b }} {% if %} <&>|{{}}\n"


def test_template_fields_are_undeclared_names():
    template = "{{ b }}{% for m in messages %}{{ m.role }} {{ a }}{% endfor %}{% set c = b %}{{ c }}"
    assert fields_of(template) == ("b", "messages", "a")


@pytest.mark.parametrize("template", ["{{", "{{ }}", "{{ a", "{% for %}", "{% nothing %}", "{{ a | unknown }}"])
def test_invalid_template_is_rejected(template):
    with pytest.raises(UsageError, match="template"):
        fields_of(template)


def test_single_braces_are_rejected_with_advice():
    with pytest.raises(UsageError, match=r"write \{\{ document \}\} for a field, not \{document\}"):
        fields_of("Summarize {document}:")


@pytest.mark.parametrize(
    "template",
    ["{{ a.__class__.__mro__ }}", "{{ a.missing }}", "{{ a + 1 }}", "{{ missing }}", "{{ a | list | tojson(9, 9) }}"],
)
def test_template_cannot_reach_python_internals(template):
    with pytest.raises(UsageError, match="template"):
        render(template, {"a": "text"})


def test_a_template_may_be_a_file(tmp_path):
    (tmp_path / "mine.jinja").write_text("Sum up {{ document }}\n")
    (tmp_path / "config.yaml").write_text("recipe: summarization\nprompt: '@mine.jinja'\n")
    assert resolve({}, tmp_path / "config.yaml", environment={}).recipe.prompt == "Sum up {{ document }}"
    assert recipe(prompt=f"@{tmp_path / 'mine.jinja'}").prompt == "Sum up {{ document }}"
    with pytest.raises(UsageError, match=r"prompt: cannot read the template .*none\.jinja"):
        recipe(prompt=f"@{tmp_path / 'none.jinja'}")


# Columns


def test_best_column_wins_ignoring_case():
    assert choose_columns(["id", "Document", "text", "Section_Text"], recipe()) == {
        "document": "Document",
        "summary": "Section_Text",
    }


def test_ambiguous_columns_are_not_chosen():
    with pytest.raises(UnknownColumn, match=r"'document' may be any of the columns text, Dialogue;") as caught:
        choose_columns(["id", "Dialogue", "text", "summary"], recipe())
    assert caught.value.field == "document"
    assert caught.value.choices == ("text", "Dialogue")
    assert str(caught.value).endswith("choose one with --map document=text")
    chosen = choose_columns(["id", "Dialogue", "text", "summary"], recipe(map="document=Dialogue"))
    assert chosen == {"document": "Dialogue", "summary": "summary"}


def test_no_two_fields_take_the_same_column():
    assert choose_columns(["text", "prompt", "output"], recipe("qa")) == {
        "context": "text",
        "question": "prompt",
        "answer": "output",
    }
    same = Recipe(prompt="{{ a }}", completion="{{ b }}", fields={"a": ("x",), "b": ("x",)})
    with pytest.raises(DataError, match="no column for 'b': looked for x; there is no other column"):
        choose_columns(["x"], same)


def test_highlights_are_joined_targets_are_alternatives():
    recipe = Recipe(prompt="{{ document }}", completion=" {{ summary }}", fields={})
    row = {"document": "d", "Highlights": ["One.", "Two."], "target": ["One.", "Two."]}
    found = read_fields(row, {"document": "document", "summary": "Highlights"}, recipe)
    assert found.references == ["One.\nTwo."]
    found = read_fields(row, {"document": "document", "summary": "target"}, recipe)
    assert found.references == ["One.", "Two."]


def test_unlisted_field_matches_its_own_name():
    custom = Recipe(prompt="{{ question }}", completion="{{ reply }}", fields={})
    assert choose_columns(["Reply", "question"], custom) == {"question": "question", "reply": "Reply"}


def test_missing_column_error_says_what_to_do():
    with pytest.raises(DataError) as caught:
        choose_columns(["body_of_note", "abstract"], recipe())
    message = str(caught.value)
    assert message.startswith("no column for 'document': looked for document, text, article")
    assert "there are: body_of_note, abstract" in message
    assert message.endswith("--map document=COLUMN")


@pytest.mark.parametrize("cells", [{"note": "\n The lift.\n", "summary": " Stuck. \n"},
                                   {"note": " The lift. ", "summary": ["Stuck. ", " Stuck.", "It. "]}])  # fmt: skip
def test_fields_are_stripped_in_training_and_inference(cells):
    chosen = recipe(prompt="{{ document }}\n\nSummary:")
    found = read_fields(cells, {"document": "note", "summary": "summary"}, chosen)
    assert parts(chosen, found.values) == [("The lift.\n\nSummary:", False), (" Stuck.", True)]
    assert found.references == ["Stuck.", "It."][: 1 + isinstance(cells["summary"], list)]
    assert fill_fields(chosen, str(cells["note"]), {}) == {"document": found.values["document"]}


def test_lone_field_keeps_its_white_space():
    bare = Recipe(prompt="{{ prompt }}", completion="{{ completion }}", fields={})
    row = {"prompt": "One ->", "completion": " two\n"}
    assert parts(bare, read_fields(row, {name: name for name in row}, bare).values) == [
        ("One ->", False),
        (" two\n", True),
    ]
    plain = recipe("continuous-pretraining")
    assert read_fields({"text": "\n a \n"}, {"text": "text"}, plain).values == {"text": "\n a \n"}
    assert fill_fields(plain, "Once upon ", {}) == {"text": "Once upon "}


def test_answer_is_found_behind_leading_blanks():
    row = {"context": "\n two and two", "question": "?", "answers": {"text": ["two"], "answer_start": [10]}}
    columns = {"context": "context", "question": "question", "answer": "answers"}
    assert read_fields(row, columns, recipe("qa")).answer_at == 8


@pytest.mark.parametrize("named", ["summary*", "summary1+summary2+summary10", "SUMMARY[0-9]*+summary2", None])
def test_first_answer_column_is_trained(named: str | None):
    row = {"dialogue": "d", "summary10": "ten", "summary2": " ", "topic1": "t", "summary1": "one"}
    if named is None:
        chosen = recipe("dialogsum", fields={"dialogue": ["dialogue"], "summary": ["x", "summary1+Summary2+summary10"]})
    else:
        chosen = recipe("dialogsum", map=f"summary={named}".replace("SUMMARY", "summary"))
    columns = choose_columns(row, chosen)
    assert columns == {"dialogue": "dialogue", "summary": "summary1+summary2+summary10"}
    assert read_fields(row, columns, chosen).references == ["one", "ten"], "blank ones are none"
    assert read_fields(row, columns, chosen).values["summary"] == "one"
    assert read_fields({**row, "summary1": None, "summary2": ["two", "zwei"]}, columns, chosen).references == [
        "two", "zwei", "ten",
    ]  # fmt: skip
    assert read_fields({**row, "summary1": " "}, columns, chosen).values["summary"] == "ten"
    with pytest.raises(RowSkipped, match=r"no value for columns 'summary1\+summary2\+summary10'"):
        read_fields({"dialogue": "d"}, columns, chosen)


def test_dialogsum_test_split_is_read():
    row = {"fname": "test_0", "dialogue": "#Person1#: Hi.", **{f"{a}{n}": f"{a} {n}" for n in (1, 2, 3)
                                                             for a in ("summary", "topic")}}  # fmt: skip
    columns = choose_columns(row, recipe("dialogsum"))
    assert read_fields(row, columns, recipe("dialogsum")).references == ["summary 1", "summary 2", "summary 3"]
    assert is_column_for(columns["summary"], recipe("dialogsum").fields["summary"])
    assert is_column_for(columns["summary"], ["summary*"])
    assert not is_column_for(columns["summary"], ["summary", "summary1+summary2"])


def test_several_columns_must_all_exist():
    with pytest.raises(DataError, match=r"--map document=\w\+b: several columns mean several correct answers"):
        choose_columns(["a", "b", "summary"], recipe(map="document=a+b"))
    with pytest.raises(DataError, match=r"no such column.*there are: a, b"):
        choose_columns(["a", "b"], recipe(map="summary=b+sum*,document=a"))
    assert choose_columns(["a+b", "a", "b"], recipe(map="summary=a+b,document=a"))["summary"] == "a+b"
    assert read_fields({"a+b": "x", "a": "y"}, {"document": "a", "summary": "a+b"}, recipe()).references == ["x"]


def test_inference_needs_only_prompt_columns():
    assert choose_columns(["note"], recipe(), fields=["document"]) == {"document": "note"}


# Cells


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("a ", "a "),
        (["A b.", "C."], "A b. C."),
        ([["a", "b"], ["c"]], "a b c"),
        (3, "3"),
        (2.5, "2.5"),
        (True, "true"),
        ("", ""),
        (None, None),
        (float("nan"), None),
        ([], None),
        ([None], None),
    ],
)
def test_a_cell_becomes_text(cell, text):
    assert cell_text(cell) == text


@pytest.mark.parametrize(
    ("cell", "answers"),
    [
        ("a", ["a"]),
        (["a", "b", "a"], ["a", "b"]),
        ({"text": ["a", "b"], "answer_start": [0, 4]}, ["a", "b"]),
        ({"text": [], "answer_start": []}, []),
        ([], []),
        (None, []),
    ],
)
def test_an_answer_may_have_alternatives(cell, answers):
    assert alternatives_of(cell) == answers


def test_first_answer_is_target_all_are_references():
    columns = {"context": "context", "question": "question", "answer": "answers"}
    found = read_fields({"context": ["A.", "B."], "question": "q", "answers": ["x ", "y"]}, columns, recipe("qa"))
    assert found.values == {"context": "A. B.", "question": "q", "answer": "x"}
    assert found.references == ["x", "y"]


def test_sentences_may_be_lists_of_words():
    columns = {"article": "src", "highlights": "tgt"}
    row = {"src": [["A", "b", "."], ["C", "."]], "tgt": [["D", "."], ["E", "f"]]}
    found = read_fields(row, columns, recipe("cnn-dailymail"))
    assert found.values == {"article": "A b . C .", "highlights": "D .\nE f"}


def test_facts_may_be_lists_of_three():
    columns, facts = {"text": "text", "relations": "triples"}, recipe("relation-extraction")
    found = read_fields({"text": "A", "triples": ["a | b | c", "d | e | f"]}, columns, facts)
    assert found.values["relations"] == "a | b | c\nd | e | f"
    found = read_fields({"text": "A", "triples": [["a", "b", "c"], ["d", "e", 5], "g | h | i"]}, columns, facts)
    assert found.values["relations"] == "a | b | c\nd | e | 5\ng | h | i"
    for broken in (["a", "b"], ["a", None, "c"], ["a", "", "c"], ["a", "b", "c", "d"]):
        with pytest.raises(RowSkipped, match="column 'triples': a list of a fact has three texts"):
            read_fields({"text": "A", "triples": [broken]}, columns, facts)


def test_plain_text_has_no_references():
    plain = recipe("continuous-pretraining")
    assert read_fields({"text": ["A.", "B."]}, {"text": "text"}, plain).references == []
    assert read_fields({"text": ["A.", "B."]}, {"text": "text"}, plain).values == {"text": "A. B."}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no value for column 'note'"),
        ({"note": None}, "no value for column 'note'"),
        ({"note": {"a": 1}}, "column 'note': an object where text is expected"),
        ({"note": "\ud83d"}, "column 'note': unpaired surrogate"),
    ],
)
def test_empty_cell_skips_the_row(row, reason):
    with pytest.raises(RowSkipped, match=reason):
        read_fields(row, {"document": "note"}, recipe())


# Tokens


def test_prompt_and_completion_are_tokenized_separately(tokenizer):
    encoded = encode(recipe(), tokenizer, {"document": "The cough.", "summary": "Cough {x}."})
    [ids] = encoded.documents
    assert ids[-1] == tokenizer.eos_token_id
    prompt, answer = ids[: encoded.prompt_length], ids[encoded.prompt_length : -1]
    assert decode(tokenizer, prompt) == "Summarize the following text.\n\nThe cough.\n\nSummary:"
    assert decode(tokenizer, answer) == " Cough {x}."
    assert prompt == tokenizer("Summarize the following text.\n\nThe cough.\n\nSummary:")["input_ids"]
    assert encoded.tokens_cut == 0


LONG_DOCUMENTS = [
    WORDS * 20,
    "x" * 500,  # no blank to cut at
    "😀 water 水を飲む " * 40,  # several tokens a character
    "\n\n".join([WORDS.strip()] * 20),
    "{{ document }} {% summary }{ " * 30,
]


@pytest.mark.parametrize("document", LONG_DOCUMENTS)
@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("max_length", [60, 61, 62, 63, 64, 100])
def test_cut_shortens_only_the_document(tokenizer, document, side, max_length):
    cut = recipe(cut=side, max_length=max_length)
    encoded = encode(cut, tokenizer, {"document": document, "summary": "He had a cough."})
    [ids] = encoded.documents
    values = {"document": document, "summary": "He had a cough."}
    whole = len(encode(recipe(max_length=2048), tokenizer, values).documents[0])
    assert encoded.tokens_cut == whole - len(ids) > 0
    assert len(ids) <= max_length
    assert ids[-1] == tokenizer.eos_token_id
    assert decode(tokenizer, ids[encoded.prompt_length : -1]) == " He had a cough."
    prompt = decode(tokenizer, ids[: encoded.prompt_length])
    assert prompt.startswith("Summarize the following text.\n\n")
    assert prompt.endswith("\n\nSummary:")
    part = prompt.removeprefix("Summarize the following text.\n\n").removesuffix("\n\nSummary:")
    assert part
    assert document.startswith(part) if side == "end" else document.endswith(part)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("document", [*LONG_DOCUMENTS, "the\n" * 60, "a\n\n\nb" * 40, "\n \n\n\nx" * 40])
def test_cut_keeps_longest_part_that_fits(tokenizer, document, monkeypatch):
    monkeypatch.setattr("gptj_ft.data.truncation.WORD_TOKENS", 0)
    template = "Read.\n{{ a }}\n\nSummary:"
    ends = sorted({end for _, end in tokenizer(document, return_offsets_mapping=True)["offset_mapping"]})
    lengths = {end: len(tokenizer(template.replace("{{ a }}", document[:end]))["input_ids"]) for end in ends}
    for max_length in range(lengths[ends[0]] + 12, lengths[ends[-1]], 7):
        cut = Recipe(
            prompt=template, completion="{{ b }}", fields={}, shorten="a", max_length=max_length, on_long="shorten"
        )
        encoded = encode(cut, tokenizer, {"a": document, "b": "x"})
        prompt = decode(tokenizer, encoded.documents[0][: encoded.prompt_length])
        part = prompt.removeprefix("Read.\n").removesuffix("\n\nSummary:")
        # Every place between two tokens was tried here: none further on fits beside the answer and EOS.
        assert len(part) == max(end for end in ends if lengths[end] <= max_length - 2)


@pytest.mark.parametrize("side", ["end", "start"])
def test_cut_falls_between_words_if_possible(tokenizer, side):
    words = ["patiently", "coughing", "waters", "villagers", "visitors", "seconds"]
    assert all(len(tokenizer(f" {word}")["input_ids"]) > 1 for word in words)
    for max_length in range(60, 90):
        cut = recipe(cut=side, max_length=max_length)
        encoded = encode(cut, tokenizer, {"document": " ".join(words * 20), "summary": "x"})
        prompt = decode(tokenizer, encoded.documents[0][: encoded.prompt_length])
        part = prompt.removeprefix("Summarize the following text.").removesuffix("Summary:")
        assert set(part.split()) <= set(words)


def test_field_used_twice_is_cut_alike(tokenizer):
    template = {"prompt": "[{{ a }}]+[{{ a }}]", "completion": "{{ b }}", "fields": {}}
    twice = Recipe(**template, shorten="a", max_length=60, on_long="shorten")
    encoded = encode(twice, tokenizer, {"a": WORDS * 9, "b": "x"})
    first, second = decode(tokenizer, encoded.documents[0][: encoded.prompt_length]).split("+")
    assert first == second
    assert len(encoded.documents[0]) <= 60


def test_training_and_inference_truncate_alike(tokenizer):
    values = {"document": WORDS * 20, "summary": "cough"}
    encoded = encode(recipe(max_length=70), tokenizer, values)
    room = 70 - (len(encoded.documents[0]) - encoded.prompt_length)
    prompt = encode_prompt(recipe(max_length=70), tokenizer, {"document": WORDS * 20}, room)
    assert prompt.cut
    assert prompt.ids == encoded.documents[0][: encoded.prompt_length]
    assert not encode_prompt(recipe(), tokenizer, {"document": WORDS}, room=1000).cut


def test_unshortenable_prompt_is_data_error(tokenizer):
    with pytest.raises(DataError, match=r"takes \d+ tokens, there is room for 20 \(on_long: skip\)"):
        encode_prompt(recipe(on_long="skip"), tokenizer, {"document": WORDS}, room=20)
    with pytest.raises(DataError, match="the field 'document' is empty"):
        encode_prompt(recipe(), tokenizer, {"document": " "}, room=20)
    with pytest.raises(UsageError, match="no room"):
        encode_prompt(recipe(), tokenizer, {"document": WORDS}, room=0)


def test_plain_text_to_continue_keeps_its_end(tokenizer):
    plain = recipe("continuous-pretraining")
    prompt = encode_prompt(plain, tokenizer, {"text": WORDS}, room=5)
    assert prompt.cut
    assert prompt.ids == tokenizer(WORDS)["input_ids"][-5:]


@pytest.mark.parametrize(
    ("values", "options", "reason"),
    [
        ({"document": " \n", "summary": "x"}, {}, "the field 'document' is empty"),
        ({"document": "x", "summary": " "}, {}, "the completion is empty"),
        ({"document": WORDS * 9, "summary": "x"}, {"on_long": "skip", "max_length": 60}, "longer than max_length"),
        ({"document": "x", "summary": WORDS * 9}, {"max_length": 60}, "no room for any part of 'document'"),
        ({"document": WORDS * 9, "summary": "x"}, {"max_length": 15}, "no room for any part of 'document'"),
        ({"document": WORDS * 9, "summary": "x"}, {"shorten": "", "max_length": 60}, "no field to `shorten` is named"),
    ],
)
def test_unusable_row_gives_its_reason(tokenizer, values, options, reason):
    with pytest.raises(RowSkipped, match=reason):
        encode(recipe(**options), tokenizer, values)


def test_policy_error_stops(tokenizer):
    with pytest.raises(DataError, match=r"\d+ tokens with EOS, max_length is 60") as caught:
        encode(recipe(on_long="error", max_length=60), tokenizer, {"document": WORDS * 9, "summary": "x"})
    assert not isinstance(caught.value, RowSkipped)


@pytest.mark.parametrize("max_length", [2, 3, 7, 64, 65])
def test_split_trains_every_token_once(tokenizer, max_length):
    ids = [*tokenizer(WORDS * 3)["input_ids"], tokenizer.eos_token_id]
    encoded = encode(recipe("continuous-pretraining", max_length=max_length), tokenizer, {"text": WORDS * 3})
    assert encoded.prompt_length == 0
    # A window's first token is context; the targets of all windows are the text without its first token.
    assert [token for window in encoded.documents for token in window[1:]] == ids[1:]
    assert all(
        window[0] == before[-1] for before, window in zip(encoded.documents, encoded.documents[1:], strict=False)
    )
    assert all(2 <= len(window) <= max_length for window in encoded.documents)


def test_plain_text_may_be_cut(tokenizer):
    plain = recipe("continuous-pretraining", on_long="shorten", shorten="text", max_length=20)
    encoded = encode(plain, tokenizer, {"text": WORDS * 3})
    [ids] = encoded.documents
    assert encoded.tokens_cut > 0
    assert ids[-1] == tokenizer.eos_token_id
    assert (WORDS * 3).startswith(decode(tokenizer, ids[:-1]))


def test_a_tokenizer_without_eos_is_refused():
    with pytest.raises(UsageError, match="has no EOS token"):
        encode(recipe(), make_tokenizer(eos=None), {"document": "x", "summary": "y"})


def test_contradictory_templates_are_rejected():
    with pytest.raises(UsageError, match=r"the prompt has no field 'documents' \(did you mean 'document'\?\)"):
        check_templates(recipe(shorten="documents"))
    with pytest.raises(UsageError, match="the prompt has no field 'summary'"):
        check_templates(recipe(shorten="summary"))
    with pytest.raises(UsageError, match="'split' is for plain text"):
        check_templates(recipe(on_long="split"))
    with pytest.raises(UsageError, match="has no field, so there is nothing"):
        check_templates(recipe(completion=" yes"))
    with pytest.raises(UsageError, match="the assistant's message"):
        check_templates(recipe("chat", completion="{{ answer }}"))


@pytest.mark.parametrize("max_length", [60, 61, 75, 90])
def test_middle_cut_keeps_start_and_end(tokenizer, max_length):
    document = f"First of all. {WORDS * 20}And at last."
    cut = recipe(cut="middle", max_length=max_length)
    [ids] = encode(cut, tokenizer, {"document": document, "summary": "x"}).documents
    prompt = decode(tokenizer, ids)
    part = prompt.removeprefix("Summarize the following text.\n\n").partition("\n\nSummary:")[0]
    begin, _, end = part.partition(" ... ")
    assert len(ids) <= max_length
    assert document.startswith(begin)
    assert document.endswith(end)
    assert begin.startswith("First")
    assert end.endswith("last.")


@pytest.mark.parametrize("before", [0, 1, 20, 39, 40])
def test_answer_cut_keeps_the_answers_surroundings(tokenizer, before):
    passage = WORDS * before + "the answer is forty two, he said. " + WORDS * (40 - before)
    row = {"context": passage, "question": "What?", "answers": {"text": ["forty two"], "answer_start": [0]}}
    columns = {"context": "context", "question": "question", "answer": "answers"}
    qa = recipe("qa", max_length=80)
    found = read_fields(row, columns, qa)
    assert found.answer_at == passage.index("forty two"), "what the data says is wrong, so it is looked for"
    encoded = encode(qa, tokenizer, found.values, found.answer_at)
    prompt = decode(tokenizer, encoded.documents[0][: encoded.prompt_length])
    kept = prompt.partition("Passage: ")[2].partition("\n\nQuestion")[0]
    assert "forty two" in kept
    assert kept in passage
    # Where nothing is known of the answer, as when one is asked for, the end is cut.
    assert passage.startswith(encode_to_text(tokenizer, qa, row, columns))


def encode_to_text(tokenizer, recipe, row, columns):
    values = {name: row[column] for name, column in columns.items() if name != "answer"}
    prompt = encode_prompt(recipe, tokenizer, values, 70)
    return decode(tokenizer, prompt.ids).partition("Passage: ")[2].partition("\n\nQuestion")[0]


def test_stated_answer_position_is_used():
    row = {"context": "two and two", "question": "?", "answers": {"text": ["two"], "answer_start": [8]}}
    columns = {"context": "context", "question": "question", "answer": "answers"}
    assert read_fields(row, columns, recipe("qa")).answer_at == 8
    assert read_fields({**row, "answers": "two"}, columns, recipe("qa")).answer_at == 0
    assert read_fields({**row, "answers": "three"}, columns, recipe("qa")).answer_at is None


# Rows that come as tokens


def test_given_tokens_and_targets_are_kept():
    plain = recipe("continuous-pretraining", max_length=8)
    assert from_tokens(plain, [5, 6, 7], None).documents == ([5, 6, 7],)
    encoded = from_tokens(plain, [5, 6, 7, 8, 9, 1, 1], [2, 3, 4, 5])
    assert (encoded.documents, encoded.prompt_length, encoded.masked_spans) == (([5, 6, 7, 8, 9],), 2, (3, 4))
    assert from_tokens(plain, [5, 6, 7, 8, 9, 1, 1], [[2, 3], [4, 5]]) == encoded, "pairs, or their numbers in one list"
    assert from_tokens(plain, [5, 6, 7], [0, 3]).prompt_length == 0


@pytest.mark.parametrize("on_long", ["split", "skip", "error"])
def test_one_extra_token_fits_the_window(on_long):
    plain = recipe("continuous-pretraining", max_length=4, on_long=on_long)
    assert from_tokens(plain, [5, 6, 7, 8, 9], None) == Encoded(([5, 6, 7, 8, 9],), 0)
    assert from_tokens(plain, [5, 6, 7, 8, 9], [[3, 5]]) == Encoded(([5, 6, 7, 8, 9],), 3)


def test_long_tokens_split_only_without_masks():
    plain = recipe("continuous-pretraining", max_length=4)
    assert from_tokens(plain, list(range(9)), None).documents == ([0, 1, 2, 3, 4], [4, 5, 6, 7, 8])
    assert from_tokens(plain, list(range(10)), None).documents == ([0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9])
    with pytest.raises(RowSkipped, match="cannot be shortened"):
        from_tokens(plain, list(range(9)), [3, 9])
    with pytest.raises(RowSkipped, match="no token that is trained on"):
        from_tokens(plain, list(range(9)), [0, 1])


@pytest.mark.parametrize(
    ("on_long", "error", "message"),
    [("error", DataError, "9 tokens with EOS, max_length is 4"), ("skip", RowSkipped, "longer than max_length$")],
)
def test_long_tokens_follow_the_length_policy(on_long, error, message):
    with pytest.raises(error, match=message):
        from_tokens(recipe("continuous-pretraining", max_length=4, on_long=on_long), list(range(9)), [3, 9])


@pytest.mark.parametrize(
    "trained",
    [
        [1],
        [2, 1],
        [1, 10],
        [3, 5, 4, 6],
        [[1, 3], [2, 4]],
        [[1, 3], 5, 6],
        [[1]],
        [["1", 2]],
        "2-5",
        [None, 2],
        [True, 2],
    ],
)
def test_malformed_target_spans_raise_error(trained):
    with pytest.raises(DataError, match="must be a list of"):
        from_tokens(recipe("continuous-pretraining"), list(range(9)), trained)
