"""Sources of csrc on a CPU: inline assembly replaced, compiled with g++ behind simt.h, called through
ctypes.
"""

from __future__ import annotations

import atexit
import ctypes
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from luce_backend_triton import few_rows, formats, nvrtc, ready
from luce_backend_triton import gated as gated_of
from luce_backend_triton import normed as normed_of
from luce_backend_triton import product as product_of
from luce_backend_triton.given import Given, In, in_of
from torch import Tensor

GXX = shutil.which("g++")
REPLACED = {
    r"(u32 sub2\(u32 a, u32 b\)) \{.*?\}\n": r"\1 { return on_halves(a, b, 0, "
    r"[](float x, float y, float) { return x - y; }); }\n",
    r"(u32 mul2\(u32 a, u32 b\)) \{.*?\}\n": r"\1 { return on_halves(a, b, 0, "
    r"[](float x, float y, float) { return x * y; }); }\n",
    r"(u32 fma2\(u32 a, u32 b, u32 c\)) \{.*?\}\n": r"\1 { return on_halves(a, b, c, "
    r"[](float x, float y, float z) { return x * y + z; }); }\n",
    r"(void mma8\(float \(&d\)\[4\], const float \(&c\)\[4\], u32 a0, u32 a1, u32 b\)) \{\n.*?\n\}": r"\1 "
    r"{ mma_of_warp(d, c, a0, a1, b); }",
    r'asm volatile\("mov.b32 %0, (0x\w+);" : "=r"\(([\w.]+)\)\);': r"\2 = \1;",
    r"(u32 mask_or\(u32 a, u32 b, u32 c\)) \{.*?\}[^\n]*\n": r"\1 { return (a & b) | c; }\n",
    r"(u32 low2\(u32 a\)) \{.*?\}[^\n]*\n": r"\1 { return (a & 0xffff) * 0x10001u; }\n",
    r"(u32 high2\(u32 a\)) \{.*?\}[^\n]*\n": r"\1 { return (a >> 16) * 0x10001u; }\n",
    r"(void floats\(u32 a, float& low, float& high\)) \{\n.*?\n\}": r"\1 { low = half_as_float(a); "
    r"high = half_as_float(a >> 16); }",
    r"(float4 load4\(const float\* from\)) \{.*?\n\}": r"\1 { return *(const float4*)from; }",
    r"(void store_if\(u32 really, float\* to, float v\)) \{.*?\n\}": r"\1 { if (really) *to = v; }",
    r"(float2 load2\(const float\* from\)) \{.*?\n\}": r"\1 { return *(const float2*)from; }",
    r"(u32 pack(?:_halves)?\(float low, float high\)) \{.*?\}\n": r"\1 "
    r"{ return pair_of_halves(low, high); }\n",
    r"(float exp2_of\(float x\)) \{.*?\}\n": r"\1 { return exp2f(x); }\n",
    r"(float log2_of\(float x\)) \{.*?\}\n": r"\1 { return log2f(x); }\n",
    r"(float inverse_of\(float x\)) \{.*?\}\n": r"\1 { return 1.f / x; }\n",
    r"(float inverse_root\(float x\)) \{.*?\}\n": r"\1 { return 1.f / sqrtf(x); }\n",
    r"(void copy16\(void\* shared, const void\* global\)) \{.*?\n\}": r"\1 { copy_ahead(shared, global); }",
    r"(void commit\(\)) \{.*?\n\}": r"\1 { close_copies(); }",
    r"(void wait_but\(\)) \{[^\n]*\n.*?\n\}": r"\1 { wait_for_copies(NEWEST); }",
    r"(void wait_all\(\)) \{.*?\n\}": r"\1 { wait_for_all_copies(); }",
    r"(void open_gate\(void\* gate, int arrivals\)) \{.*?\n\}": r"\1 { open_gate_of(gate, arrivals); }",
    r"(u32 one_of_warp\(\)) \{.*?\n\}": r"\1 { return threadIdx.x % 32 == 0; }",
    r"(void show_gates\(\)) \{.*?\n\}": r"\1 { show_all_gates(); }",
    r"(void behind_bulk\(\)) \{.*?\n\}": r"\1 {}",
    r"(void expect\(void\* gate, u32 bytes\)) \{.*?\n\}": r"\1 { arrive_at(gate, bytes); }",
    r"(void copy_bulk\([^)]*\)) \{.*?\n\}": r"\1 { ask_in_bulk(shared, global, bytes, gate); }",
    r"(void pass_gate\(void\* gate, u32 odd\)) \{.*?\n\}": r"\1 { wait_at(gate, odd); }",
    r"(u8\* same_in_warp\(u8\* shared\)) \{\n.*?\n\}": r"\1 { return shared; }",
    r"(u32x4 matrices\(const u16\* row\)) \{.*?\n\}": r"\1 "
    r"{ u32x4 v; matrices_of_warp(&v.x, row); return v; }",
    r"(u32 turned\(u32 a\)) \{\n.*?\n\}": r"\1 { return turned_in_warp(a); }",
    r"(u32 load1\(const void\* from\)) \{.*?\n\}": r"\1 { return *(const u32*)from; }",
    r"(u32x4 stream16\(const void\* from\)) \{.*?\n\}": r"\1 { return *(const u32x4*)from; }",
    r"(int dot\(u32 codes, u32 x, int c\)) \{.*?\n\}": r"\1 { for (int i = 0; i < 32; i += 8) "
    r"c += (int)(codes >> i & 255) * (int)(signed char)(x >> i & 255); return c; }",
    r"(int zeros\(u32 x, int c\)) \{.*?\n\}": r"\1 { for (int i = 0; i < 32; i += 8) "
    r"c += (int)(signed char)(NEGATED >> i & 255) * (int)(signed char)(x >> i & 255); return c; }",
    r"(Four mma_codes\(const Four& c, u32 a0, u32 a1, u32 b\)) \{.*?\n\}": r"\1 "
    r"{ Four d = c; mma_of_warp(d.of, {a0, a1, 0, 0}, b, 0, false); return d; }",
    r"(Four mma_codes\(const Four& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1\)) \{.*?\n\}": r"\1 "
    r"{ Four d = c; mma_of_warp(d.of, {a0, a1, a2, a3}, b0, b1, false); return d; }",
    r"(Four mma_zeros\(u32 b\)) \{.*?\n\}": r"\1 "
    r"{ Four d = {}; mma_of_warp(d.of, {NEGATED, NEGATED, 0, 0}, b, 0, true); return d; }",
    r"(Four mma_zeros\(u32 b0, u32 b1\)) \{.*?\n\}": r"\1 "
    r"{ Four d = {}; mma_of_warp(d.of, {NEGATED, NEGATED, NEGATED, NEGATED}, b0, b1, true); return d; }",
    r"(void meet\(int warp\)) \{.*?\}\n": r"\1 { of_pair[warp / 2].wait(64); }\n",
    r"(u32 load_slot\(const u32\* from\)) \{.*?\n\}": r"\1 { return arrived(*from); }",
    r"(void store_slot\(u32\* to, u32 v\)) \{.*?\}\n": r"\1 { *to = v; }\n",
    r"(u32x4 load_slot\(const u32x4\* from\)) \{.*?\n\}": r"\1 { return arrived(*from); }",
    r"(void store_slot\(u32x4\* to, u32x4 v\)) \{.*?\n\}": r"\1 { *to = v; }",
    r"extern __shared__ __align__\(16\) (\w+) (\w+)\[\];": r"\1* \2 = (\1*)block_shared;",
}
"""Patterns of what no C++ compiler takes, and what stands there instead."""


BULK = True
"""Whether products copy in bulk, as they do from compute capability 9.0 on."""
FLAGS = ("-O1", "-w", "-std=c++17", "-fPIC")


@cache
def header() -> Path:
    """simt.h, compiled ahead: it and what it includes are most of what a kernel's compilation would read."""
    folder = Path(tempfile.mkdtemp(prefix="luce-simt-"))
    atexit.register(shutil.rmtree, folder)
    found = Path(shutil.copy(Path(__file__).parent / "simt.h", folder))
    _compile(*FLAGS, "-x", "c++-header", str(found), "-o", f"{found}.gch")
    return found


def _compile(*arguments: str) -> None:
    done = subprocess.run([str(GXX), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def source_of(*names: str) -> str:
    """`csrc/NAME.cu` of all, behind what belongs in front of them, as C++."""
    source = "".join((nvrtc.SOURCES / part).read_text() for part in nvrtc.parts(*names))
    for pattern, text in REPLACED.items():
        source = re.sub(pattern, text, source, flags=re.DOTALL)
    return source


def build(
    folder: Path,
    name: str,
    function: str,
    defines: dict[str, int],
    parameters: str,
    after: tuple[str, ...] = (),
) -> ctypes.CDLL:
    """A library with `launch(parameters, blocks, threads, shared bytes)`, and `launch_deep`, which takes
    gridDim.z too; compiled in this folder, unless it was before. parameters: fields of a struct, in the order
    in which the function takes them. after: sources in front.
    """
    names = [part.split()[-1].lstrip("*") for part in parameters.split(";") if part.strip()]
    call = ", ".join(f"given->{one}" for one in names)
    source = f'#include "{header()}"\n{source_of(*after, name)}\n'
    source += f"struct Given {{ {parameters} }};\nstatic Given* given;\n"
    source += f"static void call() {{ {function}({call}); }}\n"
    source += 'extern "C" const char* what_failed() { return fault; }\n'
    source += 'extern "C" void launch(Given* it, int blocks, int threads, int shared_bytes) {\n'
    source += "  given = it, body = call;\n  run_grid(blocks, threads, shared_bytes);\n}\n"
    source += (
        'extern "C" void launch_deep(Given* it, int blocks, int threads, int shared_bytes, int deep) {\n'
    )
    source += "  given = it, body = call;\n  run_grid(blocks, threads, shared_bytes, deep);\n}\n"
    flags = tuple(f"-D{key}={value}" for key, value in defines.items())
    if (source, flags) not in built:
        unit, library = folder / f"{name}.cpp", folder / f"{name}.so"
        unit.write_text(source)
        _compile(*FLAGS, "-shared", *flags, str(unit), "-o", str(library))
        built[source, flags] = ctypes.CDLL(str(library))
    return built[source, flags]


built: dict[tuple[str, tuple[str, ...]], ctypes.CDLL] = {}
"""What was compiled in this process, by source and flags."""


def fields(*of):
    """A ctypes structure of these fields."""
    return type("Fields", (ctypes.Structure,), {"_fields_": of})


FRONT = "const u8 *records; {} x; Out out;"
CUT = {
    "gemv": "Shares tiles; int blocks; u32 by_blocks; int parts; u32 by_parts;",
    "mma": "Walk walk; int tiles; int blocks; u32 by_blocks; int owners; int room; Divide divide; Then then;",
}


def product(
    folder: Path, name: str, data: np.ndarray, x: Tensor | Given, shape: few_rows.Shape, grid: int,
    bias: Tensor, residual: Tensor, imma: bool = False,
) -> Tensor:  # fmt: skip
    """x Wᵀ + bias + residual by csrc/gemv.cu or csrc/mma.cu, W as the blocks of a file. folder: a new one
    for every shape, since a library that is loaded stays. imma: gemv on tensor cores.
    """
    made = isinstance(x, Given)
    y = torch.full(((x.x if made else x).shape[0], data.shape[0]), torch.nan)
    ready = x if made else few_rows.prepare(x, shape.kind).contiguous()
    more = {"bias": bias, "residual": residual, "imma": imma}
    launch(folder, name, packed(name, data), data.shape[0], ready, y, shape, grid, **more)
    return y


def gated(
    folder: Path, name: str, data: np.ndarray, ready: Tensor, most: Tensor, shape: few_rows.Shape,
    grid: int,
) -> Tensor:  # fmt: skip
    """act(gate) · up by csrc/mma.cu -> u8[blocks, m, X_BYTES]. data: gate's rows, then up's; ready: n."""
    rows = data.shape[0] // 2
    y = torch.full((formats.blocks_of(rows), ready.shape[1], few_rows.X_BYTES), 0xFF, dtype=torch.uint8)
    launch(folder, name, packed(name, data), rows, ready, y.transpose(0, 1), shape, grid, scale=most)
    return y


def packed(name: str, data: np.ndarray) -> Tensor:
    """Records."""
    return formats.pack(name, torch.from_numpy(data)).contiguous()


def launch(
    folder: Path, name: str, records: Tensor, rows: int, x: Tensor | Given, y: Tensor, shape: few_rows.Shape,
    grid: int, *, scale: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    imma: bool = False, beside: few_rows.Beside = few_rows.ALONE,
    divide: few_rows.Divide | None = None, then: few_rows.Then | None = None,
) -> None:  # fmt: skip
    """As `few_rows.launch`."""
    made, fmt, m = isinstance(x, Given), formats.FORMATS[name], y.shape[0]
    folder.mkdir(exist_ok=True, parents=True)
    (tiles, across, _), passes = records.shape, -(-m // shape.x_rows)
    count = 0
    if shape.kind == "mma":
        workers, cut, count = few_rows.mma_sizes(shape, tiles, across, grid, passes)
        cut = [*cut, *few_rows.norms(divide, then)]
    else:
        workers, cut = few_rows.sizes(shape, tiles, across, grid)
    sums = few_rows.slots(count, y.device)
    behind = (None if extra is None else extra.data_ptr() for extra in (scale, bias, residual))
    ldr = 0 if residual is None else residual.stride(0)
    out = few_rows._Out(*behind, y.data_ptr(), sums.data_ptr(), m, rows, ldr, y.stride(0), beside.bits)
    given = in_of(x) if made else ctypes.c_void_p(x.data_ptr())
    args = [ctypes.c_void_p(records.data_ptr()), given, out, *cut]
    it = fields(*((f"f{i}", type(arg)) for i, arg in enumerate(args)))(*args)
    function, defined = few_rows.FUNCTIONS[shape.kind], few_rows.defines(fmt, shape)
    defined |= {"IMMA": int(imma), "BULK": int(BULK)}
    front = FRONT.format("In" if made else "const u8*")
    after = tuple(few_rows.FRONTS[shape.kind].split())
    library = build(folder, shape.kind, function, defined, front + CUT[shape.kind], after)
    shared = shape.shared_bytes(fmt, tiles, across, grid)
    library.launch_deep(ctypes.byref(it), workers, 32 * shape.warps, shared, passes)
    library.what_failed.restype = ctypes.c_char_p
    assert (wrong := library.what_failed()) is None, wrong.decode()
    assert (sums.view(torch.int32) == -1).all()  # as the next launch wants them


READY = "In in; u8 *out; float *squares; int m; int blocks;"
ReadyGiven = fields(
    ("in_", In), ("out", ctypes.c_void_p), ("squares", ctypes.c_void_p), ("m", ctypes.c_int),
    ("blocks", ctypes.c_int),
)  # fmt: skip


def made_ready(folder, rows, squares=None):
    """u8[blocks, m, X_BYTES] by csrc/ready.cu; squares f32[m] of a norm's x."""
    (m, cols), norm = rows.x.shape, rows.weight is not None
    blocks = formats.blocks_of(cols)
    cut = ready.cut(blocks, norm, rows.act)
    folder.mkdir(exist_ok=True)
    library = build(folder, "ready", "ready", cut.defines(), READY)
    out = torch.full((blocks, m, few_rows.X_BYTES), 0xFF, dtype=torch.uint8)
    to = None if squares is None else squares.data_ptr()
    it = ReadyGiven(in_of(rows), out.data_ptr(), to, m, blocks)
    library.launch_deep(ctypes.byref(it), m, 32 * cut.warps, cut.shared_bytes, cut.parts)
    return out


def float_at(of, place):
    return of[..., place : place + 4].contiguous().view(torch.float32)


def parts(of):
    """x, in the order in which it lies there, and Σ x of groups."""
    factor, halves = float_at(of, few_rows.X_FACTOR), of[..., :528].contiguous().view(torch.float16).float()
    return factor * halves[..., :256], 32 * factor * halves[..., 256:]


def same_as_ready(ready, x, factor):
    """Asserts that u8[blocks, m, X_BYTES] is f32 x [m, k], a multiple of 256, with this factor: every half to
    the last bit; sums but for the order in which they are added up.
    """
    (m, k), column = x.shape, torch.arange(256)
    place = column // 32 * 32 + column % 16 // 4 * 8 + column % 32 // 16 * 4 + column % 4
    want = (x / factor).half().view(m, k // 256, 256).transpose(0, 1)
    got = ready[..., :528].contiguous().view(torch.float16)
    assert torch.equal(got[..., place], want * torch.where(column % 32 < 16, 1.0, 1 / 16).half())
    sums = want.unflatten(-1, (8, 32)).float()
    allowed = 2**-10 * sums.sum(-1).abs() / 32 + 2**-20 * sums.abs().sum(-1) + 2**-24
    assert ((got[..., 256:].float() - sums.sum(-1) / 32).abs() <= allowed).all()
    assert (float_at(ready, few_rows.X_FACTOR) == factor).all()


def emulated(monkeypatch, folder, shape, launched):
    """Products of few rows and what makes x ready run on the CPU, all of this shape, and are put down in
    `launched`: by format and what a product does besides; by what is made ready.
    """
    folders, real = (folder / str(number) for number in range(99)), product_of.Rows.few

    def on_cpu(name, *args, **more):
        launched.append(" ".join([name, *([args[4].act] if args[4].act else []), *["then"] * args[4].then]))
        launch(next(folders), name, *args, **more)

    def few(rows, kind):
        if rows.made(kind) is None:
            given, squares = rows.given(), torch.zeros(rows.x.shape[0])
            launched.append(f"ready {given.act or ('norm' if given.weight is not None else 'x')}")
            rows._few[kind] = made_ready(next(folders), given, squares)
            if given.weight is not None:
                product_of.SQUARES.put(rows.x, squares)
                rows.lengths = True
        return real(rows, kind)

    monkeypatch.setattr(few_rows, "launch", on_cpu)
    monkeypatch.setattr(product_of.Rows, "few", few)
    monkeypatch.setattr(gated_of, "useful", lambda one: True)
    for module in gated_of, product_of, normed_of:
        monkeypatch.setattr(module, "few_of", lambda one, m, cuda: (shape, 3))
