"""Allocation against the planned bytes, and the store against plain copies."""

from __future__ import annotations

import attrs
import pytest
import torch

from luce_core.cache import layout as layout_module
from luce_core.cache.layout import block_bytes, slot_bytes, state_bytes
from luce_core.contracts import CODECS, CodedField, Field, Group, Pages, Slot, StateLayout, StateSizes
from luce_core.errors import EngineError, UsageError
from luce_core.model import state as state_module
from luce_core.model.state import ModelState, TorchStateStore, zeros

TARGET = StateLayout(
    groups=(Group("full"), Group("pooled", stride=4, window=16)),
    pages=(
        Pages("a", "full", 0, {"k": Field((2, 3), "kv.k"), "v": Field((2, 3), "kv.v")}),
        Pages("b", "full", 1, {"v": Field((5,), "f32")}),
        Pages("c", "pooled", 1, {"key": Field((7,), "bf16")}),
    ),
    slots=(
        Slot("s", 0, Field((2, 2), "f32"), {"row": Field((2,), "f16"), "decay": Field((1,), "f32")}, "shift"),
        Slot("t", 1, Field((3,), "i64"), {"x": Field((3,), "i64")}, "sum.fold"),
    ),
)
DRAFTER = StateLayout(groups=(Group("full"),), pages=(Pages("a", "full", 0, {"k": Field((2,), "u8")}),))
SIZES = StateSizes(
    block_tokens=8,
    num_blocks={"target/full": 6, "target/pooled": 4, "drafter/full": 5},
    num_slots=3,
    max_held_rows=4,
    k_type="f16",
    v_type="bf16",
)


@pytest.fixture
def states():
    found = [ModelState("target", TARGET, SIZES, "cpu"), ModelState("drafter", DRAFTER, SIZES, "cpu")]
    generator = torch.Generator().manual_seed(1)
    for state in found:
        for tensor in state.tensors():
            tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator))
    return found


def test_regions_and_slots_have_the_shapes_of_the_layout():
    state = ModelState("target", TARGET, SIZES, "cpu")
    a, c = state.regions["a"], state.regions["c"]
    assert {name: (tuple(t.shape), t.dtype) for name, t in a.fields.items()} == {
        "k": ((6, 8, 2, 3), torch.float16),
        "v": ((6, 8, 2, 3), torch.bfloat16),
    }
    assert c.fields["key"].shape == (4, 2, 7)
    assert (a.block_entries, a.stride, a.window) == (8, 1, None)
    assert (c.block_entries, c.stride, c.window) == (2, 4, 16)
    slot = state.slots["s"]
    assert slot.state.shape == (3, 2, 2)
    assert {name: tuple(t.shape) for name, t in slot.log.items()} == {"row": (3, 4, 2), "decay": (3, 4, 1)}
    assert [region.name for region in state.by_group["full"]] == ["a", "b"]
    assert not any(tensor.any() for tensor in state.tensors())


def test_the_allocation_is_what_the_plan_counts():
    # By hand: a 2·3·(2+2), b 5·4 per token; c 7·2 per four tokens; slots 4·4 + 3·8, logs 2·2+4 + 3·8
    # and, of entries that held rows close, 7·2.
    want = 6 * 8 * (24 + 20) + 4 * 2 * 14 + 3 * (16 + 24) + 3 * 4 * (8 + 24 + 14)
    assert state_bytes("target", TARGET, SIZES) == want
    state = ModelState("target", TARGET, SIZES, "cpu")
    assert sum(t.numel() * t.element_size() for t in state.tensors()) == want


def test_a_disagreement_with_the_plan_is_an_error(monkeypatch):
    monkeypatch.setattr(state_module, "state_bytes", lambda *args: layout_module.state_bytes(*args) + 1)
    with pytest.raises(EngineError, match=r"'target' takes \d+ bytes; the plan counted \d+"):
        ModelState("target", TARGET, SIZES, "cpu")


CODED = StateLayout(
    groups=(Group("full"), Group("near", window=16)),
    pages=(
        Pages("a", "full", 0, {"k": Field((2, 64), "kv.k"), "v": Field((3, 32), "kv.v")}),
        Pages("b", "near", 1, {"latent": Field((128,), "kv.k"), "v": Field((5,), "f32")}),
    ),
)
CODED_SIZES = attrs.evolve(SIZES, num_blocks={"m/full": 6, "m/near": 4}, k_type="q8_0", v_type="q4_0")


def test_codes_are_bytes_and_regions_say_how_they_lie():
    state = ModelState("m", CODED, CODED_SIZES, "cpu")
    a, b = state.regions["a"], state.regions["b"]
    assert {name: (tuple(t.shape), t.dtype) for name, t in (a.fields | b.fields).items()} == {
        "k": ((6, 8, 2, 68), torch.uint8),
        "v": ((4, 8, 5), torch.float32),
        "latent": ((4, 8, 136), torch.uint8),
    }
    assert a.fields["v"].shape == (6, 8, 3, 20)  # 16 bytes of codes, a scale, and up to a whole word
    assert a.codecs == {"k": CodedField(CODECS["q8_0"], 64), "v": CodedField(CODECS["q4_0"], 32)}
    assert b.codecs == {"latent": CodedField(CODECS["q8_0"], 128)}
    assert sum(t.numel() * t.element_size() for t in state.tensors()) == state_bytes("m", CODED, CODED_SIZES)
    assert block_bytes(CODED, "full", CODED_SIZES) == 8 * (2 * 68 + 3 * 20)


def test_blocks_of_codes_are_copied_and_come_back():
    state = ModelState("m", CODED, CODED_SIZES, "cpu")
    for tensor in state.tensors():
        tensor.copy_(torch.randint(0, 256, tensor.shape))
    store, before = TorchStateStore(CODED_SIZES, [state]), copies(state, "full")
    saved = store.read_blocks("m/full", [3, 1])
    store.copy_blocks("m/full", [0], [3])
    store.write_blocks("m/full", [4, 5], saved)
    for key, field in copies(state, "full").items():
        assert field[3].equal(before[key][0])
        assert field[4:].equal(before[key][[3, 1]])


@pytest.mark.parametrize(
    ("layout", "k_type", "message"),
    [
        (CODED, "tq3_0", r"tq3_0 .* a multiple of 64 numbers, got 32 \(field 'v' of region 'a'\)"),
        (TARGET, "q8_0", r"q8_0 .* a multiple of 32 numbers, got 3 \(field 'k' of region 'a'\)"),
    ],
)
def test_state_that_does_not_go_into_the_codes_is_an_error(layout, k_type, message):
    with pytest.raises(UsageError, match=message):
        ModelState("m", layout, attrs.evolve(CODED_SIZES, k_type=k_type, v_type=k_type), "cpu")


def test_an_unknown_cache_type_is_an_error():
    with pytest.raises(UsageError, match="'q9'"):
        ModelState("target", TARGET, attrs.evolve(SIZES, k_type="q9"), "cpu")


def test_the_store_knows_all_groups_and_bytes(states):
    store = TorchStateStore(SIZES, states)
    assert set(store.groups) == {"target/full", "target/pooled", "drafter/full"}
    assert store.groups["target/pooled"].window == 16
    assert store.block_bytes["target/full"] == block_bytes(TARGET, "full", SIZES)
    assert store.block_bytes["drafter/full"] == 16
    assert store.slot_bytes == slot_bytes(TARGET, SIZES)
    assert store.has_slots
    assert not TorchStateStore(SIZES, states[1:]).has_slots


def copies(state, group):
    return {
        (region.name, name): field.clone()
        for region in state.by_group[group]
        for name, field in region.fields.items()
    }


def test_blocks_are_copied_in_every_region_of_their_group_only(states):
    target = states[0]
    full, pooled = copies(target, "full"), copies(target, "pooled")
    TorchStateStore(SIZES, states).copy_blocks("target/full", [0, 1], [4, 5])
    for key, field in copies(target, "full").items():
        assert field[:4].equal(full[key][:4])
        assert field[4:].equal(full[key][:2])
    for key, field in copies(target, "pooled").items():
        assert field.equal(pooled[key])


def test_copies_that_build_on_each_other_happen_in_order(states):
    before = copies(states[0], "full")
    TorchStateStore(SIZES, states).copy_blocks("target/full", [0, 1, 2], [1, 2, 3])
    for key, field in copies(states[0], "full").items():
        for block in range(4):
            assert field[block].equal(before[key][0])


def test_saved_blocks_come_back_wherever_they_are_put(states):
    store = TorchStateStore(SIZES, states)
    before = copies(states[0], "full")
    saved = store.read_blocks("target/full", [3, 1])
    for region in states[0].by_group["full"]:
        for field in region.fields.values():
            field.zero_()
    store.write_blocks("target/full", [0, 5], saved)
    for key, field in copies(states[0], "full").items():
        assert field[0].equal(before[key][3])
        assert field[5].equal(before[key][1])
        assert not field[1:5].any()


def test_slots_are_saved_loaded_copied_and_reset_without_their_logs(states):
    store = TorchStateStore(SIZES, states)
    slots = states[0].slots.values()
    before = [slot.state.clone() for slot in slots]
    logs = [field.clone() for slot in slots for field in slot.log.values()]
    saved = store.save_slot(1, 9)
    store.reset_slot(1)
    assert not any(slot.state[1].any() for slot in slots)
    store.copy_slot(0, 1)
    store.load_slot(2, saved)
    for slot, old in zip(slots, before, strict=True):
        assert slot.state[0].equal(old[0])
        assert slot.state[1].equal(old[0])
        assert slot.state[2].equal(old[1])
    assert all(
        new.equal(old)
        for new, old in zip([f for slot in slots for f in slot.log.values()], logs, strict=True)
    )


@pytest.mark.parametrize(("length", "alive"), [(0, 2), (1, 3), (3, 5), (4, 2), (9, 3)])
def test_a_snapshot_keeps_the_rows_that_are_read_again(length, alive):
    """Windows of six rows, four to a period: of finished periods two rows are read again."""
    window = Slot("w", 0, Field((6, 2), "f32"), {"row": Field((2,), "f32")}, "shift", period=4)
    layout = attrs.evolve(TARGET, slots=(*TARGET.slots, window))
    state = ModelState("target", layout, SIZES, "cpu")
    store = TorchStateStore(SIZES, [state])
    for tensor in state.tensors():
        tensor.copy_(torch.arange(1, tensor.numel() + 1).view(tensor.shape))
    before = [slot.state[1].clone() for slot in state.slots.values()]
    saved = store.save_slot(1, length)
    taken = sum(one.numel() * one.element_size() for one in saved.states)
    assert taken == store.snapshot_bytes(length) == slot_bytes(TARGET, SIZES) + alive * 8
    assert store.slot_bytes == slot_bytes(TARGET, SIZES) + 6 * 8
    store.load_slot(2, saved)
    *whole, rows = (slot.state[2] for slot in state.slots.values())
    assert all(got.equal(want) for got, want in zip(whole, before, strict=False))
    assert not rows[: 6 - alive].any()
    assert rows[6 - alive :].equal(before[-1][6 - alive :])


def test_a_saved_slot_is_a_copy(states):
    store = TorchStateStore(SIZES, states)
    before = states[0].slots["s"].state[0].clone()
    saved = store.save_slot(0, 9)
    store.reset_slot(0)
    store.load_slot(0, saved)
    assert states[0].slots["s"].state[0].equal(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(3, 5), (1,), (0, 4), (1000, 7, 3)])
def test_zeros_are_aligned_zeros_of_their_own(shape, dtype):
    one, other = zeros(shape, dtype, "cpu"), zeros(shape, dtype, "cpu")
    assert one.shape == shape
    assert one.dtype == dtype
    assert one.is_contiguous()
    assert not one.any()
    if one.numel():
        assert one.data_ptr() % 64 == 0
        one.fill_(1)
        assert not other.any()
