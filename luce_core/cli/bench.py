"""`luce-core bench`: a model in this process, or a server over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from luce_core.cli import flags
from luce_core.cli.bench_output import Outputs, read_numbers, steps
from luce_core.cli.session import Session
from luce_core.errors import UsageError

if TYPE_CHECKING:
    from luce_core.bench.cases import Case
    from luce_core.bench.energy import Absent, Meter
    from luce_core.bench.peer import Peer
    from luce_core.bench.report import PeerFacts
    from luce_core.bench.runner import Result
    from luce_core.cli.starting import Planned
    from luce_core.engine.engine import LuceEngine
    from luce_core.options import Options

PROMPT_TOKENS, ANSWER_TOKENS, REPETITIONS = (512,), (128,), 5
MODEL_ONLY = {"depth": "-d", "batch": "-b", "repetitions": "-r", "peer": "--peer", "no_repack": "--no-repack"}
SERVER_ONLY = {
    "concurrency": "--concurrency",
    "requests": "--requests",
    "prompts": "--prompts",
    "silence": "--silence",
}
HELP = """Measure a model in this process: prompt processing (pp) and token generation (tg), on random tokens.
With --url, measure a server instead: latencies and throughput, so many requests at a time.

MODEL is a GGUF file or a name `luce-core pull` lists; with --url, what the server calls it."""


def make(session: Session) -> click.Command:
    """The command."""
    return flags.command("bench", session, bench, HELP, _params())


def _params() -> list[click.Parameter]:
    return [flags.model_argument(), *_tests(), *_outputs(), *_of_servers()]


def _numbers(*names: str, least: int, help: str) -> click.Option:
    reader = partial(read_numbers, least)
    return click.Option(list(names), callback=reader, metavar="N[,N]...", help=help)


def _tests() -> list[click.Parameter]:
    return [
        _numbers(
            "-p",
            "--prompt-tokens",
            least=0,
            help="Lengths of prompts; 0 = no pp test. [default: 512; with --url 128 random words]",
        ),
        _numbers("-n", "--gen-tokens", least=0, help="Lengths of answers; 0 = no tg test. [default: 128]"),
        _numbers("-d", "--depth", least=0, help="Tokens of cached context before the test. [default: 0]"),
        _numbers("-b", "--batch", least=1, help="Sequences at the same time. [default: 1]"),
        click.Option(
            ["-r", "--repetitions"],
            type=click.IntRange(1),
            metavar="N",
            help=f"Repetitions, beside one to warm up. [default: {REPETITIONS}]",
        ),
        click.Option(
            ["--seed", "bench_seed"],
            type=click.IntRange(0),
            default=0,
            metavar="N",
            help="Seed of random prompts. [default: 0]",
        ),
        click.Option(
            ["--peer"],
            is_flag=False,
            flag_value=sys.executable,
            metavar="[PYTHON]",
            help="Run llama.cpp beside it, in turn: the Python of an environment with llama-cpp-python; "
            "by default this one.",
        ),
        click.Option(["--no-repack"], is_flag=True, help="Keep llama.cpp from rearranging weights."),
        click.Option(
            ["--energy"], is_flag=True, help="Joules per token of NVIDIA GPUs, idle power taken off."
        ),
    ]


def _outputs() -> list[click.Parameter]:
    return [
        click.Option(
            ["--json", "json_file"], metavar="FILE|-", help="Write JSON; - prints it and nothing else."
        ),
        click.Option(["--markdown"], is_flag=True, help="Print Markdown."),
        click.Option(["--plot"], type=click.Path(dir_okay=False), metavar="FILE.png", help="Draw a picture."),
    ]


def _of_servers() -> list[click.Parameter]:
    return [
        click.Option(["--url"], metavar="URL", help="Measure the OpenAI-compatible server at this address."),
        _numbers("--concurrency", least=1, help="With --url: requests at a time. [default: 1,2,4,8,16]"),
        click.Option(
            ["--requests"],
            type=click.IntRange(1),
            metavar="N",
            help="With --url: requests for each. [default: twice as many, at least 8]",
        ),
        click.Option(
            ["--prompts"],
            type=click.Path(dir_okay=False),
            metavar="FILE.jsonl",
            help='With --url: prompts to send, {"prompt": ...} or {"messages": ...} a line.',
        ),
        click.Option(
            ["--silence"],
            type=click.FloatRange(0, min_open=True),
            metavar="SECONDS",
            help="With --url: how long a server may say nothing. [default: 300]",
        ),
    ]


def bench(session: Session, params: dict[str, Any]) -> None:
    """One of the two."""
    outputs = Outputs.of(params)
    given = {name for name in (*MODEL_ONLY, *SERVER_ONLY) if params[name] not in (None, False)}
    if params["url"] is None:
        _refuse(given & SERVER_ONLY.keys(), "goes with --url")
        bench_model(session, params, outputs)
    else:
        _refuse(given & MODEL_ONLY.keys(), "does not go with --url")
        from luce_core.cli.bench_server import bench_server

        bench_server(session, params, outputs)


def _refuse(given: set[str], why: str) -> None:
    for name, flag in (*MODEL_ONLY.items(), *SERVER_ONLY.items()):
        if name in given:
            raise UsageError(f"{flag} {why}. See 'luce-core bench --help'.")


def bench_model(session: Session, params: dict[str, Any], outputs: Outputs) -> None:
    """Plan, check, load, measure, show."""
    from luce_core.bench.cases import check_cases, make_cases
    from luce_core.bench.facts import host_facts
    from luce_core.cli.starting import load, plan_model
    from luce_core.logs import set_up_logging

    cases = make_cases(
        params["prompt_tokens"] or PROMPT_TOKENS,
        params["gen_tokens"] or ANSWER_TOKENS,
        params["depth"] or (0,),
        params["batch"] or (1,),
    )
    if params["peer"] is not None and any(case.batch > 1 for case in cases):
        raise UsageError("--peer compares one sequence at a time. Drop -b, or --peer.")
    options = _options(session, params, cases)
    set_up_logging("warning" if options.core.log_level == "info" else options.core.log_level)
    planned = plan_model(session, options)
    check_cases(cases, planned.plan)
    host = host_facts()  # the load is the machine's, not ours
    energy = _energy(planned.plan.models[0].layer_device[0]) if params["energy"] else None
    pipeline, engine = load(planned, session.registry)
    pipeline.observers.engine_started(pipeline)
    try:
        with _peer(params, planned, engine) as peer:
            _measure(session, params, outputs, planned, engine, cases, host, energy, peer)
    finally:
        pipeline.observers.engine_stopping(pipeline)


def _options(session: Session, params: dict[str, Any], cases: Sequence[Case]) -> Options:
    """As `serve` reads them; as many sequences as the tests run, unless the user says otherwise."""
    options = session.options(params)
    most = max(case.batch for case in cases)
    if options.core.max_sequences < most and not options.set_by_user("max_sequences"):
        return session.options({**params, "max_sequences": str(most)})
    return options


def _energy(device: str) -> Meter | Absent:
    """The idle power is that before the model is loaded: what holding it costs is part of its cost."""
    from luce_core.bench.energy import Absent, Meter, open_meter
    from luce_core.bench.facts import gpu_uuid

    uuid = gpu_uuid(device)
    if uuid is None:
        return Absent(f"the plan runs on {device}, and NVML counts GPUs")
    meter = open_meter(uuid=uuid)
    if isinstance(meter, Meter):
        meter.watch_idle()
    return meter


@contextmanager
def _peer(params: dict[str, Any], planned: Planned, engine: LuceEngine) -> Iterator[Peer | None]:
    """llama.cpp under the conditions our engine runs under, until the block ends."""
    if params["peer"] is None:
        yield None
        return
    import torch

    from luce_core.bench.peer import start_llama_cpp

    plan = planned.plan
    peer = start_llama_cpp(
        params["peer"],
        planned.path,
        repack=not params["no_repack"],
        threads=torch.get_num_threads(),
        k_type=plan.values["cache.k_type"],
        v_type=plan.values["cache.v_type"],
        context=engine.context,
        chunk=engine.row_budget,
    )
    try:
        yield peer
    finally:
        peer.close()


def _measure(
    session: Session,
    params: dict[str, Any],
    outputs: Outputs,
    planned: Planned,
    engine: LuceEngine,
    cases: Sequence[Case],
    host: Any,
    energy: Meter | Absent | None,
    peer: Peer | None,
) -> None:
    """Run the tests and show what came of them, also when it ends early."""
    import torch

    from luce_core.bench import report as words
    from luce_core.bench.cases import Prompts, bound_of
    from luce_core.bench.energy import Absent, Meter
    from luce_core.bench.facts import subject_facts
    from luce_core.bench.measure import Measure
    from luce_core.bench.runner import Runner

    repetitions = params["repetitions"] or REPETITIONS
    subject = subject_facts(
        planned.plan, planned.header, session.registry, name=planned.name, threads=torch.get_num_threads()
    )
    results: list[Result] = []
    report = words.Report(
        host=host,
        subject=subject,
        repetitions=repetitions,
        seed=params["bench_seed"],
        results=results,
        peer=_peer_facts(peer, planned, subject),
        energy=energy if isinstance(energy, Absent) else None,
    )
    with outputs.shown(words, report, results), steps(len(cases) * (1 + repetitions)) as tick:
        runner = Runner(
            measure=Measure(engine, meter=energy if isinstance(energy, Meter) else None),
            prompts=Prompts(engine.spec.vocab, params["bench_seed"]),
            repetitions=repetitions,
            device=subject.device,
            bound=partial(bound_of, planned.plan),
            peer=peer,
            tick=tick,
        )
        results.extend(map(runner.run, cases))


def _peer_facts(peer: Peer | None, planned: Planned, subject: Any) -> PeerFacts | None:
    if peer is None:
        return None
    from luce_core.bench.conditions import Conditions
    from luce_core.bench.peer import file_identity
    from luce_core.bench.report import PeerFacts
    from luce_core.cli.console import warn

    ours = Conditions(
        file=file_identity(planned.path),
        k_type=subject.k_type,
        v_type=subject.v_type,
        flash_attention=subject.flash_attention,
        threads=subject.threads,
        context=subject.context,
    )
    facts = PeerFacts(peer.name, ours, peer.conditions)
    if facts.differences:
        warn(f"Conditions differ, so there will be no gain: {'; '.join(facts.differences)}.")
    return facts
