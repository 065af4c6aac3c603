"""Headers without weights: keys and shapes of any Gemma, and a file that says them and holds nothing."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from luce_core.gguf import FORMATS
from luce_core.testing import gguf_raw as raw

Shapes = Mapping[str, tuple[int, ...]]


def gemma4_metadata(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: tuple[int, int],
    dims: tuple[int, int],
    ffn: int | Sequence[int],
    pattern: Sequence[bool],
    **more: object,
) -> dict[str, object]:
    """kv_heads and dims: of local and of global layers."""
    return {
        "general.architecture": "gemma4",
        "gemma4.block_count": layers,
        "gemma4.context_length": 262144,
        "gemma4.embedding_length": width,
        "gemma4.feed_forward_length": ffn,
        "gemma4.attention.head_count": heads,
        "gemma4.attention.head_count_kv": [kv_heads[0] if local else kv_heads[1] for local in pattern],
        "gemma4.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma4.attention.key_length": dims[1],
        "gemma4.attention.value_length": dims[1],
        "gemma4.attention.key_length_swa": dims[0],
        "gemma4.attention.value_length_swa": dims[0],
        "gemma4.attention.sliding_window": 1024,
        "gemma4.attention.sliding_window_pattern": list(pattern),
        "gemma4.attention.shared_kv_layers": 0,
        "gemma4.embedding_length_per_layer_input": 0,
        "gemma4.final_logit_softcapping": 30.0,
        "gemma4.rope.freq_base": 1e6,
        "gemma4.rope.freq_base_swa": 1e4,
        "gemma4.rope.dimension_count": dims[1],
        "gemma4.rope.dimension_count_swa": dims[0],
        **more,
    }


def gemma3_metadata(*, layers: int, width: int, heads: int, kv_heads: int, dim: int, ffn: int, window: int):
    return {
        "general.architecture": "gemma3",
        "gemma3.block_count": layers,
        "gemma3.context_length": 32768,
        "gemma3.embedding_length": width,
        "gemma3.feed_forward_length": ffn,
        "gemma3.attention.head_count": heads,
        "gemma3.attention.head_count_kv": kv_heads,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.attention.key_length": dim,
        "gemma3.attention.value_length": dim,
        "gemma3.attention.sliding_window": window,
        "gemma3.rope.freq_base": 1e6,
    }


def shapes_of(metadata: Mapping[str, object], vocab: int, *, k_eq_v: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a file, as the table of the converters' names has them. Torch order."""
    arch = str(metadata["general.architecture"])
    found = {
        key.removeprefix(f"{arch}."): value
        for key, value in metadata.items()
        if not key.startswith("general")
    }
    layers, width, heads = found["block_count"], found["embedding_length"], found["attention.head_count"]
    pattern = found.get("attention.sliding_window_pattern", [True] * layers)
    inputs = found.get("embedding_length_per_layer_input", 0)
    first_shared = layers - found.get("attention.shared_kv_layers", 0)
    shapes = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    if arch == "gemma4":
        shapes["rope_freqs.weight"] = (found["attention.key_length"] // 2,)
    if inputs:
        shapes |= {
            "per_layer_token_embd.weight": (vocab, inputs * layers),
            "per_layer_model_proj.weight": (inputs * layers, width),
            "per_layer_proj_norm.weight": (inputs,),
        }
    for layer in range(layers):
        local, ffn, kv = pattern[layer], found["feed_forward_length"], found["attention.head_count_kv"]
        dim = found[f"attention.key_length{'_swa' if local and arch == 'gemma4' else ''}"]
        keys = (kv if isinstance(kv, int) else kv[layer]) * dim
        ffn = ffn if isinstance(ffn, int) else ffn[layer]
        own = {
            "attn_norm.weight": (width,),
            "attn_q.weight": (heads * dim, width),
            "attn_q_norm.weight": (dim,),
            "attn_output.weight": (width, heads * dim),
            "post_attention_norm.weight": (width,),
            "ffn_norm.weight": (width,),
            "ffn_gate.weight": (ffn, width),
            "ffn_up.weight": (ffn, width),
            "ffn_down.weight": (width, ffn),
            "post_ffw_norm.weight": (width,),
        }
        if layer < first_shared:
            own |= {"attn_k.weight": (keys, width), "attn_k_norm.weight": (dim,)}
            if local or not k_eq_v:
                own["attn_v.weight"] = (keys, width)
        if arch == "gemma4":
            own["layer_output_scale.weight"] = (1,)
        if inputs:
            own |= {"inp_gate.weight": (inputs, width), "proj.weight": (width, inputs)}
            own["post_norm.weight"] = (width,)
        if experts := found.get("expert_count", 0):
            own |= _mixture_shapes(width, experts, found["expert_feed_forward_length"])
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def _mixture_shapes(width: int, experts: int, ffn: int) -> Shapes:
    return {
        "ffn_gate_inp.weight": (experts, width),
        "ffn_gate_inp.scale": (width,),
        "ffn_gate_up_exps.weight": (experts, 2 * ffn, width),
        "ffn_down_exps.weight": (experts, width, ffn),
        "ffn_down_exps.scale": (experts,),
        "pre_ffw_norm_2.weight": (width,),
        "post_ffw_norm_1.weight": (width,),
        "post_ffw_norm_2.weight": (width,),
    }


def format_of(name: str, shape: tuple[int, ...]) -> str:
    """Roughly what a Q4_K_M file stores each tensor as."""
    if len(shape) < 2 or name.endswith((".scale", "ffn_gate_inp.weight")):
        return "F32"
    if name == "per_layer_model_proj.weight":
        return "BF16"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "Q6_K" if shape[-1] % 256 == 0 else "Q8_0"
    return "Q4_K" if shape[-1] % 256 == 0 else "Q5_0"


def write_header(path: Path, metadata: Mapping[str, object], shapes: Shapes) -> Path:
    """A file that says all of this and holds no weights: its end is a hole in the disk."""
    lines, at = [], 0
    for name, shape in shapes.items():
        block = FORMATS.by_name(format_of(name, shape))
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
    if isinstance(value, bool):
        return raw.pair(key.encode(), raw.BOOL, struct.pack("<?", value))
    if isinstance(value, int):
        return raw.pair(key.encode(), raw.U32, struct.pack("<I", value))
    if isinstance(value, float):
        return raw.pair(key.encode(), raw.F32, struct.pack("<f", value))
    assert isinstance(value, list), key
    if isinstance(value[0], bool):
        packed = raw.array(raw.BOOL, len(value), struct.pack(f"<{len(value)}?", *value))
    elif isinstance(value[0], str):
        packed = raw.array(raw.STRING, len(value), b"".join(raw.string(item.encode()) for item in value))
    else:
        packed = raw.array(raw.I32, len(value), struct.pack(f"<{len(value)}i", *value))
    return raw.pair(key.encode(), raw.ARRAY, packed)
