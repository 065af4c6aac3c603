"""An MTP block behind a model: recorded, rewritten, committed apart from the trunk, its layout joined."""

from __future__ import annotations

import attrs
import pytest
import torch

from luce_core.cache.layout import joined
from luce_core.contracts import Commit, Field, Group, Pages, SeqTable, Slot, StateLayout
from luce_core.errors import PluginError
from luce_core.model.batch import RowSet, make_batch
from luce_core.model.loader import Loader
from luce_core.ops import replay

from .conftest import LAYOUT, WIDTH, OneLayer

TABLE = {"full": SeqTable((3, 1, 4, 0), (0, 4, 8, 12))}
PROMPT = [5, 1, 7, 2, 2, 9]
NEXTN = StateLayout(
    groups=(Group("full"),),
    pages=(Pages("mtp.kv", "full", 1, LAYOUT.pages[0].fields),),
    slots=(Slot("mtp.conv", 1, Field((2, WIDTH), "f32"), {"row": Field((WIDTH,), "f32")}, "shift"),),
)


class Block(OneLayer):
    """The same layer over a state of its own; its input is the embedding and the final together."""

    def __init__(self, spec, weights, ops, scale):
        super().__init__(spec, weights, ops)
        self.scale = scale
        self.kv, self.slot = weights.region("mtp.kv"), weights.slot("mtp.conv")

    def trunk(self, batch, final=None):
        ops = self.ops
        x = ops.add(ops.embed(batch, self.table, scale=self.scale), final)
        q, k, v = ops.norm_linear(x, self.norm, self.qkv)
        k = ops.conv_window(batch, k, self.conv, self.slot)
        y = ops.attention(batch, q, k, v, self.kv, self.attention)
        return ops.linear_out(y, self.out, residual=x)


class WithBlocks(OneLayer):
    """Two blocks; the second goes on from its own finals."""

    def __init__(self, spec, weights, ops):
        super().__init__(spec, weights, ops)
        if spec.runs_nextn:
            first, second = Block(spec, weights, ops, 1.0), Block(spec, weights, ops, 3.0)
            self.nextn, first.nextn, second.nextn = first, second, second


@pytest.fixture
def load(plan, write, sizes):
    """load(layer, nextn) -> Model"""
    path = write()

    def load(layer=None, nextn=True):
        made = plan(path, op_layers=("layer",) if layer else ())
        layout = joined(LAYOUT, NEXTN) if nextn else LAYOUT
        spec = attrs.evolve(made.spec, layout=layout, nextn_layout=NEXTN)
        layers = {"layer": layer or {}}
        return Loader(lambda arch: WithBlocks, layers.__getitem__, sizes).load(attrs.evolve(made, spec=spec))

    return load


def prefilled(model):
    """(batch, finals of the tokens before)"""
    batch = make_batch("prefill", [RowSet(1, 0, PROMPT, TABLE)])
    final = model.backend.forward(attrs.evolve(batch, wanted=torch.arange(6, dtype=torch.int32))).final
    return batch, torch.cat((torch.zeros_like(final[:1]), final[:-1]))


def chain_of(model):
    """Logits of the block, and of what goes on from it, twice."""
    batch, final = prefilled(model)
    block, found = model.backend.nextn, []
    for _ in range(3):
        final = block.trunk(batch, final)
        found.append(block.logits(final))
        block = block.nextn
    return torch.stack(found)


def test_without_its_state_there_is_no_block(load):
    model = load(nextn=False)
    assert not model.backend.spec.runs_nextn
    assert model.backend.nextn is None
    assert model.backend.nextn_programs() == ()


def test_every_network_of_the_chain_is_recorded_once(load):
    model = load()
    programs = model.backend.nextn_programs()
    assert [one.following for one in programs] == [1, 1]
    assert [one.trunk.inputs for one in programs] == [("batch", "final")] * 2
    batch, final = prefilled(model)
    block = model.backend.nextn
    slot = model.state.slots["mtp.conv"].state
    for one in (programs[0], programs[1], programs[1]):
        before = slot.clone()
        direct = block.trunk(batch, final)
        slot.copy_(before)  # prefill writes through
        (replayed,) = replay(one.trunk, model.ops, {"batch": batch, "final": final})
        assert torch.equal(replayed, direct)
        (logits,) = replay(one.logits, model.ops, {"final": direct})
        assert torch.equal(logits, block.logits(direct))
        block, final = block.nextn, direct


def test_a_rewrite_sees_the_blocks_and_what_it_makes_of_them_runs(load):
    seen, ran = [], []

    def watch(program, ops):
        seen.append(program.inputs)
        first = program.calls[0]
        return attrs.evolve(program, calls=(attrs.evolve(first, op=f"w.{first.op}"), *program.calls[1:]))

    def spy(op):
        def call(ops, *args, **kwargs):
            ran.append(op)
            return getattr(ops, op)(*args, **kwargs)

        return call

    layer = {"*": watch, "w.embed": spy("embed"), "w.head": spy("head")}
    want = chain_of(load())
    model = load(layer)
    assert seen.count(("batch",)) == 1
    assert seen.count(("batch", "final")) == 2
    assert seen.count(("final",)) == 3
    ran.clear()
    assert torch.equal(chain_of(model), want)
    assert ran == ["embed", *["embed", "head"] * 3]
    assert model.backend.nextn.nextn.nextn is model.backend.nextn.nextn


def test_the_state_of_the_block_is_committed_apart(load):
    model = load()
    batch, final = prefilled(model)
    model.backend.nextn.trunk(batch, final)
    tokens, parents = [3, 8, 4, 6], [-1, 0, 0, 2]
    held = make_batch("held", [RowSet(1, 6, tokens, TABLE, parents=parents)])
    commit = Commit(torch.tensor([[0, 2, 3]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32))
    own = [model.state.regions["kv"].fields["k"], model.state.slots["conv"].state]
    behind = [model.state.regions["mtp.kv"].fields["k"], model.state.slots["mtp.conv"].state]

    def changed(run):
        before = [tensor.clone() for tensor in own + behind]
        run()
        same = [torch.equal(now, then) for now, then in zip(own + behind, before, strict=True)]
        return not all(same[:2]), not all(same[2:])

    assert changed(lambda: model.backend.forward(held)) == (True, False)
    assert changed(lambda: model.backend.commit(held, commit)) == (True, False)
    final = torch.ones(4, WIDTH)
    assert changed(lambda: model.backend.nextn.trunk(held, final)) == (False, True)
    assert changed(lambda: model.backend.commit_nextn(held, commit)) == (False, True)


def test_layouts_are_joined_by_group():
    found = joined(LAYOUT, NEXTN)
    assert found.groups == LAYOUT.groups
    assert found.names == ("kv", "mtp.kv", "conv", "mtp.conv")
    near = attrs.evolve(NEXTN, groups=(Group("near", window=4),))
    assert [group.name for group in joined(LAYOUT, near).groups] == ["full", "near"]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (attrs.evolve(NEXTN, groups=(Group("full", window=4),)), "have the group 'full', as"),
        (attrs.evolve(NEXTN, pages=LAYOUT.pages), "both have 'kv'"),
        (attrs.evolve(NEXTN, slots=LAYOUT.slots), "both have 'conv'"),
    ],
)
def test_layouts_that_cannot_be_joined_are_a_plugins_fault(wrong, complaint):
    with pytest.raises(PluginError, match=complaint):
        joined(LAYOUT, wrong)
