"""`luce-core synth`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from luce_core.cli.console import byte_progress, console, print_json, say, table
from luce_core.cli.session import Session
from luce_core.errors import UsageError
from luce_core.option_fields import parse_size, show_size

if TYPE_CHECKING:
    from luce_core.contracts import Geometry

HELP = """Write a model of random weights in the exact size of a published one, to measure before downloading.

GEOMETRY is a name of `luce-core synth --list`. OUT.gguf is the file; in shards,
OUT-00001-of-0000N.gguf and so on beside it.
"""
LISTED = ("mxfp4", "q4_k_m", "q6_k", "q8_0", "bf16", "native")
"""Quantizations whose sizes the table shows; `--json` has all."""
DEFAULT_QUANT = "q4_k_m"


def make(session: Session) -> click.Command:
    """The command."""

    @click.command("synth", help=HELP)
    @click.argument("geometry", required=False)
    @click.argument("out", required=False, metavar="[OUT.gguf]", type=click.Path(path_type=Path))
    @click.option("--list", "listed", is_flag=True, help="List the geometries and their sizes.")
    @click.option("--quant", default=DEFAULT_QUANT, show_default=True, help="Quantization, as files name it.")
    @click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Of the weights.")
    @click.option("--shards", default=1, show_default=True, help="Write so many files of about one size.")
    @click.option("--shard-size", default="", metavar="SIZE", help="Write files of at most this size.")
    @click.option("--header-only", is_flag=True, help="No weights: a file that takes no room on the disk.")
    @click.option("--no-tokenizer", is_flag=True, help="Leave the vocabulary out.")
    @click.option("--force", is_flag=True, help="Overwrite what is there.")
    @click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
    def synth(geometry: str | None, out: Path | None, listed: bool, as_json: bool, **chosen: Any) -> None:
        if listed or as_json:
            _list(session, as_json=as_json)
        elif geometry is None or out is None:
            raise UsageError(
                "A geometry and a file are needed: `luce-core synth qwen3.5-0.8b model.gguf`. "
                "`luce-core synth --list` shows what there is."
            )
        else:
            _write(session, geometry, out, chosen)

    return synth


def _write(session: Session, name: str, out: Path, chosen: dict[str, Any]) -> None:
    from luce_core import synth

    geometry = synth.find(session.registry, name)
    quant = chosen["quant"].lower()
    started = time.monotonic()
    with byte_progress(f"{name} {quant}") as progress:
        paths = synth.write(
            geometry,
            quant,
            out,
            seed=chosen["seed"],
            header_only=chosen["header_only"],
            tokenizer=not chosen["no_tokenizer"],
            shards=chosen["shards"],
            shard_bytes=_size(chosen["shard_size"]),
            overwrite=chosen["force"],
            progress=progress,
        )
    took, num_bytes = time.monotonic() - started, sum(path.stat().st_size for path in paths)
    files = f" in {len(paths)} files" if len(paths) > 1 else ""
    weights = "no weights, " if chosen["header_only"] else ""
    say(f"{paths[0]}: {weights}{show_size(num_bytes)}{files}, {took:.1f} s")


def _size(text: str) -> int:
    try:
        return parse_size(text) if text else 0
    except ValueError as error:
        raise UsageError(f"--shard-size is {text!r}: {error}.") from error


def _list(session: Session, *, as_json: bool) -> None:
    from luce_core import synth

    found = synth.geometries(session.registry)
    if as_json:
        print_json([_as_data(item.value, item.plugin) for item in found])
        return
    rows = []
    for item in found:
        sizes = synth.sizes(item.value)
        shown = [show_size(sizes[quant]) if quant in sizes else "" for quant in LISTED]
        rows.append((item.value.name, f"{item.value.parameters / 1e6:,.1f} M", *shown, _others(item.value)))
    columns = ("geometry", "parameters", *LISTED, "also called")
    console().print(table(columns, rows, right=("parameters", *LISTED)))


def _others(geometry: Geometry) -> str:
    return ", ".join(geometry.aliases)


def _as_data(geometry: Geometry, plugin: str) -> dict[str, Any]:
    from luce_core import synth

    return {
        "name": geometry.name,
        "aliases": list(geometry.aliases),
        "architecture": geometry.arch,
        "plugin": plugin,
        "parameters": geometry.parameters,
        "tensors": len(geometry.shapes),
        "bytes": synth.sizes(geometry),
    }
