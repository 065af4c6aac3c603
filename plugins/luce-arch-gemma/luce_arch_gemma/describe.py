"""Header -> ModelSpec, and every check a bad file must fail. Imports no torch."""

from __future__ import annotations

from attrs import evolve

from luce_arch_gemma.params import GemmaParams, LayerParams, read_params
from luce_core.contracts import CacheOptions, Group, ModelSpec, Pages, StateLayout
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    ExpertParams,
    WeightTotals,
    check_ends,
    check_tensors,
    kv_pages,
    mlp_shapes,
    model_spec,
    weight_totals,
)

Shapes = dict[str, tuple[int, ...]]


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Read and check the header. Raises ModelFormatError naming the key or tensor."""
    params = read_params(header)
    _check_tensors(header, params)
    return model_spec(header, params, _layout(params), totals=_totals(header, params))


def _layout(params: GemmaParams) -> StateLayout:
    """Regions of the layers with keys and values of their own, local ones in a group with a window."""
    groups, pages = {}, []
    for layer in params.layers:
        if layer.owns_kv:
            own = _pages(params, layer)
            groups[own.group] = Group(own.group, window=params.window_of(layer))
            pages.append(own)
    return StateLayout(tuple(groups.values()), tuple(pages))


def _pages(params: GemmaParams, layer: LayerParams) -> Pages:
    """Without a value matrix, values alone: the keys are rope(weight of k_norm · V), since both come from one
    projection.
    """
    dim = layer.head_dim
    pages = kv_pages(layer.number, layer.kv_heads, dim, dim, params.window_of(layer))
    return pages if layer.has_v else evolve(pages, fields={"v": pages.fields["v"]})


def _totals(header: GgufHeader, params: GemmaParams) -> WeightTotals:
    """One decoded token reads a row of the table of per-layer inputs."""
    totals = weight_totals(header, experts_used=params.experts.used if params.experts else 0)
    if not params.per_layer_width:
        return totals
    table = header.tensors["per_layer_token_embd.weight"]
    return evolve(
        totals,
        active_bytes=totals.active_bytes - table.num_bytes + table.row_bytes,
        prompt_parameters=totals.prompt_parameters - table.num_weights,
    )


# --- tensors


def _check_tensors(header: GgufHeader, params: GemmaParams) -> None:
    check_ends(header, params)
    width, inputs = params.hidden, params.per_layer_width
    if params.gemma4:
        header.tensor("rope_freqs.weight", (params.global_rope.num_rotated // 2,))
    if inputs:
        table = {
            "per_layer_token_embd": (params.vocab, inputs * params.num_layers),
            "per_layer_model_proj": (inputs * params.num_layers, width),
            "per_layer_proj_norm": (inputs,),
        }
        check_tensors(header, table)
    for layer in params.layers:
        blk = f"blk.{layer.number}."
        shapes = _attention_shapes(width, layer) | _mlp_shapes(width, layer.ffn)
        if params.gemma4:
            shapes["layer_output_scale"] = (1,)
        if inputs:
            shapes |= {"inp_gate": (inputs, width), "proj": (width, inputs), "post_norm": (width,)}
        check_tensors(header, shapes, blk)
        if params.experts:
            _check_experts(header, blk, width, params.experts)


def _attention_shapes(width: int, layer: LayerParams) -> Shapes:
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    shapes: Shapes = {
        "attn_norm": (width,),
        "attn_q": (queries, width),
        "attn_q_norm": (layer.head_dim,),
        "attn_output": (width, queries),
        "post_attention_norm": (width,),
    }
    if layer.owns_kv:
        shapes |= {"attn_k": (keys, width), "attn_k_norm": (layer.head_dim,)}
        if layer.has_v:
            shapes["attn_v"] = (keys, width)
    return shapes


def _mlp_shapes(width: int, ffn: int) -> Shapes:
    return {"ffn_norm": (width,), "post_ffw_norm": (width,), **mlp_shapes(width, ffn)}


def _check_experts(header: GgufHeader, blk: str, width: int, experts: ExpertParams) -> None:
    norms = ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
    shapes: Shapes = dict.fromkeys(norms, (width,)) | {"ffn_gate_inp": (experts.count, width)}
    stacks = mlp_shapes(width, experts.ffn, "_exps", experts.count)
    if (
        f"{blk}ffn_gate_up_exps.weight" in header.tensors
        or f"{blk}ffn_gate_exps.weight" not in header.tensors
    ):
        del stacks["ffn_gate_exps"], stacks["ffn_up_exps"]
        stacks["ffn_gate_up_exps"] = (experts.count, 2 * experts.ffn, width)
    check_tensors(header, shapes | stacks, blk)
    header.tensor(f"{blk}ffn_gate_inp.scale", (width,))
    header.tensor(f"{blk}ffn_down_exps.scale", (experts.count,))
