import io

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def picture():
    """picture(height, width, seed, mode) -> noise."""

    def make(height=12, width=17, seed=0, mode="RGB"):
        shape = (height, width) if mode == "L" else (height, width, len(mode))
        return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), mode=None)

    return make


@pytest.fixture
def written():
    """written(image, kind, **options) -> the bytes of the file."""

    def write(image, kind="PNG", **options):
        out = io.BytesIO()
        image.save(out, kind, **options)
        return out.getvalue()

    return write
