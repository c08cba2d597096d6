"""Blocking work under simulation takes virtual time, keeps its order and dies with its node."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from quiver.errors import OverloadedError
from quiver.model import NodeId
from quiver.storage.executor import Executor, Lane
from quiver.testing import Latency, PowerLoss, SimulatedDisk, SimulatedExecutor, SimulatedLoop

TEN_MS = Latency(minimum_ms=10)


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    loop = SimulatedLoop(random.Random(1))
    yield loop
    loop.close()


def test_executor_implements_the_seam_and_takes_virtual_time(loop: SimulatedLoop) -> None:
    executor: Executor = SimulatedExecutor(loop, random.Random(1), TEN_MS)

    async def main() -> int:
        return await executor.submit(lambda: 42)

    assert loop.run_until_complete(main()) == 42
    assert loop.time() == 0.01


def test_lanes_have_their_own_workers_and_bounds(loop: SimulatedLoop) -> None:
    executor = SimulatedExecutor(loop, random.Random(1), TEN_MS, queue_max=1)
    order: list[str] = []

    async def main() -> None:
        reads = [executor.submit(lambda: order.append("read"), Lane.READS) for _ in range(2)]
        with pytest.raises(OverloadedError, match=r"executor\.read_queue_max"):
            executor.check_room(Lane.READS)
        executor.check_room(Lane.WRITES)
        await executor.submit(lambda: order.append("written"), Lane.WRITES)
        await asyncio.gather(*reads)

    loop.run_until_complete(main())
    assert sorted(order[:2]) == ["read", "written"]
    assert executor.refused == 1


def test_errors_of_the_work_reach_the_caller(loop: SimulatedLoop) -> None:
    executor = SimulatedExecutor(loop, random.Random(1), TEN_MS)
    with pytest.raises(ZeroDivisionError):
        loop.run_until_complete(executor.run(lambda: 1 // 0))


def order_of_work(loop: SimulatedLoop, workers: int) -> list[int]:
    executor = SimulatedExecutor(loop, random.Random(3), Latency(spread_ms=50), workers=workers)
    order: list[int] = []

    async def main() -> None:
        await asyncio.gather(*(executor.submit(lambda n=n: order.append(n)) for n in range(20)))  # type: ignore[misc]

    loop.run_until_complete(main())
    return order


def test_one_worker_keeps_the_order_of_work(loop: SimulatedLoop) -> None:
    assert order_of_work(loop, 1) == list(range(20))


def test_several_workers_overtake_each_other(loop: SimulatedLoop) -> None:
    order = order_of_work(loop, 4)
    assert sorted(order) == list(range(20))
    assert order != list(range(20))


def test_spikes_take_seconds_at_their_rate(loop: SimulatedLoop) -> None:
    latency = Latency(minimum_ms=1, p_spike=0.1, spike_ms=3000)
    rng = random.Random(5)
    slow = sum(latency.draw_ns(rng) > 100_000_000 for _ in range(2000))
    assert 120 < slow < 260


def test_begun_work_is_done_although_its_caller_was_cancelled(loop: SimulatedLoop) -> None:
    executor = SimulatedExecutor(loop, random.Random(1), TEN_MS)
    done: list[str] = []

    async def main() -> None:
        begun = executor.submit(lambda: done.append("begun"))
        waiting = executor.submit(lambda: done.append("waiting"))
        begun.cancel()
        waiting.cancel()
        await executor.run(lambda: done.append("last"))

    loop.run_until_complete(main())
    assert done == ["begun", "last"]


def test_power_loss_goes_to_the_world_and_not_to_the_caller(loop: SimulatedLoop) -> None:
    node = NodeId(1)
    disk = SimulatedDisk()
    lost: list[float] = []

    def lose() -> None:
        lost.append(loop.time())
        loop.kill(node)

    executor = SimulatedExecutor(loop, random.Random(1), TEN_MS, on_power_loss=lose)

    async def write() -> None:
        try:
            file = await executor.run(lambda: disk.open("/log", create=True))
            await executor.run(file.sync)
        finally:
            lost.append(-1.0)

    disk.crash_after(2)
    with loop.node_scope(node):
        loop.create_task(write())
    loop.run_until_complete(asyncio.sleep(1))
    assert lost == [0.02]


def test_power_loss_without_a_world_leaves_the_run(loop: SimulatedLoop) -> None:
    disk = SimulatedDisk()
    disk.crash_after(1)
    executor = SimulatedExecutor(loop, random.Random(1), TEN_MS)
    with pytest.raises(PowerLoss):
        loop.run_until_complete(executor.run(lambda: disk.make_directory("/data")))


def test_disk_tells_the_world_of_a_power_loss_in_the_loop_itself(loop: SimulatedLoop) -> None:
    node = NodeId(1)
    disk = SimulatedDisk(on_power_loss=lambda: loop.kill(node))
    disk.crash_after(1)

    async def main() -> None:
        disk.make_directory("/data")

    with loop.node_scope(node):
        loop.create_task(main())
        loop.call_later(1, pytest.fail)
    loop.run_until_complete(asyncio.sleep(2))
    assert not loop.is_alive(node)
    disk.crash()
    assert not disk.exists("/data")
