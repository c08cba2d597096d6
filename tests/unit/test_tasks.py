"""A timeout raises TimeoutError, also in a task that is being cancelled, and hides no other cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any
from unittest.mock import ANY

import pytest

from quiver.tasks import (
    ITEMS_PER_STEP,
    MakeTimeout,
    SharedOutcome,
    TaskScope,
    TimedEvent,
    map_in_steps,
    strict_timeout,
    strict_timeout_at,
    timeout,
    timeout_at,
)
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


# -- scopes ------------------------------------------------------------------------------------------


def test_scope_cancels_its_tasks_and_passes_the_error_of_its_block() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append("work")

    async def main() -> None:
        try:
            async with TaskScope() as scope:
                scope.start(work())
                await asyncio.sleep(0.1)
                raise KeyError("unwrapped")
        except KeyError:
            ended.append("error")

    run(main())
    assert ended == ["work", "error"]


def test_task_that_crashes_ends_the_block_of_its_scope() -> None:
    async def crash() -> None:
        await asyncio.sleep(1)
        raise ValueError("a bug")

    async def main() -> None:
        async with TaskScope() as scope:
            scope.start(crash())
            await asyncio.sleep(100)

    with pytest.raises(ExceptionGroup) as caught:
        run(main())
    assert isinstance(caught.value.exceptions[0], ValueError)


def test_scope_with_a_close_of_its_own_leaves_its_tasks_to_it() -> None:
    closed: list[bool] = []

    async def main() -> None:
        stop = asyncio.Event()

        async def close() -> None:
            closed.append(task.done())
            stop.set()

        async def work() -> None:
            await stop.wait()

        scope = TaskScope(close)
        async with scope:
            task = scope.start(work())
        assert task.done()
        assert not task.cancelled()

    run(main())
    assert closed == [False]


# -- outcomes ----------------------------------------------------------------------------------------


def test_outcome_reaches_every_task_but_the_cancelled_one() -> None:
    async def main() -> None:
        outcome: SharedOutcome[int] = SharedOutcome()
        called: list[int | None] = []

        async def wait() -> int:
            return await outcome

        tasks = [asyncio.ensure_future(wait()) for _ in range(3)]
        outcome.add_done_callback(lambda done: called.append(None if done.error else 7))
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        assert not outcome.is_done, "a task that is cancelled does not decide for the others"
        outcome.resolve(7)
        outcome.resolve(8)
        outcome.reject(ValueError("too late"))
        assert await asyncio.gather(*tasks, return_exceptions=True) == [7, ANY, 7]
        assert tasks[1].cancelled()
        assert await outcome == 7
        outcome.add_done_callback(lambda _: called.append(9))
        await asyncio.sleep(0)
        assert called == [7, 9]

    run(main())


def test_error_of_an_outcome_is_raised_now_and_later_and_reported_by_nobody() -> None:
    async def main() -> None:
        outcome: SharedOutcome[int] = SharedOutcome()

        async def wait() -> int:
            return await outcome

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        outcome.reject(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await task
        with pytest.raises(ValueError, match="no"):
            await outcome
        assert isinstance(outcome.error, ValueError)

    run(main())


# -- events ------------------------------------------------------------------------------------------


def test_event_wakes_all_waiters_but_the_cancelled_one() -> None:
    async def main() -> None:
        event = TimedEvent()
        tasks = [asyncio.ensure_future(event.wait(60.0)) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        event.set()
        assert await asyncio.gather(*tasks, return_exceptions=True) == [True, ANY, True]
        assert tasks[1].cancelled()
        assert await event.wait(60.0), "it stays set"

    run(main())


def test_wait_for_an_event_that_is_not_set_ends_in_time() -> None:
    async def main() -> None:
        event = TimedEvent()
        event.set()
        event.clear()
        assert not await event.wait(0.0)
        event.set()
        assert await event.wait(0.0)

    run(main())


def test_many_items_are_converted_in_order_and_others_run_meanwhile() -> None:
    async def convert() -> tuple[list[str], int]:
        turns, loop = 0, asyncio.get_running_loop()

        def count() -> None:
            nonlocal turns
            turns += 1
            loop.call_soon(count)

        count()
        return await map_in_steps(str, range(2 * ITEMS_PER_STEP + 1)), turns

    converted, turns = asyncio.run(convert())
    assert converted == [str(number) for number in range(2 * ITEMS_PER_STEP + 1)]
    assert turns >= 3
    assert asyncio.run(map_in_steps(str, ())) == []
