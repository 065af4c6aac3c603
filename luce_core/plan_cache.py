"""The cache's types in a plan: whether state goes into them, and smaller ones where a context needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from luce_core.cache.layout import misfits
from luce_core.contracts import StateLayout, StateSizes
from luce_core.option_fields import show_size
from luce_core.plan_fields import Fields

CACHE_TYPES = ("cache.k_type", "cache.v_type")
COMPACT = "q8_0"
"""What an asked context may turn an f16 cache into: the codec nearest to f16 (docs/cache-types.md)."""


def nobody_chose(fields: Fields) -> bool:
    """Whether both types are the core's own."""
    return all(fields.by_default(name) for name in CACHE_TYPES)


def as_asked(fields: Fields) -> None:
    """The types as the options say, unless somebody else has set them."""
    if nobody_chose(fields):
        for name in CACHE_TYPES:
            fields.reset(name)


def settle_types(fields: Fields, context: int, divide: Callable[[], tuple[int, list[str]]]) -> None:
    """Divide the memory, once more in smaller types where an asked context (0 = automatic) lacks some.

    divide: -> bytes that are missing, and what the state keeps that does not go into the types. Where the
    smaller ones do not help, those of the options stay.
    """
    as_asked(fields)
    short, _ = divide()
    if not (short and context and nobody_chose(fields)):
        return
    lacking = f"is short of {show_size(short)} in {fields.values[CACHE_TYPES[0]]}"
    for name in CACHE_TYPES:
        fields.decide(name, COMPACT, f"a context of {context} tokens {lacking}")
    short, wrong = divide()
    if short or wrong:
        as_asked(fields)
        divide()


def note_compact(fields: Fields) -> None:
    """Say so, where that is how it ended."""
    if nobody_chose(fields) and fields.values[CACHE_TYPES[0]] == COMPACT:
        fields.problem(
            f"Keys and values are kept in {COMPACT}: {fields.origin[CACHE_TYPES[0]].reason}.",
            "To keep them in f16, choose a smaller --ctx-size, or say so with --cache-type-k f16.",
            fatal=False,
        )


def check_cache(fields: Fields, layouts: Mapping[str, StateLayout]) -> None:
    """Report state that does not go into the types of the cache."""
    sizes: StateSizes = fields.values["state.sizes"]
    for owner, layout in layouts.items():
        if wrong := misfits(layout, sizes):
            fields.problem(
                f"The state of {owner} does not go into a cache of {sizes.k_type} and {sizes.v_type}: "
                f"{'; '.join(wrong)}.",
                "Choose another --cache-type-k or --cache-type-v.",
            )
