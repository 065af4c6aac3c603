"""Published sizes of Gemma 3 and 4: what their files say and hold, without the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from luce_core.contracts import Geometry

VOCAB = 262144
RANGES = {"rope_freqs.weight": (1.0, 1.0), "*.layer_output_scale.weight": (0.9, 1.0)}
FORMATS = {"per_layer_model_proj.weight": "BF16", "*.ffn_gate_inp.scale": "F32"}

Shapes = dict[str, tuple[int, ...]]


def geometries() -> list[Geometry]:
    """The plugin's `geometries`. E models: as loaders of the published files print them."""
    g270 = gemma3_metadata(layers=18, width=640, heads=4, kv_heads=1, dim=256, ffn=2048, window=512)
    g1 = gemma3_metadata(layers=26, width=1152, heads=4, kv_heads=1, dim=256, ffn=6912, window=512)
    return [
        _geometry("gemma-3-270m", g270),
        _geometry("gemma-3-1b", g1),
        _geometry("gemma-4-e2b", _e_model(35, 1536, 1, [6144] * 15 + [12288] * 20, period=5, shared=20)),
        _geometry("gemma-4-e4b", _e_model(42, 2560, 2, [10240] * 42, period=6, shared=18)),
        _geometry("gemma-4-26b-a4b", _with_experts()),
        _geometry("gemma-4-31b", _dense()),
    ]


def _geometry(name: str, keys: Mapping[str, Any]) -> Geometry:
    arch = keys["general.architecture"]
    e_model = bool(keys.get(f"{arch}.attention.shared_kv_layers"))
    shapes = shapes_of(keys, VOCAB, k_eq_v=not e_model, own_kv=True)
    return Geometry(name, {**keys, f"{arch}.vocab_size": VOCAB}, shapes, formats=FORMATS, ranges=RANGES)


def _dense() -> dict[str, Any]:
    return gemma4_metadata(
        layers=60,
        width=5376,
        heads=32,
        kv_heads=(16, 4),
        dims=(256, 512),
        ffn=21504,
        pattern=_pattern(60, 6),
    )


def _with_experts() -> dict[str, Any]:
    return gemma4_metadata(
        layers=30,
        width=2816,
        heads=16,
        kv_heads=(8, 2),
        dims=(256, 512),
        ffn=2112,
        pattern=_pattern(30, 6),
        **{
            "gemma4.expert_count": 128,
            "gemma4.expert_used_count": 8,
            "gemma4.expert_feed_forward_length": 704,
        },
    )


def _e_model(
    layers: int, width: int, kv_heads: int, ffn: Sequence[int], *, period: int, shared: int
) -> dict[str, Any]:
    return gemma4_metadata(
        layers=layers,
        width=width,
        heads=8,
        kv_heads=(kv_heads, kv_heads),
        dims=(256, 512),
        ffn=list(ffn),
        pattern=_pattern(layers, period),
        **{
            "gemma4.context_length": 131072,
            "gemma4.attention.sliding_window": 512,
            "gemma4.attention.shared_kv_layers": shared,
            "gemma4.embedding_length_per_layer_input": 256,
        },
    )


def _pattern(layers: int, period: int) -> list[bool]:
    """Which layers are local: all but every `period`-th."""
    return [(layer + 1) % period != 0 for layer in range(layers)]


def gemma4_metadata(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: tuple[int, int],
    dims: tuple[int, int],
    ffn: int | Sequence[int],
    pattern: Sequence[bool],
    **more: Any,
) -> dict[str, Any]:
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


def gemma3_metadata(
    *, layers: int, width: int, heads: int, kv_heads: int, dim: int, ffn: int, window: int
) -> dict[str, Any]:
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


def shapes_of(metadata: Mapping[str, Any], vocab: int, *, k_eq_v: bool, own_kv: bool = False) -> Shapes:
    """Every tensor of such a file, as the table of the converters' names has them. Torch order.

    own_kv: layers that read the keys and values of others have the matrices all the same.
    """
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
    shapes: Shapes = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
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
        own: Shapes = {
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
        if own_kv or layer < first_shared:
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
