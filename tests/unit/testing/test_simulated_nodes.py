"""Killing and pausing a node on the simulated loop is what kill -9 and SIGSTOP are to a process."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
from collections.abc import AsyncGenerator, Generator, Iterator

import pytest

from quiver.model import NodeId
from quiver.testing import Deadlock, SimulatedLoop, UnhandledError

ONE, TWO = NodeId(1), NodeId(2)


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    loop = SimulatedLoop(random.Random(1))
    yield loop
    loop.close()
    gc.collect()


async def tick(seen: list[tuple[str, float]], name: str) -> None:
    try:
        while True:
            await asyncio.sleep(1)
            seen.append((name, asyncio.get_running_loop().time()))
    finally:
        seen.append((name + " finally", asyncio.get_running_loop().time()))


def test_killed_node_never_runs_again_and_runs_no_finally_block(loop: SimulatedLoop) -> None:
    seen: list[tuple[str, float]] = []
    with loop.node_scope(ONE):
        loop.create_task(tick(seen, "one"))
        loop.call_later(3, pytest.fail)
        loop.call_soon(seen.append, ("soon", 0.0))
    with loop.node_scope(TWO):
        loop.create_task(tick(seen, "two"))
    loop.call_later(2.5, loop.kill, ONE)
    loop.run_until_complete(asyncio.sleep(4.5))
    gc.collect()
    assert seen[0] == ("soon", 0.0)
    assert sorted(seen[1:]) == [("one", 1.0), ("one", 2.0), ("two", 1.0), ("two", 2.0), ("two", 3.0), ("two", 4.0)]


def test_ready_callbacks_of_a_killed_node_are_dropped(loop: SimulatedLoop) -> None:
    with loop.node_scope(ONE):
        for _ in range(10):
            loop.call_soon(pytest.fail)
    loop.kill(ONE)
    loop.run_until_complete(asyncio.sleep(1))


def test_scope_is_inherited_by_tasks_callbacks_and_timers(loop: SimulatedLoop) -> None:
    seen: list[str] = []

    async def parent() -> None:
        asyncio.create_task(child())  # noqa: RUF006 - the loop keeps it
        loop.call_later(2, seen.append, "timer")

    async def child() -> None:
        await asyncio.sleep(2)
        seen.append("child")

    with loop.node_scope(ONE):
        loop.create_task(parent())
    loop.call_later(1, loop.kill, ONE)
    loop.run_until_complete(asyncio.sleep(5))
    assert seen == []


def test_node_lives_again_in_a_new_scope(loop: SimulatedLoop) -> None:
    seen: list[tuple[str, float]] = []

    def start(name: str) -> None:
        with loop.node_scope(ONE):
            loop.create_task(tick(seen, name))

    start("first")
    loop.call_later(1.5, loop.kill, ONE)
    loop.call_later(1.75, start, "second")
    loop.run_until_complete(asyncio.sleep(3))
    assert seen == [("first", 1.0), ("second", 2.75)]
    assert loop.is_alive(ONE)


def test_wake_up_of_a_dead_task_by_the_living_is_dropped(loop: SimulatedLoop) -> None:
    future = loop.create_future()

    async def wait() -> None:
        await future
        pytest.fail("the dead do not wake")

    with loop.node_scope(ONE):
        loop.create_task(wait())
    loop.call_later(1, loop.kill, ONE)
    loop.call_later(2, future.set_result, None)
    loop.run_until_complete(asyncio.sleep(3))


def test_node_can_kill_itself_and_what_it_raises_then_is_void(loop: SimulatedLoop) -> None:
    seen: list[str] = []

    async def suicide() -> None:
        loop.kill(ONE)
        seen.append("last step")
        await asyncio.sleep(0)
        seen.append("never")

    def fail() -> None:
        loop.kill(TWO)
        raise SystemExit("void")

    with loop.node_scope(ONE):
        loop.create_task(suicide())
    with loop.node_scope(TWO):
        loop.call_soon(fail)
    loop.run_until_complete(asyncio.sleep(1))
    assert seen == ["last step"]


def test_errors_of_a_dead_node_are_not_reported(loop: SimulatedLoop) -> None:
    async def fail() -> None:
        raise KeyError("unseen")

    with loop.node_scope(ONE):
        loop.create_task(fail())
        held = [loop.create_future()]
        held[0].set_exception(KeyError("dropped"))
    loop.call_later(1, loop.kill, ONE)
    loop.call_later(2, held.clear)
    loop.run_until_complete(asyncio.sleep(3))


def test_killed_node_closes_no_async_generator(loop: SimulatedLoop) -> None:
    closed: list[str] = []

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
        finally:
            closed.append("closed")

    async def consume(generator: AsyncGenerator[int, None]) -> None:
        await anext(generator)

    held = [numbers(), numbers()]
    with loop.node_scope(ONE):
        loop.create_task(consume(held[0]))
    with loop.node_scope(TWO):
        loop.create_task(consume(held[1]))
    loop.call_later(1, loop.kill, ONE)
    loop.call_later(2, held.clear)
    loop.run_until_complete(asyncio.sleep(3))
    assert closed == ["closed"]


def test_killed_node_frees_nothing_that_only_its_timers_and_callbacks_hold(loop: SimulatedLoop) -> None:
    closed: list[str] = []

    def suspended() -> Generator[None, None, None]:
        try:
            yield
        finally:
            closed.append("closed")

    def schedule() -> None:
        timed, ready = suspended(), suspended()
        next(timed)
        next(ready)
        with loop.node_scope(ONE):
            loop.call_later(5, timed.send, None)
            loop.call_soon(ready.send, None)

    schedule()
    loop.kill(ONE)
    gc.collect()
    assert closed == []


def test_close_ends_stubborn_coroutines_silently(loop: SimulatedLoop) -> None:
    ends: list[str] = []

    async def stubborn() -> None:
        try:
            await loop.create_future()
        finally:
            try:
                await loop.create_future()
            finally:
                ends.append("void")
                raise KeyError("void")

    with loop.node_scope(ONE):
        task = loop.create_task(stubborn())
    loop.run_until_complete(asyncio.sleep(1))
    loop.kill(ONE)
    assert ends == []
    loop.close()
    assert ends == ["void"]
    coroutine = task.get_coro()
    del task
    gc.collect()
    assert coroutine is not None
    assert coroutine.cr_frame is None  # type: ignore[union-attr]


def test_paused_node_holds_its_work_and_fires_late_timers_at_resume(loop: SimulatedLoop) -> None:
    seen: list[tuple[str, float]] = []
    with loop.node_scope(ONE):
        loop.create_task(tick(seen, "one"))
        loop.call_later(5, lambda: seen.append(("timer", loop.time())))
    loop.call_later(1.5, loop.pause, ONE)
    loop.call_later(7.5, loop.resume, ONE)
    loop.run_until_complete(asyncio.sleep(9))
    assert seen[0] == ("one", 1.0)
    assert sorted(seen[1:3]) == [("one", 7.5), ("timer", 7.5)]
    assert seen[3] == ("one", 8.5)


def test_paused_node_can_be_killed(loop: SimulatedLoop) -> None:
    with loop.node_scope(ONE):
        loop.call_later(2, pytest.fail)
    loop.pause(ONE)
    loop.call_later(3, loop.kill, ONE)
    loop.call_later(4, loop.resume, ONE)
    loop.run_until_complete(asyncio.sleep(5))
    assert not loop.is_alive(ONE)


def test_deadlock_tells_which_tasks_are_paused(loop: SimulatedLoop) -> None:
    with loop.node_scope(ONE):
        task = loop.create_task(asyncio.sleep(1), name="sleeper")
    loop.pause(ONE)
    with pytest.raises(Deadlock, match=r"sleeper of node 1: .*\(paused\)"):
        loop.run_until_complete(task)


def test_killing_pausing_and_resuming_an_unknown_node_is_fine(loop: SimulatedLoop) -> None:
    loop.kill(ONE)
    loop.pause(ONE)
    loop.resume(ONE)
    assert not loop.is_alive(ONE)


def context_of(loop: SimulatedLoop, node: NodeId) -> contextvars.Context:
    with loop.node_scope(node):
        return contextvars.copy_context()


def test_part_of_an_event_can_be_a_nodes(loop: SimulatedLoop) -> None:
    seen: list[object] = []

    def act() -> None:
        seen.append(loop.running_node)
        loop.call_later(2, pytest.fail)

    loop.call_later(1, loop.run_as, context_of(loop, ONE), act)
    loop.call_later(2, loop.kill, ONE)
    loop.after_event(lambda: seen.append(loop.running_node))
    loop.run_until_complete(asyncio.sleep(5))
    assert seen[:3] == [None, ONE, ONE], "what follows belongs to the node, and whoever watches is told so"


def test_a_paused_nodes_part_waits_and_a_dead_ones_is_void(loop: SimulatedLoop) -> None:
    seen: list[float] = []

    def fail() -> None:
        loop.kill(TWO)
        raise SystemExit("void")

    one, two = context_of(loop, ONE), context_of(loop, TWO)
    loop.pause(ONE)
    loop.call_later(1, loop.run_as, one, lambda: seen.append(loop.time()))
    loop.call_later(2, loop.run_as, two, fail)
    loop.call_later(3, loop.run_as, two, pytest.fail)
    loop.call_later(4, loop.resume, ONE)
    loop.run_until_complete(asyncio.sleep(5))
    assert seen == [4.0]


def test_an_error_in_a_nodes_part_fails_the_run(loop: SimulatedLoop) -> None:
    def fail() -> None:
        raise IndexError("nothing there")

    loop.call_later(1, loop.run_as, context_of(loop, ONE), fail)
    with pytest.raises(UnhandledError):
        loop.run_until_complete(asyncio.sleep(5))
