"""Blocking work on virtual time: the twin of storage's thread pool.

Work is done on the loop itself, after a latency that the seed chooses, at most `workers` pieces of a
lane at a time and each started in the order it was given. As with threads, a piece that has begun is
done even when its caller was cancelled meanwhile; one that has not begun is not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from quiver.clock import Rng
from quiver.storage.executor import Lane, overloaded
from quiver.testing.disk_faults import PowerLoss
from quiver.testing.loop import SimulatedLoop
from quiver.testing.randomness import Latency

T = TypeVar("T")

DISK_LATENCY = Latency(minimum_ms=0.05, spread_ms=2.0, p_spike=0.001, spike_ms=3000.0)
"""A solid-state disk that now and then stalls for seconds."""


class SimulatedExecutor:
    """Run blocking work after a virtual latency, in order.

    Implements storage's `Executor` seam. Work belongs to the node that submits it. A `PowerLoss` in it
    goes to `on_power_loss`, which is expected to kill the node; the work's caller never gets an answer.
    """

    def __init__(
        self,
        loop: SimulatedLoop,
        rng: Rng,
        latency: Latency = DISK_LATENCY,
        *,
        workers: int = 1,
        queue_max: int | None = None,
        on_power_loss: Callable[[], object] | None = None,
    ) -> None:
        self.latency = latency
        self._loop = loop
        self._rng = rng
        self._queue_max = queue_max
        self._on_power_loss = on_power_loss
        self._idle_workers = dict.fromkeys(Lane, workers)
        self._waiting: dict[Lane, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = {
            lane: deque() for lane in Lane
        }
        self.refused = 0
        """Requests of clients rejected because a queue was full."""

    def submit(self, work: Callable[[], T], lane: Lane = Lane.WRITES) -> asyncio.Future[T]:
        """Do `work` some virtual time later; the future gets what it returns or raises."""
        done: asyncio.Future[T] = self._loop.create_future()
        self._waiting[lane].append((work, done))
        self._begin_next(lane)
        return done

    def check_room(self, lane: Lane) -> None:
        """Reject a client's request while more than `queue_max` pieces of a lane wait; see storage's `Executor`."""
        queued = len(self._waiting[lane])
        if self._queue_max is not None and queued >= self._queue_max:
            self.refused += 1
            raise overloaded(lane, queued)

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, or raise what it raises, some virtual time later."""
        return await self.submit(work)

    def _begin_next(self, lane: Lane) -> None:
        waiting = self._waiting[lane]
        while self._idle_workers[lane] and waiting:
            work, done = waiting.popleft()
            if not done.cancelled():
                self._idle_workers[lane] -= 1
                self._loop.call_later_ns(self.latency.draw_ns(self._rng), self._finish, lane, work, done)

    def _finish(self, lane: Lane, work: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        self._idle_workers[lane] += 1
        try:
            result = work()
        except PowerLoss:
            if self._on_power_loss is None:
                raise
            self._on_power_loss()
            return
        except BaseException as error:  # noqa: BLE001 - a pool hands every outcome to the caller
            if not done.cancelled():
                done.set_exception(error)
        else:
            if not done.cancelled():
                done.set_result(result)
        self._begin_next(lane)
