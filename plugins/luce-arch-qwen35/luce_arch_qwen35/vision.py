"""The header of a projector file (mmproj, `clip.projector_type` "qwen3vl_merger"): an image encoder that goes
with a text model. Imports no torch.
"""

from __future__ import annotations

from attrs import frozen

from luce_core.contracts import CacheOptions, ModelSpec, StateLayout
from luce_core.errors import ModelFormatError
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import MAX_LAYERS, MAX_WIDTH, bad_key, weight_totals

MAX_PATCH = 256
MAX_MERGE = 16
EPS = "clip.vision.attention.layer_norm_epsilon"
DEEPSTACK = "clip.vision.is_deepstack_layers"


@frozen
class VisionParams:
    """Hyper-parameters of one file."""

    num_layers: int
    hidden: int
    heads: int
    ffn: int
    out: int
    """Width of the rows it makes: that of the text model."""
    patch: int
    """Pixels of a side of a patch."""
    merge: int
    """Patches of a side that become one row."""
    grid: int
    """Patches of a side of the learned table of positions."""
    eps: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def patch_numbers(self) -> int:
        return 3 * self.patch * self.patch

    @property
    def merged(self) -> int:
        """Width of the patches of a row, side by side."""
        return self.hidden * self.merge * self.merge


def read_vision(header: GgufHeader) -> VisionParams:
    """Raises ModelFormatError naming the key."""

    def width(key: str, high: int = MAX_WIDTH) -> int:
        return header.uint(f"clip.vision.{key}", low=1, high=high)

    hidden, heads = width("embedding_length"), width("attention.head_count")
    if hidden % heads or hidden // heads % 4:
        wanted = f"a divisor of the width {hidden} that leaves heads of a multiple of 4"
        raise bad_key(header, "clip.vision.attention.head_count", f"is {heads}", wanted)
    if header.has(DEEPSTACK) and any(header.bools(DEEPSTACK)):
        raise ModelFormatError(
            f"Projector file {str(header.path)!r} gives numbers to inner layers of its text model (key "
            f"{DEEPSTACK!r} is true for some), as those of Qwen3-VL do; models of 'qwen35' take none. Use "
            "the mmproj file that was made for the model."
        )
    return VisionParams(
        num_layers=width("block_count", MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        ffn=width("feed_forward_length"),
        out=width("projection_dim"),
        patch=width("patch_size", MAX_PATCH),
        merge=header.uint("clip.vision.spatial_merge_size", 2, low=1, high=MAX_MERGE),
        grid=_grid(header, hidden),
        eps=header.float(EPS, 1e-6),
        mean=_three(header, "clip.vision.image_mean"),
        std=_three(header, "clip.vision.image_std"),
    )


def _grid(header: GgufHeader, hidden: int) -> int:
    """Side of the square table of positions."""
    shape = header.tensor("v.position_embd.weight").shape
    side = round(shape[0] ** 0.5)
    header.tensor("v.position_embd.weight", (side * side, hidden))
    return side


def _three(header: GgufHeader, key: str) -> tuple[float, ...]:
    values = header.floats(key, (0.5, 0.5, 0.5))
    if len(values) != 3 or (key.endswith("std") and min(values) <= 0):
        raise bad_key(header, key, f"is {list(values)}", "three numbers, one of each colour")
    return values


def describe_vision(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Read and check the header. Raises ModelFormatError naming the key or tensor."""
    params = read_vision(header)
    _check_tensors(header, params)
    totals = weight_totals(header)
    return ModelSpec(
        arch=header.family,
        identity="",
        num_layers=params.num_layers,
        hidden=params.hidden,
        vocab=0,
        context=cache.context,
        position_axes=1,
        tap_width=params.hidden,
        final_width=params.out,
        layout=StateLayout((), (), best_effort=True),
        nextn_layout=None,
        tree="none",
        tokens={},
        parameters=totals.parameters,
        weight_bytes=totals.weight_bytes,
        rows_bytes=totals.rows_bytes,
        active_bytes=totals.weight_bytes,
        details={"vision": params},
    )


def _check_tensors(header: GgufHeader, params: VisionParams) -> None:
    width, patch = params.hidden, (params.hidden, 3, params.patch, params.patch)
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        header.tensor(name, patch)
    header.tensor("v.patch_embd.bias", (width,))
    for layer in range(params.num_layers):
        blk = f"v.blk.{layer}."
        for norm in ("ln1", "ln2"):
            _pair(header, f"{blk}{norm}", (width,))
        _pair(header, f"{blk}attn_qkv", (3 * width, width))
        _pair(header, f"{blk}attn_out", (width, width))
        _pair(header, f"{blk}ffn_up", (params.ffn, width))
        _pair(header, f"{blk}ffn_down", (width, params.ffn))
    _pair(header, "v.post_ln", (width,))
    _pair(header, "mm.0", (params.merged, params.merged))
    _pair(header, "mm.2", (params.out, params.merged))


def _pair(header: GgufHeader, name: str, shape: tuple[int, ...]) -> None:
    header.tensor(f"{name}.weight", shape)
    header.tensor(f"{name}.bias", shape[:1])
