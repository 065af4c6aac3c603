"""The Jinja environment chat templates run in: marks trust, bounds time and memory, reaches nothing else.

A template comes with a downloaded file, its variables come from whoever talks to the server; neither is
trusted with this process. What is bounded, with the numbers of budget.py:
- steps: loop turns, calls and operators of one rendering; its time is looked at every few hundred steps;
- one value: the bytes of a string, or of everything inside a list or dict counted as a tree;
- all values a rendering makes, together, so that keeping many large ones does not help either.
Only listed filters and methods exist, each either unable to grow its input or checked before it does.
"""

from __future__ import annotations

import itertools
import json
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from luce_core.text.budget import MAX_INT_BITS, NODE_BYTES, Budget, Counted, LimitError
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
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "groupby", "int", "items", "last", "length", "lower", "map", "max", "min", "reject",
    "rejectattr", "reverse", "select", "selectattr", "sort", "striptags", "sum", "title", "trim",
    "truncate", "unique", "upper", "urlencode", "wordcount",
)  # fmt: skip
_DICT_NAMES = frozenset(dir(dict))
_WIDE = re.compile(r"\d{5,}|\*")
_PERCENT = re.compile(r"%[sd%]")


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
            "format": lambda owner, *args, **kwargs: self._format(owner, args, kwargs),
        }
        self._now = now
        self.concat = self._concat  # type: ignore[method-assign]  # what macros and set blocks print into
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=self._strftime_now)
        self.filters = {name: FILTERS[name] for name in _PLAIN_FILTERS}
        self.filters.update(
            luce_count=self._counted,
            format=lambda text, *args, **kwargs: self._percent(self.to_text(text), kwargs or args),
            from_json=lambda text: self.weigh(json.loads(text)),
            indent=self._indent,
            join=self._join,
            list=self._list,
            replace=self._replace,
            round=_round,
            safe=lambda value: value,  # nothing is escaped, so nothing is to be kept from it
            string=self.to_text,
            tojson=self._tojson,
        )

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "luce_count", [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, *args, **kwargs)

    # --- values --------------------------------------------------------------------------------------------

    def weigh(self, value: Any) -> Any:
        self.budget.step()
        return self.budget.weigh(value)

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
                self.budget.allow(_size(items) * max(count, 0))
        elif isinstance(left, rows) and isinstance(right, rows):
            self.budget.allow(_size(left) + _size(right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.step()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and (guarded := self._guarded_methods.get(getattr(obj, "__name__", ""))):
            return super().call(context, guarded, owner, *args, **kwargs)
        if isinstance(obj, Macro) and (obj.catch_varargs or obj.catch_kwargs):
            self.budget.weigh((args, kwargs))  # they come back as `varargs` and `kwargs`
        elif isinstance(obj, LoopContext) and args:
            args = (self._counted(args[0]), *args[1:])
        result = super().call(context, obj, *args, **kwargs)
        return self.budget.weigh(result) if isinstance(result, (list, tuple, dict)) else result

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The two kinds of object templates read most, short of the checks neither needs: a namespace has no
        # attributes but the template's own, and a dict only methods besides its keys.
        if type(obj) is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is Namespace and not attribute.startswith("_"):
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

    def _list(self, value: Iterable[Any]) -> list[Any]:
        if isinstance(value, str):
            self.budget.allow(NODE_BYTES * len(value))
        return list(value)

    def _join_method(self, d: str, value: Iterable[Any]) -> str:
        value = list(value)
        for at, item in enumerate(value):
            if not isinstance(item, str):
                raise TypeError(f"sequence item {at}: expected str instance, {type(item).__name__} found")
        return self._join(value, d)

    def _indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        if not isinstance(width, (int, str)) or (len(width) if isinstance(width, str) else width) > 1000:
            raise LimitError(f"it asked for an indent of {width!r}")
        margin = width if isinstance(width, str) else MarkedText(" " * width)
        lines = joined([self.to_text(text), "\n"]).splitlines()
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


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _round(value: Any, precision: int = 0, method: str = "common") -> float:
    if not -20 <= precision <= 20:
        raise LimitError(f"it asked to round to {precision} places")
    return float(FILTERS["round"](value, precision, method))
