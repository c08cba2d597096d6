"""The simulated loop runs asyncio programs on virtual time and fails loudly."""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

import pytest

from quiver.testing import Deadlock, HostAccessError, LimitReached, SimulatedLoop, Spinning, Trace, UnhandledError

HOUR_S = 3600.0


def fail_lookup() -> None:
    raise IndexError("nothing there")


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    loop = SimulatedLoop(random.Random(1))
    yield loop
    loop.close()


def test_time_starts_at_zero_and_jumps_to_the_next_timer(loop: SimulatedLoop) -> None:
    async def main() -> list[float]:
        times = [loop.time()]
        await asyncio.sleep(HOUR_S)
        times.append(loop.time())
        return times

    assert loop.run_until_complete(main()) == [0.0, HOUR_S]
    assert loop.now_ns == 3600 * 10**9


def test_timers_fire_in_the_order_of_their_deadlines(loop: SimulatedLoop) -> None:
    fired: list[int] = []
    for delay in (3, 1, 2):
        loop.call_later(delay, fired.append, delay)
    loop.call_at(1.5, fired.append, 15)
    loop.run_until_complete(asyncio.wait_for(loop.create_task(asyncio.sleep(5)), None))
    assert fired == [1, 15, 2, 3]


def test_cancelled_timer_neither_fires_nor_moves_time(loop: SimulatedLoop) -> None:
    handle = loop.call_later(1, pytest.fail)
    handle.cancel()
    handle.cancel()
    assert handle.cancelled()
    assert handle.when() == 1.0
    loop.call_later(5, loop.stop)
    loop.run_forever()
    assert loop.time() == 5.0
    assert loop.event_count == 1


def test_many_cancelled_timers_are_forgotten(loop: SimulatedLoop) -> None:
    for _ in range(10_000):
        loop.call_later(HOUR_S, pytest.fail).cancel()
    assert len(loop._timers) < 300


def test_asyncio_building_blocks_work(loop: SimulatedLoop) -> None:
    async def main() -> tuple[object, ...]:
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        event, lock, ended = asyncio.Event(), asyncio.Lock(), []

        async def produce() -> None:
            for number in range(5):
                await queue.put(number)
            event.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            received = [await queue.get() for _ in range(5)]
        await event.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.sleep(HOUR_S)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.create_future(), 2.5)

        async def hold(delay: float) -> float:
            async with lock:
                await asyncio.sleep(delay)
            ended.append(delay)
            return delay

        held = await asyncio.gather(hold(1), hold(2))
        return received, held, sorted(ended), loop.time()

    assert loop.run_until_complete(main()) == ([0, 1, 2, 3, 4], [1, 2], [1, 2], 8.0)


def test_task_group_cancels_its_children_when_one_fails(loop: SimulatedLoop) -> None:
    cleaned: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(HOUR_S)
        finally:
            cleaned.append("wait")

    async def fail() -> None:
        await asyncio.sleep(1)
        raise KeyError("lost")

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait())
            group.create_task(fail())

    with pytest.raises(ExceptionGroup) as caught:
        loop.run_until_complete(main())
    assert isinstance(caught.value.exceptions[0], KeyError)
    assert cleaned == ["wait"]


def test_context_variables_are_honoured(loop: SimulatedLoop) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    seen: list[str] = []

    async def child() -> None:
        seen.append(variable.get())
        variable.set("child")

    async def main() -> None:
        variable.set("main")
        await asyncio.create_task(child())
        seen.append(variable.get())

    loop.run_until_complete(main())
    assert seen == ["main", "main"]
    assert variable.get() == "none"


def order_of(policy: str, seed: int) -> list[int]:
    loop = SimulatedLoop(random.Random(seed), policy=policy)  # type: ignore[arg-type]
    order: list[int] = []
    for number in range(6):
        loop.call_soon(order.append, number)
    loop.call_later(1, loop.stop)
    loop.run_forever()
    loop.close()
    return order


def test_shuffle_policy_draws_the_order_from_the_seed() -> None:
    orders = {tuple(order_of("shuffle", seed)) for seed in range(200)}
    assert len(orders) > 100
    assert {order[0] for order in orders} == set(range(6))
    assert order_of("shuffle", 3) == order_of("shuffle", 3)


def test_shuffle_policy_gives_every_ready_event_the_same_chance() -> None:
    firsts = [order_of("shuffle", seed)[0] for seed in range(3000)]
    assert all(400 < firsts.count(number) < 600 for number in range(6))


def test_fifo_policy_keeps_the_order_of_asyncio() -> None:
    assert all(order_of("fifo", seed) == [0, 1, 2, 3, 4, 5] for seed in range(5))


def test_deadlock_names_the_pending_tasks(loop: SimulatedLoop) -> None:
    async def wait_for_ever() -> None:
        await loop.create_future()

    async def main() -> None:
        waiting = asyncio.create_task(wait_for_ever(), name="the-waiter")
        await waiting

    with pytest.raises(Deadlock, match=r"the-waiter of node None.*wait_for_ever"):
        loop.run_until_complete(main())


def test_deadlock_shows_the_error_of_a_task_that_died_unseen(loop: SimulatedLoop) -> None:
    async def fail() -> None:
        raise KeyError("the reason")

    async def main() -> None:
        failing = asyncio.create_task(fail())
        await loop.create_future()
        await failing

    with pytest.raises(Deadlock, match="the reason"):
        loop.run_until_complete(main())


def test_run_ends_at_its_event_limit() -> None:
    loop = SimulatedLoop(random.Random(1), events_max=100)

    async def spin() -> None:
        for _ in range(1000):
            await asyncio.sleep(0)

    with pytest.raises(LimitReached, match="100 callbacks"):
        loop.run_until_complete(spin())
    loop.close()


def test_run_ends_at_its_time_limit() -> None:
    loop = SimulatedLoop(random.Random(1), time_max_s=10)

    async def tick() -> None:
        for _ in range(1000):
            await asyncio.sleep(3)

    with pytest.raises(LimitReached, match=r"beyond 10\.0 s"):
        loop.run_until_complete(tick())
    assert loop.time() == 9.0
    loop.close()


def test_error_in_a_callback_fails_the_run_at_once(loop: SimulatedLoop) -> None:
    loop.call_later(1, fail_lookup)
    with pytest.raises(UnhandledError) as caught:
        loop.run_until_complete(asyncio.sleep(5))
    assert isinstance(caught.value.__cause__, IndexError)
    assert loop.time() == 1.0


def test_error_in_a_task_that_nobody_awaits_fails_the_run(loop: SimulatedLoop) -> None:
    async def fail() -> None:
        raise KeyError("unseen")

    async def main() -> None:
        for _ in range(200):
            asyncio.create_task(asyncio.sleep(0))  # noqa: RUF006 - abandoned on purpose
        asyncio.create_task(fail())  # noqa: RUF006 - abandoned on purpose
        await asyncio.sleep(1)
        for _ in range(200):
            asyncio.create_task(asyncio.sleep(0))  # noqa: RUF006 - abandoned on purpose
        await asyncio.sleep(1)

    with pytest.raises(UnhandledError, match="unseen"):
        loop.run_until_complete(main())


def test_error_in_a_dropped_future_fails_the_run(loop: SimulatedLoop) -> None:
    async def main() -> None:
        loop.create_future().set_exception(KeyError("dropped"))
        await asyncio.sleep(1)

    with pytest.raises(UnhandledError, match="dropped"):
        loop.run_until_complete(main())


def test_system_exit_leaves_the_run(loop: SimulatedLoop) -> None:
    def leave() -> None:
        raise SystemExit("invariant broken")

    loop.call_soon(leave)
    with pytest.raises(SystemExit, match="invariant"):
        loop.run_until_complete(asyncio.sleep(1))


def test_own_exception_handler_replaces_failing(loop: SimulatedLoop) -> None:
    taken: list[object] = []
    loop.set_exception_handler(lambda _, context: taken.append(context["exception"]))
    loop.call_soon(fail_lookup)
    loop.run_until_complete(asyncio.sleep(1))
    assert isinstance(taken[0], IndexError)


def test_hook_runs_after_every_event_and_can_fail_the_run(loop: SimulatedLoop) -> None:
    counts: list[int] = []
    loop.after_event(lambda: counts.append(loop.event_count))
    loop.run_until_complete(asyncio.sleep(1))
    assert counts == list(range(1, loop.event_count + 1))

    def check() -> None:
        assert loop.time() < 3, "too late"

    loop.after_event(check)
    with pytest.raises(AssertionError, match="too late"):
        loop.run_until_complete(asyncio.sleep(5))


@pytest.mark.parametrize(
    "reach",
    [
        lambda loop: loop.run_in_executor(None, print),
        lambda loop: loop.create_connection(asyncio.Protocol, "localhost", 1),
        lambda loop: loop.subprocess_exec(asyncio.SubprocessProtocol, "true"),
        lambda loop: loop.add_signal_handler(2, print),
        lambda loop: loop.getaddrinfo("localhost", 1),
        lambda loop: loop.add_reader(0, print),
    ],
)
def test_reaching_for_the_host_is_refused(loop: SimulatedLoop, reach: Callable[[SimulatedLoop], object]) -> None:
    with pytest.raises(HostAccessError, match="a simulated loop has no"):
        reach(loop)


def test_every_method_of_the_abstract_loop_is_provided_or_refused() -> None:
    for name in dir(asyncio.AbstractEventLoop):
        if not name.startswith("_"):
            assert getattr(SimulatedLoop, name) is not getattr(asyncio.AbstractEventLoop, name), name


def test_to_thread_is_refused(loop: SimulatedLoop) -> None:
    with pytest.raises(HostAccessError):
        loop.run_until_complete(asyncio.to_thread(print))


def test_callbacks_from_other_threads_are_refused(loop: SimulatedLoop) -> None:
    errors: list[BaseException] = []

    def intrude() -> None:
        try:
            loop.call_soon_threadsafe(print)
        except RuntimeError as error:
            errors.append(error)

    def start_thread() -> None:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    loop.call_soon_threadsafe(start_thread)
    loop.run_until_complete(asyncio.sleep(1))
    assert "other threads" in str(errors[0])


async def numbers(closed: list[str]) -> AsyncGenerator[int, None]:
    try:
        yield 1
        yield 2
    finally:
        closed.append("closed")


def test_async_generators_are_closed_when_abandoned_and_at_shutdown(loop: SimulatedLoop) -> None:
    closed: list[str] = []
    kept = numbers(closed)

    async def abandon() -> None:
        async for _ in numbers(closed):
            break

    async def main() -> None:
        await abandon()
        await asyncio.sleep(0.1)
        assert closed == ["closed"]
        assert await anext(kept) == 1

    loop.run_until_complete(main())
    loop.run_until_complete(loop.shutdown_asyncgens())
    assert closed == ["closed", "closed"]


def test_loop_serves_asyncio_runner() -> None:
    loops: list[SimulatedLoop] = []

    def make() -> SimulatedLoop:
        loops.append(SimulatedLoop(random.Random(1)))
        return loops[0]

    async def main() -> float:
        asyncio.create_task(asyncio.sleep(HOUR_S))  # noqa: RUF006 - the runner cancels it
        await asyncio.sleep(2)
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=make) as runner:
        assert runner.run(main()) == 2.0
    assert loops[0].is_closed()


def test_closed_loop_refuses_work_and_running_loop_refuses_close(loop: SimulatedLoop) -> None:
    async def close() -> None:
        loop.close()

    with pytest.raises(RuntimeError, match="running loop"):
        loop.run_until_complete(close())
    loop.close()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_forever()


def test_nested_run_is_refused(loop: SimulatedLoop) -> None:
    async def nest() -> None:
        loop.run_forever()

    with pytest.raises(RuntimeError, match="running"):
        loop.run_until_complete(nest())


def trace_of(seed: int) -> str:
    trace = Trace()
    loop = SimulatedLoop(random.Random(seed), trace=trace)

    async def main() -> None:
        await asyncio.gather(*(asyncio.sleep(0.1 * (number % 3)) for number in range(20)))

    loop.run_until_complete(main())
    loop.close()
    return trace.digest()


def test_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    assert trace_of(1) == trace_of(1)
    assert trace_of(1) != trace_of(2)


def test_callbacks_without_time_passing_are_reported_with_the_stack() -> None:
    async def spin_forever() -> None:
        while True:  # noqa: ASYNC110 - it is the fault
            await asyncio.sleep(0)

    loop = SimulatedLoop(random.Random(1), still_events_max=500)
    with pytest.raises(Spinning, match=r"(?s)500 callbacks.*spin_forever"):
        loop.run_until_complete(spin_forever())
    loop.close()


def test_many_callbacks_are_fine_while_time_passes() -> None:
    async def work() -> None:
        for _ in range(20):
            for _ in range(100):
                await asyncio.sleep(0)
            await asyncio.sleep(0.001)

    loop = SimulatedLoop(random.Random(1), still_events_max=500)
    loop.run_until_complete(work())
    assert loop.event_count > 1_000
    loop.close()


def test_blocks_of_the_dead_find_their_loop_and_end_at_their_waits(loop: SimulatedLoop) -> None:
    ended: list[str] = []

    async def wait_on(name: str, wait: Callable[[], Awaitable[object]]) -> None:
        try:
            await asyncio.sleep(HOUR_S)
        finally:
            try:
                await wait()
            except BaseException as error:
                ended.append(f"{name}: {type(error).__name__}")
                raise

    with loop.node_scope("a"):
        loop.create_task(wait_on("future", lambda: asyncio.get_running_loop().create_future()))
        loop.create_task(wait_on("task", lambda: asyncio.create_task(asyncio.sleep(1))))
        loop.create_task(wait_on("sleep", lambda: asyncio.sleep(1)))
    loop.run_until_complete(asyncio.sleep(1))
    loop.kill("a")
    assert not ended
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.close()
    assert sorted(ended) == ["future: GeneratorExit", "sleep: GeneratorExit", "task: GeneratorExit"]
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()
