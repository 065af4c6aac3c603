"""Images inside the engine: encoded while their request waits, given to the rows that take them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from luce_core.contracts import Encoder, Media, MediaSpan, Progress
from luce_core.errors import PluginError
from luce_core.model.positions import prompt_positions

if TYPE_CHECKING:
    from luce_core.engine.sequence import Sequence as Seq

SLICE_S = 0.05
"""Of one turn of the loop, while others have rows to run."""
AHEAD_BYTES = 2**28
"""Encoded rows of requests that still wait, from which on no other request's images are begun."""


class SequenceMedia:
    """The images of one request: their places, the positions they make, and what is encoded of them."""

    def __init__(self, spans: Sequence[MediaSpan], prompt: int, axes: int) -> None:
        self.spans = tuple(spans)
        self._places, self.shift = prompt_positions(axes, prompt, spans)
        self._rows: dict[int, Tensor] = {}
        """(host) f32[rows, E] by number of the image."""

    def lacking(self, length: int) -> list[int]:
        """Images with rows behind the first `length` tokens that are not encoded."""
        return [n for n, span in enumerate(self.spans) if span.stop > length and n not in self._rows]

    def put(self, number: int, rows: Tensor) -> None:
        """(host) f32[rows, E] of an image."""
        self._rows[number] = rows

    @property
    def held_bytes(self) -> int:
        """Of encoded rows."""
        return sum(rows.nbytes for rows in self._rows.values())

    def drop(self, length: int) -> None:
        """`length` tokens have state: images before that are not needed any more."""
        for number in [n for n in self._rows if self.spans[n].stop <= length]:
            del self._rows[number]

    def rows(self, length: int, count: int) -> tuple[tuple[int, Tensor], ...]:
        """(place of its first row, rows) of what stands in `count` tokens behind `length`."""
        found = []
        for number, span in enumerate(self.spans):
            first, stop = max(span.first, length), min(span.stop, length + count)
            if first < stop:
                found.append((first - length, self._rows[number][first - span.first : stop - span.first]))
        return tuple(found)

    def positions(self, length: int, count: int) -> Any:
        """[axes][count] of the tokens behind `length`, of prompt or answer; None where they are the index."""
        axes, prompt = self._places.shape
        own = self._places[:, length : length + count]
        if not self.shift and (own == np.arange(length, length + own.shape[1])).all():
            return None
        behind = np.arange(max(length, prompt), max(length + count, prompt), dtype=np.int32) + self.shift
        return np.concatenate((own, np.tile(behind, (axes, 1))), axis=1)

    def held_positions(self, length: int, parents: Sequence[int]) -> Any:
        """[axes][rows] of held rows behind `length`, whose depth below the first their parents tell."""
        if not self.shift:
            return None
        depth: list[int] = []
        for parent in parents:
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        places = np.array(depth, np.int32) + (length + self.shift)
        return np.tile(places, (self._places.shape[0], 1))


class EncodingQueue:
    """Encodes the images of waiting requests, one request after the other, a slice at a time.

    What a request has left to encode is asked again when its turn comes: by then a cached prefix may have it,
    or another request the same image. `cached`: tokens of a request that a cached prefix would give.
    It is true while there is something to do now: see `AHEAD_BYTES`.
    """

    def __init__(
        self, encoders: Sequence[Any], names: Sequence[str], width: int, cached: Callable[[Seq], int]
    ) -> None:
        """width: of a row, as the target takes it."""
        self._encoders: Mapping[str, Encoder] = dict(zip(names, encoders, strict=True))
        self._width = width
        self._cached = cached
        self._queue: deque[Seq] = deque()
        self._work: Generator[None] | None = None
        self._known: WeakValueDictionary[tuple[str, bytes], Tensor] = WeakValueDictionary()
        """Rows that some request still has, by encoder and digest of the image."""
        self._ahead: dict[Seq, int] = {}
        """Bytes of encoded rows of requests that wait for a place."""
        self.encoded = 0
        """Images, since the engine began."""

    def __bool__(self) -> bool:
        return bool(self._queue) and (self._work is not None or sum(self._ahead.values()) < AHEAD_BYTES)

    def __contains__(self, seq: object) -> bool:
        return seq in self._queue

    def add(self, seq: Seq) -> None:
        """Encode what `seq` lacks before it is run."""
        if seq not in self._queue:
            self._queue.append(seq)
        self._ahead.pop(seq, None)  # what it has already must not keep it from getting the rest

    def problem(self, spans: Sequence[MediaSpan]) -> str | None:
        """Why these images cannot be encoded. Callers check before they submit."""
        for number, span in enumerate(spans):
            if span.media.encoder not in self._encoders:
                return f"Image {number} is for the encoder {span.media.encoder!r}, which this engine has not."
        return None

    def admitted(self, seq: Seq) -> None:
        """The request has its place."""
        self._ahead.pop(seq, None)

    def leave(self, seq: Seq) -> None:
        """The request is over."""
        self._ahead.pop(seq, None)
        if seq in self._queue:
            if self._queue[0] is seq and self._work is not None:
                self._work.close()
                self._work = None
            self._queue.remove(seq)

    def run(self, fail: Callable[[list[Seq], Exception], None]) -> None:
        """Encode for a slice. fail: ends requests whose images could not be encoded."""
        until = time.monotonic() + SLICE_S
        while self:
            seq = self._queue[0]
            try:
                if self._work is None:
                    self._work = self._encode(seq)
                next(self._work)
            except StopIteration:
                self._work = None
                self._queue.popleft()
                self._ahead[seq] = seq.media.held_bytes if seq.media else 0
            except Exception as error:  # noqa: BLE001 - the request boundary of the engine
                self._work = None
                fail([seq], error)
            if time.monotonic() >= until:
                return

    def _encode(self, seq: Seq) -> Generator[None]:
        media = seq.media
        if media is None:
            return
        lacking = media.lacking(self._cached(seq))
        total, done = sum(media.spans[number].media.rows for number in lacking), 0
        for number in lacking:
            item = media.spans[number].media
            rows = self._known.get((item.encoder, item.digest))
            if rows is None:
                rows = yield from self._encode_one(item)
            media.put(number, rows)
            done += item.rows
            seq.sink(Progress(seq.request.request, "encoding", done, total))
            yield

    def _encode_one(self, item: Media) -> Generator[None, None, Tensor]:
        """(host) f32[rows, E]."""
        with closing(self._encoders[item.encoder].encode((item,))) as work:
            for made in work:
                if made is not None:
                    rows = self._checked(made, item)
                    self._known[item.encoder, item.digest] = rows
                    self.encoded += 1
                    return rows
                yield
        raise PluginError(f"Encoder {item.encoder!r} made nothing of an image. Report it to its authors.")

    def _checked(self, made: Tensor, item: Media) -> Tensor:
        if tuple(made.shape) != (item.rows, self._width):
            raise PluginError(
                f"Encoder {item.encoder!r} made rows of the shape {list(made.shape)} of an image; wanted "
                f"{[item.rows, self._width]}. Report it to its authors."
            )
        rows = made.detach().to("cpu", torch.float32)
        if not torch.isfinite(rows).all():
            raise PluginError(f"Encoder {item.encoder!r} made numbers of an image that are not finite.")
        return rows
