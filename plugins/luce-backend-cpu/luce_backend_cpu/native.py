"""The compiled library from Python: its structures (of `csrc/batch.h`, `formats.h`), and how it is opened."""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

from attrs import frozen

from luce_backend_cpu import compiler
from luce_core.errors import CapacityError, EngineError, PluginError

log = logging.getLogger(__name__)

MAX_TABLES = 8
MAX_OUTS = 8

FORMATS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30, "MXFP4": 39,
}  # fmt: skip
"""Block formats the library reads as they lie in the file, with their ids there."""

EMBED, NORM_LINEAR, ATTENTION, LINEAR_OUT, GATED_MLP, HEAD, TAP = range(7)
ACTS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "sigmoid": 4}


class Matrix(Structure):
    """luce_matrix."""

    _fields_ = [
        ("data", c_void_p), ("row_bytes", c_int64), ("format", c_int32), ("rows", c_int32), ("cols", c_int32),
        ("lanes", c_int32), ("scale", c_float), ("bias", c_void_p),
    ]  # fmt: skip


class Table(Structure):
    """luce_table."""

    _fields_ = [("block", c_void_p), ("first", c_void_p), ("count", c_void_p), ("columns", c_int32)]


class Batch(Structure):
    """luce_batch."""

    _fields_ = [
        ("rows", c_int32), ("seqs", c_int32), ("held", c_int32), ("words", c_int32),
        ("row_invariant", c_int32), ("embed_count", c_int32),
        ("token", c_void_p), ("index", c_void_p), ("position", c_void_p), ("seq", c_void_p),
        ("query_start", c_void_p), ("length", c_void_p), ("parent", c_void_p), ("sees", c_void_p),
        ("embeds", c_void_p), ("embed_rows", c_void_p), ("table", Table * MAX_TABLES),
    ]  # fmt: skip


class Attention(Structure):
    """luce_attention."""

    _fields_ = [
        ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32), ("value_dim", c_int32),
        ("scale", c_float), ("softcap", c_float), ("window", c_int32), ("half", c_int32),
        ("adjacent", c_int32), ("gated", c_int32), ("magnitude", c_float), ("inv_freq", c_void_p),
        ("axis", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("v_norm", c_void_p),
        ("q_eps", c_float), ("k_eps", c_float), ("v_eps", c_float), ("sinks", c_void_p),
        ("k_pages", c_void_p), ("v_pages", c_void_p), ("k_format", c_int32), ("v_format", c_int32),
        ("block_entries", c_int32), ("table", c_int32), ("k_turn", c_int32), ("v_turn", c_int32),
    ]  # fmt: skip


class Op(Structure):
    """luce_op."""

    _fields_ = [
        ("kind", c_int32), ("x", c_int32), ("residual", c_int32), ("gate", c_int32),
        ("out", c_int32 * MAX_OUTS), ("num_matrices", c_int32), ("matrices", c_void_p),
        ("norm", c_void_p), ("post", c_void_p), ("norm_eps", c_float), ("post_eps", c_float),
        ("scale", c_float), ("clamp", c_float), ("softcap", c_float), ("act", c_int32),
        ("attention", c_void_p),
    ]  # fmt: skip


ERRORS = {
    1: (EngineError, "A token id lies outside the embedding table. This is a bug of whoever made the batch."),
    2: (
        EngineError,
        "A row's place lies in no block of its sequence. This is a bug of whoever made the batch.",
    ),
    3: (CapacityError, "The CPU ops' workspace could not be allocated. Use a smaller --chunk."),
    4: (
        EngineError, "A model turns its heads in more than 256 different ways, which the C tier does not do.",
    ),
}


@frozen(eq=False)
class Native:
    """The opened library."""

    run: Any
    dequantize: Any
    to_lanes: Any
    wants_lanes: Any
    forget: Any
    workspace_bytes: Any
    amx: bool
    omp: str
    """Path of the OpenMP runtime whose threads it uses; empty: its own."""

    def check(self, code: int) -> None:
        """Raise what an error code of `run` means."""
        if code:
            kind, message = ERRORS[code]
            raise kind(message)


@lru_cache(maxsize=1)
def native() -> Native:
    """The library for this machine. Raises PluginError with the reason where there is none."""
    built = compiler.library()
    if built.path is None:
        raise PluginError(
            f"Op layer 'cpu-c' needs a compiled library, but {built.reason}. Install a C compiler (gcc or "
            "clang), or choose --cpu-tier torch."
        )
    return open_library(built.path)


def open_library(path: Path, *, amx: bool = True, share_threads: bool = True) -> Native:
    """Open a compiled library; one process may open several (tests do), each with its own workspace."""
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise PluginError(
            f"The compiled library '{path}' cannot be opened: {error}. Remove it; it is compiled again at "
            "the next start."
        ) from error
    sizes = [lib.luce_sizes(number) for number in range(4)]
    wanted = [ctypes.sizeof(kind) for kind in (Matrix, Batch, Attention, Op)]
    if sizes != wanted:
        raise PluginError(
            f"The compiled library '{path}' has structures of {sizes} bytes, wanted {wanted}. "
            "Remove it; it is compiled again at the next start."
        )
    lib.luce_open.argtypes = [c_void_p, c_void_p, c_void_p, c_int32]
    lib.luce_run.argtypes = [c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_int32]
    lib.luce_dequantize.argtypes = [POINTER(Matrix), c_void_p, c_int32, c_void_p]
    lib.luce_to_lanes.argtypes = [POINTER(Matrix), c_void_p]
    lib.luce_forget.argtypes = [c_void_p, c_int64]
    lib.luce_workspace_bytes.restype = c_int64
    omp, entries = torch_openmp() if share_threads else ("", (None, None, None))
    with_amx = bool(lib.luce_open(*entries, int(amx)))
    return Native(
        run=lib.luce_run,
        dequantize=lib.luce_dequantize,
        to_lanes=lib.luce_to_lanes,
        wants_lanes=lib.luce_wants_lanes,
        forget=lib.luce_forget,
        workspace_bytes=lib.luce_workspace_bytes,
        amx=with_amx,
        omp=omp,
    )


def torch_openmp() -> tuple[str, tuple[int | None, int | None, int | None]]:
    """Path and entry points (parallel, thread number, threads) of the OpenMP runtime torch has loaded.

    Two runtimes in one process would fight for the cores. Empty where torch brings none with GNU's interface.
    """
    import torch

    inside = str(Path(torch.__file__).parent.parent)
    for path in sorted(loaded_libraries(), key=lambda path: not path.startswith(inside)):
        if not Path(path).name.startswith(("libgomp", "libiomp", "libomp")):
            continue
        library = ctypes.CDLL(path)
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        if all(hasattr(library, name) for name in names):
            first, second, third = (ctypes.cast(getattr(library, name), c_void_p).value for name in names)
            return path, (first, second, third)
    log.info("torch brings no OpenMP runtime to share; the CPU ops use threads of their own")
    return "", (None, None, None)


def loaded_libraries() -> list[str]:
    """Files mapped into this process, where the system lists them."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return []
    fields = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
    return sorted({parts[5] for parts in fields if len(parts) == 6 and ".so" in parts[5]})
