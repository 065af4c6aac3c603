"""What a person wants to see of a header: `luce-core inspect`."""

from __future__ import annotations

from collections import Counter
from typing import Final

import attrs
import numpy as np

from luce_core.gguf.header import GgufHeader
from luce_core.gguf.values import MetaValue, StringArray, describe_array

SHOWN_ELEMENTS: Final = 6
SHOWN_CHARS: Final = 100


@attrs.frozen
class MetadataRow:
    """kind: `string`, `integer`, `3 float32 values`, ...; text: the value, escaped and cut to a line."""

    key: str
    kind: str
    text: str


@attrs.frozen
class TensorRow:
    name: str
    format: str
    shape: tuple[int, ...]
    num_bytes: int
    shard: int


@attrs.frozen
class FormatTotal:
    """All tensors of one format together."""

    format: str
    num_tensors: int
    num_weights: int
    num_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / self.num_weights


@attrs.frozen
class Summary:
    """totals: the format with most bytes first. num_weights: the parameter count, over all tensors."""

    metadata: tuple[MetadataRow, ...]
    tensors: tuple[TensorRow, ...]
    totals: tuple[FormatTotal, ...]
    num_weights: int
    num_bytes: int
    num_shards: int


def summarize(header: GgufHeader) -> Summary:
    """Rows in file order; nothing in them is long or able to control a terminal."""
    infos = tuple(header.tensors.values())
    tensors, weights, sizes = Counter[str](), Counter[str](), Counter[str]()
    for info in infos:
        tensors[info.format.name] += 1
        weights[info.format.name] += info.num_weights
        sizes[info.format.name] += info.num_bytes
    return Summary(
        metadata=tuple(MetadataRow(_plain(key), _kind(v), _text(v)) for key, v in header.metadata.items()),
        tensors=tuple(TensorRow(_plain(i.name), i.format.name, i.shape, i.num_bytes, i.shard) for i in infos),
        totals=tuple(FormatTotal(name, tensors[name], weights[name], n) for name, n in sizes.most_common()),
        num_weights=weights.total(),
        num_bytes=sizes.total(),
        num_shards=len(header.shards),
    )


def _kind(value: MetaValue) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return describe_array(value)


def _text(value: MetaValue) -> str:
    if isinstance(value, str):
        return _plain(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, StringArray):
        parts = [repr(_plain(element)) for element in value[:SHOWN_ELEMENTS]]
    elif isinstance(value, np.ndarray):
        parts = [str(element) for element in value[:SHOWN_ELEMENTS].tolist()]
    else:
        parts = [_text(element) for element in value[:SHOWN_ELEMENTS]]
    more = ["..."] if len(value) > SHOWN_ELEMENTS else []
    return _cut(f"[{', '.join(parts + more)}]")


def _plain(text: str) -> str:
    """On one line, control characters escaped."""
    return _cut("".join(char if char.isprintable() else repr(char)[1:-1] for char in text[: SHOWN_CHARS + 1]))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
