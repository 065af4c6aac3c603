"""DeepSeek V4.1 in float64, token by token: the oracle. numpy alone; nothing of the core, slow and obvious.

A model is its keys (without the "deepseek41." in front) and its tensors as a GGUF file names them.
`Oracle.run` gives the logits of every token of a text, and `Oracle.margin` how close any choice it made
was.
"""

from __future__ import annotations

import math

import numpy as np

PAD_OF_PUBLISHED = 2
"""The token whose compressed id stands for "no token" in n-grams."""
PUBLISHED_IDS = 99092
"""Compressed ids of the published vocabulary."""


class Oracle:
    def __init__(self, keys, tensors):
        self.keys = keys
        self.tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        self.eps = keys["attention.layer_norm_rms_epsilon"]
        self.margin = math.inf

    def run(self, ids, images=()):
        """logits f64[T, V] of the text. images: indices of rows that are no text, {index: embedding}."""
        images = dict(images)
        streams = self.keys["hyper_connection.count"]
        table = self.tensors["token_embd.weight"]
        rows = [images.get(t, table[token]) for t, token in enumerate(ids)]
        state = [np.stack([row] * streams) for row in rows]  # H of every token, [N, D]
        pre = [np.eye(streams)[0] for _ in ids]  # nothing before the first sublayer: its first stream
        self.stream = self.chosen = self.blocks = None
        for layer in range(self.keys["block_count"]):
            self.blk = f"blk.{layer}."
            self.layer, self.ratio = layer, self.keys["attention.compress_ratios"][layer]
            if layer in self.keys.get("engram.layer_ids", ()):
                state = self.recall(state, ids, images)
            for name, sublayer in (("attn", self.attention), ("ffn", self.experts)):
                mixes = [self.mix(name, h) for h in state]
                x = [p @ h for p, h in zip(pre, state, strict=True)]  # collapsed by the sublayer before
                norm = self.tensor(f"{name}_norm")
                y = sublayer([self.rms(row, norm) for row in x], images)
                state = [
                    np.outer(post, out) + between.T @ h
                    for (_, post, between), out, h in zip(mixes, y, state, strict=True)
                ]
                pre = [own for own, _, _ in mixes]
        head = self.tensors.get("output.weight", table)
        norm = self.tensors["output_norm.weight"]
        return np.stack([head @ self.rms(p @ h, norm) for p, h in zip(pre, state, strict=True)])

    # --- small things

    def tensor(self, name):
        return self.tensors[f"{self.blk}{name}.weight"]

    def has(self, name):
        return f"{self.blk}{name}.weight" in self.tensors

    def rms(self, x, weight=1.0):
        return x / np.sqrt(np.mean(x * x) + self.eps) * weight

    def best(self, scores, count):
        """Indices of the `count` best, the lowest where scores are equal; remembers how close it was."""
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        if 0 < count < len(order):
            last, next_one = scores[order[count - 1]], scores[order[count]]
            finite = [abs(s) for s in scores if math.isfinite(s)]
            if math.isfinite(last) and last != next_one:
                self.margin = min(self.margin, (last - next_one) / max(finite))
        return order[:count]

    def rope(self, x, position, inverse=False):
        """Pairs (2i, 2i + 1) of the last `rope.dimension_count` features of x [..., d]."""
        keys = self.keys
        dim, count = x.shape[-1], keys["rope.dimension_count"]
        far = self.ratio != 0
        theta = keys["attention.compress_rope_freq_base"] if far else keys["rope.freq_base"]
        factor = keys.get("rope.scaling.factor", 1.0) if far else 1.0
        out = x.copy()
        for i in range(count // 2):
            frequency = theta ** (-2 * i / count)
            if factor != 1.0:
                frequency = self.yarn(i, frequency, theta, factor)
            angle = position * frequency * (-1 if inverse else 1)
            one, two = dim - count + 2 * i, dim - count + 2 * i + 1
            a, b = x[..., one], x[..., two]
            out[..., one] = a * math.cos(angle) - b * math.sin(angle)
            out[..., two] = a * math.sin(angle) + b * math.cos(angle)
        return out

    def yarn(self, i, frequency, theta, factor):
        count = self.keys["rope.dimension_count"]
        context = self.keys["rope.scaling.original_context_length"]

        def pair(turns):
            return count * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))

        low = max(math.floor(pair(self.keys.get("rope.scaling.yarn_beta_fast", 32.0))), 0)
        high = min(math.ceil(pair(self.keys.get("rope.scaling.yarn_beta_slow", 1.0))), count - 1)
        ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        return frequency * (1 - ramp) + frequency / factor * ramp

    # --- hyper-connections

    def mix(self, name, h):
        """(pre, post, between) a sublayer computes from the streams h [N, D] it is given."""
        n, eps = len(h), self.keys["hyper_connection.epsilon"]
        m = self.tensor(f"hc_{name}_fn") @ self.rms(h.reshape(-1))
        base, scale = self.tensor(f"hc_{name}_base"), self.tensor(f"hc_{name}_scale")
        pre = sigmoid(m[:n] * scale[0] + base[:n]) + eps
        post = 2 * sigmoid(m[n : 2 * n] * scale[1] + base[n : 2 * n])
        logits = (m[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
        between = np.exp(logits - logits.max(1, keepdims=True))
        between = between / between.sum(1, keepdims=True) + eps
        between = between / (between.sum(0, keepdims=True) + eps)
        for _ in range(self.keys["hyper_connection.sinkhorn_iterations"] - 1):
            between = between / (between.sum(1, keepdims=True) + eps)
            between = between / (between.sum(0, keepdims=True) + eps)
        return pre, post, between

    # --- attention

    def attention(self, rows, images):
        keys, heads, dim = self.keys, self.keys["attention.head_count"], self.keys["attention.key_length"]
        low = [self.rms(self.tensor("attn_q_a") @ x, self.tensor("attn_q_a_norm")) for x in rows]
        near = [
            self.rope(self.rms(self.tensor("attn_kv") @ x, self.tensor("attn_kv_a_norm")), t)
            for t, x in enumerate(rows)
        ]
        if self.ratio:
            if self.has("attn_compressor_kv"):
                self.stream = self.compress(rows)
            if self.has("indexer.attn_q_b"):
                self.chosen = [self.select(t, x, qr) for t, (x, qr) in enumerate(zip(rows, low, strict=True))]
        out = []
        for t in range(len(rows)):
            q = self.rope((self.tensor("attn_q_b") @ low[t]).reshape(heads, dim), t)  # no norm of heads
            seen = near[max(0, t - keys["attention.sliding_window"] + 1) : t + 1]
            if self.ratio:
                seen = seen + [self.stream["entries"][w] for w in self.chosen[t]]
            y = np.stack([self.attend(q[h], seen, self.tensor("attn_sinks")[h]) for h in range(heads)])
            out.append(self.output(self.rope(y, t, inverse=True)))
        return out

    def attend(self, q, seen, sink):
        scores = np.array([q @ key / math.sqrt(len(q)) for key in seen])
        highest = max(scores.max(), sink)
        weights = np.exp(scores - highest)
        total = weights.sum() + math.exp(sink - highest)
        return sum(w / total * key for w, key in zip(weights, seen, strict=True))

    def output(self, y):
        groups = self.keys["attention.output_group_count"]
        first = self.tensor("attn_output_a").reshape(groups, -1, y.size // groups)
        low = [matrix @ part for matrix, part in zip(first, y.reshape(groups, -1), strict=True)]
        return self.tensor("attn_output_b") @ np.concatenate(low)

    def compress(self, rows):
        """One entry per `ratio` tokens: what later layers attend to, and the keys they are found by."""
        ratio, norm = self.ratio, self.tensor("attn_compressor_norm")
        entries, keys = [], []
        for w in range(len(rows) // ratio):
            group = rows[w * ratio : (w + 1) * ratio]
            latent = [self.tensor("attn_compressor_kv") @ x for x in group]
            if ratio == 1:
                pooled = latent[0]
            else:
                gate = np.stack([self.tensor("attn_compressor_gate") @ x for x in group])
                share = np.exp(gate - gate.max(0))
                pooled = (share / share.sum(0) * np.stack(latent)).sum(0)
            latent = self.rms(pooled, norm)
            key = self.rms(self.tensor("indexer.attn_k") @ latent, self.tensor("indexer.k_norm"))
            entries.append(self.rope(latent, w * ratio))
            keys.append(self.rope(key, w * ratio))
        return {"entries": entries, "keys": keys, "layer": self.layer}

    def select(self, t, x, low):
        """Numbers of the entries token t attends to."""
        keys = self.keys
        heads, dim = keys["attention.indexer.head_count"], keys["attention.indexer.key_length"]
        q = self.rope((self.tensor("indexer.attn_q_b") @ low).reshape(heads, dim), t)
        weight = self.tensor("indexer.proj") @ x / math.sqrt(heads) / math.sqrt(dim)
        visible = (t + 1) // self.ratio
        scores = [float(weight @ np.maximum(q @ self.stream["keys"][w], 0.0)) for w in range(visible)]
        source = keys.get("attention.indexer.candidate_source_layer", -1)
        size = keys.get("attention.indexer.candidate_block_size", 8)
        if self.layer == source:
            if t == 0:
                self.blocks = {}
            self.blocks[t] = self.candidates(scores, size, keys["attention.indexer.candidate_top_k"])
        elif 0 <= source < self.layer:
            scores = [s if w // size in self.blocks[t] else -math.inf for w, s in enumerate(scores)]
        best = self.best(scores, min(keys["attention.indexer.top_k"], visible))
        return sorted(w for w in best if scores[w] > -math.inf)

    def candidates(self, scores, size, count):
        """Blocks of `size` entries that later indexers may look into; the newest is always one."""
        blocks = [max(scores[at : at + size]) for at in range(0, len(scores), size)]
        if blocks:
            blocks[-1] = math.inf
        return set(self.best(blocks, min(count, len(blocks))))

    # --- experts

    def experts(self, rows, images):
        return [self.mixture(x, t, t in images) for t, x in enumerate(rows)]

    def choose(self, scores, t, image):
        own = image and f"{self.blk}exp_probs_b_vl.bias" in self.tensors
        bias = self.tensors[f"{self.blk}exp_probs_b{'_vl' if own else ''}.bias"]
        return self.best(list(scores + bias), self.keys["expert_used_count"])

    def mixture(self, x, t, image):
        scores = np.sqrt(np.log1p(np.exp(self.tensor("ffn_gate_inp") @ x)))
        chosen = self.choose(scores, t, image)
        total = sum(scores[e] for e in chosen) + 1e-20
        limit = self.keys["swiglu_clamp_exp"][self.layer]
        out = sum(
            scores[e] / total * self.keys["expert_weights_scale"] * self.mlp(x, "_exps", limit, e)
            for e in chosen
        )
        return out + self.mlp(x, "_shexp", self.keys.get("swiglu_clamp_shexp", [limit] * 99)[self.layer])

    def mlp(self, x, end, limit, expert=...):
        gate, up, down = (self.tensor(f"ffn_{part}{end}")[expert] for part in ("gate", "up", "down"))
        gate, up = gate @ x, up @ x
        if limit:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return down @ (gate * sigmoid(gate) * up)

    # --- engram

    def rows_of(self, ids, t, images):
        """Rows of this layer's table for the n-grams that end at token t; Python's integers, so exact."""
        keys = self.keys
        place = list(keys["engram.layer_ids"]).index(self.layer)
        size, heads = keys["engram.max_ngram_size"], keys["engram.head_count"]
        multipliers = [int(m) for m in keys["engram.multipliers"]][place * size :][:size]
        buckets = (size - 1) * heads
        primes = [int(p) for p in keys["engram.primes"]][place * buckets :][:buckets]
        offsets = [int(o) for o in keys["engram.offsets"]][place * buckets :][:buckets]
        compressed, over = [], False
        for back in range(size):
            over = over or t < back or (t - back) in images
            compressed.append(keys["engram.pad_id"] if over else int(keys["engram.token_map"][ids[t - back]]))
        rows, mixed = [], compressed[0] * multipliers[0]
        for j in range(1, size):
            mixed ^= compressed[j] * multipliers[j]
            for head in range(heads):
                bucket = (j - 1) * heads + head
                rows.append(mixed % primes[bucket] + offsets[bucket])
        return rows

    def recall(self, state, ids, images):
        out = []
        for t, h in enumerate(state):
            if t in images:
                out.append(h)
                continue
            n, width = h.shape
            found = self.tensor("engram_embd")[self.rows_of(ids, t, images)].reshape(-1)
            made = (self.tensor("engram_wkv") @ found).reshape(n + 1, width)
            value, new = made[n], h.copy()
            for i in range(n):
                weight = self.tensor("engram_q")[i] * self.tensor("engram_k")[i]
                alike = float((self.rms(h[i]) * weight * self.rms(made[i])).sum()) / math.sqrt(width)
                gate = sigmoid(math.copysign(math.sqrt(max(abs(alike), 1e-6)), alike))
                new[i] = h[i] + gate * value
            out.append(new)
        return out


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


# --- the constants a file may leave out


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def primes_above(start, count):
    """The first `count` primes that are greater than `start`."""
    found = []
    while len(found) < count:
        start += 1
        if is_prime(start):
            found.append(start)
    return found


def multipliers_of(layer, size, compressed_ids):
    bound = (2**63 - 1) // compressed_ids // 2
    return [int(2 * m + 1) for m in np.random.default_rng(10007 * layer).integers(0, bound, size)]
