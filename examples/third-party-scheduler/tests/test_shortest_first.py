"""The core's contract kit, and what this scheduler adds."""

from __future__ import annotations

from pathlib import Path

from luce_shortest_first.hooks import Options
from luce_shortest_first.scheduler import ShortestFirst

from luce_core.contracts import SchedulerContext, SeqId, SeqView
from luce_core.testing.pipeline import TOY_HOOKS, EngineRig, make_pipeline
from luce_core.testing.plugin import PluginContract
from luce_core.testing.schedulers import NO_BARRIER, SchedulerContract
from luce_core.testing.toy import write_toy_model


class TestPlugin(PluginContract):
    hooks = "luce_shortest_first.hooks"


class TestScheduler(SchedulerContract):
    hooks = "luce_shortest_first.hooks"
    scheduler = "shortest-first"


def first(patience: float, *prompts: tuple[float, int]) -> int:
    """The number of the prompt served first, of (arrived_s, tokens)."""
    scheduler = ShortestFirst(SchedulerContext(Options(patience=patience), 4, 16))
    waiting = [
        SeqView(SeqId(n), 0, tokens, arrived, False, NO_BARRIER, 0)
        for n, (arrived, tokens) in enumerate(prompts)
    ]
    work, _ = scheduler.plan(waiting, [], 16, lambda _seq, _rows: True)
    return work[0].seq


def test_the_shortest_prompt_is_served_first() -> None:
    assert first(0.01, (0.0, 900), (0.5, 20), (0.1, 300)) == 1


def test_a_long_prompt_loses_patience() -> None:
    assert first(0.01, (0.0, 900), (9.0, 20)) == 0
    assert first(0.1, (0.0, 900), (9.0, 20)) == 1


# --- in a real engine, chosen by option


def engine(folder: Path, scheduler: str, **options: object) -> EngineRig:
    model = write_toy_model(folder / "toy.gguf")
    chosen = {"scheduler": scheduler, "chunk": 16, "max_sequences": 1, **options}
    return EngineRig(make_pipeline(model, TOY_HOOKS, "luce_shortest_first.hooks", options=chosen))


def test_it_is_chosen_by_option_and_changes_nobodys_text(tmp_path: Path) -> None:
    prompts = [list(range(3, 3 + length)) for length in (60, 5, 33, 1)]
    mine = engine(tmp_path, "shortest-first", max_sequences=3)
    assert isinstance(mine.pipeline.scheduler, ShortestFirst)
    plain = engine(tmp_path, "fair", max_sequences=3)
    assert mine.generate(*prompts) == plain.generate(*prompts)


def test_short_prompts_finish_first_in_the_engine_too(tmp_path: Path) -> None:
    rig = engine(tmp_path, "shortest-first", **{"shortest-first.patience": 1000.0})
    long = rig.submit(range(3, 103), max_tokens=4)
    short = rig.submit(range(3, 8), max_tokens=4)
    while not long.is_done:
        rig.engine.step()
    assert short.is_done
