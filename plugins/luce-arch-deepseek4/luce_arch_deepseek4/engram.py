"""N-gram tables of V4.1 (Engram): which of their rows a text names. Torch-free.

Files of early converters hold the tables alone; the constants of the hash follow from the vocabulary then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, islice
from math import isqrt

import numpy as np
from attrs import field, frozen

from luce_core.gguf import GgufHeader
from luce_core.model.metadata import MAX_WIDTH, bad_key
from luce_core.text.merging import mapped_bytes

ROWS_FROM = 16_000_000
"""No bucket of the published tables has fewer rows; theirs are the next primes."""
PAD_TOKEN = 2
MAX_NGRAM = 64
MAX_TABLE_ROWS = (1 << 31) - 1
INT64 = (1 << 63) - 1
ALONE = "\ue000"
"""Stands for a lone space, which stripping must not take away."""


@frozen
class EngramParams:
    """The tables, and the hash that leads into them: see `NgramSpec` of the core."""

    layers: tuple[int, ...]
    """Before whose attention a table is asked."""
    heads: int
    width: int
    """Of a row."""
    size: int
    """Tokens of the longest n-gram."""
    pad: int
    """Compressed id of "no token"."""
    compressed: tuple[int, ...] = field(repr=False)
    """By token."""
    multipliers: tuple[int, ...]
    """[tables, size], flat."""
    primes: tuple[int, ...]
    """[tables, size - 1, heads], flat, as `offsets`."""
    offsets: tuple[int, ...]

    @property
    def num_buckets(self) -> int:
        """Rows a token reads of a table."""
        return (self.size - 1) * self.heads

    def num_rows(self, place: int) -> int:
        """Rows of the table at this place of `layers`."""
        own = slice(place * self.num_buckets, (place + 1) * self.num_buckets)
        return max(map(sum, zip(self.primes[own], self.offsets[own], strict=True)))


def read_engram(header: GgufHeader, vocab: int, num_layers: int) -> EngramParams | None:
    """Keys `{a}.engram.*`, or what they would say. None: no layer asks a table."""
    layers = header.uints("{a}.engram.layer_ids", ())
    if not layers:
        return None
    if len(set(layers)) != len(layers) or max(layers) >= num_layers:
        wanted = f"different layers of the {num_layers}"
        raise bad_key(header, "{a}.engram.layer_ids", f"is {list(layers)}", wanted)
    heads = header.uint("{a}.engram.head_count", low=1, high=MAX_WIDTH)
    size = header.uint("{a}.engram.max_ngram_size", low=2, high=MAX_NGRAM)
    buckets = len(layers) * (size - 1) * heads
    compressed = _compressed(header, vocab)
    params = EngramParams(
        layers=layers,
        heads=heads,
        width=header.uint("{a}.engram.key_length", low=1, high=MAX_WIDTH),
        size=size,
        pad=header.uint("{a}.engram.pad_id", compressed[min(PAD_TOKEN, vocab - 1)]),
        compressed=compressed,
        multipliers=_counted(
            header, "{a}.engram.multipliers", len(layers) * size, _multipliers(layers, size, compressed)
        ),
        primes=(
            primes := _counted(header, "{a}.engram.primes", buckets, primes_from(ROWS_FROM, buckets), low=1)
        ),
        offsets=_counted(header, "{a}.engram.offsets", buckets, _offsets(primes, (size - 1) * heads)),
    )
    _check_sizes(header, params)
    return params


def _check_sizes(header: GgufHeader, params: EngramParams) -> None:
    """What is computed in 64 bits stays there, and row numbers fit 32."""
    largest = max(*params.compressed, params.pad) * max(params.multipliers)
    if largest > INT64:
        got = f"makes products of up to {largest}"
        raise bad_key(header, "{a}.engram.multipliers", got, "products with a compressed id below 2^63")
    for place in range(len(params.layers)):
        if (rows := params.num_rows(place)) > MAX_TABLE_ROWS:
            got = f"names row {rows - 1} of table {place}"
            raise bad_key(header, "{a}.engram.offsets", got, f"tables of at most {MAX_TABLE_ROWS} rows")


def _counted(
    header: GgufHeader, key: str, wanted: int, default: Iterable[int], *, low: int = 0
) -> tuple[int, ...]:
    if not header.has(key):
        return tuple(default)
    found = header.uints(key, low=low, high=INT64)
    if len(found) != wanted:
        raise bad_key(header, key, f"has {len(found)} elements", f"{wanted}, for all tables")
    return found


def _compressed(header: GgufHeader, vocab: int) -> tuple[int, ...]:
    key = "{a}.engram.token_map"
    if not header.has(key):
        return compressed_ids(header.strings("tokenizer.ggml.tokens"))
    found = header.uints(key)
    if len(found) < vocab:
        raise bad_key(header, key, f"has {len(found)} elements", f"one per token, {vocab}")
    return found[:vocab]


# --- what early files leave out


def primes_from(start: int, wanted: int) -> Iterable[int]:
    """The first so many primes from `start` (2 or more) on, one by one."""
    return islice((n for n in count(start) if all(n % d for d in range(2, isqrt(n) + 1))), wanted)


def _offsets(primes: Sequence[int], per_table: int) -> Iterable[int]:
    """Buckets of a table follow each other."""
    for at in range(0, len(primes), per_table):
        yield from np.cumsum([0, *primes[at : at + per_table - 1]]).tolist()


def _multipliers(layers: Sequence[int], size: int, compressed: Sequence[int]) -> Iterable[int]:
    """Odd and random by layer, so small that a product with a compressed id stays below 2^63."""
    bound = max(1, INT64 // (max(compressed) + 1) // 2)
    for layer in layers:
        drawn = np.random.default_rng(10007 * layer).integers(0, bound, size, dtype=np.int64)
        yield from (2 * drawn + 1).tolist()


def compressed_ids(tokens: Sequence[str]) -> tuple[int, ...]:
    """Ids by token, numbered as they first appear; tokens that read alike share one.

    Alike: in compatibility form, without accents, in lower case, with white space taken together and cut off.
    """
    from tokenizers import Regex, normalizers

    normal = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), ALONE),
            normalizers.Strip(),
            normalizers.Replace(ALONE, " "),
        ]
    )
    known: dict[str, int] = {}
    ids = []
    for token in tokens:
        text = mapped_bytes(token).decode("utf-8", "replace")
        # Part of a character stands for itself; what nothing is left of, too.
        key = token if "\ufffd" in text else normal.normalize_str(text) or text
        ids.append(known.setdefault(key, len(known)))
    return tuple(ids)
