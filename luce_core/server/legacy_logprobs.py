"""Log-probabilities as legacy completions report them: lists over a choice's tokens, an echoed prompt's
included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from luce_core.contracts import TokenLogprob
from luce_core.server.choices import LOWEST_LOGPROB
from luce_core.text import Detokenizer, Tokenizer


@frozen
class Echo:
    """The prompt a choice begins with."""

    ids: Sequence[int]
    text: str
    special: bool
    """The ids were the client's, so that special tokens among them are shown; a text spells none."""
    scored: bool
    """Its tokens are reported too. The text is then that of the tokens, so that offsets fit it."""


class LegacyLogprobs:
    """The tokens of one choice, in order; offsets count characters of its text. most: alternatives shown."""

    def __init__(self, tokenizer: Tokenizer, most: int, echo: Echo | None = None) -> None:
        self._tokenizer = tokenizer
        self._most = most
        self._echo = echo
        self._detokenizer = Detokenizer(tokenizer)
        self._prompt = Detokenizer(tokenizer, special=echo is not None and echo.special, start_of_text=True)
        self._told = 0
        self._offset = 0
        self._pending: list[tuple[int, int, TokenLogprob | None]] = []

    def begin(self) -> str:
        """The text a choice begins with, as far as it is known before anything was computed."""
        echo = self._echo
        if echo is None:
            return ""
        if not echo.scored:
            self._offset = len(echo.text)
            return echo.text
        return self._tell(echo.ids[0], None)

    def take_prompt(self, items: Sequence[TokenLogprob]) -> str:
        """The prompt's next tokens; returns the text they complete, where it is echoed token by token."""
        if self._echo is None or not self._echo.scored:
            return ""
        return "".join([self._tell(item.token, item) for item in items])

    def _tell(self, token: int, item: TokenLogprob | None) -> str:
        assert self._echo is not None
        self._told += 1
        text = self._prompt.push([token])
        if self._told == len(self._echo.ids):
            text += self._prompt.flush()
        self._pending.append((self._offset, token, item))
        self._offset += len(text)
        return text

    def take(self, items: Sequence[TokenLogprob]) -> None:
        """The answer's next tokens."""
        for item in items:
            self._pending.append((self._offset, item.token, item))
            self._offset += len(self._detokenizer.push([item.token]))

    def end(self, item: TokenLogprob | None) -> None:
        """The token that ended the answer, if one did; it is no text, but it counts as one."""
        if item is not None:
            self._pending.append((self._offset, item.token, item))

    def flush(self) -> dict[str, Any] | None:
        """What came since the last call; None when nothing did."""
        pending, self._pending = self._pending, []
        if not pending:
            return None
        items = [item for _, _, item in pending]
        return {
            "tokens": [self._name(token) for _, token, _ in pending],
            "token_logprobs": [item and max(item.logprob, LOWEST_LOGPROB) for item in items],
            "top_logprobs": [item and self._alternatives(item) for item in items],
            "text_offset": [offset for offset, _, _ in pending],
        }

    def _name(self, token: int) -> str:
        """A token's text; `bytes:` and its bytes where they are no whole characters: names stay apart."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _alternatives(self, item: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and always the one that is there."""
        named: dict[str, float] = {}
        for token, logprob in (*item.top[: self._most], (item.token, item.logprob)):
            named.setdefault(self._name(token), max(logprob, LOWEST_LOGPROB))
        return named
