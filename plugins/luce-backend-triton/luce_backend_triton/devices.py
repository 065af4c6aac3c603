"""Which CUDA devices there are, through the driver alone: no context is made, torch is not imported."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from attrs import frozen

from luce_backend_triton import nvrtc

MULTIPROCESSORS, CLOCK_KHZ, BUS_BITS, MAJOR, MINOR = 16, 36, 37, 75, 76
"""CUdevice_attribute."""
SUSTAINED = 0.89
"""Of the data sheet's bandwidth, what a read sustains: 4381 of 4917 GB/s on an H200."""
PLANNED_BYTES = 24 << 30
"""Memory of a card that is only planned for."""
MEASURED = {"bandwidth": "bandwidth.json", "products": "products.json"}
"""What is measured -> its file: card key -> bytes, or operations, per second."""


@frozen
class Card:
    """One CUDA device."""

    index: int
    name: str
    memory_bytes: int
    multiprocessors: int
    capability: tuple[int, int]
    sheet_bytes_s: float
    """Memory clock times bus width; 0 where the driver does not say."""

    @property
    def key(self) -> str:
        """Under which a measurement is kept: cards of one kind are alike."""
        return f"{self.name}, {self.memory_bytes >> 30} GiB"


@lru_cache(maxsize=1)
def cards() -> tuple[Card, ...]:
    """Every device the driver lists, empty without a driver; `CUDA_VISIBLE_DEVICES` counts."""
    lib = nvrtc.driver()
    if lib is None:
        return ()
    count = ctypes.c_int()
    nvrtc.check(lib, lib.cuDeviceGetCount(ctypes.byref(count)), "Counting CUDA devices")
    return tuple(_card(lib, index) for index in range(count.value))


def _card(lib: ctypes.CDLL, index: int) -> Card:
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    nvrtc.check(lib, lib.cuDeviceGet(ctypes.byref(device), index), f"Opening CUDA device {index}")
    nvrtc.check(lib, lib.cuDeviceGetName(name, len(name), device), f"Naming CUDA device {index}")
    nvrtc.check(lib, lib.cuDeviceTotalMem_v2(ctypes.byref(memory), device), f"Sizing CUDA device {index}")

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        status = lib.cuDeviceGetAttribute(ctypes.byref(value), which, device)
        nvrtc.check(lib, status, f"Asking CUDA device {index} for attribute {which}")
        return value.value

    return Card(
        index=index,
        name=name.value.decode(errors="replace"),
        memory_bytes=memory.value,
        multiprocessors=attribute(MULTIPROCESSORS),
        capability=(attribute(MAJOR), attribute(MINOR)),
        sheet_bytes_s=2 * attribute(CLOCK_KHZ) * 1e3 * attribute(BUS_BITS) / 8,
    )


def bandwidth(card: Card, measured: Mapping[str, float]) -> tuple[float, str]:
    """Bytes per second a read sustains, and where the figure comes from."""
    if card.key in measured:
        return measured[card.key], "measured here: torch summing one large tensor"
    if card.sheet_bytes_s > 0:
        share = f"{SUSTAINED:.0%} of memory clock × bus width"
        return SUSTAINED * card.sheet_bytes_s, f"{share}; measured when a model is first loaded on it"
    return 0.0, "unknown until a model is first loaded on it: the driver names no memory clock"


def measured_path(what: str = "bandwidth") -> Path:
    """Where measurements are kept."""
    return nvrtc.cache_folder() / MEASURED[what]


def read_measured(what: str = "bandwidth") -> dict[str, float]:
    """Card key -> bytes, or operations, per second; empty when nothing was measured yet."""
    path = measured_path(what)
    return json.loads(path.read_text()) if path.is_file() else {}


def keep_measured(key: str, per_s: float, what: str = "bandwidth") -> None:
    """Remember one measurement."""
    path = measured_path(what)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**read_measured(what), key: per_s}, indent=1, sort_keys=True)
    scratch = path.with_suffix(".new")
    scratch.write_text(text)
    scratch.replace(path)
