"""act(gate) · up made ready for down's product by the product that gives gate and up (csrc/sums.cuh)."""

from __future__ import annotations

from attrs import evolve
from torch import Tensor

from luce_backend_triton import capability, few_rows
from luce_backend_triton.formats import RECORD_COLS
from luce_backend_triton.matrix import Dense, Group, Matrix, Part
from luce_backend_triton.product import Rows, few_of, most_of_pairs

MADE = True
"""Whether it is; otherwise csrc/ready.cu makes it of gate and up."""
TIMES_32 = ("pair",)
"""Kinds of scales in whose products a whole sum of 32 columns is a half: those of what is made here may be
more.
"""
TILES = 2
"""Row tiles of a warp: one of gate, one of up."""


def bounded(group: Group) -> Group:
    """With `Part.most` where the group may be gate and up: one matrix of two equal members without bias, of
    whole blocks of 256 rows. Reads the matrix once.
    """
    if len(group.parts) != 1:
        return group
    part, matrix = group.parts[0], group.parts[0].matrix
    rows = [member.out_features for member in part.members]
    alike = len(rows) == 2 and rows[0] == rows[1] and rows[0] % RECORD_COLS == 0
    if not isinstance(matrix, Matrix) or not alike or part.bias is not None or not useful(matrix):
        return group
    return Group((evolve(part, most=most_of(matrix)),))


def useful(matrix: Matrix) -> bool:
    """Whether csrc/mma.cu may meet it."""
    return matrix.records.is_cuda and capability.on(matrix.records.device).mma


def most_of(matrix: Matrix) -> Tensor:
    """`Part.most` of gate's rows, then as many of up."""
    return most_of_pairs(matrix).amax(0, keepdim=True)


def made(part: Part, rows: Rows, act: str, down: Matrix | Dense, cuda: bool) -> Rows | None:
    """act(gate) · up of rows, ready for down's product alone; None: gate and up are to be made, nothing was
    done but `rows.few`.
    """
    m, matrix = rows.x.shape[0], part.matrix
    if not MADE or part.most is None or rows.norm is None or not isinstance(matrix, Matrix):
        return None
    if not isinstance(down, Matrix) or down.cols != matrix.rows // 2 or down.fmt.scales in TIMES_32:
        return None
    found, behind = few_of(matrix, m, cuda), few_of(down, m, cuda)
    if found is None or behind is None or (found[0].kind, behind[0].kind) != ("mma", "mma"):
        return None
    shape, grid = found
    if shape.tiles != TILES or shape.warps % 2:
        return None
    x = rows.few("mma")
    if not rows.lengths:
        return None
    y = x.new_empty(down.blocks, m, few_rows.X_BYTES)
    few_rows.launch(
        matrix.format, matrix.records, down.cols, x, y.transpose(0, 1),
        evolve(shape, act=act, even=rows.even), grid,
        scale=part.most, divide=rows.divide,
    )  # fmt: skip
    rows.read()
    return Rows.ready("mma", y, down.cols)


__all__ = ["bounded", "made", "most_of"]
