"""Tensors by name, fused or not, packed once, with errors that name them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from luce_core.errors import ModelFormatError
from luce_core.gguf import GgufFile
from luce_core.model.weights import FileWeights
from luce_core.ops import build_ops


@pytest.fixture
def weights(write):
    """weights(changes, ops=..., progress=...) -> FileWeights"""
    opened = []

    def weights(changes=None, ops=None, progress=None, quant=None):
        file = GgufFile.open(write(changes, quant=quant))
        opened.append(file)
        return FileWeights(file, ops or build_ops(), None, "cpu", progress)

    yield weights
    for file in opened:
        file.close()


def test_a_matrix_brings_its_bias_and_scale(weights, tensors):
    bias, scale = np.arange(8, dtype=np.float32), np.array([0.5], np.float32)
    found = weights({"q.bias": bias, "q.scale": scale}).linear("q")
    assert (found.name, found.format, found.out_features, found.in_features) == ("q.weight", "F32", 8, 8)
    np.testing.assert_array_equal(found.packed, tensors["q.weight"])
    assert found.bias.tolist() == list(range(8))
    assert (found.scale.shape, float(found.scale)) == ((), 0.5)
    plain = weights().linear("q")
    assert plain.bias is None
    assert plain.scale is None


def test_the_first_name_present_is_taken(weights):
    assert weights().linear("output", "token_embd").name == "token_embd.weight"
    own = weights({"output.weight": np.ones((12, 8), np.float32)})
    assert own.linear("output", "token_embd").name == "output.weight"


def test_a_tied_head_is_the_same_handle_packed_once(weights):
    packed = []

    def pack(ops, raw):
        packed.append(raw.name)
        return raw

    found = weights(ops=build_ops({"pack_linear": pack}))
    assert found.linear("token_embd") is found.linear("output", "token_embd")
    assert packed == ["token_embd.weight"]


def test_packing_gets_the_bytes_of_the_file(weights, tensors):
    raw = weights(ops=build_ops({"pack_linear": lambda ops, raw: raw})).linear("token_embd").packed
    assert (raw.name, raw.format, raw.shape, raw.device) == ("token_embd.weight", "F32", (12, 8), "cpu")
    assert raw.data.dtype == np.uint8
    assert raw.data.tobytes() == tensors["token_embd.weight"].tobytes()
    assert not raw.data.flags.writeable


def test_a_group_is_its_members_or_the_rows_of_a_fused_matrix(weights, tensors):
    rows = (8, 4, 4)
    parts = [tensors["q.weight"], tensors["k.weight"][:4], tensors["v.weight"][:4]]
    bias = np.arange(16, dtype=np.float32)
    fused = weights({"qkv.weight": np.concatenate(parts), "qkv.bias": bias})
    group = fused.group("", "q", "k", "v", fused="qkv", rows=rows)
    names = [member.name for member in group.members]
    assert names == ["qkv.weight[0:8]", "qkv.weight[8:12]", "qkv.weight[12:16]"]
    for member, part in zip(group.members, parts, strict=True):
        np.testing.assert_array_equal(member.packed, part)
    assert torch.cat([member.bias for member in group.members]).tolist() == bias.tolist()
    single = weights().group("", "q", "k", "v", fused="qkv", rows=rows)
    assert [member.name for member in single.members] == ["q.weight", "k.weight", "v.weight"]
    assert single.packed is None


def test_row_slices_of_a_quantized_matrix_are_its_rows(weights):
    whole = np.random.default_rng(5).standard_normal((6, 64)).astype(np.float32)
    found = weights({"qkv.weight": whole}, quant={"qkv.weight": "Q4_0"})
    group = found.group("", fused="qkv", rows=(2, 4))
    together = torch.cat([member.packed for member in group.members])
    assert group.members[0].format == "Q4_0"
    assert torch.equal(together, found.linear("qkv").packed)


def test_a_group_is_packed_by_the_layer_once(weights):
    calls = []

    def pack_group(ops, members):
        calls.append(members)
        return "packed"

    found = weights(ops=build_ops({"pack_group": pack_group}))
    first = found.group("", "q", "k")
    assert first is found.group("", "q", "k")
    assert first.packed == "packed"
    assert len(calls) == 1


def test_vectors_and_norms(weights, tensors):
    found = weights({"ssm_a": np.array([1.0, 2.0], np.float32)})
    assert found.vec("norm").tolist() == tensors["norm.weight"].tolist()
    assert found.vec("ssm_a").tolist() == [1.0, 2.0]  # a name without .weight
    norm = found.norm("norm", 1e-6)
    assert (norm.eps, norm.weight.dtype) == (1e-6, torch.float32)
    assert found.has("norm")
    assert found.has("ssm_a")
    assert not found.has("rope_freqs")


def test_handles_survive_the_file(write, tensors):
    with GgufFile.open(write()) as file:
        weights = FileWeights(file, build_ops(), None)
        weights.linear("q")
        weights.vec("norm")
    assert weights.vec("norm").tolist() == tensors["norm.weight"].tolist()
    assert weights.linear("q").name == "q.weight"


def test_progress_reaches_the_bytes_that_were_packed(weights, tensors):
    seen = []
    found = weights(progress=lambda done, total: seen.append((done, total)))
    found.linear("q")
    found.group("", "q", "k")
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert seen == [(256, total), (512, total)]


# --- experts


def stacks(rng, fused=False):
    shapes = {"gate_up": (3, 10, 8)} if fused else {"gate": (3, 5, 8), "up": (3, 5, 8)}
    shapes["down"] = (3, 8, 5)
    return {
        f"blk.1.ffn_{name}_exps.weight": rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("fused", [False, True])
def test_experts_are_stacks_with_the_rows_of_one_below_the_other(weights, fused):
    own = stacks(np.random.default_rng(1), fused)
    bank = weights(own).experts(1)
    assert bank.lut.tolist() == [0, 1, 2]
    assert bank.mailbox is None
    assert bank.stack.count == 3
    assert [w.out_features for w in bank.stack.gate_up] == ([30] if fused else [15, 15])
    for handle in (*bank.stack.gate_up, bank.stack.down):
        want = own[handle.name]
        np.testing.assert_array_equal(handle.packed, want.reshape(-1, want.shape[-1]))


def test_experts_bring_their_biases_and_scales(weights):
    bias, scale = np.ones((3, 8), np.float32), np.array([1, 2, 3], np.float32)
    more = {"blk.1.ffn_down_exps.bias": bias, "blk.1.ffn_down_exps.scale": scale}
    down = weights({**stacks(np.random.default_rng(1)), **more}).experts(1).stack.down
    assert down.bias.shape == (24,)
    assert down.scale.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.1.ffn_up_exps.weight": None}, "'blk.1.ffn_up_exps.weight' is missing"),
        ({"blk.1.ffn_up_exps.weight": np.ones((3, 4, 8), np.float32)}, "'blk.1.ffn_up_exps.weight' has"),
        ({"blk.1.ffn_gate_exps.weight": np.ones((2, 5, 8), np.float32)}, "'blk.1.ffn_gate_exps.weight' has"),
        ({"blk.1.ffn_gate_exps.weight": np.ones((15, 8), np.float32)}, "three dimensions"),
        ({"blk.1.ffn_down_exps.weight": np.ones((3, 7, 5), np.float32)}, "'blk.1.ffn_gate_exps.weight' has"),
        ({"blk.1.ffn_down_exps.bias": np.ones(24, np.float32)}, "wanted .3, 8."),
        ({"blk.1.ffn_down_exps.scale": np.ones(2, np.float32)}, r"one per expert \(3\)"),
    ],
)
def test_experts_that_do_not_fit_are_named(weights, changes, message):
    with pytest.raises(ModelFormatError, match=message):
        weights({**stacks(np.random.default_rng(1)), **changes}).experts(1)


@pytest.mark.parametrize(
    ("changes", "use", "message"),
    [
        ({"q.weight": None}, lambda w: w.linear("q"), "'q.weight' is missing"),
        ({}, lambda w: w.linear("output", "other"), "'output.weight' is missing"),
        ({}, lambda w: w.vec("absent"), "'absent.weight' is missing"),
        ({}, lambda w: w.linear("norm"), "'norm.weight' has .* .8.; wanted two dimensions"),
        ({}, lambda w: w.norm("q", 1e-5), "'q.weight' has .* .8, 8.; wanted one dimension"),
        ({"q.bias": np.ones(7, np.float32)}, lambda w: w.linear("q"), "'q.bias' has .* .7.; wanted .8."),
        ({"q.scale": np.ones(2, np.float32)}, lambda w: w.linear("q"), "'q.scale' has 2 elements"),
        ({}, lambda w: w.group("", fused="q", rows=(4, 3)), "'q.weight' has 8 rows; wanted 4 \\+ 3 rows"),
        ({}, lambda w: w.experts(3), "'blk.3.ffn_down_exps.weight' is missing"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(weights, changes, use, message):
    with pytest.raises(ModelFormatError, match=message):
        use(weights(changes))


def test_a_stored_matrix_is_read_by_row_and_never_packed(weights, tensors):
    packed, seen = [], []

    def pack(ops, raw):
        packed.append(raw.name)
        return raw

    found = weights(
        ops=build_ops({"pack_linear": pack}), progress=lambda done, total: seen.append((done, total))
    )
    table = found.stored("token_embd")
    assert (table.name, table.num_rows, table.width) == ("token_embd.weight", 12, 8)
    np.testing.assert_array_equal(table.read(np.array([3, 11])), tensors["token_embd.weight"][[3, 11]])
    assert found.stored("token_embd") is table
    assert packed == []
    assert [done for done, _ in seen] == [12 * 8 * 4]  # it counts as done: nothing of it is left to load
    with pytest.raises(ModelFormatError, match=r"'absent.weight' is missing"):
        found.stored("absent")
