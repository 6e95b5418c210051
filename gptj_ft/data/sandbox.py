"""Render Jinja templates of others in a sandbox with a budget of work.

A template may use what prompts and chat templates use: names, filters, loops, `if`, `set`, `namespace`, macros. It has
a budget of units: one for each node of its syntax that is evaluated, each element of a list, and each 16 characters.
Whatever makes much of little is charged before it is done: the passes of a loop, a macro, a filter, a method, an
operator, an output. Nothing is computed while a template is parsed, as Jinja's folding of constants has no bounds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import meta, nodes, pass_context
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gptj_ft.errors import UsageError
from gptj_ft.system.plain_text import one_line

SOURCE_CHARACTERS = 2**17
UNITS = 2**21  # 32 MiB of text, or a few seconds
UNITS_PER_INPUT = 16  # and for each unit of the values that a template is given
UNIT_CHARACTERS = 16
LARGEST_FACTOR = 2**63
WIDEST_INDENT = 100
SHOWN, _REASON_SHOWN = 60, 200  # characters in messages: of a template, and of what is wrong with it
BUDGET = "budget of this rendering"  # among the values; a name in a template has no blanks

FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "indent", "int",
    "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace",
    "reverse", "safe", "select", "selectattr", "sort", "string", "title", "tojson", "trim", "truncate", "unique",
    "upper", "wordcount",
)  # fmt: skip
GLANCES = ("count", "d", "default", "first", "last", "length", "safe")  # filters that look at no element
METHODS: dict[type, tuple[str, ...]] = {
    str: (
        "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower",
        "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
        "replace", "rfind", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title",
        "upper",
    ),
    dict: ("get", "items", "keys", "values"),
    list: ("count", "index"),
    tuple: ("count", "index"),
    LoopContext: ("changed", "cycle"),
}  # fmt: skip
GLOBALS = ("dict", "namespace", "range")
REFUSED = (nodes.Block, nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include, nodes.Pow)
# Filters that are put into the syntax of a template; it cannot name them.
COUNT, WEIGH = "passes of a loop", "weight"


class Budget:
    """Work left to one rendering, in units.

    Args:
        values: values given to the template.
        call: units that calling a macro costs.
    """

    def __init__(self, values: Mapping[str, Any], call: int) -> None:
        self.call, self.units = call, 2**62
        self.weigh(dict(values))
        self.units = UNITS + UNITS_PER_INPUT * (2**62 - self.units)

    def charge(self, units: int) -> None:
        """Charge units; a TemplateRuntimeError if too few are left."""
        self.units -= units
        if self.units < 0:
            raise jinja2.TemplateRuntimeError("it repeats or writes far more than a prompt needs, and was stopped")

    def weigh(self, *values: Any) -> None:
        """Charge for values and everything nested in them."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                self.charge(1 + len(value) // UNIT_CHARACTERS)
                continue
            size = len(value) if isinstance(value, list | tuple | dict | range) else 0
            self.charge(1 + size)
            if isinstance(value, dict):
                waiting += (*value.keys(), *value.values())
            elif isinstance(value, list | tuple):
                waiting += value


class Environment(ImmutableSandboxedEnvironment):
    """A Jinja sandbox that charges calls and operators to the budget."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _budget(context).weigh(left, right)
        if operator in "*%":
            if not (isinstance(left, int | float) and isinstance(right, int | float)):
                raise jinja2.TemplateRuntimeError(f"'{operator}' is for numbers here")
            if max(abs(left), abs(right)) > LARGEST_FACTOR:
                raise jinja2.TemplateRuntimeError("a number is too large")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget, owner = _budget(__context), getattr(__obj, "__self__", None)
        name = str(getattr(__obj, "__name__", type(__obj).__name__))
        is_method = any(isinstance(owner, kind) and name in names for kind, names in METHODS.items())
        if isinstance(__obj, Macro):
            budget.charge(budget.call)
        elif not (is_method or isinstance(__obj, Undefined) or any(__obj is each for each in __self.globals.values())):
            raise jinja2.TemplateRuntimeError(f"'{name}' cannot be called here")
        budget.weigh(owner if is_method else None, *args, *kwargs.values())
        if isinstance(owner, str) and name == "replace" and len(args) > 1:
            _charge_replacing(budget, owner, *args[:2])
        if isinstance(owner, str) and name == "join" and args and hasattr(args[0], "__len__"):
            budget.charge(len(owner) * len(args[0]) // UNIT_CHARACTERS)
        return super().call(__context, __obj, *args, **kwargs)


@dataclass(frozen=True)
class Compiled:
    """A compiled template.

    Attributes:
        source: its text.
        tree: its syntax, as written.
        fields: names of values, each time that one is used, in order.
    """

    source: str
    tree: nodes.Template
    fields: tuple[str, ...]
    _template: jinja2.Template
    _size: int

    def render(self, values: Mapping[str, Any]) -> str:
        """Render the template.

        Raises:
            UsageError: the template asks for what a value does not have, or for far more work than a prompt needs.
        """
        with _template_errors(self.source):
            return self._template.render({**values, BUDGET: Budget(values, self._size)})


def bounded_environment(**options: Any) -> Environment:
    """Make an environment for templates of others; options as of `jinja2.Environment`."""
    made = Environment(
        undefined=jinja2.StrictUndefined, autoescape=False, optimized=False, finalize=_weighed, **options
    )
    own = {COUNT: _counted, WEIGH: _weighed}
    made.filters = {name: _bounded(name) for name in FILTERS} | own
    made.globals = {name: made.globals[name] for name in GLOBALS}
    return made


def compile_template(environment: Environment, source: str) -> Compiled:
    """Compile a template; nothing of it is computed.

    Raises:
        UsageError: it is no Jinja, or uses what templates of prompts have no use for.
    """
    if len(source) > SOURCE_CHARACTERS:
        raise UsageError(f"template {shown(source)}: longer than {SOURCE_CHARACTERS:,} characters")
    with _template_errors(source):
        tree, charged = environment.parse(source), environment.parse(source)
        _check(tree)
        free = meta.find_undeclared_variables(tree)
        fields = tuple(node.name for node in tree.find_all(nodes.Name) if node.name in free)
        _charge(charged)
        charged.set_environment(environment)
        return Compiled(source, tree, fields, environment.from_string(charged), _units_of(tree))


def _check(tree: nodes.Template) -> None:
    for node in tree.find_all(nodes.Node):
        if isinstance(node, REFUSED) or (isinstance(node, nodes.For) and node.recursive):
            kind = "recursive loop" if isinstance(node, nodes.For) else type(node).__name__.lower()
            raise jinja2.TemplateSyntaxError(f"'{kind}' is not for templates of prompts", node.lineno)
        if re.search("[\ud800-\udfff]", _text_of(node)):
            raise jinja2.TemplateSyntaxError("half a surrogate pair, which is no character", node.lineno)


def _text_of(node: nodes.Node) -> str:
    """Return the text of a node; empty if it has none."""
    if isinstance(node, nodes.TemplateData):
        return node.data
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else ""


def _units_of(*parts: nodes.Node) -> int:
    """Count the units of evaluating parts of a template once."""
    units = 0
    waiting = list(parts)
    while waiting:
        node = waiting.pop()
        units += 1 + len(_text_of(node)) // UNIT_CHARACTERS
        waiting += node.iter_child_nodes()
    return units


def _charge(tree: nodes.Template) -> None:
    """Insert charges into a template where the environment cannot intercept an operation."""
    for node in list(tree.find_all(nodes.Node)):
        if isinstance(node, nodes.For):  # before the loops in it, whose charges are no units of its own
            units = 1 + _units_of(*node.body, *([node.test] if node.test else []))
            node.iter = _filter(node.iter, COUNT, nodes.Const(units, lineno=node.lineno))
        elif isinstance(node, nodes.Concat):
            node.nodes = [_filter(each, WEIGH) for each in node.nodes]
        elif isinstance(node, nodes.Compare):
            node.expr = _filter(node.expr, WEIGH)
            for operand in node.ops:
                operand.expr = _filter(operand.expr, WEIGH)
        elif isinstance(node, nodes.Test) and node.name not in ("defined", "undefined", "none"):
            node.node, node.args = _filter(node.node, WEIGH), [_filter(each, WEIGH) for each in node.args]
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node.node = _filter(node.node, WEIGH)


def _filter(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _budget(context: Context) -> Budget:
    found = context[BUDGET]
    assert isinstance(found, Budget)
    return found


# Filters that take the context are computed when a template is rendered, never before.


@pass_context
def _weighed(context: Context, value: Any) -> Any:
    _budget(context).weigh(value)
    return value


@pass_context
def _counted(context: Context, value: Any, units: int) -> Any:
    """Charge for all passes of a loop before the first."""
    if isinstance(value, Iterator):
        value = list(value)
    if not isinstance(value, Undefined) and hasattr(value, "__len__"):
        _budget(context).charge(units * len(value))
    return value


_PLAIN = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)


def _bounded(name: str) -> Callable[..., Any]:
    """Wrap one of Jinja's filters: charge for its input and its output."""

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        value = list(value) if isinstance(value, Iterator) else value
        if name in GLANCES:
            budget.charge(1)
        else:
            budget.weigh(value, *args, *kwargs.values())
        given = [*args, *kwargs.values()]
        if name in ("indent", "tojson") and any(isinstance(each, int) and each > WIDEST_INDENT for each in given):
            raise jinja2.TemplateRuntimeError(f"{name}: wider than {WIDEST_INDENT}")
        if name == "indent":
            budget.charge(str(value).count("\n") * max([WIDEST_INDENT, *(len(x) for x in given if isinstance(x, str))]))
        if name == "replace" and len(args) > 1:
            _charge_replacing(budget, *map(str, (value, *args[:2])))
        if name == "join" and hasattr(value, "__len__"):
            longest = max((len(each) for each in given if isinstance(each, str)), default=0)
            budget.charge(len(value) * longest // UNIT_CHARACTERS)
        found = _PLAIN.call_filter(name, value, args, kwargs, context, context.eval_ctx)
        if isinstance(found, str):
            budget.weigh(found)
        return found

    return bounded


def _charge_replacing(budget: Budget, text: str, old: str, new: str) -> None:
    budget.charge(text.count(old) * len(new) // UNIT_CHARACTERS)


@contextmanager
def _template_errors(source: str) -> Iterator[None]:
    """Turn the errors of a template into a one-line message."""
    try:
        yield
    except RecursionError as error:
        raise UsageError(f"template {shown(source)}: nested too deeply") from error
    except jinja2.TemplateSyntaxError as error:
        line = f" line {error.lineno}:" if "\n" in source else ""
        raise UsageError(f"template {shown(source)}:{line} {_reason(error)}") from error
    except (
        jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, SyntaxError
    ) as error:  # fmt: skip
        raise UsageError(f"template {shown(source)}: {_reason(error)}") from error


def shown(source: str) -> str:
    """Quote a template for a message; a long one is cut."""
    return repr(source if len(source) <= SHOWN else f"{source[:SHOWN]}...")


def _reason(error: Exception) -> str:
    return one_line(getattr(error, "message", None) or str(error) or type(error).__name__)[:_REASON_SHOWN]
