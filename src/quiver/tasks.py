"""The event loop of a node, background tasks of long-lived objects, and timeouts that behave alike on every Python.

`TaskScope` owns the tasks of an object that ends its own work. `TaskSet` owns the tasks of an SDK object and reports a
crash to it. `gather_first_error` runs coroutines side by side. `SharedOutcome` is a result that several tasks wait for,
`TimedEvent` an event that they wait for with a time limit.

`asyncio.timeout` of Python 3.11.0 to 3.11.2 raises `CancelledError` instead of `TimeoutError` when it expires inside a
task that is already being cancelled, which is where a node closes after a failure. Debian 12 ships 3.11.2. All modules
therefore take `timeout` and `timeout_at` from here; `tests/unit/test_layers.py` enforces it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar, cast

T = TypeVar("T")
U = TypeVar("U")

ITEMS_PER_STEP = 500
"""Items that `map_in_steps` converts in one step: one or two milliseconds."""

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


# gh-102780, fixed in 3.11.3. The standard one is kept where it is right.
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


async def gather_first_error(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results; if one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class TaskSet:
    """The background tasks of one client object: all of them end with it.

    It is not an `asyncio.TaskGroup` because a group wraps an error of the user's own block into an exception group and
    cancels that block when a background task fails. Here `on_crash` gets the error of a failed task, and the owner
    fails its callers with it.
    """

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
        """Cancel the tasks that still run and wait until they have ended; idempotent."""
        while self._running:
            running = list(self._running)
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_crash(error)


class SharedOutcome(Generic[T]):
    """A result that several tasks may await; one that is cancelled does not touch the outcome of the others.

    An `asyncio.Future` would need a `shield` for each of them, which is a future, two callbacks and two turns of the
    loop more. An error that nobody awaits is not reported.
    """

    __slots__ = ("_callbacks", "_error", "_result", "_waiters", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[T]] | None = None
        self._callbacks: list[Callable[[SharedOutcome[T]], None]] | None = None

    @property
    def error(self) -> BaseException | None:
        """The error that it was resolved with, if any."""
        return self._error

    def resolve(self, result: T) -> None:
        """Give everyone this result; does nothing if there is an outcome."""
        if self.is_done:
            return
        self.is_done, self._result = True, result
        for waiter in self._waiters or ():
            if not waiter.done():
                waiter.set_result(result)
        self._run_callbacks()

    def reject(self, error: BaseException) -> None:
        """Raise this error for everyone; does nothing if there is an outcome."""
        if self.is_done:
            return
        self.is_done, self._error = True, error
        for waiter in self._waiters or ():
            if not waiter.done():
                waiter.set_exception(error)
        self._run_callbacks()

    def add_done_callback(self, callback: Callable[[SharedOutcome[T]], None]) -> None:
        """Call back in the turn of the loop after the outcome."""
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(callback)
        if self.is_done:
            self._run_callbacks()

    def __await__(self) -> Generator[Any, None, T]:
        if self.is_done:
            return self._return()
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        return waiter.__await__()

    def _return(self) -> Generator[Any, None, T]:
        if self._error is not None:
            raise self._error
        return cast("T", self._result)
        yield  # makes it what `__await__` must return

    def _run_callbacks(self) -> None:
        self._waiters = None
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            asyncio.get_running_loop().call_soon(callback, self)


class TimedEvent:
    """An event that tasks wait for with a time limit.

    `asyncio.wait_for` of an `asyncio.Event` makes a task for each wait, and takes four turns of the loop to return.
    """

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[asyncio.Future[bool]] = []

    def set(self) -> None:
        """Wake every waiter; later waits return immediately, until `clear`."""
        self._is_set = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(True)

    def clear(self) -> None:
        """Let later waits wait for the next `set`."""
        self._is_set = False

    async def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, at most `timeout_s`; return whether it was."""
        if self._is_set:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters.append(waiter)
        timer = loop.call_later(timeout_s, _expire, waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.remove(waiter)


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


async def run_in_steps(steps: Iterable[object]) -> None:
    """Run an iterator to its end; others get a turn of the event loop between its steps."""
    for _ in steps:
        await asyncio.sleep(0)


async def gather_in_steps(steps: Iterable[T]) -> list[T]:
    """Return the parts of an iterator; others get a turn of the event loop between its steps."""
    parts: list[T] = []
    for part in steps:
        parts.append(part)
        if len(parts) > 1:  # most are small, and have one or two
            await asyncio.sleep(0)
    return parts


async def map_in_steps(convert: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """Return the converted items; others get a turn of the event loop after every `ITEMS_PER_STEP`."""
    converted: list[U] = []
    for first in range(0, len(items), ITEMS_PER_STEP):
        converted += map(convert, items[first : first + ITEMS_PER_STEP])
        await asyncio.sleep(0)
    return converted


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for a node: uvloop's, which saves a quarter of a request's calls, where installed."""
    if importlib.util.find_spec("uvloop") is None:  # it has no wheel for every platform
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()
