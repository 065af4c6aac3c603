import threading
from functools import partial

import pytest

from luce_core.supervision.messages import Boot
from luce_core.supervision.supervised import SupervisedChannel
from luce_core.testing.pipeline import TOY_HOOKS, make_test_plan, registry_of
from luce_core.testing.toy import ToyLaw, write_toy_model

LIMIT_S = 60


class Watch:
    """The callbacks of a channel."""

    def __init__(self):
        self.ready = threading.Semaphore(0)
        self.failed = threading.Event()
        self.error = None
        self.progress = []

    def wait_ready(self):
        assert self.ready.acquire(timeout=LIMIT_S), f"no engine within {LIMIT_S} s; error: {self.error}"

    def fail(self, error):
        self.error = error
        self.failed.set()


@pytest.fixture
def toy_plan(tmp_path):
    def make(*hooks, context=4096, **options):
        path = write_toy_model(tmp_path / "toy.gguf", salt=7, context=context)
        return make_test_plan(path, *(hooks or (TOY_HOOKS,)), options={"threads": 1, **options})

    return make


@pytest.fixture
def law(toy_plan):
    return ToyLaw(toy_plan().models[0].spec.vocab, salt=7)


@pytest.fixture
def start(toy_plan):
    """start(*hooks, max_queue=..., step_timeout_s=..., **options) -> (SupervisedChannel, Watch)."""
    made = []

    def make(*hooks, max_queue=64, step_timeout_s=60.0, make_registry=None, **options):
        watch = Watch()
        boot = Boot(
            toy_plan(*hooks, **options),
            make_registry or partial(registry_of, *(hooks or (TOY_HOOKS,))),
            beat_s=0.05,
            log_level="error",
        )
        channel = SupervisedChannel(
            boot,
            max_queue=max_queue,
            step_timeout_s=step_timeout_s,
            on_progress=lambda done, total: watch.progress.append((done, total)),
            on_ready=watch.ready.release,
            on_failed=watch.fail,
        )
        made.append(channel)
        return channel, watch

    yield make
    for channel in made:
        channel.close(0.0)
