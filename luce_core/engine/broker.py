"""Who may take memory of a device after start-up.

The plan's claims are entered once. Whoever needs more for a while leases it; when too little is free, owners
that offered to give back are asked in the order of their offers, never below the floor of their claims.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from attrs import frozen

from luce_core.contracts import Claim
from luce_core.errors import CapacityError, EngineError


@frozen
class Holding:
    """What one owner holds now."""

    owner: str
    num_bytes: int
    floor_bytes: int
    """Never reclaimed."""
    reclaimable: bool
    """It offered to give back what lies above the floor."""


def show_bytes(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    size, units = float(num_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"


class DeviceBroker:
    """`contracts.MemoryBroker` of one device.

    Any thread may call it; one lock is held while owners give back, so leases are served one after another.
    A reclaim callback runs on the leasing thread and may not call the broker.
    """

    def __init__(self, device: str, capacity_bytes: int, claims: Iterable[Claim] = ()) -> None:
        self.device = device
        self.capacity_bytes = capacity_bytes
        self._held: dict[str, int] = {}
        self._floor: dict[str, int] = {}
        self._claimed: dict[str, int] = {}
        self._offers: dict[str, Callable[[int], int]] = {}
        self._lock = threading.RLock()
        self._asking: str | None = None
        for claim in claims:
            self._check(claim)
            self._add(claim)
        if self.free_bytes < 0:
            raise CapacityError(
                f"The claims on device {device!r} do not fit: got {self._table()}; wanted at most "
                f"{show_bytes(capacity_bytes)}. Lower --ctx-size or --max-sequences, or choose a smaller "
                "model."
            )

    # --- contract

    @contextmanager
    def lease(self, claim: Claim) -> Iterator[None]:
        """Hold `claim.num_bytes` while the context lasts; the floor is ignored: a lease is not reclaimed.

        Raises CapacityError, with who holds what, when the offers do not give enough back; nothing more is
        reclaimed than was asked for, and what was reclaimed stays free.
        """
        self._check(claim)
        with self._lock:
            self._not_from_reclaim(claim.owner)
            self._make_free(claim)
            self._add(claim, floor=claim.num_bytes)
        try:
            yield
        finally:
            with self._lock:
                self._add(claim, floor=claim.num_bytes, sign=-1)

    def offer(self, owner: str, reclaim: Callable[[int], int]) -> None:
        """`owner`, who has a claim, can give back: `reclaim(bytes wanted) -> bytes freed`.

        Owners are asked in the order they offered.
        """
        with self._lock:
            if owner not in self._held:
                raise EngineError(
                    f"{owner!r} offers memory of device {self.device!r} without a claim. Claims are of: "
                    f"{', '.join(sorted(self._held)) or 'nobody'}."
                )
            if owner in self._offers:
                raise EngineError(f"{owner!r} offers memory of device {self.device!r} twice. Offer once.")
            self._offers[owner] = reclaim

    # --- beyond it

    def withdraw(self, owner: str) -> None:
        """`owner` gives nothing back any more: a model is unloaded, a cache closed."""
        with self._lock:
            self._not_from_reclaim(owner)
            if self._offers.pop(owner, None) is None:
                raise EngineError(f"{owner!r} withdraws an offer on device {self.device!r} it never made.")

    def regain(self, owner: str, num_bytes: int) -> int:
        """Take back up to `num_bytes` of what was reclaimed from `owner`, as far as memory is free now.

        Returns the bytes granted; reclaims from nobody.
        """
        with self._lock:
            self._not_from_reclaim(owner)
            lost = self._claimed.get(owner, 0) - self._held.get(owner, 0)
            granted = max(0, min(num_bytes, lost, self.free_bytes))
            if granted:
                self._held[owner] += granted
            return granted

    @property
    def free_bytes(self) -> int:
        """Bytes nobody holds."""
        with self._lock:
            return self.capacity_bytes - sum(self._held.values())

    def holdings(self) -> tuple[Holding, ...]:
        """Who holds what, for metrics and error messages."""
        with self._lock:
            return tuple(
                Holding(owner, held, self._floor[owner], owner in self._offers)
                for owner, held in self._held.items()
            )

    # --- inside the lock

    def _check(self, claim: Claim) -> None:
        if claim.device != self.device:
            raise EngineError(
                f"{claim.owner!r} claims memory of {claim.device!r} from the broker of {self.device!r}."
            )
        if not 0 <= claim.floor_bytes <= claim.num_bytes:
            raise EngineError(
                f"{claim.owner!r} claims {claim.num_bytes} bytes with a floor of {claim.floor_bytes}; wanted "
                "0 <= floor <= bytes."
            )

    def _not_from_reclaim(self, owner: str) -> None:
        if self._asking is not None:
            raise EngineError(
                f"{owner!r} asks for memory of device {self.device!r} while {self._asking!r} gives back. "
                "A reclaim callback may not call the broker."
            )

    def _add(self, claim: Claim, *, floor: int | None = None, sign: int = 1) -> None:
        owner = claim.owner
        for table, amount in (
            (self._held, claim.num_bytes),
            (self._claimed, claim.num_bytes),
            (self._floor, claim.floor_bytes if floor is None else floor),
        ):
            table[owner] = table.get(owner, 0) + sign * amount
        if not self._claimed[owner] and owner not in self._offers:
            for table in (self._held, self._claimed, self._floor):
                del table[owner]

    def _make_free(self, claim: Claim) -> None:
        for owner, reclaim in self._offers.items():
            missing = claim.num_bytes - self.free_bytes
            above = self._held[owner] - self._floor[owner]
            if missing > 0 and above > 0:
                self._ask(owner, reclaim, min(missing, above), above)
        if claim.num_bytes > self.free_bytes:
            raise CapacityError(
                f"Memory of device {self.device!r} is too small for {claim.owner!r} ({claim.kind}): got "
                f"{show_bytes(self.free_bytes)} free, wanted {show_bytes(claim.num_bytes)} of "
                f"{show_bytes(self.capacity_bytes)}. Held: {self._table()}. Close requests, lower "
                "--ctx-size, or unload a model."
            )

    def _ask(self, owner: str, reclaim: Callable[[int], int], wanted: int, above: int) -> None:
        self._asking = owner
        try:
            freed = reclaim(wanted)
        finally:
            self._asking = None
        if not 0 <= freed <= above:
            raise EngineError(
                f"{owner!r} says it freed {freed} bytes of device {self.device!r}; it held {above} above its "
                "floor."
            )
        self._held[owner] -= freed

    def _table(self) -> str:
        lines = (
            f"{item.owner} {show_bytes(item.num_bytes)} (keeps {show_bytes(item.floor_bytes)})"
            for item in self.holdings()
        )
        return ", ".join(lines) or "nothing"
