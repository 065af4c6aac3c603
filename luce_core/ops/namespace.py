"""The frozen namespace of ops one loaded model runs with: references, with the plan's layers laid over them.

An implementation is a plain function whose first argument is the namespace, `fn(ops, ...)`, so that a coarse
reference written with fine ops uses whatever a layer put in their place.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from luce_core.contracts import Ops
from luce_core.errors import EngineError, PluginError

Implementation = Callable[..., Any]
Layer = Mapping[str, Implementation]

ARCH_OPS = frozenset(name for name in vars(Ops) if not name.startswith("_"))
"""Those architectures call: the coarse ones and some of the fine."""
FINE_OPS = frozenset(
    {
        *("rms", "linear", "add", "mul", "scale", "act", "act_mul", "softcap", "rope", "head_rms"),
        *("append", "attend", "conv_window", "l2norm", "delta_scan", "delta_fold", "topk", "moe_linear"),
        *("pool_softmax", "sinkhorn", "mean", "expand", "gather", "table_rows", "cat"),
    }
)
WEIGHT_OPS = frozenset({"dequantize", "pack_linear", "pack_group"})
STATE_OPS = frozenset({"commit_pages", "commit_slots", "commit_slot", "write_log", "shift"})
ENGINE_OPS = frozenset(
    {
        *("process_logits", "sample", "merge_trees", "tree_from_lattice", "accept"),
        *("commit", "observe", "prompt_logprobs", "logprobs", "newest_tokens", "note_picks"),
    }
)
KNOWN_OPS = ARCH_OPS | FINE_OPS | WEIGHT_OPS | STATE_OPS | ENGINE_OPS


class OpsNamespace:
    """Every op as a bound callable: `ops.rms(x, norm)`. Made by `build_ops`; never changes afterwards."""

    def __init__(self, bound: Mapping[str, Implementation]) -> None:
        for name, implementation in bound.items():
            self.__dict__[name] = partial(implementation, self)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"An ops namespace is frozen; op {name!r} is set by a layer of build_ops.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise EngineError(no_implementation(name, self))

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__

    def __dir__(self) -> list[str]:
        return sorted(self.__dict__)


def build_ops(*layers: Layer, reference: Layer | None = None) -> OpsNamespace:
    """Lay `layers` over the reference ops, later ones over earlier ones.

    A name with a dot, `"cpu.layer"`, is an op private to its layer, for programs that layer rewrites. Any
    other name must be an op of the contracts: a misspelt one raises PluginError.
    """
    if reference is None:
        from luce_core.ops.reference import REFERENCE

        reference = REFERENCE
    merged: dict[str, Implementation] = {}
    for layer in (reference, *layers):
        for name, implementation in layer.items():
            _check_name(name)
            merged[name] = implementation
    return OpsNamespace(merged)


def no_implementation(name: str, ops: OpsNamespace) -> str:
    """The sentence for an op that was called and is not there."""
    if name not in KNOWN_OPS:
        return f"Op {name!r} does not exist. {_closest(name)}Ops of this model: {', '.join(dir(ops))}."
    return (
        f"Op {name!r} has no implementation here: neither the core's reference nor an op layer of this model "
        f"provides it. Choose an op layer that does. Ops of this model: {', '.join(dir(ops))}."
    )


def _check_name(name: str) -> None:
    if name in KNOWN_OPS or "." in name:
        return
    raise PluginError(
        f"An op layer provides op {name!r}, which is unknown. {_closest(name)}"
        f"Known ops: {', '.join(sorted(KNOWN_OPS))}. Ops private to a layer carry a dot: 'layer.op'."
    )


def _closest(name: str) -> str:
    close = difflib.get_close_matches(name, KNOWN_OPS, n=1)
    return f"Did you mean {close[0]!r}? " if close else ""
