"""The network of a picture encoder, and the part that runs it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from luce_core.contracts import EncoderContext, LoadedModel, Media, ModelSpec, Ops, Weights
from luce_core.testing.pictures.model import SIDE

SCALE = 1 / 255 / SIDE
"""So that rows are about as large as embeddings."""


class PictureNetwork:
    """One matrix."""

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        self.ops: Any = ops
        self.matrix = weights.linear("mm")
        self.width = spec.final_width

    def rows(self, pixels: Tensor) -> Tensor:
        """f32[height, width, 3] -> [rows, E]."""
        height, width = (size // SIDE for size in pixels.shape[:2])
        squares = pixels.view(height, SIDE, width, SIDE, 3).transpose(1, 2)
        rows: Tensor = self.ops.linear(squares.reshape(height * width, -1) * SCALE, self.matrix)
        return rows


class PictureEncoder:
    """`Encoder`. A line of squares at a time."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.between: Callable[[], None] = lambda: None
        """Called before every piece of work: for tests to look, or to fail."""
        self.closed = 0
        """Images that were given up."""

    def encode(self, items: Sequence[Media]) -> Generator[Tensor | None]:
        """None after every line of squares, then [rows, E] per item."""
        for item in items:
            network: PictureNetwork = self.model.network
            pixels = torch.tensor(np.frombuffer(item.data, np.uint8).reshape(item.shape)).float()
            lines = []
            for line in torch.split(pixels, SIDE):
                self.between()
                lines.append(network.rows(line))
                try:
                    yield None
                except GeneratorExit:
                    self.closed += 1
                    raise
            yield torch.cat(lines)


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> PictureNetwork:
    """The `build` of the files."""
    return PictureNetwork(spec, weights, ops)


def make_encoder(context: EncoderContext) -> PictureEncoder:
    """The factory of part "pictures"."""
    (model,) = context.models.values()
    return PictureEncoder(model)
