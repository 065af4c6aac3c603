"""Where sequence ops are tried: pages with shuffled blocks, states with windows, and batches over them."""

from __future__ import annotations

import torch
from attrs import evolve

from luce_core.contracts import (
    CODECS,
    AttentionSpec,
    CodedField,
    DeltaSpec,
    Norm,
    Region,
    RopeSpec,
    SeqTable,
    SlotState,
)
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops.codecs import encode

BLOCK, DIM = 8, 16
KH, VH, DK, DV, KERNEL = 2, 4, 16, 12, 4
CHANNELS = 2 * KH * DK + VH * DV
SLOTS, HELD = 4, 8


class Pages:
    """Pages, and batches of sequences whose blocks are shuffled."""

    def __init__(
        self, device, dtype=torch.float32, kv_heads=2, dim=DIM, value_dim=DIM, blocks=40, v_dtype=None
    ):
        self.device = device
        self.rng = torch.Generator().manual_seed(3)
        self.free = torch.randperm(blocks, generator=self.rng).tolist()
        shapes = {"k": (kv_heads, dim), "v": (kv_heads, value_dim)}
        fields = {name: self.rand(blocks, BLOCK, *shape).to(dtype) for name, shape in shapes.items()}
        fields["v"] = fields["v"].to(v_dtype or dtype)
        self.region = Region("r", "full", fields, BLOCK)

    def rand(self, *shape):
        return torch.randn(*shape, generator=self.rng).to(self.device)

    def table(self, tokens, gone=()):
        """Blocks for so many tokens, those numbered `gone` evicted."""
        kept = [n for n in range(-(-tokens // BLOCK)) if n not in gone]
        return {"full": SeqTable(tuple(self.free.pop() for _ in kept), tuple(n * BLOCK for n in kept))}

    def rows(self, slot, length, count, gone=(), **more):
        return RowSet(slot, length, [1] * count, self.table(length + count, gone), **more)

    def batch(self, phase, *rows):
        return make_batch(phase, list(rows), device=str(self.device))


class CodedPages(Pages):
    """Pages of codes, "" = numbers: of what an earlier sequence left."""

    def __init__(self, device, k_type, v_type, dtype=torch.float16, **sizes):
        super().__init__(device, dtype, **sizes)
        fields, codecs = self.region.fields, {}
        for name, kind in (("k", k_type), ("v", v_type)):
            if kind:
                codecs[name] = CodedField(CODECS[kind], fields[name].shape[-1])
                fields[name] = encode(codecs[name], fields[name])
        self.region = evolve(self.region, codecs=codecs)


def padded(b, count):
    """With rows that stand for nothing."""
    sizes = {"token": 1, "index": 1, "seq": 0, "parent": -1}
    rows = {name: torch.nn.functional.pad(getattr(b, name), (0, count), value=x) for name, x in sizes.items()}
    position = torch.nn.functional.pad(b.position, (0, count), value=7)
    sees = torch.nn.functional.pad(b.sees, (0, 0, 0, count))
    return evolve(b, **rows, position=position, sees=sees, padded=True)


def spec(heads=4, kv_heads=2, dim=DIM, value_dim=DIM, **more):
    rope = RopeSpec(torch.logspace(0, -2, dim // 4))
    return evolve(AttentionSpec(0, heads, kv_heads, dim, value_dim, dim**-0.5, rope), **more)


def moved(s, device):
    """The same on the device."""
    rope = s.rope and evolve(s.rope, inv_freq=s.rope.inv_freq.to(device))
    return evolve(s, rope=rope, sinks=None if s.sinks is None else s.sinks.to(device))


class States:
    """States and windows of a linear attention, and batches over them."""

    def __init__(self, device, kda=False, held=HELD):
        self.device, self.kda, self.held = device, kda, held
        self.rng = torch.Generator().manual_seed(5)
        g = (VH, DK) if kda else (VH,)
        self.conv = self.slot((KERNEL - 1, CHANNELS), "shift", row=(CHANNELS,))
        self.memory = self.slot((VH, DK, DV), "delta_fold", k=(KH, DK), u=(VH, DV), g=g)
        a = self.rand(VH).abs()
        self.spec = DeltaSpec(
            0, KH, VH, DK, DV, Norm(1 + 0.2 * self.rand(DV), 1e-6), self.rand(CHANNELS, KERNEL),
            a if kda else -a, self.rand(VH * DK if kda else VH), "kda" if kda else "gated",
        )  # fmt: skip

    def rand(self, *shape):
        return torch.randn(*shape, generator=self.rng).to(self.device)

    def slot(self, shape, fold, **log):
        rows = {name: self.rand(SLOTS, self.held, *one) for name, one in log.items()}
        return SlotState("slot", self.rand(SLOTS, *shape), rows, fold)

    def batch(self, phase, *rows):
        return make_batch(
            phase, [RowSet(*row[:2], [1] * row[2], {}, **row[3]) for row in rows], device=str(self.device)
        )

    def copy(self, slot):
        return evolve(slot, state=slot.state.clone(), log={name: t.clone() for name, t in slot.log.items()})
