"""How a bad file is spoken of: one sentence of what is wrong with which part, one of what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from luce_core.errors import ModelFormatError

REFETCH: Final = "The file is damaged, incomplete or no GGUF model: fetch it again, or convert it again."
RECONVERT: Final = "It is not a complete model of its architecture: convert it again with a newer converter."

QUOTED_CHARS: Final = 80


def quote(text: str) -> str:
    """Quoted, escaped (a file must not write to the terminal) and cut to a readable length."""
    if len(text) <= QUOTED_CHARS:
        return repr(text)
    return f"{text[:QUOTED_CHARS]!r}... ({len(text)} characters)"


def bad(path: Path, subject: str, got: str, wanted: str, fix: str = REFETCH) -> ModelFormatError:
    """The error to raise: `subject` names the key or tensor, `got` starts with a verb."""
    return ModelFormatError(f"GGUF file '{path}': {subject} {got}; wanted {wanted}. {fix}")
