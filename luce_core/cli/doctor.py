"""`luce-core doctor`: what is wrong with this rig, and the fix."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import click
from attrs import frozen

from luce_core.catalog import cache_folder
from luce_core.cli import wsl
from luce_core.cli.console import console, print_json, say, table
from luce_core.cli.self_checks import SelfCheck, side_by_side
from luce_core.cli.session import Session
from luce_core.cli.wsl import Level
from luce_core.contracts import KernelCheck
from luce_core.errors import LuceError
from luce_core.option_fields import show_size
from luce_core.options import Options

LOW_MEMORY_BYTES = 2 * 2**30
"""Less than this free and even a small model will swap."""
LOW_DISK_BYTES = 2**30
AT_ONCE = 6
"""Self-checks of op layers, at most: each has a context on its device, about 500 MB there and here."""
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@frozen
class Finding:
    """One thing that was looked at. `fix` is empty when there is nothing to do."""

    level: Level
    subject: str
    text: str
    fix: str = ""


def make(session: Session) -> click.Command:
    """The command."""

    @click.command("doctor", help="Look at Python, torch, plugins, devices, options, disk and port, and say "
                   "what is wrong and how to fix it. The exit status is 1 if anything is.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @click.option("--kernels", is_flag=True, help="Run every kernel of the op layers beside the reference.")
    def doctor(as_json: bool, kernels: bool) -> int:
        findings = examine(session)
        checked = examine_kernels(session) if kernels else iter(())
        if as_json:
            findings += checked
            print_json([{**_as_data(finding)} for finding in findings])
            return int(any(finding.level == "wrong" for finding in findings))
        rows = [(finding.level, finding.subject, finding.text) for finding in findings]
        console().print(table(["", "what", "found"], rows))
        for finding in checked:  # minutes may go by between the first and the last
            line = f"{finding.level:<7} {finding.subject}: {finding.text}"
            console().print(line, markup=False, soft_wrap=True)
            findings.append(finding)
        wrong = [finding for finding in findings if finding.level == "wrong"]
        for finding in findings:
            if finding.fix:
                say(f"{finding.subject}: {finding.fix}")
        say(f"{len(wrong)} things are wrong." if wrong else "Nothing is wrong.")
        return int(bool(wrong))

    return doctor


def _as_data(finding: Finding) -> dict[str, str]:
    return {
        "level": finding.level, "subject": finding.subject, "text": finding.text, "fix": finding.fix
    }


def examine(session: Session) -> list[Finding]:
    """Every check but those of kernels. An error of ours in one of them is a finding, not the end."""
    checks = (_python, _torch, _options, _plugins, _devices, _wsl, _memory, _models, _tools)
    return [finding for check in checks for finding in _findings(check, session)]


def examine_kernels(session: Session) -> Iterator[Finding]:
    """Every kernel of the op layers, as each is done."""
    return _findings(_kernels, session)


def _findings(check: Callable[[Session], Iterator[Finding]], session: Session) -> Iterator[Finding]:
    try:
        yield from check(session)
    except LuceError as error:
        yield Finding("wrong", check.__name__.strip("_"), str(error), "Correct this first.")


def _python(session: Session) -> Iterator[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if sys.prefix == sys.base_prefix:
        yield Finding("note", "python", f"{version}, outside a virtual environment",
                      "Plugins are ordinary packages: keep them in a virtual environment of their own.")
    else:
        yield Finding("ok", "python", f"{version} in {sys.prefix}")


def _torch(session: Session) -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library it needs is missing
        yield Finding("wrong", "torch", f"cannot be imported: {error}", "pip install --force-reinstall torch")
        return
    yield Finding("ok", "torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    driver = NVIDIA_DRIVER.exists() or (wsl.generation() == 2 and wsl.has_driver())
    if driver and torch.version.cuda is None:
        yield Finding("wrong", "torch", "there is an NVIDIA driver, but torch was built for the CPU only",
                      "Install the CUDA build of torch; its own site has the command for each driver.")
    elif torch.version.cuda is not None and driver and not torch.cuda.is_available():
        yield Finding("wrong", "torch", f"built for CUDA {torch.version.cuda}, but it sees no device",
                      "Run nvidia-smi: the driver is too old for this torch, or this user may not use it.")
    if session.env.get("OMP_NUM_THREADS") == "1":
        yield Finding("note", "threads", "OMP_NUM_THREADS=1 holds torch to one thread", "Unset it.")


def _options(session: Session) -> Iterator[Finding]:
    options = session.given
    files = ", ".join(str(path) for path in session.files)
    yield Finding("ok", "options", f"config files: {files or 'none'}")
    yield _port(options)


def _port(options: Options) -> Finding:
    host, port = options.core.host, options.core.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return Finding("wrong", "port", f"{host}:{port} cannot be listened on: {error.strerror}",
                           "Stop what uses it, or serve with another --port.")
    return Finding("ok", "port", f"{host}:{port} is free")


def _plugins(session: Session) -> Iterator[Finding]:
    registry = session.registry
    yield Finding("ok", "plugins", ", ".join(record.name for record in registry.loaded()))
    for record in registry.records:
        if record.status != "loaded":
            level: Level = "note" if record.status == "blocked" else "wrong"
            fix = "" if level == "note" else f"Repair or remove it: pip uninstall {record.distribution}"
            yield Finding(level, "plugins", f"{record.title} is {record.status}: {record.reason}", fix)
    for problem in registry.problems:
        yield Finding("wrong", "plugins", problem.message, problem.fix)
    if not registry.names("arch"):
        yield Finding("wrong", "plugins", "no installed plugin provides a model architecture",
                      "Install one: packages are called luce-arch-FAMILY.")


def _devices(session: Session) -> Iterator[Finding]:
    try:
        options = session.given.plugins
    except LuceError:  # said by the check of the options
        options = {}
    found, problems = session.registry.find_devices(options)
    for problem in problems:
        yield Finding("wrong", "devices", problem.message, problem.fix)
    for item in found:
        device = item.value
        yield Finding("ok", "devices", f"{device.id}: {device.name}, {show_size(device.memory_bytes)}")
    if not found:
        yield Finding("wrong", "devices", "no device to run on", session.registry.missing_for("device.cpu"))


def _kernels(session: Session) -> Iterator[Finding]:
    """Every op layer that checks itself, on every device it runs on."""
    registry, options = session.registry, session.given
    layers = [registry.op_layer(name) for name in registry.names("ops")]
    checks = [
        SelfCheck(layer.value, run, registry.title(layer.plugin), device.value, options.plugin(layer.plugin))
        for device in registry.find_devices(options.plugins)[0]
        for layer in layers
        if layer.value.features <= device.value.features
        for run in layer.value.self_checks
    ]
    from luce_core.compose import physical_cores

    said = set()
    for check, found in side_by_side(checks, min(physical_cores(), AT_ONCE)):
        if isinstance(found, str):
            if found not in said:  # what keeps a layer from being made ready is the same for all its checks
                yield Finding("wrong", "kernels", found, "Correct this first.")
            said.add(found)
        else:
            subject = f"{check.device.id} {check.layer.name}"
            yield _kernel_finding(subject, found, options.core.ops_off)
    if not checks:
        yield Finding("note", "kernels", "no op layer that runs here checks itself")


def _kernel_finding(subject: str, check: KernelCheck, off: Collection[str]) -> Finding:
    """off: ops that are switched off already, which no answer is made with."""
    text = f"{check.what}: relative error {check.error:.1e}, allowed {check.allowed:.0e}"
    if check.error <= check.allowed:
        return Finding("ok", subject, text)
    if check.ops and all(op in off for op in check.ops):
        return Finding("note", subject, f"{text}; {', '.join(check.ops)} switched off, so nothing uses it")
    avoid = check.off or " ".join(f"--ops-off {op}" for op in check.ops) or "--op-layer none"
    fix = f"{check.what}: answers made with it are wrong here. Run without it: {avoid}. And report it."
    return Finding("wrong", subject, text, fix)


def _wsl(session: Session) -> Iterator[Finding]:
    for level, text, fix in wsl.hints(_model_folder(session)):
        yield Finding(level, "wsl", text, fix)


def _memory(session: Session) -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{show_size(memory.available)} of {show_size(memory.total)} free"
    if memory.available < LOW_MEMORY_BYTES:
        yield Finding("note", "memory", text, "Close something large: a swapped-out model is very slow.")
    else:
        yield Finding("ok", "memory", text)


def _models(session: Session) -> Iterator[Finding]:
    folder = _model_folder(session)
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        yield Finding("wrong", "models", f"{folder} cannot be written", "Set LUCE_CACHE to another folder.")
    elif free < LOW_DISK_BYTES:
        yield Finding("note", "models", f"{show_size(free)} free under {folder}", "Free some room.")
    else:
        yield Finding("ok", "models", f"{show_size(free)} free under {folder}")
    for part in sorted(folder.glob(".pull/*/model.part")):
        name = part.parent.name.rpartition("-")[0]
        yield Finding("note", "models", f"the pull of {name} is unfinished", f"luce-core pull {name}")


def _model_folder(session: Session) -> Path:
    try:
        return session.store(session.given).root
    except LuceError:  # said by the check of the options
        return cache_folder(session.env)


def _tools(session: Session) -> Iterator[Finding]:
    if importlib.util.find_spec("pip") is None:
        yield Finding("note", "pip", "missing here, so 'luce-core pull' cannot fetch packages",
                      f"{sys.executable} -m ensurepip")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        yield Finding("note", "compiler", "no C compiler; plugins that compile kernels take slower ways",
                      "On Debian and Ubuntu: apt install gcc")
    else:
        yield Finding("ok", "compiler", compiler)
