"""Compile every Triton kernel for a list of targets, without a GPU; run by test_compile.py in a fresh
process.

Prints one line per kernel and target: name, target, "ok".
"""

from __future__ import annotations

import sys

import triton
from luce_backend_triton import kernels
from luce_backend_triton.formats import FORMATS, SCALE_KINDS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    "x": "*fp32", "up": "*fp32", "weight": "*fp32", "out16": "*fp16", "out32": "*fp32", "out8": "*i8",
    "factors": "*fp32", "records": "*u8", "halves": "*fp16", "table": "*fp32", "ids": "*i32", "y": "*fp32",
    "scale": "*fp32", "bias": "*fp32", "residual": "*fp32", "eps": "fp32", "limit": "fp32",
}  # fmt: skip


def gpu_of(target):
    """Of "cuda:90" or "hip:gfx1100": CDNA (gfx9) has warps of 64, RDNA of 32."""
    kind, _, arch = target.partition(":")
    if kind == "cuda":
        return GPUTarget(kind, int(arch), 32)
    return GPUTarget(kind, arch, 64 if arch.startswith("gfx9") else 32)


def overlaps(target):
    """Whether its launches may begin beside the one before: `product.overlaps`."""
    kind, _, arch = target.partition(":")
    return kind == "cuda" and int(arch) >= 90


def constants(name):
    fmt = FORMATS[name]
    return {
        "RECORD": fmt.record_bytes, "CODES": fmt.code_bytes, "BITS": fmt.bits, "TABLE": bool(fmt.table),
        "ZERO": fmt.zero, "SCALES": SCALE_KINDS.index(fmt.scales),
    }  # fmt: skip


def variants(target):
    """(kernel, constants, types that differ from POINTERS)."""
    overlap = overlaps(target)
    has = {"HAS_SCALE": True, "HAS_BIAS": True, "HAS_RESIDUAL": True}
    row = {"NORM": True, "ACT": "", "CLAMP": 0, "CHUNK": 1024}
    act = {**row, "NORM": False, "ACT": "gelu", "CLAMP": 1}
    yield kernels.prepare, {**row, "MMA": False, "OVERLAP": False, "LATE": False}, {}
    other = {"MMA": True, "ACT": "silu", "CLAMP": 0, "OVERLAP": overlap, "LATE": True}
    yield kernels.prepare, {**act, **other}, {}
    yield kernels.prepare_dense, act, {"out": "*fp16"}
    yield kernels.prepare_dense, {**act, "ACT": "gelu_tanh", "CLAMP": 2}, {"out": "*fp16"}
    yield kernels.prepare_dense, row, {"out": "*bf16"}
    yield kernels.finish, {**has, "CHUNK": 2048}, {}
    yield kernels.finish, {**dict.fromkeys(has, False), "CHUNK": 2048}, {}
    yield kernels.dequantize, {**constants("Q5_K"), "IDS": True, "ROWS": 1}, {"out": "*fp32"}
    yield kernels.dequantize, {**constants("MXFP4"), "IDS": False, "ROWS": 16}, {"out": "*fp16"}
    yield kernels.linear, {**constants("Q6_K"), **has, "M": 16, "ROWS": 32}, {"x": "*fp16"}


def main(targets):
    for target in targets:
        gpu = gpu_of(target)
        for kernel, constexprs, types in variants(target):
            signature = {
                name: "constexpr" if name in constexprs else {**POINTERS, **types}.get(name, "i32")
                for name in kernel.arg_names
            }
            places = {(kernel.arg_names.index(name),): value for name, value in constexprs.items()}
            made = triton.compile(ASTSource(kernel, signature, places), target=gpu)
            assert made.asm
            print(kernel.fn.__name__, target, "ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
