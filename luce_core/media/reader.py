"""The images of a request made ready for the encoder: found, fetched, decoded, sized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from luce_core.contracts import Media, MediaProcessor
from luce_core.errors import RequestError
from luce_core.media.decode import decode
from luce_core.media.fetch import OPTION, Fetcher
from luce_core.media.sources import Source, sources_of

THREADS = 4


class ImageReader:
    """Made once for a server that reads images. `read` blocks and is CPU-bound: call it on `threads`, which
    are not those that answer everybody else.
    """

    def __init__(
        self, processor: MediaProcessor, placeholder: int, *, max_images: int, fetcher: Fetcher | None = None
    ) -> None:
        """placeholder: the id of `processor.placeholder`. fetcher: None = nothing is fetched."""
        self.placeholder = placeholder
        self.max_images = max_images
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="luce-images")
        self._processor = processor
        self._fetcher = fetcher

    def read(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Media, ...]:
        """The images of a conversation, in order. Raises RequestError naming the part that is wrong."""
        sources = sources_of(messages)
        if len(sources) > self.max_images:
            raise RequestError(
                f"The conversation has {len(sources)} images; this server takes {self.max_images} at a time. "
                "Send fewer, or raise --max-images.",
                code="too_many_images",
                param=sources[self.max_images].where,
            )
        return tuple(self._read(source) for source in sources)

    def _read(self, source: Source) -> Media:
        try:
            data = source.data
            return self._processor.prepare(decode(self._fetched(source.url) if data is None else data))
        except RequestError as error:
            told = f"The image at '{source.where}' cannot be used: {str(error).rstrip('.')}."
            raise RequestError(told, code="invalid_image", param=source.where) from error

    def _fetched(self, url: str) -> bytes:
        if self._fetcher is None:
            raise RequestError(
                f"this server fetches no images; {OPTION} says from which hosts it may. Send the image "
                "itself, as a data URL"
            )
        return self._fetcher.fetch(url)
