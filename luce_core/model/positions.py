"""Positions of a prompt with images, for models whose positions have more than one axis (M-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from luce_core.contracts import MediaSpan

MEDIA_AXES = 3
"""Time, height, width."""


def prompt_positions(axes: int, length: int, spans: Sequence[MediaSpan]) -> tuple[npt.NDArray[np.int32], int]:
    """i32[axes, length] of a prompt, and how far positions are shifted against indexes behind it.

    Text counts on, the same on every axis. All rows of an image have the time it begins at; height and width
    count its rows and columns from there, and the text behind it goes on after the longer side. With one axis
    an image is counted as text is.
    """
    places = np.tile(np.arange(length, dtype=np.int32), (axes, 1))
    if axes != MEDIA_AXES:
        return places, 0
    shift = 0
    for span in spans:
        height, width = span.media.grid
        start = span.first + shift
        rows, columns = np.divmod(np.arange(span.media.rows, dtype=np.int32), width)
        places[0, span.first : span.stop] = start
        places[1, span.first : span.stop] = start + rows
        places[2, span.first : span.stop] = start + columns
        shift += max(height, width) - span.media.rows
        places[:, span.stop :] = np.arange(span.stop, length, dtype=np.int32) + shift
    return places, shift
