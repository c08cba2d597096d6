"""An event loop in a thread of its own, for programs without one.

It owns the loop; coroutines are handed to it and waited for. Never wait for it from itself: a delivery callback runs on
it. It does not survive a fork, since a child has none of its parent's threads; it says so instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from quiver.errors import RequestError, UnavailableError

T = TypeVar("T")


class LoopThread:
    """Run coroutines for other threads."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        # A daemon: a program that forgets to close its clients still ends.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result; one that is interrupted is cancelled."""
        try:
            self._check_usable()
        except RequestError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise UnavailableError("the client was closed meanwhile", code="closed") from None
        finally:
            future.cancel()

    def close(self) -> None:
        """End the loop and its thread; idempotent."""
        if self._loop.is_closed() or os.getpid() != self._pid:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(_cancel_all())
        self._loop.close()

    def _check_usable(self) -> None:
        if self._loop.is_closed():
            raise RequestError("the client is closed", code="closed")
        if os.getpid() != self._pid:
            raise RequestError("the client was made before a fork: connect again in this process", code="forked")
        if threading.get_ident() == self._thread.ident:
            raise RequestError(
                "a delivery callback must not wait for the client that calls it", code="on_client_thread"
            )


async def _cancel_all() -> None:
    """Let what is left on the loop end."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
