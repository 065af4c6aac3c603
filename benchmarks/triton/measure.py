"""What the benchmarks of this folder share: medians, replayed graphs, the read ceiling, time by kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch


def median_s(run: Callable[[], object], repeats: int = 9) -> float:
    """Seconds of one run, the median of several after two for warmth."""
    times = []
    for place in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if place >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def graph_s(run: Callable[[], object]) -> float:
    """Seconds of one replay: `run` captures, so nothing in it may wait for the host."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_s(graph.replay)


def read_ceiling(device: torch.device) -> float:
    """Bytes per second of summing 4 GiB."""
    data = torch.randn(1 << 30, device=device)
    return data.numel() * 4 / median_s(data.sum)


def by_kernel(run: Callable[[], object], repeats: int = 5) -> dict[str, float]:
    """Seconds on the device per run, by kernel, largest first."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    found = {event.key: event.self_device_time_total / 1e6 / repeats for event in profile.key_averages()}
    return dict(sorted(((k, v) for k, v in found.items() if v > 0), key=lambda pair: -pair[1]))


def table(found: dict[str, float]) -> str:
    """One line: kernel and microseconds."""
    return ", ".join(f"{name[:24]} {took * 1e6:.1f}" for name, took in list(found.items())[:10])
