"""Timeouts that behave alike on every Python that Quiver supports.

`asyncio.timeout` of Python 3.11.0 to 3.11.2 raises `CancelledError` instead of `TimeoutError` when it expires inside a
task that is already being cancelled, which is where a node closes after a failure. Debian 12 ships 3.11.2. Everything
in this package therefore takes `timeout` and `timeout_at` from here; `tests/unit/test_layers.py` enforces it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, TypeAlias

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
