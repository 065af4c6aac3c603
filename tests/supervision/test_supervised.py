"""The engine in a process of its own: answers, deaths, restarts, storms, ends."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from functools import partial

import psutil
import pytest
from attrs import evolve

from luce_core.contracts import GenerationRequest, SamplingParams
from luce_core.errors import CapacityError, UnavailableError
from luce_core.supervision import supervised
from luce_core.testing.pipeline import TOY_HOOKS, EngineRig, Receiver, make_pipeline, registry_of
from luce_core.testing.toy import write_toy_model

GREEDY = SamplingParams(temperature=0.0)
LONG = 3000


def request(name, prompt=(5, 6, 7), count=8, params=GREEDY, **more):
    return GenerationRequest(name, tuple(prompt), count, params, **more)


def submit(channel, name, **more):
    receiver = Receiver()
    channel.submit(request(name, **more), receiver)
    return receiver


def test_answers_are_the_models_own_and_all_that_is_opened_is_closed(start, law):
    threads, files = threading.active_count(), os.listdir("/proc/self/fd")
    channel, watch = start(max_sequences=3)
    with pytest.raises(UnavailableError, match="loading model: 0 %"):
        channel.submit(request("early"), Receiver())
    assert channel.health().status == "loading"
    watch.wait_ready()
    assert channel.health().status == "ready"
    answers = {n: submit(channel, str(n), prompt=(n + 1, 2, 3), count=10) for n in range(8)}
    for n, answer in answers.items():
        assert answer.wait().reason == "length"
        assert answer.ids == law.greedy([n + 1, 2, 3], 10)
    pid = channel.pid
    channel.close(5.0)
    assert not psutil.pid_exists(pid)
    assert channel.health().status == "stopped"
    with pytest.raises(UnavailableError, match="shutting down"):
        channel.submit(request("late"), Receiver())
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == len(files)


def test_a_killed_engine_costs_what_it_was_answering_and_nothing_else(start, law):
    channel, watch = start(max_sequences=2)
    watch.wait_ready()
    running = [submit(channel, f"running {n}", count=LONG) for n in range(2)]
    for answer in running:
        answer.wait_begun()
    first = channel.pid
    os.kill(first, signal.SIGSTOP)  # so that it takes notice of nothing that follows
    queued = {n: submit(channel, f"queued {n}", prompt=(n + 1, 9), count=6) for n in range(5)}
    cancelled = submit(channel, "cancelled")
    late = Receiver()
    channel.submit(evolve(request("late"), deadline_s=0.01), late)  # its engine cannot end it any more
    channel.cancel("cancelled")
    os.kill(first, signal.SIGKILL)
    for answer in running:
        done = answer.wait()
        assert done.reason == "error"
        assert "SIGKILL" in done.error
        assert "Send the request again" in done.error
        assert done.usage["completion_tokens"] == len(answer.ids) > 0
        assert answer.ids == law.greedy([5, 6, 7], len(answer.ids))
    assert cancelled.wait().reason == "cancelled"
    watch.wait_ready()
    for n, answer in queued.items():
        assert answer.wait().reason == "length"
        assert answer.ids == law.greedy([n + 1, 9], 6)
    assert late.wait().late
    assert "deadline of 0.01 s" in late.done.error
    assert channel.pid != first
    assert channel.health().restarts == 1
    assert channel.stats()["restarts"] == 1
    assert submit(channel, "after").wait().reason == "length"
    assert channel.stats()["unfinished"] == 0


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=11, top_p=0.9)])
def test_the_same_text_as_in_this_process(start, tmp_path, params):
    channel, watch = start()
    rig = EngineRig(make_pipeline(write_toy_model(tmp_path / "here.gguf", salt=7, context=4096)))
    here = rig.submit((5, 6, 7), 40, params)
    rig.run()
    watch.wait_ready()
    there = submit(channel, "there", count=40, params=params)
    assert there.wait().reason == here.done.reason
    assert there.ids == here.ids


def test_an_engine_that_says_nothing_is_killed_and_replaced(start, law):
    channel, watch = start(step_timeout_s=1.0)
    watch.wait_ready()
    answer = submit(channel, "stuck", count=LONG)
    answer.wait_begun()
    os.kill(channel.pid, signal.SIGSTOP)
    done = answer.wait()
    assert done.reason == "error"
    assert "--step-timeout" in done.error
    watch.wait_ready()
    again = submit(channel, "again")
    assert again.wait().reason == "length"
    assert again.ids == law.greedy([5, 6, 7], 8)


STUCK = """
import os
import time
from luce_core.contracts import API, Equivalence, PartSpec, PluginInfo
from luce_core.engine.scheduler import FairScheduler
from luce_core.hookspecs import hookimpl

class Stuck(FairScheduler):
    def plan(self, waiting, running, row_budget, fits):
        work, preempted = super().plan(waiting, running, row_budget, fits)
        {act}
        return work, preempted

def make(context):
    return Stuck(context.max_sequences)

@hookimpl
def luce_plugin_info():
    return PluginInfo(name="stuck", api=API)

@hookimpl
def luce_register_schedulers():
    return [PartSpec("scheduler", "stuck", __name__ + ":make", Equivalence.BITS)]
"""


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """scheduler(act) -> hooks of a scheduler that acts when it plans."""
    folder = tmp_path / "hooks"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def make(name, act):
        (folder / f"{name}.py").write_text(STUCK.format(act=act))
        return (TOY_HOOKS, name)

    yield make
    for name in list(sys.modules):
        if getattr(sys.modules[name], "__file__", None) and str(folder) in str(sys.modules[name].__file__):
            del sys.modules[name]


def test_a_step_that_hangs_is_noticed_though_the_process_lives(start, scheduler):
    act = "time.sleep(3600) if any(v.prompt >= 40 for v in running) else None"
    hooks = scheduler("luce_hanging_hooks", act)
    channel, watch = start(*hooks, step_timeout_s=1.0, scheduler="stuck")
    watch.wait_ready()
    answer = submit(channel, "hangs", prompt=range(1, 42), count=20)
    assert "--step-timeout" in answer.wait().error
    watch.wait_ready()
    assert submit(channel, "fine").wait().reason == "length"


def test_a_storm_backs_off_says_so_and_gives_up_what_waits(start, scheduler, monkeypatch):
    monkeypatch.setattr(supervised, "FIRST_DELAY_S", 0.05)
    hooks = scheduler("luce_dying_hooks", "time.sleep(0.2); os.kill(os.getpid(), 9)")
    channel, watch = start(*hooks, scheduler="stuck", max_sequences=1)
    watch.wait_ready()
    answers = [submit(channel, str(n)) for n in range(4)]
    errors = [answer.wait().error for answer in answers]
    assert all("SIGKILL" in error for error in errors)
    health = channel.health()
    assert health.status == "restarting"
    assert "starts in a row that answered nothing" in health.detail
    with pytest.raises(UnavailableError, match="starts in a row"):
        channel.submit(request("refused"), Receiver())
    watch.wait_ready()


def test_an_engine_that_cannot_be_built_is_told_to_whoever_started_the_server(start):
    channel, watch = start(make_registry=partial(registry_of, "luce_core.testing.no_such_hooks"))
    assert watch.failed.wait(60)
    assert "could not be started" in str(watch.error)
    assert "no_such_hooks" in str(watch.error)
    health = channel.health()
    assert health.status == "stopped"
    assert health.detail == str(watch.error)
    with pytest.raises(UnavailableError, match="no_such_hooks"):
        channel.submit(request("a"), Receiver())


def test_the_queue_is_bounded_and_frees_itself(start):
    channel, watch = start(max_queue=2, max_sequences=1)
    watch.wait_ready()
    first, second = submit(channel, "a", count=LONG), submit(channel, "b", count=LONG)
    with pytest.raises(CapacityError, match="2 requests are unfinished"):
        channel.submit(request("c"), Receiver())
    for name in ("a", "b", "unknown"):
        channel.cancel(name)
    assert {first.wait().reason, second.wait().reason} == {"cancelled"}
    assert submit(channel, "c").wait().reason == "length"


def test_closing_drains_then_cancels(start, law):
    channel, watch = start(max_sequences=2)
    watch.wait_ready()
    short, long = submit(channel, "short", count=30), submit(channel, "long", count=LONG)
    long.wait_begun()
    channel.close(0.05)
    assert short.wait().reason in {"length", "cancelled"}
    assert long.wait().reason == "cancelled"
    assert long.ids == law.greedy([5, 6, 7], len(long.ids))


def test_a_receiver_that_is_gone_does_not_stop_the_others(start):
    channel, watch = start()
    watch.wait_ready()

    def gone(event):
        raise RuntimeError("Event loop is closed")

    channel.submit(request("gone"), gone)
    assert submit(channel, "here").wait().reason == "length"


ORPHAN = """
import os, sys
from functools import partial
from pathlib import Path
from luce_core.supervision.messages import Boot
from luce_core.supervision.supervised import SupervisedChannel
from luce_core.testing.pipeline import make_test_plan, registry_of

ready = __import__("threading").Event()
boot = Boot(make_test_plan(Path(sys.argv[1])), registry_of)
channel = SupervisedChannel(boot, max_queue=4, on_ready=ready.set)
assert ready.wait(60)
print(channel.pid, flush=True)
os._exit(9)
"""


def test_the_engine_does_not_outlive_its_server(tmp_path):
    path = write_toy_model(tmp_path / "toy.gguf", salt=7)
    command = [sys.executable, "-c", textwrap.dedent(ORPHAN), str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 9, ran.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(ran.stdout)).wait(30)


def test_one_tenant_cannot_fill_the_queue_once_there_are_two(start):
    channel, watch = start(max_queue=8, max_sequences=1)
    watch.wait_ready()
    answers = [submit(channel, "other", count=2, tenant="other")]
    answers[0].wait()
    most = 6  # three times the two places that are then free
    for n in range(most):
        answers.append(submit(channel, str(n), count=LONG, tenant="one"))
    with pytest.raises(CapacityError, match="kept for other keys"):
        submit(channel, "one more", tenant="one")
    answers.append(submit(channel, "other again", count=2, tenant="other"))
    for n in range(most):
        channel.cancel(str(n))
    assert answers[-1].wait().reason == "length"
