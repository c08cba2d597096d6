"""Blocking work on virtual time: the twin of storage's thread pool.

Work is done on the loop itself, after a latency that the seed chooses, at most `workers` pieces at
a time and each started in the order it was given. As with threads, a piece that has begun is done
even when its caller was cancelled meanwhile; one that has not begun is not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from quiver.clock import Rng
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
        on_power_loss: Callable[[], object] | None = None,
    ) -> None:
        self.latency = latency
        self._loop = loop
        self._rng = rng
        self._idle_workers = workers
        self._on_power_loss = on_power_loss
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Do `work` some virtual time later; the future gets what it returns or raises."""
        done: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append((work, done))
        self._begin_next()
        return done

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, or raise what it raises, some virtual time later."""
        return await self.submit(work)

    def _begin_next(self) -> None:
        while self._idle_workers and self._waiting:
            work, done = self._waiting.popleft()
            if not done.cancelled():
                self._idle_workers -= 1
                self._loop.call_later_ns(self.latency.draw_ns(self._rng), self._finish, work, done)

    def _finish(self, work: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        self._idle_workers += 1
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
        self._begin_next()
