"""Keys and shapes of any Qwen3."""

from __future__ import annotations


def metadata(
    arch: str, *, layers: int, width: int, heads: int, kv_heads: int, ffn: int, dim: int = 128, **more: object
) -> dict[str, object]:
    """more: further keys, without the architecture; or another value of one."""
    keys = {
        "block_count": layers,
        "context_length": 40960,
        "embedding_length": width,
        "feed_forward_length": ffn,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        **more,
    }
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}


def shapes_of(keys: dict[str, object], vocab: int, *, tied: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a file, as the table of the converters' names has them. Torch order."""
    arch = keys["general.architecture"]
    found = {key.removeprefix(f"{arch}."): value for key, value in keys.items()}
    width, ffn, dim = found["embedding_length"], found["feed_forward_length"], found["attention.key_length"]
    queries, keys_width = found["attention.head_count"] * dim, found["attention.head_count_kv"] * dim
    layer = {
        "attn_norm": (width,),
        "attn_q": (queries, width),
        "attn_k": (keys_width, width),
        "attn_v": (keys_width, width),
        "attn_q_norm": (dim,),
        "attn_k_norm": (dim,),
        "attn_output": (width, queries),
        "ffn_norm": (width,),
    }
    if experts := found.get("expert_count", 0):
        size = found["expert_feed_forward_length"]
        layer |= {
            "ffn_gate_inp": (experts, width),
            "ffn_gate_exps": (experts, size, width),
            "ffn_up_exps": (experts, size, width),
            "ffn_down_exps": (experts, width, size),
        }
    else:
        layer |= {"ffn_gate": (ffn, width), "ffn_up": (ffn, width), "ffn_down": (width, ffn)}
    shapes = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    if not tied:
        shapes["output.weight"] = (vocab, width)
    for number in range(found["block_count"]):
        shapes |= {f"blk.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
