"""Compile every Triton kernel for a list of targets, without a GPU; run by test_compile.py in a fresh
process.

Prints one line per kernel and target: name, target, "ok".
"""

from __future__ import annotations

import re
import sys

import compile_cuda
import triton
from luce_backend_triton import capability, kernels, product
from luce_backend_triton.formats import FORMATS, SCALE_KINDS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    "x": "*fp32", "up": "*fp32", "weight": "*fp32", "out16": "*fp16", "out32": "*fp32", "out8": "*i8",
    "factors": "*fp32", "records": "*u8", "halves": "*fp16", "table": "*fp32", "ids": "*i32", "y": "*fp32",
    "scale": "*fp32", "bias": "*fp32", "residual": "*fp32", "eps": "fp32", "limit": "fp32",
}  # fmt: skip


STACK_BYTES = 1 << 10
"""What a context keeps for each thread that may run. For a kernel that wants more the driver keeps that for
all threads of the card: 3.5 KB took 0.65 GB of an H200, which no plan counts.
"""
STACK_CHECKED = ("cuda:90", "cuda:100", "cuda:110")
"""Others have fewer registers or shared memory for a tile, and not all kernels keep to that there."""
LARGER_STACKS = {"in_turn": 1536}
"""Of --deterministic alone, with heads of 128."""
LDS_BYTES = 64 << 10
"""Shared memory of a work group of AMD's."""


def gpu_of(target):
    """Of "cuda:90" or "hip:gfx1100": CDNA (gfx9) has warps of 64, RDNA of 32."""
    kind, _, arch = target.partition(":")
    if kind == "cuda":
        return GPUTarget(kind, int(arch), 32)
    return GPUTarget(kind, arch, 64 if arch.startswith("gfx9") else 32)


def ability_of(target):
    """Of a target; others than NVIDIA's choose as cards without tensor cores do."""
    kind, _, arch = target.partition(":")
    return capability.of_features(frozenset({f"sm_{arch}" if kind == "cuda" else "sm_61"}))


def room_of(target):
    """Bytes of shared memory of a thread block."""
    arch = target.replace("cuda:", "sm_")
    return compile_cuda.SHARED[arch][0] << 10 if arch in compile_cuda.SHARED else LDS_BYTES


def compiled(kernel, signature, places, target, options=None, known=None):
    """The kernel, whose shared memory fits a thread block there. known: of arguments, such as alignment."""
    source = ASTSource(kernel, signature, places, known)
    made = triton.compile(source, target=gpu_of(target), options=options)
    assert made.asm
    shared, most = made.metadata.shared, room_of(target)
    assert shared <= most, f"{kernel.fn.__name__} wants {shared} bytes of shared memory; {target} has {most}"
    if target in STACK_CHECKED:
        usage = compile_cuda.dump(made.asm["cubin"], "-res-usage")
        name = kernel.fn.__name__
        check_stack(f"{name} for {target}", usage, LARGER_STACKS.get(name, STACK_BYTES))
    return made


def check_stack(what, usage, most=STACK_BYTES):
    """usage: as cuobjdump -res-usage says it."""
    (stack,) = (int(one) for one in re.findall(r"STACK:(\d+)", usage))
    assert stack <= most, f"{what} wants {stack} bytes of stack; there are {most}"


def constants(name):
    fmt = FORMATS[name]
    return {
        "RECORD": fmt.record_bytes, "CODES": fmt.code_bytes, "BITS": fmt.bits, "TABLE": bool(fmt.table),
        "ZERO": fmt.zero, "SCALES": SCALE_KINDS.index(fmt.scales),
    }  # fmt: skip


def variants(target):
    """(kernel, constants, types that differ from POINTERS)."""
    ability = ability_of(target)
    overlap = ability.overlap
    has = {"HAS_SCALE": True, "HAS_BIAS": True, "HAS_RESIDUAL": True}
    row = {"NORM": True, "ACT": "", "CLAMP": 0, "CHUNK": 1024}
    act = {**row, "NORM": False, "ACT": "gelu", "CLAMP": 1}
    yield kernels.prepare, {**row, "MMA": False, "PER": 1, "OVERLAP": False}, {}
    other = {"MMA": True, "PER": product.BLOCKS, "OVERLAP": overlap}
    yield kernels.prepare, {**act, **other, "ACT": "silu", "CLAMP": 0}, {}
    yield kernels.prepare, {**row, **other, "CHUNK": product.WIDEST}, {}
    yield kernels.prepare_dense, act, {"out": "*fp16"}
    yield kernels.prepare_dense, {**act, "ACT": "gelu_tanh", "CLAMP": 2}, {"out": "*fp16"}
    yield kernels.prepare_dense, row, {"out": "*bf16"}
    yield kernels.finish, {**has, "CHUNK": 2048}, {}
    yield kernels.finish, {**dict.fromkeys(has, False), "CHUNK": 2048}, {}
    yield kernels.dequantize, {**constants("Q5_K"), "IDS": True, "ROWS": 1}, {"out": "*fp32"}
    yield kernels.dequantize, {**constants("MXFP4"), "IDS": False, "ROWS": 16}, {"out": "*fp16"}
    yield kernels.dequantize, {**constants("NVFP4"), "IDS": True, "ROWS": 1}, {"out": "*fp32"}
    yield kernels.most_of_pairs, {**constants("Q4_K"), "ROWS": 16}, {"out": "*fp32"}
    yield kernels.lengths, {**constants("Q4_K"), "ROWS": 16}, {"out": "*fp32"}
    rows = product.PORTABLE_TILE if ability.matrix else product.PORTABLE_SMALL
    for m in {16, rows}:
        tile = {"M": m, "ROWS": product.PORTABLE_ROWS}
        yield kernels.linear, {**constants("Q6_K"), **has, **tile}, {"x": "*fp16"}


def main(targets):
    for target in targets:
        for kernel, constexprs, types in variants(target):
            signature = {
                name: "constexpr" if name in constexprs else {**POINTERS, **types}.get(name, "i32")
                for name in kernel.arg_names
            }
            places = {(kernel.arg_names.index(name),): value for name, value in constexprs.items()}
            wide = kernel is kernels.linear
            compiled(
                kernel, signature, places, target, {"num_warps": product.PORTABLE_WARPS} if wide else None
            )
            print(kernel.fn.__name__, target, "ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
