"""All reference ops in one table; what `build_ops` starts from."""

from __future__ import annotations

from luce_core.ops import attention, coarse, fine, pack, state
from luce_core.ops.namespace import Layer

REFERENCE: Layer = {**pack.OPS, **fine.OPS, **attention.OPS, **coarse.OPS, **state.OPS}
