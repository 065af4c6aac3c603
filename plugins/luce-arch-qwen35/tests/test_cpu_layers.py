"""The CPU backend's op layers run every variant. What they have no kernel for is the reference's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from luce_arch_qwen35.images import ImageProcessor

from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.rig import ModelRig

from .hugging_face import written
from .test_vision import context_of, encoder_of, rows_of
from .vision import picture, projector_metadata, projector_tensors, seeing_model

compiler = pytest.importorskip("luce_backend_cpu.compiler", reason="luce-backend-cpu is not installed")

FIXTURES = Path(__file__).parent / "fixtures"
HOOKS = ("luce_arch_qwen35.hooks", "luce_backend_cpu.hooks")
NAMES = ["tiny-qwen35", "tiny-qwen35moe"]


@pytest.mark.parametrize("name", NAMES)
def test_the_c_tier_gives_the_stored_logits(name):
    """F32 files; whole rows by themselves, so nothing is rounded to int8 or bf16."""
    if compiler.library().path is None:
        pytest.skip(compiler.library().reason)
    expected = np.load(FIXTURES / f"{name}.npz")
    ids, logits = expected["input_ids"].tolist(), torch.tensor(expected["logits"])
    rig = ModelRig(FIXTURES / f"{name}.gguf", *HOOKS, layers=("cpu-c-rows",))
    allowed = 2e-5 * float(logits.abs().max())
    assert float((rig.fresh(ids) - logits).abs().max()) <= allowed
    seq = rig.open()
    rig.prefill({seq: ids[:60]})
    tree = rig.hold({seq: [ids[60], 5, ids[61], ids[62]]}, {seq: [-1, 0, 0, 2]})
    assert float((tree.logits[0][[0, 2, 3]] - logits[60:63]).abs().max()) <= allowed
    rig.commit(tree, [[0, 2, 3]])
    decoded = torch.stack([rig.decode(seq, token) for token in ids[63:70]])
    assert float((decoded - logits[63:70]).abs().max()) <= allowed


@pytest.mark.parametrize("quant", [None, "F16"])
def test_the_c_tier_encodes_images_as_the_reference_does(quant, tmp_path):
    """Whole rows by themselves, as above; files hold F32 or F16."""
    if compiler.library().path is None:
        pytest.skip(compiler.library().reason)
    model = seeing_model(vision={"hidden_size": 64, "num_heads": 4, "intermediate_size": 96})
    tensors = projector_tensors(model)
    formats = {name: quant for name, numbers in tensors.items() if quant and numbers.ndim == 2}
    path = write_gguf(tmp_path / "p.gguf", projector_metadata(model), tensors, quant=formats or None)
    files = written(tmp_path / "text.gguf", model.text), path
    media = ImageProcessor(context_of(files)).prepare(np.asarray(picture(100, 150)))
    want = rows_of(encoder_of(files), media)
    got = rows_of(encoder_of(files, HOOKS, ("cpu-c-rows",)), media)
    assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())
