"""Arguments made to fit the tool's JSON schema: what the model wrote, as the type the tool takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

Types = frozenset[str]
"""JSON types a value may have; none = nothing is said about it."""

ANY: Types = frozenset()
_MOST = 256  # schemas looked at for one argument: references may lead back, and branch on the way
_INTEGER = re.compile(r"[+-]?\d+(?:\.0+)?")
_OF_PYTHON = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def argument_schema(tool: Mapping[str, Any], name: str) -> Types:
    """The types that the schema of a tool's arguments allows for one of them."""
    properties = tool.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return types_of(properties[name], tool)
    return types_of(tool.get("additionalProperties"), tool)


def types_of(schema: Any, root: Mapping[str, Any]) -> Types:
    """The types a schema allows: of `type`, `enum` and `const`, through unions and local references."""
    return _Types(root).of(schema)


class _Types:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MOST
        self._depth = 0

    def of(self, schema: Any) -> Types:
        if not isinstance(schema, Mapping) or not self._left or self._depth > 16:
            return ANY
        self._left -= 1
        self._depth += 1
        declared = schema.get("type")
        named = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
        found = {one for one in named if isinstance(one, str)} or self._through(schema)
        self._depth -= 1
        if not found:
            values = schema["enum"] if isinstance(schema.get("enum"), list) else []
            values = [schema["const"]] if "const" in schema else values
            found = {_OF_PYTHON.get(type(value), "object") for value in values}
        if found and schema.get("nullable") is True:
            found.add("null")
        return frozenset(found)

    def _through(self, schema: Mapping[str, Any]) -> set[str]:
        for union in ("anyOf", "oneOf"):
            members = schema.get(union)
            if isinstance(members, list) and members:
                types = [self.of(member) for member in members]
                return set().union(*types) if all(types) else set()
        narrowed = schema.get("allOf")
        for member in narrowed if isinstance(narrowed, list) else ():
            if found := self.of(member):
                return set(found)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            return set(self.of(_at(self._root, reference)))
        return set()


def _at(root: Any, reference: str) -> Any:
    for step in reference[2:].split("/"):
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def parse_json(text: str) -> Any:
    """The value of JSON text that can be written as JSON again. Raises ValueError."""
    value = from_json(text, allow_inf_nan=False)
    json.dumps(value, allow_nan=False)  # 1e999 is infinite, and a number of ten thousand digits too long
    return value


def from_text(text: str, types: Types) -> Any:
    """A value written as bare text, such as `5` or `[1, 2]`. What does not fit stays the text it is."""
    bare = text.strip()
    if types == ANY:
        value = _json_or(text)
        return text if isinstance(value, str) else value
    if "null" in types and bare in ("null", "None"):
        return None
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    if types & {"integer", "number"}:
        value = _number(bare, types)
        if value is not None:
            return value
    if types & {"object", "array"}:
        value = _json_or(bare)
        if isinstance(value, dict | list) and _json_type(value) in types:
            return value
    return text


def from_value(value: Any, types: Types, source: str) -> Any:
    """A value written as JSON, whose text is `source`. What does not fit stays what it is."""
    kind = _json_type(value)
    if types == ANY or kind in types or (kind == "integer" and "number" in types) or value is None:
        return value
    if isinstance(value, str):
        return from_text(value, types)
    if kind == "number" and "integer" in types and value.is_integer():
        return int(value)
    return source if "string" in types else value


def _number(bare: str, types: Types) -> int | float | None:
    if _INTEGER.fullmatch(bare):
        whole = bare.partition(".")[0]
        value = _json_or(whole.removeprefix("+"))
        if isinstance(value, int) and (whole == bare or "integer" in types):
            return value
    if "number" in types:
        value = _json_or(bare)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    return None


def _json_type(value: Any) -> str:
    if isinstance(value, dict):
        return "object"
    return "array" if isinstance(value, list) else _OF_PYTHON[type(value)]


def _json_or(text: str) -> Any:
    """The value, or the text where it is no JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return text
