"""Commands of `luce-core` over named modules of hooks, in the test's own process."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

from luce_core.cli.main import root
from luce_core.cli.session import Session
from luce_core.contracts import DeviceInfo, Equivalence, OpImpl, OpLayer
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin

MEMORY = 1 << 40
DEVICE = DeviceInfo("cpu", "a large CPU", MEMORY, 100e9, frozenset({"cpu"}), provenance="made up")
PACKS = OpLayer("packs", (OpImpl("pack_linear", "nowhere:f"),), Equivalence.ROUNDING, frozenset({"cpu"}))
"""Keeps weights as the file has them; nothing can be loaded with it."""


def run_command(*argv: object, hooks: Sequence[str], rig: bool = False) -> str:
    """What the command prints; errors are raised. hooks: the plugins there are.

    rig: and one more, with a device of a terabyte and an op layer that is chosen and packs weights: enough
    to plan with.
    """
    modules = [import_module(name) for name in hooks]
    words = [str(word) for word in argv]
    if rig:
        modules.append(make_plugin("rig", luce_register_devices=[DEVICE], luce_register_ops=[PACKS]))
        words += ["--op-layer", PACKS.name]
    session = Session(tuple(words), {}, Path.cwd())
    registry = from_modules(modules)
    session.make_registry = lambda: registry
    out = io.StringIO()
    with redirect_stdout(out):
        root().main(words, prog_name="luce-core", standalone_mode=False, obj=session)
    return out.getvalue()
