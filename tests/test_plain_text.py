from gptj_ft.plain_text import escape_controls, one_line


def test_controls_are_written_out_and_other_text_stays() -> None:
    text = "naïve 日本\n\ttab \x1b[2J \x9b2J \x07 \r \u202e \x7f"
    assert escape_controls(text) == "naïve 日本\n\ttab \\x1b[2J \\x9b2J \\x07 \\r \\u202e \\x7f"


def test_a_line_stays_one_line() -> None:
    assert one_line("a\nb\r\nc\td\u2028e") == "a\\nb\\r\\nc\\td\\u2028e"
