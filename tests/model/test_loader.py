"""Loading, layers, rewrites, parking; and the backend the engine is given."""

from __future__ import annotations

import gc
import weakref

import attrs
import numpy as np
import pytest
import torch

from luce_core.contracts import Commit, ModelSpec, SeqTable, Tap
from luce_core.errors import EngineError, ModelFormatError, PluginError, UsageError
from luce_core.gguf import BlockFormat, FormatRegistry, GgufFile
from luce_core.model.batch import RowSet, make_batch
from luce_core.model.loader import Loader

TABLE = {"full": SeqTable((3, 1, 4, 0), (0, 4, 8, 12))}
PROMPT = [5, 1, 7, 2, 2, 9]


@pytest.fixture
def loader(build, sizes):
    """loader(layers by name, **more) -> Loader"""

    def loader(layers=None, **more):
        return Loader(lambda arch: build, (layers or {}).__getitem__, sizes, **more)

    return loader


def prompt_logits(model):
    rows = [RowSet(1, 0, PROMPT, TABLE, wanted=range(len(PROMPT)))]
    final = model.backend.forward(make_batch("prefill", rows)).final
    return model.backend.head(final)


def test_a_model_is_loaded_and_answers(loader, plan, write):
    model = loader().load(plan(write()))
    assert model.generation == 0
    assert model.target is model.backend
    assert prompt_logits(model).shape == (6, 12)


def test_an_empty_identity_is_that_of_the_file(loader, plan, write):
    path = write()
    with GgufFile.open(path) as file:
        assert loader().load(plan(path)).backend.spec.identity == file.identity()
    named = plan(path)
    named = attrs.evolve(named, spec=attrs.evolve(named.spec, identity="given"))
    assert loader().load(named).backend.spec.identity == "given"


def test_layers_lie_over_the_reference_in_order_and_a_parts_own_on_top(loader, plan, write):
    path, calls = write(), []

    def noting(name):
        return {"linear_out": lambda ops, *args, **kwargs: calls.append(name) or args[0]}

    layers = {"first": noting("first"), "second": noting("second")}
    make = loader(layers)
    prompt_logits(make.load(plan(path, op_layers=("first", "second"))))
    assert calls == ["second"]
    prompt_logits(make.load(plan(path, op_layers=("first", "second")), noting("own")))
    assert calls == ["second", "own"]


def test_layers_are_not_changed_by_loading(loader, plan, write):
    layer = {"*": lambda program, ops: program}
    loader({"layer": layer}).load(plan(write(), op_layers=("layer",)))
    assert set(layer) == {"*"}


def test_a_rewritten_program_is_what_runs_and_gives_the_same_bits(loader, plan, write):
    path, seen = write(), []

    def watch(program, ops):
        seen.append(program.inputs)
        first = program.calls[0]
        return attrs.evolve(program, calls=(attrs.evolve(first, op=f"w.{first.op}"), *program.calls[1:]))

    ran = []

    def spy(op):
        def call(ops, *args, **kwargs):
            ran.append(op)
            return getattr(ops, op)(*args, **kwargs)

        return call

    layer = {"*": watch, "w.embed": spy("embed"), "w.head": spy("head")}
    plain = prompt_logits(loader().load(plan(path)))
    rewritten = prompt_logits(loader({"w": layer}).load(plan(path, op_layers=("w",))))
    assert seen == [("batch",), ("final",)]
    assert ran == ["embed", "head"]
    assert torch.equal(rewritten, plain)


def test_rewrites_follow_each_other_in_the_order_of_their_layers(loader, plan, write):
    order = []
    layers = {
        name: {"*": lambda program, ops, name=name: order.append(name) or program} for name in ("a", "b")
    }
    loader(layers).load(plan(write(), op_layers=("b", "a")))
    assert order == ["b", "a", "b", "a"]


def test_a_plugins_block_format_is_read_by_the_reference(loader, plan, write):
    """Negated floats, as a format of its own: only the loader's registry knows it."""
    formats = FormatRegistry()
    formats.register(BlockFormat("NEG32", 177, 1, 4, lambda blocks: -blocks.copy().view("<f4")))
    path = write()
    straight = loader().load(plan(path)).backend._running().network.out.packed
    data = bytearray(path.read_bytes())
    at = data.index(b"out.weight", data.index(b"norm.weight")) + len(b"out.weight") + 4 + 2 * 8
    assert data[at : at + 4] == bytes(4)  # type F32
    data[at : at + 4] = (177).to_bytes(4, "little")
    path.write_bytes(data)
    negated = loader(formats=formats).load(plan(path)).backend._running().network.out
    assert negated.format == "NEG32"
    assert torch.equal(negated.packed, -straight)


def test_progress_and_tokenizer_are_the_callers(loader, plan, write):
    seen = []
    make = loader(progress=lambda done, total: seen.append(done / total), tokenizer_of=lambda h: h.arch)
    assert make.load(plan(write())).tokenizer == "one"
    assert seen == sorted(seen)
    assert 0.8 < seen[-1] <= 1


def test_a_missing_tensor_is_named(loader, plan, write):
    with pytest.raises(ModelFormatError, match=r"'out.weight' is missing"):
        loader().load(plan(write({"out.weight": None})))


@pytest.mark.parametrize("change", [{"device": ("cpu", "cuda:0")}, {"device": ()}, {"shards": 2}])
def test_several_devices_are_refused_in_words(loader, plan, write, change):
    with pytest.raises(UsageError, match="'one' is planned on"):
        loader().load(plan(write(), **change))


# --- parking


def test_a_parked_model_gives_its_weights_back_and_answers_nothing(loader, plan, write):
    model = loader().load(plan(write()))
    packed = weakref.ref(model.backend._running().network.out.packed)
    model.backend.programs()
    model.park()
    gc.collect()
    assert packed() is None
    with pytest.raises(EngineError, match="'one' is parked"):
        prompt_logits(model)


def test_an_unparked_model_goes_on_where_it_was(loader, plan, write):
    model, other = loader().load(plan(write())), loader().load(plan(write()))
    for one in (model, other):
        prompt_logits(one)
    model.park()
    model.unpark()
    assert model.generation == 1
    held = make_batch("held", [RowSet(1, 6, [4], TABLE)])
    assert torch.equal(model.backend.forward(held).logits, other.backend.forward(held).logits)


def test_a_file_that_changed_while_parked_is_not_taken(loader, plan, write, tensors):
    path = write()
    model = loader().load(plan(path))
    model.park()
    write({"out.weight": tensors["out.weight"] + 1})
    with pytest.raises(ModelFormatError, match="has changed since it was loaded"):
        model.unpark()


# --- backend


def test_prefill_gives_final_rows_and_held_gives_logits_of_the_wanted_rows(loader, plan, write):
    backend = loader().load(plan(write())).backend
    first = make_batch("prefill", [RowSet(0, 0, PROMPT, TABLE)])
    result = backend.forward(first)
    assert result.final.shape == (0, 8)
    assert result.logits is None
    held = make_batch("held", [RowSet(0, 6, [1, 2, 3], TABLE, wanted=[2, 0])])
    result = backend.forward(held)
    everything = backend.forward(make_batch("held", [RowSet(0, 6, [1, 2, 3], TABLE)]))
    assert torch.equal(result.logits, everything.logits[[2, 0]])
    assert torch.equal(result.final, everything.final[[2, 0]])


def test_a_commit_moves_pages_and_folds_slots_of_accepting_sequences_only(loader, plan, write):
    backend = loader().load(plan(write())).backend
    other = {"full": SeqTable((9, 8), (0, 4))}
    rows = [RowSet(0, 0, [1, 2, 3], TABLE, parents=[-1, 0, 0]), RowSet(2, 0, [4], other)]
    batch = make_batch("held", rows)
    backend.forward(batch)
    region, slot = backend.region("kv"), backend.state.slots["conv"]
    third = region.fields["k"][3, 2].clone()
    commit = Commit(torch.tensor([[0, 2], [0, 0]]), torch.tensor([2, 0]))
    backend.commit(batch, commit)
    assert region.fields["k"][3, 1].equal(third)
    assert slot.state[0].equal(slot.log["row"][0, [0, 2]])
    assert not slot.state[1:].any()


def test_a_final_tap_is_the_input_of_the_head(loader, plan, write):
    backend = loader().load(plan(write())).backend
    taps = {Tap("final", 0): torch.zeros(6, 8), Tap("residual", 0): torch.zeros(6, 8)}
    batch = make_batch("prefill", [RowSet(0, 0, PROMPT, TABLE, wanted=range(6))], taps=taps)
    final = backend.forward(batch).final
    assert taps[Tap("final", 0)].equal(final)
    assert taps[Tap("residual", 0)].equal(final)  # the only layer


def test_drafters_embed_like_the_network(loader, plan, write, tensors):
    backend = loader().load(plan(write())).backend
    ids = torch.tensor([3, 11], dtype=torch.int32)
    np.testing.assert_array_equal(backend.embed(ids), 2 * tensors["token_embd.weight"][[3, 11]])


def test_drafters_can_ask_for_a_part_of_the_head(loader, plan, write):
    backend = loader().load(plan(write())).backend
    hidden = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([4, 0, 4], dtype=torch.int32)
    assert torch.equal(backend.head(hidden, ids), backend.head(hidden)[:, [4, 0, 4]])


def test_a_network_without_embed_is_said_to_have_none(build, plan, write, sizes):
    class NoEmbed(build):
        def trunk(self, batch, final=None):
            return self.ops.scale(batch, 1.0)

    model = Loader(lambda arch: NoEmbed, {}.__getitem__, sizes).load(plan(write()))
    with pytest.raises(EngineError, match="no 'embed' call"):
        model.backend.embed(torch.tensor([0]))


def test_a_network_that_does_not_keep_to_ops_runs_but_is_not_recorded(build, plan, write, sizes, caplog):
    class Sloppy(build):
        def logits(self, final):
            return super().logits(final) + 1

    def load(layers, **more):
        return Loader(lambda arch: Sloppy, layers.__getitem__, sizes).load(plan(write(), **more))

    assert prompt_logits(load({})).shape == (6, 12)
    with pytest.raises(PluginError, match="operator '__add__'"):
        load({}).backend.programs()
    fused = load({"fuse": {"*": lambda program, ops: program}}, op_layers=("fuse",))
    assert torch.equal(prompt_logits(fused), prompt_logits(load({})))
    assert "call by call" in caplog.text
    assert "operator '__add__'" in caplog.text


def test_a_pending_commit_is_refused(loader, plan, write):
    backend = loader().load(plan(write())).backend
    batch = make_batch("held", [RowSet(0, 0, [1], TABLE)])
    pending = attrs.evolve(batch, pending=Commit(torch.zeros(1, 1), torch.zeros(1)))
    with pytest.raises(EngineError, match="pending commit"):
        backend.forward(pending)
    backend.settle([0])


def test_the_spec_is_the_plans(loader, plan, write):
    spec = loader().load(plan(write())).backend.spec
    assert isinstance(spec, ModelSpec)
    assert (spec.arch, spec.num_layers) == ("one", 1)
