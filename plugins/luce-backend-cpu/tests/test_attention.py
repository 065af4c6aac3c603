"""Attention over the paged cache against the reference op: outputs, and what was written to the cache."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from luce_backend_cpu import lowering
from luce_backend_cpu.region import single

from luce_core.contracts import CODECS, AttentionSpec, CodedField, Norm, Region, RopeSpec, SeqTable
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import build_ops
from luce_core.ops.codecs import decode, encode

WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
"""A failing batch is printed whole; making it smaller takes minutes and says little."""
REFERENCE = build_ops()
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@st.composite
def specs(draw, dims=(8, 20, 64)):
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 3), (3, 1), (1, 5)]))
    dim, value_dim = draw(st.sampled_from(dims)), draw(st.sampled_from(dims))
    rng = np.random.default_rng(draw(st.integers(0, 999)))

    def vector(n):
        return torch.from_numpy(rng.standard_normal(n).astype(np.float32))

    rope = None
    if draw(st.booleans()):
        half = draw(st.sampled_from([dim // 2, dim // 4]))
        sections = (half - half // 2, half // 2) if draw(st.booleans()) else ()
        rope = RopeSpec(
            inv_freq=vector(half).abs() * 0.1,
            pairs=draw(st.sampled_from(["halves", "adjacent"])),
            magnitude=draw(st.sampled_from([1.0, 1.3])),
            sections=sections,
            interleaved_sections=draw(st.booleans()),
        )
    return AttentionSpec(
        layer=0,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=dim,
        value_dim=value_dim,
        scale=dim**-0.5,
        rope=rope,
        q_norm=Norm(vector(dim), 1e-5) if draw(st.booleans()) else None,
        k_norm=Norm(vector(dim), 1e-6) if draw(st.booleans()) else None,
        v_norm=Norm(vector(value_dim), 1e-6) if draw(st.booleans()) else None,
        window=draw(st.sampled_from([None, 1, 5, 40])),
        sinks=vector(kv_heads * group) if draw(st.booleans()) else None,
        softcap=draw(st.sampled_from([0.0, 5.0])),
        gate=draw(st.sampled_from(["", "sigmoid"])),
    )


def region_of(spec, rng, block, blocks, dtype):
    """A cache full of old entries. dtype: of keys and values, or "K V": a type or codec each."""
    fields, codecs = {}, {}
    kinds = (*dtype.split(), dtype)[:2]
    for name, dim, kind in zip("kv", (spec.head_dim, spec.value_dim), kinds, strict=True):
        shape = (blocks, block, spec.kv_heads, dim)
        fields[name] = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
        if kind in CODECS:
            codecs[name] = CodedField(CODECS[kind], dim)
            fields[name] = encode(codecs[name], fields[name])
        else:
            fields[name] = fields[name].to(DTYPES[kind])
    return Region("kv", "full", fields, block, codecs=codecs)


class Case:
    """A batch of a few sequences with scattered block tables, and random q, k, v."""

    def __init__(self, spec, phase, shapes, rng, *, block=4, dtype="f32", evicted=0, shared=False):
        self.spec = spec
        ids = count()
        rows, order = [], rng.permutation(600).tolist()
        for number, (length, tree) in enumerate(shapes):
            blocks = -(-(length + len(tree)) // block)
            hidden = 0 if spec.window is None else (length - spec.window + 1) // block  # blocks no row sees
            kept = [b for b in range(blocks) if not 0 < b < min(1 + evicted, hidden)]
            table = SeqTable(tuple(order[next(ids)] for _ in kept), tuple(b * block for b in kept))
            parents = None if phase == "prefill" else tree
            rows.append(RowSet(number, length, list(range(len(tree))), {"full": table}, parents=parents))
        axes = 2 if spec.rope is not None and spec.rope.sections else 1
        self.batch = make_batch(phase, rows, axes=axes)
        total = self.batch.token.shape[0]
        self.regions = [region_of(spec, np.random.default_rng(5), block, 600, dtype) for _ in range(2)]

        def values(width):
            return torch.from_numpy(rng.standard_normal((total, width)).astype(np.float32))

        self.q = values(spec.heads * spec.head_dim)
        self.k = None if shared else values(spec.kv_heads * spec.head_dim)
        self.v = None if shared else values(spec.kv_heads * spec.value_dim)
        self.gate = values(spec.heads * spec.value_dim) if spec.gate else None

    def arguments(self, region):
        return self.batch, self.q, self.k, self.v, region, self.spec, self.gate

    def tolerance(self):
        """An entry on the edge between two 16-bit numbers may fall either way when it was computed before."""
        spec, dtype = self.spec, self.regions[0].fields["k"].dtype
        if self.regions[0].codecs:
            return 2e-3
        if dtype == torch.float32 or (spec.rope is None and spec.k_norm is None and spec.v_norm is None):
            return 2e-5
        return 2e-3 if dtype == torch.float16 else 1.6e-2

    def check(self, lib, row_invariant=False):
        want = REFERENCE.attention(*self.arguments(self.regions[0]))
        step = lowering.attention(*self.arguments(self.regions[1]))
        assert step is not None
        (got,) = single("attention", step, lib, row_invariant)
        real = self.batch.parent != -2
        scale = max(1.0, float(want[real].abs().max()))
        torch.testing.assert_close(got[real], want[real], rtol=0, atol=self.tolerance() * scale)
        for name in ("k", "v"):
            if self.regions[0].codecs.get(name):  # a number between two codes may become either
                one, other = (region.fields[name] for region in self.regions)
                written = self.batch.token.shape[0] * one[0, 0].numel()
                assert (one != other).sum() <= 2 + written / 5000
                continue
            one, other = (region.fields[name].float() for region in self.regions)
            # cosines of two libraries differ in the last bit, which may carry a 16-bit entry to its neighbour
            exact = self.regions[0].fields[name].dtype == torch.float32
            atol = 3e-6 * max(1.0, float(one.abs().max()))
            torch.testing.assert_close(other, one, rtol=0 if exact else 2**-7, atol=atol)
        return got


def chain(n):
    return list(range(-1, n - 1))


TREES = [
    chain(1), chain(3), [-1, 0, 0, 1, 1, 2, 2], [-1, -1, 0, -2, 1], [-1, *([0] * 11)], chain(20), [-1, -2],
]


@given(st.data())
@settings(max_examples=40, deadline=None, phases=WITHOUT_SHRINKING)
def test_any_held_batch(quick_lib, data):
    spec = data.draw(specs())
    shapes = data.draw(
        st.lists(st.tuples(st.integers(0, 70), st.sampled_from(TREES)), min_size=1, max_size=3),
    )
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    case = Case(spec, "held", shapes, rng, dtype=dtype, evicted=data.draw(st.integers(0, 3)))
    case.check(quick_lib, data.draw(st.booleans()))


@pytest.mark.parametrize("types", ["q8_0 q8_0", "q8_0 f16", "f32 q8_0"])
@pytest.mark.parametrize("phase", ["held", "prefill"])
@given(st.data())
@settings(max_examples=10, deadline=None, phases=WITHOUT_SHRINKING)
def test_any_batch_over_codes(quick_lib, types, phase, data):
    spec = data.draw(specs(dims=(32, 64, 96, 256)))
    trees = st.sampled_from(TREES) if phase == "held" else st.integers(1, 90).map(chain)
    shapes = data.draw(st.lists(st.tuples(st.integers(0, 70), trees), min_size=1, max_size=3))
    case = Case(spec, phase, shapes, np.random.default_rng(data.draw(st.integers(0, 99))), dtype=types)
    case.check(quick_lib, data.draw(st.booleans()))


@pytest.mark.parametrize("codec", ["fp8", "q4_0", "tq3_0"])
def test_other_codecs_go_to_the_reference(codec):
    case = Case(PLAIN, "held", [(8, chain(1))], np.random.default_rng(1), dtype=f"q8_0 {codec}")
    assert lowering.attention(*case.arguments(case.regions[0])) is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(quick_lib, wrong):
    case = Case(PLAIN, "prefill", [(0, chain(3))], np.random.default_rng(1), dtype="q8_0")
    case.k[1, 3] = wrong
    single("attention", lowering.attention(*case.arguments(case.regions[1])), quick_lib, False)
    entry = case.batch.table["full"].block[0, 0], 1, 0
    how = case.regions[1].codecs["k"]
    assert decode(how, case.regions[1].fields["k"][entry]).isnan().all()
    assert decode(how, case.regions[1].fields["k"][entry[0], 2]).isfinite().all()


@given(st.data())
@settings(max_examples=40, deadline=None, phases=WITHOUT_SHRINKING)
def test_any_prefill(quick_lib, data):
    spec = data.draw(specs())
    rows = st.tuples(st.integers(0, 60), st.integers(1, 90).map(chain))
    shapes = data.draw(st.lists(rows, min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    case = Case(spec, "prefill", shapes, rng, dtype=dtype, block=data.draw(st.sampled_from([4, 32])))
    case.check(quick_lib, data.draw(st.booleans()))


PLAIN = AttentionSpec(layer=0, heads=6, kv_heads=2, head_dim=64, value_dim=64, scale=0.125, rope=None)
ROPED = AttentionSpec(
    layer=0, heads=6, kv_heads=2, head_dim=20, value_dim=8, scale=0.2,
    rope=RopeSpec(torch.linspace(1, 0.01, 10)), window=30, sinks=torch.linspace(-1, 2, 6), softcap=4.0,
    gate="sigmoid",
)  # fmt: skip


@pytest.mark.parametrize("spec", [PLAIN, ROPED], ids=["plain", "everything"])
@pytest.mark.parametrize("dtype", [*DTYPES, "q8_0"])
@pytest.mark.parametrize(
    ("phase", "shapes"),
    [
        ("held", [(50, chain(1)), (3, [-1, 0, 0])]),
        ("held", [(1100, chain(1))]),
        ("held", [(70, [-1, *([0] * 69)])]),
        ("prefill", [(0, chain(100)), (33, chain(5))]),
    ],
    ids=["few", "splits", "words", "chunks"],
)
def test_every_processor(lib, spec, dtype, phase, shapes):
    if dtype == "q8_0":
        spec = evolve(spec, head_dim=64, value_dim=32)
    Case(spec, phase, shapes, np.random.default_rng(1), dtype=dtype).check(lib)


def test_a_row_that_only_reads(quick_lib):
    """k and v None: another layer has filled the region."""
    Case(PLAIN, "held", [(40, chain(2))], np.random.default_rng(2), shared=True).check(quick_lib)


def test_padding_writes_nothing_and_reads_no_garbage(quick_lib):
    case = Case(PLAIN, "held", [(8, [-1, 0, 1, 2, -2, -2, -2, -2, -2])], np.random.default_rng(3))
    table = case.batch.table["full"]
    for region in case.regions:
        for page in region.fields.values():
            page[table.block[0, 3], :] = float("nan")  # entries of padding rows 4.. lie here and after
            page[table.block[0, 4], :] = float("nan")
    want = REFERENCE.attention(*case.arguments(case.regions[0]))
    (got,) = single("attention", lowering.attention(*case.arguments(case.regions[1])), quick_lib, False)
    del want  # the reference multiplies what it masks
    assert torch.isfinite(got[:4]).all()
    for region in case.regions:
        assert torch.isnan(region.fields["k"][table.block[0, 4]]).all()


def test_a_row_outside_its_blocks_is_an_error(quick_lib):
    case = Case(PLAIN, "prefill", [(0, chain(4))], np.random.default_rng(4))
    case.batch.table["full"].count[0] = 0
    step = lowering.attention(*case.arguments(case.regions[1]))
    with pytest.raises(Exception, match="place lies in no block"):
        single("attention", step, quick_lib, False)


@pytest.mark.parametrize("phase", ["held", "prefill"])
def test_row_invariant_rows_do_not_know_their_batch(quick_lib, phase):
    """The same row alone and among others: the same bits."""
    shapes = [(300, chain(1)), (17, chain(12)), (600, chain(1))]
    together = Case(PLAIN, phase, shapes, np.random.default_rng(6), dtype="f16")
    (got,) = single(
        "attention", lowering.attention(*together.arguments(together.regions[1])), quick_lib, True,
    )
    starts = together.batch.query_start.tolist()
    for number, (length, tree) in enumerate(shapes):
        rows = slice(starts[number], starts[number + 1])
        table = together.batch.table["full"]
        n = int(table.count[number])
        alone = make_batch(phase, [RowSet(0, length, list(range(len(tree))), {"full": SeqTable(
            tuple(table.block[number, :n].tolist()), tuple(table.first[number, :n].tolist()))},
            parents=None if phase == "prefill" else tree)])  # fmt: skip
        region = together.regions[1]
        step = lowering.attention(
            alone, together.q[rows], together.k[rows], together.v[rows], region, PLAIN, None,
        )
        assert torch.equal(single("attention", step, quick_lib, True)[0], got[rows])


@pytest.mark.parametrize(
    "change",
    [
        {"extra": (None, None)},
        {"spec": {"inverse_output_rope": True}},
        {"spec": {"gate": "softplus"}},
        {"spec": {"gate": "sigmoid", "gate_per_head": True}},
        {"spec": {"rope": RopeSpec(torch.ones(2), part="last")}},
        {"stride": 4},
        {"fields": {"latent"}},
    ],
    ids=["extra", "inverse", "softplus", "per head", "last", "stride", "fields"],
)
def test_what_the_library_cannot_do_is_left_to_the_reference(change):
    from attrs import evolve

    case = Case(PLAIN, "held", [(8, chain(1))], np.random.default_rng(0))
    region, spec, extra = case.regions[0], PLAIN, change.get("extra")
    spec = evolve(spec, **change.get("spec", {}))
    if "stride" in change:
        region = evolve(region, stride=4)
    if "fields" in change:
        region = evolve(region, fields={"latent": region.fields["k"]})
    assert lowering.attention(case.batch, case.q, case.k, case.v, region, spec, None, extra) is None
