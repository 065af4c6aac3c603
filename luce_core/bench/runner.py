"""All tests of a run: warm-up, repetitions, a peer's in turn with ours, energy, memory."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from luce_core.bench.cases import Case, Prompts
from luce_core.bench.energy import Energy
from luce_core.bench.facts import peak_device_bytes, peak_rss_bytes
from luce_core.bench.measure import Measure, Sample
from luce_core.bench.peer import Peer
from luce_core.bench.stats import Spread, spread


@frozen
class Result:
    """One test."""

    case: Case
    tokens_s: Spread
    tokens: int
    """Of all repetitions."""
    drafted: int
    accepted: int
    bound_tokens_s: float | None
    """What the device allows (`cases.bound_of`); None where the plan knows no figure of it."""
    peak_rss_bytes: int
    peak_device_bytes: int | None
    energy: Energy | None = None
    """Of all repetitions."""
    peer_tokens_s: Spread | None = None
    peer_rss_bytes: int | None = None

    @property
    def bound_share(self) -> float | None:
        """Of the bound, what was reached."""
        return self.tokens_s.median / self.bound_tokens_s if self.bound_tokens_s else None


@frozen
class Runner:
    """Runs tests. `tick` is told before every repetition, the warm-up included."""

    measure: Measure
    prompts: Prompts
    repetitions: int
    device: str
    bound: Callable[[Case], float | None]
    peer: Peer | None = None
    tick: Callable[[str], None] = lambda what: None

    def run(self, case: Case) -> Result:
        """Warm up, then repeat. Who goes first changes each time, so that neither always runs on a warmer
        or busier machine.
        """
        self.tick(f"{case.label}: warm-up")
        prompts = self.prompts.of(case)
        self.measure.sample(case, prompts)
        if self.peer is not None:
            self.peer.sample(case, prompts[0])
        ours: list[Sample] = []
        theirs: list[Sample] = []
        for number in range(self.repetitions):
            self.tick(f"{case.label}: {number + 1} of {self.repetitions}")
            prompts = self.prompts.of(case)
            if self.peer is not None and number % 2:
                theirs.append(self.peer.sample(case, prompts[0]))
            ours.append(self.measure.sample(case, prompts))
            if self.peer is not None and not number % 2:
                theirs.append(self.peer.sample(case, prompts[0]))
        return self._result(case, ours, theirs)

    def _result(self, case: Case, ours: list[Sample], theirs: list[Sample]) -> Result:
        energies = [sample.energy for sample in ours if sample.energy is not None]
        return Result(
            case=case,
            tokens_s=spread([sample.tokens_s for sample in ours]),
            tokens=sum(sample.tokens for sample in ours),
            drafted=sum(sample.drafted for sample in ours),
            accepted=sum(sample.accepted for sample in ours),
            bound_tokens_s=self.bound(case),
            peak_rss_bytes=peak_rss_bytes(),
            peak_device_bytes=peak_device_bytes(self.device),
            energy=sum(energies[1:], energies[0]) if energies else None,
            peer_tokens_s=spread([sample.tokens_s for sample in theirs]) if theirs else None,
            peer_rss_bytes=self.peer.memory() if self.peer is not None else None,
        )
