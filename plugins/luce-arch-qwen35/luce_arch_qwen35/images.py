"""From pixels to what the image encoder reads, in the server's process: size, content hash. Imports no torch.

The size is Qwen's: both sides a multiple of a merged patch, the pixels between a least and a most, the
proportions kept as closely as that allows.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import Any

import numpy as np
from PIL import Image

from luce_arch_qwen35.vision import VisionParams
from luce_core.contracts import Media, MediaContext
from luce_core.errors import ModelFormatError, RequestError

MIN_PIXELS = 65536
"""Of the published processors (`size.shortest_edge`): smaller images are made larger."""
MOST_UNEVEN = 200
"""Longer side over shorter side; beyond, the processors refuse too."""
AXES = 3
PLACEHOLDER = "<|image_pad|>"
SCORE_BYTES = 2**26
"""Of attention scores at a time, should the device keep them."""
BLOCK_ROWS = 2048
"""Patches whose MLP is computed at a time."""


def fitted_size(height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """(height, width) in multiples of `unit`, with `least` to `most` pixels."""
    fitted = (round(height / unit) * unit, round(width / unit) * unit)
    pixels = fitted[0] * fitted[1]
    if pixels > most:
        shrink = math.sqrt(height * width / most)
        return max(unit, _down(height / shrink, unit)), max(unit, _down(width / shrink, unit))
    if pixels < least:
        grow = math.sqrt(least / (height * width))
        return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
    return fitted


def _down(length: float, unit: int) -> int:
    return math.floor(length / unit) * unit


class ImageProcessor:
    """`MediaProcessor` of one projector file."""

    def __init__(self, context: MediaContext) -> None:
        params: VisionParams = context.encoder.details["vision"]
        self.name = context.name
        self.placeholder = context.placeholder or PLACEHOLDER
        self.params = params
        self.unit = params.patch * params.merge
        self.most = max(context.max_pixels, self.unit * self.unit)
        self.least = min(MIN_PIXELS, self.most)
        self.workspace_bytes = workspace_bytes(params, self.most)
        self._kind = f"{params.patch} {params.merge} {params.mean} {params.std}".encode()

    def prepare(self, pixels: Any) -> Media:
        """uint8[height, width, 3] -> `Media` with the pixels of the size that is encoded."""
        height, width = pixels.shape[:2]
        if max(height, width) > MOST_UNEVEN * min(height, width):
            raise RequestError(
                f"the image has {width} x {height} pixels; wanted a longer side of at most {MOST_UNEVEN} "
                "times the shorter. Cut it into pieces."
            )
        size = fitted_size(height, width, self.unit, self.least, self.most)
        if size != (height, width):
            resized = Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.BICUBIC)
            pixels = np.asarray(resized)
        data = np.ascontiguousarray(pixels).tobytes()
        digest = blake2b(b"%s %d %d " % (self._kind, *size) + data, digest_size=16).digest()
        grid = (size[0] // self.unit, size[1] // self.unit)
        return Media(self.name, grid[0] * grid[1], grid, digest, (*size, 3), data)


def most_encoded(unit: int, most: int) -> int:
    """Pixels `fitted_size` may give: strips cannot be narrower than the unit, and small images grow to the
    next multiple of it, both beyond `most` where that is small.
    """
    least, uneven = min(MIN_PIXELS, most), math.sqrt(MOST_UNEVEN)
    grown = least + unit * (uneven + 1) * math.sqrt(least) + unit * unit
    return math.ceil(max(most, unit * uneven * math.sqrt(most), grown))


def workspace_bytes(params: VisionParams, most_pixels: int) -> int:
    """What encoding one image takes at most, in f32: see `tower.VisionTower`."""
    pixels = most_encoded(params.patch * params.merge, most_pixels)
    patches, width, merged = pixels // params.patch**2, params.hidden, params.merged
    whole = patches * (2 * params.patch_numbers + 10 * width) + patches // params.merge**2 * params.out
    block = BLOCK_ROWS * max(2 * params.ffn + 2 * width, (2 * merged + 2 * params.out) // params.merge**2)
    return 4 * (whole + block) + 2 * SCORE_BYTES


def make_processor(context: MediaContext) -> ImageProcessor:
    """The plugin's `processor`. Raises ModelFormatError for a file that does not go with the target."""
    params: VisionParams = context.encoder.details["vision"]
    target = context.target
    wrong = ""
    if params.out != target.hidden:
        wrong = f"it makes rows of {params.out} numbers, the model takes {target.hidden}"
    elif target.position_axes != AXES and not context.placeholder:
        wrong = "the model has no positions for the rows and columns of an image"
    if wrong:
        raise ModelFormatError(
            f"Projector file {context.path!r} does not go with the model of architecture {target.arch!r}: "
            f"{wrong}. Use the mmproj file that was made for the model, or go without --mmproj."
        )
    return ImageProcessor(context)
