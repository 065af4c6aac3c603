"""What every result carries: host, versions, commit, and the plan in short."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

import luce_core

if TYPE_CHECKING:
    from luce_core.contracts import BackendPlan
    from luce_core.gguf import GgufHeader
    from luce_core.registry import Registry

CPUINFO = Path("/proc/cpuinfo")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
SECRET = "--api-key"
BUSY_SHARE = 0.5
"""Load per processor from which a result comes with a warning."""
ROOT = Path(luce_core.__file__).parents[1]


@frozen
class Host:
    """Where and with what it was measured."""

    date: str
    """ISO 8601, UTC."""
    luce_core: str
    commit: str
    """Of the checkout it ran from, else the package's version."""
    python: str
    host_cpu: str
    host_cpus: int
    """Logical processors this process may use."""
    load: float | None
    """Load of the last minute when it began; None where the system does not say."""
    command: str = ""
    """What measured it, without keys."""

    @property
    def busy(self) -> str:
        """A sentence when others were running: then a figure is one of the crowd, too. Else nothing."""
        if self.load is None or self.load <= BUSY_SHARE * self.host_cpus:
            return ""
        return (
            f"This machine was busy when it began (load {self.load:.1f} on {self.host_cpus} processors): "
            "speeds are too low, and a ratio may say more about how threads wait than about how fast they "
            "compute."
        )


@frozen
class Subject:
    """What was measured."""

    model: str
    architecture: str
    quant: str
    """The block format most bytes are in."""
    parameters: int
    weight_bytes: int
    device: str
    device_name: str
    context: int
    k_type: str
    v_type: str
    chunk: int
    max_sequences: int
    threads: int
    op_layers: tuple[str, ...]
    drafters: tuple[str, ...]
    flash_attention: bool
    torch: str
    driver: str
    """Of the device; "" = it has none, or it is not known."""
    plugins: Mapping[str, str]
    """Distribution, or name without one -> version."""
    bandwidth: str
    """What the bound of answers stands on."""
    compute: str = ""
    """What that of prompts stands on."""


def host_facts(root: Path = ROOT) -> Host:
    """Of this process, now."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Host(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        luce_core=luce_core.__version__,
        commit=commit_of(root) or luce_core.__version__,
        python=platform.python_version(),
        host_cpu=cpu_name(),
        host_cpus=usable,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        command=command_line(sys.argv),
    )


def command_line(argv: Sequence[str]) -> str:
    """As a shell takes it; what follows --api-key is left out."""
    shown, hidden = [Path(argv[0]).name], False
    for word in argv[1:]:
        name, equals, _ = word.partition("=")
        shown.append("..." if hidden else f"{name}=..." if equals and name == SECRET else word)
        hidden = word == SECRET
    return shlex.join(shown)


def subject_facts(
    plan: BackendPlan, header: GgufHeader, registry: Registry, *, name: str, threads: int
) -> Subject:
    """Of the plan that runs."""
    import torch

    from luce_core.gguf import summarize
    from luce_core.plan_memory import prompt_bound, roofline
    from luce_core.registry import CORE

    target = plan.models[0]
    device = next(item for item in plan.devices if item.id == target.layer_device[0])
    line = roofline(plan, 0)
    bandwidth = f"{line.bandwidth_bytes_s / 1e9:.1f} GB/s of {line.device} ({line.provenance})"
    bound = prompt_bound(plan)
    compute = f"{bound.flops_s / 1e12:.0f} TFLOP/s of {bound.device} ({bound.provenance})"
    return Subject(
        model=name,
        architecture=target.spec.arch,
        quant=summarize(header).totals[0].format,
        parameters=target.spec.parameters,
        weight_bytes=target.spec.weight_bytes,
        device=device.id,
        device_name=device.name,
        context=plan.number("context"),
        k_type=str(plan.values["cache.k_type"]),
        v_type=str(plan.values["cache.v_type"]),
        chunk=plan.number("engine.row_budget"),
        max_sequences=plan.number("engine.max_sequences"),
        threads=threads,
        op_layers=target.op_layers,
        drafters=plan.parts["drafter"],
        flash_attention=has_fused_attention(registry, target.op_layers, plan.values["execution.ops_off"]),
        torch=torch.__version__,
        driver=driver_version(device.id),
        plugins={
            record.distribution or record.name: record.version
            for record in registry.loaded()
            if record.name != CORE
        },
        bandwidth=bandwidth if line.bandwidth_bytes_s > 0 else "",
        compute=compute if bound.flops_s > 0 else "",
    )


def has_fused_attention(registry: Registry, op_layers: Sequence[str], off: Sequence[str] = ()) -> bool:
    """Whether an op layer computes attention: the reference writes its scores out, the slow way."""
    from luce_core.op_layers import without

    layers = [without(registry.op_layer(name).value, off) for name in op_layers]
    return any(impl.op == "attention" for layer in layers for impl in layer.ops)


@frozen
class Device:
    """What scripts measure on that plan nothing."""

    device: str
    device_name: str
    driver: str
    torch: str
    cuda: str
    """What torch was built for; "" = no GPU."""
    triton: str
    """"" = it is not installed."""


def device_facts(device: str) -> Device:
    """Of a device as torch names it."""
    import torch

    on_gpu = device.partition(":")[0] == "cuda"
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return Device(
        device=device,
        device_name=torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        driver=driver_version(device),
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        triton=triton,
    )


def driver_version(device: str, told: Path = NVIDIA_DRIVER) -> str:
    """Of the NVIDIA driver, as the kernel has it, else as nvidia-smi says (under WSL)."""
    if device.partition(":")[0] != "cuda":
        return ""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", told.read_text()) if told.is_file() else None
    if found:
        return found[0]
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # there is none
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def commit_of(root: Path) -> str | None:
    """The commit of the checkout at `root`, and whether files differ from it; None where there is none."""
    if not (root / ".git").exists():  # an environment inside some other checkout is not one of ours
        return None

    def git(*words: str) -> str | None:
        try:
            command = ["git", "-C", str(root), *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:  # no git here
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short=10", "HEAD")
    if commit is None:
        return None
    return commit + (" with changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """The processor in words."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def peak_rss_bytes() -> int:
    """The most this process ever held, loading included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def peak_device_bytes(device: str) -> int | None:
    """The most torch ever held on the device; None for a device whose memory is the host's."""
    if device.partition(":")[0] != "cuda":
        return None
    import torch

    return int(torch.cuda.max_memory_allocated(device))


def gpu_uuid(device: str) -> str | None:
    """The UUID NVML knows the device by; None for a device that is no GPU of CUDA's."""
    if device.partition(":")[0] != "cuda":
        return None
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
