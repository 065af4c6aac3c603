"""The engine: one loop that owns all model state. admit → schedule → execute → accept → emit.

Everything here runs on one thread; callers reach it over a `GenerationChannel`. It knows tokens, never text
or JSON.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from attrs import evolve

from luce_core.cache.layout import needs_checkpoints
from luce_core.contracts import (
    EngineEvent,
    Fence,
    FinishReason,
    GenerationRequest,
    Hit,
    Progress,
    SeqId,
    SeqView,
    Step,
    TokenLogprob,
    Work,
)
from luce_core.engine.checks import check_work, late_error, late_notice, no_room_error, request_problem
from luce_core.engine.constraining import check_picked, narrow
from luce_core.engine.flight import Flight, Follower
from luce_core.engine.media import EncodingQueue
from luce_core.engine.programs import Programs, Verdict
from luce_core.engine.proposing import Proposer
from luce_core.engine.rows import RowMaker, handle_of
from luce_core.engine.sequence import Sequence
from luce_core.engine.staged import StagedVerify
from luce_core.engine.staged_prefill import StagedPrefill
from luce_core.engine.swapping import swap_rule
from luce_core.engine.tenants import CREDIT_ROWS, TenantLedger
from luce_core.engine.turns import AnsweredTexts
from luce_core.errors import CapacityError, LuceError
from luce_core.ops.sampling import ParamTable
from luce_core.speculation.tree import Candidates

if TYPE_CHECKING:
    from luce_core.pipeline import Pipeline

log = logging.getLogger("luce_core.engine")

COUNTERS = "requests prompt_tokens cached_tokens emitted_tokens steps preempted retained late failed_steps"


class LuceEngine:
    """Runs one frozen `Pipeline`. `submit` and `cancel` may be called from any thread, the rest from the
    engine's.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        plan = pipeline.plan
        self.target = pipeline.target
        self.spec = pipeline.target.backend.spec
        self.blocks = pipeline.blocks
        self.scheduler = pipeline.scheduler
        self.executor = pipeline.executor
        self.drafters = pipeline.drafters
        self.models = tuple(pipeline.models.values())
        self.rows = RowMaker(pipeline.blocks, plan.models[0].name)
        self.context = plan.number("context")
        self.block_tokens = plan.number("cache.block_tokens")
        self.row_budget = budget = plan.number("engine.row_budget")
        self.follower = Follower(pipeline, self.rows, budget, self._fail_step)
        self.nodes = min(plan.number("engine.draft_nodes"), self.row_budget - 1) if self.drafters else 0
        self.slots = slots = plan.number("engine.max_sequences")
        self.device = device = plan.models[0].layer_device[0]
        self.table = ParamTable(slots, self.spec.vocab, device)
        self.programs = Programs(self.target, self.drafters, pipeline.target.ops, self.table)
        staged_prefill = StagedPrefill(self.programs, self.row_budget)
        self.executor.prepare("prefill", self.programs.prefill, (), staged_prefill)
        self.executor.prepare("verify", self.programs.verify, (), StagedVerify(self.programs))
        vocab = self.spec.vocab
        self.proposer = Proposer(self.drafters, plan, self.blocks, self.table, device=device, vocab=vocab)
        self.encoding = EncodingQueue(
            pipeline.encoders, plan.parts["encoder"], self.spec.hidden, lambda seq: self._cached(seq).length
        )
        self.clock = time.monotonic
        self.tenants = TenantLedger(CREDIT_ROWS + 2 * self.row_budget)
        self.swap_rule = swap_rule(plan)
        self.answered = AnsweredTexts()
        layouts = (*(model.spec.layout for model in plan.models), *plan.layouts.values())
        self.has_slots = any(needs_checkpoints(layout) for layout in layouts)
        self.keeps_checkpoints = True
        """Whether texts that end, or whose prompt ends, leave one behind."""
        self.waiting: dict[SeqId, Sequence] = {}
        self.running: dict[SeqId, Sequence] = {}
        self.counters = dict.fromkeys(COUNTERS.split(), 0)
        self._ids = itertools.count(1)
        self.flight: Flight | None = None
        """Only of an executor that runs ahead, between two turns."""
        self._fence = Fence(0)
        """Of the newest submission."""
        self._past = Fence(0)
        """Of the newest that was read."""
        self._inbox: deque[tuple[GenerationRequest, Callable[[EngineEvent], None]] | str] = deque()
        self._wake = threading.Condition()

    # --- any thread

    def submit(self, request: GenerationRequest, sink: Callable[[EngineEvent], None]) -> None:
        """Queue a request; `sink` gets its events on the engine's thread."""
        with self._wake:
            self._inbox.append((request, sink))
            self._wake.notify()

    def cancel(self, request: str) -> None:
        """End a request before the next step."""
        with self._wake:
            self._inbox.append(request)
            self._wake.notify()

    def wait(self, timeout_s: float) -> None:
        """Sleep until there may be something to do."""
        with self._wake:
            if not (self._inbox or self.waiting or self.running):
                self._wake.wait(timeout_s)

    def nudge(self) -> None:
        """Wake a waiting engine."""
        with self._wake:
            self._wake.notify()

    # --- engine thread

    def step(self) -> bool:
        """One turn of the loop. False: nothing to do."""
        self._drain()
        self._end_late()
        if self.encoding:
            self.encoding.run(self._fail_step)
        if self.flight is not None and self._go_on(self.flight):
            return True
        if not (self.waiting or self.running):
            return False
        waiting = [self._view(seq, 0) for seq in self.waiting.values() if seq not in self.encoding]
        running = [self._view(seq, self.blocks.length(handle_of(seq))) for seq in self.running.values()]
        work, preempted = self.scheduler.plan(waiting, running, self.row_budget, self._fits)
        check_work(work, {view.seq: view for view in (*waiting, *running)}, self.row_budget)
        for seq_id in preempted:
            self._preempt(seq_id)
        prefill, held = self._admit(work)
        if prefill or held:
            rows = [*prefill, *((seq, 1) for seq, _ in held)]  # candidates are the engine's own idea
            self.tenants.charge((seq.request.tenant, count) for seq, count in rows)
            self._execute(prefill, held)
            self.counters["steps"] += 1
        elif not (preempted or self.encoding):
            self._refuse_one()
        return True

    def fail_all(self, error: str) -> None:
        """End every request with an error; for a device that is gone."""
        self._drain()
        self.flight = None
        for seq in (*self.running.values(), *self.waiting.values()):
            self._finish(seq, "error", error)

    def cancel_all(self) -> None:
        """End every request as cancelled; for shutting down."""
        self._drain()
        for seq in (*self.running.values(), *self.waiting.values()):
            self._finish(seq, "cancelled")

    def start_over(self) -> None:
        """As new, between requests: nothing cached, nothing counted."""
        self.blocks.start_over()
        self.answered = AnsweredTexts()
        self.counters = dict.fromkeys(self.counters, 0)

    # --- admit

    def _drain(self) -> None:
        with self._wake:
            arrived, self._inbox = self._inbox, deque()
        for item in arrived:
            if isinstance(item, str):
                for seq in (*self.running.values(), *self.waiting.values()):
                    if seq.request.request == item:
                        self._finish(seq, "cancelled")
            else:
                self._arrive(*item)

    def _arrive(self, request: GenerationRequest, sink: Callable[[EngineEvent], None]) -> None:
        problem = request_problem(request, self.context, self.spec.vocab)
        problem = problem or self.encoding.problem(request.media)
        known = evolve(request, media=()) if problem else request
        seq = Sequence(SeqId(next(self._ids)), known, sink, self.context, self.spec.position_axes)
        self.counters["requests"] += 1
        if problem:
            seq.finish("error", problem)
        elif request.max_tokens == 0 and not seq.scoring:
            seq.finish("length")
        else:
            seq.nodes = self.nodes
            if request.deadline_s is not None:
                seq.deadline_s = self.clock() + request.deadline_s
            self.tenants.join(request.tenant)
            self.waiting[seq.id] = seq
            sink(Progress(request.request, "queued", 0, seq.prompt))
            if seq.media is not None:
                self._encode_first(seq, self._cached(seq).length)

    def _view(self, seq: Sequence, length: int) -> SeqView:
        return seq.view(length, self.tenants.served(seq.request.tenant))

    def _end_late(self) -> None:
        """Whose deadline has passed ends, before anything is opened or computed for it."""
        now = self.clock()
        late = [s for s in (*self.running.values(), *self.waiting.values()) if s.deadline_s <= now]
        for seq in late:
            seq.late = True
            self.counters["late"] += 1
            if seq.emitted:
                seq.aside = (*seq.aside, late_notice(seq.request))
                self._finish(seq, "length")
            else:
                self._finish(seq, "error", late_error(seq.request, queued=seq.id in self.waiting))

    def _fits(self, seq_id: SeqId, rows: int) -> bool:
        """Make room for `rows` more rows, opening a waiting sequence if need be. Repeating it changes
        nothing.
        """
        seq = self.running.get(seq_id) or self.waiting[seq_id]
        if seq.handle is None and not self._open(seq):
            return False
        handle = handle_of(seq)
        missing = len(seq.tokens) - 1 - self.blocks.length(handle)
        return self.blocks.reserve(handle, min(rows, missing) if missing > 0 else rows)

    def _open(self, seq: Sequence) -> bool:
        if len(self.running) + sum(item.handle is not None for item in self.waiting.values()) >= self.slots:
            return False
        if seq.retained is not None and not self.blocks.room(len(seq.keys) + 1, step_tokens=self.row_budget):
            return False  # its state would come back from the host for nothing
        hit = self._cached(seq)
        if self._encode_first(seq, hit.length):
            return False
        try:
            seq.handle = self.blocks.open(seq.keys, hit)
        except CapacityError:
            return False
        missing = len(seq.tokens) - hit.length
        if not self.blocks.fits(seq.handle, missing, step_tokens=self.row_budget):
            self._close(seq)
            return False
        return True

    def _cached(self, seq: Sequence) -> Hit:
        return self.blocks.match(seq.findable)

    def _encode_first(self, seq: Sequence, cached: int) -> bool:
        """Whether images behind the first `cached` tokens have to be encoded before it can run."""
        if seq.media is None or not seq.media.lacking(cached):
            return False
        self.encoding.add(seq)
        return True

    def _preempt(self, seq_id: SeqId) -> None:
        """Give the memory back and queue again. What was computed stays in the prefix cache as long as it
        may, and in host memory after that, where that is worth it.
        """
        seq = self.running.pop(seq_id)
        handle = handle_of(seq)
        length = self.blocks.length(handle)
        if length:
            self._settle(seq)
            seq.retained = self.blocks.retain(handle, self.swap_rule.most_bytes(length))
            if seq.retained is not None:
                self.counters["retained"] += 1
            elif self.has_slots:  # slots outlive a sequence only in a snapshot
                self.blocks.checkpoint(handle)
        self._close(seq)
        self.waiting[seq_id] = seq
        if seq.media is not None:
            self._encode_first(seq, self._cached(seq).length)
        self.counters["preempted"] += 1

    def _admit(self, work: Seq[Work]) -> tuple[list[tuple[Sequence, int]], list[tuple[Sequence, int]]]:
        """(prefill, held) work with room for its rows. Waiting sequences that were opened and got none are
        closed.
        """
        prefill: list[tuple[Sequence, int]] = []
        held: list[tuple[Sequence, int]] = []
        for item in work:
            if not self._fits(item.seq, item.rows):
                continue
            seq = self.waiting.pop(item.seq, None) or self.running[item.seq]
            if item.seq not in self.running:
                try:
                    self._start(seq)
                except Exception as error:  # noqa: BLE001 - the request boundary: parameters no table holds
                    self._fail_step([seq], error)
                    continue
            missing = len(seq.tokens) - 1 - self.blocks.length(handle_of(seq))
            if missing > 0:
                prefill.append((seq, min(item.rows, missing)))
            else:
                # A cached prompt may leave nothing to prefill: its first row can be held at once.
                held.append((seq, item.rows if item.phase == "held" else 1))
        for seq in self.waiting.values():
            self._close(seq)
        return prefill, held

    def _start(self, seq: Sequence) -> None:
        if not seq.admitted_s:
            seq.admitted_s = time.monotonic()
            seq.cached = self.blocks.length(handle_of(seq))
            if not seq.scoring:
                seq.cached_turn = self.answered.within(seq.keys, seq.cached)
        self.running[seq.id] = seq
        self._release(seq)
        self.encoding.admitted(seq)
        handle = handle_of(seq)
        seq.sink(Progress(seq.request.request, "prefill", self.blocks.length(handle), len(seq.tokens) - 1))
        slot, request = self.blocks.slot(handle), seq.request
        if request.constraint is not None and seq.constraint is None:
            seq.constraint = request.constraint.start(self.spec.vocab, seq.ending)
        self.table.take(slot, request.params, request.prompt, seq.ending)
        self.table.count(slot, seq.tokens[seq.prompt :])
        self.proposer.write(slot, 0, seq.tokens)

    def _refuse_one(self) -> None:
        """Nothing could be done, and nothing will change by itself: end the request that needs most."""
        seq = max((*self.waiting.values(), *self.running.values()), key=lambda item: len(item.tokens))
        self._finish(seq, "error", no_room_error(len(seq.tokens)))

    # --- execute

    def _execute(self, prefill: list[tuple[Sequence, int]], held: list[tuple[Sequence, int]]) -> None:
        steps: list[Step] = []
        if prefill:
            steps.append(self.rows.prefill(prefill))
        left, trees = [seq for seq, _ in held], []
        try:
            if held:
                trees = self.proposer.propose([(seq, handle_of(seq), rows) for seq, rows in held])
                left, trees, masks = narrow(left, trees, self.spec.vocab, self._fail_step)
            if left:
                steps.append(self.rows.verify(left, trees, masks))
            if not steps:
                return
            handle = self.executor.submit(steps)
        except Exception as error:  # noqa: BLE001 - the request boundary of the engine
            self._fail_step([seq for seq, _ in (*prefill, *held)], error)
            return
        self._fence = handle.fence
        self.flight = Flight(handle, prefill, left, trees)
        if not self.executor.steps_ahead:
            self._read(self.flight)

    def _go_on(self, flight: Flight) -> bool:
        """Read what is under way, and before that queue what comes next, if its tokens are all that is not
        known of it. False: nothing is under way any more.
        """
        behind = self._follow(flight)
        self._read(flight)
        self.flight = behind
        return behind is not None

    def _follow(self, flight: Flight) -> Flight | None:
        here = {seq.id for seq in flight.held} == self.running.keys() and flight.plain
        if not here or self.drafters or (self.waiting and len(self.running) < self.slots):
            return None
        waiting = [self._view(seq, 0) for seq in self.waiting.values() if seq not in self.encoding]
        running = [self._view(seq, self.blocks.length(handle_of(seq))) for seq in flight.held]
        behind = self.follower(flight, waiting, running)
        if behind is not None:
            self._fence = behind.handle.fence
            self.tenants.charge((seq.request.tenant, behind.steps) for seq in behind.held)
            self.counters["steps"] += behind.steps
        return behind

    def _read(self, flight: Flight) -> None:
        """Wait for its results, and act on them; requests that ended meanwhile get nothing."""
        self.flight = None
        sequences = [*(seq for seq, _ in flight.prefill), *flight.held]
        try:
            results = flight.handle.outputs()
        except Exception as error:  # noqa: BLE001 - the request boundary of the engine
            self._fail_step(sequences, error)
            return
        finally:
            self._past = flight.handle.fence
            self.blocks.retire(self._past)
        for (seq, count), scores in zip(flight.prefill, results.get("scores", ()), strict=True):
            if seq.id in self.running:
                self._prefilled(seq, count, scores)
        for (seq, tree), verdict in zip(flight.verdicts_of, results.get("verdicts", ()), strict=True):
            if seq.id in self.running:
                self._accept(seq, tree, verdict)

    def _fail_step(self, sequences: list[Sequence], error: Exception) -> None:
        self.counters["failed_steps"] += 1
        if isinstance(error, LuceError):
            message = str(error)
        else:
            log.exception("step failed")
            message = f"The engine failed on this request: {type(error).__name__}: {error}"
        for seq in sequences:
            if not seq.finished:
                self._finish(seq, "error", message)

    # --- accept and emit

    def _prefilled(self, seq: Sequence, count: int, scores: tuple[TokenLogprob, ...]) -> None:
        handle = handle_of(seq)
        length = self.blocks.length(handle)
        self.blocks.advance(handle, seq.keys[length : length + count])
        self.counters["prompt_tokens"] += count
        done = length + count
        if seq.media is not None:
            seq.media.drop(done)
        if self.has_slots and done == seq.prompt - 1 and not seq.pinned:
            seq.pinned = True
            self._checkpoint(seq)
        seq.sink(Progress(seq.request.request, "prefill", done, len(seq.tokens) - 1))
        if scores:
            seq.score(done - len(scores), scores)
        if seq.request.max_tokens == 0 and not seq.scoring:
            self._finish(seq, "length")

    def _checkpoint(self, seq: Sequence) -> None:
        self._settle(seq)
        if self.keeps_checkpoints:
            self.blocks.checkpoint(handle_of(seq))

    def _settle(self, seq: Sequence) -> None:
        if self.has_slots:
            for model in self.models:
                model.backend.settle([self.blocks.slot(handle_of(seq))])

    def _accept(self, seq: Sequence, tree: Candidates, verdict: Verdict) -> None:
        try:
            check_picked(seq, verdict.picked)
        except Exception as error:  # noqa: BLE001 - the request boundary of the engine
            self._fail_step([seq], error)
            return
        handle = handle_of(seq)
        length = self.blocks.length(handle)
        before = seq.emitted
        reason = seq.emit(list(verdict.picked), list(verdict.logprobs))
        taken = seq.emitted - before
        seq.drafted += len(tree)
        seq.accepted += taken - 1
        self.counters["emitted_tokens"] += taken
        # Rows 0..taken-1 of the path are text now; the newest token is the anchor and has no state yet.
        self.blocks.advance(handle, seq.keys[length : length + taken])
        self.proposer.write(self.blocks.slot(handle), len(seq.tokens) - taken, seq.tokens[-taken:])
        if reason is not None:
            if self.has_slots and taken == len(verdict.path):
                self._checkpoint(seq)
            self._finish(seq, reason)

    def _finish(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> None:
        self.running.pop(seq.id, None)
        self.waiting.pop(seq.id, None)
        if reason in ("stop", "length") and seq.handle is not None:
            self.answered.add(seq.keys[: self.blocks.length(seq.handle)], seq.prompt)
        self._close(seq)
        self._release(seq)
        self.encoding.leave(seq)
        self.tenants.leave(seq.request.tenant)
        self.counters["cached_tokens"] += seq.cached
        seq.finish(reason, error)

    def _close(self, seq: Sequence) -> None:
        if seq.handle is not None:
            self.blocks.close(seq.handle, self._fence)
            self.blocks.retire(self._past)
            seq.handle = None

    def _release(self, seq: Sequence) -> None:
        if seq.retained is not None:
            self.blocks.release(seq.retained)
            seq.retained = None
