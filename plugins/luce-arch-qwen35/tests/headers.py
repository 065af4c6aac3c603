"""Headers without weights: keys and shapes of any size, and a file that says them and holds nothing."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

from luce_core.gguf import FORMATS
from luce_core.testing import gguf_raw as raw

Shapes = Mapping[str, tuple[int, ...]]


def metadata_of(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
    key_heads: int = 16,
    dim: int = 256,
    state: int = 128,
    ffn: int = 0,
    experts: tuple[int, int, int, int] | None = None,
    sections: tuple[int, ...] = (11, 11, 10, 0),
    turning: int = 64,
    nextn: int = 0,
    vocab: int = 248320,
) -> dict[str, object]:
    """experts: how many, how many for a token, their width, the shared one's. layers: of the trunk."""
    found: dict[str, object] = {
        "block_count": layers + nextn,
        "context_length": 262144,
        "embedding_length": width,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "full_attention_interval": 4,
        "rope.dimension_count": turning,
        "rope.dimension_sections": list(sections),
        "rope.freq_base": 1e7,
        "ssm.conv_kernel": 4,
        "ssm.state_size": state,
        "ssm.group_count": key_heads,
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": value_heads * state,
        "vocab_size": vocab,
    }
    if nextn:
        found["nextn_predict_layers"] = nextn
    if experts is None:
        found["feed_forward_length"] = ffn
    else:
        keys = ("count", "used_count", "feed_forward_length", "shared_feed_forward_length")
        found |= {f"expert_{key}": value for key, value in zip(keys, experts, strict=True)}
    arch = "qwen35" if experts is None else "qwen35moe"
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in found.items()}}


def shapes_of(metadata: Mapping[str, object], *, tied: bool = False) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a file, as the table of the converters' names has them. Torch order."""
    keys = {key.partition(".")[2]: value for key, value in metadata.items()}
    width, vocab, total = keys["embedding_length"], keys["vocab_size"], keys["block_count"]
    trunk = total - keys.get("nextn_predict_layers", 0)
    shapes = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    if not tied:
        shapes["output.weight"] = (vocab, width)
    for layer in range(total):
        own = {"attn_norm.weight": (width,), "post_attention_norm.weight": (width,)}
        if layer < trunk and (layer + 1) % keys["full_attention_interval"]:
            own |= _delta_shapes(keys, width)
        else:
            own |= _attention_shapes(keys, width)
        own |= _ffn_shapes(keys, width)
        if layer >= trunk:
            own |= {f"nextn.{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head_norm")}
            own["nextn.eh_proj.weight"] = (width, 2 * width)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def _delta_shapes(keys, width):
    values, inner = keys["ssm.time_step_rank"], keys["ssm.inner_size"]
    channels = 2 * keys["ssm.group_count"] * keys["ssm.state_size"] + inner
    return {
        "attn_qkv.weight": (channels, width),
        "attn_gate.weight": (inner, width),
        "ssm_beta.weight": (values, width),
        "ssm_alpha.weight": (values, width),
        "ssm_a": (values,),
        "ssm_dt.bias": (values,),
        "ssm_conv1d.weight": (channels, keys["ssm.conv_kernel"]),
        "ssm_norm.weight": (inner // values,),
        "ssm_out.weight": (width, inner),
    }


def _attention_shapes(keys, width):
    dim = keys["attention.key_length"]
    queries, rows = keys["attention.head_count"] * dim, keys["attention.head_count_kv"] * dim
    return {
        "attn_q.weight": (2 * queries, width),
        "attn_k.weight": (rows, width),
        "attn_v.weight": (rows, width),
        "attn_q_norm.weight": (dim,),
        "attn_k_norm.weight": (dim,),
        "attn_output.weight": (width, queries),
    }


def _ffn_shapes(keys, width):
    if "expert_count" not in keys:
        ffn = keys["feed_forward_length"]
        up = (ffn, width)
        return {"ffn_gate.weight": up, "ffn_up.weight": up, "ffn_down.weight": (width, ffn)}
    count, ffn, shared = (
        keys[f"expert_{key}"] for key in ("count", "feed_forward_length", "shared_feed_forward_length")
    )
    return {
        "ffn_gate_inp.weight": (count, width),
        "ffn_gate_exps.weight": (count, ffn, width),
        "ffn_up_exps.weight": (count, ffn, width),
        "ffn_down_exps.weight": (count, width, ffn),
        "ffn_gate_shexp.weight": (shared, width),
        "ffn_up_shexp.weight": (shared, width),
        "ffn_down_shexp.weight": (width, shared),
        "ffn_gate_inp_shexp.weight": (1, width),
    }


def format_of(name: str, shape: tuple[int, ...], blocks: int, tied: bool) -> str:
    """What a Q4_K_M file stores it as: the head, and values and down matrices of some layers, in Q6_K."""
    f32 = ("norm.weight", "ffn_gate_inp.weight", "inp_shexp.weight", "ssm_conv1d.weight")
    if len(shape) < 2 or name.endswith(f32) or shape[-1] % 32:
        return "F32"
    if shape[-1] % 256:
        return "Q5_0"
    if name == ("token_embd.weight" if tied else "output.weight"):
        return "Q6_K"
    part = name.split(".")
    if part[0] == "blk" and part[2].startswith(("attn_v", "attn_qkv", "ffn_down")):
        layer, eighth = int(part[1]), blocks // 8
        if layer < eighth or layer >= 7 * blocks // 8 or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return "Q4_K"


def write_header(path: Path, metadata: Mapping[str, object], shapes: Shapes) -> Path:
    """A file that says all of this and holds no weights: its end is a hole in the disk."""
    lines, at = [], 0
    blocks = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blk."))
    for name, shape in shapes.items():
        block = FORMATS.by_name(format_of(name, shape, blocks, "output.weight" not in shapes))
        lines.append(raw.tensor(name.encode(), shape[::-1], block.ggml_id, at))
        size = block.row_bytes(shape[-1])
        for count in shape[:-1]:
            size *= count
        at += -(-size // 32) * 32
    head = raw.model([_pair(key, value) for key, value in metadata.items()], lines, b"\0")
    path.write_bytes(head)
    with path.open("rb+") as file:
        file.truncate(len(head) - 1 + at)
    return path


def _pair(key: str, value: object) -> bytes:
    if isinstance(value, str):
        return raw.pair(key.encode(), raw.STRING, raw.string(value.encode()))
    if isinstance(value, int):
        return raw.pair(key.encode(), raw.U32, struct.pack("<I", value))
    if isinstance(value, float):
        return raw.pair(key.encode(), raw.F32, struct.pack("<f", value))
    assert isinstance(value, list), key
    if value and isinstance(value[0], bool):
        packed = raw.array(raw.BOOL, len(value), struct.pack(f"<{len(value)}?", *value))
    else:
        packed = raw.array(raw.I32, len(value), struct.pack(f"<{len(value)}i", *value))
    return raw.pair(key.encode(), raw.ARRAY, packed)
