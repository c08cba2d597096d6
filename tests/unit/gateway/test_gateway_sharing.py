"""Calls answered together: each gets its own, nobody is forgotten, whoever goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import OutcomeUnknownError
from quiver.gateway.sharing import Sharing
from quiver.testing import RandomStreams, SimulatedLoop


class Store:
    """Hand out numbers, slowly."""

    def __init__(self, count: int) -> None:
        self.left = list(range(count))
        self.asked: list[int] = []

    async def take(self, count: int) -> list[int]:
        self.asked.append(count)
        await asyncio.sleep(1)
        taken, self.left = self.left[:count], self.left[count:]
        return taken


def run(scenario: Callable[[], Awaitable[None]], seed: int = 1) -> None:
    async def main() -> None:
        await scenario()

    loop = SimulatedLoop(RandomStreams(seed).schedule, policy="fifo")
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_calls_that_come_meanwhile_are_answered_together_in_order() -> None:
    async def scenario() -> None:
        store, sharing = Store(100), Sharing[int]()
        answers = await asyncio.gather(*(sharing.take("key", store.take) for _ in range(10)))
        assert answers == [[number] for number in range(10)]
        assert store.asked == [1, 9]
        assert await sharing.take("key", store.take) == [10]

    run(scenario)


def test_keys_do_not_wait_for_each_other() -> None:
    async def scenario() -> None:
        store, sharing = Store(100), Sharing[int]()
        await asyncio.gather(*(sharing.take(number, store.take) for number in range(3)))
        assert store.asked == [1, 1, 1]

    run(scenario)


def test_those_for_whom_there_is_nothing_get_nothing() -> None:
    async def scenario() -> None:
        store, sharing = Store(3), Sharing[int]()
        answers = await asyncio.gather(*(sharing.take("key", store.take) for _ in range(5)))
        assert answers == [[0], [1], [2], [], []]

    run(scenario)


def test_failure_is_told_to_all_whom_it_concerns_and_to_nobody_else() -> None:
    async def scenario() -> None:
        sharing, calls = Sharing[int](), 0

        async def fail_second(count: int) -> list[int]:
            nonlocal calls
            calls += 1
            number = calls
            await asyncio.sleep(1)
            if number == 2:
                raise OutcomeUnknownError("perhaps")
            return [7] * count

        waiting = [asyncio.ensure_future(sharing.take("key", fail_second)) for _ in range(4)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert results[0] == [7]
        assert all(isinstance(result, OutcomeUnknownError) for result in results[1:])
        assert await sharing.take("key", fail_second) == [7]

    run(scenario)


def test_call_that_is_cancelled_while_it_asks_lets_another_ask() -> None:
    async def scenario() -> None:
        store, sharing = Store(100), Sharing[int]()
        first, second, third = (asyncio.ensure_future(sharing.take("key", store.take)) for _ in range(3))
        await asyncio.sleep(0.5)
        first.cancel()
        assert [await second, await third] == [[0], [1]]
        with pytest.raises(asyncio.CancelledError):
            await first

    run(scenario)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.one_of(st.none(), st.floats(0, 3))), min_size=1, max_size=30),
    st.integers(0, 1000),
)
def test_everybody_who_stays_gets_something_of_his_own(calls: list[tuple[float, float | None]], seed: int) -> None:
    async def scenario() -> None:
        store, sharing = Store(1000), Sharing[int]()

        async def call(after: float, patience: float | None) -> list[int]:
            await asyncio.sleep(after)
            if patience is None:
                return await sharing.take("key", store.take)
            try:
                async with asyncio.timeout(patience):
                    return await sharing.take("key", store.take)
            except TimeoutError:
                return []

        answers = await asyncio.gather(*(call(after, patience) for after, patience in calls))
        found = [number for answer in answers for number in answer]
        assert len(found) == len(set(found))
        for answer, (_, patience) in zip(answers, calls, strict=True):
            assert answer or patience is not None
        assert not sharing._lines

    run(scenario, seed)
