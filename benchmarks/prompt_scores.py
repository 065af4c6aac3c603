"""What scoring a prompt costs beside computing it: processor seconds per request, by alternatives and by
rows whose logits exist at a time.

    python benchmarks/prompt_scores.py MODEL.gguf [--tokens 513] [--repetitions 5] [--threads 1]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

import torch

from luce_core.testing.pipeline import EngineRig, make_pipeline

HOOKS = ("luce_arch_llama.hooks", "luce_backend_cpu.hooks")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=513)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rig = EngineRig(make_pipeline(args.model, *HOOKS, options={"ctx_size": 2 * args.tokens}))
    rng = random.Random(0)

    def median(alternatives: int | None) -> float:
        """The prompts are new each time; the first one warms up."""
        seconds = []
        for _ in range(args.repetitions + 1):
            prompt = [rng.randrange(rig.engine.spec.vocab) for _ in range(args.tokens)]
            start = time.process_time()
            answer = rig.submit(prompt, 1, prompt_logprobs=alternatives)
            rig.run()
            seconds.append(time.process_time() - start)
            if answer.done.error:
                raise SystemExit(answer.done.error)
        return statistics.median(seconds[1:])

    for alternatives in (None, 0, 1, 20):
        what = "not scored" if alternatives is None else f"{alternatives} alternatives"
        print(f"{what:16} {median(alternatives):.2f} s")
    built = rig.engine.programs.score_rows
    for rows in (8, built, 128, 512):
        rig.engine.programs.score_rows = rows
        note = " (as built)" if rows == built else ""
        print(f"{rows:4} rows at once, 1 alternative {median(1):.2f} s{note}")


if __name__ == "__main__":
    main()
