"""Every kernel compiles for old and new GPUs, none of which is needed for it; CUDA C++ without spilling."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from luce_backend_triton import few_floats, few_rows, nvrtc, shapes
from luce_backend_triton.few_rows import Shape
from luce_backend_triton.formats import FORMATS
from luce_backend_triton.shapes import Room

from luce_core.errors import EngineError

sys.path.insert(0, str(Path(__file__).parent))
import compile_cuda

H200 = Room(132, 232448, 233472)
SMALL = Room(20, 65536, 65536)
"""Compute capability 7.5."""
NVCC = shutil.which("nvcc")
SPILLS = """
extern "C" __global__ void spills(const int* at, int* to) {
  int kept[64];
  for (int i = 0; i < 64; i++) kept[i] = at[i];
  for (int i = 0; i < 64; i++) to[i] = kept[at[i] & 63];
}
"""


@pytest.mark.parametrize(
    ("script", "more", "count"), [("compile_kernels.py", (), 10), ("compile_sequences.py", ("--few",), 6)]
)
def test_triton_kernels_compile(tmp_path, script, more, count):
    script = Path(__file__).parent / script
    env = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, str(script), "cuda:90", *more]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(" ok") == count


@pytest.mark.parametrize(
    ("arch", "name", "shape"),
    [
        ("sm_75", "Q5_K", Shape("gemv", 2, 1, 4, 2)),
        ("sm_75", "Q4_K", Shape("mma", 8, 1, 4, 2)),
        ("sm_86", "IQ4_XS", Shape("mma", 16, 2, 4, 2)),
        ("sm_90", "Q6_K", Shape("gemv", 1, 1, 10, 3)),
        ("sm_90", "Q4_K", Shape("mma", 32, 2, 4, 2)),
        ("sm_120", "MXFP4", Shape("gemv", 1, 1, 8, 3)),
    ],
)
def test_cuda_kernels_compile(tmp_path, arch, name, shape):
    compiles(tmp_path, shape.kind, arch, few_rows.defines(FORMATS[name], shape))


@pytest.mark.skipif(nvrtc.nvrtc() is None, reason="no NVRTC")
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_machine_code_spills_nothing_and_has_what_its_source_declares(arch, capsys):
    failed = compile_cuda.main([arch], few=True)
    shown = capsys.readouterr().out
    assert not failed, shown
    assert shown.count(" ok") == 7


@pytest.mark.skipif(nvrtc.nvrtc() is None, reason="no NVRTC")
def test_a_missing_instruction_and_spilled_registers_are_found():
    source = "// instructions: LDG HMMA\n" + SPILLS
    image = nvrtc.compile_cuda(source, "spills", "sm_90", {})
    _, wrong = compile_cuda.faults(image, source)
    assert "no HMMA" in wrong
    assert not any("no LDG" in one for one in wrong)
    assert any("bytes of stack" in one for one in wrong)
    assert any("spilled" in one for one in wrong)


@pytest.mark.parametrize(("arch", "kind", "rows", "cols"), [("sm_75", 2, 1, 1024), ("sm_90", 0, 2, 17408)])
def test_the_kernel_for_floats_compiles(tmp_path, arch, kind, rows, cols):
    compiles(tmp_path, "dense", arch, few_floats.defines_of(kind, rows, cols))


def compiles(tmp_path, name, arch, defined):
    source = "".join((nvrtc.SOURCES / part).read_text() for part in ("common.cuh", f"{name}.cu"))
    if nvrtc.nvrtc() is not None:
        assert nvrtc.compile_cuda(source, name, arch, defined)
        return
    if NVCC is None:
        pytest.skip("neither NVRTC nor nvcc is here to compile CUDA C++ with")
    unit = tmp_path / "unit.cu"
    unit.write_text(source)
    flags = [f"-D{key}={value}" for key, value in defined.items()]
    command = [
        NVCC,
        f"-arch={arch}",
        "-cubin",
        "-Xptxas",
        "-v",
        *flags,
        "-o",
        str(tmp_path / "unit.cubin"),
        str(unit),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spilled = re.findall(r"(\d+) bytes spill", done.stderr)
    assert spilled
    assert set(spilled) == {"0"}


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nvrtc, "nvrtc", lambda: None)
    with pytest.raises(EngineError, match="nvidia-cuda-nvrtc"):
        nvrtc.compile_cuda("", "mma", "sm_90", {})


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


def test_one_row_goes_to_integers_and_many_to_tensor_cores():
    kinds = [shapes.choose(FORMATS["Q4_K"], rows, 1088, 20, H200)[0].kind for rows in (1, 2, 3, 32)]
    assert kinds == ["gemv", "gemv", "mma", "mma"]
