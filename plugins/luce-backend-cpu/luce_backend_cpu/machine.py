"""What this machine is: its processor's features, cores, memory and read bandwidth. Imports no torch."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import psutil

FEATURES = {
    "avx2": "avx2",
    "avx512f": "avx512f",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx_vnni": "avx_vnni",
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
    "asimd": "neon",
    "asimddp": "dotprod",
}
"""Flag of the kernel -> feature tag of the device."""

PROBE_BYTES = 32 << 20
"""Read per thread to measure bandwidth: beyond the caches of small processors, a few milliseconds."""
PROBE_THREADS = 16
"""More readers than that do not raise the figure on the machines this is for."""


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Instruction set extensions, by the kernel's names; empty where the system does not list them."""
    return frozenset(_cpuinfo("flags", "Features").split())


def cpu_name() -> str:
    """The processor in words."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(*keys: str) -> str:
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return ""
    for line in path.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def usable_cpus() -> int:
    """Logical processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_cores() -> int:
    """Cores this process may use, hyper-threads not counted twice."""
    return max(1, min(psutil.cpu_count(logical=False) or usable_cpus(), usable_cpus()))


def features(flags: Iterable[str]) -> frozenset[str]:
    """Feature tags of the device."""
    return frozenset({"cpu", *(FEATURES[flag] for flag in flags if flag in FEATURES)})


@lru_cache(maxsize=1)
def read_bandwidth() -> float:
    """Bytes per second all cores read together, best of three passes over fresh memory."""
    threads = min(physical_cores(), PROBE_THREADS)
    blocks = [np.ones(PROBE_BYTES // 8, np.int64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        best = min(_timed(pool, blocks) for _ in range(3))
    return threads * PROBE_BYTES / best


def _timed(pool: ThreadPoolExecutor, blocks: list[np.ndarray]) -> float:
    start = time.perf_counter()
    list(pool.map(np.max, blocks))
    return time.perf_counter() - start
