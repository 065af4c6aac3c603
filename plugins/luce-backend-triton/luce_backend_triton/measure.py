"""What a device's memory sustains, measured once on each kind of card when a model is first loaded on it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch

from luce_backend_triton import devices

log = logging.getLogger(__name__)

MOST_BYTES = 2 << 30
SHARE = 8
"""Of the free memory, one part in so many is read."""
REPEATS = 5
WIDTH = 4096
"""Of the product: 100 MiB with its result."""


@cache
def once(device: torch.device) -> None:
    """Measure a CUDA device whose kind has no figure yet; nothing for others."""
    if device.type != "cuda":
        return
    card = devices.cards()[device.index or 0]
    if card.key not in devices.read_measured():
        bytes_s = read_bandwidth(device)
        devices.keep_measured(card.key, bytes_s)
        log.info("%s reads %.0f GB/s", card.name, bytes_s / 1e9)
    if card.key not in devices.read_measured("products"):
        flops_s = product_rate(device)
        devices.keep_measured(card.key, flops_s, "products")
        log.info("%s multiplies at %.0f TFLOP/s", card.name, flops_s / 1e12)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second, the best of a few sums over one large tensor."""
    free, _ = torch.cuda.mem_get_info(device)
    data = torch.ones(min(MOST_BYTES, free // SHARE) // 4, device=device)
    return data.numel() * 4 / _best_s(data.sum)


def product_rate(device: torch.device) -> float:
    """Operations per second of one large product of halves, the best of a few; values are random, since
    zeros draw less power and run faster.
    """
    a, b = (torch.randn(WIDTH, WIDTH, device=device, dtype=torch.float16) for _ in range(2))
    return 2.0 * WIDTH**3 / _best_s(lambda: a @ b)


def _best_s(work: Callable[[], object]) -> float:
    """Seconds, by the device's clock."""
    best = float("inf")
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best
