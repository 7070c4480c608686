"""Who is next: the orders in which waiting requests are admitted and running ones give way. No torch.

Contract: a policy holds the waiting requests and charges tenants for tokens; it never touches blocks or requests' progress. Smaller
keys go first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from hexad.orchestration.request import Request

Key = tuple[float, float, int]


class Policy(Protocol):
    """Order of admission, and how running requests rank when blocks run out."""

    charges: bool  # `charge` has an effect: the scheduler need not call it otherwise
    displaces: bool  # a prompt may take the blocks of a running request of worse priority that already has a row in the step

    def push(self, request: Request) -> None: ...

    def peek(self) -> Request | None:
        """The waiting request that is next; it stays until removed."""
        ...

    def remove(self, request: Request) -> None: ...

    def rank(self, request: Request) -> Key:
        """Rank among running requests, fixed for the request's life: the largest is preempted first."""
        ...

    def key(self, request: Request) -> Key:
        """Order in which prompts get the step's tokens, running or waiting; may change with every charge."""
        ...

    def victim_for_blocks(self, request: Request, running: Sequence[Request]) -> Request | None:
        """The running request (best rank first) that gives way when a waiting one finds no blocks; None: it waits."""
        ...

    def victim_for_slot(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Likewise when `max_num_seqs` requests run."""
        ...

    def charge(self, request: Request, num_tokens: int) -> None:
        """Tokens were planned for the request."""
        ...

    def started(self, request: Request) -> None:
        """It was removed from the queue and runs now."""
        ...

    def stopped(self, request: Request) -> None:
        """It runs no more (finished or preempted)."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class OrderedQueue:
    """Requests by a fixed key: a heap whose removed entries are skipped."""

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._heap: list[tuple[Key, int, Request]] = []  # the number of the push tells a live entry from a removed one
        self._members: dict[int, tuple[Key, int, Request]] = {}  # rid -> its live entry
        self._pushes = 0

    def key(self, request: Request) -> Key:
        return (request.priority if self._by_priority else 0, 0, request.seq)

    def push(self, request: Request) -> None:
        assert request.rid not in self._members
        self._pushes += 1
        entry = (self.key(request), self._pushes, request)
        self._members[request.rid] = entry
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request | None:
        heap = self._heap
        while heap and self._members.get(heap[0][2].rid) is not heap[0]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def remove(self, request: Request) -> None:
        del self._members[request.rid]
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = list(self._members.values())
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._members.values())


class OrderPolicy(OrderedQueue):
    """ "fcfs": first come, first served. "priority": by priority, then arrival; the better may take the blocks of the worse."""

    charges = False

    def __init__(self, by_priority: bool) -> None:
        super().__init__(by_priority)
        self.displaces = by_priority

    def rank(self, request: Request) -> Key:
        return self.key(request)

    def victim_for_blocks(self, request: Request, running: Sequence[Request]) -> Request | None:
        worst = running[-1] if running and self.displaces else None
        return worst if worst is not None and worst.priority > request.priority else None

    def victim_for_slot(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Nobody: a slot frees soon, and giving one up costs a recompute."""
        return None

    def charge(self, request: Request, num_tokens: int) -> None:
        """Tokens are free here."""

    def started(self, request: Request) -> None:
        """Nothing to count."""

    def stopped(self, request: Request) -> None:
        """Nothing to count."""


class Tenant:
    """One tenant's account."""

    __slots__ = ("num_running", "queue", "served", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.served = 0.0  # tokens computed for it, divided by its weight
        self.queue = OrderedQueue(by_priority=True)
        self.num_running = 0

    @property
    def present(self) -> bool:
        """It has work here, waiting or running."""
        return bool(self.num_running or len(self.queue))


class FairPolicy:
    """Token-fair between tenants: the one served least goes first; within a tenant by priority, then arrival.

    The counter of a tenant that was away is lifted to the smallest of those present, so that absence saves up no credit (Virtual Token
    Counter, Sheng et al. 2024). Tokens are charged when they are planned, prompts and outputs alike. A tenant with nothing running does not
    wait for another's long outputs: the one with the most running requests for its weight, and at least two, gives up its latest.
    """

    charges = True
    displaces = False

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._tenants: dict[str, Tenant] = {}
        self._num_waiting = 0

    def rank(self, request: Request) -> Key:
        return (request.priority, 0, request.seq)

    def key(self, request: Request) -> Key:
        return (self._tenants[request.tenant].served, request.priority, request.seq)

    def push(self, request: Request) -> None:
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            self._forget_absent()
            tenant = self._tenants[request.tenant] = Tenant(self._weights.get(request.tenant, 1.0))
        if not tenant.present:
            tenant.served = max(tenant.served, self._least())
        tenant.queue.push(request)
        self._num_waiting += 1

    def peek(self) -> Request | None:
        tenant = self._next()
        return tenant.queue.peek() if tenant is not None else None

    def remove(self, request: Request) -> None:
        self._tenants[request.tenant].queue.remove(request)
        self._num_waiting -= 1

    def victim_for_blocks(self, request: Request, running: Sequence[Request]) -> Request | None:
        return self.victim_for_slot(request, running)

    def victim_for_slot(self, request: Request, running: Sequence[Request]) -> Request | None:
        if self._tenants[request.tenant].num_running:
            return None
        crowd = [tenant for tenant in self._tenants.values() if tenant.num_running > 1]
        most = max(crowd, key=lambda tenant: tenant.num_running / tenant.weight, default=None)
        return next((member for member in reversed(running) if self._tenants[member.tenant] is most), None)

    def charge(self, request: Request, num_tokens: int) -> None:
        tenant = self._tenants[request.tenant]
        tenant.served += num_tokens / tenant.weight

    def started(self, request: Request) -> None:
        self._tenants[request.tenant].num_running += 1

    def stopped(self, request: Request) -> None:
        self._tenants[request.tenant].num_running -= 1

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        for tenant in self._tenants.values():
            yield from tenant.queue

    def _next(self) -> Tenant | None:
        """The tenant with waiting requests that was served least (ties: the earlier head)."""
        waiting = [tenant for tenant in self._tenants.values() if len(tenant.queue)]
        return min(waiting, key=_turn, default=None)

    def _least(self) -> float:
        return min((tenant.served for tenant in self._tenants.values() if tenant.present), default=0.0)

    def _forget_absent(self) -> None:
        """Drop accounts that no longer matter: all when nobody is here, else those that would be lifted to the least counter anyway."""
        if not self._num_waiting and not any(tenant.present for tenant in self._tenants.values()):
            self._tenants.clear()
        elif len(self._tenants) > MAX_ABSENT_TENANTS:
            least = self._least()
            self._tenants = {name: tenant for name, tenant in self._tenants.items() if tenant.present or tenant.served > least}


MAX_ABSENT_TENANTS = 1_024


def _turn(tenant: Tenant) -> tuple[float, int]:
    head = tenant.queue.peek()
    assert head is not None
    return (tenant.served, head.seq)


def make_policy(name: str, tenant_weights: Mapping[str, float]) -> Policy:
    """The policy of a configuration value ("fcfs", "priority" or "fair")."""
    if name == "fair":
        return FairPolicy(tenant_weights)
    assert name in ("fcfs", "priority"), name
    return OrderPolicy(by_priority=name == "priority")
