"""How much principals and topics may use of a node, and whose turn is next. Pure: the caller passes the time.

`TokenBucket` bounds a rate, `Quotas` decides about a request from all the buckets that it touches, `FairQueue` orders
requests so that nobody waits for somebody else's burst. A refusal is decided before anything is done, takes nothing out
of any bucket, and says when a retry can succeed.

Limits come from a function of the principal, so that limits per principal can replace the node's settings one day.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Generic, TypeVar

import msgspec

from quiver.errors import OverloadedError
from quiver.security.principal import Principal

QUOTA_EXCEEDED = "quota_exceeded"
"""The code of a refusal; the error's class is `OverloadedError`."""
LONG_POLL_RETRY_AFTER_MS = 1_000
"""When a client with too many waiting requests may retry; nobody knows when one of them ends."""
ROUNDING = 1e-6
"""A bucket that lacks less than this has enough: levels are sums of fractions."""
ACCOUNTS_MAX = 10_000
"""Principals and topics whose use is remembered, each; beyond it the one that was idle longest starts afresh."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one principal or one topic; 0 is none."""

    requests_per_second: int = 0
    mutations_per_second: int = 0
    bytes_in_per_second: int = 0
    bytes_out_per_second: int = 0
    creations_per_minute: int = 0
    long_polls_max: int = 0

    @property
    def is_unlimited(self) -> bool:
        """Whether nothing is limited."""
        return not any(msgspec.structs.astuple(self))


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

    __slots__ = ("buckets", "limits", "long_polls")

    def __init__(self, limits: Limits, now_ms: float) -> None:
        self.limits = limits
        self.long_polls = 0
        self.buckets: dict[str, TokenBucket] = {}
        for name in ("requests", "mutations", "bytes_in", "bytes_out"):
            if amount := getattr(limits, f"{name}_per_second"):
                self.buckets[name] = TokenBucket(amount, now_ms=now_ms)
        if limits.creations_per_minute:
            self.buckets["creations"] = TokenBucket(limits.creations_per_minute, interval_ms=60_000, now_ms=now_ms)


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What a request takes before it is done; bytes out are counted afterwards."""

    bytes_in: int = 0
    is_mutation: bool = False
    is_creation: bool = False
    """Whether it leaves something permanent behind: a topic, a producer, a consumer."""

    def amounts(self) -> tuple[tuple[str, int], ...]:
        """Return the amount for each bucket; a byte less than none still needs a bucket that is not in debt."""
        return (
            ("requests", 1),
            ("mutations", int(self.is_mutation)),
            ("creations", int(self.is_creation)),
            ("bytes_in", self.bytes_in),
            ("bytes_out", 0),
        )


class Quotas:
    """Decide about requests by the limits of their principal, then of their topic."""

    def __init__(self, limits_of: Callable[[Principal], Limits], topic_limits: Limits) -> None:
        self._limits_of = limits_of
        self._topic_limits = topic_limits
        self._principals: OrderedDict[Principal, _Account] = OrderedDict()
        self._topics: OrderedDict[str, _Account] = OrderedDict()

    def admit(self, principal: Principal, use: Use, now_ms: float) -> OverloadedError | None:
        """Take what a request of a principal uses, or return why it must wait."""
        return _admit(self._account(principal, now_ms), use, now_ms, whose=f"principal {str(principal)!r}")

    def admit_topic(self, topic: str, use: Use, now_ms: float) -> OverloadedError | None:
        """Take what a request uses of a topic's limits, or return why it must wait."""
        return _admit(self._topic(topic, now_ms), use, now_ms, whose=f"topic {topic!r}")

    def charge_in(self, principal: Principal, bytes_in: int, now_ms: float) -> None:
        """Take the bytes of a body whose length was not announced; the next request waits for them."""
        if bucket := self._account(principal, now_ms).buckets.get("bytes_in"):
            bucket.take(bytes_in, now_ms)

    def charge(self, principal: Principal, topic: str, bytes_out: int, now_ms: float) -> None:
        """Take the bytes of an answer; the next request waits for them."""
        accounts = [self._account(principal, now_ms)]
        if topic:
            accounts.append(self._topic(topic, now_ms))
        for account in accounts:
            if bucket := account.buckets.get("bytes_out"):
                bucket.take(bytes_out, now_ms)

    def begin_long_poll(self, principal: Principal, now_ms: float) -> OverloadedError | None:
        """Count a request that waits, until `end_long_poll`, or return why it must not wait now."""
        account = self._account(principal, now_ms)
        limit = account.limits.long_polls_max
        if limit and account.long_polls >= limit:
            message = f"not done: principal {str(principal)!r} has {limit} waiting requests, which is its limit"
            return OverloadedError(message, code=QUOTA_EXCEEDED, retry_after_ms=LONG_POLL_RETRY_AFTER_MS)
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
            account = self._principals[principal] = _Account(self._limits_of(principal), now_ms)
            _evict(self._principals)
        self._principals.move_to_end(principal)
        return account

    def _topic(self, topic: str, now_ms: float) -> _Account:
        account = self._topics.get(topic)
        if account is None:
            account = self._topics[topic] = _Account(self._topic_limits, now_ms)
            _evict(self._topics)
        self._topics.move_to_end(topic)
        return account


K = TypeVar("K")


def _evict(accounts: OrderedDict[K, _Account]) -> None:
    if len(accounts) <= ACCOUNTS_MAX:
        return
    idle = next((key for key, account in accounts.items() if not account.long_polls), None)
    if idle is not None:
        del accounts[idle]


def _admit(account: _Account, use: Use, now_ms: float, *, whose: str) -> OverloadedError | None:
    needed = [(name, account.buckets[name], amount) for name, amount in use.amounts() if name in account.buckets]
    for name, bucket, amount in needed:
        # Without an amount a bucket must only be out of debt, so that answers that were too large are paid for.
        waits_ms = bucket.wait_ms(amount, now_ms)
        if waits_ms:
            message = f"not done: {whose} is over its quota of {name.replace('_', ' ')}"
            return OverloadedError(message, code=QUOTA_EXCEEDED, retry_after_ms=int(waits_ms) + 1)
    for _, bucket, amount in needed:
        bucket.take(amount, now_ms)
    return None


T = TypeVar("T")

SPENT_MAX = 1_000
"""Principals, or topics of one, with nothing waiting whose tag is remembered; beyond it all of them start afresh."""


class _Share(Generic[T]):
    """The waiting items of one principal by topic, oldest first, and the topics by their tags."""

    __slots__ = ("heap", "now", "spent", "topics")

    def __init__(self) -> None:
        self.now = 0.0
        self.spent: dict[str, float] = {}
        self.topics: dict[str, deque[T]] = {}
        self.heap: list[tuple[float, int, str]] = []


class FairQueue(Generic[T]):
    """Waiting items, served by principal and then by topic: each gets its share, in proportion to its weight.

    Start-time fair queueing on two levels: what is served next has the lowest tag, and being served raises the tag by
    the inverse of the weight. Who was idle starts at the present tag, so nobody saves up turns; who was just served and
    has nothing waiting keeps its raised tag, so nobody gains by asking for one thing at a time. Within a topic items
    keep their order.
    """

    def __init__(self, weight_of: Callable[[str], float] = lambda _: 1.0) -> None:
        self._weight_of = weight_of
        self._shares: dict[str, _Share[T]] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._now = 0.0
        self._spent: dict[str, float] = {}
        self._count = 0
        self._serial = 0

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
            tag = max(share.now, share.spent.pop(topic, 0.0))
            heappush(share.heap, (tag, self._serial, topic))
        waiting.append(item)

    def pop(self) -> T:
        """Remove and return the item whose turn it is; there must be one."""
        self._serial += 1
        self._count -= 1
        self._now, _, principal = heappop(self._heap)
        share = self._shares[principal]
        share.now, _, topic = heappop(share.heap)
        waiting = share.topics[topic]
        item = waiting.popleft()
        if waiting:
            heappush(share.heap, (share.now + 1.0, self._serial, topic))
        else:
            del share.topics[topic]
            _spend(share.spent, topic, share.now + 1.0)
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
