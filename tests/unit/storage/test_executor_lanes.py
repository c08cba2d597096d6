"""No lane of the executor waits for another, and a full lane rejects what clients ask for, and only that."""

from __future__ import annotations

import asyncio
import threading

import pytest
from log_world import InlineExecutor, append, next_batches, open_log
from test_log import VALUES, runs

from quiver.config import ExecutorSettings, LogSettings
from quiver.errors import OverloadedError
from quiver.model import Index, Offset
from quiver.storage import Lane, LaneStatus, ThreadExecutor
from quiver.testing import SimulatedDisk

NARROW = ExecutorSettings(write_threads=1, read_threads=1, read_queue_max=2, recovery_threads=1)


def status_of(executor: ThreadExecutor, lane: Lane) -> LaneStatus:
    return next(status for status in executor.status() if status.lane is lane)


@runs
async def test_blocked_lanes_do_not_delay_writes_and_votes() -> None:
    executor, may_end = ThreadExecutor(NARROW), threading.Event()
    blocked = [executor.submit(may_end.wait, lane) for lane in (Lane.READS, Lane.RECOVERY, Lane.SQL) for _ in range(3)]
    async with asyncio.timeout(10):
        assert await executor.submit(lambda: "written") == "written"
    assert not any(done.done() for done in blocked)
    may_end.set()
    await asyncio.gather(*blocked)
    executor.close()


@runs
async def test_full_lane_rejects_clients_and_still_accepts_work() -> None:
    executor, may_end, is_begun = ThreadExecutor(NARROW), threading.Event(), threading.Event()

    def block() -> None:
        is_begun.set()
        may_end.wait()

    running = executor.submit(block, Lane.READS)
    await asyncio.to_thread(is_begun.wait)
    executor.check_room(Lane.READS)
    queued = [executor.submit(lambda: 1, Lane.READS) for _ in range(2)]
    with pytest.raises(OverloadedError, match=r"not done: 2 tasks wait .* executor.read_queue_max") as refused:
        executor.check_room(Lane.READS)
    assert refused.value.retry_after_ms
    executor.check_room(Lane.WRITES)
    queued.append(executor.submit(lambda: 2, Lane.READS))
    status = status_of(executor, Lane.READS)
    assert (status.running, status.queued, status.refused, status.queue_max) == (1, 3, 1, 2)
    may_end.set()
    await running
    assert await asyncio.gather(*queued) == [1, 1, 2]
    executor.check_room(Lane.READS)
    executor.close()


@runs
async def test_status_counts_work_and_the_time_it_waited() -> None:
    executor = ThreadExecutor(NARROW)
    naps = [executor.submit(lambda: threading.Event().wait(0.01), Lane.SQL) for _ in range(3)]
    await asyncio.gather(*naps)
    status = status_of(executor, Lane.SQL)
    assert (status.completed, status.running, status.queued, status.threads) == (3, 0, 0, 1)
    assert status.worked_s >= 0.03
    assert status.waited_s >= status.waited_s_max >= 0.02, "the third waited for two others"
    assert status_of(executor, Lane.WRITES).completed == 0
    executor.close()


@runs
async def test_log_rejects_clients_while_the_lane_is_full_and_serves_replication() -> None:
    executor = InlineExecutor()
    log = open_log(SimulatedDisk(), LogSettings(tail_cache_bytes_max=0), executor=executor)
    await append(log, *VALUES)
    end = Offset(len(VALUES))
    executor.full_lanes = {Lane.READS, Lane.RECOVERY}
    with pytest.raises(OverloadedError, match=r"executor\.read_queue_max"):
        await log.read_records(Offset(0), end_offset=end, bytes_max=1)
    with pytest.raises(OverloadedError, match=r"executor\.read_queue_max"):
        await log.find_timestamp(1, end_offset=end)
    assert await log.read_entries(Index(1), end_index=Index(2), bytes_max=1), "a follower is never rejected"
    assert executor.lanes[-1:] == [Lane.RECOVERY]
    executor.full_lanes = set()
    assert await log.read_records(Offset(0), end_offset=end, bytes_max=1)
    assert executor.lanes[-1:] == [Lane.READS]
    await log.close()


@runs
async def test_log_rejects_proposals_but_not_appends_while_too_many_writes_wait() -> None:
    executor = InlineExecutor()
    log = open_log(SimulatedDisk(), executor=executor)
    executor.full_lanes = {Lane.WRITES}
    with pytest.raises(OverloadedError, match=r"not done: .*executor.write_queue_max"):
        log.check_room(1)
    log.append(next_batches(log, b"replicated"))
    executor.full_lanes = set()
    log.check_room(1)
    await log.close()
    assert log.durable_end_index == 2
