"""`luce-core doctor --kernels`: every kernel of a layer beside float64 or the reference ops, on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from luce_backend_triton import attention, delta, moe, ops, picks, route, state
from luce_backend_triton.formats import FORMATS
from luce_backend_triton.selfcheck_chains import chains
from luce_backend_triton.selfcheck_given import BLOCK, FLOATS, ROUNDED, delta_state, error_of, matrix
from luce_core.contracts import (
    CODECS,
    AttentionSpec,
    CodedField,
    Commit,
    ExpertStack,
    ForwardBatch,
    KernelCheck,
    Linear,
    LinearGroup,
    Norm,
    Region,
    RouteSpec,
    SamplingParams,
    SeqTable,
    SharedExpert,
)
from luce_core.model.batch import RowSet, make_batch
from luce_core.model.weights import ResidentExperts
from luce_core.ops import build_ops, codecs, sampling
from luce_core.ops.marks import EMITTED
from luce_core.ops.newest import AHEAD
from luce_core.ops.noise import CounterNoise
from luce_core.ops.sampling import ParamTable

ROWS = (1, 2, 5, 16, 24, 70, 300)
"""Of x: one for each kernel and pass."""
EXPERT_ROWS = (1, 3, 200)
"""Pairs of row and expert that read packed records each by themselves, or those of one expert together; and
many, for dense weights.
"""
EXACT = 1e-4
"""Of f32."""
PROMPTS = (50, 19)
"""Rows of two, which end within a chunk."""
VOCAB = 50_000
TREE = [-1, 0, 0, 1, 3]
FILTERED: dict[str, tuple[dict[str, Any], ...]] = {
    "top-k and top-p": ({"top_p": 0.9}, {"top_k": 20, "top_p": 0.9}),
    "typical-p and XTC": (
        {"typical_p": 0.8, "top_p": 0.9},
        {"top_k": 300, "xtc_probability": 1.0, "xtc_threshold": 0.004},
    ),
}
"""Of two rows; a third has none of it."""
Op = Callable[..., Any]
BLOCK_COUNT, HELD = 12, 8


@frozen
class Checks:
    """Those of one layer, in parts that stand alone."""

    layer: ops.Layer

    def products(self, device: str) -> Iterator[KernelCheck]:
        """Of every format."""
        torch.manual_seed(0)
        yield from products(self.layer, device, (*FORMATS, *FLOATS), ROWS)

    def sequences(self, device: str) -> Iterator[KernelCheck]:
        """Everything that multiplies no packed weights."""
        torch.manual_seed(0)
        yield from sequences(device, attention.attention, delta.Delta(self.layer.cuda).delta)
        yield from chains(self.layer, device)
        yield from routes(device, route.route)
        yield from picking(device)

    def experts(self, device: str) -> Iterator[KernelCheck]:
        """Of every block format; and as the router chooses them."""
        torch.manual_seed(0)
        run = moe.Experts(self.layer.cuda).experts
        yield from experts(self.layer, device, tuple(FORMATS), EXPERT_ROWS, run)
        yield from experts(self.layer, device, ("Q4_K", "Q6_K"), EXPERT_ROWS[:2], run, route.route)


CUDA, PORTABLE = Checks(ops.CUDA), Checks(ops.PORTABLE)


# --- products


def products(
    layer: ops.Layer, device: str, names: Iterable[str], rows: Iterable[int]
) -> Iterator[KernelCheck]:
    """A normed group with bias, its last member in another format, a product with residual and those of
    silu(gate) · up with bias and without, of every format; the worst of them.
    """
    names_of = ("pack_linear", "pack_group", "linear", "table_rows", "norm_linear", "linear_out", "gated_mlp")
    namespace = build_ops({name: getattr(layer, name) for name in names_of})
    width = 768
    for name in names:
        other = "Q8_0" if name != "Q8_0" else "Q4_K"
        kinds = ((name, 176), (name, 40), (other, 56))
        pairs = [matrix(namespace, kind, out, width, device) for kind, out in kinds]
        group = LinearGroup(tuple(w for w, _ in pairs), namespace.pack_group(tuple(w for w, _ in pairs)))
        norm = Norm(torch.rand(width, device=device) + 0.5, 1e-6)
        (gate, its), (up, theirs) = (matrix(namespace, name, 512, width, device, seed) for seed in (1, 2))
        down, back = matrix(namespace, name, 176, 512, device)
        plain = (evolve(gate, bias=None), evolve(up, bias=None))
        halves = [LinearGroup(both, namespace.pack_group(both)) for both in (plain, (gate, up))]
        for count in rows:
            x, residual = torch.randn(count, width, device=device), torch.randn(count, 176, device=device)
            normed = torch.nn.functional.rms_norm(x.double(), (width,), norm.weight.double(), norm.eps)
            got = namespace.norm_linear(x, norm, group)
            errors = [
                error_of(y, normed @ exact.T + w.bias) for y, (w, exact) in zip(got, pairs, strict=True)
            ]
            out, exact = pairs[0]
            behind = namespace.linear_out(x, out, residual) - residual
            errors.append(error_of(behind, x.double() @ exact.T + out.bias))
            for both in halves:
                g, u = (
                    normed @ w.T + (0 if one.bias is None else one.bias)
                    for w, one in zip((its, theirs), both.members, strict=True)
                )
                gated = namespace.gated_mlp(x, norm, both, down)
                inner = torch.nn.functional.silu(g) * u
                errors.append(error_of(gated, inner @ back.T + down.bias))
            allowed = 2**-7 if name == "BF16" else ROUNDED
            yield KernelCheck(f"{name}, {count} rows of x", max(errors), allowed, *_avoided(layer))


def _avoided(layer: ops.Layer) -> tuple[tuple[str, ...], str]:
    """Ops with products of packed weights, and the flag that has Triton compute them."""
    return ("linear",), "--triton-kernels triton" if layer.cuda else ""


# --- attention, linear attention, commits


def sequences(device: str, attend: Op, recur: Op) -> Iterator[KernelCheck]:
    """A prompt of two sequences, a tree and a chain behind it, one row of each: by the layer and by the
    reference.

    attend, recur: the ops `attention` and `delta` of the layer.
    """
    mine = build_ops({
        "attention": attend, "delta": recur, "commit_pages": state.commit_pages,
        "commit_slot": state.commit_slot, "commit_slots": state.commit_slots,
    })  # fmt: skip
    theirs = build_ops()
    tables = [_tables(first) for first in ((5, 1, 7, 3, 9), (0, 10, 2, 8, 4))]
    long, short = PROMPTS
    prompt = [RowSet(2, 0, [1] * long, tables[0]), RowSet(0, 0, [1] * short, tables[1])]
    held = [
        RowSet(2, long, [1] * len(TREE), tables[0], parents=TREE),
        RowSet(0, short, [1] * 2, tables[1]),
    ]
    alone = [RowSet(2, long, [1], tables[0]), RowSet(0, short, [1], tables[1])]
    path = torch.tensor([[0, 1, 3], [0, 1, 0]], dtype=torch.int32, device=device)
    commit = Commit(path, torch.tensor([3, 2], dtype=torch.int32, device=device))
    pages = ("attention", ("commit_pages",))
    kinds = [
        ("attention", _attention, *pages),
        ("Gated DeltaNet", _delta, "delta", ("commit_slot", "commit_slots")),
    ]
    for k, v in zip(CODECS, reversed(tuple(CODECS)), strict=True):
        over = partial(_attention, k_type=k, v_type=v)
        kinds.append((f"attention over keys in {k} and values in {v}", over, *pages))
    for name, run, op, commits in kinds:
        one, other = (run(namespace, device) for namespace in (mine, theirs))
        for phase, rows in (("prefill", prompt), ("held", alone), ("held", held)):
            batch = make_batch(phase, rows, device=device)
            errors = [error_of(a, b) for a, b in zip(one(batch, None), other(batch, None), strict=True)]
            what = "one row" if rows is alone else phase
            yield KernelCheck(f"{name}, {what}", max(errors), ROUNDED, (op,))
        pairs = zip(one(batch, commit), other(batch, commit), strict=True)
        yield KernelCheck(f"{name}, commit", max(error_of(a, b) for a, b in pairs), ROUNDED, commits)


def _tables(blocks: tuple[int, ...]) -> dict[str, SeqTable]:
    return {"full": SeqTable(blocks, tuple(range(0, BLOCK * len(blocks), BLOCK)))}


Run = Callable[[ForwardBatch, Commit | None], tuple[Tensor, ...]]
"""Runs a batch (or commits one) -> its result and the state behind it."""


def _attention(namespace: Any, device: str, k_type: str = "", v_type: str = "") -> Run:
    """k_type, v_type: codecs, "" = halves."""
    rng = torch.Generator().manual_seed(1)
    heads, kv_heads, dim = 8, 2, 64
    shape = (BLOCK_COUNT, BLOCK, kv_heads, dim)
    fields = {name: torch.randn(shape, generator=rng).to(device, torch.float16) for name in ("k", "v")}
    kinds = {"k": k_type, "v": v_type}
    coded = {name: CodedField(CODECS[kind], dim) for name, kind in kinds.items() if kind}
    fields |= {name: codecs.encode(how, fields[name]) for name, how in coded.items()}
    region = Region("pages", "full", fields, BLOCK, codecs=coded)

    def kept() -> list[Tensor]:
        return [
            codecs.decode(coded[name], page) if name in coded else page.float()
            for name, page in fields.items()
        ]

    norm = Norm(1 + 0.1 * torch.randn(dim, generator=rng).to(device), 1e-6)
    spec = AttentionSpec(0, heads, kv_heads, dim, dim, dim**-0.5, None, norm, norm, gate="sigmoid")

    def run(batch: ForwardBatch, commit: Commit | None) -> tuple[Tensor, ...]:
        if commit is not None:
            namespace.commit_pages(batch, commit, (region,))
            return tuple(kept())
        count = batch.token.shape[0]
        q, gate = (torch.randn(count, heads * dim, generator=rng).to(device) for _ in range(2))
        k, v = (torch.randn(count, kv_heads * dim, generator=rng).to(device) for _ in range(2))
        y = namespace.attention(batch, q, k, v, region, spec, gate=gate)
        return (y, *kept())

    return run


def _delta(namespace: Any, device: str) -> Run:
    rng = torch.Generator().manual_seed(2)
    conv, memory, spec = delta_state(rng, device, HELD)
    channels, heads, dim = conv.state.shape[2], spec.value_heads, spec.value_dim

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(device)

    def run(batch: ForwardBatch, commit: Commit | None) -> tuple[Tensor, ...]:
        if commit is not None:
            for one in (conv, memory):
                namespace.commit_slot(batch, commit, one)
            return conv.state, memory.state
        count = batch.token.shape[0]
        given = [rand(count, width) for width in (channels, heads * dim, heads, heads)]
        y = namespace.delta(batch, *given, conv, memory, spec)
        return y, conv.state, memory.state

    return run


# --- experts


def routes(device: str, op: Op) -> Iterator[KernelCheck]:
    """Weights of the chosen experts, spread over all of them, beside float64."""
    rng = torch.Generator().manual_seed(3)
    width, count, top = 96, 40, 4
    namespace = build_ops({"route": op})
    norm = Norm(1 + 0.1 * torch.randn(width, generator=rng).to(device), 1e-6)
    w = torch.randn(count, width, generator=rng).to(device)
    table = {"full": SeqTable(tuple(range(4)), tuple(range(0, 4 * BLOCK, BLOCK)))}
    for rows in (3, 50):
        x = torch.randn(rows, width, generator=rng).to(device)
        batch = make_batch("prefill", [RowSet(0, 0, [1] * rows, table)], device=device)
        ids, weight = namespace.route(batch, x[: batch.token.shape[0]], norm, w, RouteSpec(top))
        normed = torch.nn.functional.rms_norm(x.double(), (width,), norm.weight.double(), norm.eps)
        best, at = (normed @ w.double().T).softmax(1).topk(top)
        want = torch.zeros(rows, count, dtype=torch.float64, device=device).scatter_(1, at, best)
        want /= want.sum(1, keepdim=True)
        got = torch.zeros_like(want).scatter_(1, ids.long(), weight.double())
        yield KernelCheck(f"route, {rows} rows of x", error_of(got, want), EXACT, ("route",))


def experts(
    layer: ops.Layer, device: str, names: Iterable[str], rows: Iterable[int], op: Op, router: Op | None = None
) -> Iterator[KernelCheck]:
    """Norm, four experts of which each row has two, a shared one with its gate, residual, beside float64.
    With a router: as many as it takes to choose in the experts' launches.
    """
    names_of = ("pack_linear", "pack_group", "linear", "norm_linear", "linear_out", "gated_mlp")
    more = {"experts": op, **({"route": router} if router else {})}
    namespace = build_ops({name: getattr(layer, name) for name in names_of} | more)
    count, width, hidden, used = (32, 256, 256, 3) if router else (4, 256, 512, 2)
    shapes = ((count * hidden, width), (count * hidden, width), (count * width, hidden),
              (hidden, width), (hidden, width), (width, hidden))  # fmt: skip
    for name in names:
        pairs = [matrix(namespace, name, *shape, device, seed) for seed, shape in enumerate(shapes)]
        plain = [Linear("w", w.out_features, w.in_features, name, w.packed) for w, _ in pairs]
        gate, up, down = (exact.view(count, -1, exact.shape[1]) for _, exact in pairs[:3])
        factor = torch.randn(width, device=device) * 0.05
        group = LinearGroup((plain[3], plain[4]), namespace.pack_group((plain[3], plain[4])))
        lut = torch.arange(count, dtype=torch.int32, device=device)
        bank = ResidentExperts(lut, ExpertStack(count, (plain[0], plain[1]), plain[2]))
        norm = Norm(torch.rand(width, device=device) + 0.5, 1e-6)
        for n in rows:
            x = torch.randn(n, width, device=device)
            normed = torch.nn.functional.rms_norm(x.double(), (width,), norm.weight.double(), norm.eps)
            w = torch.randn(count, width, device=device) / width**0.5
            weight, ids = (normed @ w.double().T).softmax(1).topk(used)
            weight /= weight.sum(1, keepdim=True)
            routed = (ids.int(), weight.float())
            if router:
                b = SimpleNamespace(parent=torch.full((n,), -1, dtype=torch.int32, device=device))
                routed = namespace.route(b, x, norm, w, RouteSpec(used))
            shared = SharedExpert(group, plain[5], factor)
            got = namespace.experts(x, norm, routed, bank, shared, x) - x
            want = _mlp(normed, pairs[3][1], pairs[4][1], pairs[5][1])
            want *= torch.sigmoid(normed @ factor.double())[:, None]
            for one in range(count):
                chosen = (weight * (ids == one)).sum(1, keepdim=True).double()
                want += chosen * _mlp(normed, gate[one], up[one], down[one])
            what = f"{name}, experts of {n} rows of x" + (", by a router" if router else "")
            yield KernelCheck(what, error_of(got, want), ROUNDED, ("experts",))


def picking(device: str) -> Iterator[KernelCheck]:
    """How far what is picked lies below the best, with noise and without; and tokens filled in behind it."""
    rows, vocab = 3, VOCAB
    kinds = {"greedy": SamplingParams(), "with noise": SamplingParams(temperature=0.8, seed=5)}
    namespace = build_ops({name: getattr(picks, name) for name in picks.__all__})
    batch = make_batch("held", [RowSet(n, 9, [1], {}) for n in range(rows)], device=device)
    for name, params in kinds.items():
        table = ParamTable(rows, vocab, device)
        for slot in range(rows):
            table.take(slot, params, [1], [])
        logits = torch.randn(rows, vocab, device=device)
        got = namespace.sample(logits, batch, table.step(range(rows)))
        if params.temperature:
            places = torch.full((rows, 1), 10, device=device), torch.arange(vocab, device=device)[None]
            logits = logits + CounterNoise().gumbel(table.seed[:, None], *places)
        behind = logits.amax(1) - logits.gather(1, got[:, None])[:, 0]
        yield KernelCheck(f"picks, {name}", float(behind.max()), EXACT, ("sample",))
    for what, two in FILTERED.items():
        for slot, asked in enumerate(two):
            table.take(slot, SamplingParams(temperature=0.8, seed=slot + 1, **asked), [1], [])
        step, logits = table.step(range(rows)), torch.randn(rows, vocab, device=device)
        other = namespace.sample(logits, batch, step) != sampling.sample(namespace, logits, batch, step)
        yield KernelCheck(f"picks, {what}", float(other.sum()), 0.0, ("sample",))
    table.take(1, SamplingParams(temperature=0.8, repetition=1.2, frequency=0.4, presence=0.3), [1, 9], [])
    table.take(2, SamplingParams(temperature=0.0, min_tokens=20, logit_bias={5: 2.0}), [1], [7])
    table.count(1, [9, 11, 11])
    step = table.step(range(rows))
    other = namespace.process_logits(logits, batch, step)
    other = other != sampling.process_logits(namespace, logits, batch, step)
    yield KernelCheck("picks, penalties", float(other.sum()), 0.0, ("process_logits",))
    words = torch.randint(-(1 << 31), 1 << 31, (rows, -(-vocab // 32)), dtype=torch.int32, device=device)
    masked = evolve(batch, mask=words)
    other = namespace.process_logits(logits, masked, step)
    other = other != sampling.process_logits(namespace, logits, masked, step)
    yield KernelCheck("picks, masks", float(other.sum()), 0.0, ("process_logits",))
    one = torch.ones(rows, dtype=torch.int32, device=device)
    marks = torch.zeros(rows, vocab, dtype=torch.int32, device=device)
    noted = namespace.note_picks(got, one, batch.slot, table.newest, marks)
    marks[range(rows), got] -= EMITTED
    token, count = namespace.newest_tokens(one * AHEAD, batch.slot, table.newest)
    wrong = (noted != got) | (token != got) | (count != 1) | marks.any(1)
    yield KernelCheck("picks, noted and read", float(wrong.sum()), 0.0, ("newest_tokens", "note_picks"))


def _mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


__all__ = ["CUDA", "PORTABLE", "experts", "picking", "products", "routes", "sequences"]
