"""Chat messages to prompt text, by the Jinja template a model file carries.

The rendered prompt comes as segments: what the template itself spells is trusted, everything that passed
through it (messages, tool results, names, descriptions, template arguments) is not, so
`Tokenizer.encode_segments` can let the template open a turn and keep a user from doing so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta

from luce_core.contracts import Segment
from luce_core.errors import ModelFormatError, RequestError
from luce_core.text.budget import Budget, LimitError
from luce_core.text.fallback import FALLBACK_TEMPLATES, choose_fallback
from luce_core.text.marked import MarkedText, bulk, segments, trusted
from luce_core.text.sandbox import TemplateSandbox

KEY = "tokenizer.chat_template"
MAX_SOURCE_CHARS = 2**20  # published ones are below 20 thousand
_TOKEN_VARIABLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # the key is spelled so
    "cls_token": "cls",
    "mask_token": "mask",
}
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_RESERVED = ("messages", "tools", "add_generation_prompt", *_TOKEN_VARIABLES)
# What running somebody else's template can raise, besides the limits: each is an answer about this request.
_TEMPLATE_FAULTS = (
    TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError,
)  # fmt: skip


class ChatTemplate:
    """A compiled template; safe to share between threads, which render one after the other.

    source: the Jinja text.  all_source: with that for requests with tools.
    notice: what a user should know, or None.  fallback: the file has no template, a built-in one stands in.
    accepts: names of the variables the template reads, such as `enable_thinking`, which `kwargs` can set.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        variables: Mapping[str, str] | None = None,
        notice: str | None = None,
        fallback: bool = False,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """With tools, `tool_source` replaces `source`; `variables` such as `bos_token` are trusted."""
        self.source = source
        self.all_source = source + (tool_source or "")
        self.notice = notice
        self.fallback = fallback
        self._variables = {name: trusted(text) for name, text in (variables or {}).items()}
        self._lock = threading.Lock()
        self._plain = _Compiled(source, KEY, now)
        self._with_tools = _Compiled(tool_source, f"{KEY}.tool_use", now) if tool_source else self._plain
        self.accepts = self._plain.reads | self._with_tools.reads

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], *, now: Callable[[], datetime] = datetime.now
    ) -> ChatTemplate:
        """The file's template; without one, a fallback chosen by the vocabulary, with a `notice`.

        Raises `ModelFormatError` for a template that does not compile; it is never replaced silently.
        """
        source = metadata.get(KEY)
        tool_source = metadata.get(f"{KEY}.tool_use")
        tokens = metadata.get("tokenizer.ggml.tokens")
        tokens = [] if tokens is None else tokens
        notice = None
        for name, text in ((KEY, source), (f"{KEY}.tool_use", tool_source)):
            if text is not None and not isinstance(text, str):
                raise ModelFormatError(
                    f"Key '{name}' is of type {type(text).__name__}; wanted a Jinja template as a string."
                )
        own = bool(source)
        if not source:
            family = choose_fallback(tokens)
            source, tool_source = FALLBACK_TEMPLATES[family], None
            notice = (
                f"The file has no chat template (key '{KEY}'); using the built-in '{family}' template. "
                "Give the model's own with --chat-template-file for answers as its authors meant them."
            )
        variables = {
            variable: str(tokens[token])
            for variable, key in _TOKEN_VARIABLES.items()
            if isinstance(token := _as_int(metadata.get(f"tokenizer.ggml.{key}_token_id")), int)
            and 0 <= token < len(tokens)
        }
        return cls(
            source, tool_source=tool_source, variables=variables, notice=notice, fallback=not own, now=now
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """The prompt of `messages` (see `normalize_messages`) as segments of equal trust.

        kwargs: further template variables (`chat_template_kwargs` of a request).
        Raises `RequestError` if the template refuses the messages, or needs more time or memory than any
        prompt.
        """
        for name in kwargs or {}:
            if name in _RESERVED:
                raise RequestError(
                    f"'chat_template_kwargs' sets {name!r}, which the server sets itself. Leave it out.",
                    param="chat_template_kwargs",
                )
        compiled = self._with_tools if tools else self._plain
        with self._lock:
            return compiled.render(
                {
                    **self._variables,
                    "documents": None,
                    **{name: _untrusted(value) for name, value in (kwargs or {}).items()},
                    "messages": [_message(message) for message in messages],
                    "tools": _untrusted(list(tools)) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )


class _Compiled:
    def __init__(self, source: str, key: str, now: Callable[[], datetime]) -> None:
        self._environment = TemplateSandbox(now)
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelFormatError(
                f"Key '{key}' has {len(source):,} characters; wanted at most {MAX_SOURCE_CHARS:,}. "
                + _OWN_TEMPLATE
            )
        try:
            self.reads = frozenset(meta.find_undeclared_variables(self._environment.parse(source)))
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            reason = (error.message or "").rstrip(".")
            raise ModelFormatError(
                f"Key '{key}' does not compile: line {error.lineno}: {reason}. {_OWN_TEMPLATE}"
            ) from None
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise ModelFormatError(f"Key '{key}' does not compile: {error}. {_OWN_TEMPLATE}") from None

    def render(self, variables: dict[str, Any]) -> list[Segment]:
        budget = self._environment.budget = Budget()
        pieces: list[str] = []
        try:
            budget.admit(variables)
            for piece in self._template.root_render_func(self._template.new_context(variables)):
                budget.step()
                budget.allow(bulk(piece))
                pieces.append(piece)
            text = self._environment.concat(pieces)
        except LimitError as error:
            raise RequestError(
                f"The chat template was stopped: {error}. Send less, or give another template with "
                "--chat-template-file.",
                code="chat_template_limit",
                param="messages",
            ) from None
        except _TEMPLATE_FAULTS as error:
            raise RequestError(
                f"The model's chat template refused the messages: {_reason(error)}",
                code="chat_template_error",
                param="messages",
            ) from error
        return segments(text)


_OWN_TEMPLATE = "Give another template with --chat-template-file."


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _message(message: Mapping[str, Any]) -> Any:
    marked = _untrusted(message)
    role = message.get("role")
    if role in _ROLES:  # one of four words, so no user text: templates build turn markers around it
        marked["role"] = trusted(role)
    return marked


def _untrusted(value: Any) -> Any:
    """A copy whose strings keep their marks (none) through what a template does to them."""
    if isinstance(value, str):
        return MarkedText(value)
    if isinstance(value, Mapping):
        return {_untrusted(key): _untrusted(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_untrusted(item) for item in value]
    return value


def _as_int(value: Any) -> int | None:
    return None if value is None else int(value)
