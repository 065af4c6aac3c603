"""Joules from NVML's total energy counter, with the idle power taken off."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

IDLE_S = 2.0
"""How long the idle power is watched: many updates of the counter, which come every few ms to 100 ms."""


@frozen
class Energy:
    """What a stretch of work took."""

    gross_j: float
    seconds: float
    idle_w: float
    """Power before anything was loaded or asked for."""

    @property
    def net_j(self) -> float:
        """Without what the device would have taken anyway."""
        return self.gross_j - self.idle_w * self.seconds

    def per_token(self, tokens: int) -> float:
        """Net joules per token."""
        return self.net_j / tokens

    def __add__(self, other: Energy) -> Energy:
        return Energy(self.gross_j + other.gross_j, self.seconds + other.seconds, self.idle_w)


@frozen
class Absent:
    """Why there is no energy to report."""

    reason: str


class Meter:
    """The counters of some GPUs together. `start` and `stop` around work."""

    def __init__(self, nvml: Any, handles: Sequence[Any], clock: Callable[[], float]) -> None:
        self._nvml = nvml
        self._handles = tuple(handles)
        self._clock = clock
        self._began = (0.0, 0.0)
        self.idle_w = 0.0

    def joules(self) -> float:
        """Since the driver was loaded; the counter is in millijoules."""
        counters = (self._nvml.nvmlDeviceGetTotalEnergyConsumption(item) for item in self._handles)
        return float(sum(counters)) / 1e3

    def watch_idle(self, sleep: Callable[[float], None] = time.sleep, seconds: float = IDLE_S) -> None:
        """Measure the idle power; nothing may be running."""
        self.start()
        sleep(seconds)
        watched = self.stop()
        self.idle_w = watched.gross_j / watched.seconds

    def start(self) -> None:
        """From here on."""
        self._began = (self._clock(), self.joules())

    def stop(self) -> Energy:
        """Up to here."""
        began_s, began_j = self._began
        return Energy(self.joules() - began_j, self._clock() - began_s, self.idle_w)


def load_nvml() -> Any:
    """NVML's Python module. ImportError without the extra."""
    import pynvml

    return pynvml


def open_meter(
    load: Callable[[], Any] = load_nvml,
    uuid: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Meter | Absent:
    """The GPU of that UUID, or all there are. Absent, with the reason, when nothing can be counted."""
    try:
        nvml = load()
    except ImportError:
        return Absent("NVML's Python module is not installed; pip install 'luce-core[energy]'")
    try:
        nvml.nvmlInit()
        if uuid is not None:
            handles = [nvml.nvmlDeviceGetHandleByUUID(uuid)]
        else:
            handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        meter = Meter(nvml, handles, clock)
        meter.joules()
    except nvml.NVMLError as error:
        return Absent(f"NVML says: {error}")
    return meter if handles else Absent("NVML sees no GPU")
