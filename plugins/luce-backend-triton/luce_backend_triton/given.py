"""An input that a kernel of csrc makes ready itself."""

from __future__ import annotations

import ctypes

from attrs import frozen
from torch import Tensor

ACT_CODES = {"": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
ALIGNMENT = 4
"""Floats of x that are read at a time: rows and their starts are multiples of it."""


class In(ctypes.Structure):
    """`In` of csrc/common.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "up", "weight")),
        *((name, ctypes.c_int) for name in ("k", "ldx", "act")),
        ("eps", ctypes.c_float),
    )


@frozen(eq=False)
class Given:
    """x, norm(x) or act(x) · up, not computed yet."""

    x: Tensor
    """f32[m, k], columns side by side."""
    up: Tensor | None = None
    """Strides as x."""
    weight: Tensor | None = None
    """Of the norm."""
    eps: float = 0.0
    act: str = ""

    def readable(self) -> bool:
        """Whether the kernels can read it: four floats at a time."""
        parts = (self.x, *(part for part in (self.up, self.weight) if part is not None))
        return (
            self.x.shape[1] % ALIGNMENT == 0
            and all(part.data_ptr() % (4 * ALIGNMENT) == 0 for part in parts)
            and (self.x.shape[0] == 1 or self.x.stride(0) % ALIGNMENT == 0)
        )

    def argument(self) -> In:
        """For the launch, during which the tensors live."""
        parts = (None if part is None else part.data_ptr() for part in (self.x, self.up, self.weight))
        return In(*parts, self.x.shape[1], self.x.stride(0), ACT_CODES[self.act], self.eps)
