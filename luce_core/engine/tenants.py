"""Who was served how much, and who may still queue. Both forget whoever has nothing here any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from luce_core.errors import CapacityError

CREDIT_ROWS = 8192
"""Rows a tenant may be behind; whoever was served so much less had no use for more."""
REMEMBERED = 1024
"""Tenants that left ahead of the others and are remembered so."""
FREE_SHARE = 3
"""A tenant may hold so many times the places of the queue that are free. Alone it gets 3 of 4, two get 3 of 7
each: a place is left for whoever comes next.
"""


class TenantLedger:
    """Rows served by tenant, for `SeqView.served`. Engine thread only.

    credit: rows a tenant may be behind at most. Whoever arrives starts level with the tenant that was
    served least of those present: time spent away is no credit. Whoever left ahead of the others comes
    back ahead of them: leaving pays no debt.
    """

    def __init__(self, credit: int = CREDIT_ROWS, remembered: int = REMEMBERED) -> None:
        self.credit = credit
        self.remembered = remembered
        self._requests: Counter[str] = Counter()
        self._served: dict[str, int] = {}
        self._left: dict[str, int] = {}

    def join(self, tenant: str) -> None:
        """A request of `tenant` arrived."""
        if not self._requests[tenant]:
            self._served[tenant] = max(self._left.pop(tenant, 0), self._least())
        self._requests[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of `tenant` ended."""
        self._requests[tenant] -= 1
        if self._requests[tenant]:
            return
        del self._requests[tenant]
        self._left[tenant] = self._served.pop(tenant)
        least = self._least() if self._served else max(self._left.values())
        kept = sorted(((rows, name) for name, rows in self._left.items() if rows > least), reverse=True)
        self._left = {name: rows for rows, name in kept[: self.remembered]}

    def charge(self, rows: Iterable[tuple[str, int]]) -> None:
        """What tenants, all present, were given in a step."""
        for tenant, count in rows:
            self._served[tenant] += count
        least = max(self._served.values(), default=0) - self.credit
        for tenant, served in self._served.items():
            if served < least:
                self._served[tenant] = least

    def served(self, tenant: str) -> int:
        """Rows of a tenant that is present."""
        return self._served[tenant]

    def _least(self) -> int:
        return min(self._served.values(), default=0)

    def __len__(self) -> int:
        """Tenants present or remembered."""
        return len(self._served) + len(self._left)


class QueueBook:
    """The unfinished requests of a channel, at most `most`. The caller holds a lock.

    Once two tenants have come, each may hold FREE_SHARE times the free places, so that none fills the queue.
    As long as there is only one, it may hold all.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: dict[str, str] = {}
        self._by_tenant: Counter[str] = Counter()
        self._first: str | None = None
        self._several = False

    def enter(self, request: str, tenant: str) -> None:
        """Raises CapacityError when the queue, or the tenant's part of it, is full."""
        if request in self._open:
            raise AssertionError(f"request id {request!r} is in use")
        self._first = tenant if self._first is None else self._first
        self._several = self._several or tenant != self._first
        free, own = self.most - len(self._open), self._by_tenant[tenant]
        if not free:
            raise CapacityError(
                f"{self.most - free} requests are unfinished; {self.most} may be. Retry later."
            )
        if self._several and own >= FREE_SHARE * free:
            raise CapacityError(
                f"{own} requests of this API key are unfinished, and {free} of {self.most} places are free, "
                "which are kept for other keys. Retry when some of yours are done."
            )
        self._open[request] = tenant
        self._by_tenant[tenant] += 1

    def leave(self, request: str) -> None:
        """The request ended; unknown ids are ignored."""
        tenant = self._open.pop(request, None)
        if tenant is not None:
            self._by_tenant[tenant] -= 1
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]

    def __contains__(self, request: str) -> bool:
        return request in self._open

    def __len__(self) -> int:
        return len(self._open)
