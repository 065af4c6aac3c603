"""The Jinja environment chat templates run in: marks trust, bounds time and memory, reaches nothing else.

A template comes with a downloaded file, its variables come from whoever talks to the server; neither is
trusted with this process. What is bounded, with the numbers of budget.py:
- steps: loop turns, calls and operators of one rendering; its time is looked at every few hundred steps;
- one value: the bytes of a string, or of everything inside a list or dict counted as a tree;
- all values a rendering makes, together, so that keeping many large ones does not help either.
Only listed filters and methods exist, each either unable to grow its input or checked before it does.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import string
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import escape

from luce_core.text.budget import MAX_INT_BITS, NODE_BYTES, PART_BYTES, Budget, Counted, LimitError
from luce_core.text.marked import MarkedText, bulk, is_trusted, joined, trusted


class _TrustingGenerator(CodeGenerator):
    """Compiles string literals to trusted text, and joins and prints through the environment."""

    environment: TemplateSandbox

    def _literal(self, text: str) -> str:
        self.environment.literals.append(trusted(text))
        return f"environment.literals[{len(self.environment.literals) - 1}]"

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(self._literal(value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(self._literal(node.data))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(environment.to_text, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def _weighed(self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        if getattr(node, "ctx", "load") != "load":  # a tuple to assign to
            visit(node, frame)
            return
        self.write("environment.weigh(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._weighed(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        self._weighed(super().visit_Tuple, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._weighed(super().visit_Dict, node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("environment.watch(")
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        self.write("environment.watch(" if isinstance(node.arg, nodes.Slice) else "(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(group))

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        # Nothing else is worked out while compiling: budgets hold only while rendering.
        if isinstance(node, nodes.TemplateData):
            return node.data
        if isinstance(node, nodes.Const) and isinstance(node.value, str):
            return node.value
        raise nodes.Impossible

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.to_text(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a trainer computes a loss on; here only its content matters."""

    tags = {"generation"}  # noqa: RUF012  # how jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_TEXT_METHODS = frozenset(
    {
        "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha",
        "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join",
        "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
        "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
        "swapcase", "title", "upper",
    }
)  # fmt: skip
_PLAIN_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float",
    "int", "items", "last", "length", "lower", "map", "max", "min", "reject",
    "rejectattr", "reverse", "select", "selectattr", "sum", "title", "trim",
    "truncate", "unique", "upper",
)  # fmt: skip
_COMPARING_TESTS = (
    "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan", "ge",
    ">=", "in",
)  # fmt: skip
_DICT_NAMES = frozenset(dir(dict))
_LINE_ENDS = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_WORDS = re.compile(r"\S+")
_VIEWS = (KeysView, ValuesView, ItemsView)
_WIDE = re.compile(r"\d{5,}|\*")
_PERCENT = re.compile(r"%[sd%]")


class _Namespace(Namespace):
    """Shows nothing of what it holds: that may be much more than the list it is printed with."""

    def __repr__(self) -> str:
        return "<Namespace>"


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """One per template; set `budget` anew before each rendering, and render one at a time."""

    code_generator_class = _TrustingGenerator
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        self.literals: list[MarkedText] = []
        self.budget = Budget()
        self._guarded_methods = {
            "replace": self._replace,
            "join": self._join_method,
            "split": self._split,
            "rsplit": self._split_right,
            "splitlines": self._lines,
            "format": lambda owner, *args, **kwargs: self._format(owner, args, kwargs),
        }
        self._now = now
        self.concat = self._concat  # type: ignore[method-assign]  # what macros and set blocks print into
        del self.globals["lipsum"]
        self.globals.update(
            namespace=_Namespace, raise_exception=self._raise_exception, strftime_now=self._strftime_now
        )
        self.filters = {}
        self._watch_filters(
            **{name: FILTERS[name] for name in _PLAIN_FILTERS},
            e=self._escape,
            escape=self._escape,
            groupby=self._groupby,
            sort=self._sort,
            luce_count=self._counted,
            format=lambda text, *args, **kwargs: self._percent(self.to_text(text), kwargs or args),
            from_json=self._from_json,
            indent=self._indent,
            join=self._join,
            list=self._list,
            replace=self._replace,
            round=_round,
            safe=lambda value: value,  # nothing is escaped, so nothing is to be kept from it
            string=self.to_text,
            tojson=self._tojson,
        )

        tests: dict[str, Any] = self.tests
        tests.update((name, self._watched(tests[name])) for name in _COMPARING_TESTS)

    def _watch_filters(self, **filters: Callable[..., Any]) -> None:
        self.filters.update((name, self._watched(function)) for name, function in filters.items())

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # keeps the mark that jinja2 sets on functions it passes itself to
        def run(*args: Any, **kwargs: Any) -> Any:
            self.budget.look()
            result = function(*args, **kwargs)
            if isinstance(result, str):
                self.budget.allow(bulk(result))
            return result

        return run

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "luce_count", [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, *args, **kwargs)

    # --- values --------------------------------------------------------------------------------------------

    def weigh(self, value: Any) -> Any:
        self.budget.step()
        return self.budget.weigh(value)

    def watch(self, value: Any) -> Any:
        self.budget.glance()
        return value

    def to_text(self, value: Any) -> str:
        """What printing `value` shows; text keeps its marks."""
        if isinstance(value, str):
            return value
        if value is None or isinstance(value, (bool, int, float, Undefined)):
            return str(value)
        if isinstance(value, (list, tuple, dict)):
            return str(self.weigh(value))
        return f"<{type(value).__name__}>"

    def _concat(self, pieces: Iterable[str]) -> MarkedText:
        self.budget.step()
        pieces = list(pieces)
        self.budget.allow(sum(map(bulk, pieces)))
        return joined(pieces)

    # --- operators and calls -------------------------------------------------------------------------------

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.step()
        if operator == "%" and isinstance(left, str):
            return self._percent(left, right)
        if isinstance(left, int) and isinstance(right, int):
            _check_number(operator, left, right)
        elif operator in {"+", "*"}:
            self._check_text(operator, left, right)
        result = self.binop_table[operator](left, right)
        return self.budget.weigh(result) if isinstance(result, (list, tuple)) else result

    def _check_text(self, operator: str, left: Any, right: Any) -> None:
        rows = (str, list, tuple)
        if operator == "*":
            items, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(items, rows) and isinstance(count, int):
                # Repeated trusted text is one trusted stretch; only the letters multiply.
                single = str.__str__(items) if isinstance(items, str) and is_trusted(items) else items
                self.budget.allow(_size(single) * max(count, 0))
        elif isinstance(left, rows) and isinstance(right, rows):
            self.budget.allow(_size(left) + _size(right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.step()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and (guarded := self._guarded_methods.get(getattr(obj, "__name__", ""))):
            return super().call(context, guarded, owner, *args, **kwargs)
        if isinstance(obj, type) or (isinstance(obj, Macro) and (obj.catch_varargs or obj.catch_kwargs)):
            self.budget.weigh((args, kwargs))  # they come back as `items`, or `varargs` and `kwargs`
        elif isinstance(obj, LoopContext) and args:
            args = (self._counted(args[0]), *args[1:])
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, _VIEWS):  # a view shows all of a dict and weighs nothing
            result = list(result)
        return self.budget.weigh(result) if isinstance(result, (list, tuple, dict)) else result

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is dict and isinstance(argument, str) and argument in obj:
            return obj[argument]
        self.budget.glance()
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The two kinds of object templates read most, short of the checks neither needs: a namespace has no
        # attributes but the template's own, and a dict only methods besides its keys.
        if type(obj) is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is _Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _TEXT_METHODS
        if isinstance(obj, (int, float, bytes)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        if not isinstance(owner, str) or getattr(value, "__name__", "") not in {"format", "format_map"}:
            return None
        if value.__name__ == "format_map":
            raise SecurityError("access to attribute 'format_map' of 'str' object is unsafe.")
        return lambda *args, **kwargs: self._format(owner, args, kwargs)

    def _format(self, template: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        formatter = SandboxedFormatter(self)
        mark = trusted if is_trusted(template) else MarkedText
        pieces: list[str] = []
        places = itertools.count()
        for literal, field, spec, conversion in string.Formatter().parse(template):
            self.budget.step()
            self.budget.allow(PART_BYTES)
            pieces.append(mark(literal))
            if field is None:
                continue
            if _WIDE.search(spec or "") or "{" in (spec or ""):
                raise LimitError(f"it asked for a field of format {spec!r}")
            name = str(next(places)) + field if not field or field[0] in ".[" else field
            value, _ = formatter.get_field(name, args, kwargs)
            if conversion == "r" and isinstance(value, str):
                value = repr(value)
            pieces.append(format(value, spec) if spec else self.to_text(value))
        return self._concat(pieces)

    def _percent(self, template: str, values: Any) -> str:
        """`'...%s...' % values`; marks survive where the template only has %s and %d."""
        self.budget.allow(PART_BYTES * template.count("%"))
        row = values if isinstance(values, tuple) else (values,)
        literals = _PERCENT.split(template)
        kinds = _PERCENT.findall(template)
        if any("%" in literal for literal in literals) or isinstance(values, dict):
            if _WIDE.search(template):
                raise LimitError("it asked for a very wide field")
            self.budget.weigh(values if isinstance(values, dict) else row)
            return str.__mod__(str.__str__(template), values)
        takes = sum(kind != "%%" for kind in kinds)
        if len(row) != takes:
            raise TemplateError(f"{template!r} takes {takes} values, got {len(row)}")
        mark = trusted if is_trusted(template) else MarkedText
        pieces: list[str] = [mark(literals[0])]
        rest = iter(row)
        for kind, literal in zip(kinds, literals[1:], strict=True):
            shown = "%" if kind == "%%" else self.to_text(next(rest) if kind == "%s" else int(next(rest)))
            pieces += (shown, mark(literal))
        return self._concat(pieces)

    # --- filters that can grow their input -----------------------------------------------------------------

    def _counted(self, items: Any) -> Counted:
        return Counted(self.budget, items)

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        text = self.to_text(text)
        limit = -1 if count is None else count
        places = text.count(old) if limit < 0 else min(text.count(old), limit)
        self.budget.allow(bulk(text) + places * bulk(new))
        return (text if isinstance(text, MarkedText) else MarkedText(text)).replace(old, new, limit)

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        between: list[str] = []
        for item in value:
            self.budget.step()
            between += (self.to_text(item), self.to_text(d))
        return self._concat(between[:-1])

    def _letters(self, value: Any) -> Any:
        """Before `value` is taken apart: text becomes as many objects as it has characters."""
        if isinstance(value, str):
            self.budget.allow(PART_BYTES * len(value))
        return value

    def _list(self, value: Iterable[Any]) -> list[Any]:
        return list(self._letters(value))

    def _sort(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return FILTERS["sort"](self, self._letters(value), *args, **kwargs)

    def _groupby(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return FILTERS["groupby"](self, self._letters(value), *args, **kwargs)

    def _split(self, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        self._allow_parts(text, sep, maxsplit)
        return text.split(sep, maxsplit)

    def _split_right(self, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        self._allow_parts(text, sep, maxsplit)
        return text.rsplit(sep, maxsplit)

    def _allow_parts(self, text: str, sep: str | None, maxsplit: int) -> None:
        parts = text.count(sep) if sep else sum(1 for _ in _WORDS.finditer(text))
        self.budget.allow(PART_BYTES * (parts if maxsplit < 0 else min(parts, maxsplit)))

    def _lines(self, text: str, keepends: bool = False) -> list[str]:
        self.budget.allow(PART_BYTES * sum(1 for _ in _LINE_ENDS.finditer(text)))
        return text.splitlines(keepends)

    def _escape(self, value: Any) -> str:
        text = self.to_text(value)
        self.budget.allow(5 * len(text))  # an ampersand becomes five characters
        return str.__str__(escape(text))

    def _from_json(self, text: str) -> Any:
        self.budget.allow(NODE_BYTES * len(text))  # two characters can be a list
        return self.weigh(json.loads(text))

    def _join_method(self, d: str, value: Iterable[Any]) -> str:
        value = self._list(value)
        for at, item in enumerate(value):
            if not isinstance(item, str):
                raise TypeError(f"sequence item {at}: expected str instance, {type(item).__name__} found")
        return self._join(value, d)

    def _indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        if not isinstance(width, (int, str)) or (len(width) if isinstance(width, str) else width) > 1000:
            raise LimitError(f"it asked for an indent of {width!r}")
        margin = width if isinstance(width, str) else MarkedText(" " * width)
        lines = self._lines(joined([self.to_text(text), "\n"]))
        self.budget.allow(len(lines) * (bulk(margin) + PART_BYTES))
        moved = [
            margin + line if ((line or blank) if at else first) else line for at, line in enumerate(lines)
        ]
        return self._join(moved, "\n")

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if len(indent if isinstance(indent, str) else " " * min(indent or 0, 1000)) > 64:
            raise LimitError(f"it asked for an indent of {indent!r}")
        if separators is not None and sum(map(len, separators)) > 64:
            raise LimitError("it asked for very long separators")
        self.weigh(value)
        text = json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        self.budget.allow(len(text))
        return text

    def _raise_exception(self, message: Any) -> None:
        raise TemplateError(self.to_text(message))

    def _strftime_now(self, layout: str) -> str:
        if len(layout) > 256:
            raise LimitError("it asked for a date of more than 256 characters")
        return self._now().strftime(layout)


def _size(value: str | list[Any] | tuple[Any, ...]) -> int:
    return bulk(value) if isinstance(value, str) else len(value)


def _check_number(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
    if bits > MAX_INT_BITS:
        raise LimitError(f"it made a number of more than {MAX_INT_BITS} bits")


def _round(value: Any, precision: int = 0, method: str = "common") -> float:
    if not -20 <= precision <= 20:
        raise LimitError(f"it asked to round to {precision} places")
    return float(FILTERS["round"](value, precision, method))
