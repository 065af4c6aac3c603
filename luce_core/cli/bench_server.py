"""`luce-core bench --url`: a server over HTTP, so many requests at a time."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luce_core.cli.bench_output import Outputs, steps
from luce_core.cli.session import Session
from luce_core.errors import UsageError

if TYPE_CHECKING:
    from luce_core.bench.client import Target
    from luce_core.bench.energy import Absent, Meter
    from luce_core.bench.load import Prompt, Rung, Server
    from luce_core.options import Options

LADDER = (1, 2, 4, 8, 16)
WORDS = (128,)
ANSWER_TOKENS = (128,)
LEAST_REQUESTS = 8
SILENCE_S = 300.0


def bench_server(session: Session, params: dict[str, Any], outputs: Outputs) -> None:
    """Ask what is there, warm up, climb, show."""
    from luce_core.bench import load_report as words
    from luce_core.bench.client import parse_url
    from luce_core.bench.energy import Absent
    from luce_core.bench.facts import host_facts
    from luce_core.bench.load import check_some_success, find_server, warm_up

    max_tokens = _answer_tokens(params["gen_tokens"] or ANSWER_TOKENS)
    batches = _batches(params)
    options = session.options(params)
    target = parse_url(params["url"], key=_key(options), timeout_s=params["silence"] or SILENCE_S)
    model = options.core.model if options.origin["model"].source == "cli" else None
    found = asyncio.run(find_server(target, model))
    energy = _energy(target) if params["energy"] else None  # idle is what it is before the first request
    server = asyncio.run(warm_up(found, next(batches[0][1]), max_tokens))
    rungs: list[Rung] = []
    report = words.LoadReport(
        host=host_facts(),
        server=server,
        max_tokens=max_tokens,
        seed=params["bench_seed"],
        rungs=rungs,
        prompts=params["prompts"] or "",
        energy=energy if isinstance(energy, Absent) else None,
    )
    ladder = params["concurrency"] or LADDER
    plan = [
        (concurrency, params["requests"] or max(LEAST_REQUESTS, 2 * concurrency), prompts, length)
        for length, prompts in batches
        for concurrency in ladder
    ]
    with outputs.shown(words, report, rungs), steps(sum(requests for _, requests, _, _ in plan)) as tick:
        asyncio.run(_climb(server, max_tokens, energy, plan, rungs, tick))
        check_some_success(rungs)


def _answer_tokens(given: tuple[int, ...]) -> int:
    if len(given) != 1 or not given[0]:
        raise UsageError("With --url, -n takes one length of at least 1.")
    return given[0]


def _batches(params: dict[str, Any]) -> list[tuple[int | None, Iterator[Prompt]]]:
    """(words, prompts without end), for every length of prompt."""
    from luce_core.bench.load import cycle_prompts, random_prompts, read_prompts

    if params["prompts"] is not None:
        if params["prompt_tokens"] is not None:
            raise UsageError("--prompts and -p both say what to send. Give one of them.")
        return [(None, cycle_prompts(read_prompts(Path(params["prompts"]))))]
    lengths = params["prompt_tokens"] or WORDS
    if 0 in lengths:
        raise UsageError("With --url, -p takes lengths of at least 1.")
    return [(length, random_prompts(length, params["bench_seed"])) for length in lengths]


def _key(options: Options) -> str | None:
    """What was said for this run. A key in a config file guards the user's own server; it is shown to no
    other.
    """
    said = options.origin["api_key"].source in ("cli", "env")
    return options.core.api_key[0] if said and options.core.api_key else None


def _energy(target: Target) -> Meter | Absent:
    from luce_core.bench.energy import Absent, Meter, open_meter

    if not is_this_machine(target.host):
        return Absent(f"{target.host} may be another machine, and NVML counts the GPUs of this one")
    meter = open_meter()
    if isinstance(meter, Meter):
        meter.watch_idle()
    return meter


def is_this_machine(host: str) -> bool:
    """By its loopback names; anything else may be elsewhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _climb(
    server: Server,
    max_tokens: int,
    energy: Meter | Absent | None,
    plan: list[tuple[int, int, Iterator[Prompt], int | None]],
    rungs: list[Rung],
    tick: Callable[[str], None],
) -> None:
    """Every rung in turn, up to one the server does not survive."""
    from luce_core.bench.energy import Meter
    from luce_core.bench.load import Ladder

    done = itertools.count(1)
    ladder = Ladder(
        server,
        max_tokens,
        energy if isinstance(energy, Meter) else None,
        lambda answer: tick(f"request {next(done)}: {answer.end}"),
    )
    for concurrency, requests, prompts, length in plan:
        rung, gone = await ladder.climb(concurrency, requests, prompts, length)
        if rung.answers:
            rungs.append(rung)
        if gone is not None:
            raise gone
