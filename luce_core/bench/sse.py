"""Server-sent events out of bytes, however they are cut. Pure; after the HTML standard's section on
parsing an event stream.
"""

from __future__ import annotations

from attrs import frozen

LINE_BYTES = 16 * 2**20
"""Longest line that is collected; more is no stream of tokens."""


@frozen
class Event:
    """One event; `name` is "message" unless the server says otherwise."""

    name: str
    data: str


class EventParser:
    """`feed` bytes, get the events they complete. ValueError for a line without end."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._name = ""
        self._data: list[str] = []
        self._begun = False
        self._after_cr = False

    def feed(self, data: bytes) -> list[Event]:
        """Events that end within `data`."""
        if not data:
            return []
        own = data[1:] if self._after_cr and data[:1] == b"\n" else data  # the second half of a \r\n
        self._after_cr = data[-1:] == b"\r"
        self._rest += own
        lines = self._rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LINE_BYTES:
            raise ValueError(f"a line of more than {LINE_BYTES} bytes")
        return [event for line in lines if (event := self._line(bytes(line))) is not None]

    def close(self) -> list[Event]:
        """What the end of the stream completes: an event whose blank line never came. The standard drops it;
        some servers end right behind their last `data:` line, and a benchmark is to count what came.
        """
        return self.feed(b"\n\n")

    def _line(self, line: bytes) -> Event | None:
        if not self._begun:
            self._begun = True
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            event = Event(self._name or "message", "\n".join(self._data)) if self._data else None
            self._name, self._data = "", []
            return event
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value.decode("utf-8", "replace"))
        elif name == b"event":
            self._name = value.decode("utf-8", "replace")
        return None  # comments have an empty name; `id` and `retry` are for browsers
