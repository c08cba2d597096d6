"""The seam through which storage runs blocking file work off the event loop.

`ThreadExecutor` is the real side, a bounded pool of threads; `quiver.testing.SimulatedExecutor` runs
the work on a simulated loop after a simulated latency. Work never touches the event loop or the
state of its owner: it gets everything it needs when it is made and returns what it found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Executor(Protocol):
    """Run blocking work and hand its result to the event loop."""

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Start `work`; the future completes in the event loop with its result or exception."""
        ...


class ThreadExecutor:
    """Run blocking work in at most `threads` threads, shared by all logs of a node."""

    def __init__(self, threads: int = 4) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="quiver-storage")

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Start `work` in a thread of the pool."""
        return asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Wait for what is running and end the threads; idempotent."""
        self._pool.shutdown(wait=True)
