"""Every kernel compiles for old and new GPUs, none of which is needed for it; CUDA C++ without spilling."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from luce_backend_triton import nvrtc, shapes
from luce_backend_triton.formats import FORMATS
from luce_backend_triton.shapes import Room

from luce_core.errors import EngineError

sys.path.insert(0, str(Path(__file__).parent))
import compile_cuda
import compile_kernels
import compile_sequences

H200 = Room(132, 232448, 233472)
SMALL = Room(20, 65536, 65536)
"""Compute capability 7.5."""
VOLTA = Room(80, 98304, 98304, mma=False)
PASCAL = Room(20, 49152, 98304, mma=False)
PLAIN = {"prepare", "prepare_dense", "finish", "dequantize", "most_of_pairs", "lengths", "linear"}
SEQUENCES = {
    "make_rows", "attend", "attend_one", "held_one", "solve", "carry", "best_of_part", "attend_parts",
    "in_turn", "linear_floats",
}  # fmt: skip
SPILLS = """
extern "C" __global__ void spills(const int* at, int* to) {
  int kept[64];
  for (int i = 0; i < 64; i++) kept[i] = at[i];
  for (int i = 0; i < 64; i++) to[i] = kept[at[i] & 63];
}
"""


def test_triton_kernels_compile(tmp_path):
    """In a process without the interpreter."""
    script = Path(__file__).parent / "compile_sequences.py"
    env = {
        "PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path),
    }  # fmt: skip
    command = [sys.executable, str(script), "cuda:90", "--few"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    names = [line.split()[0] for line in done.stdout.splitlines() if line.endswith(" ok")]
    assert set(names) == {*PLAIN, *SEQUENCES}


@pytest.mark.parametrize(
    ("events", "right"),
    [
        ("st.shared fence.proxy.async bar.sync wgmma.mma_async", True),
        ("st.shared bar.sync fence.proxy.async wgmma.mma_async", False),
        ("st.shared bar.sync wgmma.mma_async", False),
        ("stmatrix fence.proxy.async wgmma.mma_async", False),
        ("st.shared fence.proxy.async bar.sync wgmma.mma_async bar.sync wgmma.mma_async", True),
        ("st.shared fence.proxy.async bar.sync wgmma.mma_async st.shared wgmma.mma_async", False),
        ("st.shared fence.proxy.async bra $B; $A: wgmma.mma_async ret; $B: bar.sync bra $A;", True),
        ("st.shared fence.proxy.async @%p1 bra $B; wgmma.mma_async ret; $B: bar.sync ret;", False),
        ("$A: wgmma.mma_async st.shared fence.proxy.async bar.sync @!%p2 bra $A; ret;", True),
        ("$A: wgmma.mma_async st.shared fence.proxy.async @%p2 bra $A; ret;", False),
    ],
)
def test_operands_that_are_not_published_are_found(events, right):
    if right:
        compile_sequences.check_fences(events)
    else:
        with pytest.raises(AssertionError, match="before it is published"):
            compile_sequences.check_fences(events)


@pytest.mark.skipif(nvrtc.nvrtc() is None, reason="no NVRTC")
@pytest.mark.parametrize("arch", compile_cuda.FEW)
def test_machine_code_spills_nothing_and_has_what_its_source_declares(arch, capsys):
    failed = compile_cuda.main([arch], few=True)
    shown = capsys.readouterr().out
    assert not failed, shown
    assert shown.count(" ok") == len(compile_cuda.FEW[arch])


@pytest.mark.skipif(nvrtc.nvrtc() is None, reason="no NVRTC")
def test_a_missing_instruction_and_spilled_registers_are_found():
    source = "// instructions: LDG HMMA\n" + SPILLS
    image = nvrtc.compile_cuda(source, "spills", "sm_90", {})
    _, wrong = compile_cuda.faults(image, source, "sm_90", {})
    assert "no HMMA" in wrong
    assert not any("no LDG" in one for one in wrong)
    assert any("bytes of stack" in one for one in wrong)
    assert any("spilled" in one for one in wrong)


def test_instructions_may_be_declared_for_some():
    """From an architecture on, and where something is defined."""
    source = "\n".join(
        (
            "// instructions: HMMA LDG",
            "// instructions from sm_90: UBLKCP",
            "// instructions from sm_90, ACT or THEN: FENCE",
        )
    )

    def wanted(arch, **defined):
        return compile_cuda.wanted(source, arch, defined)

    assert wanted("sm_80", ACT=1) == ["HMMA", "LDG"]
    assert wanted("sm_90", ACT=0) == ["HMMA", "LDG", "UBLKCP"]
    assert wanted("sm_120", THEN=1) == wanted("sm_90", ACT=2) == ["HMMA", "LDG", "UBLKCP", "FENCE"]
    with pytest.raises(AssertionError, match="declares no instructions"):
        compile_cuda.wanted("", "sm_90", {})


@pytest.mark.parametrize(("stack", "right"), [(0, True), (1024, True), (1032, False)])
def test_a_stack_that_the_driver_would_make_room_for_is_found(stack, right):
    usage = f"Function attend:\n  REG:255 STACK:{stack} SHARED:0 LOCAL:0\n"
    if right:
        compile_kernels.check_stack("attend for cuda:90", usage)
    else:
        with pytest.raises(AssertionError, match="attend for cuda:90 wants 1032 bytes of stack"):
            compile_kernels.check_stack("attend for cuda:90", usage)


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nvrtc, "nvrtc_paths", list)
    nvrtc.nvrtc.cache_clear()
    try:
        with pytest.raises(EngineError, match=r"for sm_90: .*wheel nvidia-cuda-nvrtc,"):
            nvrtc.compile_cuda("", "mma", "sm_90", {})
        with pytest.raises(EngineError, match="wheel nvidia-cuda-nvrtc-cu12,"):
            nvrtc.compile_cuda("", "gemv", "sm_61", {})
        assert nvrtc.compiler_version("sm_90") == ""
    finally:
        nvrtc.nvrtc.cache_clear()


def test_the_compiler_is_one_that_knows_the_card(monkeypatch):
    new, old = ("new", 13, frozenset({"75", "90"})), ("old", 12, frozenset({"61", "75"}))
    monkeypatch.setattr(nvrtc, "nvrtc_paths", lambda: ["gone", "new", "old"])
    monkeypatch.setattr(nvrtc, "_opened", {"gone": None, "new": new, "old": old}.get)
    nvrtc.nvrtc.cache_clear()
    try:
        archs = ("", "sm_90", "compute_75", "sm_61", "sm_52")
        found = [nvrtc.nvrtc(arch) for arch in archs]
        assert found == ["new", "new", "new", "old", None]
        nvrtc.nvrtc.cache_clear()
        monkeypatch.setattr(nvrtc, "driver_major", lambda: 12)
        assert [nvrtc.nvrtc(arch) for arch in archs] == ["old", "new", "old", "old", None]
    finally:
        nvrtc.nvrtc.cache_clear()


def test_newer_wheels_come_first_and_halves_of_one_not_at_all(monkeypatch, tmp_path):
    names = ("cuda_nvrtc/lib/libnvrtc.so.12", "cuda_nvrtc/lib/libnvrtc.alt.so.12", "cu13/lib/libnvrtc.so.13",
             "cu13/lib/libnvrtc-builtins.so.13.0")  # fmt: skip
    for name in names:
        path = tmp_path / "nvidia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(nvrtc.sys, "path", [str(tmp_path)])
    found = [path for path in nvrtc.nvrtc_paths() if path.startswith(str(tmp_path))]
    assert [Path(path).name for path in found] == ["libnvrtc.so.13", "libnvrtc.so.12"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("room", [H200, SMALL], ids=["H200", "small"])
def test_every_number_of_rows_has_a_kernel_that_fits(name, room):
    for rows in (1, 2, 3, 8, 9, 17, 25, 32, 33, 128):
        for tiles, blocks in ((1, 1), (64, 4), (320, 24), (2176, 20), (15520, 20), (320, 68)):
            found = shapes.choose(FORMATS[name], rows, tiles, blocks, room)
            assert found is not None, (rows, tiles, blocks)
            shape, grid = found
            assert shape.x_rows == rows if shape.kind == "gemv" else shape.x_rows % 8 == 0
            per = grid // room.multiprocessors
            assert room.fits(shape.shared_bytes(FORMATS[name], tiles, blocks, grid), per)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("room", "widest"), [(VOLTA, 68), (PASCAL, 60)], ids=["7.0", "6.1"])
def test_without_tensor_cores_for_it_rows_go_in_passes_of_integers(name, room, widest):
    for rows in (1, 2, 3, 4, 5, 8, 17, room.most_rows):
        for tiles, blocks in ((1, 1), (64, 4), (2176, 20), (320, widest)):
            found = shapes.choose(FORMATS[name], rows, tiles, blocks, room)
            assert found is not None, (rows, tiles, blocks)
            shape, grid = found
            assert shape.kind == "gemv"
            assert 1 <= shape.x_rows <= min(rows, 4)
            shared = shape.shared_bytes(FORMATS[name], tiles, blocks, grid)
            assert room.fits(shared, grid // room.multiprocessors)
    assert shapes.choose(FORMATS[name], 8, 64, 4, room)[0].x_rows == 4
    assert (room.most_rows, SMALL.most_rows) == (32, 128)


def test_one_row_goes_to_integers_and_many_to_tensor_cores():
    kinds = [shapes.choose(FORMATS["Q4_K"], rows, 1088, 20, H200)[0].kind for rows in (1, 2, 3, 32)]
    assert kinds == ["gemv", "gemv", "mma", "mma"]


@pytest.mark.parametrize("source", sorted(nvrtc.SOURCES.glob("*.cu*")), ids=lambda path: path.name)
def test_sources_have_no_generic_lambdas(source):
    """NVRTC 13.0 takes them for functions of the host and refuses them; 13.5 does not."""
    assert not re.search(r"\[[&=]?\]\s*\([^)]*\bauto\b", source.read_text())


def test_what_the_compiler_opens_by_name_is_opened_before_it(tmp_path, monkeypatch):
    """The library of NVRTC 13.0 does not look beside itself for its other half."""
    half, library = tmp_path / "libnvrtc-builtins.so.13.0", tmp_path / "libnvrtc.so.13"
    half.touch()
    opened = []

    def opens(path, mode=0):
        opened.append((path, mode))
        if path == str(library):
            raise OSError("not a library")

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", opens)
    assert nvrtc._opened.__wrapped__(str(library)) is None
    assert opened == [(str(half), nvrtc.ctypes.RTLD_GLOBAL), (str(library), 0)]
