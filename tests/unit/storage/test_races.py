"""Things that happen to a log while others are under way: each is done in full, in order, and none twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from log_world import (
    DIRECTORY,
    TINY,
    FixedClock,
    InlineExecutor,
    SteppingExecutor,
    all_values,
    append,
    data_batch,
    next_batches,
    open_log,
    wait_durable,
)
from test_log import VALUES, runs

from quiver.config import LogSettings
from quiver.errors import DamageError, LogClosedError, LogFailedError, TrimmedError, UnavailableError
from quiver.model import Index, Offset, Term
from quiver.storage import Lane, Log
from quiver.storage.segment import segment_name
from quiver.testing import SimulatedDisk


async def filled(*, executor: SteppingExecutor, disk: SimulatedDisk) -> Log:
    """A log of several segments, all durable, most of it not in memory."""
    log = open_log(disk, executor=executor)
    log.append(next_batches(log, *VALUES, term=1))
    await executor.step()
    assert log.durable_end_index == len(VALUES) + 1
    return log


async def start(work: Any) -> asyncio.Future[Any]:
    """Run `work` up to its first wait."""
    task: asyncio.Future[Any] = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    return task


async def finish(executor: SteppingExecutor) -> None:
    while executor.waiting:
        await executor.step()


def reset(log: Log, first_index: int) -> Any:
    return log.reset(first_index=Index(first_index), first_offset=Offset(500), previous_term=Term(3))


@runs
async def test_what_is_appended_while_a_reset_waits_for_the_disk_is_kept() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    log.append(next_batches(log, b"given up", term=2))
    resetting = await start(reset(log, 100))
    log.append(next_batches(log, b"new", b"newer", term=4))
    await finish(executor)
    await resetting
    await wait_durable(log, Index(102))
    reopened = open_log(disk)
    assert await all_values(reopened) == [b"new", b"newer"]
    assert reopened.warnings == ()


@runs
async def test_two_removals_at_once_remove_everything_once() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    removals = [await start(log.truncate_prefix(Index(end))) for end in (20, 30, 20)]
    await finish(executor)
    await asyncio.gather(*removals)
    assert 20 < log.first_index <= 30
    reading = await start(all_values(log))
    while not reading.done():
        await executor.step()
    assert await reading == VALUES[log.first_offset :]


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("first_index", [1, 9, 100])
@runs
async def test_a_reset_beside_a_removal_leaves_the_new_log_alone(*, is_running: bool, first_index: int) -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    if not is_running:
        log.append(next_batches(log, b"keeps the disk busy"))
        await asyncio.sleep(0)
    removing = await start(log.truncate_prefix(Index(30)))
    resetting = await start(reset(log, first_index))
    await finish(executor)
    await removing
    await resetting
    assert (log.first_index, log.end_index) == (first_index, first_index)
    assert [path for path in disk.paths() if path.endswith(".log")] == [f"{DIRECTORY}/{segment_name(first_index)}"]
    assert open_log(disk).end_index == first_index


@runs
async def test_a_reset_during_a_cut_is_what_remains() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    log.truncate_suffix(Index(9))
    resetting = await start(reset(log, 7))
    log.append(next_batches(log, b"new", term=4))
    while executor.waiting:
        await executor.step()
        assert (log.first_index, log.first_offset) == (7, 500)
    await resetting
    reopened = open_log(disk)
    assert await all_values(reopened) == [b"new"]
    assert reopened.warnings == ()


@runs
async def test_two_resets_at_once_leave_the_second() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    resets = [await start(reset(log, 100)), await start(reset(log, 50))]
    log.append(next_batches(log, b"new", term=4))
    while executor.waiting:
        await executor.step()
        assert log.first_index == 50
    await asyncio.gather(*resets)
    reopened = open_log(disk)
    assert reopened.warnings == ()
    assert (reopened.first_index, reopened.end_index, await all_values(reopened)) == (50, 51, [b"new"])


@runs
async def test_a_cut_that_waits_through_a_reset_is_forgotten() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    log.append(next_batches(log, b"keeps the disk busy"))
    await asyncio.sleep(0)
    log.truncate_suffix(Index(9))
    resetting = await start(reset(log, 5))
    log.append(next_batches(log, b"a", b"b", term=4))
    log.truncate_suffix(Index(6))
    await finish(executor)
    await resetting
    assert await all_values(open_log(disk)) == [b"a"]


@runs
async def test_a_cut_inside_a_cut_that_is_under_way_keeps_what_was_appended_between() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    log.truncate_suffix(Index(5))
    log.append(next_batches(log, b"x", b"y", term=2))
    log.truncate_suffix(Index(6))
    log.append(next_batches(log, b"z", term=3))
    await finish(executor)
    assert await all_values(open_log(disk)) == [*VALUES[:4], b"x", b"z"]


@runs
async def test_two_rolls_at_once_roll_once() -> None:
    executor, clock = SteppingExecutor(), FixedClock()
    log = open_log(SimulatedDisk(), LogSettings(segment_age_ms_max=1000), executor=executor, clock=clock)
    log.append(next_batches(log, b"a"))
    await executor.step()
    log.append(next_batches(log, b"keeps the disk busy"))
    await asyncio.sleep(0)
    clock.now_ms += 5000
    runs_at_once = [await start(log.roll_if_old()) for _ in range(2)]
    await finish(executor)
    await asyncio.gather(*runs_at_once)
    assert (log.first_index, log.end_index, log.status().segments) == (1, 3, 2)


@runs
async def test_trim_keeps_the_last_segment_also_when_it_is_sealed() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES)
    names = [path for path in disk.paths() if path.endswith(".log")]
    disk.write_file(names[-1], b"torn")  # at birth, as it seems: the one before it is sealed and now the last
    log = open_log(disk)
    end_index = log.end_index
    await log.truncate_prefix(log.end_index)
    assert 1 < log.first_index <= log.end_index == end_index
    await append(log, b"goes on")
    assert (await all_values(open_log(disk)))[-1] == b"goes on"


@runs
async def test_a_sealed_last_segment_can_be_cut_and_closed() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES)
    names = [path for path in disk.paths() if path.endswith(".log")]
    disk.write_file(names[-1], b"torn")
    await open_log(disk).close()
    log = open_log(disk)
    end_index = Index(log.end_index - 1)
    log.truncate_suffix(end_index)
    await append(log, b"instead", term=9)
    assert await all_values(open_log(disk)) == [*VALUES[: end_index - 1], b"instead"]


@runs
async def test_a_removal_that_nobody_waits_for_any_more_does_no_harm_when_the_log_fails() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    log.append(next_batches(log, b"fails"))
    await asyncio.sleep(0)
    removing = await start(log.truncate_prefix(Index(20)))
    waiting = await start(wait_durable(log, log.end_index))
    removing.cancel()
    await asyncio.sleep(0)
    disk.fail("sync", nth=1)
    await executor.step()
    with pytest.raises(LogFailedError):
        await waiting


@runs
async def test_a_removal_whose_waiter_went_away_is_still_done() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    removing = await start(log.truncate_prefix(Index(20)))
    removing.cancel()
    await asyncio.sleep(0)
    await finish(executor)
    assert log.first_index > 1


@runs
async def test_a_log_that_is_being_closed_takes_nothing_and_finishes_what_it_took() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    log.truncate_suffix(Index(9))
    log.append(next_batches(log, b"last", term=2))
    closings = [await start(log.close()) for _ in range(2)]
    with pytest.raises(LogClosedError):
        log.append([])
    with pytest.raises(LogClosedError):
        log.truncate_suffix(Index(2))
    with pytest.raises(LogClosedError):
        await reset(log, 3)
    await finish(executor)
    await asyncio.gather(*closings)
    assert await all_values(open_log(disk)) == [*VALUES[:8], b"last"]


@runs
async def test_no_timer_works_on_a_closed_log() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = open_log(disk, LogSettings(durability="interval", flush_interval_ms=1), executor=executor)
    log.append(next_batches(log, b"a"))
    await executor.step()
    log.append(next_batches(log, b"b"))
    closing = await start(log.close())
    await asyncio.sleep(0.01)
    await finish(executor)
    await closing
    operations = disk.operation_count
    await asyncio.sleep(0.01)
    assert (disk.operation_count, executor.waiting) == (operations, [])
    assert "closed" in str(log.status().failure)


@runs
async def test_a_read_that_a_cut_overtakes_returns_no_entry_of_before() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    reading = await start(log.read_entries(Index(5), end_index=Index(41), bytes_max=1_000_000))
    read = executor.waiting.pop(0)
    read()  # all of it was read before the cut, but the reader hears of it after
    log.truncate_suffix(Index(10))
    log.append(next_batches(log, b"new", term=2))
    await asyncio.sleep(0)
    await finish(executor)
    entries = await reading
    assert [entry.header.index for entry in entries] == [5, 6, 7, 8, 9]


@runs
async def test_a_timestamp_that_leaves_memory_during_the_search_is_found() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    settings = LogSettings(segment_bytes_max=64 * 1024, tail_cache_bytes_max=0)
    log = open_log(disk, settings, executor=executor)
    log.append([data_batch([b"old"], index=1, offset=0, timestamp=100)])
    await executor.step()
    log.append([data_batch([b"wanted"], index=2, offset=1, timestamp=500)])
    await asyncio.sleep(0)
    searching = await start(log.find_timestamp(400, end_offset=Offset(9)))
    await executor.step()  # the flush: the wanted batch is on disk and no longer in memory
    while not searching.done():
        await executor.step()
    assert await searching == 1


@runs
async def test_a_timestamp_that_is_being_written_is_found_in_memory() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    settings = LogSettings(index_interval_bytes=64, tail_cache_bytes_max=0)
    log = open_log(disk, settings, executor=executor)
    log.append([data_batch([b"old"], index=1, offset=0, timestamp=100)])
    await executor.step()
    log.append([data_batch([b"wanted"], index=2, offset=1, timestamp=500)])
    await asyncio.sleep(0)
    flush = executor.waiting.pop(0)
    searching = await start(log.find_timestamp(400, end_offset=Offset(9)))
    while not searching.done():
        await executor.step()
    assert await searching == 1
    flush()


@runs
async def test_entries_before_damage_are_returned_and_the_next_read_reports_it() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings(tail_cache_bytes_max=0))
    batches = await append(log, *VALUES[:5])
    path = f"{DIRECTORY}/{segment_name(1)}"
    data = bytearray(disk.read_file(path))
    data[data.index(VALUES[3])] ^= 1
    disk.write_file(path, bytes(data))
    found = await log.read_entries(Index(1), end_index=Index(6), bytes_max=1_000_000)
    assert [bytes(entry.data) for entry in found] == [bytes(batch.data) for batch in batches[:3]]
    with pytest.raises(DamageError):
        await log.read_entries(Index(4), end_index=Index(6), bytes_max=1_000_000)


@runs
async def test_term_starts_of_what_waits_for_a_cut_are_not_told() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    log.append(next_batches(log, b"of a leader that lost", term=2))
    await executor.step()
    log.truncate_suffix(Index(len(VALUES) + 1))
    assert log.term_starts() == [(1, 1)]
    log.append(next_batches(log, b"of the new one", term=3))
    assert log.term_starts() == [(1, 1), (len(VALUES) + 1, 3)]
    await finish(executor)
    assert log.term_starts() == [(1, 1), (len(VALUES) + 1, 3)]


class _FaultyExecutor(InlineExecutor):
    """Let work end with an error that no disk makes."""

    error: Exception | None = None

    def submit(self, work: Callable[[], Any], lane: Lane = Lane.WRITES) -> asyncio.Future[Any]:
        if self.error is None:
            return super().submit(work, lane)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_exception(self.error)
        return done


@runs
async def test_a_fault_of_the_program_closes_the_log_and_is_heard() -> None:
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    executor = _FaultyExecutor()
    log = open_log(SimulatedDisk(), TINY, executor=executor)
    await append(log, *VALUES)
    executor.error = KeyError("a mistake")
    with pytest.raises(LogFailedError):
        await log.truncate_prefix(Index(20))
    assert [context["exception"] for context in heard] == [executor.error]
    with pytest.raises(LogClosedError):
        log.append([])


@runs
async def test_a_search_by_offset_that_a_cut_overtakes_looks_again() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    reading = await start(log.read_records(Offset(5), end_offset=Offset(40), bytes_max=1_000_000))
    executor.waiting.pop(0)()
    log.truncate_suffix(Index(8))
    await asyncio.sleep(0)
    while not reading.done():
        await executor.step()
    assert [batch.header.base_offset for batch in await reading] == [5, 6]


@runs
async def test_a_reader_whose_segment_is_gone_but_not_yet_forgotten_is_told_so() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    removing = await start(log.truncate_prefix(Index(20)))
    remove = executor.waiting.pop(0)
    disk.remove(f"{DIRECTORY}/{segment_name(1)}")  # what the removal does first, in its thread
    reading = await start(log.read_entries(Index(1), end_index=Index(9), bytes_max=1))
    await executor.step()
    with pytest.raises(TrimmedError, match="being removed"):
        await reading
    disk.write_file(f"{DIRECTORY}/{segment_name(1)}", b"")
    remove()
    await removing


@runs
async def test_a_damaged_log_can_be_closed() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, b"a" * 50, b"b" * 50)
    await log.close()
    path = f"{DIRECTORY}/{segment_name(1)}"
    data = bytearray(disk.read_file(path))
    data[data.index(b"a" * 50)] ^= 1
    disk.write_file(path, bytes(data))
    log = open_log(disk)
    assert log.damage
    await log.close()
    await log.close()


@runs
async def test_close_waits_for_reads_in_flight_and_later_ones_are_refused() -> None:
    disk, executor = SimulatedDisk(), SteppingExecutor()
    log = await filled(executor=executor, disk=disk)
    reading = await start(log.read_entries(Index(1), end_index=Index(6), bytes_max=1_000_000))
    cancelled = await start(log.read_records(Offset(0), end_offset=Offset(5), bytes_max=1_000_000))
    cancelled.cancel()
    await asyncio.sleep(0)
    held, executor.waiting = executor.waiting, []
    assert len(held) == 2
    closing = await start(log.close())
    await finish(executor)
    assert not closing.done()
    with pytest.raises(UnavailableError, match="not done: the log is closed"):
        await log.read_entries(Index(1), end_index=Index(6), bytes_max=1_000_000)
    executor.waiting = held
    await executor.step()
    assert len(await reading) == 5
    assert not closing.done()  # a thread still uses the files for the reader that was cancelled
    await executor.step()
    assert closing.done()
    await log.close()
