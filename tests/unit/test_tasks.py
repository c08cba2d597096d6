"""A timeout raises TimeoutError, also in a task that is being cancelled, and hides no other cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest

from quiver.tasks import MakeTimeout, strict_timeout, strict_timeout_at, timeout, timeout_at
from quiver.testing import RandomStreams, SimulatedLoop

TIMEOUTS = pytest.mark.parametrize("limit", [timeout, strict_timeout])


def run(work: Coroutine[Any, Any, None]) -> None:
    loop = SimulatedLoop(RandomStreams(1).schedule, time_max_s=60)
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


@TIMEOUTS
def test_timeout_expires_inside_a_task_that_is_being_cancelled(limit: MakeTimeout) -> None:
    """What Python 3.11.2 gets wrong: a node that closes after a failure waits inside such a task."""
    seen: list[str] = []

    async def close() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            try:
                async with limit(1):
                    await asyncio.sleep(10)
            except TimeoutError:
                seen.append("timeout")
            raise

    async def main() -> None:
        task = asyncio.ensure_future(close())
        await asyncio.sleep(0.1)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    run(main())
    assert seen == ["timeout"]


@TIMEOUTS
def test_cancellation_from_outside_is_no_timeout(limit: MakeTimeout) -> None:
    async def work() -> None:
        async with limit(5):
            await asyncio.sleep(10)

    async def main() -> None:
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


@pytest.mark.parametrize("limit_at", [timeout_at, strict_timeout_at])
def test_timeout_at_a_time_and_without_one(limit_at: MakeTimeout) -> None:
    async def main() -> None:
        async with limit_at(None):
            await asyncio.sleep(1)
        async with strict_timeout(None):
            await asyncio.sleep(1)
        with pytest.raises(TimeoutError):
            async with limit_at(asyncio.get_running_loop().time() + 1):
                await asyncio.sleep(2)

    run(main())
