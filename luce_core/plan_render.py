"""A plan in words: what was composed, from whom, where every byte goes, and why something stayed out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from luce_core.contracts import BackendPlan, ModelSpec, PartSpec, StateSizes
from luce_core.op_layers import gone
from luce_core.option_fields import show_size
from luce_core.plan import suppliers
from luce_core.plan_fields import MODELS, words
from luce_core.plan_layers import OFF
from luce_core.plan_memory import Room, prompt_bound, roofline, state_facts
from luce_core.registry import CORE, Registry, Supplied


def render_plan(plan: BackendPlan, registry: Registry, *, verbose: bool = True) -> RenderableType:
    """The plan as tables. verbose: with every field and its provenance; the start-up banner goes without."""
    spec = plan.models[0].spec
    parts: list[RenderableType] = [_model_line(plan), *map(Text, stored_words(spec))]
    parts.append(Text(state_words(spec, plan.values)))
    parts += _companion_lines(plan, registry)
    parts += [_parts_table(plan, registry), _memory_table(plan)]
    parts += [Text(line) for line in roofline_lines(plan)]
    if verbose:
        parts.append(_fields_table(plan))
    problems = [f"{problem.message} {problem.fix}" for problem in plan.problems]
    notes = [*_off_words(plan, registry), *problems, *stayed_out(plan, registry)]
    if notes:
        parts.append(Text("Stayed out, and what to know:", style="bold"))
        parts += [Text(f"  - {note}") for note in notes]
    return Group(*parts)


def _model_line(plan: BackendPlan) -> Text:
    model = plan.models[0]
    spec = model.spec
    return Text(
        f"{model.path}: {spec.arch}, {spec.parameters / 1e6:,.1f} M parameters, "
        f"{show_size(spec.weight_bytes)}, on {model.layer_device[0]}, "
        f"context {plan.number('context'):,} tokens{', with its MTP block' if spec.runs_nextn else ''}"
    )


def stored_words(spec: ModelSpec) -> list[str]:
    """What stays in the file, in a sentence; nothing where nothing does."""
    if not spec.stored:
        return []
    parameters = sum(size.parameters for size in spec.stored.values())
    num_bytes = sum(size.num_bytes for size in spec.stored.values())
    tables = "one table" if len(spec.stored) == 1 else f"{len(spec.stored)} tables"
    return [
        f"{parameters / 1e6:,.1f} M parameters more in {tables} stay in the file, {show_size(num_bytes)}, "
        "and are read by row."
    ]


def state_words(spec: ModelSpec, values: Mapping[str, Any]) -> str:
    """What a sequence costs. values: fields of the plan, for the types of the cache."""
    facts = state_facts(spec, values["cache.k_type"], values["cache.v_type"])
    words = [f"{show_size(facts.token_bytes)} per token"] if facts.token_bytes else []
    words += [
        f"{show_size(size)} per token of the newest {window:,}" for window, size in facts.window_bytes.items()
    ]
    words += [f"{show_size(facts.sequence_bytes)} that does not grow"] if facts.sequence_bytes else []
    types = " and ".join(dict.fromkeys((values["cache.k_type"], values["cache.v_type"])))
    return f"State of a sequence, cache in {types}: {', '.join(words) or 'none'}."


def rooms_table(rooms: Sequence[Room], device: str) -> Table:
    """What fits devices of several sizes."""
    columns = ("memory", "used", "fixed", "context", "state")
    table = _table(f"What one sequence gets, had {device} so much memory", columns)
    for room in rooms:
        sizes = [show_size(size) for size in (room.memory_bytes, room.limit_bytes, room.needed_bytes)]
        if room.short_bytes:
            table.add_row(*sizes, f"does not fit, short of {show_size(room.short_bytes)}", "")
        else:
            all_of_it = " (all it was trained for)" if room.trained else ""
            table.add_row(*sizes, f"{room.context:,}{all_of_it}", show_size(room.state_bytes))
    return table


def _companion_lines(plan: BackendPlan, registry: Registry) -> list[Text]:
    """The models beside the target: whose they are, and who asked for them."""
    lines = []
    for model in plan.models[1:]:
        kind, _, part = model.part.partition(".")
        origin = plan.origin[f"{MODELS}.{model.name}"]
        lines.append(
            Text(
                f"{model.name}, {model.role} model of {kind} {part} ({origin.reason}; "
                f"{registry.title(origin.by)}): {model.path}: {model.spec.arch}, "
                f"{model.spec.parameters / 1e6:,.1f} M parameters, {show_size(model.spec.weight_bytes)}, "
                f"on {model.layer_device[0]}"
            )
        )
    return lines


def _parts_table(plan: BackendPlan, registry: Registry) -> Table:
    table = _table("Parts", ("kind", "name", "from", "answers", "what it does"))
    for key, supplied in suppliers(plan, registry).items():
        kind, _, name = key.partition(".")
        table.add_row(kind, name, _source(supplied, registry), *_about(supplied.value))
    return table


def _source(supplied: Supplied[Any], registry: Registry) -> str:
    record = registry.record(supplied.plugin)
    return f"{record.distribution} {record.version}" if record.distribution else record.name


def _about(value: Any) -> tuple[str, str]:
    """Equivalence and summary of a declaration, where it has them."""
    equivalence = getattr(value, "equivalence", None)
    return (equivalence.value if equivalence else "the model itself", getattr(value, "summary", ""))


def _memory_table(plan: BackendPlan) -> Table:
    limit = plan.number("memory.limit_bytes")
    device = plan.models[0].layer_device[0]
    columns = ("for", "kind", "where", "bytes", "at least")
    table = _table(f"Memory of {device}, at most {show_size(limit)}", columns)
    for claim in plan.claims:
        sizes = (show_size(claim.num_bytes), show_size(claim.floor_bytes))
        table.add_row(claim.owner, claim.kind, claim.device, *sizes)
    own = [claim for claim in plan.claims if claim.device == device]
    total, floor = sum(c.num_bytes for c in own), sum(c.floor_bytes for c in own)
    table.add_row("total", "", device, show_size(total), show_size(floor), style="bold")
    return table


def roofline_lines(plan: BackendPlan) -> list[str]:
    """The roofline, with every figure it follows from."""
    lines = []
    for depth in (0, plan.number("context")):
        line = roofline(plan, depth)
        if line.bandwidth_bytes_s <= 0:
            what = f"that of {line.device} is {line.provenance or 'unknown'}"
            lines.append(f"What memory bandwidth allows is not known: {what}.")
            break
        lines.append(
            f"Memory bandwidth allows {line.tokens_s:,.0f} tokens/s for one sequence {depth:,} tokens deep: "
            f"{show_size(line.weight_bytes)} of weights and {show_size(line.state_bytes)} of state per token "
            f"at {line.bandwidth_bytes_s / 1e9:,.1f} GB/s of {line.device} ({line.provenance})."
        )
    bound = prompt_bound(plan)
    if bound.flops_s > 0:
        lines.append(
            f"Arithmetic allows {bound.tokens_s:,.0f} tokens/s of prompts, attention not counted: each meets "
            f"{bound.parameters / 1e9:,.2f} G weights at {bound.flops_s / 1e12:,.0f} TFLOP/s of "
            f"{bound.device} ({bound.provenance})."
        )
    return lines


def _fields_table(plan: BackendPlan) -> Table:
    table = _table("Fields", ("field", "value", "set by", "why"))
    for name, value in sorted(plan.values.items()):
        origin = plan.origin[name]
        by = {"default": "default", "plugin": f"plugin {origin.by}"}.get(origin.source, origin.by)
        table.add_row(name, _shown(name, value), by, origin.reason)
    return table


def _shown(name: str, value: Any) -> str:
    if isinstance(value, StateSizes):
        blocks = ", ".join(f"{group}: {count} blocks" for group, count in value.num_blocks.items())
        return f"{value.num_slots} sequences; {blocks or 'no blocks'} of {value.block_tokens} tokens"
    return show_size(value) if name.endswith("bytes") else words(value)


def _off_words(plan: BackendPlan, registry: Registry) -> list[str]:
    """One sentence for each op layer that some ops were taken from."""
    sentences = []
    for name in dict.fromkeys(layer for model in plan.models for layer in model.op_layers):
        dropped = gone(registry.op_layer(name).value, plan.values[OFF])
        if dropped:
            ops = ", ".join(sorted(dropped))
            by = plan.origin[OFF].by
            sentences.append(f"Op layer {name!r} leaves {ops} to what lies below: {by} switches them off.")
    return sentences


def stayed_out(plan: BackendPlan, registry: Registry) -> list[str]:
    """One sentence for each plugin that has no part in this plan."""
    used = {supplied.plugin for supplied in suppliers(plan, registry).values()}
    used |= {origin.by for origin in plan.origin.values() if origin.source == "plugin"}
    sentences = []
    for record in registry.records:
        if record.status != "loaded":
            sentences.append(f"P{record.title[1:]} is {record.status}: {record.reason}.")
        elif record.name not in used and record.name != CORE:
            offers = _offers(record.name, registry)
            sentences.append(f"P{record.title[1:]} has no part in this plan{offers}.")
    return [*sentences, *registry.notices]


def _offers(plugin: str, registry: Registry) -> str:
    keys = [
        f"--{key.partition('.')[0]} {item.value.name}"
        for key, supplied in registry.declared.items()
        for item in supplied
        if item.plugin == plugin and isinstance(item.value, PartSpec)
    ]
    return f"; it offers {', '.join(sorted(keys))}" if keys else ""


def _table(title: str, columns: Iterable[str]) -> Table:
    headers: Sequence[str] = list(columns)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="right" if header in ("bytes", "at least") else "left")
    return table
