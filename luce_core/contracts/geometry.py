"""Published models as plain data: what `luce-core synth` writes files of. Architecture plugins own theirs."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from attrs import Factory, frozen


@frozen
class Geometry:
    """A published model without its weights: what its file says, and the tensors it holds."""

    name: str
    """What `luce-core synth` takes: lower case, digits, "-", "."."""
    metadata: Mapping[str, Any]
    """GGUF keys, `general.architecture` among them, tokenizer and split keys not. See `luce_core.gguf.emit`
    for the types that come of it.
    """
    shapes: Mapping[str, tuple[int, ...]]
    """By GGUF name, in the order of the file; torch order."""
    aliases: tuple[str, ...] = ()
    """Names of other releases of the same sizes."""
    formats: Mapping[str, str] = Factory(dict)
    """Name pattern -> block format, whatever quantization is asked for; the first that matches."""
    native: Mapping[str, str] = Factory(dict)
    """The same for the quantization "native": what the publisher's converter writes, where that is mixed."""
    ranges: Mapping[str, tuple[float, float]] = Factory(dict)
    """Name pattern -> lowest and highest value, of F32 tensors that must not be just any small numbers, and
    of I32 tensors, whose rows get distinct numbers.
    """

    @property
    def arch(self) -> str:
        """`general.architecture`."""
        return str(self.metadata["general.architecture"])

    @property
    def vocab(self) -> int:
        """Rows of the embedding table."""
        return self.shapes["token_embd.weight"][0]

    @property
    def parameters(self) -> int:
        """Weights of all tensors."""
        return sum(prod(shape) for shape in self.shapes.values())
