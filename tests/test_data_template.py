import pytest
from test_data_tokenizer import make_tokenizer

from gptj_ft.data.fields import alternatives_of, choose_columns, read_fields, text_of
from gptj_ft.data.placeholders import fields_of, render
from gptj_ft.data.template import RowSkipped, check_templates, encode, encode_prompt
from gptj_ft.errors import DataError, UsageError
from gptj_ft.recipe import Recipe, resolve

WORDS = "the patient came from the village with a cough and was given water "


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def recipe(name="summarization", **options):
    return resolve({"recipe": name, **options}, environment={}).recipe


def decode(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


# Placeholders


def test_braces_in_a_document_stay_as_they_are():
    assert render("{{x}} {a}|{b}", {"a": "{b} {0} }{", "b": "{{}}"}) == "{x} {b} {0} }{|{{}}"


@pytest.mark.parametrize("template", ["{", "}", "{}", "{0}", "{a.b}", "{a[0]}", "{a:>9}", "{a!r}"])
def test_a_template_holds_names_only(template):
    with pytest.raises(UsageError, match="template"):
        fields_of(template)


# Columns


def test_columns_are_chosen_best_first_whatever_their_case():
    assert choose_columns(["id", "Dialogue", "text", "Section_Text"], recipe()) == {
        "document": "text",
        "summary": "Section_Text",
    }


def test_no_two_fields_take_the_same_column():
    assert choose_columns(["text", "prompt", "output"], recipe("qa")) == {
        "context": "text",
        "question": "prompt",
        "answer": "output",
    }
    same = Recipe(prompt="{a}", completion="{b}", fields={"a": ("x",), "b": ("x",)})
    with pytest.raises(DataError, match="no column for 'b': looked for x; there are: none"):
        choose_columns(["x"], same)


def test_a_list_of_highlights_is_one_text_and_a_list_of_targets_several_answers():
    recipe = Recipe(prompt="{document}", completion=" {summary}", fields={})
    row = {"document": "d", "Highlights": ["One.", "Two."], "target": ["One.", "Two."]}
    found = read_fields(row, {"document": "document", "summary": "Highlights"}, recipe)
    assert found.references == ["One.\nTwo."]
    found = read_fields(row, {"document": "document", "summary": "target"}, recipe)
    assert found.references == ["One.", "Two."]


def test_a_field_that_the_recipe_does_not_list_goes_by_its_own_name():
    custom = Recipe(prompt="{question}", completion="{reply}", fields={})
    assert choose_columns(["Reply", "question"], custom) == {"question": "question", "reply": "Reply"}


def test_a_missing_column_says_what_was_sought_what_there_is_and_the_way_out():
    with pytest.raises(DataError) as caught:
        choose_columns(["body_of_note", "abstract"], recipe())
    message = str(caught.value)
    assert message.startswith("no column for 'document': looked for document, text, article")
    assert "there are: body_of_note, abstract" in message
    assert message.endswith("--map document=COLUMN")


def test_only_the_prompts_columns_are_needed_when_asked_for():
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
    assert text_of(cell) == text


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


def test_the_first_answer_is_trained_on_and_all_are_references():
    columns = {"context": "context", "question": "question", "answer": "answers"}
    found = read_fields({"context": ["A.", "B."], "question": "q", "answers": ["x ", "y"]}, columns, recipe("qa"))
    assert found.values == {"context": "A. B.", "question": "q", "answer": "x "}
    assert found.references == ["x", "y"]


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
        ({"note": "\ud83d"}, "column 'note': half a surrogate pair"),
    ],
)
def test_a_cell_without_text_is_a_reason_to_skip(row, reason):
    with pytest.raises(RowSkipped, match=reason):
        read_fields(row, {"document": "note"}, recipe())


# Tokens


def test_a_row_is_prompt_completion_and_eos_tokenised_apart(tokenizer):
    encoded = encode(recipe(), tokenizer, {"document": "The cough.", "summary": "Cough {x}."})
    [ids] = encoded.documents
    assert ids[-1] == tokenizer.eos_token_id
    prompt, answer = ids[: encoded.prompt_length], ids[encoded.prompt_length : -1]
    assert decode(tokenizer, prompt) == "Summarize the following text.\n\nThe cough.\n\nSummary:"
    assert decode(tokenizer, answer) == " Cough {x}."
    assert prompt == tokenizer("Summarize the following text.\n\nThe cough.\n\nSummary:")["input_ids"]
    assert not encoded.cut


LONG_DOCUMENTS = [
    WORDS * 20,
    "x" * 500,  # no blank to cut at
    "😀 water 水を飲む " * 40,  # several tokens a character
    "\n\n".join([WORDS.strip()] * 20),
    "{document} {summary} }{ " * 30,
]


@pytest.mark.parametrize("document", LONG_DOCUMENTS)
@pytest.mark.parametrize("too_long", ["cut-end", "cut-start"])
@pytest.mark.parametrize("max_length", [60, 61, 62, 63, 64, 100])
def test_a_cut_touches_the_document_only_and_eos_stays(tokenizer, document, too_long, max_length):
    cut = recipe(too_long=too_long, max_length=max_length)
    encoded = encode(cut, tokenizer, {"document": document, "summary": "He had a cough."})
    [ids] = encoded.documents
    assert encoded.cut
    assert len(ids) <= max_length
    assert ids[-1] == tokenizer.eos_token_id
    assert decode(tokenizer, ids[encoded.prompt_length : -1]) == " He had a cough."
    prompt = decode(tokenizer, ids[: encoded.prompt_length])
    assert prompt.startswith("Summarize the following text.\n\n")
    assert prompt.endswith("\n\nSummary:")
    part = prompt.removeprefix("Summarize the following text.\n\n").removesuffix("\n\nSummary:")
    assert part
    assert document.startswith(part) if too_long == "cut-end" else document.endswith(part)


@pytest.mark.parametrize("document", [*LONG_DOCUMENTS, "the\n" * 60, "a\n\n\nb" * 40, "\n \n\n\nx" * 40])
def test_a_cut_keeps_the_longest_part_that_fits(tokenizer, document, monkeypatch):
    monkeypatch.setattr("gptj_ft.data.template.WORD_TOKENS", 0)
    template = "Read.\n{a}\n\nSummary:"
    ends = sorted({end for _, end in tokenizer(document, return_offsets_mapping=True)["offset_mapping"]})
    lengths = {end: len(tokenizer(template.replace("{a}", document[:end]))["input_ids"]) for end in ends}
    for max_length in range(lengths[ends[0]] + 12, lengths[ends[-1]], 7):
        cut = Recipe(
            prompt=template, completion="{b}", fields={}, shorten="a", max_length=max_length, too_long="cut-end"
        )
        encoded = encode(cut, tokenizer, {"a": document, "b": "x"})
        prompt = decode(tokenizer, encoded.documents[0][: encoded.prompt_length])
        part = prompt.removeprefix("Read.\n").removesuffix("\n\nSummary:")
        # Every place between two tokens was tried here: none further on fits beside the answer and EOS.
        assert len(part) == max(end for end in ends if lengths[end] <= max_length - 2)


@pytest.mark.parametrize("too_long", ["cut-end", "cut-start"])
def test_a_cut_falls_between_words_where_one_is_near(tokenizer, too_long):
    words = ["patiently", "coughing", "waters", "villagers", "visitors", "seconds"]
    assert all(len(tokenizer(f" {word}")["input_ids"]) > 1 for word in words)
    for max_length in range(60, 90):
        cut = recipe(too_long=too_long, max_length=max_length)
        encoded = encode(cut, tokenizer, {"document": " ".join(words * 20), "summary": "x"})
        prompt = decode(tokenizer, encoded.documents[0][: encoded.prompt_length])
        part = prompt.removeprefix("Summarize the following text.").removesuffix("Summary:")
        assert set(part.split()) <= set(words)


def test_a_field_used_twice_is_cut_alike_in_both_places(tokenizer):
    twice = Recipe(prompt="[{a}]+[{a}]", completion="{b}", fields={}, shorten="a", max_length=60, too_long="cut-end")
    encoded = encode(twice, tokenizer, {"a": WORDS * 9, "b": "x"})
    first, second = decode(tokenizer, encoded.documents[0][: encoded.prompt_length]).split("+")
    assert first == second
    assert len(encoded.documents[0]) <= 60


def test_training_and_inference_cut_alike(tokenizer):
    values = {"document": WORDS * 20, "summary": "cough"}
    encoded = encode(recipe(max_length=70), tokenizer, values)
    room = 70 - (len(encoded.documents[0]) - encoded.prompt_length)
    prompt = encode_prompt(recipe(max_length=70), tokenizer, {"document": WORDS * 20}, room)
    assert prompt.cut
    assert prompt.ids == encoded.documents[0][: encoded.prompt_length]
    assert not encode_prompt(recipe(), tokenizer, {"document": WORDS}, room=1000).cut


def test_a_prompt_that_cannot_be_shortened_is_a_data_error(tokenizer):
    with pytest.raises(DataError, match=r"takes \d+ tokens, there is room for 20 \(too_long: skip\)"):
        encode_prompt(recipe(too_long="skip"), tokenizer, {"document": WORDS}, room=20)
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
        ({"document": WORDS * 9, "summary": "x"}, {"too_long": "skip", "max_length": 60}, "longer than max_length"),
        ({"document": "x", "summary": WORDS * 9}, {"max_length": 60}, "no room for any part of 'document'"),
        ({"document": WORDS * 9, "summary": "x"}, {"max_length": 15}, "no room for any part of 'document'"),
        ({"document": WORDS * 9, "summary": "x"}, {"shorten": "", "max_length": 60}, "no field to `shorten` is named"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(tokenizer, values, options, reason):
    with pytest.raises(RowSkipped, match=reason):
        encode(recipe(**options), tokenizer, values)


def test_policy_error_stops(tokenizer):
    with pytest.raises(DataError, match=r"\d+ tokens with EOS, max_length is 60") as caught:
        encode(recipe(too_long="error", max_length=60), tokenizer, {"document": WORDS * 9, "summary": "x"})
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


def test_plain_text_may_be_cut_instead_of_split(tokenizer):
    plain = recipe("continuous-pretraining", too_long="cut-end", shorten="text", max_length=20)
    encoded = encode(plain, tokenizer, {"text": WORDS * 3})
    [ids] = encoded.documents
    assert encoded.cut
    assert ids[-1] == tokenizer.eos_token_id
    assert (WORDS * 3).startswith(decode(tokenizer, ids[:-1]))


def test_a_tokenizer_without_eos_is_refused():
    with pytest.raises(UsageError, match="has no EOS token"):
        encode(recipe(), make_tokenizer(eos=None), {"document": "x", "summary": "y"})


def test_templates_and_policies_that_contradict_each_other_are_refused():
    with pytest.raises(UsageError, match=r"'documents' is no field of the prompt \(did you mean 'document'\?\)"):
        check_templates(recipe(shorten="documents"))
    with pytest.raises(UsageError, match="'summary' is no field of the prompt"):
        check_templates(recipe(shorten="summary"))
    with pytest.raises(UsageError, match="'split' is for plain text"):
        check_templates(recipe(too_long="split"))
