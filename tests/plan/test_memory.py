"""Memory and bandwidth: every byte counted by hand, limits kept, contexts fitted, the roofline recomputed."""

import math

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from luce_core.contracts import (
    DeviceInfo,
    Equivalence,
    Field,
    Group,
    ModelSpec,
    OpImpl,
    OpLayer,
    Pages,
    Slot,
    StateLayout,
    StepBytes,
)
from luce_core.errors import PlanError, PluginError
from luce_core.gguf.rows import ROW_CACHE_BYTES
from luce_core.plan import state_sizes
from luce_core.plan_memory import (
    MIN_CONTEXT_TOKENS,
    ON_THEIR_WAY,
    SWAPPED,
    Demand,
    fit,
    prompt_bound,
    roofline,
    rooms,
    state_facts,
    step_bytes,
    strides_block,
    weight_bytes,
)

from .conftest import CPU

TOKEN_BYTES = 2 * 2 * 2 * 8 * 2
"""Of the made-up model: 2 layers, k and v, 2 heads of 8, 2 bytes each."""
WIDTH = {"f32": 4, "f16": 2, "bf16": 2}


def bytes_by_hand(layout, sizes, model="target"):
    """What allocating the layout takes, tensor by tensor."""
    total = 0
    strides = {group.name: group.stride for group in layout.groups}
    for pages in layout.pages:
        entries = sizes.num_blocks[f"{model}/{pages.group}"] * (sizes.block_tokens // strides[pages.group])
        logged = sizes.num_slots * sizes.max_held_rows if strides[pages.group] > 1 else 0
        for field in pages.fields.values():
            width = WIDTH[{"kv.k": sizes.k_type, "kv.v": sizes.v_type}.get(field.dtype, field.dtype)]
            total += (entries + logged) * math.prod(field.shape) * width
    for slot in layout.slots:
        total += sizes.num_slots * math.prod(slot.state.shape) * WIDTH[slot.state.dtype]
        for field in slot.log.values():
            total += sizes.num_slots * sizes.max_held_rows * math.prod(field.shape) * WIDTH[field.dtype]
    return total


def claim(plan, kind):
    return sum(item.num_bytes for item in plan.claims if item.kind == kind)


# --- automatic


def test_plenty_of_memory_gives_every_sequence_the_trained_context(plan):
    made = plan(max_sequences=3)
    sizes = state_sizes(made)
    assert made.number("context") == 4096
    assert made.origin["context"].reason == "as trained"
    one = math.ceil((4096 + 8) / 32) + 1
    assert sizes.num_blocks == {"target/full": 3 * one}
    assert claim(made, "state") == 3 * one * 32 * TOKEN_BYTES
    assert claim(made, "state") == bytes_by_hand(made.models[0].spec.layout, sizes)


def test_short_memory_shares_blocks_before_it_shortens_the_context(plan):
    one = (math.ceil((4096 + 8) / 32) + 1) * 32 * TOKEN_BYTES
    fixed = claim(plan(), "weights") + claim(plan(), "workspace")
    made = plan(max_sequences=4, memory_limit=fixed + 2 * one + 100)
    assert made.number("context") == 4096
    assert claim(made, "state") <= 2 * one + 100
    assert claim(made, "state") > 2 * one - 32 * TOKEN_BYTES


def test_shorter_memory_shortens_an_automatic_context_and_says_why(plan):
    fixed = claim(plan(), "weights") + claim(plan(), "workspace")
    made = plan(memory_limit=fixed + 1024 * TOKEN_BYTES)
    context = made.number("context")
    assert 1024 - 3 * 32 <= context < 1024
    assert context % 32 == 0
    assert made.origin["context"].reason == "what fits cpu; the model was trained for 4096"
    assert claim(made, "state") <= 1024 * TOKEN_BYTES


def test_an_explicit_context_that_does_not_fit_is_a_problem_with_figures(plan):
    fixed = claim(plan(), "weights") + claim(plan(), "workspace")
    with pytest.raises(PlanError) as caught:
        plan(memory_limit=fixed + 1024 * TOKEN_BYTES, ctx_size=2048)
    (problem,) = caught.value.problems
    missing = (math.ceil((2048 + 8) / 32) + 1) * 32 * TOKEN_BYTES - 1024 * TOKEN_BYTES
    assert f"a context of 2048 tokens is short of {missing / 1024:.1f} KiB" in problem.message
    assert "weights of target" in problem.message
    assert "--ctx-size" in problem.fix


def test_weights_that_do_not_fit_are_a_problem(plan):
    with pytest.raises(PlanError, match="Device 'cpu' may lend 1000 B"):
        plan(memory_limit=1000)


def test_a_context_beyond_training_is_allowed_with_a_note(plan):
    made = plan(ctx_size=8192)
    assert made.number("context") == 8192
    assert "beyond the 4096 the model was trained for" in made.problems[0].message


def test_cache_bytes_bound_the_state_of_all_sequences(plan):
    one = (math.ceil((4096 + 8) / 32) + 1) * 32 * TOKEN_BYTES
    made = plan(cache_bytes=one + 5000)
    assert one - 32 * TOKEN_BYTES < claim(made, "state") <= one + 5000
    short = plan(cache_bytes=512 * TOKEN_BYTES)
    assert short.number("context") < 512
    assert "what fits --cache-bytes" in short.origin["context"].reason
    with pytest.raises(PlanError, match=r"With --cache-bytes 64\.0 KiB a context of 4096 tokens is short of"):
        plan(cache_bytes=512 * TOKEN_BYTES, ctx_size=4096)


def test_the_limit_is_a_share_of_the_device_unless_said(plan):
    assert plan().number("memory.limit_bytes") == int(0.85 * 2**30)
    assert plan(memory_limit="0").number("memory.limit_bytes") == int(0.85 * 2**30)
    assert "85% of 1.00 GiB on cpu" in plan().origin["memory.limit_bytes"].reason


# --- windows, strides, slots


def test_windowed_groups_need_their_window_not_the_context(plan, model):
    made = plan(header=model(window=128), max_sequences=2, chunk=64)
    one = math.ceil((128 + 64 + 8) / 32) + 1
    assert state_sizes(made).num_blocks["target/near"] == 2 * 2 * one
    assert claim(made, "state") == bytes_by_hand(made.models[0].spec.layout, state_sizes(made))
    assert claim(made, "cache") == 2**30, "windows are restored from checkpoints"


def test_blocks_are_raised_to_whole_strides(plan, model):
    made = plan(header=model(stride=48))
    assert state_sizes(made).block_tokens == 48
    assert made.values["cache.block_tokens"] == 48
    assert "strides" in made.origin["cache.block_tokens"].reason


def test_slots_are_counted_with_their_logs(plan, model):
    with_slots, without = plan(header=model(slot=True)), plan()
    assert claim(with_slots, "state") - claim(without, "state") == 4 * (3 * 16 * 4 + 8 * 16 * 4)
    assert claim(with_slots, "cache") == 2**30
    assert claim(without, "cache") == 0


def test_host_memory_for_state_that_gives_way_is_a_claim_where_it_lies(plan):
    assert not [item for item in plan().claims if item.owner == SWAPPED]
    made = plan(swap_bytes="64M", memory_limit="512M")
    (found,) = [item for item in made.claims if item.owner == SWAPPED]
    assert (found.device, found.kind, found.num_bytes) == ("cpu", "cache", 64 * 2**20)
    assert sum(item.num_bytes for item in made.claims if item.device == "cpu") <= 512 * 2**20


@given(st.integers(1, 200), st.lists(st.integers(1, 32), max_size=4))
def test_a_block_holds_whole_entries_of_every_group(block, strides):
    raised = strides_block(block, [Group(str(n), stride) for n, stride in enumerate(strides)])
    assert raised >= block
    assert all(raised % stride == 0 for stride in strides)


# --- any demand at all


@st.composite
def demands(draw):
    fields = {"k": Field((draw(st.integers(1, 4)), 8), "kv.k"), "v": Field((8,), "kv.v")}
    groups = [Group("a", stride=draw(st.sampled_from([1, 2, 4])))]
    pages = [Pages("p", "a", 0, fields)]
    if draw(st.booleans()):
        groups.append(Group("w", window=draw(st.integers(1, 300))))
        pages.append(Pages("q", "w", 1, fields))
    slot = Slot("s", 0, Field((4, 4), "f32"), {"row": Field((4,), "f32")}, "shift")
    slots = [slot] * draw(st.integers(0, 1))
    spec = ModelSpec(
        "x", "x", 2, 16, 32, draw(st.integers(1, 5000)), 1, 16, 16,
        StateLayout(tuple(groups), tuple(pages), tuple(slots)), None, "any", {}, 100, 120, 100,
    )  # fmt: skip
    return Demand(
        models={"target": spec},
        weight_bytes={"target": draw(st.integers(0, 10**6))},
        row_budget=draw(st.integers(1, 512)),
        max_sequences=draw(st.integers(1, 6)),
        max_held_rows=draw(st.integers(1, 20)),
        sampled_rows=draw(st.integers(1, 20)),
        context=draw(st.one_of(st.just(0), st.integers(1, 6000))),
        cache_bytes=draw(st.one_of(st.just(0), st.integers(1, 10**7))),
        checkpoint_bytes=1000,
        swap_bytes=draw(st.sampled_from([0, 0, 50_000])),
        block_tokens=draw(st.sampled_from([4, 16, 32])),
        k_type=draw(st.sampled_from(["f16", "f32"])),
        v_type="f16",
        step=StepBytes(draw(st.integers(0, 2 * 10**6)), draw(st.integers(0, 10**6))),
        scratch=draw(st.sampled_from([{}, {"scratch of op layer a": 70_000, "executor b": 9}])),
    )


def demands_of(slots=0, **more):
    """One that says little, of a vocabulary so large that its logits are more than those of scores."""
    slot = Slot("s", 0, Field((4, 4), "f32"), {"row": Field((4,), "f32")}, "shift")
    layout = StateLayout((Group("a"),), (Pages("p", "a", 0, {"k": Field((8,), "kv.k")}),), (slot,) * slots)
    spec = ModelSpec("x", "x", 2, 16, 10**7, 100, 1, 16, 16, layout, None, "any", {}, 100, 120)
    given = {"row_budget": 512, "max_sequences": 2, "max_held_rows": 4, "context": 0, "cache_bytes": 0}
    given |= {"checkpoint_bytes": 0, "block_tokens": 16, "k_type": "f16", "v_type": "f16", "sampled_rows": 1}
    given |= {"step": StepBytes(0)}
    return Demand({"target": spec}, {"target": 120}, **(given | more))


@given(demands(), st.integers(0, 3 * 10**7))
def test_whatever_is_said_to_fit_does(demand, limit):
    device = DeviceInfo("d", "d", 2**40, 1e9)
    found = fit(demand, device, limit)
    layout = demand.target.layout
    state = next(c for c in found.claims if c.kind == "state")
    assert state.num_bytes == bytes_by_hand(layout, found.sizes)
    assert 0 <= state.floor_bytes <= state.num_bytes
    on_device = sum(c.num_bytes for c in found.claims if c.device == "d")
    assert {c.owner: c.num_bytes for c in found.claims}.items() >= demand.scratch.items()
    assert found.short_bytes > 0 or on_device <= limit
    blocks = found.sizes.num_blocks["target/a"]
    rows = found.context + demand.max_held_rows
    assert blocks * demand.block_tokens >= rows, "one sequence of the promised context always fits"
    if demand.context:
        assert found.context == demand.context
    else:
        assert 0 < found.context <= demand.target.context
        assert found.context == demand.target.context or "what fits" in found.reason
    if "w" in {group.name for group in layout.groups}:
        assert found.sizes.num_blocks["target/w"] >= demand.max_sequences


@given(demands(), st.integers(0, 10**7), st.integers(0, 10**7))
def test_more_memory_never_gives_less(demand, limit, extra):
    device = DeviceInfo("d", "d", 2**40, 1e9)
    less, more = fit(demand, device, limit), fit(demand, device, limit + extra)
    if not less.short_bytes:
        assert not more.short_bytes
        assert more.context >= less.context


@given(demands(), st.integers(0, 3 * 10**7))
def test_an_automatic_context_is_the_longest_that_fits(demand, limit):
    """Every multiple of the block, tried one by one. Windows grow with the context, so less of it may fit."""
    device = DeviceInfo("d", "d", 2**40, 1e9)
    trained = demand.target.context
    offered = range(0, trained + 1, demand.block_tokens)
    fitting = [
        context
        for context in {trained, *offered} - {0}
        if not fit(evolve(demand, context=context), device, limit).short_bytes
    ]
    found = fit(evolve(demand, context=0), device, limit)
    if fitting and max(fitting) >= min(MIN_CONTEXT_TOKENS, trained):
        assert (found.context, found.short_bytes) == (max(fitting), 0)
    else:
        assert found.short_bytes > 0


@given(demands(), st.integers(1, 100))
def test_a_room_is_what_a_sequence_alone_gets(demand, megabytes):
    device = DeviceInfo("d", "d", 2**40, 1e9)
    (room,) = rooms(demand, device, [megabytes << 20])
    trained = demand.target.context
    least = min(MIN_CONTEXT_TOKENS, trained)
    alone = evolve(demand, max_sequences=1)
    assert room.limit_bytes == int(0.85 * (megabytes << 20))
    if room.context:
        found = fit(evolve(alone, context=room.context), device, room.limit_bytes)
        assert not found.short_bytes
        assert room.state_bytes == sum(c.num_bytes for c in found.claims if c.kind == "state")
        assert room.trained == (room.context == trained)
    else:
        found = fit(evolve(alone, context=least), device, room.limit_bytes)
        assert room.short_bytes == found.short_bytes > 0


def test_what_a_sequence_costs_is_said_by_kind(model, plan):
    spec = plan(header=model(window=64, slot=True)).models[0].spec
    facts = state_facts(spec, "f32", "f16")
    one_layer = 2 * 8 * 4 + 2 * 8 * 2
    assert (facts.token_bytes, facts.window_bytes) == (one_layer, {64: one_layer})
    assert facts.sequence_bytes == 3 * 16 * 4


# --- weights and bandwidth


def test_weights_take_their_bytes_where_a_layer_packs_them(plan):
    assert plan(op_layer=("fast",)).number("memory.weight_bytes") == 1250
    reference = plan()
    assert reference.number("memory.weight_bytes") == 4000
    assert "dequantize" in reference.origin["memory.weight_bytes"].reason
    spec = reference.models[0].spec
    assert plan(op_layer=("fast",), ops_off=("pack_linear",)).number("memory.weight_bytes") == 4000
    other = OpLayer("o", (OpImpl("linear", "m:l"),), Equivalence.BITS)
    assert weight_bytes(spec, [other])[0] == 4000


def keeps(block_format, columns):
    return {"Q4_K": 2.0, "F32": 1.0, "F16": 10 / 11}[block_format] * (1 if columns > 100 else 3)


def test_a_layer_may_keep_more_than_the_file_by_format_and_columns(plan):
    rows = {("Q4_K", 256): 400, ("Q4_K", 64): 50, ("F32", 256): 800}
    spec = evolve(plan().models[0].spec, rows_bytes=rows)
    name = f"{__name__}:keeps"
    more = OpLayer("more", (OpImpl("pack_linear", "m:p"),), Equivalence.ROUNDING, kept=name)
    size, why = weight_bytes(spec, [more])
    assert size == 400 * 2 + 50 * 6 + 800
    assert "as in the file, 52.0% more; op layer more" in why
    assert "9.1% less" in weight_bytes(evolve(spec, rows_bytes={("F16", 256): 11}), [more])[1]
    with pytest.raises(PluginError, match=r"'more'.*KeyError: 'Q6_K'"):
        weight_bytes(evolve(spec, rows_bytes={("Q6_K", 256): 9}), [more])
    assert weight_bytes(evolve(spec, rows_bytes={}), [more])[0] == 1250
    with pytest.raises(PluginError, match="'more'"):
        weight_bytes(spec, [evolve(more, kept=f"{__name__}:sheds")])


def lines_of(demand, device=None):
    device = device or DeviceInfo("cuda:0", "d", 2**40, 1e9)
    return {c.owner: c.num_bytes for c in fit(demand, device, 2**40).claims}


def test_logits_are_of_the_rows_that_may_be_sampled(plan):
    """Five rows are filled up to six. Copies of them are made when a step's activations are gone."""
    demand = demands_of(max_sequences=3, max_held_rows=8)
    one, five = lines_of(demand), lines_of(evolve(demand, sampled_rows=5))
    logits = 4 * demand.target.vocab * 3
    assert (one["logits of a step"], five["logits of a step"]) == (logits, 6 * logits)
    assert five["activations of a step"] == 2 * 6 * logits
    wider = lines_of(evolve(demand, sampled_rows=5, step=StepBytes(12 * logits + 1)))
    assert wider["activations of a step"] == 12 * logits + 1
    assert wider["logits of a step"] == 6 * logits


def test_what_is_kept_to_run_steps_again_and_what_the_driver_takes_are_lines_of_their_own(plan):
    demand = demands_of(step=StepBytes(0, 4_321))
    lines = lines_of(demand, DeviceInfo("cuda:0", "d", 2**40, 1e9, driver_bytes=12_345))
    assert lines["activations of steps kept to run again"] == 4_321
    assert lines["driver of cuda:0"] == 12_345
    without = lines_of(demands_of())
    assert not {"driver of cuda:0", "activations of steps kept to run again"} & set(without)


def takes(spec, rows):
    return StepBytes(spec.hidden * rows, 7)


def test_activations_are_what_the_layer_says_else_those_of_the_reference(plan):
    spec, name = plan().models[0].spec, f"{__name__}:takes"
    plain = OpLayer("plain", (), Equivalence.BITS)
    more = evolve(plain, name="more", activations=name)
    assert step_bytes(spec, [plain], 10) == step_bytes(spec, [], 10) == StepBytes(4 * 64 * spec.hidden * 10)
    assert step_bytes(spec, [more, plain], 10) == StepBytes(10 * spec.hidden, 7)
    with pytest.raises(PluginError, match=r"'more'.*takes_none.*returned None, wanted StepBytes"):
        step_bytes(spec, [evolve(more, activations=f"{__name__}:takes_none")], 10)
    with pytest.raises(PluginError, match="'more'"):
        step_bytes(spec, [evolve(more, activations=f"{__name__}:nothing_there")], 10)


def takes_none(spec, rows):
    return None


def test_pinned_memory_of_snapshots_is_the_hosts(plan):
    """Where states lie on a device of their own: two copies of 64 bytes, in pieces of 256."""
    demand = demands_of(slots=1)
    gpu, cpu = (DeviceInfo(name, "d", 2**40, 1e9) for name in ("cuda:0", "cpu"))
    (found,) = [c for c in fit(demand, gpu, 2**40).claims if c.owner == ON_THEIR_WAY]
    assert (found.device, found.num_bytes) == ("host", 2 * 256)
    assert ON_THEIR_WAY not in {c.owner for c in fit(demand, cpu, 2**40).claims}
    assert ON_THEIR_WAY not in {c.owner for c in fit(demands_of(), gpu, 2**40).claims}


def test_tables_that_stay_in_the_file_cost_the_rows_that_are_kept(plan, model):
    """A terabyte each; nothing of it is weights, nor read per token."""
    without, made = plan(), plan(header=model(tables=2))
    rows = [item for item in made.claims if item.owner == "rows of target read from its file"]
    assert [(item.device, item.num_bytes, item.floor_bytes) for item in rows] == [
        ("cpu", 2 * ROW_CACHE_BYTES, 2 * ROW_CACHE_BYTES)
    ]
    assert [item for item in made.claims if item not in rows] == list(without.claims)
    assert roofline(made, 100) == roofline(without, 100)


def test_the_roofline_is_bandwidth_over_bytes(plan, model):
    made = plan(op_layer=("fast",))
    empty, deep = roofline(made, 0), roofline(made, 1000)
    assert empty.tokens_s == pytest.approx(50e9 / 1000)
    assert deep.tokens_s == pytest.approx(50e9 / (1000 + 1000 * TOKEN_BYTES))
    assert (deep.device, deep.provenance) == ("cpu", "measured in a test")


def test_the_roofline_counts_windows_slots_and_dequantized_weights(plan, model):
    made = plan(header=model(window=128, slot=True))
    line = roofline(made, 1000)
    assert line.weight_bytes == 3200
    assert line.state_bytes == 1000 * TOKEN_BYTES // 2 + 128 * TOKEN_BYTES // 2 + 2 * 3 * 16 * 4
    assert roofline(made, 64).state_bytes == 64 * TOKEN_BYTES + 2 * 3 * 16 * 4


def test_the_bound_of_prompts_is_arithmetic_over_what_a_row_meets(plan):
    unknown = prompt_bound(plan())
    assert (unknown.flops_s, unknown.tokens_s) == (0.0, 0.0)
    device = evolve(CPU, flops_s=2e12, flops_provenance="measured in a test")
    bound = prompt_bound(plan(devices=(device,)))
    assert bound.tokens_s == pytest.approx(2e12 / (2 * 500))
    assert (bound.device, bound.provenance) == ("cpu", "measured in a test")
    stated = plan(devices=(evolve(device, flops_provenance=""),))
    assert prompt_bound(stated).provenance == "stated by its plugin"


def test_an_unexplained_bandwidth_says_so(plan):
    device = DeviceInfo("cpu", "c", CPU.memory_bytes, 1e9)
    assert roofline(plan(devices=(device,)), 0).provenance == "stated by its plugin"
