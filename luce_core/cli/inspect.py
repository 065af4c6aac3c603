"""`luce-core inspect FILE`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from luce_core.cli.console import console, print_json, say, table
from luce_core.cli.flags import ModelName
from luce_core.cli.session import Session
from luce_core.contracts import CacheOptions, ModelSpec
from luce_core.errors import LuceError, PluginError
from luce_core.option_fields import show_size
from luce_core.registry import guarded, resolve

if TYPE_CHECKING:
    from luce_core.gguf import GgufHeader, Summary
    from luce_core.registry import Registry

HELP = """Show metadata, tensors, sizes and chat template of a GGUF file, and which plugin serves it.

FILE may be a name of the catalogue."""
TEMPLATE_KEY = "tokenizer.chat_template"
SHOWN_TENSORS = 24
TEMPLATE_CHARS = 400


def make(session: Session) -> click.Command:
    """The command."""

    @click.command("inspect", help=HELP)
    @click.argument("file", type=ModelName())
    @click.option("--tensors", is_flag=True, help="List every tensor.")
    @click.option("--template", is_flag=True, help="Print the chat template and nothing else.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    def inspect(file: str, tensors: bool, template: bool, as_json: bool) -> None:
        from luce_core.gguf import read_header, summarize
        from luce_core.plan import block_formats

        path = session.model_path(session.given, file)
        header = read_header(path, block_formats(session.registry))
        if template:
            say(header.str(TEMPLATE_KEY))
        elif as_json:
            print_json(as_data(header, summarize(header), session.registry))
        else:
            _show(header, summarize(header), session.registry, tensors)

    return inspect


def served_by(header: GgufHeader, registry: Registry) -> str:
    """Which plugin serves the file, or what to install."""
    try:
        supplied = registry.arch(header.family)
    except PluginError as error:
        return str(error)
    return f"Architecture {header.family!r} is served by {registry.title(supplied.plugin)}."


def described(header: GgufHeader, registry: Registry) -> ModelSpec | str | None:
    """What its plugin makes of the file: a spec, or why there is none; None without a plugin."""
    try:
        supplied = registry.arch(header.family)
        subject = f"Architecture {header.family!r} of {registry.title(supplied.plugin)}"
        make = resolve(supplied.value.describe, subject)
    except PluginError:
        return None  # `served_by` says so
    try:
        spec: ModelSpec = guarded(subject, lambda: make(header, CacheOptions(0)))
    except LuceError as error:
        return str(error)
    return spec


def model_words(spec: ModelSpec) -> list[str]:
    """The model in numbers: what the plan would begin with."""
    from luce_core.plan_render import state_words, stored_words

    return [
        f"{spec.parameters / 1e6:,.1f} M parameters in {spec.num_layers} layers, trained for "
        f"{spec.context:,} tokens; a decoded token reads {show_size(spec.active_bytes)} of weights.",
        *stored_words(spec),
        state_words(spec, {"cache.k_type": "f16", "cache.v_type": "f16"}),
    ]


def _model_data(found: ModelSpec | str | None) -> dict[str, object] | None:
    from luce_core.plan_memory import state_facts

    if found is None:
        return None
    if isinstance(found, str):
        return {"problem": found}
    facts = state_facts(found)
    return {
        "parameters": found.parameters,
        "weight_bytes": found.weight_bytes,
        "active_bytes": found.active_bytes,
        "stored": {
            name: {"parameters": size.parameters, "bytes": size.num_bytes}
            for name, size in found.stored.items()
        },
        "layers": found.num_layers,
        "context": found.context,
        "vocab": found.vocab,
        "state": {
            "cache_type": "f16",
            "token_bytes": facts.token_bytes,
            "window_bytes": {str(window): size for window, size in facts.window_bytes.items()},
            "sequence_bytes": facts.sequence_bytes,
        },
    }


def as_data(header: GgufHeader, summary: Summary, registry: Registry) -> dict[str, object]:
    """The file for `--json`."""
    return {
        "path": str(header.path),
        "architecture": header.arch,
        "served": bool(registry.declared.get(f"arch.{header.family}")),
        "served_by": served_by(header, registry),
        "model": _model_data(described(header, registry)),
        "gguf_version": header.version,
        "weights": summary.num_weights,
        "bytes": summary.num_bytes,
        "shards": summary.num_shards,
        "metadata": {row.key: row.text for row in summary.metadata},
        "formats": {total.format: total.num_bytes for total in summary.totals},
        "chat_template": header.metadata.get(TEMPLATE_KEY),
        "tensors": [
            {"name": row.name, "format": row.format, "shape": row.shape, "bytes": row.num_bytes}
            for row in summary.tensors
        ],
    }


def _show(header: GgufHeader, summary: Summary, registry: Registry, all_tensors: bool) -> None:
    shards = f" in {summary.num_shards} files" if summary.num_shards > 1 else ""
    say(
        f"{header.path}: GGUF {header.version}, {summary.num_weights / 1e6:.1f} M weights, "
        f"{show_size(summary.num_bytes)}{shards}"
    )
    say(served_by(header, registry))
    found = described(header, registry)
    for line in model_words(found) if isinstance(found, ModelSpec) else [found] if found else []:
        say(line)
    output = console()
    rows = [(row.key, row.kind, row.text) for row in summary.metadata if row.key != TEMPLATE_KEY]
    output.print(table(["key", "type", "value"], rows))
    totals = [
        (
            total.format,
            str(total.num_tensors),
            f"{total.num_weights / 1e6:.1f} M",
            show_size(total.num_bytes),
            f"{total.bits_per_weight:.2f}",
        )
        for total in summary.totals
    ]
    numbers = ("tensors", "weights", "size", "bits per weight")
    output.print(table(["format", *numbers], totals, right=numbers))
    shown = summary.tensors if all_tensors else summary.tensors[:SHOWN_TENSORS]
    tensors = [
        (row.name, row.format, " × ".join(str(size) for size in row.shape), show_size(row.num_bytes))
        for row in shown
    ]
    output.print(table(["tensor", "format", "shape, outermost first", "size"], tensors, right=("size",)))
    if len(shown) < len(summary.tensors):
        say(f"... and {len(summary.tensors) - len(shown)} tensors more; --tensors lists all.")
    _show_template(header)


def _show_template(header: GgufHeader) -> None:
    if TEMPLATE_KEY not in header.metadata:
        say("Chat template: none in the file; a fallback that fits the vocabulary is used.")
        return
    text = header.str(TEMPLATE_KEY)
    printable = "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
    say(f"Chat template ({len(text)} characters; --template prints it whole):")
    say(printable[:TEMPLATE_CHARS] + ("..." if len(printable) > TEMPLATE_CHARS else ""))
