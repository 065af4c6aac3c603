"""The image encoder: patches, learned positions, transformer blocks with rotary rows and columns, and the
merger that makes one row of the text model from the patches of a square.

It runs beside requests: every method that takes long is a generator, which stops between pieces of work.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from luce_arch_qwen35.images import BLOCK_ROWS, SCORE_BYTES
from luce_arch_qwen35.vision import VisionParams
from luce_core.contracts import EncoderContext, Linear, LoadedModel, Media, ModelSpec, Ops, Weights
from luce_core.errors import PluginError

THETA = 10000.0
PIECE_FLOPS = {"cpu": 8e9}
"""Of one piece of work, by kind of device: 50 ms of an engine's turn where a processor does 150 GFLOP/s. Much
smaller pieces take longer in all: kernels on packed weights unpack them for every call.
"""
OTHER_FLOPS = 1e12
LEAST_ROWS = 16

Work = Generator[None, None, Tensor]
"""Stops where other requests may go on; returns the result."""


@frozen(eq=False)
class LayerNorm:
    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@frozen(eq=False)
class Block:
    attn_norm: LayerNorm
    qkv: Linear
    output: Linear
    ffn_norm: LayerNorm
    up: Linear
    down: Linear


class VisionTower:
    """The network of a projector file. [height, width, 3] pixels -> f32[rows, E of the text model].

    Nothing is ever of the size patches · patches: queries are taken in blocks, and so are rows of the MLP.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        params: VisionParams = spec.details["vision"]
        self.params = params
        self.ops: Any = ops
        # A still image is its frame twice, so both taps of the convolution over time see the same.
        taps = weights.vec("v.patch_embd") + weights.vec("v.patch_embd.weight.1")
        self.patch = taps.reshape(params.hidden, params.patch_numbers)
        self.patch_bias = weights.vec("v.patch_embd.bias")
        self.places = weights.vec("v.position_embd")
        self.blocks = [_block(weights, layer, params.eps) for layer in range(params.num_layers)]
        self.last_norm = _norm(weights, "v.post_ln", params.eps)
        self.merge_in, self.merge_out = weights.linear("mm.0"), weights.linear("mm.2")
        device = self.patch.device
        self.piece_flops = PIECE_FLOPS.get(device.type, OTHER_FLOPS)
        self.mean = torch.tensor(params.mean, device=device)
        self.std = torch.tensor(params.std, device=device)
        quarter = params.hidden // params.heads // 4
        steps = torch.arange(quarter, dtype=torch.float32, device=device) / quarter
        self.inv_freq = THETA**-steps

    def run(self, pixels: Tensor) -> Work:
        """uint8[height, width, 3] on the device; sides are multiples of patch · merge."""
        height, width = pixels.shape[0] // self.params.patch, pixels.shape[1] // self.params.patch
        row, column = self._grid(height, width)
        x = F.linear(self._patches(pixels), self.patch, self.patch_bias)
        x += self._learned(row, column, height, width)
        yield
        angle = torch.cat((row[:, None] * self.inv_freq, column[:, None] * self.inv_freq), 1)[:, None]
        cos, sin = angle.cos(), angle.sin()
        for block in self.blocks:
            x = yield from self._attend(x, block, cos, sin)
            x = yield from self._mlp(x, block)
        return (yield from self._merged(x))

    # --- patches

    def _patches(self, pixels: Tensor) -> Tensor:
        """f32[patches, 3 · patch · patch], those that are merged one after the other."""
        side, merge = self.params.patch, self.params.merge
        x = (pixels.float() / 255.0 - self.mean) / self.std
        high, wide = pixels.shape[0] // (side * merge), pixels.shape[1] // (side * merge)
        x = x.view(high, merge, side, wide, merge, side, 3)
        return x.permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, self.params.patch_numbers)

    def _grid(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """f32[patches] row and column of each, in their order."""
        merge, device = self.params.merge, self.patch.device
        rows = torch.arange(height, dtype=torch.float32, device=device).view(-1, 1, merge, 1)
        columns = torch.arange(width, dtype=torch.float32, device=device).view(1, -1, 1, merge)
        shape = (height // merge, width // merge, merge, merge)
        return rows.expand(shape).reshape(-1), columns.expand(shape).reshape(-1)

    def _learned(self, row: Tensor, column: Tensor, height: int, width: int) -> Tensor:
        """The table of positions, stretched over the image from corner to corner: f32[patches, D]."""
        side = self.params.grid
        out: Tensor | None = None
        for y, y_share in _neighbours(row, height, side):
            for x, x_share in _neighbours(column, width, side):
                part = self.places[y * side + x] * (y_share * x_share)[:, None]
                out = part if out is None else out.add_(part)
        assert out is not None
        return out

    def _rows(self, numbers: int, most: int = BLOCK_ROWS) -> int:
        """How many rows a piece of work has, with `numbers` multiplications for each."""
        return max(1, min(most, BLOCK_ROWS, max(LEAST_ROWS, int(self.piece_flops / (2 * numbers)))))

    # --- blocks

    def _attend(self, x: Tensor, block: Block, cos: Tensor, sin: Tensor) -> Work:
        count, width, heads = *x.shape, self.params.heads
        qkv = x.new_empty(3, heads, count, width // heads)
        step = self._rows(3 * width * width)
        for at in range(0, count, step):
            here = slice(at, at + step)
            q, k, v = (
                self.ops.linear(block.attn_norm(x[here]), block.qkv)
                .view(-1, 3, heads, width // heads)
                .unbind(1)
            )
            turned = (_turned(q, cos[here], sin[here]), _turned(k, cos[here], sin[here]), v)
            for which, part in enumerate(turned):
                qkv[which, :, here] = part.transpose(0, 1)
            yield
        step = self._rows(2 * count * width, most=SCORE_BYTES // (4 * heads * count))
        q, k, v = qkv[:, None]
        for at in range(0, count, step):
            y = F.scaled_dot_product_attention(q[:, :, at : at + step], k, v)
            x[at : at + step] += self.ops.linear(y[0].transpose(0, 1).reshape(-1, width), block.output)
            yield
        return x

    def _mlp(self, x: Tensor, block: Block) -> Work:
        step = self._rows(2 * x.shape[1] * self.params.ffn)
        for at in range(0, x.shape[0], step):
            rows = x[at : at + step]
            inner = self.ops.act(self.ops.linear(block.ffn_norm(rows), block.up), "gelu_tanh")
            rows.add_(self.ops.linear(inner, block.down))
            yield
        return x

    def _merged(self, x: Tensor) -> Work:
        """Patches of a square side by side, through the merger -> f32[rows, E]."""
        square, merged = self.params.merge**2, self.params.merged
        numbers = merged * (merged + self.params.out) // square
        step = max(square, self._rows(numbers) // square * square)
        parts = []
        for at in range(0, x.shape[0], step):
            rows = self.last_norm(x[at : at + step])
            inner = self.ops.act(self.ops.linear(rows.reshape(-1, self.params.merged), self.merge_in), "gelu")
            parts.append(self.ops.linear(inner, self.merge_out))
            yield
        return torch.cat(parts)


def _neighbours(place: Tensor, length: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Entries of the table before and behind each place of an axis of `length`, and the share of each."""
    at = place * (side - 1) / max(length - 1, 1)
    low = at.floor()
    share = at - low
    first = low.long()
    return [(first, 1 - share), ((first + 1).clamp(max=side - 1), share)]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D]: feature j turns with feature j + D / 2."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _norm(weights: Weights, name: str, eps: float) -> LayerNorm:
    return LayerNorm(weights.vec(f"{name}.weight"), weights.vec(f"{name}.bias"), eps)


def _block(weights: Weights, layer: int, eps: float) -> Block:
    blk = f"v.blk.{layer}."
    return Block(
        attn_norm=_norm(weights, f"{blk}ln1", eps),
        qkv=weights.linear(f"{blk}attn_qkv"),
        output=weights.linear(f"{blk}attn_out"),
        ffn_norm=_norm(weights, f"{blk}ln2", eps),
        up=weights.linear(f"{blk}ffn_up"),
        down=weights.linear(f"{blk}ffn_down"),
    )


def build_vision(spec: ModelSpec, weights: Weights, ops: Ops) -> VisionTower:
    """The `build` of projector files."""
    return VisionTower(spec, weights, ops)


class ImageEncoder:
    """`Encoder`: runs the tower of one projector file."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model

    def encode(self, items: Sequence[Media]) -> Generator[Tensor | None]:
        """None between pieces of work, then (dev) f32[rows, E] per item."""
        for item in items:
            tower: VisionTower = self.model.network
            raw = np.frombuffer(item.data, np.uint8).reshape(item.shape)
            pixels = torch.tensor(raw, device=tower.patch.device)
            yield (yield from tower.run(pixels))


def make_encoder(context: EncoderContext) -> ImageEncoder:
    """The factory of part "qwen3vl"."""
    if len(context.models) != 1:
        raise PluginError(f"Encoder {context.name!r} was given {len(context.models)} models; wanted one.")
    (model,) = context.models.values()
    return ImageEncoder(model)
