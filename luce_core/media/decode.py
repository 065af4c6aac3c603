"""The bytes of an image file to RGB pixels. Whoever sent them is not trusted."""

from __future__ import annotations

import io
import struct
import threading
import warnings
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from luce_core.errors import RequestError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_PIXELS = 2**25
"""Of an image before it is made smaller, 8K video frames included: 400 MiB on the way to RGB."""
WHITE = (255, 255, 255, 255)
_one_at_a_time = threading.Lock()
"""So that what decoding takes at most is what one image takes."""


def decode(data: bytes) -> npt.NDArray[np.uint8]:
    """uint8[height, width, 3] of a PNG, JPEG, WebP or GIF, of the latter two the first frame.

    Turned as its EXIF data says, transparency over white. Raises RequestError without saying whose image it
    is: the caller does.
    """
    from PIL import Image, UnidentifiedImageError

    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of size, whose limit here is lower, and of odd files that work
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                return _pixels(image)
        except UnidentifiedImageError:
            raise RequestError(
                f"its {len(data)} bytes are no image of a known kind; wanted {', '.join(FORMATS)}"
            ) from None
        except Image.DecompressionBombError as error:
            raise RequestError(f"it is too large: {error}") from None
        except _broken() as error:
            raise RequestError(f"it cannot be decoded: {error or type(error).__name__}") from None


def _pixels(image: Image.Image) -> npt.NDArray[np.uint8]:
    from PIL import Image, ImageOps

    if image.width * image.height > MOST_PIXELS:
        raise RequestError(
            f"it has {image.width} x {image.height} pixels; wanted at most {MOST_PIXELS} in all. Make it "
            "smaller"
        )
    turned: Any = ImageOps.exif_transpose(image)
    if "A" in turned.getbands() or turned.info.get("transparency") is not None:
        seen = turned.convert("RGBA")
        turned = Image.alpha_composite(Image.new("RGBA", seen.size, WHITE), seen)
    return np.array(turned.convert("RGB"))


def _broken() -> tuple[type[Exception], ...]:
    """What Pillow raises for files that are damaged, or made to do damage."""
    return (
        *(OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError),
        *(AttributeError, NotImplementedError, MemoryError, struct.error, zlib.error),
    )
