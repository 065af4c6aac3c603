"""A whole model on one CUDA device: correctness, prompt and answer speed, and where the time of a step goes.

    python benchmarks/triton/decode.py [--model qwen3.5-27b:q4_k_m ...] [--depths 0,4096] [--rows 1,16,24]
                                       [--held 16,24] [--sampled top-p,xtc] [--prefill 2048] [--check]
                                       [--profile] [--deterministic] [--set NAME=VALUE ...]

Weights are random, in the exact sizes of the model (`luce_core.synth`), written to --folder and kept
there. --check: logits and greedy tokens of Qwen3.5-0.8B in Q8_0, and of a small mixture,
beside the f32 reference ops on the same device; texts of graphs, greedy and sampled, beside those of plain
calls, also behind texts that ended by themselves. --deterministic: all figures under that option; with
--check, the bits of prompts, trees and answers in any company. `engine` figures are those of `LuceEngine`
stepped without a pause: scheduling, sampling and events included. `device` is one replay of the step's CUDA
graph, by the device's own clock. --sampled: which ways to sample are compiled and timed beside
greedy answers: all unless it is given, none if it is empty. --set: such as
`triton.graph_steps=4 cache_type_k=q8_0 ctx_size=40000`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from luce_arch_qwen35 import geometries

from luce_core.bench import record
from luce_core.contracts import GenerationRequest, Geometry, SamplingParams, Step, Tokens
from luce_core.engine.engine import LuceEngine
from luce_core.model.batch import RowSet
from luce_core.synth import write
from luce_core.synth.known import find
from luce_core.testing.drafters import ScriptedDrafter
from luce_core.testing.pipeline import make_pipeline, registry_of
from luce_core.testing.rig import ModelRig

HOOKS = ("luce_arch_qwen35.hooks", "luce_backend_triton.hooks")
DEVICE = "cuda:0"
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = {
    "top-p": SamplingParams(temperature=0.7, top_p=0.95, seed=1),
    "top-k": SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=1),
    "penalties": SamplingParams(temperature=0.0, repetition=1.1, frequency=0.1, logit_bias={7: -1.0}),
    "typical-p": SamplingParams(temperature=0.7, typical_p=0.9, seed=1),
    "xtc": SamplingParams(temperature=0.7, min_p=0.05, xtc_probability=0.5, xtc_threshold=0.01, seed=1),
}
ANSWER = 128
WARM = 16
"""Tokens of an answer before the clock starts: kernels compile, graphs are captured."""


def model_file(folder: Path, name: str) -> Path:
    """GEOMETRY:QUANT as a file, written once."""
    geometry, _, quant = name.partition(":")
    path = folder / f"{geometry}-{quant}.gguf"
    if not path.exists():
        start = time.perf_counter()
        write(find(registry_of(HOOKS[0]), geometry), quant, path)
        print(
            f"{path.name}: {path.stat().st_size / 1e9:.2f} GB written in {time.perf_counter() - start:.0f} s"
        )
    return path


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 50_000, (length,), generator=generator).tolist()


# --- correctness


MIXTURE = {"layers": 4, "width": 2048, "heads": 16, "kv_heads": 2, "value_heads": 32, "vocab": 50176}
"""Four layers of 35B-A3B with a quarter of its experts: the reference ops need all of them in f32."""


def small_mixture(folder: Path, experts: int = 64) -> Path:
    """As a file, written once. A row takes 8 of the experts."""
    path = folder / f"mixture-of-{experts}-q4_k_m.gguf"
    if not path.exists():
        metadata = geometries.metadata_of(**MIXTURE, experts=(experts, 8, 512, 512))
        shapes = geometries.shapes_of(metadata)
        write(Geometry("mixture", metadata, shapes, ranges=geometries.RANGES), "q4_k_m", path)
    return path


def check(path: Path, options: dict[str, str], chooses: bool = False) -> None:
    """Against the f32 reference ops, on the same device. options: of the engines.

    chooses: experts, so that a rounding can send a row to others. Then errors are printed, not judged.
    """
    name = path.stem
    text = prompt(90)
    found = {}
    for layers in ((), ("triton",)):
        rig = ModelRig(path, *HOOKS, layers=layers, device=DEVICE, cache_type="f16", block_tokens=16)
        seq = rig.open()
        first = rig.prefill({seq: text[:70]})[seq]
        held = torch.stack([rig.decode(seq, token) for token in text[70:74]])
        tree = rig.hold({seq: [text[74], 5, text[75], text[76]]}, {seq: [-1, 0, 0, 2]})
        rig.commit(tree, [[0, 2, 3]])
        after = torch.stack([rig.decode(seq, token) for token in text[77:81]])
        found[layers] = {"prompt": first, "rows": held, "tree": tree.logits[0], "after it": after}
        del rig
        torch.cuda.empty_cache()
    for part, want in found[()].items():
        got = found["triton",][part]
        errors = ((got - want).norm(dim=-1) / want.norm(dim=-1)).sort().values
        same = float((got.argmax(-1) == want.argmax(-1)).float().mean())
        print(
            f"{name}, {part}: relative error of a row's logits {errors[len(errors) // 2]:.1e}, of the worst "
            f"{errors[-1]:.1e}; the same best token in {same:.0%}"
        )
        assert chooses or errors[-1] < 0.05, part
    answers = []
    for executor in ("eager", "cuda-graphs"):
        bench = Bench(path, executor=executor, **options)
        answers.append(list(conversations(bench)))
        del bench
    for (kind, wanted), (_, got) in zip(*answers, strict=True):
        same = [a == b for a, b in zip(wanted, got, strict=False)]
        said = "all" if all(same) and len(wanted) == len(got) else f"{same.index(False)} of {len(wanted)}"
        print(f"graphs give the tokens of plain calls, {kind}: {said}")


def conversations(bench: Bench) -> Iterator[tuple[str, list[int]]]:
    """(how, tokens): four texts of 40 tokens each; then texts that end before, and the turn behind each."""
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "temperature": SamplingParams(temperature=0.8, seed=3),
        "top-p": SamplingParams(temperature=0.8, top_p=0.9, seed=3),
        "top-k": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3),
        "penalties": SamplingParams(temperature=0.8, top_p=0.9, repetition=1.2, frequency=0.2, seed=3),
        "choices": SamplingParams(
            temperature=0.8, typical_p=0.9, top_p=0.9, xtc_probability=0.5, xtc_threshold=0.001, seed=3
        ),
    }
    for kind, params in kinds.items():
        texts = [prompt(90, seed) for seed in range(4)]  # prompts too are replayed from the third on
        first = [bench.answer(text, 40, params) for text in texts]
        yield kind, [token for one in first for token in one]
        again = []
        for text, whole in zip(texts, first, strict=True):
            begun = bench.answer(text, 40, params, frozenset({whole[20]}))
            again += [*begun, *bench.answer([*text, *begun, 7], 20, params)]
        yield f"{kind}, next turn", again


def check_deterministic(path: Path, options: dict[str, str]) -> None:
    """The invariant layer: bits of a rig's logits, tokens of an engine with these options."""
    rig = ModelRig(
        path,
        *HOOKS,
        layers=("triton-invariant",),
        device=DEVICE,
        cache_type="f16",
        block_tokens=16,
        num_blocks=256,
    )
    text, tokens, path_of = prompt(700), prompt(6, 1), [0, 2, 4, 5]
    first, second, third = (rig.open() for _ in range(3))
    whole = rig.prefill({first: text})[first]
    parts = [
        rig.prefill({second: text[a:b], third: text[a : a + 9]})[second]
        for a, b in ((0, 33), (33, 34), (34, 512), (512, 700))
    ]
    print(f"{path.stem}: a prompt in chunks, beside another: {same(torch.cat(parts), whole)}")
    held = rig.hold({first: tokens}, {first: [-1, 0, 0, 1, 2, 4]})
    alone = torch.stack([rig.decode(second, tokens[row]) for row in path_of])
    print(f"{path.stem}: a tree, and its rows decoded alone: {same(held.logits[0][path_of], alone)}")
    fresh = rig.open()
    both = rig.prefill({fresh: [*text, *(tokens[row] for row in path_of)]})[fresh]
    print(f"{path.stem}: decoded rows, and the same as a prompt: {same(both[700:], alone)}")
    del rig
    torch.cuda.empty_cache()
    texts, answers = [prompt(90, seed) for seed in range(8)], {}
    for executor in ("eager", "cuda-graphs"):
        bench = Bench(path, executor=executor, deterministic=True, **options)
        answers[executor, "alone"] = [bench.answer(text, 40) for text in texts]
        arrived = [bench.submit([text[0] + 1, *text[1:]], 40) for text in texts]  # not in the cache
        bench.run()
        answers[executor, "together"] = [[token for _, token in one] for one in arrived]
        arrived = [bench.answer([text[0] + 1, *text[1:]], 40) for text in texts]
        print(f"{executor}: eight answers together and alone: {arrived == answers[executor, 'together']}")
        del bench
    print(f"graphs and plain calls: {answers['eager', 'alone'] == answers['cuda-graphs', 'alone']}")


def same(one: torch.Tensor, other: torch.Tensor) -> str:
    if torch.equal(one, other):
        return "the same bits"
    return f"they differ by {float((one - other).abs().max() / other.abs().max()):.1e}"


# --- speed


class Bench:
    """One engine over one file."""

    def __init__(self, path: Path, drafters: Sequence[Any] = (), **options: Any) -> None:
        start = time.perf_counter()
        given = {"device": DEVICE, "ctx_size": 8192, "chunk": 2048, "max_sequences": 32, **options}
        self.pipeline = make_pipeline(path, *HOOKS, options=given, drafters=drafters)
        self.engine = LuceEngine(self.pipeline)
        torch.cuda.synchronize()
        self.load_s = time.perf_counter() - start
        self._number = 0

    def submit(
        self, text: list[int], count: int, params: SamplingParams = GREEDY, eog: frozenset[int] = frozenset()
    ) -> list[tuple[float, int]]:
        """-> (time, token) as they come."""
        self._number += 1
        arrived: list[tuple[float, int]] = []

        def sink(event: object) -> None:
            if isinstance(event, Tokens):
                arrived.extend((time.perf_counter(), token) for token in event.ids)
            elif getattr(event, "error", None):
                raise RuntimeError(str(event))

        request = GenerationRequest(f"r{self._number}", tuple(text), count, params, eog=eog)
        self.engine.submit(request, sink)
        return arrived

    def run(self) -> None:
        while self.engine.step():
            pass

    def answer(
        self, text: list[int], count: int, params: SamplingParams = GREEDY, eog: frozenset[int] = frozenset()
    ) -> list[int]:
        arrived = self.submit(text, count, params, eog)
        self.run()
        return [token for _, token in arrived]

    def decode_s(self, depth: int, rows: int) -> float:
        """Seconds of a greedy step, the median."""
        return self.steps_s(depth, rows, GREEDY)[0]

    def steps_s(self, depth: int, rows: int, params: SamplingParams) -> tuple[float, float]:
        """Seconds of a step, the median and the mean: steps may take unlike times by what is sampled from.
        Tokens of steps that are queued at once come at once.
        """
        arrived = [self.submit(prompt(depth + 1, seed), ANSWER, params) for seed in range(rows)]
        self.run()
        times = [at for at, _ in arrived[-1]][WARM:]
        at_once = max(1, self.engine.executor.steps_ahead)
        whole = len(times[:-1]) // at_once * at_once
        steps = sorted((b - a) / at_once for a, b in zip(times, times[at_once:], strict=False))
        return steps[len(steps) // 2], (times[whole] - times[0]) / whole

    def prefill_s(self, rows: int) -> float:
        """Seconds of one chunk, the best of three; nothing of it is in the cache."""
        best = float("inf")
        for seed in range(4):
            self.submit(prompt(rows + 1, 1000 + seed), 1)
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.engine.step()
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
            self.run()
        return best

    def tree(self, rows: int) -> Any:
        """The captured step of one sequence with a chain of so many held rows."""
        blocks, executor = self.pipeline.blocks, self.engine.executor
        seq = blocks.open(prompt(8), blocks.match([]))
        assert blocks.reserve(seq, rows)
        tables = {key.partition("/")[2]: table for key, table in blocks.tables(seq).items()}
        row = RowSet(blocks.slot(seq), 0, prompt(rows), tables, parents=range(-1, rows - 1))
        step = Step("verify", (rows,), {"rows": [row], "top": [0]})
        for _ in range(2):
            handle = executor.submit([step])
            handle.outputs()
        blocks.close(seq, handle.fence)
        blocks.retire(handle.fence)
        (captured,) = [one for bucket, one in self.graphs() if bucket[:2] == (1, rows)]
        return captured

    def graphs(self) -> Iterator[tuple[Any, Any]]:
        """(bucket, captured) of every step that was captured."""
        for bucket, prepared in self.engine.executor._programs["verify"].buckets.items():
            if hasattr(prepared.captured, "graph"):
                yield bucket, prepared.captured

    def device_s(self, captured: Any) -> float:
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            captured.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return sorted(times)[len(times) // 2]


def breakdown(run: Any, title: str, count: int = 5) -> None:
    """Kernels of one run by the device's clock, and the time in which none ran.

    Launches overlap and wait for each other within themselves. What one adds is the time from the end of all
    that began before it to its own end; these times, and those in which no kernel ran, make up the whole.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            run()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    added: dict[str, float] = defaultdict(float)
    spans = []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name].append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end, event.name))
    busy, last = 0.0, float("-inf")
    for start, end, name in sorted(spans):
        busy += max(0.0, end - max(start, last))
        added[name] += max(0.0, end - max(start, last))
        last = max(last, end)
    whole = (last - min(start for start, _, _ in spans)) / count
    print(
        f"{title}: {whole:.0f} us, some kernel runs in {busy / count:.0f} us, {len(spans) // count} launches"
    )
    for name, times in sorted(spent.items(), key=lambda item: -added[item[0]])[:20]:
        each = len(times) / count
        print(
            f"  adds {added[name] / count:8.1f} us, {each:6.1f} x {added[name] / len(times):7.2f} "
            f"of {sum(times) / len(times):7.2f}  {name[:90]}"
        )


def memory(kept: record.Record, bench: Bench, when: str, about: dict[str, Any]) -> None:
    """What the plan says beside what is used, and by whom: torch's tensors, what it keeps beside them for
    plain calls and for graphs, and all that is not torch's: driver, kernels, graphs themselves.
    """
    plan = bench.pipeline.plan
    claims = [claim for claim in plan.claims if claim.device == DEVICE]
    free, total = torch.cuda.mem_get_info(0)
    segments = torch.cuda.memory_snapshot()
    pools = [one["total_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0)]
    found = {
        "planned": sum(claim.num_bytes for claim in claims),
        "used": total - free,
        "torch at most": torch.cuda.max_memory_allocated(),
        "torch now": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "reserved at most": torch.cuda.max_memory_reserved(),
        "reserved for graphs": sum(pools),
        "not torch": total - free - torch.cuda.memory_reserved(),
    }
    words = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in found.items())
    lines = {claim.owner: claim.num_bytes for claim in claims}
    line = f"memory {when}, GB: {words}\n  "
    line += "; ".join(f"{owner} {size / 1e9:.3f}" for owner, size in lines.items())
    placed = {"context": plan.number("context"), "batch": plan.number("engine.max_sequences")}
    kept.say(line, "memory", **about, **placed, when=when, num_bytes=found, planned_lines=lines)


def of(name: str) -> dict[str, str]:
    """What results say of GEOMETRY:QUANT."""
    geometry, _, quant = name.partition(":")
    return {"model": geometry, "quant": quant}


def ways_to_sample(text: str) -> list[str]:
    """Names of SAMPLED, comma separated."""
    names = text.split(",") if text else []
    if unknown := [name for name in names if name not in SAMPLED]:
        raise argparse.ArgumentTypeError(
            f"got {', '.join(map(repr, unknown))}, wanted some of {', '.join(SAMPLED)}"
        )
    return names


def chosen(given: argparse.Namespace) -> dict[str, Any]:
    return dict(one.partition("=")[::2] for one in given.set)


def measure(kept: record.Record, path: Path, name: str, given: argparse.Namespace) -> None:
    about = {**of(name), "deterministic": given.deterministic}
    torch.cuda.reset_peak_memory_stats()
    options = chosen(given)
    options |= {"deterministic": True} if given.deterministic else {}
    about |= {"options": options} if options else {}
    bench = Bench(path, **options)
    memory(kept, bench, "after loading", about)
    torch.cuda.reset_peak_memory_stats()
    title = f"{path.name} --deterministic" if given.deterministic else path.name
    kept.say(f"{title}: loaded in {bench.load_s:.1f} s; {torch.cuda.get_device_name(0)}")
    for depth in map(int, given.depths.split(",")):
        took = bench.decode_s(depth, 1)
        line = f"depth {depth}, engine: {took * 1e3:.3f} ms a token, {1 / took:.1f} tokens/s"
        kept.say(line, "engine, one sequence", **about, context=depth, batch=1, seconds_per_step=took)
    for kind in given.sampled:
        took, mean = bench.steps_s(0, 1, SAMPLED[kind])
        line = f"sampled with {kind}, engine: {took * 1e3:.3f} ms a token, {1 / took:.1f} tokens/s"
        line += f"; {mean * 1e3:.3f} ms in the mean"
        found = {"seconds_per_step": took, "mean_seconds_per_step": mean}
        kept.say(line, "engine, sampled", **about, sampled=kind, context=0, batch=1, **found)
    first = None
    for rows in map(int, given.rows.split(",")):
        took = bench.decode_s(0, rows)
        first = first or took
        each = f"{rows / took:.0f} tokens/s, {took / first:.2f} times one row's"
        line = f"{rows} rows, engine: {took * 1e3:.3f} ms a step, {each}"
        kept.say(line, "engine, several sequences", **about, context=0, batch=rows, seconds_per_step=took)
    for bucket, captured in bench.graphs():
        took = bench.device_s(captured) / bucket[-1]
        line = f"device, {bucket}: {took * 1e3:.3f} ms, {1 / took:.1f} steps/s"
        placed = {"context": "by the bucket", "batch": bucket[0], "bucket": str(bucket)}
        kept.say(line, "device, one step", **about, **placed, seconds_per_step=took)
        if given.profile and bucket[0] in (1, 16):
            breakdown(captured.replay, f"step {bucket}")
    if given.prefill:
        took = bench.prefill_s(given.prefill)
        line = f"prefill {given.prefill}: {took * 1e3:.1f} ms, {given.prefill / took:.0f} tokens/s"
        kept.say(line, "engine, prompt", **about, context=given.prefill, batch=1, seconds=took)
        if given.profile:
            bench.submit(prompt(given.prefill + 1, 77), 1)
            breakdown(bench.engine.step, "prefill", 1)
            bench.run()
    memory(kept, bench, "in the end", about)
    del bench
    torch.cuda.empty_cache()
    if given.held:
        measure_held(kept, path, given, about, options)


def measure_held(
    kept: record.Record, path: Path, given: argparse.Namespace, about: dict[str, Any], options: dict[str, Any]
) -> None:
    """Rows of one sequence that are verified at once."""
    rows = [int(part) for part in given.held.split(",")]
    bench = Bench(
        path, drafters=[ScriptedDrafter(nothing)], max_sequences=2, draft_nodes=max(rows), **options
    )
    steps = {count: bench.tree(count) for count in [1, *rows]}
    one = bench.device_s(steps[1])
    for count, captured in steps.items():
        took = bench.device_s(captured)
        ratio = took / one
        line = f"device, {count} rows of one sequence: {took * 1e3:.3f} ms, {ratio:.2f} times one row's"
        placed = {"context": 0, "batch": 1, "rows": count}
        kept.say(line, "device, held rows", **about, **placed, seconds_per_step=took)
        if given.profile:
            breakdown(captured.replay, f"{count} rows of one sequence")


def nothing(text: object, capacity: int) -> tuple[list[int], list[int]]:
    """The candidates of a drafter that has none."""
    return [], []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="*", default=["qwen3.5-27b:q4_k_m"], help="GEOMETRY:QUANT")
    parser.add_argument("--depths", default="0,4096")
    parser.add_argument("--rows", default="1,16,24")
    parser.add_argument("--held", default="16,24", help="rows of one sequence that are verified at once")
    parser.add_argument(
        "--sampled",
        type=ways_to_sample,
        default=list(SAMPLED),
        metavar=",".join(SAMPLED),
        help="none if empty",
    )
    parser.add_argument("--prefill", type=int, default=2048, help="0 leaves it out")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "luce-models")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="an option of the server")
    record.add_option(parser)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.check and given.deterministic:
        check_deterministic(model_file(given.folder, "qwen3.5-0.8b:q4_k_m"), chosen(given))
        check_deterministic(small_mixture(given.folder), chosen(given))
    elif given.check:
        check(model_file(given.folder, "qwen3.5-0.8b:q8_0"), chosen(given))
        check(small_mixture(given.folder, 8), chosen(given))
        check(small_mixture(given.folder), chosen(given), chooses=True)
    with record.Record(given.out, DEVICE) as kept:
        for name in given.model:
            measure(kept, model_file(given.folder, name), name, given)


if __name__ == "__main__":
    sys.exit(main())
