"""An event loop in its own thread, for programs without asyncio.

Other threads submit coroutines and wait for them. Code on the loop itself, such as a delivery callback, must not wait
for it. The thread does not exist in a forked child: there, calls raise `RequestError` (`forked`) instead of blocking
forever.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from quiver.errors import RequestError, UnavailableError
from quiver.tasks import new_event_loop

T = TypeVar("T")


class LoopThread:
    """Run coroutines for other threads."""

    def __init__(self, name: str) -> None:
        self._loop = new_event_loop()
        self._pid = os.getpid()
        # A daemon thread: a program that does not close its clients can still exit.
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result; cancel it if the caller is interrupted."""
        if threading.get_ident() == self._thread.ident:
            work.close()
            raise RequestError(
                "not done: a delivery callback must not call blocking methods of its client", code="on_client_thread"
            )
        self._check_usable(work)
        call = _Call(work)
        self._loop.call_soon_threadsafe(call.start)
        try:
            return call.wait()
        finally:
            if not call.is_done:
                self._loop.call_soon_threadsafe(call.cancel)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop, without waiting for it."""
        self._check_usable(work)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the loop and its thread; idempotent."""
        if self._loop.is_closed() or os.getpid() != self._pid:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run_loop(self) -> None:
        """Run the loop, and end what is left on it: only its own thread can, if the one that closes it has a loop."""
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_all())
        finally:
            self._loop.close()

    def _check_usable(self, work: Coroutine[Any, Any, Any]) -> None:
        """Raise `RequestError` instead of starting work, in a forked child and after `close`."""
        if not self._loop.is_closed() and os.getpid() == self._pid:
            return
        work.close()
        if self._loop.is_closed():
            raise RequestError("not done: the client is closed; connect again", code="closed")
        raise RequestError("not done: the process was forked after connect; connect again in the child", code="forked")


class _Call(Generic[T]):
    """A coroutine that a thread waits for.

    It replaces `asyncio.run_coroutine_threadsafe`, whose two futures take one more turn of the loop and more locks.
    """

    __slots__ = ("_ended", "_error", "_result", "_task", "_work", "is_done")

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.is_done = False
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._result: T
        self._error: BaseException | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def wait(self) -> T:
        """Return the result, or raise the error; in the thread that waits."""
        self._ended.acquire()
        if isinstance(self._error, asyncio.CancelledError):
            raise UnavailableError("the client was closed during the call", code="closed") from None
        if self._error is not None:
            raise self._error
        return self._result

    def start(self) -> None:
        """Begin, on the loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._finish)

    def cancel(self) -> None:
        """End it, on the loop: nobody waits any more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        """Wake the thread in the turn in which the work ends."""
        try:
            self._result = await self._work
        except BaseException as error:  # noqa: BLE001 - the caller's, whatever it is
            self._error = error
        self._end()

    def _finish(self, task: asyncio.Task[None]) -> None:
        """End a call whose task was cancelled before it began."""
        if task.cancelled() and not self.is_done:
            self._work.close()
            self._error = asyncio.CancelledError()
            self._end()

    def _end(self) -> None:
        self.is_done = True
        self._ended.release()


async def run_in_daemon_thread(call: Callable[[], T]) -> T:
    """Return the result of a blocking call, made in a thread of its own.

    Not in an executor: it cannot be used while the interpreter exits, when clients that were left open are closed.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def resolve(result: T | None, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(result)  # type: ignore[arg-type] # that of the call

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as raised:  # noqa: BLE001 - the caller's, whatever it is
            error = raised
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(resolve, result, error)

    threading.Thread(target=work, name="quiver-callback", daemon=True).start()
    return await ended


async def _cancel_all() -> None:
    """Cancel all remaining tasks of the loop and wait for them."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
