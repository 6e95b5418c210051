"""Test that untrusted templates can only compute a text from their values, in bounded time and memory."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptj_ft.data import sandbox
from gptj_ft.data.sandbox import bounded_environment, compile_template
from gptj_ft.data.template import fields_of, parse_template, render
from gptj_ft.errors import UsageError

MESSAGES = ({"role": "user", "content": " Hello "}, {"role": "assistant", "content": "Hi"})
VALUES = {"document": "A note about it. " * 50, "a": "text", "messages": MESSAGES}
DOUBLED = "{%% set ns = namespace(a=%s, b=%s) %%}{%% for i in range(100) %%}%s{%% endfor %%}"
GROWING = {
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "writing loops": "{% for i in range(100000) %}{% for j in range(100000) %}{{ i }}{% endfor %}{% endfor %}",
    "~": DOUBLED % ("'aa'", "1", "{% set ns.a = ns.a ~ ns.a %}"),
    "+": DOUBLED % ("'aa'", "1", "{% set ns.a = ns.a + ns.a %}"),
    "+ of lists": DOUBLED % ("[1]", "1", "{% set ns.a = ns.a + ns.a %}"),
    "blocks": DOUBLED % ("'aa'", "1", "{% set x %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = x %}"),
    "nested lists": (DOUBLED % ("[1]", "1", "{% set ns.a = [ns.a, ns.a] %}")) + "{{ ns.a }}",
    "nested JSON": (DOUBLED % ("[1]", "1", "{% set ns.a = [ns.a, ns.a] %}")) + "{{ ns.a | tojson }}",
    "compared lists": (DOUBLED % ("[1]", "[1]", "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}"))
    + "{{ ns.a == ns.b }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(30) }}",
    "replace": "{{ 'aaaa'" + ".replace('a', document | replace('o', 'a'))" * 40 + " }}",
    "| replace": "{{ 'aaaa'" + " | replace('a', document)" * 40 + " }}",
    "join": "{{ document | list | join(document) | list | join(document) | list | join(document) }}",
    ".join": "{{ document.join((document * 1 if false else document.join(document)) | list) }}",
    "looking": "{% for i in range(100000) %}{{ 'x' in document }}{{ document[1:] is string }}{% endfor %}",
    "a filter": "{% for i in range(90000) %}{{ [1, 2, 3] | map('upper') | list }}{% endfor %}",
}
REFUSED = {
    "{{ 'x' * 10**10 }}": "'pow' is not allowed in prompts",
    "{{ ('x' * 10000000000) | upper | lower }}": "'*' is for numbers",
    "{{ [document] * 100000000000 }}": "'*' is for numbers",
    "{% set ns = namespace(a=9) %}{% for i in range(99) %}{% set ns.a = ns.a * ns.a %}{% endfor %}": "too large",
    "{{ '%(a)s' % {'b': 1} }}": "'%' is for numbers",
    "{{ a }}{{ '{1}'.format(1) }}": "'format' cannot be called",
    "{{ a.center(10000000000) }}": "'center' cannot be called",
    "{{ a | center(10000000000) }}": "No filter named 'center'",
    "{{ '%10000000000d' | format(1) }}": "No filter named 'format'",
    "{{ a | map('format') | list }}": "No filter named 'format'",
    "{{ a | indent(10000000000) }}": "wider than",
    "{{ [a] | tojson(indent=10000000000) }}": "wider than",
    "{{ 1 | round(-1000000000) }}": "No filter named 'round'",
    "{{ lipsum(n=100000) }}": "'lipsum' is undefined",
    "{{ a }}\ud800": "unpaired surrogate",
    "{{ '\\ud800' }}": "unpaired surrogate",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "nested too deeply",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "nested too deeply",
    "{{ a" + " | upper" * 5000 + " }}": "nested too deeply",
    "{% if a %}" * 1000 + "{% endif %}" * 1000: "nested too deeply",
    "{{ " + "9" * 5000 + " }}": "limit",
    "{{ 1 // 0 }}": "division",
    "{% include 'x' %}": "'include' is not allowed in prompts",
    "{% import 'x' as y %}": "'import' is not allowed in prompts",
    "{% block x %}{{ self.x() }}{% endblock %}": "'block' is not allowed in prompts",
    "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}": "'recursive loop' is not allowed in prompts",
    "x" * 200_000: "longer than",
    "line\n\n{% nothing %}": "line 3",
}


@pytest.mark.parametrize("name", GROWING)
def test_endless_templates_are_stopped(name: str) -> None:
    with pytest.raises(UsageError, match=r"repeats or writes far more|number of template|is for numbers"):
        parse_template(GROWING[name]).compiled.render(VALUES, units=2**15)


@pytest.mark.parametrize("source", REFUSED)
def test_template_error_is_one_line(source: str) -> None:
    with pytest.raises(UsageError, match=f"^template .*{REFUSED[source].replace('*', '[*]')}") as caught:
        render(source, VALUES)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m.role | capitalize }}: {{ m.content | trim }}"
         "{{ '\n' if not loop.last else '' }}{% endfor %}", "User: Hello\nAssistant: Hi"),
        ("{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}x{% endif %}"
         "{{ '[INST] ' + m['content'].strip() + ' [/INST]' }}{% endfor %}", "[INST] Hello [/INST][INST] Hi [/INST]"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro one(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages[1:] %}{{ one(m) }}{% endfor %}",
         "<assistant>"),
        ("{{ messages | map(attribute='role') | join(', ') }} {{ (messages | last).content }}", "user, assistant Hi"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ [1, 'é'] | tojson(indent=2) }}",
         '1[\n  1,\n  "\\u00e9"\n]'),
        ("{{ a.split('e')[0] ~ 1 ~ a[:2] ~ a.replace('t', 'd') }}{% filter upper %}{{ a }}{% endfilter %}",
         "t1tedexdTEXT"),
        ("{{ missing | default('none') }}{{ a is defined and missing is not defined }}", "noneTrue"),
        ("{% for key, value in messages[0].items() %}{{ key }}{% endfor %}{{ 2 * 3 - 1 }}", "rolecontent5"),
    ],
)  # fmt: skip
def test_usual_chat_template_syntax_works(source: str, text: str) -> None:
    assert render(source, VALUES) == text


@pytest.mark.parametrize("replacing", ["a.replace('a', a)", "a | replace('a', a)", "a.join(a | list)", "a | join(a)"])
def test_huge_replacement_is_stopped_in_advance(replacing: str) -> None:
    tracemalloc.start()
    template = parse_template("{% set a = range(4000) | join('a') %}{{ " + replacing + " }}")
    with pytest.raises(UsageError, match="repeats or writes far more"):
        template.compiled.render(VALUES, units=2**15)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


def test_work_budget_grows_with_values() -> None:
    document = "word " * 2_000_000
    assert render("{% if document %}{{ document | trim }}{{ document | upper }}{% endif %}", {"document": document})


def test_called_functions_are_not_fields() -> None:
    assert fields_of("{% set n = namespace(a=range(2)) %}{{ document }}") == ("document",)


PIECES = st.sampled_from(
    ["a", "document", "messages", "ns", "'x'", "1", "range(99999)", "[a, a]", "{'k': a}", " ~ ", " + ", " * ", " % ",
     " ** ", " | upper", " | list", " | join(a)", " | replace('a', a)", " | map('upper')", " | tojson", " | sort",
     ".split()", ".format(1)", ".join(a)", "[0]", "[1:]", "(", ")", " == ", " in ", " if ", " else ", " is string",
     "{{ ", " }}", "{% for x in ", " %}", "{% endfor %}", "{% if ", "{% endif %}", "{% set a = ", "{% macro f(a) %}",
     "{% endmacro %}", "f(a)", "namespace(a=a)", "{% set ns.a = ", "\n", "{#", "#}", "{% raw %}", "-", "\ud800", "}"]
)  # fmt: skip
EXPRESSIONS = st.recursive(
    st.sampled_from(["a", "document", "messages", "'x'", "9", "range(9999)", "ns.a", "x", "none"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" ~ ", " + ", " * ", " % ", " - ", " == ", " in ", " and "]), inner),
        st.tuples(inner, st.sampled_from(
            [" | upper", " | list", " | join(document)", " | replace('a', document)", " | tojson", ".split()", "[1:]",
             " | map('upper')", ".join(document)", ".replace('o', document)", ".items()", " | sort", " | indent(9)"]
        )),
        st.tuples(st.just("["), inner, st.just(", "), inner, st.just("]")),
        st.tuples(st.just("("), inner, st.just(")")),
    ).map("".join),
    max_leaves=6,
)  # fmt: skip
STATEMENTS = st.recursive(
    EXPRESSIONS.map(lambda inner: f"{{{{ {inner} }}}}")
    | EXPRESSIONS.map(lambda inner: f"{{% set ns.a = {inner} %}}")
    | EXPRESSIONS.map(lambda inner: f"{{% set a = {inner} %}}"),
    lambda inner: st.one_of(
        st.tuples(EXPRESSIONS, inner).map(lambda pair: f"{{% for x in {pair[0]} %}}{pair[1]}{{% endfor %}}"),
        st.tuples(EXPRESSIONS, inner).map(lambda pair: f"{{% if {pair[0]} %}}{pair[1]}{{% endif %}}"),
        inner.map(lambda body: f"{{% macro f(a) %}}{body}{{{{ f(a) }}}}{{% endmacro %}}{{{{ f(1) }}}}"),
        st.tuples(inner, inner).map("".join),
    ),
    max_leaves=8,
)
QUIET = {"derandomize": True, "database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
BOUNDED = bounded_environment(keep_trailing_newline=True)


def ends(source: str, units: int = sandbox.UNITS) -> None:
    """Render a template; it must give a text of bounded length, or a one-line error."""
    try:
        text = compile_template(BOUNDED, source).render(VALUES, units)
    except UsageError as error:
        message = str(error)
    else:
        assert len(text) <= sandbox.UNITS * sandbox.UNIT_CHARACTERS * 2
        message = ""
    assert len(message) < 400
    assert "\n" not in message


ANY = st.lists(PIECES, max_size=30).map("".join) | STATEMENTS.map(lambda body: "{% set ns = namespace(a=1) %}" + body)


@settings(max_examples=40, **QUIET)
@given(source=ANY)
def test_random_template_gives_text_or_error(source: str) -> None:
    ends(source, units=2**13)


@pytest.mark.slow
@settings(max_examples=5000, **QUIET)
@given(source=ANY)
def test_thousands_of_templates_give_text_or_error(source: str) -> None:
    ends(source)
