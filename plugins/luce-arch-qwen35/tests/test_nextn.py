"""The MTP block against one built from Hugging Face's layers, with its pages allocated beside the trunk's."""

from __future__ import annotations

import pytest
import torch

from luce_core.contracts import CacheOptions, Commit, Field
from luce_core.errors import PluginError
from luce_core.gguf import read_header
from luce_core.model.batch import make_batch
from luce_core.ops import Recorder, replay
from luce_core.testing.rig import ModelRig, describe

from .hugging_face import random_model, written

HOOKS = "luce_arch_qwen35.hooks"
TOLERANCE = 2e-5


class NextnRig(ModelRig):
    """A rig whose layout has the pages of the MTP block too, in the block table of the trunk's."""

    def __init__(self, path, *hooks):
        super().__init__(path, *hooks, nextn=True)

    def batch(self, phase, seq, tokens, parents=None):
        rows = self._rows(seq, tokens, parents=parents, wanted=range(len(tokens)))
        return make_batch(phase, [rows], axes=3)

    def commit_rows(self, batch, path):
        commit = Commit(torch.tensor([path], dtype=torch.int32), torch.tensor([len(path)]))
        self.backend.commit(batch, commit)
        self.backend.commit_nextn(batch, commit)


@pytest.fixture(params=["qwen35", "qwen35moe", "own head, norm of the trunk"])
def case(request, tmp_path):
    """(rig, random model, ids)"""
    arch = "qwen35" if request.param.startswith("own") else request.param
    random = random_model(arch, {"linear_num_value_heads": 4})
    last, more, drop = random.config.num_hidden_layers, {}, ()
    if request.param.startswith("own"):
        drop = (f"blk.{last}.nextn.shared_head_norm.weight",)
        with torch.no_grad():
            random.mtp.norm.weight.copy_(random.model.model.norm.weight)
        state = random.model.state_dict()
        more = {f"blk.{last}.nextn.embed_tokens.weight": state["model.embed_tokens.weight"].numpy()}
        more |= {f"blk.{last}.nextn.shared_head_head.weight": state["lm_head.weight"].numpy()}
    rig = NextnRig(written(tmp_path / "m.gguf", random, nextn=True, drop=drop, **more), HOOKS)
    ids = torch.randint(0, 101, (60,), generator=torch.Generator().manual_seed(2))
    return rig, random, ids


def wanted(random, ids):
    """(logits of the block, its normed finals, logits of the block going on from these), all rows."""
    with torch.no_grad():
        hidden = random.model.model(ids[None]).last_hidden_state[0]
        normed = random.mtp(random.model, ids, before(hidden))
        again = random.mtp(random.model, ids, before(normed))
        return random.model.lm_head(normed), random.model.lm_head(again)


def before(final):
    """The row of the token before each; zeros for the first."""
    return torch.cat((torch.zeros_like(final[:1]), final[:-1]))


def assert_close(got, want):
    assert got.shape == want.shape
    worst = float((got - want).abs().max() / want.abs().max())
    assert worst <= TOLERANCE, f"logits differ by {worst:.2g} of the largest"


def test_the_block_answers_like_hugging_faces_layers(case):
    rig, random, ids = case
    nextn, seq = rig.backend.nextn, rig.open()
    batch = rig.batch("prefill", seq, ids.tolist())
    final = rig.backend.forward(batch).final
    assert_close(nextn.logits(nextn.trunk(batch, before(final))), wanted(random, ids)[0])


def test_what_goes_on_from_the_blocks_own_finals(case):
    rig, random, ids = case
    nextn, seq = rig.backend.nextn, rig.open()
    batch = rig.batch("prefill", seq, ids.tolist())
    final = nextn.trunk(batch, before(rig.backend.forward(batch).final))
    following = nextn.nextn
    assert_close(following.logits(following.trunk(batch, before(final))), wanted(random, ids)[1])
    assert following.nextn is following


def test_chunks_a_tree_and_its_commit_leave_the_pages_of_a_whole_run(case):
    """Prefill in two chunks, then a tree with a wrong branch; the commit moves the block's entries too."""
    rig, random, ids = case
    want = wanted(random, ids)[0]
    nextn, seq, last, got = rig.backend.nextn, rig.open(), None, []
    for part in (ids[:20], ids[20:50]):
        batch = rig.batch("prefill", seq, part.tolist())
        final = rig.backend.forward(batch).final
        came = before(final) if last is None else torch.cat((last, final[:-1]))
        got.append(nextn.logits(nextn.trunk(batch, came)))
        last = final[-1:]
        rig.blocks.advance(seq, part.tolist())
    wrong = (int(ids[51]) + 1) % 101
    tokens = [int(ids[50]), wrong, int(ids[51]), wrong, int(ids[52])]
    parents = [-1, 0, 0, 2, 2]
    batch = rig.batch("held", seq, tokens, parents)
    final = rig.backend.forward(batch).final
    came = torch.stack([final[parent] if parent >= 0 else last[0] for parent in parents])
    path = [0, 2, 4]
    got.append(nextn.logits(nextn.trunk(batch, came))[path])
    rig.commit_rows(batch, path)
    rig.blocks.advance(seq, [tokens[row] for row in path])
    last = final[4:5]
    for token in ids[53:].tolist():
        batch = rig.batch("held", seq, [token])
        final = rig.backend.forward(batch).final
        got.append(nextn.logits(nextn.trunk(batch, last)))
        rig.commit_rows(batch, [0])
        rig.blocks.advance(seq, [token])
        last = final
    assert_close(torch.cat(got), want)


def test_the_block_is_written_with_ops_alone(case):
    rig, _, ids = case
    seq, ops = rig.open(), rig.backend.ops
    batch = rig.batch("prefill", seq, ids.tolist())
    came = before(rig.backend.forward(batch).final)
    nextn, recorder = rig.backend.nextn, Recorder(ops)
    nextn.ops = recorder
    trunk, logits = (
        recorder.record(nextn.trunk, ("batch", "final")),
        recorder.record(nextn.logits, ("final",)),
    )
    nextn.ops = ops
    direct = nextn.trunk(batch, came)
    (replayed,) = replay(trunk, ops, {"batch": batch, "final": came})
    assert torch.equal(direct, replayed)
    assert torch.equal(nextn.logits(direct), replay(logits, ops, {"final": direct})[0])


def test_without_finals_it_says_so(case):
    rig, _, ids = case
    with pytest.raises(PluginError, match="without the finals"):
        rig.backend.nextn.trunk(rig.batch("prefill", rig.open(), ids.tolist()))


def test_a_trunk_without_the_pages_runs_alone(case):
    rig, random, ids = case
    plain = ModelRig(rig.plan.path, HOOKS)
    assert plain.backend.nextn is None
    with torch.no_grad():
        assert_close(plain.fresh(ids.tolist()), random.model(ids[None]).logits[0])


def test_the_spec_has_its_pages_beside_the_trunks(case):
    rig, random, _ = case
    spec = describe(rig.registry, rig.plan.path, CacheOptions(0))
    assert spec.num_layers == 4
    assert [pages.name for pages in spec.layout.pages] == ["blk.3.kv"]
    (pages,) = spec.nextn_layout.pages
    assert (pages.name, pages.group, pages.layer) == ("blk.4.kv", "full", 4)
    assert pages.fields == {"k": Field((2, 32), "kv.k"), "v": Field((2, 32), "kv.v")}
    block = [t for name, t in read_header(rig.plan.path).tensors.items() if name.startswith("blk.4.")]
    unused = 0
    if random.arch == "qwen35moe":  # of the trunk's four layers: six of eight experts are not read
        unused = 4 * 6 * 3 * 24 * 48 * 4
    table = 101 * 48 * 4
    read = spec.weight_bytes - sum(tensor.num_bytes for tensor in block) - table - unused
    assert spec.active_bytes == read
