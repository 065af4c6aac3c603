"""Results of a ladder: as data, rows and panels. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from attrs import asdict, frozen

from luce_core.bench.energy import Absent
from luce_core.bench.facts import Host
from luce_core.bench.load import Rung, Server
from luce_core.bench.render import Panel, Series, Table, number
from luce_core.bench.report import energy_data
from luce_core.bench.stats import Percentiles, percentile

FORMAT = "luce-core bench server 1"
SHOWN_REASONS = 5


@frozen
class LoadReport:
    """One ladder, whole or as far as it came."""

    host: Host
    server: Server
    max_tokens: int
    seed: int
    rungs: Sequence[Rung]
    prompts: str = ""
    """The file they come from; "" = random words."""
    energy: Absent | None = None
    """Why there is no energy, where it was asked for."""

    @property
    def counted(self) -> str:
        """Where the number of tokens comes from."""
        whole = [answer for rung in self.rungs for answer in rung.whole]
        told = sum(answer.usage_tokens is not None for answer in whole)
        if told == len(whole):
            return "usage"
        return "chunks" if not told else "usage, and chunks where an answer has none"

    @property
    def tokens_per_chunk(self) -> float | None:
        """By the server's own count; None where it gives none."""
        told = [a for rung in self.rungs for a in rung.whole if a.usage_tokens is not None and a.chunks_s]
        chunks = sum(len(answer.chunks_s) for answer in told)
        return sum(answer.tokens for answer in told) / chunks if chunks else None


def as_data(report: LoadReport) -> dict[str, Any]:
    """For `--json`: every rung by itself says all it was measured on."""
    shared: dict[str, Any] = {
        **asdict(report.host),
        "url": report.server.target.url,
        "model": report.server.model,
        "server": report.server.software,
        "max_tokens": report.max_tokens,
        "seed": report.seed,
        "prompts": report.prompts or "random words",
        "fields_given_up": list(report.server.given_up),
        "tokens_counted_from": report.counted,
        "tokens_per_chunk": report.tokens_per_chunk,
    }
    data: dict[str, Any] = {
        "format": FORMAT,
        "results": [{**_rung_data(rung), **shared} for rung in report.rungs],
    }
    if report.energy is not None:
        data["energy_absent"] = report.energy.reason
    return data


def _rung_data(rung: Rung) -> dict[str, Any]:
    data: dict[str, Any] = {
        "concurrency": rung.concurrency,
        "prompt_words": rung.prompt_words,
        "requests": len(rung.answers),
        "ends": dict(rung.ends),
        "reasons": dict(rung.reasons),
        "seconds": rung.seconds,
        "tokens": rung.tokens,
        "total_tokens_s": rung.total_tokens_s,
        "request_tokens_s": _percentiles(rung.request_tokens_s),
        "ttft_s": _percentiles(rung.ttft_s),
        "inter_token_s": _percentiles(rung.gap_s),
        "prompt_tokens": _median([a.prompt_tokens for a in rung.whole if a.prompt_tokens is not None]),
    }
    if rung.energy is not None and rung.tokens:
        data["energy"] = energy_data(rung.energy, rung.tokens)
    return data


def _percentiles(values: Percentiles | None) -> dict[str, float] | None:
    return None if values is None else asdict(values)


def _median(values: Sequence[float]) -> float | None:
    return percentile(values, 50) if values else None


def head(report: LoadReport) -> list[str]:
    """What it was measured on."""
    server, host = report.server, report.host
    software = f" ({server.software})" if server.software else ""
    return [
        f"{server.model} at {server.target.url}{software}",
        f"answers of {report.max_tokens} tokens, prompts of {report.prompts or 'random words'}, "
        f"seed {report.seed}, temperature 0",
        f"client luce-core {host.luce_core}, commit {host.commit}; {host.date}; {host.host_cpu}"
        + (f", load {host.load:.2f}" if host.load is not None else ""),
    ]


def table(report: LoadReport) -> Table:
    """One row per rung; times in milliseconds."""
    rungs = report.rungs
    columns: list[tuple[str, list[str]]] = [
        ("concurrency", [str(rung.concurrency) for rung in rungs]),
        ("words", ["-" if rung.prompt_words is None else str(rung.prompt_words) for rung in rungs]),
        ("prompt tokens", [_prompt_tokens(rung) for rung in rungs]),
        ("ok", [str(rung.ends["ok"]) for rung in rungs]),
        ("429", [str(rung.ends["rejected"]) for rung in rungs]),
        ("errors", [str(len(rung.answers) - rung.ends["ok"] - rung.ends["rejected"]) for rung in rungs]),
        ("TTFT p50/p90/p99 ms", [_ms(rung.ttft_s) for rung in rungs]),
        ("inter-token p50/p90/p99 ms", [_ms(rung.gap_s) for rung in rungs]),
        ("tokens/s each", [_each(rung) for rung in rungs]),
        ("tokens/s total", [number(rung.total_tokens_s) if rung.tokens else "-" for rung in rungs]),
        ("J/token", [_joules(rung) for rung in rungs]),
    ]
    kept = [(name, cells) for name, cells in columns if any(cell != "-" for cell in cells)]
    return Table(tuple(name for name, _ in kept), tuple(zip(*(cells for _, cells in kept), strict=True)))


def _prompt_tokens(rung: Rung) -> str:
    middle = _median([a.prompt_tokens for a in rung.whole if a.prompt_tokens is not None])
    return "-" if middle is None else f"{middle:.0f}"


def _ms(values: Percentiles | None) -> str:
    if values is None:
        return "-"
    return " / ".join(number(1e3 * item) for item in (values.p50, values.p90, values.p99))


def _each(rung: Rung) -> str:
    return "-" if rung.request_tokens_s is None else number(rung.request_tokens_s.p50)


def _joules(rung: Rung) -> str:
    return "-" if rung.energy is None or not rung.tokens else f"{rung.energy.per_token(rung.tokens):.3g}"


def foot(report: LoadReport) -> list[str]:
    """How tokens were counted, what the server refused, and why requests failed."""
    lines = [report.host.busy] if report.host.busy else []
    if any(rung.whole for rung in report.rungs):
        lines.append(_counting(report))
    if report.server.given_up:
        fields = " and ".join(report.server.given_up)
        early = "; answers may end early" if "ignore_eos" in report.server.given_up else ""
        lines.append(f"The server refuses {fields}, so requests go without{early}.")
    for rung in report.rungs:
        reasons = rung.reasons.most_common(SHOWN_REASONS)
        lines += [f"At concurrency {rung.concurrency}: {count} × {reason}" for reason, count in reasons]
    if report.energy is not None:
        lines.append(f"Energy is not measured: {report.energy.reason}.")
    return lines


def _counting(report: LoadReport) -> str:
    if report.counted == "usage":
        words = "Tokens are counted by the server (usage)."
    else:
        words = f"Tokens are counted from {report.counted}: one each, which is too few if a chunk holds more."
    per_chunk = report.tokens_per_chunk
    if per_chunk is not None and abs(per_chunk - 1) > 0.05:
        words += f" A chunk holds {number(per_chunk)} tokens: inter-token times are those between chunks."
    return words


def panels(report: LoadReport) -> list[Panel]:
    """Throughput and latencies over concurrency."""
    lengths = list(dict.fromkeys(rung.prompt_words for rung in report.rungs))

    def series(name: str, value: Callable[[Rung], float | None]) -> list[Series]:
        made = []
        for words in lengths:
            points = [
                (float(rung.concurrency), found)
                for rung in report.rungs
                if rung.prompt_words == words and (found := value(rung)) is not None
            ]
            if points:
                label = name if len(lengths) == 1 else f"{name}, {words} words"
                made.append(Series(label, *(tuple(axis) for axis in zip(*points, strict=True))))
        return made

    def times(of: Callable[[Rung], Percentiles | None]) -> list[Series]:
        def ms(rung: Rung, which: str) -> float | None:
            values = of(rung)
            return None if values is None else 1e3 * float(getattr(values, which))

        return [line for which in ("p50", "p99") for line in series(which, partial(ms, which=which))]

    total = series("total", lambda rung: rung.total_tokens_s)
    titles = (
        ("Throughput", "tokens/s", total),
        ("Time to first token", "ms", times(lambda rung: rung.ttft_s)),
        ("Between tokens", "ms", times(lambda rung: rung.gap_s)),
    )
    return [Panel(title, "requests at a time", unit, tuple(lines)) for title, unit, lines in titles if lines]


def caption(report: LoadReport) -> str:
    """Under a picture."""
    server = report.server
    where = f"{server.model} at {server.target.url}"
    return f"{where}, answers of {report.max_tokens} tokens, {report.host.date[:10]}"
