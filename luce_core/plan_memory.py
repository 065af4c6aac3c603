"""Where every byte of a plan goes, how much context fits, what bandwidth allows. Torch-free arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, lcm

from attrs import Factory, evolve, frozen

from luce_core.cache.host_room import pinned_bytes
from luce_core.cache.layout import (
    block_bytes,
    field_bytes,
    log_bytes,
    needs_checkpoints,
    slot_bytes,
    state_bytes,
    token_bytes,
    window_bytes,
)
from luce_core.contracts import (
    SCORE_LOGITS_BYTES,
    BackendPlan,
    Claim,
    DeviceInfo,
    Group,
    ModelSpec,
    OpLayer,
    StateLayout,
    StateSizes,
    StepBytes,
    StoredSize,
)
from luce_core.contracts.staged import padded_rows
from luce_core.errors import PluginError
from luce_core.gguf.rows import ROW_CACHE_BYTES
from luce_core.registry import guarded, resolve

MEMORY_SHARE = 0.85
"""Of a device's memory, what a plan uses unless told otherwise; the rest is for other programs."""

MIN_CONTEXT_TOKENS = 256
"""Less than this is not offered as an automatic context: no chat fits into it."""

CHECKPOINTS = "checkpoints"
ON_THEIR_WAY = "checkpoints on their way"
SWAPPED = "state that gave way"
"""Owners of claims on host memory."""

MEMORY_SIZES = tuple(size << 30 for size in (8, 12, 16, 24, 32, 48, 80, 128))
"""Of devices people have."""

SPARE_BLOCKS = 1
"""Per sequence and group: the private copy of a shared block that is being written to."""

ACTIVATION_VECTORS = 64
"""f32 vectors of width `hidden` a step needs per row: residual, projections, gate and up, attention scores.

Measured with the reference ops, which keep most: 58 (SmolLM2 135M, Q4_1, 512 rows at depth 1200, 2-core Xeon,
resident memory sampled every 2 ms). An op layer may say otherwise.
"""

SAMPLED_COPIES = 2
"""Of the logits of held rows, beside them: processed, and the ids that may be picked."""


@frozen
class Demand:
    """What a plan wants from one device, before it is known whether it fits."""

    models: Mapping[str, ModelSpec]
    """By name in the plan, the target first."""
    weight_bytes: Mapping[str, int]
    row_budget: int
    max_sequences: int
    max_held_rows: int
    sampled_rows: int
    """Of a sequence, those whose logits a step holds: one, and its candidates."""
    context: int
    """0 = as much as fits, at most what the target was trained for."""
    cache_bytes: int
    """0 = as needed."""
    checkpoint_bytes: int
    block_tokens: int
    k_type: str
    v_type: str
    step: StepBytes
    """Of the model whose steps take most."""
    drafters: Mapping[str, StateLayout] = Factory(dict)
    """State of drafters beside their models', by drafter."""
    swap_bytes: int = 0
    """Host memory for sequences that gave way."""
    encoders: Mapping[str, int] = Factory(dict)
    """Bytes encoding one image takes, by the encoder's model."""
    scratch: Mapping[str, int] = Factory(dict)
    """Bytes that op layers and parts hold on the device whatever the model, by owner."""

    @property
    def layouts(self) -> dict[str, StateLayout]:
        """All state, by owner, the target's first."""
        return {**{name: spec.layout for name, spec in self.models.items()}, **self.drafters}

    @property
    def target(self) -> ModelSpec:
        """The model whose context it is about."""
        return next(iter(self.models.values()))


@frozen
class Fit:
    """A demand that was met, or the most of it that could be."""

    context: int
    sizes: StateSizes
    claims: tuple[Claim, ...]
    reason: str
    """Why the context is what it is."""
    short_bytes: int = 0
    """What is missing on the device for one sequence of that context; 0 = it fits."""
    cache_limited: bool = False
    """Whether `cache_bytes`, and not the device, is what is too small."""


def strides_block(block_tokens: int, groups: Sequence[Group]) -> int:
    """`block_tokens` raised to a multiple of every group's stride."""
    unit = lcm(*(group.stride for group in groups))
    return -(-block_tokens // unit) * unit


def weight_bytes(spec: ModelSpec, layers: Sequence[OpLayer]) -> tuple[int, str]:
    """Bytes of the weights in memory, and why: as in the file where a layer packs them, else f32."""
    packing = [layer for layer in layers if any(impl.op == "pack_linear" for impl in layer.ops)]
    left = _left_out(spec)
    without = "; without the MTP block, which no drafter runs" if left.num_bytes else ""
    if packing:
        last = packing[-1]
        share = _share(spec, last)
        more = f", {abs(share - 1):.1%} {'more' if share > 1 else 'less'}" if share != 1.0 else ""
        why = f"as in the file{more}; op layer {last.name} keeps the quantized bytes{without}"
        return ceil(share * (spec.weight_bytes - left.num_bytes)), why
    why = f"float32; the reference ops dequantize every weight{without}"
    return 4 * (spec.parameters - left.parameters), why


def _share(spec: ModelSpec, layer: OpLayer) -> float:
    """Bytes the layer keeps per byte of the file, over all weights."""
    total = sum(spec.rows_bytes.values())
    if not layer.kept or not total:
        return 1.0
    subject = f"Op layer {layer.name!r}: what it keeps, {layer.kept!r},"
    kept: Callable[[str, int], float] = resolve(layer.kept, subject)
    shares: dict[tuple[str, int], float] = {
        rows: guarded(subject, partial(kept, *rows)) for rows in spec.rows_bytes
    }
    return sum(share * spec.rows_bytes[rows] for rows, share in shares.items()) / total


def step_bytes(spec: ModelSpec, layers: Sequence[OpLayer], rows: int) -> StepBytes:
    """What a step of so many rows takes: what the layer says that needs most, else the reference's."""
    found = [_stated(layer, spec, rows) for layer in layers if layer.activations]
    return max(found, key=lambda one: one.working + one.replayed, default=reference_step(spec, rows))


def reference_step(spec: ModelSpec, rows: int) -> StepBytes:
    """Of the reference ops."""
    return StepBytes(4 * ACTIVATION_VECTORS * spec.hidden * rows)


def _stated(layer: OpLayer, spec: ModelSpec, rows: int) -> StepBytes:
    subject = f"Op layer {layer.name!r}: the activations of a step, {layer.activations!r},"
    function = resolve(layer.activations, subject)
    stated = guarded(subject, lambda: function(spec, rows))
    if not isinstance(stated, StepBytes):
        raise PluginError(f"{subject} returned {stated!r}, wanted StepBytes.")
    return stated


def _left_out(spec: ModelSpec) -> StoredSize:
    """Weights that nothing loads."""
    return StoredSize(0, 0) if spec.runs_nextn or spec.nextn_size is None else spec.nextn_size


def fit(demand: Demand, device: DeviceInfo, limit_bytes: int) -> Fit:
    """The largest state that meets the demand within `limit_bytes` of the device.

    First one sequence's context is made to fit, shortening it only if it is automatic; then as many full
    contexts as there is memory for, at most `max_sequences`.
    """
    fixed = _fixed_claims(demand, device)
    room = limit_bytes - sum(claim.num_bytes for claim in fixed if claim.device == device.id)
    context = demand.context or demand.target.context
    reason = "as trained" if not demand.context else ""
    block, other = _block_cost(demand), _other_bytes(demand, context)
    pages_room = _pages_room(demand, room, context)
    if not demand.context and _blocks(demand, context) * block > pages_room:
        fitting = _longest(demand, room)
        if fitting >= min(MIN_CONTEXT_TOKENS, context):
            limited = "--cache-bytes" if demand.cache_bytes and pages_room < room - other else device.id
            reason = f"what fits {limited}; the model was trained for {context}"
            context = fitting
            other, pages_room = _other_bytes(demand, context), _pages_room(demand, room, context)
    one = _blocks(demand, context)
    short = max(0, one * block - pages_room)
    full_blocks = max(one, min(demand.max_sequences * one, pages_room // block if block else one))
    sizes = _sizes(demand, context, full_blocks)
    claims = (*fixed, *_state_claims(demand, device, sizes, full_blocks - one))
    in_cache = bool(demand.cache_bytes) and pages_room < room - other
    return Fit(context, sizes, claims, reason, short, in_cache)


def _pages_room(demand: Demand, room: int, context: int) -> int:
    """Of `room`, what is left for groups without a window when one sequence has that context."""
    left = room - _other_bytes(demand, context)
    if demand.cache_bytes:
        left = min(left, demand.cache_bytes - _window_bytes(demand, context))
    return left


def _longest(demand: Demand, room: int) -> int:
    """The longest context that fits, in whole blocks; what windows take grows with it too. 0 = none does."""
    block = _block_cost(demand)
    low, high = 0, demand.target.context // demand.block_tokens
    while low < high:
        middle = (low + high + 1) // 2
        context = middle * demand.block_tokens
        if _blocks(demand, context) * block <= _pages_room(demand, room, context):
            low = middle
        else:
            high = middle - 1
    return low * demand.block_tokens


def _fixed_claims(demand: Demand, device: DeviceInfo) -> list[Claim]:
    """What does not depend on the context."""
    rows = demand.row_budget
    vocab = max(spec.vocab for spec in demand.models.values())
    # Every sequence has as many rows as the one with most, filled up: not bounded by those of a step.
    held = 4 * vocab * demand.max_sequences * padded_rows(demand.sampled_rows)
    held = min(held, 4 * vocab * rows) if demand.sampled_rows == 1 else held
    scored = min(max(SCORE_LOGITS_BYTES, 4 * vocab), 4 * vocab * rows)
    # Models run one after another, and rows are sampled or scored when their activations are gone.
    working = max(demand.step.working, SAMPLED_COPIES * held, 2 * scored)
    marks = 4 * vocab * demand.max_sequences
    claims = [
        Claim(f"weights of {name}", device.id, "weights", size, size)
        for name, size in demand.weight_bytes.items()
    ]
    workspace = {
        "activations of a step": working,
        "activations of steps kept to run again": demand.step.replayed,
        "logits of a step": held,
        "marks and biases of texts": 2 * marks,
    }
    claims += [Claim(name, device.id, "workspace", size, size) for name, size in workspace.items() if size]
    claims += [
        Claim(f"images through {name}", device.id, "workspace", size, size)
        for name, size in demand.encoders.items()
    ]
    claims += [Claim(name, device.id, "workspace", size, size) for name, size in demand.scratch.items()]
    if device.driver_bytes:
        taken = device.driver_bytes
        claims.append(Claim(f"driver of {device.id}", device.id, "workspace", taken, taken))
    host = device.id if device.id == "cpu" else "host"  # on the CPU the host's memory is the device's
    for name, spec in demand.models.items():
        if spec.stored:
            kept = ROW_CACHE_BYTES * len(spec.stored)
            claims.append(Claim(f"rows of {name} read from its file", host, "cache", kept, kept))
    if any(needs_checkpoints(layout) for layout in demand.layouts.values()):
        claims.append(Claim(CHECKPOINTS, "host", "cache", demand.checkpoint_bytes, 0))
    pinned = 0 if device.id == "cpu" else _pinned_bytes(demand)
    if pinned:
        claims.append(Claim(ON_THEIR_WAY, "host", "workspace", pinned, pinned))
    if demand.swap_bytes:
        claims.append(Claim(SWAPPED, host, "cache", demand.swap_bytes, 0))
    return claims


def _pinned_bytes(demand: Demand) -> int:
    """What copies of slots lie in until they are in ordinary memory."""
    sizes = _blank(demand)
    return pinned_bytes(
        [field_bytes(slot.state, sizes) for layout in demand.layouts.values() for slot in layout.slots]
    )


def _state_claims(demand: Demand, device: DeviceInfo, sizes: StateSizes, spare: int) -> list[Claim]:
    """One line per owner. spare: blocks beyond one full context."""
    claims = []
    for name, layout in demand.layouts.items():
        state = state_bytes(name, layout, sizes)
        floor = state - spare * sum(block_bytes(layout, group.name, sizes) for group in _full(layout))
        if state or name in demand.models:
            claims.append(Claim(f"state of {name}", device.id, "state", state, floor))
    return claims


def _full(layout: StateLayout) -> list[Group]:
    return [group for group in layout.groups if group.window is None]


def _windowed(layout: StateLayout) -> list[Group]:
    return [group for group in layout.groups if group.window is not None]


def _blank(demand: Demand) -> StateSizes:
    return StateSizes(
        demand.block_tokens,
        {},
        demand.max_sequences,
        demand.max_held_rows,
        demand.k_type,
        demand.v_type,
    )


def _block_cost(demand: Demand) -> int:
    """Bytes of one block of every group without a window, over all models."""
    sizes = _blank(demand)
    return sum(
        block_bytes(layout, group.name, sizes)
        for layout in demand.layouts.values()
        for group in _full(layout)
    )


def _blocks(demand: Demand, tokens: int) -> int:
    """Blocks one sequence of `tokens` needs in a group."""
    return -(-(tokens + demand.max_held_rows) // demand.block_tokens) + SPARE_BLOCKS


def _window_blocks(demand: Demand, group: Group, context: int) -> int:
    """Blocks of a windowed group, for all sequences: window and chunk, and as many for checkpoints."""
    assert group.window is not None, group
    one = min(_blocks(demand, group.window + demand.row_budget), _blocks(demand, context))
    return 2 * demand.max_sequences * one


def _window_bytes(demand: Demand, context: int) -> int:
    sizes = _blank(demand)
    return sum(
        _window_blocks(demand, group, context) * block_bytes(layout, group.name, sizes)
        for layout in demand.layouts.values()
        for group in _windowed(layout)
    )


def _other_bytes(demand: Demand, context: int) -> int:
    """State beside the groups without a window."""
    sizes = _blank(demand)
    slots = sum(slot_bytes(layout, sizes) + log_bytes(layout, sizes) for layout in demand.layouts.values())
    return _window_bytes(demand, context) + demand.max_sequences * slots


def _sizes(demand: Demand, context: int, full_blocks: int) -> StateSizes:
    blocks = {
        f"{name}/{group.name}": full_blocks
        if group.window is None
        else _window_blocks(demand, group, context)
        for name, layout in demand.layouts.items()
        for group in layout.groups
    }
    return evolve(_blank(demand), num_blocks=blocks)


@frozen
class StateFacts:
    """What a sequence of a model costs."""

    token_bytes: int
    """Of each token of its context."""
    window_bytes: Mapping[int, int]
    """Window -> of each of its newest tokens."""
    sequence_bytes: int
    """However long it is."""


def state_facts(spec: ModelSpec, k_type: str = "f16", v_type: str = "f16") -> StateFacts:
    """For a cache in these types."""
    block = strides_block(1, spec.layout.groups)
    sizes = StateSizes(block, {}, 1, 1, k_type, v_type)
    return StateFacts(
        token_bytes(spec.layout, sizes), window_bytes(spec.layout, sizes), slot_bytes(spec.layout, sizes)
    )


# --- what if the device had another size


@frozen
class Room:
    """What one sequence would get on a device of some size."""

    memory_bytes: int
    limit_bytes: int
    """Of it, what a plan uses."""
    needed_bytes: int
    """What goes first: weights, workspace, and the state of a sequence that does not grow with it."""
    context: int
    """Tokens; 0 = it does not fit."""
    trained: bool
    """Whether that is all the model was trained for."""
    state_bytes: int
    """Of one sequence with that context."""
    short_bytes: int = 0
    """What is missing for the shortest context offered."""


def rooms(demand: Demand, device: DeviceInfo, memory: Sequence[int]) -> tuple[Room, ...]:
    """What a sequence that is alone would get, by size of the device's memory."""
    alone = evolve(demand, max_sequences=1, context=0)
    return tuple(_room(alone, device, size) for size in memory)


def _room(demand: Demand, device: DeviceInfo, memory_bytes: int) -> Room:
    limit, trained = int(MEMORY_SHARE * memory_bytes), demand.target.context
    found = fit(demand, device, limit)
    if found.short_bytes:
        found = fit(evolve(demand, context=min(MIN_CONTEXT_TOKENS, trained)), device, limit)
    own = [claim for claim in found.claims if claim.device == device.id]
    state = sum(claim.num_bytes for claim in own if claim.kind == "state")
    grows = _blocks(demand, found.context) * _block_cost(demand)
    return Room(
        memory_bytes=memory_bytes,
        limit_bytes=limit,
        needed_bytes=sum(claim.num_bytes for claim in own) - grows,
        context=0 if found.short_bytes else found.context,
        trained=found.context == trained,
        state_bytes=state,
        short_bytes=found.short_bytes,
    )


# --- what bandwidth allows


@frozen
class Roofline:
    """An upper bound on plain decoding of one sequence: memory read once per token, nothing else counted."""

    device: str
    bandwidth_bytes_s: float
    provenance: str
    weight_bytes: int
    depth: int
    state_bytes: int
    """State read (slots also written) per token with `depth` tokens before it."""

    @property
    def tokens_s(self) -> float:
        """Tokens per second."""
        return self.bandwidth_bytes_s / max(1, self.weight_bytes + self.state_bytes)


@frozen
class PromptBound:
    """An upper bound on prompts: the products of weights with every row, nothing else counted."""

    device: str
    flops_s: float
    """0: unknown."""
    provenance: str
    parameters: int

    @property
    def tokens_s(self) -> float:
        """Tokens per second; 0: unknown."""
        return self.flops_s / (2 * max(1, self.parameters))


def prompt_bound(plan: BackendPlan) -> PromptBound:
    """The bound for the target of a plan."""
    model = plan.models[0]
    device = next(item for item in plan.devices if item.id == model.layer_device[0])
    provenance = device.flops_provenance or "stated by its plugin"
    return PromptBound(device.id, device.flops_s, provenance, model.spec.prompt_parameters)


def roofline(plan: BackendPlan, depth: int) -> Roofline:
    """The bound for the target of a plan at a depth of context."""
    model = plan.models[0]
    spec, sizes = model.spec, plan.values["state.sizes"]
    device = next(item for item in plan.devices if item.id == model.layer_device[0])
    in_file = spec.weight_bytes - _left_out(spec).num_bytes
    scale = plan.number("memory.weight_bytes") / in_file if in_file else 1.0
    pages = sum(
        min(depth, group.window or depth) * block_bytes(spec.layout, group.name, sizes) // sizes.block_tokens
        for group in spec.layout.groups
    )
    return Roofline(
        device.id,
        device.bandwidth_bytes_s,
        device.provenance or "stated by its plugin",
        int(spec.active_bytes * scale),
        depth,
        pages + 2 * slot_bytes(spec.layout, sizes),
    )
