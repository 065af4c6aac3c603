"""Where the rows of images stand in a prompt, and what they are called in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import shake_256

import numpy as np
from attrs import frozen

from luce_core.contracts import Media, MediaSpan
from luce_core.errors import RequestError

KEY_BIT = 1 << 62
"""Set in every key of a row of an image: no token id is so large."""


@frozen
class Placed:
    """A prompt whose images have their rows."""

    ids: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()
    keys: tuple[int, ...] = ()
    """One per id; empty = the ids themselves."""


def row_keys(media: Media) -> list[int]:
    """A number for every row of an image, made of all its content and of the row's place in it.

    Two images have a key in common with a chance of 2⁻⁶² per row, all keys only if their digests are equal.
    """
    name = f"{media.encoder} {media.grid} ".encode() + media.digest
    numbers = np.frombuffer(shake_256(name).digest(8 * media.rows), "<i8")
    keys: list[int] = (numbers & (KEY_BIT - 1) | KEY_BIT).tolist()
    return keys


def place(ids: Sequence[int], placeholder: int, items: Sequence[Media]) -> Placed:
    """Every placeholder a template wrote becomes as many as its image has rows.

    Raises RequestError where the template did not write one for each image.
    """
    found = [at for at, token in enumerate(ids) if token == placeholder]
    if len(found) != len(items):
        raise RequestError(
            f"The conversation has {len(items)} images, and the model's chat template shows {len(found)} of "
            "them. Send images only where the template has a place for them (in most: in user messages), or "
            "give another template with --chat-template-file.",
            code="chat_template_error",
            param="messages",
        )
    prompt: list[int] = []
    keys: list[int] = []
    spans: list[MediaSpan] = []
    start = 0
    for at, item in zip(found, items, strict=True):
        prompt += ids[start:at]
        keys += ids[start:at]
        spans.append(MediaSpan(len(prompt), item))
        prompt += [placeholder] * item.rows
        keys += row_keys(item)
        start = at + 1
    prompt += ids[start:]
    keys += ids[start:]
    return Placed(tuple(prompt), tuple(spans), tuple(keys) if spans else ())
