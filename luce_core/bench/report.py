"""Results of tests in process: as data, as rows of a table, as panels of a picture. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import asdict, field, frozen

from luce_core.bench.cases import Kind
from luce_core.bench.conditions import Conditions, Gain, Pair, differences, gains
from luce_core.bench.energy import Absent, Energy
from luce_core.bench.facts import Host, Subject
from luce_core.bench.render import Panel, Series, Table, number, share
from luce_core.bench.runner import Result
from luce_core.bench.stats import Spread
from luce_core.option_fields import show_size

FORMAT = "luce-core bench model 1"


@frozen
class PeerFacts:
    """Who ran beside us, under which conditions on either side."""

    name: str
    ours: Conditions
    theirs: Conditions

    @property
    def differences(self) -> list[str]:
        """Nothing: a gain may be printed."""
        return differences(self.ours, self.theirs)


@frozen
class Report:
    """One run, whole or as far as it came."""

    host: Host
    subject: Subject
    repetitions: int
    seed: int
    results: Sequence[Result]
    peer: PeerFacts | None = None
    energy: Absent | None = field(default=None)
    """Why there is no energy, where it was asked for."""

    @property
    def gains(self) -> list[Gain]:
        """None where conditions differ."""
        if self.peer is None or self.peer.differences:
            return []
        return gains(self._pairs)

    @property
    def _pairs(self) -> list[Pair]:
        return [
            Pair(result.case, result.tokens_s.median, result.peer_tokens_s.median)
            for result in self.results
            if result.peer_tokens_s is not None
        ]


# --- data


def as_data(report: Report) -> dict[str, Any]:
    """For `--json`: every result by itself says all it was measured on."""
    shared = {**asdict(report.host), **asdict(report.subject)}
    shared |= {"repetitions": report.repetitions, "seed": report.seed}
    data: dict[str, Any] = {
        "format": FORMAT,
        "results": [{**_result_data(result), **shared} for result in report.results],
    }
    if report.peer is not None:
        data["peer"] = {
            "engine": report.peer.name,
            "conditions": asdict(report.peer.theirs),
            "our_conditions": asdict(report.peer.ours),
            "differences": report.peer.differences,
            "gains": [
                {
                    "depth": item.prompt.depth,
                    "prompt": item.prompt.label,
                    "answer": item.answer.label,
                    "prefill": item.prefill,
                    "decode": item.decode,
                    "gain": item.gain,
                }
                for item in report.gains
            ],
        }
    if report.energy is not None:
        data["energy_absent"] = report.energy.reason
    return data


def _result_data(result: Result) -> dict[str, Any]:
    data: dict[str, Any] = {
        "test": result.case.label,
        **asdict(result.case),
        "tokens_s": asdict(result.tokens_s),
        "drafted_tokens": result.drafted,
        "accepted_tokens": result.accepted,
        "bound_tokens_s": result.bound_tokens_s,
        "bound_share": result.bound_share,
        "peak_rss_bytes": result.peak_rss_bytes,
        "peak_device_bytes": result.peak_device_bytes,
    }
    if result.energy is not None:
        data["energy"] = energy_data(result.energy, result.tokens)
    if result.peer_tokens_s is not None:
        data |= {"peer_tokens_s": asdict(result.peer_tokens_s), "peer_rss_bytes": result.peer_rss_bytes}
    return data


def energy_data(energy: Energy, tokens: int) -> dict[str, Any]:
    """Joules with the idle power taken off, and what they come from."""
    return {**asdict(energy), "net_j": energy.net_j, "j_per_token": energy.per_token(tokens)}


# --- words


def head(report: Report) -> list[str]:
    """What it was measured on."""
    host, subject = report.host, report.subject
    plugins = ", ".join(f"{name} {version}".strip() for name, version in subject.plugins.items()) or "none"
    ops, drafters = "+".join(subject.op_layers), "+".join(subject.drafters)
    parts = f"ops {ops or 'reference'}, drafters {drafters or 'none'}"
    return [
        f"{subject.model}: {subject.architecture}, {subject.parameters / 1e6:,.1f} M parameters, "
        f"{subject.quant}, {show_size(subject.weight_bytes)}",
        f"on {subject.device} ({subject.device_name}), {_threads(subject)}; {parts}",
        f"context {subject.context}, chunk {subject.chunk}, KV {subject.k_type}/{subject.v_type}; "
        f"{report.repetitions} repetitions, seed {report.seed}",
        f"luce-core {host.luce_core}, commit {host.commit}; torch {subject.torch}"
        + (f", driver {subject.driver}" if subject.driver else "")
        + f"; plugins {plugins}",
        f"{host.date}; host {host.host_cpu}" + (f", load {host.load:.2f}" if host.load is not None else ""),
    ]


def table(report: Report) -> Table:
    """One row per test; columns nothing stands in are left out."""
    columns: list[tuple[str, list[str]]] = [
        ("test", [result.case.label for result in report.results]),
        ("tokens/s", [number(result.tokens_s.median) for result in report.results]),
        ("min-max", [_range(result.tokens_s) for result in report.results]),
        ("stddev", [_stddev(result.tokens_s) for result in report.results]),
        ("of bandwidth", [_share(result, "tg") for result in report.results]),
        ("of compute", [_share(result, "pp") for result in report.results]),
        ("drafts", [_drafts(result) for result in report.results]),
        ("J/token", [_joules(result) for result in report.results]),
        ("peak host", [show_size(result.peak_rss_bytes) for result in report.results]),
        ("peak device", [_size(result.peak_device_bytes) for result in report.results]),
    ]
    if report.peer is not None:
        theirs = [result.peer_tokens_s for result in report.results]
        columns.append(("llama.cpp", ["-" if item is None else number(item.median) for item in theirs]))
        columns.append(("its min-max", ["-" if item is None else _range(item) for item in theirs]))
        if not report.peer.differences:
            ratios = [f"{pair.ratio:.2f}" for pair in report._pairs]
            columns.append(("ratio", ratios))
    kept = [(name, cells) for name, cells in columns if any(cell != "-" for cell in cells)]
    rows = list(zip(*(cells for _, cells in kept), strict=True))
    return Table(tuple(name for name, _ in kept), tuple(rows))


def foot(report: Report) -> list[str]:
    """Gains or why there are none, and what to know."""
    lines = [report.host.busy] if report.host.busy else []
    bounded = {result.case.kind for result in report.results if result.bound_share is not None}
    if "tg" in bounded:
        lines.append(
            "of bandwidth: share of what reading weights and state once per step allows plain decoding, at "
            f"{report.subject.bandwidth}."
        )
    if "pp" in bounded:
        lines.append(
            "of compute: share of what the products of weights with every row of a prompt allow, without "
            f"attention, at {report.subject.compute}."
        )
    if any(result.drafted for result in report.results):
        lines.append(
            "drafts: share of drafted tokens that were accepted. The text is greedy behind random tokens, so "
            "neither this nor the speed of tg tells much about real text; `--url` with `--prompts` does."
        )
    if report.energy is not None:
        lines.append(f"Energy is not measured: {report.energy.reason}.")
    if report.peer is not None:
        lines += _comparison(report, report.peer)
    return lines


def _share(result: Result, kind: Kind) -> str:
    """Of the bound of this kind of test."""
    return share(result.bound_share if result.case.kind == kind else None)


def _comparison(report: Report, peer: PeerFacts) -> list[str]:
    if peer.differences:
        return [f"No gain over {peer.name}: conditions differ (ours and its). {'; '.join(peer.differences)}."]
    found = report.gains
    if not found:
        return [f"No gain over {peer.name}: it takes a pp and a tg test of the same depth."]
    return [
        f"Gain over {peer.name} ({item.prompt.label}, {item.answer.label}): {item.gain:.2f} "
        f"= √(prefill {item.prefill:.2f} × decode {item.decode:.2f})."
        for item in found
    ]


def _threads(subject: Subject) -> str:
    return f"{subject.threads} {'thread' if subject.threads == 1 else 'threads'}"


def _range(values: Spread) -> str:
    return f"{number(values.low)}-{number(values.high)}"


def _stddev(values: Spread) -> str:
    return "-" if values.stddev is None else number(values.stddev)


def _drafts(result: Result) -> str:
    return share(result.accepted / result.drafted if result.drafted else None)


def _joules(result: Result) -> str:
    return "-" if result.energy is None else f"{result.energy.per_token(result.tokens):.3g}"


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else show_size(num_bytes)


# --- pictures


def panels(report: Report) -> list[Panel]:
    """Speed over depth, one panel for prompts and one for answers, one line per length, batch and engine."""
    made = []
    for kind, title in (("pp", "Prompt processing"), ("tg", "Token generation")):
        chosen = [result for result in report.results if result.case.kind == kind]
        lines: dict[str, list[tuple[int, Spread]]] = {}
        for result in chosen:
            batch = f" × {result.case.batch}" if result.case.batch > 1 else ""
            name = f"{kind}{result.case.tokens}{batch}"
            lines.setdefault(name, []).append((result.case.depth, result.tokens_s))
            if result.peer_tokens_s is not None:
                lines.setdefault(f"{name}, llama.cpp", []).append((result.case.depth, result.peer_tokens_s))
        if lines:
            series = tuple(_series(name, points) for name, points in lines.items())
            made.append(Panel(title, "depth, tokens", "tokens/s", series))
    return made


def _series(name: str, points: Sequence[tuple[int, Spread]]) -> Series:
    ordered = sorted(points, key=lambda point: point[0])
    return Series(
        name,
        x=tuple(float(x) for x, _ in ordered),
        y=tuple(values.median for _, values in ordered),
        low=tuple(values.low for _, values in ordered),
        high=tuple(values.high for _, values in ordered),
    )


def caption(report: Report) -> str:
    """Under a picture: a number without its conditions is not a number."""
    host, subject = report.host, report.subject
    return (
        f"{subject.model} {subject.quant}, {subject.device_name}, {_threads(subject)}, "
        f"KV {subject.k_type}/{subject.v_type}, luce-core {host.commit}, {host.date[:10]}; median, min to max"
    )
