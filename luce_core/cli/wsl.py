"""What is different under the Windows Subsystem for Linux, for `luce-core doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Level = Literal["ok", "note", "wrong"]
VERSION = Path("/proc/version")
LIBRARIES = Path("/usr/lib/wsl/lib")
"""Where Windows puts the libraries of its own driver."""
LINUX_DRIVER = Path("/usr/bin/nvidia-modprobe")
"""Part of every driver for Linux, and of nothing else."""


def generation(version: Path = VERSION) -> int:
    """1 or 2; 0 outside of it."""
    try:
        text = version.read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return 0
    return 0 if "microsoft" not in text else 2 if "wsl2" in text or "microsoft-standard" in text else 1


def has_driver(libraries: Path = LIBRARIES) -> bool:
    """Whether Windows lends its NVIDIA driver."""
    return (libraries / "libcuda.so.1").exists()


def hints(
    models: Path, version: Path = VERSION, libraries: Path = LIBRARIES, linux: Path = LINUX_DRIVER
) -> Iterator[tuple[Level, str, str]]:
    """(level, what was found, what to do). models: where model files lie."""
    number = generation(version)
    if not number:
        return
    if number == 1:
        yield (
            "note",
            "WSL 1, which has no GPUs and slow files",
            "In Windows: wsl --set-version DISTRIBUTION 2, with the name that wsl --list shows.",
        )
        return
    if linux.exists():
        yield (
            "wrong",
            f"WSL 2 with a driver for Linux ({linux}), which hides the one Windows lends",
            "Remove it (apt purge 'nvidia-driver-*' 'libnvidia-compute-*'); here only Windows has a driver.",
        )
    if has_driver(libraries):
        yield "ok", f"WSL 2 with the driver of Windows ({libraries / 'libcuda.so.1'})", ""
    else:
        yield (
            "note",
            f"WSL 2 without an NVIDIA driver of Windows (no {libraries / 'libcuda.so.1'})",
            "For an NVIDIA card install or update its driver in Windows, none here, then: wsl --shutdown.",
        )
    yield (
        "note",
        "WSL 2 lends Linux half of the memory of Windows, and pins less of it than Linux alone would",
        "For more, write [wsl2] and memory=24GB (what you can spare) into %UserProfile%\\.wslconfig, then: "
        "wsl --shutdown. If pinned memory runs out, lower --swap-bytes and --checkpoint-bytes.",
    )
    if models.is_relative_to("/mnt"):
        yield (
            "note",
            f"models lie on a drive of Windows ({models}), which is read slowly from here",
            "Keep them in Linux: LUCE_CACHE=~/models.",
        )
