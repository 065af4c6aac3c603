"""Header -> ModelSpec, and every check a bad file must fail. Imports no torch."""

from __future__ import annotations

from luce_arch_gemma.params import ExpertParams, GemmaParams, LayerParams, read_params
from luce_core.contracts import CacheOptions, Field, Group, ModelSpec, Pages, StateLayout
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import FULL_GROUP, kv_region, special_tokens, weight_totals

WINDOW_GROUP = "window"
STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps")


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Read and check the header. Raises ModelFormatError naming the key or tensor."""
    params = read_params(header)
    _check_tensors(header, params)
    totals = weight_totals(header)
    return ModelSpec(
        arch=header.arch,
        identity="",  # content of the file, which a header does not hold; the loader fills it in
        num_layers=len(params.layers),
        hidden=params.hidden,
        vocab=params.vocab,
        context=params.context,
        position_axes=1,
        tap_width=params.hidden,
        final_width=params.hidden,
        layout=_layout(params),
        nextn_layout=None,
        tree="any",
        tokens=special_tokens(header),
        parameters=totals.parameters,
        weight_bytes=totals.weight_bytes,
        active_bytes=totals.active_bytes - _idle_bytes(header, params),
        details={"gemma": params},
    )


def _layout(params: GemmaParams) -> StateLayout:
    """Local layers in a group with a window. Without a value matrix, values alone are kept: the keys are
    rope(weight of k_norm · V), since both come from one projection.
    """
    owners = [layer for layer in params.layers if layer.owns_kv]
    groups = [
        group
        for group, local in ((Group(FULL_GROUP), False), (Group(WINDOW_GROUP, window=params.window), True))
        if any(layer.local == local for layer in owners)
    ]
    return StateLayout(tuple(groups), tuple(_pages(layer) for layer in owners))


def _pages(layer: LayerParams) -> Pages:
    shape = (layer.kv_heads, layer.head_dim)
    fields = {"v": Field(shape, "kv.v")}
    if layer.has_v:
        fields = {"k": Field(shape, "kv.k"), **fields}
    group = WINDOW_GROUP if layer.local else FULL_GROUP
    return Pages(kv_region(layer.number), group, layer.number, fields)


def _idle_bytes(header: GgufHeader, params: GemmaParams) -> int:
    """Weights one decoded token does not read: experts it is not routed to, and of the table of per-layer
    inputs all but a row.
    """
    idle = 0
    if params.per_layer_width:
        table = header.tensors["per_layer_token_embd.weight"]
        idle += table.num_bytes - table.row_bytes
    if params.experts:
        stacks = [f"blk.{layer.number}.{name}.weight" for layer in params.layers for name in STACKS]
        total = sum(header.tensors[name].num_bytes for name in stacks if name in header.tensors)
        idle += total - total * params.experts.used // params.experts.count
    return idle


# --- tensors


def _check_tensors(header: GgufHeader, params: GemmaParams) -> None:
    width, vocab = params.hidden, params.vocab
    header.tensor("token_embd.weight", (vocab, width))
    header.tensor("output_norm.weight", (width,))
    if "output.weight" in header.tensors:
        header.tensor("output.weight", (vocab, width))
    if params.gemma4:
        header.tensor("rope_freqs.weight", (params.global_rope.num_rotated // 2,))
    if params.per_layer_width:
        inputs = params.per_layer_width * len(params.layers)
        header.tensor("per_layer_token_embd.weight", (vocab, inputs))
        header.tensor("per_layer_model_proj.weight", (inputs, width))
        header.tensor("per_layer_proj_norm.weight", (params.per_layer_width,))
    for layer in params.layers:
        blk = f"blk.{layer.number}."
        _check_attention(header, blk, width, layer)
        _check_mlp(header, blk, width, layer.ffn)
        if params.gemma4:
            header.tensor(f"{blk}layer_output_scale.weight", (1,))
        if params.experts:
            _check_experts(header, blk, width, params.experts)
        if params.per_layer_width:
            header.tensor(f"{blk}inp_gate.weight", (params.per_layer_width, width))
            header.tensor(f"{blk}proj.weight", (width, params.per_layer_width))
            header.tensor(f"{blk}post_norm.weight", (width,))


def _check_attention(header: GgufHeader, blk: str, width: int, layer: LayerParams) -> None:
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    header.tensor(f"{blk}attn_norm.weight", (width,))
    header.tensor(f"{blk}attn_q.weight", (queries, width))
    header.tensor(f"{blk}attn_q_norm.weight", (layer.head_dim,))
    header.tensor(f"{blk}attn_output.weight", (width, queries))
    header.tensor(f"{blk}post_attention_norm.weight", (width,))
    if layer.owns_kv:
        header.tensor(f"{blk}attn_k.weight", (keys, width))
        header.tensor(f"{blk}attn_k_norm.weight", (layer.head_dim,))
        if layer.has_v:
            header.tensor(f"{blk}attn_v.weight", (keys, width))


def _check_mlp(header: GgufHeader, blk: str, width: int, ffn: int) -> None:
    header.tensor(f"{blk}ffn_norm.weight", (width,))
    header.tensor(f"{blk}ffn_gate.weight", (ffn, width))
    header.tensor(f"{blk}ffn_up.weight", (ffn, width))
    header.tensor(f"{blk}ffn_down.weight", (width, ffn))
    header.tensor(f"{blk}post_ffw_norm.weight", (width,))


def _check_experts(header: GgufHeader, blk: str, width: int, experts: ExpertParams) -> None:
    for norm in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
        header.tensor(f"{blk}{norm}.weight", (width,))
    header.tensor(f"{blk}ffn_gate_inp.weight", (experts.count, width))
    header.tensor(f"{blk}ffn_gate_inp.scale", (width,))
    if (
        f"{blk}ffn_gate_exps.weight" in header.tensors
        and f"{blk}ffn_gate_up_exps.weight" not in header.tensors
    ):
        header.tensor(f"{blk}ffn_gate_exps.weight", (experts.count, experts.ffn, width))
        header.tensor(f"{blk}ffn_up_exps.weight", (experts.count, experts.ffn, width))
    else:
        header.tensor(f"{blk}ffn_gate_up_exps.weight", (experts.count, 2 * experts.ffn, width))
    header.tensor(f"{blk}ffn_down_exps.weight", (experts.count, width, experts.ffn))
    header.tensor(f"{blk}ffn_down_exps.scale", (experts.count,))
