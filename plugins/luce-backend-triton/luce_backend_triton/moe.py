"""Op `experts` on packed stacks: grouped products, nothing of which waits for the host.

Few rows: CUDA C++, two launches that make their input themselves. Every pair of row and expert reads that
expert's records; the first launch activates, the second weighs and sums. More: pairs sorted by expert on the
device, times weights as f16, many experts at a time; where Triton has no tensor cores, times the records in
small tiles. There the sum over experts, with the shared expert and the residual, is one launch.
"""

from __future__ import annotations

from functools import cache
from itertools import product as product_of
from typing import Any

import torch
import triton
from torch import Tensor

from luce_backend_triton import capability, few_rows, moe_kernels, nvrtc, product, shapes
from luce_backend_triton.few_rows import Shape
from luce_backend_triton.formats import FORMATS, TILE_ROWS, RecordFormat, tiles_of
from luce_backend_triton.kernels import INTERPRETED
from luce_backend_triton.matrix import Group, Matrix
from luce_backend_triton.memory import SCRATCH_BYTES
from luce_backend_triton.moe_args import cut_of, down_cut_of, down_of, stack_of, sums_of
from luce_backend_triton.product import ACTS, Rows
from luce_backend_triton.route import Asked, Routed
from luce_core.contracts import Clamp, ExpertBank, Norm, SharedExpert
from luce_core.ops import moe as reference

FRONT = "gemv choose.cuh"
"""Of csrc, in front of the kernels for few rows."""
FEW_PAIRS = 256
"""Most pairs of row and expert that each read their own records."""
SHAPES = ((8, 3), (8, 2), (4, 2), (2, 2), (1, 2))
"""(warps, stages) of the kernel for few rows, best first where they fit."""
DOWN_WARPS, DOWN_STAGES = (8, 6, 4, 2, 1), (4, 3, 2, 1)
"""Of the launch that sums over the experts of a row. Each quarter of a multiprocessor has its own registers:
beside six warps of three thread blocks of the launch before there is room for two more of 64 registers.
"""
PER_MULTIPROCESSOR = 2
TOGETHER = 4
"""Pairs of one expert that read its records once, where there are more than two rows, and tensor cores take
four at the price of one.
"""
FEW_TILE = 16
"""Pairs, and rows of a matrix, of a tile of the product with packed weights."""
PAIRS, ROWS = 64, 128
"""Of a tile of the product with dense weights."""
COLS = 1024
SORTED = 4096
"""Pairs a program looks at in one go."""


def takes(bank: ExpertBank, act: str) -> bool:
    """Whether the kernels do."""
    stack = bank.stack
    every = (*stack.gate_up, stack.down)
    return (
        bank.mailbox is None
        and act in ACTS
        and len(stack.gate_up) == 2
        and all(isinstance(w.packed, Matrix) and w.scale is None and w.bias is None for w in every)
        and all(w.out_features // stack.count % TILE_ROWS == 0 for w in every)
        and stack.gate_up[0].packed.format == stack.gate_up[1].packed.format
    )


def _alike(bank: ExpertBank, shared: SharedExpert, clamp: Clamp | None) -> bool:
    """Whether the shared expert is one more of the same shape and formats."""
    stack, group, down = bank.stack, shared.gate_up.packed, shared.down
    one = group.parts[0].matrix if isinstance(group, Group) and len(group.parts) == 1 else None
    routed, last = stack.gate_up[0].packed, stack.down.packed
    return (
        isinstance(one, Matrix)
        and isinstance(down.packed, Matrix)
        and group.parts[0].bias is None
        and all(w.scale is None for w in (*shared.gate_up.members, down))
        and down.bias is None
        and shared.clamp == clamp
        and (one.format, one.blocks) == (routed.format, routed.blocks)
        and one.rows * stack.count == 2 * routed.rows
        and (down.packed.format, down.packed.blocks) == (last.format, last.blocks)
        and down.packed.rows * stack.count == last.rows
    )


class Experts:
    """The op of one layer. cuda: few rows go through CUDA C++."""

    fixed = False
    """Whether launches are cut for one row, however many there are."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda

    def experts(
        self,
        ops: Any,
        x: Tensor,
        norm: Norm | None,
        routed: tuple[Tensor, Tensor],
        bank: ExpertBank,
        shared: SharedExpert | None = None,
        residual: Tensor | None = None,
        post: Norm | None = None,
        act: str = "silu",
        clamp: Clamp | None = None,
    ) -> Tensor:
        """residual + post(Σ weight · expert(norm(x)) + shared(norm(x))) -> f32[T, E]; see `Ops.experts`."""
        if not takes(bank, act) or not x.shape[0]:
            return reference.experts(ops, x, norm, routed, bank, shared, residual, post, act, clamp)
        x = x.float().contiguous()
        own = None if residual is None or post is not None else _floats(residual)
        given = (x, norm, routed, bank, shared, own, act, clamp)
        out = self._choosing(*given)
        if out is None:
            out = self._chosen(ops, *given)
        if post is None:
            return out
        out = ops.rms(out, post)
        return out if residual is None else ops.add(residual, out)  # type: ignore[no-any-return]

    def _choosing(
        self, x: Tensor, norm: Norm | None, routed: tuple[Tensor, Tensor], bank: ExpertBank,
        shared: SharedExpert | None, own: Tensor | None, act: str, clamp: Clamp | None,
    ) -> Tensor | None:  # fmt: skip
        """By launches that choose the experts; None: they cannot, nothing was done."""
        asked = routed.asked if isinstance(routed, Routed) else None
        if asked is None or not self.cuda or not (shared is None or _alike(bank, shared, clamp)):
            return None
        chosen = _Few(bank, asked, x.shape[0], asked.top_k, shared, self.fixed)
        if chosen.together > 1 or not chosen.down_fits(x.shape[1]):
            return None
        middle = chosen.middle(_given(routed, x, norm), bank.stack.gate_up, act, clamp)
        return chosen.down(middle, None, shared, x, norm, own)

    def _chosen(
        self, ops: Any, x: Tensor, norm: Norm | None, routed: tuple[Tensor, Tensor], bank: ExpertBank,
        shared: SharedExpert | None, own: Tensor | None, act: str, clamp: Clamp | None,
    ) -> Tensor:  # fmt: skip
        """With ids and weights."""
        ids, stack = routed[0].contiguous(), bank.stack
        few = self._few(x, ids)
        weight = _floats(routed[1])  # before the products, which `_Few.down` does not wait for with it
        alike = few and shared is not None and _alike(bank, shared, clamp)
        chosen: _Few | _Sorted
        if few:
            chosen = _Few(bank, ids, *ids.shape, shared if alike else None, self.fixed)
        else:
            chosen = _Sorted(bank, ids)
        middle, beside = chosen.middle(_given(routed, x, norm), stack.gate_up, act, clamp), None
        if isinstance(chosen, _Few) and (alike or shared is None) and chosen.down_fits(x.shape[1]):
            return chosen.down(middle, weight, shared, x, norm, own)
        (y,) = chosen.products(middle, (stack.down,), 1)
        y = y.view(x.shape[0], chosen.each, -1)
        if alike:
            beside = y[:, -1]
        elif shared is not None:
            beside = ops.gated_mlp(x, norm, shared.gate_up, shared.down, act=act, clamp=shared.clamp)
        factor = None if shared is None else shared.gate
        return _combine(y, ids, weight, bank.lut, beside, factor, x, norm, own)

    def _few(self, x: Tensor, ids: Tensor) -> bool:
        return self.cuda and x.is_cuda and ids.numel() <= FEW_PAIRS


# --- few rows


@cache
def _kernel(device: int, name: str, shape: Shape, source: str, function: str) -> nvrtc.Kernel:
    return few_rows.load(device, source, function, few_rows.defines(FORMATS[name], shape), after=FRONT)


def few_bytes(
    fmt: RecordFormat, shape: Shape, tiles: int, blocks: int, grid: int, matrices: int, known: int
) -> int:
    """Shared memory of one of `grid` thread blocks; known: experts there are ids of."""
    sums = 4 * sums_of(shape, tiles, blocks, grid, matrices)
    each = blocks * few_rows.X_BYTES + 4 * (shape.warps + 1)
    return shape.ring_bytes(fmt) + sums + shape.x_rows * each + 4 * (known + 1)


@cache
def _shape(
    name: str, tiles: int, blocks: int, pairs: int, matrices: int, known: int, together: int,
    room: shapes.Room,
) -> tuple[Shape, int]:  # fmt: skip
    """The kernel and its thread blocks per pair: each of as many tiles, however many find room at a time.
    together: pairs of one expert that go through its records at once; half of all may be idle then.
    """
    wanted = PER_MULTIPROCESSOR * room.multiprocessors * (2 if together > 1 else 1)
    most = max(1, tiles * pairs // wanted)
    grid = -(-tiles // most)
    found = Shape("gemv", 1, 1, *SHAPES[-1])
    for x_rows, (warps, stages) in product_of(dict.fromkeys((together, 1)), SHAPES):
        found = Shape("gemv", x_rows, 1, warps, stages)
        if warps * stages <= -(-tiles // grid) * blocks * matrices and room.fits(
            few_bytes(FORMATS[name], found, tiles, blocks, grid, matrices, known), PER_MULTIPROCESSOR
        ):
            break
    return found, grid


def down_bytes(fmt: RecordFormat, shape: Shape, most: int, each: int) -> int:
    """Shared memory of a thread block of at most `most` tiles."""
    at_once = 3 if shape.stages > 2 else 2  # parts
    of_warp = shape.ring_bytes(fmt) // shape.warps + at_once * few_rows.X_BYTES + 64 * most + 8
    return shape.warps * of_warp + 64 * most + 4 * (each + each % 2) + 8 * each


@cache
def _down_shape(
    name: str, tiles: int, blocks: int, each: int, rows: int, room: shapes.Room
) -> tuple[Shape, int] | None:
    """The kernel and its thread blocks per row. Of those that fit: where two records of a warp are on their
    way, if it has two; then where the busiest warp has least to do, then the fewest warps.
    """
    grid = min(tiles, max(1, PER_MULTIPROCESSOR * room.multiprocessors // rows))
    most, found = -(-tiles // grid), []
    for warps, stages in product_of(DOWN_WARPS, DOWN_STAGES):
        shape, records = Shape("gemv", 1, 1, warps, stages), -(-each * blocks // warps) * most
        if stages <= records and room.fits(down_bytes(FORMATS[name], shape, most, each), PER_MULTIPROCESSOR):
            found.append(((stages < min(2, records), records, warps, -stages), shape))
    return (min(found, key=lambda one: one[0])[1], grid) if found else None


class _Few:
    """Every pair by itself. who: ids, or what the launches choose by. shared: as one more expert, that every
    row has.
    """

    def __init__(
        self, bank: ExpertBank, who: Tensor | Asked, rows: int, used: int, shared: SharedExpert | None,
        fixed: bool,
    ) -> None:  # fmt: skip
        self.bank, self.who, self.rows, self.used, self.fixed = bank, who, rows, used, fixed
        self.device = bank.lut.device
        several = rows > 2 and not fixed and capability.on(self.device).matrix
        self.together = TOGETHER if several else 1
        self.each = self.used + (shared is not None)
        self._beside: dict[int, tuple[Tensor, ...]] = {}
        """By the number of matrices."""
        if shared is not None:
            records = shared.gate_up.packed.parts[0].matrix.records
            self._beside = {2: records.chunk(2), 1: (shared.down.packed.records,)}

    def middle(self, rows: Rows, weights: Any, act: str, clamp: Clamp | None) -> Rows:
        """act(gate) · up of every pair."""
        return Rows(self._launch(rows, weights, self.each, act, clamp))

    def products(self, rows: Rows, weights: Any, per: int) -> list[Tensor]:
        """f32[pairs, out] of each matrix; rows of x: one for `per` pairs."""
        return [self._launch(rows, (w,), per) for w in weights]

    def _launch(
        self, rows: Rows, weights: Any, per: int, act: str = ACTS[0], clamp: Clamp | None = None
    ) -> Tensor:
        """f32[pairs, out] of one matrix, or act(first) · second of two."""
        matrix: Matrix = weights[0].packed
        device, pairs, matrices = self.device, self.rows * self.each, len(weights)
        n = matrix.rows // self.bank.stack.count
        y = torch.empty(pairs, n, device=device)
        tiles, blocks, known = tiles_of(n), matrix.blocks, self.bank.lut.numel()
        cut_for, room = self.each if self.fixed else pairs, shapes.room_of(device.index or 0)
        shape, grid = _shape(matrix.format, tiles, blocks, cut_for, matrices, known, self.together, room)
        stack = stack_of(
            [w.packed.records for w in weights], self._beside.get(matrices, ()), self.who, self.bank.lut,
            rows, y, self.used, act, clamp,
        )  # fmt: skip
        cut = cut_of(matrix.fmt, shape, tiles, blocks, grid, matrices, pairs, self.each, per)
        _kernel(device.index or 0, matrix.format, shape, "moe", "moe_gemv").launch(
            (grid, 1, pairs), 32 * shape.warps,
            few_bytes(matrix.fmt, shape, tiles, blocks, grid, matrices, known),
            torch.cuda.current_stream(device).cuda_stream, (stack, cut),
        )  # fmt: skip
        return y

    def _down_cut(self) -> tuple[Shape, int] | None:
        stack, room = self.bank.stack, shapes.room_of(self.device.index or 0)
        matrix: Matrix = stack.down.packed
        tiles, rows = tiles_of(matrix.rows // stack.count), 1 if self.fixed else self.rows
        return _down_shape(matrix.format, tiles, matrix.blocks, self.each, rows, room)

    def down_fits(self, width: int) -> bool:
        """Whether `down` can, of x that wide."""
        stack = self.bank.stack
        hidden = stack.gate_up[0].packed.rows // stack.count
        return self._down_cut() is not None and not hidden % 4 and not width % 4

    def down(
        self, rows: Rows, weight: Tensor | None, shared: SharedExpert | None, x: Tensor, norm: Norm | None,
        residual: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """f32[T, E]: all experts of a row, weighted, in one launch; rows: of every pair, as the
        launch just before made them. All else is older. weight: with ids.
        """
        cut, stack, device = self._down_cut(), self.bank.stack, self.device
        assert cut is not None
        matrix: Matrix = stack.down.packed
        n, count = matrix.rows // stack.count, self.rows
        tiles, blocks, beside = tiles_of(n), matrix.blocks, self._beside.get(1)
        y = torch.empty(count, n, device=device)
        it = down_of(
            matrix.records, None if beside is None else beside[0], self.who, self.used, self.bank.lut, rows,
            weight, None if shared is None else shared.gate, x, norm, residual, y,
        )  # fmt: skip
        (shape, grid), most = cut, -(-tiles // cut[1])
        args = (it, down_cut_of(matrix.fmt, tiles, blocks, grid, self.each))
        _kernel(device.index or 0, matrix.format, shape, "moe_down", "moe_down").launch(
            (grid, 1, count), 32 * shape.warps, down_bytes(matrix.fmt, shape, most, self.each),
            torch.cuda.current_stream(device).cuda_stream, args,
        )  # fmt: skip
        return y


# --- many rows


class _Sorted:
    """Pairs by expert. Sorted on the device: how many each expert has is not known here."""

    def __init__(self, bank: ExpertBank, ids: Tensor) -> None:
        self.count, self.each, self.pairs = bank.stack.count, ids.shape[1], ids.numel()
        self.order = torch.empty(self.pairs, dtype=torch.int32, device=ids.device)
        self.starts = torch.empty(self.count + 1, dtype=torch.int32, device=ids.device)
        moe_kernels.sort_pairs[(self.count + 1,)](
            ids, bank.lut, self.order, self.starts, self.pairs, STEP=SORTED, num_warps=8
        )

    def middle(self, rows: Rows, weights: Any, act: str, clamp: Clamp | None) -> Rows:
        """As `_Few.middle`, not computed yet."""
        gate, up = self.products(rows, weights, self.each)
        return Rows(gate, None, up, act, clamp)

    def products(self, rows: Rows, weights: Any, per: int) -> list[Tensor]:
        """As `_Few.products`."""
        x, factors = rows.dense()
        found = []
        for w in weights:
            room = torch.zeros if INTERPRETED else torch.empty  # pairs without an expert are never read
            y = room(self.pairs, w.packed.rows // self.count, device=x.device)
            large = self.pairs > FEW_PAIRS and capability.on(x.device).matrix  # its tiles want tensor cores
            (self._dense if large else self._packed)(x, factors, w.packed, y, per)
            found.append(y)
        return found

    def _packed(self, x: Tensor, factors: Tensor, matrix: Matrix, y: Tensor, per: int) -> None:
        n = y.shape[1]
        many = self.pairs // FEW_TILE + min(self.count, self.pairs)
        tile = triton.next_power_of_2(n) if INTERPRETED else FEW_TILE
        moe_kernels.grouped[(many, -(-n // tile))](
            x, factors, self.order, self.starts, *matrix.views(), y, n, matrix.blocks, per, tiles_of(n),
            X=triton.next_power_of_2(self.count), EXPERTS=self.count, M=FEW_TILE, ROWS=tile, num_warps=4,
            **matrix.constants(),
        )  # fmt: skip

    def _dense(self, x: Tensor, factors: Tensor, matrix: Matrix, y: Tensor, per: int) -> None:
        """Experts as f16, as many at a time as the scratch holds."""
        n, wide = y.shape[1], x.shape[1]
        step = max(1, min(self.count, SCRATCH_BYTES // 2 // (n * wide)))
        for first in range(0, self.count, step):
            count = min(step, self.count - first)
            scratch = _scratch(x.device, count * n * wide).view(count * n, wide)
            product.dense_rows(matrix, first * n, count * n, scratch)
            tiles = self.pairs // PAIRS + min(count, self.pairs)
            moe_kernels.grouped_dense[(-(-n // ROWS), tiles)](
                x, factors, self.order, self.starts[first:], scratch, y, n, wide, per,
                X=triton.next_power_of_2(count), EXPERTS=count, M=PAIRS, ROWS=ROWS, DEPTH=64, num_warps=4,
                num_stages=3,
            )  # fmt: skip


def _scratch(device: torch.device, need: int) -> Tensor:
    """f16[need], where dense weights of other products are made too."""
    room = max(need, SCRATCH_BYTES // 2) if device.type == "cuda" else need
    return product._scratch(device, room)[:need]


def _given(routed: tuple[Tensor, Tensor], x: Tensor, norm: Norm | None) -> Rows:
    """norm(x), as the router has made it ready where it read the same."""
    if isinstance(routed, Routed) and routed.rows.x is x and routed.rows.norm is norm:
        return routed.rows
    return Rows(x, norm)


def _floats(given: Tensor) -> Tensor:
    """f32[T, k], rows at any stride."""
    given = given.float()
    return given if given.stride(1) == 1 else given.contiguous()


def _combine(
    y: Tensor, ids: Tensor, weight: Tensor, lut: Tensor, shared: Tensor | None, gate: Tensor | None,
    x: Tensor, norm: Norm | None, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    rows, each, width = y.shape
    out = torch.empty(rows, width, device=x.device)
    moe_kernels.combine[(rows, -(-width // COLS))](
        y, ids, lut, weight, y if shared is None else shared, x, x if norm is None else norm.weight,
        y if gate is None else gate, y if residual is None else residual, out, width, each,
        0 if shared is None else shared.stride(0), x.stride(0), 0 if residual is None else residual.stride(0),
        0.0 if norm is None else norm.eps, weight.stride(0),
        K=ids.shape[1], COLS=COLS, WHOLE=triton.next_power_of_2(width), SHARED=shared is not None,
        GATED=gate is not None, NORM=norm is not None, RESIDUAL=residual is not None, num_warps=4,
    )  # fmt: skip
    return out


CUDA = Experts(cuda=True)
PORTABLE = Experts(cuda=False)

__all__ = ["CUDA", "PORTABLE", "Experts"]
