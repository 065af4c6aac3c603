"""Rows an op leaves ready for the product behind it, and the bounds by which it can: f16 times a power of two
that no number of theirs exceeds, whatever x is. Of n = norm(x), |n| <= sqrt(k) · max |weight|, so no row of W
gives more than its length times as much.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from luce_backend_triton import gated, product
from luce_backend_triton.few_rows import GEMV_ROWS, MMA_ROWS, X_BYTES
from luce_backend_triton.formats import RECORD_COLS
from luce_backend_triton.matrix import Dense, Group, Matrix, Part
from luce_backend_triton.notes import Notes
from luce_backend_triton.product import Rows
from luce_core.contracts import Linear, Norm

MADE = True
"""Whether rows are left ready; otherwise csrc/ready.cu makes them."""
HIGHEST = 32768.0
"""What the bound becomes, half of where f16 ends: for what is rounded on the way."""


@define(eq=False)
class Bounds:
    """Of what the members of a `matrix.Part` without bias give."""

    longest: Tensor
    """f32[members]: the length of the longest row of each."""
    _made: dict[tuple[int, ...], tuple[object, Tensor]] = field(factory=dict)

    def factors(self, place: int, norm: Norm, head: Tensor | None) -> Tensor | None:
        """f32[2], of what member `place` gives of norm(x), or of that times any norm(..) · `head`: what its
        f16 are to be multiplied with, and the inverse. Made once; None: while a graph is captured, which
        would make them in every replay.
        """
        kept, key = (norm.weight, head), (place, id(norm.weight), id(head))
        if key not in self._made:
            if self.longest.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            bound = self.longest[place : place + 1] * _longest(norm.weight)
            bound = bound if head is None else bound * _longest(head)
            factor = _power(bound) / HIGHEST
            self._made[key] = (kept, torch.cat((factor, 1 / factor)))
        return self._made[key][1]


def _longest(weight: Tensor) -> Tensor:
    """Of rows times this, behind a norm."""
    return weight.float().abs().amax() * weight.numel() ** 0.5


def _power(top: Tensor) -> Tensor:
    """A power of two not below it, as csrc/common.cuh has it."""
    exponent = ((top.view(torch.int32) + 0x7FFFFF) >> 23).clamp(min=32)
    return (exponent << 23).view(torch.float32)


def bounded(group: Group) -> Group:
    """With `Part.bounds`. Reads matrices once, but for gate and up alone."""
    return Group(tuple(evolve(part, bounds=_bounds(part)) for part in group.parts))


def _bounds(part: Part) -> Bounds | None:
    matrix = part.matrix
    if not isinstance(matrix, Matrix) or part.bias is not None or part.most is not None:
        return None
    return Bounds(longest_of(matrix, part.members)) if gated.useful(matrix) else None


def longest_of(matrix: Matrix, members: tuple[Linear, ...]) -> Tensor:
    """`Bounds.longest` of rows that lie one member's behind the other's."""
    lengths = product.lengths(matrix).split([member.out_features for member in members])
    return torch.stack([one.amax() for one in lengths])


@frozen(eq=False)
class Known:
    """What a tensor f32[m, n] is: member `place` of W norm(x)."""

    bounds: Bounds
    place: int
    norm: Norm

    def factors(self, head: Tensor | None = None) -> Tensor | None:
        """See `Bounds.factors`."""
        return self.bounds.factors(self.place, self.norm, head)


_known: Notes[Known] = Notes()
known = _known.get
"""What was noted of a tensor."""


def few(m: int) -> bool:
    """Whether so many rows may meet csrc/mma.cu, in one pass over the weights."""
    return MADE and GEMV_ROWS < m <= MMA_ROWS


def note(outputs: tuple[Tensor, ...], part: Part, norm: Norm) -> None:
    """That these are the members' of `part`, of norm(x)."""
    if part.bounds is not None:
        for place, y in enumerate(outputs):
            _known.put(y, Known(part.bounds, place, norm))


@frozen(eq=False)
class Room:
    """Where an op leaves its rows ready too."""

    ready: Tensor
    """u8[blocks, m, X_BYTES]."""
    factors: Tensor
    """`Bounds.factors`."""

    def leave(self, y: Tensor) -> Tensor:
        """-> y f32[m, k], of which `ready` has been made."""
        _beside.put(y, self)
        return y


_beside: Notes[Room] = Notes()


def room(m: int, k: int, of: Callable[[], Tensor | None]) -> Room | None:
    """For rows whose product csrc/mma.cu may make. of: `Bounds.factors`, asked where that is so."""
    factors = of() if few(m) and k % RECORD_COLS == 0 else None
    if factors is None:
        return None
    ready = torch.empty(k // RECORD_COLS, m, X_BYTES, dtype=torch.uint8, device=factors.device)
    return Room(ready, factors)


def ready_for(y: Tensor, packed: Matrix | Dense) -> Room | None:
    """Where y has been left ready for a product with `packed`."""
    found = _beside.get(y)
    fits = isinstance(packed, Matrix) and packed.fmt.scales not in gated.TIMES_32
    return found if fits else None


def rows_of(y: Tensor, packed: Matrix | Dense, flat: Tensor) -> Rows:
    """y, as f32 `flat`, in front of a product with `packed`."""
    room = ready_for(y, packed)
    return Rows(flat) if room is None else Rows(flat, even=True, few={"mma": room.ready})


__all__ = ["Bounds", "Known", "Room", "bounded", "few", "known", "note", "ready_for", "room", "rows_of"]
