"""How many bytes a state layout takes. Torch-free: the plan computes with it, allocation is checked
against it.
"""

from __future__ import annotations

from math import prod

from luce_core.contracts import CODECS, CodedField, Field, StateLayout, StateSizes
from luce_core.errors import PluginError, UsageError

DTYPE_BITS = {"f32": 32, "f16": 16, "bf16": 16, "i64": 64, "i32": 32, "i16": 16, "u8": 8}


def resolve_dtype(dtype: str, sizes: StateSizes) -> str:
    """Types "kv.k" and "kv.v" become what the plan chose; anything else stays."""
    resolved = {"kv.k": sizes.k_type, "kv.v": sizes.v_type}.get(dtype, dtype)
    if resolved not in DTYPE_BITS and resolved not in CODECS:
        known = ", ".join((*DTYPE_BITS, *CODECS))
        raise UsageError(f"Cache type {resolved!r} is unknown. Choose one of {known}.")
    return resolved


def coded(field: Field, sizes: StateSizes) -> CodedField | None:
    """How a field is kept whose type is a codec; None: as numbers."""
    codec = CODECS.get(resolve_dtype(field.dtype, sizes))
    return None if codec is None else CodedField(codec, field.shape[-1])


def stored_shape(field: Field, sizes: StateSizes) -> tuple[int, ...]:
    """Of one field of one entry or slot, as it is allocated."""
    how = coded(field, sizes)
    return field.shape if how is None else (*field.shape[:-1], how.codec.vector_bytes(how.width))


def field_bytes(field: Field, sizes: StateSizes) -> int:
    """Bytes of one field of one entry or slot."""
    bits = DTYPE_BITS.get(resolve_dtype(field.dtype, sizes), 8)
    return prod(stored_shape(field, sizes)) * bits // 8


CODED_FIELDS = frozenset({"k", "v", "latent", "rope"})
"""Fields of one entry per token that `ops.attention` encodes and decodes."""


def misfits(layout: StateLayout, sizes: StateSizes) -> list[str]:
    """What of a layout the types of the cache cannot keep: a clause for each reason, none where all fits."""
    strides = {group.name: group.stride for group in layout.groups}
    found: dict[object, str] = {}
    for pages in layout.pages:
        for name, field in pages.fields.items():
            how, where = coded(field, sizes), f"(field {name!r} of region {pages.name!r})"
            if how is None:
                continue
            kind, codec = how.codec.name, how.codec
            if strides[pages.group] != 1 or name not in CODED_FIELDS:
                found.setdefault(kind, f"{kind} keeps what each token has, not compressed entries {where}")
            elif not codec.fits(how.width):
                wants = f"{kind} keeps vectors of a multiple of {codec.unit} numbers, got {how.width} {where}"
                found.setdefault((kind, how.width), wants)
    for slot in layout.slots:
        if any(coded(field, sizes) for field in (slot.state, *slot.log.values())):
            found.setdefault("slots", f"slots are kept as numbers ({slot.name!r})")
    return list(found.values())


def block_bytes(layout: StateLayout, group: str, sizes: StateSizes) -> int:
    """Bytes one block of `group` takes over all regions."""
    stride = next(item.stride for item in layout.groups if item.name == group)
    entry = sum(field_bytes(f, sizes) for p in layout.pages if p.group == group for f in p.fields.values())
    return entry * (sizes.block_tokens // stride)


def slot_bytes(layout: StateLayout, sizes: StateSizes) -> int:
    """Bytes of the committed slot state of one sequence."""
    return sum(field_bytes(slot.state, sizes) for slot in layout.slots)


def alive_rows(rows: int, period: int, length: int) -> int:
    """How many of the newest rows of a slot are still read after `length` tokens; see `Slot.period`."""
    return rows if period == 1 else rows - period + length % period


def snapshot_bytes(layout: StateLayout, sizes: StateSizes, length: int) -> int:
    """Bytes of what must be kept of the slots of one sequence after `length` tokens."""
    total = 0
    for slot in layout.slots:
        size = field_bytes(slot.state, sizes)
        if slot.period > 1:
            rows = slot.state.shape[0]
            size = size // rows * alive_rows(rows, slot.period, length)
        total += size
    return total


def log_bytes(layout: StateLayout, sizes: StateSizes) -> int:
    """Bytes of the logs of one sequence: of slots, and of regions whose entries take several tokens."""
    strided = {group.name for group in layout.groups if group.stride > 1}
    fields = [field for slot in layout.slots for field in slot.log.values()]
    fields += [field for pages in layout.pages if pages.group in strided for field in pages.fields.values()]
    return sizes.max_held_rows * sum(field_bytes(field, sizes) for field in fields)


def state_bytes(model: str, layout: StateLayout, sizes: StateSizes) -> int:
    """Bytes of everything `layout` allocates for the model called `model`."""
    pages = sum(
        sizes.num_blocks[f"{model}/{group.name}"] * block_bytes(layout, group.name, sizes)
        for group in layout.groups
    )
    return pages + sizes.num_slots * (slot_bytes(layout, sizes) + log_bytes(layout, sizes))


def joined(own: StateLayout, more: StateLayout) -> StateLayout:
    """Both in one. Groups of one name must be the same, names of pages and slots must not."""
    groups = {group.name: group for group in own.groups}
    for group in more.groups:
        if groups.setdefault(group.name, group) != group:
            raise PluginError(
                f"Two layouts of one model have the group {group.name!r}, as {groups[group.name]} and as "
                f"{group}. Report it to the authors of the architecture's plugin."
            )
    names = [*own.names, *more.names]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PluginError(
            f"Two layouts of one model both have {', '.join(map(repr, twice))}. Report it to the authors of "
            "the architecture's plugin."
        )
    return StateLayout(
        tuple(groups.values()), (*own.pages, *more.pages), (*own.slots, *more.slots), own.best_effort
    )


def needs_checkpoints(layout: StateLayout) -> bool:
    """Whether this state can only be restored where a snapshot was made."""
    return bool(layout.slots) or any(group.window is not None for group in layout.groups)


def window_bytes(layout: StateLayout, sizes: StateSizes) -> dict[int, int]:
    """Window -> bytes that each of its tokens takes, over the groups with that window."""
    found: dict[int, int] = {}
    for group in layout.groups:
        if group.window is not None:
            per_token = -(-block_bytes(layout, group.name, sizes) // sizes.block_tokens)
            found[group.window] = found.get(group.window, 0) + per_token
    return found


def token_bytes(layout: StateLayout, sizes: StateSizes) -> int:
    """Bytes one more token of context takes in groups without a window, rounded up."""
    blocks = sum(block_bytes(layout, g.name, sizes) for g in layout.groups if g.window is None)
    return -(-blocks // sizes.block_tokens)
