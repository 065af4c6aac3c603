"""Toy header -> ModelSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from luce_core.contracts import CacheOptions, Field, Group, ModelSpec, Pages, Slot, StateLayout

if TYPE_CHECKING:
    from luce_core.gguf import GgufHeader


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Everything a toy sequence remembers, by what the file asks for."""
    vocab = len(header.strings("tokenizer.ggml.tokens"))
    window = header.uint("toy.window", 0)
    entry = {"k": Field((1, 1), "f32"), "v": Field((1, 1), "f32")}
    token = {"token": Field((1,), "i64")}
    slots = (
        Slot("rolled", 0, Field((1,), "i64"), token, fold="toy.fold"),
        Slot("newest", 0, Field((2, 1), "f32"), {"row": Field((1,), "f32")}, fold="shift"),
    )
    info = header.tensor("toy.weight", (8, 8))
    return ModelSpec(
        arch="toy",
        identity=f"toy-{header.uint('toy.salt')}-{window}-{header.bool('toy.slots')}",
        num_layers=1,
        hidden=4,
        vocab=vocab,
        context=header.uint("toy.context_length", low=1),
        position_axes=1,
        tap_width=4,
        final_width=4,
        layout=StateLayout(
            groups=(Group("tokens", window=window or None),),
            pages=(Pages("tokens", "tokens", 0, entry),),
            slots=slots if header.bool("toy.slots") else (),
        ),
        nextn_layout=_nextn_layout(window) if header.bool("toy.nextn", False) else None,
        tree="any",
        tokens={},
        parameters=64,
        weight_bytes=info.num_bytes,
        active_bytes=info.num_bytes,
        details={"salt": header.uint("toy.salt"), "window": window},
    )


def _nextn_layout(window: int) -> StateLayout:
    """Of the MTP block: every token, its place, and the final of the token before it."""
    entry = {"k": Field((1, 1), "f32"), "v": Field((1, 5), "f32")}
    return StateLayout((Group("tokens", window=window or None),), (Pages("nextn", "tokens", 1, entry),))
