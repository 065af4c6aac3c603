"""The file of a picture encoder, its header, and what the server makes of pixels. Imports no torch."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from luce_core.contracts import CacheOptions, Media, MediaContext, ModelSpec, StateLayout
from luce_core.errors import ModelFormatError, RequestError
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import weight_totals
from luce_core.testing.gguf_factory import write_gguf

SIDE = 4
"""Pixels of a side of a square, which becomes one row."""
PLACEHOLDER = "<think>"
"""A token the toy vocabulary has."""


def write_picture_model(path: Path, *, width: int = 256, seed: int = 0) -> Path:
    """A projector file for models `width` wide."""
    numbers = np.random.default_rng(seed).standard_normal((width, 3 * SIDE * SIDE)).astype(np.float32)
    metadata = {"general.architecture": "clip", "clip.projector_type": "pictures"}
    return write_gguf(path, metadata, {"mm.weight": numbers})


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """A matrix [width, 48]."""
    width = header.tensor("mm.weight").shape[0]
    header.tensor("mm.weight", (width, 3 * SIDE * SIDE))
    totals = weight_totals(header)
    return ModelSpec(
        arch=header.family,
        identity="",
        num_layers=1,
        hidden=width,
        vocab=0,
        context=cache.context,
        position_axes=1,
        tap_width=width,
        final_width=width,
        layout=StateLayout((), (), best_effort=True),
        nextn_layout=None,
        tree="none",
        tokens={},
        parameters=totals.parameters,
        weight_bytes=totals.weight_bytes,
        rows_bytes=totals.rows_bytes,
        active_bytes=totals.active_bytes,
    )


class PictureProcessor:
    """`MediaProcessor`: cuts off what is less than a square, and what is more than the most pixels."""

    placeholder = PLACEHOLDER

    def __init__(self, context: MediaContext) -> None:
        self.name = context.name
        self.most = context.max_pixels
        self.workspace_bytes = 16 * 3 * context.max_pixels

    def prepare(self, pixels: Any) -> Media:
        """uint8[height, width, 3] -> squares."""
        height, width = (size // SIDE for size in pixels.shape[:2])
        if not height or not width:
            raise RequestError(f"the image has {pixels.shape[1]} x {pixels.shape[0]} pixels; wanted {SIDE}")
        height = max(1, min(height, self.most // (SIDE * SIDE * width)))
        data = np.ascontiguousarray(pixels[: height * SIDE, : width * SIDE]).tobytes()
        digest = blake2b(f"{height} {width} ".encode() + data, digest_size=16).digest()
        shape = (height * SIDE, width * SIDE, 3)
        return Media(self.name, height * width, (height, width), digest, shape, data)


def make_processor(context: MediaContext) -> PictureProcessor:
    """The part's `processor`."""
    if context.encoder.final_width != context.target.hidden:
        raise ModelFormatError(
            f"Projector file {context.path!r} makes rows of {context.encoder.final_width} numbers; the model "
            f"takes {context.target.hidden}. Use the file that was made for it."
        )
    return PictureProcessor(context)
