"""x, norm(x) or act(x) · up, for kernels that make it themselves: `In` of csrc/common.cuh."""

from __future__ import annotations

import ctypes

from attrs import frozen
from torch import Tensor

ACT_CODES = {"": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
ALIGNMENT = 4
"""Floats of x that are read at a time: rows and their starts are multiples of it."""


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


class In(ctypes.Structure):
    """`In` of csrc/common.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "up", "weight")),
        *((name, ctypes.c_int) for name in ("k", "ldx", "act")),
        ("eps", ctypes.c_float),
    )


def in_of(given: Given) -> In:
    """The argument of a kernel."""
    up, weight = (None if one is None else one.data_ptr() for one in (given.up, given.weight))
    k, ldx = given.x.shape[1], given.x.stride(0)
    return In(given.x.data_ptr(), up, weight, k, ldx, ACT_CODES[given.act], given.eps)


__all__ = ["ACT_CODES", "ALIGNMENT", "Given", "In", "in_of"]
