"""Background tasks of long-lived objects, and timeouts that behave alike on every supported Python.

`TaskScope` is the one way in which an object that ends its own work owns tasks.

`asyncio.timeout` of Python 3.11.0 to 3.11.2 raises `CancelledError` instead of `TimeoutError` when it expires inside a
task that is already being cancelled, which is where a node closes after a failure. Debian 12 ships 3.11.2. All modules
therefore take `timeout` and `timeout_at` from here; `tests/unit/test_layers.py` enforces it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, TypeVar

T = TypeVar("T")

MakeTimeout: TypeAlias = Callable[[float | None], AbstractAsyncContextManager[asyncio.Timeout]]


@asynccontextmanager
async def strict_timeout_at(when: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the block at a time of the loop's clock and raise `TimeoutError`, whatever else cancels its task."""
    task = asyncio.current_task()
    assert task is not None, "a timeout needs a task"
    cancelling = task.cancelling()
    limit = asyncio.timeout_at(when)
    try:
        async with limit:
            yield limit
    except asyncio.CancelledError:
        # asyncio has taken its own cancellation back; a count above the one at entry is somebody else's.
        if limit.expired() and task.cancelling() <= cancelling:
            raise TimeoutError from None
        raise


def strict_timeout(delay: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
    """Cancel the block after so many seconds and raise `TimeoutError`, whatever else cancels its task."""
    return strict_timeout_at(None if delay is None else asyncio.get_running_loop().time() + delay)


# gh-102780, fixed in 3.11.3. The standard one is kept where it is right: it costs a third of ours.
_IS_FIXED: Final = sys.version_info >= (3, 11, 3)
timeout: MakeTimeout = asyncio.timeout if _IS_FIXED else strict_timeout
timeout_at: MakeTimeout = asyncio.timeout_at if _IS_FIXED else strict_timeout_at


class TaskScope:
    """The tasks of an object that is used as ``async with`` and ends them itself.

    `close` ends the object's work; by default it cancels every task. Unlike with a bare `asyncio.TaskGroup`, an error
    of the block passes unchanged instead of being wrapped into a group. A task that crashes ends the block.
    """

    def __init__(self, close: Callable[[], Awaitable[None]] | None = None) -> None:
        self._group = asyncio.TaskGroup()
        self._close = close
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine until it ends or the scope does."""
        task = self._group.create_task(work)
        if self._close is None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancel every task."""
        for task in tuple(self._tasks):
            task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A cancellation may be the group's own, which it must see; any other error of the block is not its business.
        seen = (kind, error, trace) if isinstance(error, asyncio.CancelledError) else (None, None, None)
        try:
            if self._close is None:
                self.cancel()
            else:
                await self._close()
        finally:
            await self._group.__aexit__(*seen)
