"""Executors that run staged programs without a device: at once, or read as late as may be."""

from __future__ import annotations

from luce_core.contracts import Fence
from luce_core.engine.executor import EagerExecutor, EagerHandle


class StagingExecutor(EagerExecutor):
    """Runs staged programs over their buffers, poisoned before each step."""

    def __init__(self):
        super().__init__("cpu")
        self.staged, self.made = {}, {}

    def prepare(self, name, fn, buckets, staged=None):
        self.staged[name] = staged
        return super().prepare(name, fn, buckets)

    def submit(self, steps):
        results = {}
        for step in steps:
            staged = self.staged[step.program]
            bucket = staged.bucket(step.inputs) if staged else None
            if bucket is None:
                results |= self._programs[step.program](**step.inputs)
                continue
            if bucket not in self.made:
                self.made[bucket] = staged.stage(bucket)
            buffers = self.made[bucket]
            staged.fill(buffers, step.inputs)
            buffers.device.fill_(-1).copy_(buffers.host)
            computed = staged.behind(buffers, staged.compute(buffers), step.inputs)
            results |= staged.finish(buffers, computed, step.inputs)
        self._fence += 1
        return EagerHandle(Fence(self._fence), results)


class AheadExecutor(StagingExecutor):
    """Steps follow where they can. As on a device, what is read is what was fetched, not what lies there now,
    and a step may be submitted only when everything before it has been read.
    """

    runs_ahead = True

    def __init__(self):
        super().__init__()
        self.unread, self.leads, self.followed = [], False, 0

    def submit(self, steps):
        assert not self.unread
        handle = super().submit(steps)
        (step, *more) = steps
        staged = self.staged[step.program]
        whole = staged is not None and staged.bucket(step.inputs) is not None
        self.leads = whole and not more and staged.can_follow(step.inputs)
        return self._late(handle)

    def follow(self, step):
        assert len(self.unread) == 1
        staged = self.staged[step.program]
        if not self.leads or not staged.can_follow(step.inputs):
            return None
        self.followed += 1
        assert all(row.tokens == [-1] for row in step.inputs["rows"])
        return self._late(super().submit([step]))

    def _late(self, handle):
        self.unread.append(handle.fence)
        return LateHandle(handle, self.unread)


class LateHandle:
    """Read in order."""

    def __init__(self, handle, unread):
        self.fence, self.results, self._unread = handle.fence, handle.results, unread

    def outputs(self):
        if self.fence in self._unread:
            assert self._unread.pop(0) == self.fence
        return self.results
