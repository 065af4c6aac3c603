"""What the block manager costs the decode path: microseconds of reserve, advance and tables per step.

    python benchmarks/cache_manager.py

No model and no tensor: a store that moves nothing. Prints one line per case.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

from luce_core.cache.manager import PagedBlockManager
from luce_core.contracts import Fence, Field, Group, Hit, Pages, Slot, StateLayout, StateSizes

FIELD = Field((1,), "f16")


class NullStore:
    """A `StateStore` of the right shape that keeps nothing."""

    def __init__(self, layouts: dict[str, StateLayout], blocks: int) -> None:
        self.groups = {f"{m}/{g.name}": g for m, lay in layouts.items() for g in lay.groups}
        self.has_slots = any(lay.slots for lay in layouts.values())
        self.slot_bytes = 1 << 20
        self.block_bytes = dict.fromkeys(self.groups, 1 << 19)
        self.sizes = StateSizes(32, dict.fromkeys(self.groups, blocks), 64, 16)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in {"copy_blocks", "write_blocks", "reset_slot", "copy_slot", "load_slot"}:
            return lambda *_: None
        if name in {"read_blocks", "save_slot"}:
            return lambda *_: b""
        raise AttributeError(name)


def layouts(*groups: Group, slots: bool = False) -> dict[str, StateLayout]:
    pages = tuple(Pages(g.name, g.name, 0, {"k": FIELD}) for g in groups)
    return {"m": StateLayout(groups, pages, (Slot("s", 0, FIELD, {}, "f"),) if slots else ())}


CASES = {
    "pages": layouts(Group("kv")),
    "pages+window": layouts(Group("kv"), Group("swa", window=1024)),
    "pages+stride 4+32+slots": layouts(
        Group("kv"), Group("c4", stride=4), Group("c32", stride=32), slots=True
    ),
}


def decode_us(case: dict[str, StateLayout], steps: int = 20_000) -> float:
    """Per decode step of one sequence: reserve, tables, advance."""
    manager = PagedBlockManager(NullStore(case, 2048), case, identity="x", cache_bytes=1 << 40)
    seq = manager.open([], Hit(0, None))
    begin = time.perf_counter()
    for step in range(steps):
        manager.reserve(seq, 1)
        manager.tables(seq)
        manager.advance(seq, (step,))
    return (time.perf_counter() - begin) / steps * 1e6


def prompt_ms(case: dict[str, StateLayout], tokens: int = 32_000) -> tuple[float, float, float]:
    """Prefill of a long prompt in chunks of 512; matching it; opening the hit."""
    manager = PagedBlockManager(NullStore(case, 4096), case, identity="x", cache_bytes=1 << 40)
    keys = list(range(tokens))
    begin = time.perf_counter()
    seq = manager.open(keys, Hit(0, None))
    for start in range(0, tokens, 512):
        chunk = keys[start : start + 512]
        assert manager.reserve(seq, len(chunk))
        manager.advance(seq, chunk)
    filled = time.perf_counter() - begin
    manager.checkpoint(seq)
    manager.close(seq, Fence(0))
    begin = time.perf_counter()
    hit = manager.match([*keys, 1])
    matched = time.perf_counter() - begin
    assert hit.length == tokens
    begin = time.perf_counter()
    manager.open([*keys, 1], hit)
    return filled * 1e3, matched * 1e3, (time.perf_counter() - begin) * 1e3


if __name__ == "__main__":
    print(f"Python {platform.python_version()}, {platform.machine()}, blocks of 32 tokens")
    for name, case in CASES.items():
        best = min(decode_us(case) for _ in range(5))
        filled, matched, opened = prompt_ms(case)
        print(
            f"{name:28} decode {best:5.2f} µs/step   32k-token prompt: fill {filled:.1f} ms, "
            f"match {matched:.1f} ms, open {opened:.1f} ms"
        )
