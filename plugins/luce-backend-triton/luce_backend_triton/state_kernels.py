# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201
"""Triton kernels that apply accepted rows: states, windows and pages of all layers at once."""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.row_kernels import column_of
from luce_backend_triton.waiting import wait_for_previous, wait_only


@triton.jit
def stepped(memory, kept, k, u):
    """kept · M + k uᵀ, M [Dk, Dv], rounded alike wherever it is compiled."""
    return tl.fma(memory, kept + tl.zeros_like(memory), k[:, None] * u[None, :])


@triton.jit(do_not_specialize=["path_stride"])
def fold(
    state, log_k, log_u, log_g, states, logs_k, logs_u, logs_g, slots, path, count, path_stride, most,
    KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVB: tl.constexpr, KDA: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """M <- diag(exp g) M + k uᵀ along the accepted rows. Grid (layers · heads, sequences, blocks of Dv).

    state, log_*: those of the first layer; states, logs_*: i64, how far those of every layer lie from
    them.
    """
    wait_only(OVERLAP)
    seq = tl.program_id(1)
    steps = tl.load(count + seq)
    if steps <= 0:
        return
    layer, h = tl.program_id(0) // VH, tl.program_id(0) % VH
    state += tl.multiple_of(tl.load(states + layer), 4)
    log_k += tl.multiple_of(tl.load(logs_k + layer), 4)
    log_u += tl.multiple_of(tl.load(logs_u + layer), 4)
    log_g += tl.multiple_of(tl.load(logs_g + layer), 4)
    slot = tl.load(slots + seq).to(tl.int64)
    c, v = tl.arange(0, DKP), tl.program_id(2) * DVB + tl.arange(0, DVB)
    at = state + ((slot * VH + h) * DK + c[:, None]) * DV + v[None, :]
    inside = (c < DK)[:, None] & (v < DV)[None, :]
    memory = tl.load(at, mask=inside, other=0.0)
    for n in range(steps):
        row = slot * most + tl.load(path + seq * path_stride + n)
        k = tl.load(log_k + (row * KH + h % KH) * DK + c, mask=c < DK, other=0.0)
        u = tl.load(log_u + (row * VH + h) * DV + v, mask=v < DV, other=0.0)
        if KDA:
            g = tl.load(log_g + (row * VH + h) * DK + c, mask=c < DK, other=0.0)
            memory = stepped(memory, tl.exp(g)[:, None], k, u)
        else:
            memory = stepped(memory, tl.exp(tl.load(log_g + row * VH + h)), k, u)
    tl.store(at, memory, mask=inside)


@triton.jit(do_not_specialize=["path_stride"])
def shift_rows(
    state, log, states, logs, slots, path, count, path_stride, most, width,
    ROWS: tl.constexpr, COLS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Append the accepted rows to windows of ROWS rows, keep the newest. states, logs: as for `fold`.

    Grid (layers, sequences, blocks of columns). A thread moves its column down row by row: it reads below
    what it has written.
    """
    wait_only(OVERLAP)
    seq = tl.program_id(1)
    steps = tl.load(count + seq)
    if steps <= 0:
        return
    layer = tl.program_id(0)
    state += tl.multiple_of(tl.load(states + layer), 4)
    log += tl.multiple_of(tl.load(logs + layer), 4)
    slot = tl.load(slots + seq).to(tl.int64)
    c = tl.program_id(2) * COLS + tl.arange(0, COLS)
    for n in range(ROWS):
        taken = n + steps - ROWS
        if taken >= 0:
            row = tl.load(path + seq * path_stride + taken)
            x = tl.load(log + (slot * most + row) * width + c, mask=c < width)
        else:
            x = tl.load(state + (slot * ROWS + n + steps) * width + c, mask=c < width)
        tl.store(state + (slot * ROWS + n) * width + c, x, mask=c < width)


@triton.jit(do_not_specialize=["path_stride", "table_stride"])
def move_entries(
    page, pages, lengths, path, count, block, first, used, path_stride, table_stride, words,
    COLS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Entries of accepted rows from length + path[n] to length + n, as i32. pages: how far from page.

    Grid (page tensors, sequences, blocks of columns). Paths rise, so nothing is read after it was written
    over.
    """
    wait_for_previous(OVERLAP)
    seq = tl.program_id(1)
    steps = tl.load(count + seq)
    page += tl.multiple_of(tl.load(pages + tl.program_id(0)), 4)
    length = tl.load(lengths + seq)
    c = tl.program_id(2) * COLS + tl.arange(0, COLS)
    first += seq * table_stride
    block += seq * table_stride
    columns = tl.load(used + seq)
    for n in range(steps):
        row = tl.load(path + seq * path_stride + n)
        if row != n:
            source = entry_of(block, first, columns, length + row, BLOCK)
            target = entry_of(block, first, columns, length + n, BLOCK)
            x = tl.load(page + source * words + c, mask=c < words)
            tl.store(page + target * words + c, x, mask=c < words)


@triton.jit
def entry_of(block, first, columns, token, BLOCK: tl.constexpr):
    column = column_of(first, columns, token, BLOCK)
    return tl.load(block + column).to(tl.int64) * BLOCK + token - tl.load(first + column)
