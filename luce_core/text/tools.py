"""The tools of a request: those that are functions, checked, with the schemas of their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from luce_core.errors import RequestError


def function_tools(tools: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The functions among `tools`, as OpenAI's chat API declares them. Raises RequestError.

    Tools of other types, such as those a provider runs itself, are left out: agents send them to
    everyone.
    """
    return [tool for index, tool in enumerate(tools) if _is_function(tool, f"tools[{index}]")]


def _is_function(tool: Any, where: str) -> bool:
    if not isinstance(tool, Mapping):
        raise _bad(where, tool, "an object with 'type' and 'function'")
    if tool.get("type", "function") != "function":
        return False
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _bad(f"{where}.function", function, "an object with 'name' and 'parameters'")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _bad(f"{where}.function.name", name, "a name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _bad(f"{where}.function.parameters", parameters, "a JSON schema of an object")
    return True


def schemas_of(functions: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Name -> JSON schema of the arguments."""
    found = (tool["function"] for tool in functions)
    return {function["name"]: function.get("parameters") or {} for function in found}


def _bad(where: str, got: Any, wanted: str) -> RequestError:
    return RequestError(f"'{where}' is {got!r:.80}; wanted {wanted}.", param=where)
