"""What is known of tensors beside their numbers."""

from __future__ import annotations

from typing import Generic, TypeVar

from attrs import define, field
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


@define(eq=False)
class Notes(Generic[T]):
    """One thing of each tensor: by the object itself, as long as it lives. One that torch wrote to since is
    another; kernels of this plugin write to no tensor that an op has given back.
    """

    _of: WeakTensorKeyDictionary = field(factory=WeakTensorKeyDictionary)

    def put(self, tensor: Tensor, thing: T) -> None:
        self._of[tensor] = (thing, tensor._version)

    def get(self, tensor: Tensor) -> T | None:
        found = self._of.get(tensor)
        return found[0] if found is not None and found[1] == tensor._version else None


__all__ = ["Notes"]
