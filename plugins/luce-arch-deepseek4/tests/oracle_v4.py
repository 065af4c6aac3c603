"""DeepSeek V4 in float64, token by token, as `oracle_v41`; what both have in common is there."""

from __future__ import annotations

import numpy as np

from .oracle_v41 import Oracle, sigmoid

SELECTED = 4
"""The ratio of layers whose entries overlap and are picked by an indexer."""


class OracleV4(Oracle):
    def run(self, ids, images=()):
        """logits f64[T, V]. images: as in `Oracle.run`; `ids` has some token's id in their place."""
        images, self.ids = dict(images), ids
        streams, table = self.keys["hyper_connection.count"], self.tensors["token_embd.weight"]
        rows = [images.get(t, table[token]) for t, token in enumerate(ids)]
        state = [np.stack([row] * streams) for row in rows]
        for layer in range(self.keys["block_count"]):
            self.blk = f"blk.{layer}."
            self.layer, self.ratio = layer, self.keys["attention.compress_ratios"][layer]
            for name, sublayer in (("attn", self.attention), ("ffn", self.experts)):
                mixes = [self.mix(name, h) for h in state]
                norm = self.tensor(f"{name}_norm")
                x = [self.rms(pre @ h, norm) for (pre, _, _), h in zip(mixes, state, strict=True)]
                state = [
                    np.outer(post, out) + between.T @ h
                    for (_, post, between), out, h in zip(mixes, sublayer(x, images), state, strict=True)
                ]
        return np.stack([self.head(h) for h in state])

    def head(self, h):
        fn, base, scale = (self.tensors[f"output_hc_{part}.weight"] for part in ("fn", "base", "scale"))
        pre = sigmoid(fn @ self.rms(h.reshape(-1)) * scale + base) + self.keys["hyper_connection.epsilon"]
        norm = self.tensors["output_norm.weight"]
        return self.tensors["output.weight"] @ self.rms(pre @ h, norm)

    def attention(self, rows, images):
        keys, heads, dim = self.keys, self.keys["attention.head_count"], self.keys["attention.key_length"]
        low = [self.rms(self.tensor("attn_q_a") @ x, self.tensor("attn_q_a_norm")) for x in rows]
        near = [
            self.rope(self.rms(self.tensor("attn_kv") @ x, self.tensor("attn_kv_a_norm")), t)
            for t, x in enumerate(rows)
        ]
        entries = self.pooled("attn_compressor", rows) if self.ratio else []
        if self.ratio == SELECTED:
            self.stream = {"keys": self.pooled("indexer_compressor", rows)}
        out = []
        for t, x in enumerate(rows):
            q = (self.tensor("attn_q_b") @ low[t]).reshape(heads, dim)
            q = self.rope(np.stack([self.rms(head) for head in q]), t)
            seen = near[max(0, t - keys["attention.sliding_window"] + 1) : t + 1]
            if self.ratio == SELECTED:
                seen = seen + [entries[w] for w in self.select(t, x, low[t])]
            elif self.ratio:
                seen = seen + entries[: (t + 1) // self.ratio]
            y = np.stack([self.attend(q[h], seen, self.tensor("attn_sinks")[h]) for h in range(heads)])
            out.append(self.output(self.rope(y, t, inverse=True)))
        return out

    def pooled(self, name, rows):
        """One entry per `ratio` rows; those of a picked layer reach back over the rows of the one before."""
        ratio, ape = self.ratio, self.tensor(f"{name}_ape")
        kv = [self.tensor(f"{name}_kv") @ x for x in rows]
        gate = [self.tensor(f"{name}_gate") @ x + ape[t % ratio] for t, x in enumerate(rows)]
        entries = []
        for first in range(0, len(rows) - ratio + 1, ratio):
            own, before = range(first, first + ratio), range(max(0, first - ratio), first)
            values, gates = [kv[t] for t in own], [gate[t] for t in own]
            if ratio == SELECTED:
                half = len(kv[0]) // 2
                values = [kv[t][:half] for t in before] + [row[half:] for row in values]
                gates = [gate[t][:half] for t in before] + [row[half:] for row in gates]
            share = np.exp(np.stack(gates) - np.stack(gates).max(0))
            pooled = (share / share.sum(0) * np.stack(values)).sum(0)
            entries.append(self.rope(self.rms(pooled, self.tensor(f"{name}_norm")), first))
        return entries

    def choose(self, scores, t, image):
        by_id = self.layer < self.keys["hash_layer_count"]
        if by_id and not (image and f"{self.blk}exp_probs_b_vl.bias" in self.tensors):
            return [int(expert) for expert in self.tensor("ffn_gate_tid2eid")[self.ids[t]]]
        return super().choose(scores, t, image)
