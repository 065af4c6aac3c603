"""Compile the CUDA C++ kernels for a list of architectures, without a GPU, and look at the machine code.

    python compile_cuda.py sm_75 sm_90 sm_120 [--few]

Every kernel must keep its variables in registers and have the instructions that the line
`// instructions: ...` of its source names (regular expressions of SASS). --few: what CI has time for.
Prints one line per kernel: name, format or floats, rows of x, architecture, registers, "ok".
Needs NVRTC (the wheels nvidia-cuda-nvrtc and, before sm_75, nvidia-cuda-nvrtc-cu12) and the cuobjdump of
Triton's wheel, which reads instructions from sm_75 on; of older ones it shows registers and what spills.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from luce_backend_triton import (
    capability,
    delta_one,
    delta_trees,
    few_floats,
    few_rows,
    gated,
    moe,
    nvrtc,
    ready,
    shapes,
)
from luce_backend_triton.few_rows import Shape
from luce_backend_triton.formats import FORMATS
from luce_backend_triton.given import ACT_CODES
from luce_backend_triton.shapes import Room

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
KIB = 1 << 10
SHARED = {
    "sm_61": (48, 96), "sm_70": (96, 96),
    "sm_75": (64, 64), "sm_80": (163, 164), "sm_86": (99, 100), "sm_89": (99, 100), "sm_90": (227, 228),
    "sm_100": (227, 228), "sm_110": (227, 228), "sm_120": (99, 100), "sm_121": (99, 100),
}  # fmt: skip
"""KiB of shared memory of a thread block and of a multiprocessor."""
SPILLED = {"sm_61": 8, "sm_70": 8}
"""Bytes of stack that are let pass: NVRTC 12.9, the last that knows them, keeps a word or two of some kernels
there, with 64 of 255 registers in use.
"""
READ_FROM = "sm_75"
"""The oldest whose instructions cuobjdump shows."""
FEW = {
    "sm_75": ("gemv Q5_K 2", "mma Q4_K 8", "moe Q6_K 1", "moe_down Q6_K 1", "dense BF16 1", "ready silu"),
    "sm_90": (
        "gemv Q6_K 1", "mma Q4_K 32", "mma Q4_K 16 silu", "mma Q6_K 16 then", "mma NVFP4 32", "moe Q4_K 1",
        "moe Q4_K 4", "moe_down Q4_K 1", "dense F16 1", "ready norm", "delta_tree 32", "delta_one 16",
    ),
    "sm_120": ("gemv MXFP4 1", "gemv NVFP4 2", "mma IQ4_XS 16"),
}  # fmt: skip
"""What CI has time for: every source, and every way of scales, codes and copies."""
ROWS = (1, 2, 8, 16, 32)
MAKING = ("Q4_K", "Q6_K", "Q8_0")
TILES, BLOCKS = 1088, 20


def variants(arch):
    """(source, those in front of it, label, definitions)."""
    block, whole = SHARED[arch]
    ability = capability.of_features(frozenset({arch}))
    room = Room(80, block * KIB, whole * KIB, ability.mma, ability.bulk)
    for name in FORMATS:
        for rows in ROWS if ability.mma else (1, 2, 3, 4):
            found = shapes.choose(FORMATS[name], rows, TILES, BLOCKS, room)
            assert found is not None, (arch, name, rows)
            defined = few_rows.defines(FORMATS[name], found[0])
            kind = found[0].kind
            yield kind, tuple(few_rows.FRONTS[kind].split()), f"{name} {rows}", defined
            if kind == "mma" and found[0].tiles == gated.TILES and name in MAKING:
                front = (few_rows.FRONTS[kind],)
                for act in ("silu", "gelu"):
                    yield kind, front, f"{name} {rows} {act}", {**defined, "ACT": ACT_CODES[act]}
                yield kind, front, f"{name} {rows} then", {**defined, "THEN": 1}
            if rows == 1 and name in MAKING:
                yield "gemv", (), f"{name} 1, x made ready", {**defined, "MAKES": 2}
        for source, rows, warps, stages in ("moe", 1, 8, 2), ("moe", 4, 8, 3), ("moe_down", 1, 6, 3):
            if rows == 1 or ability.matrix:
                shape = Shape("gemv", rows, 1, warps, stages)
                defined = few_rows.defines(FORMATS[name], shape)
                yield source, tuple(moe.FRONT.split()), f"{name} {rows}", defined
    for rows in delta_trees.SIZES if ability.matrix else ():
        if delta_trees.shared_bytes(rows) + shapes.BLOCK_RESERVE <= room.block_bytes:
            yield "delta_tree", (delta_trees.FRONT,), f"{rows}", delta_trees.defines_of(rows, 16)
    yield "delta_one", (delta_trees.FRONT,), "16", delta_one.defines_of(16)
    for norm, act in ((True, ""), (False, "silu"), (False, "gelu")) if ability.mma else ():
        yield "ready", (), act or "norm", ready.cut(BLOCKS, norm, act).defines()
    for kind in (0, 1, 2):
        yield "dense", (), f"{('F32', 'F16', 'BF16')[kind]} 1", few_floats.defines_of(kind, 1, 5120)


DECLARED = r"^// instructions(?: from (sm_\d+))?(?:, (\w+(?: or \w+)*))?: (.+)$"


def wanted(source, arch, defined):
    """The instructions a source declares: all, from an architecture on, where something is defined."""
    found = re.findall(DECLARED, source, re.MULTILINE)
    assert found, "the source declares no instructions"
    return [
        one
        for since, names, instructions in found
        if number(arch) >= number(since or arch)
        and (not names or any(defined.get(name) for name in names.split(" or ")))
        for one in instructions.split()
    ]


def number(arch):
    return int(arch.removeprefix("sm_"))


def dump(image, what):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [str(CUOBJDUMP), what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def faults(image, source, arch, defined):
    """(registers, what is wrong with the machine code)."""
    own = set(re.findall(r"^(?:extern.*\n)?(?:extern.* )?(\w+)\(", source, re.MULTILINE))
    usage = [
        numbers
        for name, *numbers in re.findall(
            r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", dump(image, "-res-usage")
        )
        if name in own
    ]
    assert usage, "cuobjdump shows no kernel of this source"
    registers = max(int(one[0]) for one in usage)
    wrong = [
        f"{stack} bytes of stack, {local} local"
        for _, stack, local in usage
        if int(stack) > SPILLED.get(arch, 0) or local != "0"
    ]
    if number(arch) < number(READ_FROM):
        return registers, wrong
    parts = re.split(r"Function : (\w+)", dump(image, "-sass"))
    sass = "".join(text for name, text in zip(parts[1::2], parts[2::2], strict=True) if name in own)
    if spilled := len(re.findall(r"\b(?:STL|LDL)\b", sass)):
        wrong.append(f"{spilled} accesses of spilled registers")
    wrong += [f"no {one}" for one in wanted(source, arch, defined) if not re.search(rf"\b{one}", sass)]
    return registers, wrong


def main(archs, few):
    bad = 0
    for arch in archs:
        for name, front, label, defined in variants(arch):
            if few and f"{name} {label}" not in FEW[arch]:
                continue
            texts = [(nvrtc.SOURCES / part).read_text() for part in nvrtc.parts(*front, name)]
            image = nvrtc.compile_cuda("".join(texts), name, arch, defined)
            registers, wrong = faults(image, texts[-1], arch, defined)
            bad += bool(wrong)
            print(name, label, arch, registers, "; ".join(wrong) or "ok", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main([one for one in given if one.startswith("sm_")] or list(SHARED), "--few" in given))
