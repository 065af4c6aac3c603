"""Ops that leave rows ready for the next one, on a device: that these are right, and are left where they are
to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from luce_backend_triton import attention, bounds, delta, delta_trees, gated, normed, ops, product
from luce_backend_triton.selfcheck_given import BLOCK, ROUNDED, delta_state, error_of, matrix
from luce_backend_triton.selfcheck_given import normed as exactly
from luce_core.contracts import AttentionSpec, KernelCheck, Linear, LinearGroup, Norm, Region, SeqTable
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import build_ops

MIXED = (3, 16, 24, 32)
"""Rows of one sequence between two products."""
LONG = 640
"""Places of a text that attention splits."""
HIDDEN, INNER = 512, 768
"""Columns of the residual stream and within a gated MLP."""
WEIGHTS = ("pack_linear", "pack_group", "linear", "norm_linear", "linear_out", "gated_mlp")
NOT_LEFT = float("inf")
"""The error where rows were to be left ready and were not."""


def chains(layer: ops.Layer, device: str) -> Iterator[KernelCheck]:
    """All of them."""
    yield from mixers(layer, device)
    yield from mlps(layer, device)


def mixers(layer: ops.Layer, device: str) -> Iterator[KernelCheck]:
    """DeltaNet, and attention over a long text, between a normed group and the product behind, by the layer;
    and by the reference between float64's products. On a card's tensor cores that product is to find its x
    made ready; and the normed group behind it norm(y).
    """
    mine = {"attention": attention.attention, "delta": delta.Delta(layer.cuda).delta}
    namespace = build_ops({name: getattr(layer, name) for name in WEIGHTS} | mine)
    norm = Norm(0.05 * torch.rand(256, device=device) + 0.05, 1e-6)  # so that gates are of ordinary size
    pairs = [_plain(namespace, "Q4_K", *shape, device, 5) for shape in ((256, 256), (64, 256), (256, 256))]
    (z, its), (v, theirs), (out, behind) = pairs
    group = LinearGroup((z, v), namespace.pack_group((z, v)))
    after = _Behind(namespace, out, device)
    ready = layer.cuda and bounds.MADE and gated.useful(out.packed)
    trees = max(delta_trees.sizes(torch.device(device)), default=0) if ready else 0
    kinds = (
        ("attention", _attention_of, "attention", MIXED[-1] if ready else 0),
        ("Gated DeltaNet", _delta_of, "delta", trees),
    )
    for name, run, op, most in kinds:
        for count in MIXED:
            x = torch.randn(count, 256, device=device)
            exact = exactly(x, norm)
            given = (exact @ its.T).float(), (exact @ theirs.T).float()
            y = run(namespace, device, *namespace.norm_linear(x, norm, group))
            want = run(build_ops(), device, *given).double() @ behind.T
            found = count > most or bounds.ready_for(y, out.packed) is not None
            error = error_of(namespace.linear_out(y, out), want)
            what = f"{name} between products, {count} rows of x"
            yield KernelCheck(what, error if found else NOT_LEFT, ROUNDED, (op,))
            h = namespace.linear_out(y, out, x, following=after.told(after.norm))
            error = after.error(h, x.double() + y.double() @ behind.T, layer.cuda and count <= most)
            what = f"norm of what a product behind {name} gives, {count} rows of x"
            yield KernelCheck(what, error, ROUNDED, ("linear_out",))


def mlps(layer: ops.Layer, device: str) -> Iterator[KernelCheck]:
    """Two gated MLPs, one behind the other, and a normed group behind them, beside float64; likewise."""
    namespace = build_ops({name: getattr(layer, name) for name in WEIGHTS})
    norm = Norm(torch.rand(HIDDEN, device=device) + 0.5, 1e-6)
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    pairs = [_plain(namespace, "Q4_K", *shape, device, seed) for seed, shape in enumerate(shapes)]
    (gate, g), (up, u), (down, d) = pairs
    group = LinearGroup((gate, up), namespace.pack_group((gate, up)))
    after = _Behind(namespace, down, device)

    def exact(y: Tensor) -> Tensor:
        n = exactly(y, norm)
        return y + (torch.nn.functional.silu(n @ g.T) * (n @ u.T)) @ d.T

    for count in MIXED:
        x = torch.randn(count, HIDDEN, device=device)
        given = layer.cuda and gated.MADE and _in_pairs(group, count)
        h = namespace.gated_mlp(x, norm, group, down, x, following=after.told(norm))
        found = after.found(h, norm, group, given)
        y = namespace.gated_mlp(h, norm, group, down, h, following=after.told(after.norm))
        error = after.error(y, exact(exact(x.double())), given) if found else NOT_LEFT
        what = f"norm of what a gated MLP gives, {count} rows of x"
        yield KernelCheck(what, error, ROUNDED, ("gated_mlp",))


def _in_pairs(group: LinearGroup, count: int) -> bool:
    """Whether the product with gate and up leaves what it gives ready, where rows are so many."""
    found = product.few_of(group.packed.parts[0].matrix, count, True)
    return found is not None and found[0].kind == "mma" and found[0].tiles == gated.TILES


class _Behind:
    """A norm of what the product with `w` adds to the residual stream, and the group that reads it."""

    def __init__(self, namespace: Any, w: Linear, device: str) -> None:
        width = w.out_features
        pairs = [_plain(namespace, name, 176, width, device, 7) for name in ("Q6_K", "Q4_K")]
        members, self._exact = zip(*pairs, strict=True)
        self._ops, self._group = namespace, LinearGroup(members, namespace.pack_group(members))
        self.norm = Norm(torch.rand(width, device=device) + 0.5, 1e-6)
        self._matrix, self._useful = w.packed, gated.useful(w.packed)

    def told(self, norm: Norm) -> normed.Next | None:
        """What a rewritten program tells the op that gives y, where `norm` follows."""
        return normed.Next.of(norm, product.magnitudes(self._matrix)) if self._useful else None

    def found(self, y: Tensor, norm: Norm, group: LinearGroup, given: bool) -> bool:
        """Whether norm(y) was left for this group, if it was to be. given: the product with `w` had what
        that takes.
        """
        if not given or not normed.MADE or not self._useful:
            return True
        cut = product.few_of(self._matrix, len(y), True)
        if cut is None or (cut[0].kind, cut[0].tiles, cut[0].warps) != ("mma", gated.TILES, normed.WARPS):
            return True
        packed = [part.matrix for part in group.packed.parts]
        return normed.rows_of(y, norm, packed).divide is not None

    def error(self, y: Tensor, want: Tensor, given: bool) -> float:
        """The worst of what the group gives of norm(y)."""
        if not self.found(y, self.norm, self._group, given):
            return NOT_LEFT
        got, n = self._ops.norm_linear(y, self.norm, self._group), exactly(want, self.norm)
        return max(error_of(one, n @ exact.T) for one, exact in zip(got, self._exact, strict=True))


def _plain(namespace: Any, name: str, out: int, width: int, device: str, seed: int) -> tuple[Linear, Tensor]:
    """Without bias."""
    w, exact = matrix(namespace, name, out, width, device, seed)
    return evolve(w, bias=None), exact


def _attention_of(namespace: Any, device: str, z: Tensor, v: Tensor) -> Tensor:
    """[T, 256], gated by z."""
    rng = torch.Generator().manual_seed(1)
    count, blocks = z.shape[0], -(-(LONG + z.shape[0]) // BLOCK)
    shape = (blocks, BLOCK, 1, 64)
    fields = {name: torch.randn(shape, generator=rng).to(device, torch.float16) for name in ("k", "v")}
    table = {"full": SeqTable(tuple(range(blocks)), tuple(range(0, BLOCK * blocks, BLOCK)))}
    batch = make_batch("held", [RowSet(0, LONG, [1] * count, table)], device=device)
    q, k = (torch.randn(count, width, generator=rng).to(device) for width in (256, 64))
    spec = AttentionSpec(0, 4, 1, 64, 64, 64**-0.5, None, gate="sigmoid")
    y: Tensor = namespace.attention(batch, q, k, v, Region("pages", "full", fields, BLOCK), spec, gate=z)
    return y


def _delta_of(namespace: Any, device: str, z: Tensor, v: Tensor) -> Tensor:
    """[T, 256], gated by z."""
    rng, count = torch.Generator().manual_seed(2), z.shape[0]
    conv, memory, spec = delta_state(rng, device, count)
    batch = make_batch("held", [RowSet(1, 9, [1] * count, {})], device=device)
    qkv, beta, decay = (torch.randn(count, width, generator=rng).to(device) for width in (512, 2, 2))
    y: Tensor = namespace.delta(batch, qkv, z, beta, decay, conv, memory, spec)
    return y


__all__ = ["chains", "mixers", "mlps"]
