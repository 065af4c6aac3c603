"""Tensor ops of the standard architectures: one torch reference each, and how layers are laid over them."""

from luce_core.ops.namespace import KNOWN_OPS, Layer, OpsNamespace, build_ops
from luce_core.ops.record import Recorder, check_program, compile_program, replay, rewrite, used_values

__all__ = [
    "KNOWN_OPS",
    "Layer",
    "OpsNamespace",
    "Recorder",
    "build_ops",
    "check_program",
    "compile_program",
    "replay",
    "rewrite",
    "used_values",
]
