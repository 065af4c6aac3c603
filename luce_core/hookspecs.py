"""Every hook, in the order a start-up reaches them: the table of contents of the system.

`register` hooks return declarations, `extend` returns patches, `check` returns problems, the last three
observe. No hook creates anything: a declaration names a factory ("module:callable"), the plan names the
declaration, and compose calls the factory once with a typed context. So installation order never decides
anything, and a module of hooks imports neither torch nor triton. Hooks run at start-up and at request
boundaries, never per token.

A plugin implements what it needs in one module, which its entry point in group `luce_core.plugins` names:

    from luce_core.contracts import API, ArchSpec, PluginInfo
    from luce_core.hookspecs import hookimpl

    @hookimpl
    def luce_plugin_info() -> PluginInfo:
        return PluginInfo(name="glimmer", api=API)

    @hookimpl
    def luce_register_archs() -> list[ArchSpec]:
        return [ArchSpec(("glimmer",), "luce_glimmer.describe:describe", "luce_glimmer.network:build")]
"""

# Specifications have no bodies: pluggy reads their names and arguments and never calls them.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from luce_core.contracts import (
        ArchSpec,
        BackendPlan,
        CatalogEntry,
        CommandSpec,
        DeviceInfo,
        OpLayer,
        PartSpec,
        PlanPatch,
        PluginInfo,
        Problem,
        Profile,
        QuantFormat,
        RequestRecord,
    )
    from luce_core.pipeline import Pipeline

PROJECT = "luce_core"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as the implementation of the hook it is named after."""


# --- discover


@hookspec
def luce_plugin_info() -> PluginInfo:
    """Who the plugin is: name, API number, options model, order, conflicts. The only mandatory hook.

    Called first, once. A name other than the entry point's, or another API number, keeps the plugin out.
    """


@hookspec
def luce_register_devices(options: Any) -> Sequence[DeviceInfo]:
    """The devices this hardware plugin sees, with memory, bandwidth, feature tags and links.

    options: the plugin's own, validated; None where it has none or nobody has read any.

    Looks, but creates no context on any of them: `luce-core devices` must not take memory from a busy card.
    """


@hookspec
def luce_register_archs() -> Sequence[ArchSpec]:
    """Model architectures: the `general.architecture` values served, how to describe and build one."""


@hookspec
def luce_register_ops() -> Sequence[OpLayer]:
    """Layers of ops to lay over the reference ops of a model, each with the device features it needs.

    A layer is chosen by name in the plan field `execution.op_layers`: a plugin proposes its own there with
    `luce_extend_plan`.
    """


@hookspec
def luce_register_quants() -> Sequence[QuantFormat]:
    """Quantized block formats beyond those the core reads: GGUF type id, block layout, dequantization."""


@hookspec
def luce_register_drafters() -> Sequence[PartSpec]:
    """Drafters: sources of candidate tokens. Every spec has kind "drafter"."""


@hookspec
def luce_register_schedulers() -> Sequence[PartSpec]:
    """Schedulers: who runs how many rows in the next step. Every spec has kind "scheduler"."""


@hookspec
def luce_register_parts() -> Sequence[PartSpec]:
    """The other kinds of parts: executor, reducer, residency, experts, encoder, chat."""


@hookspec
def luce_register_catalog() -> Sequence[CatalogEntry | Profile]:
    """Models `luce-core pull` resolves, and named launch profiles. Defaults only: explicit choices win."""


@hookspec
def luce_register_commands() -> Sequence[CommandSpec]:
    """Commands added to `luce-core`; imported when they are run."""


# --- plan


@hookspec
def luce_extend_plan(plan: BackendPlan, devices: Sequence[DeviceInfo]) -> Sequence[PlanPatch]:
    """Wishes for fields of the plan, each with its reason; an empty sequence to stay out.

    plan: as it stands, patches of the plugins named in `after` already applied. devices: all that were
    found. A field the user set is never patched: the wish becomes a note. Pure: allocates nothing, touches
    no device.

    Field "models" takes a `ModelRequest`, or a tuple of them: models beside the target, each for one part of
    the plan, which finds them loaded in its context. There the wishes of all plugins add up.
    """


@hookspec
def luce_check_plan(plan: BackendPlan) -> Sequence[Problem]:
    """What does not fit in the finished plan, each problem with both sides and the way out. Pure."""


# --- run: observation; an exception is logged and fails nothing


@hookspec
def luce_engine_started(pipeline: Pipeline) -> None:
    """The engine accepts requests from now on. Start-up thread of the engine's process."""


@hookspec
def luce_engine_stopping(pipeline: Pipeline) -> None:
    """No new requests; running ones have drained or will be cancelled. The parts are still alive. In the
    engine's process; not called when it is killed.
    """


@hookspec
def luce_request_finished(record: RequestRecord) -> None:
    """A request ended, on any path, exactly once. Must return quickly: the next record waits for it. In the
    server's process, which is not the engine's unless `--no-engine-process` says so.
    """
