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

Invariants: a waiter is started, dropped or found to be gone exactly once; the order within a topic is that of arrival.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import ceil
from typing import Protocol

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

    def begin_turn(self) -> None:
        """Start its work."""
        ...

    def drop_turn(self) -> None:
        """Refuse it: it waited until its deadline, and nothing was done for it."""
        ...


class Penalized(Protocol):
    """A connection that is not read for a while."""

    def end_penalty(self) -> None:
        """Read again."""
        ...


class Turns:
    """Start the requests of all clients of a node in a fair order."""

    def __init__(self) -> None:
        self.starts = 0
        """Requests started in this turn: who starts one adds 1 first, and from `TURN_STARTS` on asks `may_start`."""
        self._loop: Loop
        self._began_s = 0.0
        self._rate = RATE_FIRST
        self._queue: FairQueue[tuple[Waiter, float]] = FairQueue()
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
            self._began_s = now_s
            self._loop.call_soon(self._begin)
        if self._queue or now_s - self._began_s >= TURN_S:
            return False
        return self.starts < TURN_STARTS + max(TURN_STARTS, self._rate * TURN_S)

    def wait(self, waiter: Waiter, *, principal: str, topic: str, timeout_s: float) -> bool:
        """Let a request wait for its turn; return False if it must be refused.

        It is dropped after `timeout_s`, and refused right away if its turn will not come by then.
        """
        share = self._rate * self._queue.share(principal, topic)
        depth_max = max(WAITING_MIN, share * min(WAIT_S_MAX, timeout_s))
        if self._queue.depth(principal, topic) >= depth_max:
            self._refusals += 1
            return False
        self._queue.push(principal, topic, (waiter, self._loop.time() + timeout_s))
        return True

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
                waiter, until_s = queue.pop()
                if not waiter.is_waiting:
                    continue
                if now_s >= until_s:
                    waiter.drop_turn()
                else:
                    started += 1
                    waiter.begin_turn()
                now_s = time_s()
        finally:  # what one request raises must not keep all others waiting forever
            self._end_turn(started, now_s)

    def _end_turn(self, started: int, now_s: float) -> None:
        """Measure the rate and schedule the next turn, if requests still wait."""
        if not self._queue:
            self.starts = 0
            # Nothing is measured now, and with a low rate so few may wait that nothing ever would be.
            self._rate += max(RATE_FIRST - self._rate, 0.0) * RATE_WEIGHT
            return
        passed_s = max(now_s - self._began_s, TURN_S)
        if started:  # after a pause, turns may be full of requests that are dropped
            self._rate += (started / passed_s - self._rate) * RATE_WEIGHT
        self._readable = min(self._readable + started * REFUSALS_SHARE, len(self._penalized))
        self._began_s = now_s
        self.starts = 2 * TURN_STARTS
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
