"""What a device's memory sustains, measured once on each kind of card when a model is first loaded on it."""

from __future__ import annotations

import logging
from functools import cache

import torch

from luce_backend_triton import devices

log = logging.getLogger(__name__)

MOST_BYTES = 2 << 30
SHARE = 8
"""Of the free memory, one part in so many is read."""
REPEATS = 5


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


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second, the best of a few sums over one large tensor."""
    free, _ = torch.cuda.mem_get_info(device)
    data = torch.ones(min(MOST_BYTES, free // SHARE) // 4, device=device)
    best = float("inf")
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        data.sum()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return data.numel() * 4 / best
