"""One row per finished request on the console of `serve`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from luce_core.contracts import Done, RequestRecord

HEADER = "time      api         prompt  cached      TTFT    tok/s  tokens  finish"
HEADER_EVERY = 40
"""Rows after which the header is shown again: about a screen."""


class RequestRows:
    """An observer of finished requests; `write` is given whole lines. Any thread."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], time.struct_time] = time.localtime
    ) -> None:
        self._write = write
        self._clock = clock
        self._rows = 0
        self._lock = threading.Lock()

    def __call__(self, record: RequestRecord) -> None:
        with self._lock:
            if self._rows % HEADER_EVERY == 0:
                self._write(HEADER)
            self._rows += 1
            self._write(row(record, self._clock()))


def row(record: RequestRecord, now: time.struct_time) -> str:
    """The row of one request."""
    done = record.done
    prompt = done.usage.get("prompt_tokens", 0)
    cached = f"{100 * done.usage.get('cached_tokens', 0) / prompt:.1f}%" if prompt else "-"
    first = f"{done.timings['ttft_ms'] / 1e3:.2f} s" if done.timings.get("ttft_ms") else "-"
    speed = decode_speed(done)
    tokens = done.usage.get("completion_tokens", 0)
    return (
        f"{time.strftime('%H:%M:%S', now):8}  {record.api:9}  {prompt:>7}  {cached:>6}  {first:>8}  "
        f"{'-' if speed is None else f'{speed:.1f}':>7}  {tokens:>6}  {_finish(done)}"
    )


def decode_speed(done: Done) -> float | None:
    """Tokens per second after the first one; None when there were none."""
    tokens, decode_ms = done.usage.get("completion_tokens", 0) - 1, done.timings.get("decode_ms", 0.0)
    return tokens / decode_ms * 1e3 if tokens > 0 and decode_ms > 0 else None


def _finish(done: Done) -> str:
    words: str = done.reason
    if drafted := done.usage.get("drafted_tokens", 0):
        words += f", {100 * done.usage.get('accepted_tokens', 0) / drafted:.0f}% of drafts accepted"
    if done.error:
        words += f": {done.error}"
    return "; ".join((words, *done.aside))
