"""Types of the cache: bytes of codes, state that does not go into them, smaller ones for an asked context."""

import math

import pytest

from luce_core.contracts import CODECS, PlanPatch
from luce_core.errors import PlanError, UsageError
from luce_core.options import load_options
from luce_core.plan import state_sizes, what_fits
from luce_core.plan_memory import roofline, state_facts
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin

from .conftest import CPU

NUMBERS = 2 * 2 * 2 * 64
"""Of a token of the made-up model with heads of 64: 2 layers, k and v, 2 heads."""
Q8_BYTES = 2 * 2 * 2 * 68


@pytest.fixture
def wide(model):
    return model(width=64)


def state(made):
    return sum(item.num_bytes for item in made.claims if item.kind == "state")


def types(made):
    sizes = state_sizes(made)
    assert (made.values["cache.k_type"], made.values["cache.v_type"]) == (sizes.k_type, sizes.v_type)
    return sizes.k_type, sizes.v_type


@pytest.mark.parametrize(("codec", "vector"), [("q8_0", 68), ("fp8", 64), ("q4_0", 36), ("tq3_0", 28)])
def test_every_byte_of_codes_is_counted(plan, wide, codec, vector):
    made = plan(header=wide, cache_type_k=codec, cache_type_v="f16", max_sequences=2)
    token = 2 * 2 * (vector + 128)
    assert state(made) == sum(state_sizes(made).num_blocks.values()) * 32 * token
    assert state_facts(made.models[0].spec, codec, "f16").token_bytes == token
    assert roofline(made, 1000).state_bytes == 1000 * token
    assert made.models[0].spec.details["types"] == (codec, "f16")


def test_options_name_every_codec(plan, wide):
    for codec in CODECS:
        assert types(plan(header=wide, cache_type_k=codec, cache_type_v=codec)) == (codec, codec)
    with pytest.raises(UsageError, match="cache-type-k"):
        plan(header=wide, cache_type_k="q5_0")


def test_heads_that_do_not_divide_are_one_clear_problem(plan, model):
    with pytest.raises(PlanError) as caught:
        plan(header=model(width=40), cache_type_k="tq3_0")
    (problem,) = caught.value.problems
    wanted = "tq3_0 keeps vectors of a multiple of 64 numbers, got 40 (field 'k' of region 'kv.0')"
    assert problem.message == f"The state of target does not go into a cache of tq3_0 and f16: {wanted}."
    assert "--cache-type-k" in problem.fix


def test_compressed_entries_are_one_clear_problem(plan, model):
    header = model(width=64, stride=4, pooled=True)
    with pytest.raises(PlanError, match=r"q8_0 keeps what each token has, not compressed entries .*'pooled'"):
        plan(header=header, cache_type_k="q8_0")
    plan(header=header, cache_type_v="q8_0")  # it has keys only


# --- smaller types where a context asks for them

CONTEXT = 2048


def limit(plan, wide, token_bytes, context=CONTEXT):
    """Memory for exactly so long a context in so many bytes a token."""
    made = plan(header=wide)
    fixed = sum(item.num_bytes for item in made.claims if item.kind in ("weights", "workspace"))
    return fixed + (math.ceil((context + 8) / 32) + 1) * 32 * token_bytes


def test_an_asked_context_that_lacks_memory_turns_f16_into_q8_and_says_so(plan, wide):
    made = plan(header=wide, ctx_size=CONTEXT, memory_limit=limit(plan, wide, Q8_BYTES))
    assert types(made) == ("q8_0", "q8_0")
    assert made.number("context") == CONTEXT
    assert made.origin["cache.k_type"].reason.startswith("a context of 2048 tokens is short of")
    (note,) = [problem for problem in made.problems if "q8_0" in problem.message]
    assert not note.fatal
    assert "--cache-type-k f16" in note.fix
    assert made.models[0].spec.details["types"] == ("q8_0", "q8_0")


def test_a_cache_bound_by_bytes_does_the_same(plan, wide):
    made = plan(header=wide, ctx_size=CONTEXT, cache_bytes=(CONTEXT + 128) * Q8_BYTES)
    assert types(made) == ("q8_0", "q8_0")


def test_a_context_that_fits_stays_in_f16(plan, wide):
    made = plan(header=wide, ctx_size=CONTEXT, memory_limit=limit(plan, wide, 2 * NUMBERS))
    assert types(made) == ("f16", "f16")
    assert not made.problems


def test_an_automatic_context_is_shortened_in_f16(plan, wide):
    made = plan(header=wide, memory_limit=limit(plan, wide, Q8_BYTES))
    assert types(made) == ("f16", "f16")
    assert made.number("context") < CONTEXT


@pytest.mark.parametrize("chosen", [("k", "f16"), ("v", "f16"), ("v", "bf16")])
def test_a_type_somebody_chose_wins(plan, wide, chosen):
    chosen = {f"cache_type_{chosen[0]}": chosen[1]}
    with pytest.raises(PlanError, match="a context of 2048 tokens is short of"):
        plan(header=wide, ctx_size=CONTEXT, memory_limit=limit(plan, wide, Q8_BYTES), **chosen)


def test_what_q8_does_not_help_is_reported_in_f16(plan, wide, model):
    memory = limit(plan, wide, Q8_BYTES) - 1
    with pytest.raises(PlanError) as caught:
        plan(header=wide, ctx_size=CONTEXT, memory_limit=memory)
    (problem,) = caught.value.problems
    missing = limit(plan, wide, 2 * NUMBERS) - memory
    assert f"is short of {missing / 1024:.1f} KiB" in problem.message
    narrow = model(width=40)  # q8_0 does not keep heads of 40
    with pytest.raises(PlanError, match="is short of"):
        plan(header=narrow, ctx_size=CONTEXT, memory_limit=memory - 2**19)


def test_plugins_see_the_type_and_may_set_it(plan, wide):
    seen = []

    def look(plan, devices):
        seen.append(plan.values["cache.k_type"])
        return [PlanPatch("cache.k_type", "q4_0", "small"), PlanPatch("cache.v_type", "q4_0", "small")]

    made = plan(
        make_plugin("small", luce_extend_plan=look),
        header=wide, ctx_size=CONTEXT, memory_limit=limit(plan, wide, Q8_BYTES),
    )  # fmt: skip
    assert seen == ["q8_0"]
    assert types(made) == ("q4_0", "q4_0")
    assert not made.problems


def test_a_plugin_that_makes_room_brings_f16_back(plan, wide):
    def shorten(plan, devices):
        return [PlanPatch("engine.row_budget", 450, "small steps")]

    fixed = plan(make_plugin("small", luce_extend_plan=shorten), header=wide)
    room = sum(item.num_bytes for item in fixed.claims if item.kind in ("weights", "workspace"))
    room += (math.ceil((CONTEXT + 8) / 32) + 1) * 32 * 2 * NUMBERS
    small = {"header": wide, "ctx_size": CONTEXT, "memory_limit": room}
    assert types(plan(**small)) == ("q8_0", "q8_0")
    made = plan(make_plugin("small", luce_extend_plan=shorten), **small)
    assert types(made) == ("f16", "f16")
    assert not made.problems


def test_rooms_are_those_of_the_types_of_the_options(arch, wide):
    registry = from_modules([arch()])

    def found(**options):
        asked = load_options(registry, options, {}, [])
        return what_fits(asked, wide, registry, [CPU], [2**21, 2**22, 2**23])

    assert found(ctx_size=10**6) == found()
    assert found(cache_type_k="q8_0") != found()
