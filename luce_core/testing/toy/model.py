"""A toy GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.toy_vocab import toy_vocabulary


def write_toy_model(
    path: Path,
    *,
    salt: int = 1,
    context: int = 512,
    slots: bool = True,
    window: int = 0,
    nextn: bool = False,
    template: str = "",
) -> Path:
    """Write a toy model. slots: with recurrent state; window: its pages keep only so many tokens (0 =
    all); nextn: with an MTP block, which knows the law of a model with neither.
    """
    metadata: dict[str, Any] = {
        "general.architecture": "toy",
        "general.name": path.stem,
        "toy.context_length": context,
        "toy.salt": salt,
        "toy.slots": slots,
        "toy.window": window,
        "toy.nextn": nextn,
        **toy_vocabulary("bpe"),
    }
    if template:
        metadata["tokenizer.chat_template"] = template
    # The law needs no weights; one tensor makes it a model file and its salt part of the model's identity.
    return write_gguf(path, metadata, {"toy.weight": np.full((8, 8), salt, dtype=np.float32)})
