"""Images of a prompt: what the server makes of them, and what the engine is given. Plain data, no torch.

The server decodes an image and hands its pixels to the `MediaProcessor` of the plan's encoder, which makes a
`Media` of them. The prompt gets as many rows as that says (`MediaSpan`); the engine has them encoded before
they are computed, and only where no cached prefix holds them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

if TYPE_CHECKING:
    from torch import Tensor

    from luce_core.contracts.model import ModelSpec


@frozen
class Media:
    """One image, sized and laid out for its encoder."""

    encoder: str
    """Which encoder of the plan reads it."""
    rows: int
    """Rows it takes in the prompt."""
    grid: tuple[int, int]
    """Rows of the prompt as (height, width), the width running fastest; height · width = `rows`."""
    digest: bytes
    """128 bits of everything the encoder reads: equal for equal images, and the cache key of the rows."""
    shape: tuple[int, ...]
    """Of `data`, by the encoder's own rule."""
    data: bytes = field(repr=False)


@frozen
class MediaSpan:
    """An image in its place in a prompt."""

    first: int
    """Index of its first row."""
    media: Media

    @property
    def stop(self) -> int:
        """Index behind its last row."""
        return self.first + self.media.rows


@frozen
class MediaContext:
    """What `PartSpec.processor` is given, while planning and in the server's process."""

    name: str
    """The encoder part's: `Media.encoder` of what the processor makes."""
    options: Any
    """The plugin's validated options model, or None."""
    target: ModelSpec
    encoder: ModelSpec
    """Of the model the encoder runs."""
    path: str
    """File of that model, for messages."""
    max_pixels: int
    """An image is made smaller than this."""
    placeholder: str = ""
    """"" = the encoder must have been made for the target. Else the target borrows it (`ModelSpec.borrows`):
    this token of the target stands for a row, how positions count is the target's business, and rows must
    be as wide as it takes them.
    """


class MediaProcessor(Protocol):
    """From pixels to `Media`, in the server's process. Thread-safe; imports no torch."""

    placeholder: str
    """The token a chat template writes where an image goes; it is repeated for every row."""
    workspace_bytes: int
    """The most memory encoding one image takes on the device, beside the weights."""

    def prepare(self, pixels: Any) -> Media:
        """pixels: (host) numpy uint8[height, width, 3], RGB. CPU-bound. Raises RequestError for an image it
        cannot use; the caller names the part of the request.
        """
        ...


class Encoder(Protocol):
    """Media -> rows of embeddings. Engine thread only."""

    def encode(self, items: Sequence[Media]) -> Generator[Tensor | None]:
        """Yields None while there is more to do, after 50 ms of work where it can, then (dev) [rows, E] per
        item, in order. Closed early when nobody wants the rest.
        """
        ...
