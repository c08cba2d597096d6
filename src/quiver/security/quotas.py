"""How much principals and topics may use of a node, and whose turn is next. Pure: the caller passes the time.

`TokenBucket` bounds a rate, `Quotas` decides about a request from all the buckets that it touches, `FairQueue` orders
requests so that nobody waits for somebody else's burst. A refusal is decided before anything is done, takes nothing out
of any bucket, and says when a retry can succeed.

Limits are those of the cluster's metadata, completed by the node's settings (`quiver.security.limits`). A change of
them applies from the next request on; what was used before stays used.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Generic, TypeVar

import msgspec

from quiver.errors import OverloadedError
from quiver.security.identity import ConnectionIdentity
from quiver.security.limits import QuotaLimits, QuotaTable
from quiver.security.principal import Principal

QUOTA_EXCEEDED = "quota_exceeded"
"""The code of a refusal; the error's class is `OverloadedError`."""
COUNT_RETRY_AFTER_MS = 1_000
"""When a client with too many waiting requests or connections may retry; nobody knows when one of them ends."""
ROUNDING = 1e-6
"""A bucket that lacks less than this has enough: levels are sums of fractions."""
RATES = (
    "requests_per_second",
    "mutations_per_second",
    "bytes_in_per_second",
    "bytes_out_per_second",
    "creations_per_minute",
)
"""Limits that are token buckets."""
NO_QUOTAS = QuotaTable({}, {})
ACCOUNTS_MAX = 10_000
"""Principals and topics whose use is remembered, each; beyond it the one that was idle longest starts afresh."""


class TokenBucket:
    """A rate with a burst of one second's worth, or of one interval's.

    An amount larger than the burst is granted when the bucket is full, and paid back afterwards: a large request is
    delayed, not impossible.
    """

    __slots__ = ("_burst", "_level", "_per_ms", "_updated_ms")

    def __init__(self, amount: int, *, interval_ms: int = 1_000, now_ms: float) -> None:
        self._per_ms = amount / interval_ms
        self._burst = float(amount)
        self._level = float(amount)
        self._updated_ms = now_ms

    def wait_ms(self, amount: float, now_ms: float) -> float:
        """Return the time until `amount` can be taken; 0 if it can be taken now."""
        self._fill(now_ms)
        missing = min(amount, self._burst) - self._level
        return missing / self._per_ms if missing > ROUNDING else 0.0

    def take(self, amount: float, now_ms: float) -> None:
        """Take an amount, whether it is there or not."""
        self._fill(now_ms)
        self._level -= amount

    def _fill(self, now_ms: float) -> None:
        passed_ms = max(0.0, now_ms - self._updated_ms)
        self._level = min(self._burst, self._level + passed_ms * self._per_ms)
        self._updated_ms = max(self._updated_ms, now_ms)


class _Account:
    """What one principal or topic uses."""

    __slots__ = ("buckets", "connections", "limits", "long_polls", "table")

    def __init__(self) -> None:
        self.table: QuotaTable | None = None
        """Where the limits are from."""
        self.limits = QuotaLimits()
        self.long_polls = 0
        self.connections: set[ConnectionIdentity] = set()
        """Counted only while there is a limit; those that have ended are removed when there is no room."""
        self.buckets: dict[str, TokenBucket] = {}

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is counted that ends later."""
        return not self.long_polls and not self.connections

    def set_limits(self, limits: QuotaLimits, now_ms: float) -> None:
        """Change the limits; a bucket whose rate stays the same keeps its level."""
        for name in RATES:
            amount = getattr(limits, name)
            if amount == getattr(self.limits, name):
                continue
            if amount:
                interval_ms = 60_000 if name.endswith("_per_minute") else 1_000
                self.buckets[name] = TokenBucket(amount, interval_ms=interval_ms, now_ms=now_ms)
            else:
                self.buckets.pop(name, None)
        self.limits = limits
        if not limits.connections_max:
            self.connections.clear()


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What a request takes before it is done; bytes out are counted afterwards."""

    bytes_in: int = 0
    is_mutation: bool = False
    is_creation: bool = False
    """Whether it leaves something permanent behind: a topic, a producer, a consumer."""

    def amounts(self) -> tuple[tuple[str, int], ...]:
        """Return the amount for each bucket; a byte less than none still needs a bucket that is not in debt."""
        return (
            ("requests_per_second", 1),
            ("mutations_per_second", int(self.is_mutation)),
            ("creations_per_minute", int(self.is_creation)),
            ("bytes_in_per_second", self.bytes_in),
            ("bytes_out_per_second", 0),
        )


class Quotas:
    """Decide about requests by the limits of their principal, then of their topic."""

    def __init__(
        self,
        limits: QuotaLimits | None = None,
        topic_limits: QuotaLimits | None = None,
        *,
        table: Callable[[], QuotaTable] = lambda: NO_QUOTAS,
    ) -> None:
        """`limits` are the node's own for each principal; `table` returns the newest of the cluster."""
        self._limits = limits or QuotaLimits()
        self._topic_limits = topic_limits or QuotaLimits()
        self._table = table
        self._is_unlimited = self._limits.is_unlimited and self._topic_limits.is_unlimited
        self._principals: OrderedDict[Principal, _Account] = OrderedDict()
        self._topics: OrderedDict[str, _Account] = OrderedDict()
        self.refusals: Counter[str] = Counter()
        """Refused requests, by the name of the limit."""

    @property
    def is_active(self) -> bool:
        """Return whether anything is limited at present."""
        return not self._is_unlimited or not self._table().is_empty

    def weight_of(self, principal: str) -> int:
        """Return the share of turns of a principal by its name."""
        return self._table().weight_of(principal)

    def topic_weight_of(self, topic: str) -> int:
        """Return the share of turns of a topic among those of a principal."""
        return self._table().topic_weight_of(topic)

    def admit(self, principal: Principal, use: Use, now_ms: float) -> OverloadedError | None:
        """Take what a request of a principal uses, or return why it must wait."""
        return self._admit(self._account(principal, now_ms), use, now_ms, whose=f"principal {str(principal)!r}")

    def admit_topic(self, topic: str, use: Use, now_ms: float) -> OverloadedError | None:
        """Take what a request uses of a topic's limits, or return why it must wait."""
        return self._admit(self._topic(topic, now_ms), use, now_ms, whose=f"topic {topic!r}")

    def admit_connection(self, identity: ConnectionIdentity, now_ms: float) -> OverloadedError | None:
        """Count the connection of a request, until it ends, or return why its principal may have no more."""
        account = self._account(identity.principal, now_ms)
        limit = account.limits.connections_max
        if not limit or identity in account.connections:
            return None
        if len(account.connections) >= limit:
            principal = identity.principal
            account.connections = {one for one in account.connections if one.is_open and one.principal == principal}
        if len(account.connections) >= limit:
            return self._refuse_count("connections_max", limit, identity.principal, "connections to this node")
        account.connections.add(identity)
        return None

    def charge_in(self, principal: Principal, bytes_in: int, now_ms: float) -> None:
        """Take the bytes of a body whose length was not announced; the next request waits for them."""
        if bucket := self._account(principal, now_ms).buckets.get("bytes_in_per_second"):
            bucket.take(bytes_in, now_ms)

    def charge(self, principal: Principal, topic: str, bytes_out: int, now_ms: float) -> None:
        """Take the bytes of an answer; the next request waits for them."""
        if bucket := self._account(principal, now_ms).buckets.get("bytes_out_per_second"):
            bucket.take(bytes_out, now_ms)
        if topic:
            self.charge_topic(topic, bytes_out, now_ms)

    def charge_topic(self, topic: str, bytes_out: int, now_ms: float) -> None:
        """Take the bytes of an answer about a topic; the next request to it waits for them."""
        if bucket := self._topic(topic, now_ms).buckets.get("bytes_out_per_second"):
            bucket.take(bytes_out, now_ms)

    def begin_long_poll(self, principal: Principal, now_ms: float) -> OverloadedError | None:
        """Count a request that waits, until `end_long_poll`, or return why it must not wait now."""
        account = self._account(principal, now_ms)
        limit = account.limits.long_polls_max
        if limit and account.long_polls >= limit:
            return self._refuse_count("long_polls_max", limit, principal, "requests that wait on this node")
        account.long_polls += 1
        return None

    def end_long_poll(self, principal: Principal) -> None:
        """Undo a `begin_long_poll` that was granted."""
        account = self._principals.get(principal)
        if account is not None and account.long_polls:
            account.long_polls -= 1

    def _account(self, principal: Principal, now_ms: float) -> _Account:
        account = self._principals.get(principal)
        if account is None:
            account = self._principals[principal] = _Account()
            _evict(self._principals)
        self._principals.move_to_end(principal)
        if account.table is not (table := self._table()):
            account.table = table
            account.set_limits(table.limits_of(principal, self._limits), now_ms)
        return account

    def _topic(self, topic: str, now_ms: float) -> _Account:
        account = self._topics.get(topic)
        if account is None:
            account = self._topics[topic] = _Account()
            _evict(self._topics)
        self._topics.move_to_end(topic)
        if account.table is not (table := self._table()):
            account.table = table
            account.set_limits(table.topic_limits_of(topic, self._topic_limits), now_ms)
        return account

    def _admit(self, account: _Account, use: Use, now_ms: float, *, whose: str) -> OverloadedError | None:
        needed = [(name, account.buckets[name], amount) for name, amount in use.amounts() if name in account.buckets]
        for name, bucket, amount in needed:
            # Without an amount a bucket must only be out of debt, so that answers that were too large are paid for.
            waits_ms = bucket.wait_ms(amount, now_ms)
            if waits_ms:
                self.refusals[name] += 1
                message = f"not done: {whose} is over its quota {name} of {getattr(account.limits, name)}; slow down"
                return OverloadedError(message, code=QUOTA_EXCEEDED, retry_after_ms=int(waits_ms) + 1)
        for _, bucket, amount in needed:
            bucket.take(amount, now_ms)
        return None

    def _refuse_count(self, name: str, limit: int, principal: Principal, what: str) -> OverloadedError:
        self.refusals[name] += 1
        message = (
            f"not done: principal {str(principal)!r} has {limit} {what}, which is its quota {name}; end some, or ask "
            "an administrator to raise it with quiver quota set"
        )
        return OverloadedError(message, code=QUOTA_EXCEEDED, retry_after_ms=COUNT_RETRY_AFTER_MS)


K = TypeVar("K")


def _evict(accounts: OrderedDict[K, _Account]) -> None:
    if len(accounts) <= ACCOUNTS_MAX:
        return
    idle = next((key for key, account in accounts.items() if account.is_idle), None)
    if idle is not None:
        del accounts[idle]


T = TypeVar("T")

SPENT_MAX = 1_000
"""Principals, or topics of one, with nothing waiting whose tag is remembered; beyond it all of them start afresh."""


class _Share(Generic[T]):
    """The waiting items of one principal by topic, oldest first, and the topics by their tags."""

    __slots__ = ("heap", "now", "parked", "spent", "topics")

    def __init__(self) -> None:
        self.now = 0.0
        self.spent: dict[str, float] = {}
        self.topics: dict[str, deque[T]] = {}
        self.heap: list[tuple[float, int, str]] = []
        self.parked: float | None = None
        """Its tag while all its topics are passed over."""


class FairQueue(Generic[T]):
    """Waiting items, served by principal and then by topic: each gets its share, in proportion to its weight.

    Start-time fair queueing on two levels: what is served next has the lowest tag, and being served raises the tag by
    the inverse of the weight. Who was idle starts at the present tag, so nobody saves up turns; who was just served and
    has nothing waiting keeps its raised tag, so nobody gains by asking for one thing at a time. Within a topic items
    keep their order. A topic can be passed over for a while (`block`), and keeps its place meanwhile.
    """

    def __init__(
        self, weight_of: Callable[[str], float] = lambda _: 1.0, topic_weight_of: Callable[[str], float] = lambda _: 1.0
    ) -> None:
        self._weight_of = weight_of
        self._topic_weight_of = topic_weight_of
        self._shares: dict[str, _Share[T]] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._now = 0.0
        self._spent: dict[str, float] = {}
        self._count = 0
        self._serial = 0
        self._blocked: dict[tuple[str, str], float | None] = {}
        """Topics of principals that are passed over; with their tags once they were."""

    def __len__(self) -> int:
        return self._count

    def share(self, principal: str, topic: str) -> float:
        """Return which part of all turns a topic of a principal gets, now or once it has an item waiting."""
        share = self._shares.get(principal)
        if share is None:
            return 1 / (len(self._shares) + 1)
        topics = len(share.topics) + (topic not in share.topics)
        return 1 / (len(self._shares) * topics)

    def depth(self, principal: str, topic: str) -> int:
        """Return how many items of a topic of a principal wait."""
        share = self._shares.get(principal)
        waiting = None if share is None else share.topics.get(topic)
        return 0 if waiting is None else len(waiting)

    def push(self, principal: str, topic: str, item: T) -> None:
        """Add an item."""
        self._serial += 1
        self._count += 1
        share = self._shares.get(principal)
        if share is None:
            share = self._shares[principal] = _Share()
            tag = max(self._now, self._spent.pop(principal, 0.0))
            heappush(self._heap, (tag, self._serial, principal))
        waiting = share.topics.get(topic)
        if waiting is None:
            waiting = share.topics[topic] = deque()
            self._add_topic(principal, share, topic, max(share.now, share.spent.pop(topic, 0.0)))
        waiting.append(item)

    def block(self, principal: str, topic: str) -> None:
        """Pass a topic of a principal over until `unblock`."""
        self._blocked.setdefault((principal, topic))

    def unblock(self, principal: str, topic: str) -> None:
        """Let a topic that was passed over have its turn again."""
        tag = self._blocked.pop((principal, topic), None)
        if tag is not None:
            self._serial += 1
            self._add_topic(principal, self._shares[principal], topic, tag)

    def pop(self) -> T | None:
        """Remove and return the item whose turn it is; None if there is none, or all are passed over."""
        while self._heap:
            tag, _, principal = heappop(self._heap)
            share = self._shares[principal]
            while share.heap and (principal, share.heap[0][2]) in self._blocked:
                topic_tag, _, topic = heappop(share.heap)
                self._blocked[principal, topic] = topic_tag
            if share.heap:
                self._now = tag
                return self._serve(principal, share)
            share.parked = tag
        return None

    def _add_topic(self, principal: str, share: _Share[T], topic: str, tag: float) -> None:
        heappush(share.heap, (tag, self._serial, topic))
        if share.parked is not None:
            heappush(self._heap, (max(self._now, share.parked), self._serial, principal))
            share.parked = None

    def _serve(self, principal: str, share: _Share[T]) -> T:
        """Remove and return the next item of a principal that is off the heap."""
        self._serial += 1
        self._count -= 1
        share.now, _, topic = heappop(share.heap)
        waiting = share.topics[topic]
        item = waiting.popleft()
        tag = share.now + 1.0 / self._topic_weight_of(topic)
        if waiting:
            heappush(share.heap, (tag, self._serial, topic))
        else:
            del share.topics[topic]
            _spend(share.spent, topic, tag)
        tag = self._now + 1.0 / self._weight_of(principal)
        if share.topics:
            heappush(self._heap, (tag, self._serial, principal))
        else:
            del self._shares[principal]
            _spend(self._spent, principal, tag)
        return item


def _spend(spent: dict[str, float], name: str, tag: float) -> None:
    if len(spent) >= SPENT_MAX:
        spent.clear()
    spent[name] = tag
