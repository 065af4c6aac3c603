"""OpenAI chat messages to what chat templates expect: plain content, one system message, parsed arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from luce_core.errors import RequestError

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # the name before tools
}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_IMAGE_PARTS = frozenset({"image", "image_url", "input_image"})
_KEPT_FIELDS = ("name", "tool_call_id", "thinking")


def normalize_messages(raw: Sequence[Mapping[str, Any]], *, images: bool = False) -> list[dict[str, Any]]:
    """Messages of an OpenAI chat request in the shape chat templates are written for.

    Content becomes a string (parts joined by a newline, null by nothing), or with `images` and an image
    among the parts a list of `{"type": "text"|"image"}`. Developer counts as system; all system messages
    become one, first, joined by a blank line. Arguments of tool calls become objects. `RequestError` names
    the message that is wrong.
    """
    if not isinstance(raw, (list, tuple)):
        raise RequestError(f"'messages' is {_kind(raw)}; wanted a list of messages.", param="messages")
    if not raw:
        raise RequestError("'messages' is empty; send at least one message.", param="messages")
    system: list[str] = []
    rest: list[dict[str, Any]] = []
    for index, message in enumerate(raw):
        where = f"messages[{index}]"
        role = _role(message, where)
        if role == "system":
            system.append(_text_only(message.get("content"), f"{where}.content"))
        else:
            rest.append(_turn(message, role, where, images))
    joined = "\n\n".join(text for text in system if text)
    head = [{"role": "system", "content": joined}] if system else []
    return [*head, *rest]


def _role(message: Mapping[str, Any], where: str) -> str:
    if not isinstance(message, Mapping):
        raise _bad(where, _kind(message), "an object with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _bad(f"{where}.role", repr(role), f"one of {', '.join(_ROLES)}")
    return _ROLES[role]


def _turn(message: Mapping[str, Any], role: str, where: str, images: bool) -> dict[str, Any]:
    content = _content(message.get("content"), f"{where}.content", images)
    turn: dict[str, Any] = {"role": role, "content": content}
    for field in _KEPT_FIELDS:
        if message.get(field) is not None:
            turn[field] = _string(message[field], f"{where}.{field}")
    if role == "assistant":
        # `reasoning` is what some servers call the field; templates read `reasoning_content`.
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning is not None:
            turn["reasoning_content"] = _text_only(reasoning, f"{where}.reasoning_content")
        if message.get("tool_calls"):
            turn["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    return turn


def _content(content: Any, where: str, images: bool) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _bad(where, _kind(content), "a string, null, or a list of parts")
    parts = [_part(part, f"{where}[{index}]", images) for index, part in enumerate(content)]
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _text_only(content: Any, where: str) -> str:
    text = _content(content, where, images=False)
    assert isinstance(text, str), text
    return text


def _part(part: Any, where: str, images: bool) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise _bad(where, _kind(part), "a string or an object with 'type'")
    kind = part.get("type", "text" if "text" in part else None)
    if not isinstance(kind, str):
        raise _bad(f"{where}.type", _kind(kind), "a string")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": _string(part.get(_TEXT_PARTS[kind]), f"{where}.{_TEXT_PARTS[kind]}")}
    if kind in _IMAGE_PARTS:
        if not images:
            wanted = "'text': this server reads no images, as it was started without --mmproj"
            raise _bad(f"{where}.type", repr(kind), wanted, code="image_unsupported")
        return {"type": "image"}
    raise _bad(f"{where}.type", repr(kind), "'text'" + (" or 'image_url'" if images else ""))


def image_parts(raw: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """The images among the parts of messages: (place in the body, part), in the order in which
    `normalize_messages` has them. What is no message is left to that.
    """
    found = []
    for index, message in enumerate(raw):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            continue
        for place, part in enumerate(content):
            if isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS:
                found.append((f"messages[{index}].content[{place}]", part))
    return found


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise _bad(where, _kind(calls), "a list of calls")
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise _bad(where, _kind(call), "an object with a 'function' of 'name' and 'arguments'")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = from_json(arguments, allow_inf_nan=False)  # at most 200 levels deep, as bodies are
        except ValueError as error:
            raise _bad(f"{where}.function.arguments", repr(arguments[:80]), f"JSON ({error})") from None
    if not isinstance(arguments, Mapping):
        raise _bad(f"{where}.function.arguments", _kind(arguments), "a JSON object")
    normal: dict[str, Any] = {"type": "function"}
    if call.get("id") is not None:
        normal["id"] = _string(call["id"], f"{where}.id")
    name = _string(function.get("name"), f"{where}.function.name")
    normal["function"] = {"name": name, "arguments": dict(arguments)}
    return normal


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _bad(where, _kind(value), "a string")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _bad(where: str, got: str, wanted: str, *, code: str | None = None) -> RequestError:
    return RequestError(f"'{where}' is {got}; wanted {wanted}.", code=code, param=where)
