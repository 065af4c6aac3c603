"""What one step computes: prefill, and the verify-accept-commit of held rows. Host data in, host data out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from luce_core.contracts import (
    SCORE_LOGITS_BYTES,
    Commit,
    Drafter,
    ForwardBatch,
    LoadedModel,
    Tap,
    TokenLogprob,
)
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops.sampling import ParamTable
from luce_core.speculation.tree import accept


@frozen
class Verdict:
    """(host) What became of one sequence's held rows."""

    path: tuple[int, ...]
    """Accepted rows, root to last."""
    picked: tuple[int, ...]
    """The target's pick at each of them; the last is the new anchor."""
    logprobs: tuple[TokenLogprob, ...] = ()

    @staticmethod
    def of(
        path: Sequence[int], picked: Sequence[int], logprobs: Sequence[TokenLogprob] | None, want: int
    ) -> Verdict:
        """picked, logprobs: of every row of the sequence; want: as `top` of `verify`."""
        trimmed = tuple(_trim(logprobs[row], want) for row in path) if logprobs and want else ()
        return Verdict(tuple(path), tuple(picked[row] for row in path), trimmed)


class Programs:
    """The programs an executor runs for one target. Created once, before the engine starts."""

    def __init__(self, target: LoadedModel, drafters: Sequence[Drafter], ops: Any, table: ParamTable) -> None:
        self._target = target
        self.backend = target.backend
        self.head = target.target.head
        self.score_rows = max(1, SCORE_LOGITS_BYTES // (4 * target.backend.spec.vocab))
        self.axes = target.backend.spec.position_axes
        self.drafters = tuple(drafters)
        self.taps = tuple(
            sorted({tap for d in drafters for tap in d.taps}, key=lambda tap: (tap.kind, tap.layer))
        )
        spec = target.backend.spec
        widths = {"residual": spec.tap_width, "final": spec.final_width}
        self.tap_widths = {tap: widths[tap.kind] for tap in self.taps}
        self.ops = ops
        self.table = table
        self.least_blocks = 1
        """Columns that block tables have at least; more: as behind a long text."""

    @property
    def generation(self) -> int:
        """Of the target: rises when its tensors move."""
        return self._target.generation

    def _batch(self, phase: Any, rows: Sequence[RowSet]) -> ForwardBatch:
        taps: Mapping[Tap, torch.Tensor] = {}
        if self.taps:
            count = sum(len(row.tokens) for row in rows)
            taps = {
                tap: torch.empty(count, width, dtype=torch.bfloat16, device=self.table.device)
                for tap, width in self.tap_widths.items()
            }
        return make_batch(
            phase,
            rows,
            axes=self.axes,
            device=self.table.device,
            taps=taps,
            least_blocks=self.least_blocks,
        )

    def prefill(
        self, rows: Sequence[RowSet], targets: Sequence[Sequence[int]], top: Sequence[int]
    ) -> Mapping[str, Any]:
        """Write the state of prompt chunks; nothing is sampled. Per sequence, targets: the tokens behind its
        wanted rows, which are scored; top: alternatives reported of each.
        """
        batch = self._batch("prefill", rows)
        final = self.backend.forward(batch).final
        for drafter in self.drafters:
            drafter.observe(batch, None)
        return {"scores": self._scores(final, targets, top) if any(targets) else [()] * len(rows)}

    def _scores(
        self, final: torch.Tensor, targets: Sequence[Sequence[int]], top: Sequence[int]
    ) -> list[tuple[TokenLogprob, ...]]:
        every = [token for one in targets for token in one]
        wanted = torch.tensor(every, dtype=torch.int64, device=self.table.device)
        scored = self.ops.prompt_logprobs(self.head, final, wanted, max(top), self.score_rows)
        entries = zip(every, *(column.tolist() for column in scored), strict=True)
        return [
            tuple(
                TokenLogprob(token, own, tuple(zip(ids[:most], values[:most], strict=True)), rank)
                for token, own, rank, values, ids in itertools.islice(entries, len(one))
            )
            for one, most in zip(targets, top, strict=True)
        ]

    def verify(self, rows: Sequence[RowSet], top: Sequence[int], steps: int = 1) -> Mapping[str, Any]:
        """Run held rows, let the target pick, accept, commit. top: logprobs wanted per sequence, 0 = none.
        steps: one; more are for `StagedVerify` alone.
        """
        if steps != 1:
            raise AssertionError(f"asked for {steps} steps as a plain call")
        batch = self._batch("held", rows)
        logits = self.backend.forward(batch).logits
        if logits is None:
            raise AssertionError("a held batch returned no logits")
        params = self.table.step(row.slot for row in rows)
        picks = self.ops.sample(self.ops.process_logits(logits, batch, params), batch, params)
        picked: list[int] = picks.tolist()
        paths: list[list[int]] = []
        starts: list[int] = []
        start = 0
        for row in rows:
            count = len(row.tokens)
            parents = range(-1, count - 1) if row.parents is None else row.parents
            paths.append(accept(row.tokens, parents, picked[start : start + count], row.sure))
            starts.append(start)
            start += count
        commit = make_commit(paths, self.table.device)
        self.backend.commit(batch, commit)
        for drafter in self.drafters:
            drafter.observe(batch, commit)
        logprobs = self.logprobs(logits, picks, max(top)) if any(top) else None
        verdicts = make_verdicts(paths, starts, picked, logprobs, top)
        self.count(rows, verdicts)
        return {"verdicts": verdicts}

    def count(self, rows: Sequence[RowSet], verdicts: Sequence[Verdict], noted: bool = False) -> None:
        """What was picked is text now, as far as sampling goes: a text that ends before is not sampled again.
        noted: the device has counted it.
        """
        for row, verdict in zip(rows, verdicts, strict=True):
            self.table.count(row.slot, verdict.picked, noted)

    def logprobs(self, logits: torch.Tensor, picks: torch.Tensor, top: int) -> list[TokenLogprob]:
        """picks: here or in host memory."""
        own, values, ids = self.ops.logprobs(logits, picks.to(logits.device), top)
        return [
            TokenLogprob(token, logprob, tuple(zip(row_ids, row_values, strict=True)))
            for token, logprob, row_ids, row_values in zip(
                picks.tolist(), own.tolist(), ids.tolist(), values.tolist(), strict=True
            )
        ]


def make_verdicts(
    paths: Sequence[Sequence[int]],
    starts: Sequence[int],
    picked: Sequence[int],
    logprobs: Sequence[TokenLogprob] | None,
    top: Sequence[int],
) -> list[Verdict]:
    """Per sequence, whose rows begin at `starts` of picked and logprobs."""
    return [
        Verdict.of(path, picked[start:], logprobs and logprobs[start:], want)
        for path, start, want in zip(paths, starts, top, strict=True)
    ]


def _trim(entry: TokenLogprob, want: int) -> TokenLogprob:
    """`want` counts the alternatives plus one, so that 1 means: only the token itself."""
    return TokenLogprob(entry.token, entry.logprob, entry.top[: want - 1])


def make_commit(paths: Sequence[Sequence[int]], device: str) -> Commit:
    longest = max(len(path) for path in paths)
    padded = [list(path) + [0] * (longest - len(path)) for path in paths]
    return Commit(
        path=torch.tensor(padded, dtype=torch.int32, device=device),
        count=torch.tensor([len(path) for path in paths], dtype=torch.int32, device=device),
    )
