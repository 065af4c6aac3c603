"""CUDA C++ compiled at run time: NVRTC and the driver through ctypes, so that no compiler need be installed.

NVRTC comes with torch's CUDA wheels. Compiled modules are kept under `~/.cache/luce-core/triton`, named by a
hash of source, definitions, architecture and compiler. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from luce_core.errors import EngineError

SOURCES = Path(__file__).parent / "csrc"


def cache_folder() -> Path:
    """Where compiled modules and measurements are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "luce-core" / "triton"


def nvrtc_paths() -> list[str]:
    """Where libnvrtc may be: wheels, the newest first, a CUDA toolkit, the loader's path."""
    folders = [Path(entry or ".") for entry in sys.path]
    found = [str(path) for folder in folders for path in folder.glob("nvidia/*/lib/libnvrtc.so.*[0-9]")]
    found.sort(key=lambda path: int(path.rpartition(".")[2]), reverse=True)
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home:
            found += sorted(map(str, Path(home).glob("lib64/libnvrtc.so.*[0-9]")), reverse=True)
    if name := ctypes.util.find_library("nvrtc"):
        found.append(name)
    return [path for path in found if "builtins" not in path and ".alt." not in path]


@cache
def _opened(path: str) -> tuple[ctypes.CDLL, int, frozenset[str]] | None:
    """The library, its major version and the numbers of the architectures it compiles for; None where it does
    not open. What it opens by name when it compiles lies beside it, where not every version of it looks.
    """
    try:
        for beside in Path(path).parent.glob("libnvrtc-builtins.so.*") if "/" in path else ():
            ctypes.CDLL(str(beside), mode=ctypes.RTLD_GLOBAL)
        lib = ctypes.CDLL(path)
    except OSError:
        return None
    count = ctypes.c_int()
    lib.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    lib.nvrtcGetSupportedArchs(archs)
    return lib, _version(lib)[0], frozenset(map(str, archs))


def _version(lib: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@cache
def nvrtc(arch: str = "") -> ctypes.CDLL | None:
    """The first compiler that knows `arch` ("sm_90", "compute_75"; "" = any) and is no newer than the driver,
    which would not load what it makes; without such a one, any that knows it. None: there is none.
    """
    number = arch.partition("_")[2]
    opened = [one for one in map(_opened, nvrtc_paths()) if one and (not number or number in one[2])]
    fitting = [lib for lib, major, _ in opened if major <= driver_major()]
    return next(iter([*fitting, *(lib for lib, *_ in opened)]), None)


def compiler_version(arch: str = "") -> str:
    """Of the compiler for `arch`, for the cache's key and the banner; "" without one."""
    lib = nvrtc(arch)
    if lib is None:
        return ""
    return "{}.{}".format(*_version(lib))


def package(arch: str) -> str:
    """The wheel with a compiler for `arch`: CUDA 13 begins with 7.5."""
    return "nvidia-cuda-nvrtc-cu12" if int(arch.partition("_")[2]) < 75 else "nvidia-cuda-nvrtc"


def compile_cuda(source: str, name: str, arch: str, defines: Mapping[str, int]) -> bytes:
    """-> a cubin for `arch` "sm_90", PTX for "compute_90". Raises EngineError with the compiler's log."""
    lib = nvrtc(arch)
    if lib is None:
        raise EngineError(
            f"No CUDA compiler for {arch}: no libnvrtc that knows it was found beside torch or in a CUDA "
            f"toolkit. Install the wheel {package(arch)}, or set CUDA_HOME to a toolkit."
        )
    program = ctypes.c_void_p()
    args = (source.encode(), f"{name}.cu".encode(), 0, None, None)
    if status := lib.nvrtcCreateProgram(ctypes.byref(program), *args):
        raise EngineError(f"NVRTC refused {name!r} with status {status}.")
    try:
        options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{k}={v}" for k, v in defines.items())]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if lib.nvrtcCompileProgram(program, len(options), array):
            log = _text(lib, "ProgramLog", program).decode(errors="replace").strip("\0\n")
            raise EngineError(f"Kernel {name!r} does not compile for {arch} with {dict(defines)}:\n{log}")
        return _text(lib, "CUBIN" if arch.startswith("sm_") else "PTX", program)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _text(lib: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def parts(*names: str) -> list[str]:
    """Files of `csrc` that make one source: common.cuh, then those of the names, NAME.cu or as they are."""
    return ["common.cuh", *(name if "." in name else f"{name}.cu" for name in names)]


def cubin(name: str, arch: str, defines: Mapping[str, int], after: str = "") -> bytes:
    """The compiled module of `csrc/NAME.cu` behind `common.cuh` and those of `after`, from the cache or
    made now.
    """
    source = "".join((SOURCES / part).read_text() for part in parts(*after.split(), name))
    key = "\n".join((source, arch, compiler_version(arch), repr(sorted(defines.items()))))
    path = cache_folder() / f"{name}-{arch}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"
    if path.is_file():
        return path.read_bytes()
    made = compile_cuda(source, name, arch, defines)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(made)
    Path(file.name).replace(path)
    return made


# --- the driver


@lru_cache(maxsize=1)
def driver() -> ctypes.CDLL | None:
    """libcuda, initialized; None without a usable driver."""
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if lib.cuInit(0) else lib


def driver_major() -> int:
    """Of the newest CUDA whose code the driver loads; without a driver, more than there is."""
    lib, version = driver(), ctypes.c_int()
    if lib is None:
        return sys.maxsize
    check(lib, lib.cuDriverGetVersion(ctypes.byref(version)), "Asking the driver for its version")
    return version.value // 1000


def check(lib: ctypes.CDLL, status: int, what: str) -> None:
    """Raise EngineError with the driver's words when `status` says failure."""
    if status:
        words = ctypes.c_char_p()
        lib.cuGetErrorString(status, ctypes.byref(words))
        why = (words.value or b"unknown").decode()
        raise EngineError(f"{what} failed with CUDA status {status} ({why}).")


MAX_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
STATIC_SHARED = 1 << 10
"""Left for what kernels declare themselves."""


class Kernel:
    """One compiled function, loaded into the current context.

    most_shared: bytes of shared memory a thread block may have on this device; overlaps: whether the
    kernel knows how to wait for the launch in front of it.
    """

    def __init__(self, image: bytes, function: str, most_shared: int, overlaps: bool) -> None:
        lib = driver()
        if lib is None:
            raise EngineError("The CUDA driver is not usable: libcuda.so.1 is missing or finds no device.")
        self._lib = lib
        self._overlaps = int(overlaps)
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        check(lib, lib.cuModuleLoadData(ctypes.byref(self._module), image), f"Loading kernel {function!r}")
        found = lib.cuModuleGetFunction(ctypes.byref(self._function), self._module, function.encode())
        check(lib, found, f"Finding kernel {function!r}")
        status = lib.cuFuncSetAttribute(self._function, MAX_SHARED, most_shared - STATIC_SHARED)
        check(
            lib, status, f"Asking for {most_shared - STATIC_SHARED} bytes of shared memory for {function!r}"
        )

    def launch(
        self, grid: Sequence[int], threads: int, shared_bytes: int, stream: int, args: Sequence[Any]
    ) -> None:
        """Launch with `args`, ctypes values in the order of the kernel's parameters.

        On sm_90 and newer it may start before the launch in front of it has ended, and waits for that one's
        results where it needs them.
        """
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(arg) for arg in args))
        config = _Config(*grid, threads, 1, 1, shared_bytes, stream, ctypes.pointer(_OVERLAP), self._overlaps)
        status = self._lib.cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        if status:
            check(self._lib, status, f"Launching a kernel with {shared_bytes} bytes of shared memory")


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


PROGRAMMATIC_STREAM_SERIALIZATION = 6
_OVERLAP = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1, b"")
