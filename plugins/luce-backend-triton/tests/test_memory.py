"""What the plan counts for a step, by hand. Beside tensors: tests/composition/test_memory_of_steps.py."""

import pytest
from attrs import evolve
from luce_backend_triton import delta, memory

from luce_core.contracts import Field, Group, LayerWidths, ModelSpec, Pages, Slot, StateLayout
from luce_core.plan_memory import reference_step

ROWS = 4096
KV = Pages("kv", "full", 0, {"k": Field((2, 64), "kv.k"), "v": Field((2, 64), "kv.v")})
STATE = Slot(
    "delta", 0, Field((8, 64, 32), "f32"),
    {"k": Field((4, 64), "f32"), "u": Field((8, 32), "f32"), "g": Field((8,), "f32")}, "delta_fold",
)  # fmt: skip
WINDOW = Slot("conv", 0, Field((3, 768), "f32"), {"row": Field((768,), "f32")}, "shift")
DENSE = LayerWidths(mixer_in=768, mixer_out=512, ffn_in=4096, ffn_out=2048)


def spec(*widths, pages=(KV,), slots=()):
    layout = StateLayout((Group("full"),), pages, slots)
    return ModelSpec("x", "x", len(widths), 512, 99, 99, 1, 512, 512, layout, None, "any", {}, widths=widths)


def per_row(made):
    """(working, replayed) bytes of a row, of whole chunks."""
    spare = memory.LIBRARY_BYTES
    return (made.working - spare) / ROWS, (made.replayed - spare) / ROWS


def test_a_dense_layer():
    """Attention: its results, its input as f32 and as halves. The MLP: the last product."""
    mixer = 4 * 768 + 6 * 512 + 4 * 512
    ffn = 4 * 4096 + 2 * 2048 + 4 + 4 * 512
    assert per_row(memory.activations(spec(DENSE), ROWS)) == (4 * 512 + ffn, 4 * 512 + mixer + ffn)


def test_the_widest_of_each_half_counts():
    wide = evolve(DENSE, mixer_in=9000, ffn_in=100)
    both = memory.activations(spec(DENSE, wide), ROWS)
    one, other = (memory.activations(spec(layer), ROWS) for layer in (DENSE, wide))
    assert both.working == max(one.working, other.working)
    assert both.replayed > max(one.replayed, other.replayed)


def test_a_layer_with_the_delta_rule():
    """q, k and v; w and u; sums; a state for every 64 rows; the result."""
    assert memory.DELTA_ROWS == delta.CHUNK
    narrow = evolve(DENSE, mixer_in=792, mixer_out=256, ffn_in=16, ffn_out=8)
    inside = 4 * 792 + 2 * 768 + 2 * 2 * 256 + 2 * 256 + 4 * 8 + 2 * 8 * 64 * 32 / 64 + 4 * 256
    made = memory.activations(spec(narrow, pages=(), slots=(STATE, WINDOW)), ROWS)
    assert per_row(made)[0] == pytest.approx(4 * 512 + inside)


def test_a_short_chunk_has_the_sums_of_its_parts():
    few = memory.activations(spec(evolve(DENSE, ffn_in=64, ffn_out=32)), 64)
    assert few.working - memory.LIBRARY_BYTES > 4 * memory.SPLIT_ROWS * 64


def test_experts():
    """Of each that a row uses: gate and up, their product, the result; both results of the row last."""
    mixture = LayerWidths(768, 512, 256, 128, expert_in=512, expert_out=256, experts=64, experts_used=8)
    one = 4 * 512 + 2 * 256 + 4 + 4 * 512
    own = 4 * 256 + 2 * 128 + 4 + 4 * 512
    assert own < 2 * 4 * 512
    ffn = 4 * (512 + 64) + 2 * 512 + 8 * (one + 12) + 2 * 4 * 512
    assert per_row(memory.activations(spec(mixture), ROWS))[0] == 4 * 512 + ffn


def test_norms_behind_take_two_vectors_more():
    plain, normed = (memory.activations(spec(evolve(DENSE, norm_behind=width)), ROWS) for width in (0, 512))
    assert normed.working - plain.working == 2 * 4 * 512 * ROWS


@pytest.mark.parametrize(
    "other",
    [
        spec(),
        spec(DENSE, LayerWidths()),
        spec(DENSE, pages=(evolve(KV, fields={"latent": Field((64,), "kv.k")}),)),
        spec(DENSE, slots=(evolve(STATE, log={**STATE.log, "g": Field((8, 64), "f32")}),)),
        spec(DENSE, slots=(evolve(STATE, fold="lightning"),)),
    ],
    ids=["nothing known", "a layer unknown", "latents", "kda", "another recurrence"],
)
def test_what_has_no_kernels_takes_what_the_reference_does(other):
    assert memory.activations(other, ROWS) == reference_step(other, ROWS)
