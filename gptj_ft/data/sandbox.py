"""Render untrusted Jinja templates in a sandbox with a budget of work.

Jinja's own sandbox blocks access to Python's internals, but not exhaustion: nested loops, doubled strings and lists,
recursive macros. Limits on the lengths of source and output do not stop a loop that writes nothing. So this module
adds a budget of units: one per evaluated syntax node, per list element and per 16 characters. Everything that
multiplies work is charged in advance: loop passes, macros, filters, methods, operators, outputs. Parsing computes
nothing, since Jinja's constant folding is unbounded. A template may use names, filters, loops, `if`, `set`,
`namespace`, macros.
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
UNITS_PER_INPUT = 16  # additional units per unit of the template's values
UNIT_CHARACTERS = 16
LARGEST_FACTOR = 2**63
WIDEST_INDENT = 100
SHOWN, _REASON_SHOWN = 60, 200  # characters of a template and of an error in messages
BUDGET = "budget of this rendering"  # key among the values; no template can name it, as it has blanks

FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "indent", "int",
    "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace",
    "reverse", "safe", "select", "selectattr", "sort", "string", "title", "tojson", "trim", "truncate", "unique",
    "upper", "wordcount",
)  # fmt: skip
CONSTANT_TIME = ("count", "d", "default", "first", "last", "length", "safe")  # filters
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
COUNT, WEIGH = "passes of a loop", "weight"  # filters that `_charge` inserts


class Budget:
    """Remaining work of one rendering, in units.

    Args:
        values: values of the template.
        call: units of a macro call.
    """

    def __init__(self, values: Mapping[str, Any], call: int, units: int = UNITS) -> None:
        # Weigh the values with a budget that cannot run out: the units used are their weight.
        self.call, self.units = call, 2**62
        self.weigh(dict(values))
        self.units = units + UNITS_PER_INPUT * (2**62 - self.units)

    def charge(self, units: int) -> None:
        """Charge units; raise TemplateRuntimeError if too few are left."""
        self.units -= units
        if self.units < 0:
            raise jinja2.TemplateRuntimeError("stopped: it repeats or writes far more than a prompt needs")

    def weigh(self, *values: Any) -> None:
        """Charge for values and everything nested in them; raise as `charge` does."""
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
        # `*` repeats texts and lists, `%` pads texts to any width: both would escape the budget.
        if operator in "*%":
            if not (isinstance(left, int | float) and isinstance(right, int | float)):
                raise jinja2.TemplateRuntimeError(f"'{operator}' is for numbers only")
            if max(abs(left), abs(right)) > LARGEST_FACTOR:
                raise jinja2.TemplateRuntimeError("a number is too large")
        return super().call_binop(context, operator, left, right)

    # Names as in Jinja: a keyword argument of the template cannot have them.
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
    """A compiled template."""

    source: str
    tree: nodes.Template  # without the inserted charges
    fields: tuple[str, ...]  # names of values, once per use, in order
    _template: jinja2.Template
    _size: int

    def render(self, values: Mapping[str, Any], units: int = UNITS) -> str:
        """Render the template with a budget of ``units``, besides those for the values."""
        with _template_errors(self.source):
            return self._template.render({**values, BUDGET: Budget(values, self._size, units)})


def bounded_environment(**options: Any) -> Environment:
    """Make an environment for untrusted templates, with options of `jinja2.Environment`."""
    environment = Environment(
        undefined=jinja2.StrictUndefined, autoescape=False, optimized=False, finalize=_weighed, **options
    )
    environment.filters = {name: _bounded(name) for name in FILTERS} | {COUNT: _counted, WEIGH: _weighed}
    environment.globals = {name: environment.globals[name] for name in GLOBALS}
    return environment


def compile_template(environment: Environment, source: str) -> Compiled:
    """Compile a template without computing anything."""
    if len(source) > SOURCE_CHARACTERS:
        raise UsageError(f"template {shown(source)}: longer than {SOURCE_CHARACTERS:,} characters")
    with _template_errors(source):
        # `_charge` changes its tree: parse another one for everything that reads the template.
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
            raise jinja2.TemplateSyntaxError(f"'{kind}' is not allowed in prompts", node.lineno)
        if re.search("[\ud800-\udfff]", _text_of(node)):
            raise jinja2.TemplateSyntaxError("unpaired surrogate (invalid Unicode)", node.lineno)


def _text_of(node: nodes.Node) -> str:
    """Return a node's text, or ""."""
    if isinstance(node, nodes.TemplateData):
        return node.data
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else ""


def _units_of(*parts: nodes.Node) -> int:
    """Count the units of evaluating syntax nodes once."""
    units = 0
    waiting = list(parts)
    while waiting:
        node = waiting.pop()
        units += 1 + len(_text_of(node)) // UNIT_CHARACTERS
        waiting += node.iter_child_nodes()
    return units


def _charge(tree: nodes.Template) -> None:
    """Insert charges where the environment cannot intercept an operation."""
    for node in list(tree.find_all(nodes.Node)):
        if isinstance(node, nodes.For):  # outer loops come first, so their units exclude the charges of inner loops
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
    budget = context[BUDGET]
    assert isinstance(budget, Budget)
    return budget


# Filters with `pass_context` run while a template is rendered, never while it is compiled.


@pass_context
def _weighed(context: Context, value: Any) -> Any:
    _budget(context).weigh(value)
    return value


@pass_context
def _counted(context: Context, value: Any, units: int) -> Any:
    """Charge for all passes of a loop before the first one."""
    if isinstance(value, Iterator):
        value = list(value)
    if not isinstance(value, Undefined) and hasattr(value, "__len__"):
        _budget(context).charge(units * len(value))
    return value


_PLAIN = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)


def _bounded(name: str) -> Callable[..., Any]:
    """Wrap one of Jinja's filters: charge for its input and output."""

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        value = list(value) if isinstance(value, Iterator) else value
        arguments = [*args, *kwargs.values()]
        if name in CONSTANT_TIME:
            budget.charge(1)
        else:
            budget.weigh(value, *arguments)
        if name in ("indent", "tojson") and any(isinstance(each, int) and each > WIDEST_INDENT for each in arguments):
            raise jinja2.TemplateRuntimeError(f"{name}: wider than {WIDEST_INDENT}")
        if name == "indent":
            widths = [WIDEST_INDENT, *(len(each) for each in arguments if isinstance(each, str))]
            budget.charge(str(value).count("\n") * max(widths))
        if name == "replace" and len(args) > 1:
            _charge_replacing(budget, *map(str, (value, *args[:2])))
        if name == "join" and hasattr(value, "__len__"):
            longest = max((len(each) for each in arguments if isinstance(each, str)), default=0)
            budget.charge(len(value) * longest // UNIT_CHARACTERS)
        # This environment has Jinja's own filters, under the names that the templates' environment wraps.
        result = _PLAIN.call_filter(name, value, args, kwargs, context, context.eval_ctx)
        if isinstance(result, str):
            budget.weigh(result)
        return result

    return bounded


def _charge_replacing(budget: Budget, text: str, old: str, new: str) -> None:
    budget.charge(text.count(old) * len(new) // UNIT_CHARACTERS)


@contextmanager
def _template_errors(source: str) -> Iterator[None]:
    """Convert the errors of a template to a one-line message."""
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
    """Quote a template for a message, truncated."""
    return repr(source if len(source) <= SHOWN else f"{source[:SHOWN]}...")


def _reason(error: Exception) -> str:
    return one_line(getattr(error, "message", None) or str(error) or type(error).__name__)[:_REASON_SHOWN]
