"""Kernels of csrc without one of their waits or barriers, run on the CPU: that one reads what it copies ahead
before it is there, or writes over what is still read, is seen. As they are, all of these pass in test_simt.py
and test_delta_trees.py.
"""

from __future__ import annotations

import pytest
from luce_backend_triton.few_rows import Shape

from luce_core.contracts import Clamp

from . import simt, test_delta_trees, test_simt

pytestmark = pytest.mark.skipif(simt.GXX is None, reason="no g++ here to compile CUDA C++ for the CPU with")


def gemv(*fixtures):
    test_simt.test_gemv(*fixtures, "Q4_K", 112, 2560, 5, Shape("gemv", 1, 1, 3, 3))


def mma(*fixtures):
    """With copies lane by lane; test_bulk.py has the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simt, "BULK", False)
        test_simt.test_mma(*fixtures, "Q4_K")


def moe(*fixtures):
    test_simt.test_experts(*fixtures, "Q6_K", 1, 1, 2, "gelu", Clamp(0.5), "alone")


def moe_of_ready(*fixtures):
    test_simt.test_experts(*fixtures, "Q6_K", 1, 1, 2, "gelu", Clamp(0.5), "ready")


def moe_down(*fixtures):
    test_simt.test_all_experts_of_a_row_at_once(*fixtures, "Q4_K", 512, 3, 4, 3, False, False)


CHANGES = {
    "gemv: records": (gemv, " wait();\n", ""),
    "gemv: x": (gemv, " wait_all();\n#endif", "\n#endif"),
    "gemv: the ring": (gemv, " __syncwarp();\n    fetch();", " fetch();"),
    "mma": (mma, " wait();\n", ""),
    "mma: the ring": (mma, " wait();\n        __syncthreads();\n", " wait();\n"),
    "moe: records, one too late": (moe, " wait_but<STAGES - 1>", " wait_but<STAGES>"),
    "moe: x, one too late": (moe_of_ready, " wait_but<STAGES>", " wait_but<STAGES + 1>"),
    "moe: the ring": (moe, "lane);\n    __syncwarp();\n    fetch();", "lane);\n    fetch();"),
    "moe_down: records": (moe_down, " wait_but<STAGES - 1>();", ""),
    "moe_down: the ring": (moe_down, " __syncwarp();\n        fetch();", " fetch();"),
}


@pytest.mark.parametrize(("run", "text", "instead"), CHANGES.values(), ids=CHANGES)
def test_products(tmp_path, blocks, dequantized, monkeypatch, run, text, instead):
    change(monkeypatch, text, instead)
    with pytest.raises(AssertionError, match="relative error"):
        run(tmp_path, blocks, dequantized)


@pytest.mark.usefixtures("wide_heads")
@pytest.mark.parametrize("text", [" wait_all();\n  __syncthreads();", " wait_all();  // for"])
def test_trees(tmp_path, monkeypatch, text):
    change(monkeypatch, text, text.replace("wait_all();", ""))
    library = test_delta_trees.build(tmp_path, 16)
    with pytest.raises(AssertionError, match="norm"):
        test_delta_trees.run(lambda size: library, 16, (1, 19, 9, {"parents": test_delta_trees.WIDE[:9]}))


def change(monkeypatch, text, instead):
    """text: stands once in the source that is compiled next."""
    source_of = simt.source_of

    def changed(*names):
        source = source_of(*names)
        assert source.count(text) == 1, f"{text!r} in {names}: got {source.count(text)} times, wanted once"
        return source.replace(text, instead)

    monkeypatch.setattr(simt, "source_of", changed)
