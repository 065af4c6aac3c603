"""The forward a second time, from the formulas of the papers, in float64, token by token. Uses none of the
core: files are read by the gguf package. Value heads are read as converters store them: head h of key head
h mod (key heads).
"""

from __future__ import annotations

import gguf
import torch
import torch.nn.functional as F


def rms(x, weight, eps):
    return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


class Reference:
    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.weights = {
            tensor.name.removesuffix(".weight"): torch.from_numpy(
                gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()
            ).double()
            for tensor in reader.tensors
        }
        self.arch = reader.fields["general.architecture"].contents()
        self.keys = {
            name.removeprefix(f"{self.arch}."): field.contents() for name, field in reader.fields.items()
        }
        self.eps = self.keys["attention.layer_norm_rms_epsilon"]
        self.num_layers = self.keys["block_count"] - self.keys.get("nextn_predict_layers", 0)

    def weight(self, *names):
        return next(self.weights[name] for name in names if name in self.weights)

    def final(self, ids):
        """The residual behind the last layer of the trunk, [T, E]."""
        x = self.weight("token_embd")[ids]
        for layer in range(self.num_layers):
            x = self.block(f"blk.{layer}.", x)
        return x

    def normed(self, final):
        return rms(final, self.weight("output_norm"), self.eps)

    def logits(self, ids):
        return self.normed(self.final(ids)) @ self.weight("output", "token_embd").T

    def block(self, blk, x):
        mixer = self.delta if f"{blk}ssm_a" in self.weights else self.attention
        x = x + mixer(blk, rms(x, self.weight(f"{blk}attn_norm"), self.eps))
        n = rms(x, self.weight(f"{blk}post_attention_norm"), self.eps)
        return x + (self.experts if f"{blk}ffn_gate_inp" in self.weights else self.mlp)(blk, n)

    def mlp(self, blk, n, suffix=""):
        gate, up, down = (self.weight(f"{blk}ffn_{name}{suffix}") for name in ("gate", "up", "down"))
        return (F.silu(n @ gate.T) * (n @ up.T)) @ down.T

    def experts(self, blk, n):
        score = (n @ self.weight(f"{blk}ffn_gate_inp").T).softmax(-1)
        best, ids = score.topk(self.keys["expert_used_count"], -1)
        best = best / best.sum(-1, keepdim=True)
        gate, up, down = (self.weight(f"{blk}ffn_{name}_exps") for name in ("gate", "up", "down"))
        rows = []
        for t, row in enumerate(n):
            made = [(F.silu(gate[e] @ row) * (up[e] @ row)) for e in ids[t]]
            rows.append(sum(w * (down[e] @ h) for w, e, h in zip(best[t], ids[t], made, strict=True)))
        open_by = torch.sigmoid(n @ self.weight(f"{blk}ffn_gate_inp_shexp").reshape(-1, 1))
        return torch.stack(rows) + open_by * self.mlp(blk, n, "_shexp")

    def attention(self, blk, h):
        heads, kv_heads = self.keys["attention.head_count"], self.keys["attention.head_count_kv"]
        dim, count = self.keys["attention.key_length"], h.shape[0]
        both = (h @ self.weight(f"{blk}attn_q").T).view(count, heads, 2 * dim)
        q, gate = both[..., :dim], both[..., dim:]
        k = (h @ self.weight(f"{blk}attn_k").T).view(count, kv_heads, dim)
        v = (h @ self.weight(f"{blk}attn_v").T).view(count, kv_heads, dim)
        q = self.turned(rms(q, self.weight(f"{blk}attn_q_norm"), self.eps))
        k = self.turned(rms(k, self.weight(f"{blk}attn_k_norm"), self.eps))
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        score = torch.einsum("ihd,jhd->hij", q, k) * dim**-0.5
        score = score.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
        y = torch.einsum("hij,jhd->ihd", score.softmax(-1), v)
        return (y * gate.sigmoid()).reshape(count, -1) @ self.weight(f"{blk}attn_output").T

    def turned(self, x):
        turning = self.keys["rope.dimension_count"]
        half = turning // 2
        freq = self.keys["rope.freq_base"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = (torch.arange(x.shape[0], dtype=torch.float64)[:, None] * freq)[:, None]
        a, b, rest = x[..., :half], x[..., half:turning], x[..., turning:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1)

    def delta(self, blk, h):
        key_heads, value_heads = self.keys["ssm.group_count"], self.keys["ssm.time_step_rank"]
        key_dim, value_dim = self.keys["ssm.state_size"], self.keys["ssm.inner_size"] // value_heads
        count, kernel = h.shape[0], self.weight(f"{blk}ssm_conv1d")
        mixed = F.pad(h @ self.weight(f"{blk}attn_qkv").T, (0, 0, kernel.shape[1] - 1, 0))
        y = F.silu(sum(mixed[i : i + count] * kernel[:, i] for i in range(kernel.shape[1])))
        q, k, v = y.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], -1)
        q, k = (x.view(count, key_heads, key_dim) for x in (q, k))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        owner = torch.arange(value_heads) % key_heads
        q, k, v = q[:, owner] * key_dim**-0.5, k[:, owner], v.view(count, value_heads, value_dim)
        beta = (h @ self.weight(f"{blk}ssm_beta").T).sigmoid()
        step = h @ self.weight(f"{blk}ssm_alpha").T + self.weight(f"{blk}ssm_dt.bias")
        decay = (self.weight(f"{blk}ssm_a") * F.softplus(step)).exp()
        memory, out = torch.zeros(value_heads, key_dim, value_dim, dtype=torch.float64), []
        for t in range(count):
            memory = decay[t, :, None, None] * memory
            u = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", memory, k[t]))
            memory = memory + k[t, :, :, None] * u[:, None]
            out.append(torch.einsum("hkv,hk->hv", memory, q[t]))
        z = (h @ self.weight(f"{blk}attn_gate").T).view(count, value_heads, value_dim)
        y = rms(torch.stack(out), self.weight(f"{blk}ssm_norm"), self.eps) * F.silu(z)
        return y.reshape(count, -1) @ self.weight(f"{blk}ssm_out").T
