"""Few rows of x against a packed matrix: the kernels of csrc/gemv.cu and csrc/mma.cu, their shapes and
their input.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import torch
from attrs import frozen
from torch import Tensor

from luce_backend_triton import capability, nvrtc
from luce_backend_triton.formats import FORMATS, FP4_VALUES, RECORD_COLS, SCALE_KINDS, RecordFormat
from luce_backend_triton.given import ACT_CODES, Given, in_of

GEMV_ROWS = 2
"""Most rows of x for the integer kernel; more are quicker on tensor cores (LOG.md 2026-11-29)."""
GEMV_PASS = 4
"""Most rows of x in one pass of it, where there are no tensor cores for more."""
MMA_ROWS = 32
"""Most rows of x in one pass over the weights; more make more passes."""
X_BYTES = 576
X_FACTOR, X_LENGTH, X_SQUARES = 544, 548, 560
"""csrc/common.cuh."""

SLOT_WORDS = 128
"""Of lengths, in a slot of mma beside its sums."""
GATE_BYTES = 32
"""Of a stage of mma's ring, behind x, where there are bulk copies."""

Kind = Literal["gemv", "mma"]


@frozen
class Shape:
    """How one kernel is cut. See csrc/common.cuh."""

    kind: Kind
    x_rows: int
    """Rows of x in one pass: any for gemv, a multiple of 8 for mma."""
    tiles: int
    """Row tiles of a warp; 1 for gemv."""
    warps: int
    stages: int
    resident: int = 1
    """Thread blocks a multiprocessor is to hold, in registers."""
    makes: int = 0
    """gemv: blocks of 256 columns of one row that a warp makes ready; 0: x comes ready."""
    act: str = ""
    """mma: W is gate's rows, then up's, and what comes out is act(gate) · up made ready."""
    even: bool = False
    """mma: a row of x has one factor, in all its columns."""
    bulk: bool = True
    """mma: the device copies in bulk to shared memory."""
    then: bool = False
    """mma: what comes out is y, and made ready norm(y) without the division."""

    def ring_bytes(self, fmt: RecordFormat) -> int:
        """Records on their way, of one thread block."""
        return self.warps * self.tiles * fmt.record_bytes * self.stages

    def shared_bytes(self, fmt: RecordFormat, tiles: int, blocks: int, grid: int) -> int:
        """Of one of `grid` thread blocks, for a matrix of tiles × blocks records."""
        if self.kind == "mma":
            each = self.x_rows * X_BYTES + (GATE_BYTES if self.bulk else 0)
            return self.ring_bytes(fmt) + self.stages * each
        workers = min(grid, tiles)
        sums = -(-tiles // workers) * self.parts(tiles, blocks, workers) * 16 * self.x_rows * 4
        squares = 4 * self.warps
        return self.ring_bytes(fmt) + blocks * self.x_rows * X_BYTES + sums + squares

    def parts(self, tiles: int, blocks: int, workers: int) -> int:
        """gemv: the most warps that share a tile."""
        each = tiles // workers * blocks // self.warps
        return min(self.warps, (blocks - 2) // each + 2 if each else blocks)

    def owners(self, tiles: int) -> int:
        """mma: thread blocks' shares of rows."""
        return -(-tiles // (self.warps * self.tiles))


def defines(fmt: RecordFormat, shape: Shape) -> dict[str, int]:
    """What the sources are compiled with."""
    return {
        "BITS": fmt.bits,
        "TABLE": 0 if not fmt.table else 2 if fmt.table == FP4_VALUES else 1,
        "ZERO": fmt.zero,
        "SCALES": SCALE_KINDS.index(fmt.scales),
        "RECORD": fmt.record_bytes,
        "CODES": fmt.code_bytes,
        "X_ROWS": shape.x_rows,
        "TILES": shape.tiles,
        "WARPS": shape.warps,
        "STAGES": shape.stages,
        "RESIDENT": shape.resident,
        "MAKES": shape.makes,
        "ACT": ACT_CODES[shape.act],
        "EVEN": int(shape.even),
        "THEN": int(shape.then),
    }


OVERLAP = True
"""Whether launches begin beside the one before them, where the device can (compute capability 9.0)."""
FUNCTIONS = {"gemv": "gemv", "mma": "mma_linear"}
FRONTS = {"gemv": "", "mma": "sums.cuh"}
"""Of csrc, what belongs in front of a kind's source."""


class _Out(ctypes.Structure):
    """`Out` of csrc/common.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scale", "bias", "residual", "y", "sums")),
        *((name, ctypes.c_int) for name in ("m", "n", "ldr", "ldy", "beside")),
    )


POINTER, INT, WORD = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint


class Shares(ctypes.Structure):
    """`Shares` of csrc/common.cuh."""

    _fields_ = (("each", ctypes.c_int), ("more", ctypes.c_int))


def inverse(divisor: int) -> int:
    """For `quotient` of csrc/common.cuh."""
    return -(-(1 << 32) // divisor) & 0xFFFFFFFF


@cache
def kernel(device: int, name: str, variant: Shape) -> nvrtc.Kernel:
    """The kernel for one format and shape on one device, compiled and loaded once."""
    defined, kind = defines(FORMATS[name], variant), variant.kind
    return load(device, kind, FUNCTIONS[kind], defined, FRONTS[kind])


def load(
    device: int, source: str, function: str, defined: Mapping[str, int], after: str = ""
) -> nvrtc.Kernel:
    """`function` of `csrc/SOURCE.cu`, compiled for a device and loaded there."""
    ability = capability.on(torch.device("cuda", device))
    image = nvrtc.cubin(source, ability.arch, defined, after=after)
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # the context exists
        return nvrtc.Kernel(image, function, most, overlaps=ability.overlap and OVERLAP)


# --- x


def columns(k: int) -> int:
    """Columns of x in whole records."""
    return -(-k // RECORD_COLS) * RECORD_COLS


def prepare(x: Tensor, kind: Kind, even: bool = False) -> Tensor:
    """f32[m, k] -> u8[blocks, m, X_BYTES]. Plain torch: what the Triton kernel is checked against. even: one
    factor for a row.
    """
    m, k = x.shape
    wide = columns(k)
    full = torch.zeros(m, wide, device=x.device)
    full[:, :k] = x
    full = full.view(m, -1, RECORD_COLS).transpose(0, 1)  # [blocks, m, 256]
    out = torch.zeros(*full.shape[:2], X_BYTES, dtype=torch.uint8, device=x.device)
    top = full.abs().amax(-1)
    top = top.amax(0).expand_as(top) if even else top
    parts = _halves(full, top) if kind == "mma" else _integers(full, top)
    for at, part in zip((0, 512, X_FACTOR), parts, strict=True):
        data = part.contiguous().view(torch.uint8)
        out[..., at : at + data.shape[-1]] = data
    return out


TOP = 512.0
"""The largest of 256 lies within 1/2 .. 1 of it: 32 of them still add up to less than an f16's largest."""
STEPS = 127 * 256.0
"""The largest of 256 columns in two bytes."""


def _halves(x: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    power = torch.where(top > 0, torch.exp2(torch.ceil(torch.log2(top))), 1.0) / TOP
    scaled = (x / power[..., None]).to(torch.float16)
    sums = (scaled.unflatten(-1, (8, 32)).float().sum(-1) / 32).to(torch.float16)
    shares = scaled.new_tensor([1, 1 / 16])[:, None, None]  # of codes that lie four bits up
    ordered = (scaled.unflatten(-1, (8, 2, 4, 4)) * shares).transpose(-3, -2).flatten(-4)
    return ordered, sums, power[..., None]


def _integers(x: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    factor = torch.where(top > 0, top, 1.0) / STEPS
    whole = torch.round(x / factor[..., None]).int()
    high = torch.div(whole + 128, 256, rounding_mode="floor")
    low = whole - 256 * high
    both = torch.stack((high, low), -2).to(torch.int8)  # [..., 2, 256]
    both = both.unflatten(-1, (8, 2, 4, 4))[..., [0, 2, 1, 3]]  # [..., high or low, group, half, t, byte]
    return _words(both), whole.unflatten(-1, (8, 32)).sum(-1).int(), factor[..., None]


def _words(both: Tensor) -> Tensor:
    """[..., high or low, group, half, t, byte] -> [..., group, t, high or low, half, byte], flat."""
    lead = both.dim() - 5
    order = (*range(lead), lead + 1, lead + 3, lead, lead + 2, lead + 4)
    return both.permute(order).flatten(lead)


# --- launching


@frozen(eq=False)
class Divide:
    """norm(x) came ready without the division by the root of the mean of its squares and eps."""

    squares: Tensor
    """f32[m], where Σ of each row's squares is left."""
    k: int
    eps: float


class _Divide(ctypes.Structure):
    """`Divide` of csrc/sums.cuh."""

    _fields_ = (("squares", ctypes.c_void_p), ("share", ctypes.c_float), ("eps", ctypes.c_float))


@frozen(eq=False)
class Then:
    """What `Shape.then` makes of y, norm(y) without the division; see csrc/sums.cuh."""

    weight: Tensor
    """f32[n], of the norm."""
    bound: Tensor
    """f32[2]: what |weight · y| is at most, per length of the residual, and per factor of x."""
    squares: Tensor
    """f32[m], Σ of each row's squares of the residual."""
    ready: Tensor
    """u8[n / 256, m, X_BYTES]."""


class _Then(ctypes.Structure):
    """`Then` of csrc/sums.cuh."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("weight", "bound", "squares", "ready"))


def norms(divide: Divide | None, then: Then | None) -> list[ctypes.Structure]:
    """mma: what it is told of the norm in front and of that behind."""
    front = _Divide() if divide is None else _Divide(divide.squares.data_ptr(), 1 / divide.k, divide.eps)
    given = () if then is None else (then.weight, then.bound, then.squares, then.ready)
    return [front, _Then(*(one.data_ptr() for one in given))]


def slots(count: int, device: torch.device) -> Tensor:
    """f32[count], all EMPTY of csrc/mma.cu, which leaves them so."""
    return torch.full((count,), -1, dtype=torch.int32, device=device).view(torch.float32)


class Workspace:
    """Slots for partial sums of one device, kept as large as ever needed."""

    def __init__(self, device: torch.device) -> None:
        self.sums = slots(1 << 20, device)
        self._outgrown: list[Tensor] = []
        """Captured graphs still write to them."""

    def take(self, count: int) -> int:
        """Pointer to f32[count]."""
        if self.sums.numel() < count:
            self._outgrown.append(self.sums)
            self.sums = slots(count, self.sums.device)
        return self.sums.data_ptr()


@cache
def workspace(device: torch.device, place: int = 0) -> Workspace:
    """Launches on one stream share it, but for products beside each other: place 0, 1 .. among those."""
    return Workspace(device)


@frozen
class Beside:
    """A product among those of one x that are launched one after the other (csrc/common.cuh)."""

    place: int = 0
    is_last: bool = True

    @property
    def bits(self) -> int:
        return (0 if self.is_last else 1) | (2 if self.place else 0)


ALONE = Beside()


class Walk(ctypes.Structure):
    """`Walk` of csrc/mma.cu."""

    _fields_ = (
        ("shares", Shares), ("by_each", WORD), ("by_more", WORD), ("parts", ctypes.c_int), ("by_parts", WORD)
    )  # fmt: skip


UNEVEN = 1.25
"""mma: how much larger the largest share may be where owners are not cut, or each into parts of its own."""


@cache
def walk(shape: Shape, tiles: int, blocks: int, grid: int) -> tuple[int, int, Walk]:
    """mma: thread blocks that have work, the most that share an owner, and who has what: whole owners, or
    parts of one; where such shares were too uneven, equal numbers of units in a row.
    """
    owners = shape.owners(tiles)
    parts = max(1, min(grid // owners, blocks))
    count, each = (blocks, 1) if parts > 1 else (owners, blocks)
    workers = owners * parts if parts > 1 else min(grid, owners)
    cut = divmod(count, parts if parts > 1 else workers)
    most, units, across = parts, owners * blocks, min(grid, owners * blocks)
    if (cut[0] + (cut[1] > 0)) * each > UNEVEN * -(-units // across):
        workers, parts, cut = across, 0, divmod(units, across)
        most = min(blocks, (blocks - 2) // cut[0] + 2)
    inverses = inverse(cut[0]), inverse(cut[0] + 1), parts, inverse(max(1, parts))
    return workers, most, Walk(Shares(*cut), *inverses)


@cache
def sizes(shape: Shape, tiles: int, blocks: int, grid: int) -> tuple[int, list[Any]]:
    """gemv: thread blocks that have work, and what it is told of the matrix."""
    workers = min(grid, tiles)
    parts = shape.parts(tiles, blocks, workers)
    across = (INT(blocks), WORD(inverse(blocks)), INT(parts), WORD(inverse(parts)))
    return workers, [Shares(*divmod(tiles, workers)), *across]


@cache
def mma_sizes(shape: Shape, tiles: int, blocks: int, grid: int, passes: int) -> tuple[int, list[Any], int]:
    """mma: likewise, and how many partial sums there may be."""
    grid, room, shares = walk(shape, tiles, blocks, grid)
    owners = shape.owners(tiles)
    cut = [shares, INT(tiles), INT(blocks), WORD(inverse(blocks)), INT(owners), INT(room)]
    return grid, cut, passes * owners * shape.warps * room * (shape.tiles * 16 * shape.x_rows + SLOT_WORDS)


def launch(
    name: str,
    records: Tensor,
    rows: int,
    x: Tensor | Given,
    y: Tensor,
    shape: Shape,
    grid: int,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    beside: Beside = ALONE,
    divide: Divide | None = None,
    then: Then | None = None,
) -> None:
    """y f32[m, rows] (any row stride) = x Wᵀ · scale + bias + residual, by `grid` thread blocks.

    x: as `prepare` makes it, or x or norm(x), which the kernel makes so itself (`Shape.makes`). beside: not
    alone where the launch before or behind is another product of x. With `shape.act`: rows of gate and of up
    each; x as csrc/ready.cu makes norm(x); y u8[m, blocks, X_BYTES], a view of [blocks, m, X_BYTES] like x;
    scale f32[1], as `matrix.Part.most`. divide, and `shape.then`: in one pass.
    """
    (tiles, blocks, _), device, m = records.shape, records.device, y.shape[0]
    passes = -(-m // shape.x_rows)
    sums = None
    if shape.kind == "gemv":
        grid, cut = sizes(shape, tiles, blocks, grid)
    else:
        grid, cut, count = mma_sizes(shape, tiles, blocks, grid, passes)
        sums = workspace(device, beside.place).take(count)
        cut = [*cut, *norms(divide, then)]
        if passes > 1 and not (divide is None and then is None):
            raise ValueError(f"{m} rows of x in {passes} passes: a norm in front or behind takes one.")
    given = (None if extra is None else extra.data_ptr() for extra in (scale, bias, residual))
    ldr = 0 if residual is None else residual.stride(0)
    out = _Out(*given, y.data_ptr(), sums, m, rows, ldr, y.stride(0), beside.bits)
    given_x = in_of(x) if isinstance(x, Given) else POINTER(x.data_ptr())
    args = [POINTER(records.data_ptr()), given_x, out, *cut]
    stream = torch.cuda.current_stream(device).cuda_stream
    kernel(device.index or 0, name, shape).launch(
        (grid, 1, passes),
        32 * shape.warps,
        shape.shared_bytes(FORMATS[name], tiles, blocks, grid),
        stream,
        args,
    )
