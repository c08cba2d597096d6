"""The background tasks of one client object: all of them end with it.

Not an `asyncio.TaskGroup`, on purpose: a group wraps what the user's own block raises into an exception group and
cancels that block when a task of ours fails. Here a failed task is told to its owner, who fails its callers instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side and return their results; if one fails, end the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class Tasks:
    """Own tasks; `on_crash` is told of an error that left one."""

    def __init__(self, on_crash: Callable[[BaseException], object]) -> None:
        self._on_crash = on_crash
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine until it ends or `close` is called."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel what still runs and wait until it has ended; idempotent."""
        while self._running:
            running = list(self._running)
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_crash(error)
