"""Whose request is started next when a node has more to do than its event loop can do. One object per node.

While the loop keeps up, every request is started when it arrives; this costs an addition. Once the requests of one turn
of the loop take longer than `TURN_S`, further ones wait in a queue that is fair to principals and then to topics, and
the loop works off what was started before the next ones are. HTTP and the wire share the queue, so that nobody gets a
second share by a second protocol. Nodes, Raft and health checks never wait here: their server does not ask.

A topic may queue what the node can work off in `WAIT_S_MAX`, by the rate that was measured, and nothing that would
wait beyond its own deadline; the rest is refused when it arrives. Refusing takes time, too: it costs a fifth of a small
request. So a connection that was refused is not read for a while, and while others wait, refused connections are read
again only at a part of the rate at which requests are started. What they send stays in the kernel, whose flow control
slows its sender.

What was started takes several rounds of the loop, and everybody's rounds are as long as all that is under way. So while
requests of others wait for their turns too, a topic has only as much under way as the loop does in `UNDER_WAY_S`. A
topic that has the node to itself has no such limit, nor has one whose requests wait for disks or for other nodes while
the loop is idle: more of them in one write is what makes it fast.

Invariants: a waiter is started, dropped or found to be gone exactly once; the order within a topic is that of arrival;
who is started with a `Flow` ends its work exactly once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import ceil, inf
from typing import NamedTuple, Protocol

from quiver.security.quotas import FairQueue

TURN_STARTS = 8
"""Requests of one turn of the loop that are started without looking at the time."""
TURN_S = 0.001
"""Time for starting requests in one turn of the loop: between turns the loop does what was started."""
RATE_FIRST = 2_000.0
"""Requests that are started per second, until it is measured; a lower rate returns to it while no requests wait."""
RATE_WEIGHT = 0.1
"""Weight of a turn in the average rate."""
WAIT_S_MAX = 0.25
"""Requests that would wait longer for their turn, at the present rate, are refused when they arrive. Much less than the
patience of clients: what they have given up must not fill the queue."""
WAITING_MIN = 4
"""Requests of one topic of one principal that may always wait."""
REFUSAL_S = 0.000_1
"""What a refusal takes; a turn is longer by what was spent on them since the last, so that at least half of the time is
left to requests however many are refused."""
TURN_S_MAX = 0.02
"""Longest turn."""
PENALTY_S = 0.02
"""A connection is not read for this long after a refusal, so that whoever ignores `Retry-After` costs little."""
REFUSALS_SHARE = 0.25
"""Refused connections that are read again for each request that is started, while requests wait."""

UNDER_WAY_S = 0.005
"""While others wait, a topic has under way what the node does in this time."""
UNDER_WAY_MIN = 16
"""Requests that a topic may always have under way."""
CONTENDED_S = 1.0
"""Others wait, too, if one did within this time."""
STALL_S = 0.002
"""If all that wait may not be started for this long while the loop has time, more is started."""
LATE_S = 0.000_5
"""A timer that is later than this had to wait for a busy loop."""

RETRY_AFTER_S_MIN = 1
"""Least time after which a refused client may retry."""


class Loop(Protocol):
    """What is used of an event loop."""

    def time(self) -> float:
        """Return the time in seconds."""
        ...

    def call_soon(self, callback: Callable[[], None]) -> object:
        """Call back in the next turn."""
        ...

    def call_later(self, delay: float, callback: Callable[[], None]) -> object:
        """Call back after some seconds."""
        ...


class Waiter(Protocol):
    """A request that can wait for its turn."""

    @property
    def is_waiting(self) -> bool:
        """Whether it still has to be started: its client waits for it, and nothing else has ended it."""
        ...

    def begin_turn(self, flow: Flow | None) -> None:
        """Start its work; with a flow, `Turns.end_work` must be called with it when the work has ended."""
        ...

    def drop_turn(self) -> None:
        """Refuse it: it waited until its deadline, and nothing was done for it."""
        ...


class Penalized(Protocol):
    """A connection that is not read for a while."""

    def end_penalty(self) -> None:
        """Read again."""
        ...


class Weights(Protocol):
    """The shares of principals and topics."""

    def weight_of(self, principal: str) -> float:
        """Return the weight of a principal."""
        ...

    def topic_weight_of(self, topic: str) -> float:
        """Return the weight of a topic among those of its principal."""
        ...


class Flow:
    """What a topic of a principal has under way of the requests that waited for their turns."""

    __slots__ = ("extra", "is_blocked", "key", "under_way")

    def __init__(self, key: tuple[str, str]) -> None:
        self.key = key
        self.under_way = 0
        self.extra = 0
        """How much more than others it may have under way, because the loop had time; fades as its work ends."""
        self.is_blocked = False


class _Turn(NamedTuple):
    """A request that waits for its turn."""

    waiter: Waiter
    until_s: float
    key: tuple[str, str] | None
    """Its principal and topic; None for a request that may wait for something else than this node's work."""


class Turns:
    """Start the requests of all clients of a node in a fair order."""

    def __init__(self) -> None:
        self.starts = 0
        """Requests started in this turn: who starts one adds 1 first, and from `TURN_STARTS` on asks `may_start`."""
        self._loop: Loop
        self._began_s = 0.0
        self._rate = RATE_FIRST
        self._counted = 0
        """Requests that were started since `_counted_since_s`, for the rate."""
        self._counted_since_s = 0.0
        self._weights: Weights | None = None
        self._queue: FairQueue[_Turn] = FairQueue(self._weight_of, self._topic_weight_of)
        self._flows: dict[tuple[str, str], Flow] = {}
        """Those with something under way."""
        self._last_key: tuple[str, str] | None = None
        self._contended_until_s = 0.0
        self._is_stalled = False
        """Whether no turn is scheduled, because all that wait are of topics with enough under way."""
        self._will_relieve = False
        self._penalized: OrderedDict[Penalized, float] = OrderedDict()
        """Refused connections, and when they are due to be read again; the first is due first."""
        self._will_end_penalties = False
        self._refusals = 0
        """Requests that were refused since the last turn."""
        self._readable = 0.0
        """Refused connections that may be read again now."""

    def bind(self, loop: Loop) -> None:
        """Use a loop; the servers that share this object do it when they are entered."""
        self._loop = loop

    def weigh(self, weights: Weights) -> None:
        """Give principals and topics shares by their weights."""
        self._weights = weights

    def _weight_of(self, principal: str) -> float:
        return 1.0 if self._weights is None else self._weights.weight_of(principal)

    def _topic_weight_of(self, topic: str) -> float:
        return 1.0 if self._weights is None else self._weights.topic_weight_of(topic)

    @property
    def waiting(self) -> int:
        """Return how many requests wait for their turn."""
        return len(self._queue)

    @property
    def penalized(self) -> int:
        """Return how many connections are not read because they were refused."""
        return len(self._penalized)

    @property
    def rate(self) -> float:
        """Return how many requests a second were started while others waited: what this node can do."""
        return self._rate

    @property
    def retry_after_s(self) -> int:
        """Return when a client that is refused now may retry: its connection is read again by then."""
        return max(RETRY_AFTER_S_MIN, ceil(len(self._penalized) / (self._rate * REFUSALS_SHARE + 1)))

    # Turns.

    def may_start(self) -> bool:
        """Return whether one more request may be started in this turn of the loop."""
        now_s = self._loop.time()
        if self.starts == TURN_STARTS:
            self._began_s = self._counted_since_s = now_s
            self._counted = 0
            self._loop.call_soon(self._begin)
        if self._queue or now_s - self._began_s >= TURN_S:
            return False
        return self.starts < TURN_STARTS + max(TURN_STARTS, self._rate * TURN_S)

    def wait(self, waiter: Waiter, *, principal: str, topic: str, timeout_s: float, is_long_poll: bool = False) -> bool:
        """Let a request wait for its turn; return False if it must be refused.

        It is dropped after `timeout_s`, and refused right away if its turn will not come by then. A long poll does not
        count as under way.
        """
        now_s, key = self._loop.time(), (principal, topic)
        if key != self._last_key:
            if self._last_key is not None:
                self._contended_until_s = now_s + CONTENDED_S
            self._last_key = key
        share = self._rate * self._queue.share(principal, topic)
        depth_max = max(WAITING_MIN, share * min(WAIT_S_MAX, timeout_s))
        if self._queue.depth(principal, topic) >= depth_max:
            self._refusals += 1
            return False
        self._queue.push(principal, topic, _Turn(waiter, now_s + timeout_s, None if is_long_poll else key))
        self._resume()
        return True

    def end_work(self, flow: Flow) -> None:
        """Note that the work of a request that was started with a flow has ended."""
        flow.under_way -= 1
        if flow.extra:
            flow.extra -= 1
        if flow.is_blocked and flow.under_way < self._under_way_max(flow, self._loop.time()):
            flow.is_blocked = False
            self._queue.unblock(*flow.key)
            self._resume()
        if not flow.under_way:
            del self._flows[flow.key]

    def _begin_work(self, key: tuple[str, str], now_s: float) -> Flow:
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = Flow(key)
        flow.under_way += 1
        if flow.under_way >= self._under_way_max(flow, now_s):
            flow.is_blocked = True
            self._queue.block(*key)
        return flow

    def _under_way_max(self, flow: Flow, now_s: float) -> float:
        if now_s >= self._contended_until_s:
            return inf
        return max(UNDER_WAY_MIN, self._rate * UNDER_WAY_S) + flow.extra

    def _resume(self) -> None:
        if self._is_stalled:
            self._is_stalled = False
            self._loop.call_soon(self._begin)

    def _stall(self) -> None:
        self._is_stalled = True
        if not self._will_relieve:
            self._will_relieve = True
            due_s = self._loop.time() + STALL_S
            self._loop.call_later(STALL_S, lambda: self._relieve(due_s))

    def _relieve(self, due_s: float) -> None:
        """Start more if the loop has time: then the disk or other nodes are what all wait for."""
        self._will_relieve = False
        if not self._is_stalled:
            return
        if self._loop.time() - due_s > LATE_S:
            self._stall()
            return
        for flow in self._flows.values():
            if flow.is_blocked:
                flow.extra += TURN_STARTS
                flow.is_blocked = False
                self._queue.unblock(*flow.key)
        self._resume()

    def _begin(self) -> None:
        """Start waiting requests in fair order for a while; the loop then reads and answers before the next turn."""
        queue, time_s = self._queue, self._loop.time
        began_s = now_s = time_s()
        turn_s = min(TURN_S + self._refusals * REFUSAL_S, TURN_S_MAX)
        self._refusals = 0
        # Not by time alone: of some requests, most of the work is done after they were started.
        started, started_max = 0, max(TURN_STARTS, self._rate * turn_s)
        try:
            while queue and started < started_max and now_s - began_s < turn_s:
                turn = queue.pop()
                if turn is None:
                    self._stall()
                    break
                waiter = turn.waiter
                if not waiter.is_waiting:
                    continue
                if now_s >= turn.until_s:
                    waiter.drop_turn()
                else:
                    started += 1
                    self._start(turn, now_s)
                now_s = time_s()
        finally:  # what one request raises must not keep all others waiting forever
            self._end_turn(started, now_s)

    def _start(self, turn: _Turn, now_s: float) -> None:
        if turn.key is None:
            turn.waiter.begin_turn(None)
            return
        flow = self._begin_work(turn.key, now_s)
        try:
            turn.waiter.begin_turn(flow)
        except BaseException:
            self.end_work(flow)
            raise

    def _end_turn(self, started: int, now_s: float) -> None:
        """Measure the rate and schedule the next turn, if requests still wait."""
        if not self._queue:
            self.starts = 0
            # Nothing is measured now, and with a low rate so few may wait that nothing ever would be.
            self._rate += max(RATE_FIRST - self._rate, 0.0) * RATE_WEIGHT
            return
        self._counted += started
        passed_s = now_s - self._counted_since_s
        if passed_s >= TURN_S:
            if self._counted:  # after a pause, turns may be full of requests that are dropped
                self._rate += (self._counted / passed_s - self._rate) * RATE_WEIGHT
            self._counted, self._counted_since_s = 0, now_s
        self._readable = min(self._readable + started * REFUSALS_SHARE, len(self._penalized))
        self._began_s = now_s
        self.starts = 2 * TURN_STARTS
        if not self._is_stalled:
            self._loop.call_soon(self._begin)

    # Penalties.

    def penalize(self, connection: Penalized) -> None:
        """Have a connection read again after `PENALTY_S`, or later while the node has no time for refusals."""
        if not self._penalized:
            self._readable = 0.0
        self._penalized[connection] = self._loop.time() + PENALTY_S
        if not self._will_end_penalties:
            self._will_end_penalties = True
            self._loop.call_later(PENALTY_S, self._end_penalties)

    def forget_penalty(self, connection: Penalized) -> None:
        """Drop a connection that has ended: it must not take the place of one that waits to be read."""
        self._penalized.pop(connection, None)

    def _end_penalties(self) -> None:
        self._will_end_penalties = False
        until_s = self._loop.time() + PENALTY_S / 4  # those that are nearly due as well, instead of a timer for each
        penalized = self._penalized
        while penalized and (self._readable >= 1 or not self._queue):
            connection, due_s = next(iter(penalized.items()))
            if due_s > until_s:
                break
            self._readable -= 1
            del penalized[connection]
            connection.end_penalty()
        self._readable = max(self._readable, 0.0)
        if penalized:
            self._will_end_penalties = True
            self._loop.call_later(PENALTY_S / 4, self._end_penalties)
