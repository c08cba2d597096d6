"""What a log does while nothing goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
from log_world import (
    DIRECTORY,
    FixedClock,
    SteppingExecutor,
    all_entries,
    all_values,
    append,
    control_batch,
    data_batch,
    next_batches,
    open_log,
    wait_durable,
)

from quiver.config import LogSettings
from quiver.errors import InvariantBroken, LogClosedError, OverloadedError, RequestError, StorageError, TrimmedError
from quiver.model import Index, Offset, Term
from quiver.storage import LargeBatch, TailBudget
from quiver.testing import SimulatedDisk

AsyncTest = Callable[..., Coroutine[Any, Any, None]]


def runs(test: AsyncTest) -> Callable[..., None]:
    @wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


VALUES = [f"value-{n}-".encode() * (1 + n % 7) for n in range(40)]


@runs
async def test_new_log_is_empty_and_starts_at_index_one() -> None:
    log = open_log(SimulatedDisk())
    status = log.status()
    assert (status.first_index, status.end_index, status.first_offset, status.end_offset) == (1, 1, 0, 0)
    assert await log.read_entries(Index(1), end_index=Index(9), bytes_max=100) == []
    assert await log.read_records(Offset(0), end_offset=Offset(9), bytes_max=100) == []
    await log.close()


@pytest.mark.parametrize("tail_bytes", [0, 2500, 1_000_000])
@runs
async def test_everything_appended_is_read_back_before_and_after_reopening(tail_bytes: int) -> None:
    disk = SimulatedDisk()
    settings = LogSettings(segment_bytes_max=1024, index_interval_bytes=256, tail_cache_bytes_max=tail_bytes)
    log = open_log(disk, settings)
    for first in range(0, 40, 4):
        await append(log, *VALUES[first : first + 4])
    assert await all_values(log) == VALUES
    expected = [bytes(batch.data) for batch in await all_entries(log)]
    await log.close()
    log = open_log(disk, settings)
    assert log.status().segments > 5
    assert log.warnings == ()
    assert await all_values(log) == VALUES
    assert [bytes(batch.data) for batch in await all_entries(log)] == expected
    await append(log, b"after")
    assert (await all_values(log))[-1] == b"after"


@runs
async def test_appended_batches_are_readable_before_they_are_durable() -> None:
    executor = SteppingExecutor()
    log = open_log(SimulatedDisk(), executor=executor)
    log.append(next_batches(log, b"a", b"b"))
    assert log.durable_end_index == 1
    found = log.read_entries_nowait(Index(1), end_index=Index(3), bytes_max=10_000)
    assert found is not None
    assert [batch.values() for batch in found] == [[b"a"], [b"b"]]


@runs
async def test_what_arrives_during_a_flush_joins_the_next_one() -> None:
    executor = SteppingExecutor()
    disk = SimulatedDisk(keep_journal=True)
    log = open_log(disk, LogSettings(), executor=executor)
    reported: list[int] = []
    log.on_durable = reported.append
    log.append(next_batches(log, b"first"))
    for n in range(10):
        log.append(next_batches(log, b"joined %d" % n))
    assert len(executor.waiting) == 1
    await executor.step()
    assert len(executor.waiting) == 1
    await executor.step()
    assert executor.waiting == []
    assert reported == [2, 12]
    assert disk.journal is not None
    assert [kind for kind, _ in disk.journal][-4:] == ["write", "sync", "write", "sync"]


@runs
async def test_append_that_does_not_follow_the_end_ends_the_process() -> None:
    log = open_log(SimulatedDisk())
    await append(log, b"a", b"b", term=2)
    for wrong in (
        data_batch([b"x"], index=5, offset=2, term=2),
        data_batch([b"x"], index=3, offset=1, term=2),
        data_batch([b"x"], index=3, offset=2, term=1),
    ):
        with pytest.raises(InvariantBroken):
            log.append([wrong])


@runs
async def test_work_over_the_pending_bound_is_refused() -> None:
    executor = SteppingExecutor()
    log = open_log(SimulatedDisk(), LogSettings(pending_bytes_max=1024), executor=executor)
    log.append(next_batches(log, b"in flight"))
    await asyncio.sleep(0)
    log.append(next_batches(log, b"x" * 700))
    log.check_room(200)
    with pytest.raises(OverloadedError):
        log.check_room(700)
    await executor.step()
    await executor.step()
    log.check_room(7000)


@runs
async def test_reading_stops_at_the_offset_that_the_caller_may_see() -> None:
    for tail_bytes in (0, 1_000_000):
        log = open_log(SimulatedDisk(), LogSettings(segment_bytes_max=1024, tail_cache_bytes_max=tail_bytes))
        log.append([data_batch([b"a", b"b"], index=1, offset=0), data_batch([b"c", b"d"], index=2, offset=2)])
        await wait_durable(log, Index(3))
        seen = await log.read_records(Offset(1), end_offset=Offset(3), bytes_max=10_000)
        assert [batch.values() for batch in seen] == [[b"a", b"b"]]
        assert await log.read_records(Offset(2), end_offset=Offset(3), bytes_max=10_000) == []
        assert await log.read_records(Offset(3), end_offset=Offset(3), bytes_max=10_000) == []


@runs
async def test_logs_that_share_memory_read_the_same_with_little_of_it() -> None:
    tails = TailBudget(2_000)
    logs = [open_log(SimulatedDisk(), LogSettings(segment_bytes_max=1024), tails=tails) for _ in range(3)]
    for round_ in range(5):
        for number, log in enumerate(logs):
            await append(log, f"{number}-{round_}".encode(), b"x" * 300)
    for number, log in enumerate(logs):
        found = [batch.values() for batch in await all_entries(log)]
        assert found == [[value] for round_ in range(5) for value in (f"{number}-{round_}".encode(), b"x" * 300)]
    await logs[2].reset(first_index=Index(50), first_offset=Offset(40), previous_term=Term(1))
    assert tails.size_bytes == 0
    for log in logs:
        await log.close()


@runs
async def test_reads_keep_to_the_byte_bound_but_return_at_least_one_batch() -> None:
    for tail_bytes in (0, 1_000_000):
        log = open_log(SimulatedDisk(), LogSettings(tail_cache_bytes_max=tail_bytes))
        batches = await append(log, *[b"x" * 100] * 10)
        size = len(batches[0].data)
        for bound, count in ((1, 1), (size, 1), (size * 2 - 1, 1), (size * 2, 2), (size * 100, 10)):
            found = await log.read_records(Offset(0), end_offset=Offset(10), bytes_max=bound)
            assert len(found) == count
            entries = await log.read_entries(Index(1), end_index=Index(11), bytes_max=bound)
            assert len(entries) == count
        assert len(await log.read_entries(Index(1), end_index=Index(4), bytes_max=size * 100)) == 3


@runs
async def test_first_batch_that_is_too_large_for_its_reader_is_not_returned() -> None:
    for tail_bytes in (0, 1_000_000):
        log = open_log(SimulatedDisk(), LogSettings(tail_cache_bytes_max=tail_bytes))
        small, large, *_ = await append(log, b"x" * 100, b"x" * 1_000)
        room = len(large.data) - 1
        with pytest.raises(LargeBatch) as raised:
            await log.read_records(Offset(1), end_offset=Offset(2), bytes_max=1, first_bytes_max=room)
        assert raised.value.size_bytes == len(large.data)
        found = await log.read_records(Offset(0), end_offset=Offset(2), bytes_max=room, first_bytes_max=room)
        assert [len(batch.data) for batch in found] == [len(small.data)], "the next read gets the large one"
        assert await log.read_records(Offset(1), end_offset=Offset(2), bytes_max=1, first_bytes_max=room + 1)


@runs
async def test_control_batches_use_no_offset_and_are_skipped_by_record_reads() -> None:
    for tail_bytes in (0, 1_000_000):
        log = open_log(
            SimulatedDisk(),
            LogSettings(segment_bytes_max=1024, index_interval_bytes=64, tail_cache_bytes_max=tail_bytes),
        )
        index, offset = 1, 0
        for round_number in range(12):
            log.append([control_batch(b"c" * round_number, index=index, offset=offset)])
            log.append([control_batch(b"", index=index + 1, offset=offset)])
            log.append([data_batch([b"%d" % round_number, b"+"], index=index + 2, offset=offset)])
            index, offset = index + 3, offset + 2
        await wait_durable(log, Index(index))
        assert log.end_offset == 24
        for offset in range(24):
            (batch, *_) = await log.read_records(Offset(offset), end_offset=Offset(24), bytes_max=1)
            assert batch.header.base_offset == offset - offset % 2
        assert len(await all_entries(log)) == 36


@runs
async def test_reading_outside_the_log_is_a_clear_error() -> None:
    log = open_log(SimulatedDisk())
    await append(log, *VALUES)
    with pytest.raises(RequestError):
        await log.read_records(Offset(41), end_offset=Offset(99), bytes_max=1)
    await log.truncate_prefix(Index(20))
    assert 1 < log.first_index <= 20
    with pytest.raises(TrimmedError):
        await log.read_records(Offset(0), end_offset=Offset(40), bytes_max=1)
    with pytest.raises(TrimmedError):
        await log.read_entries(Index(1), end_index=Index(9), bytes_max=1)
    assert await all_values(log) == VALUES[log.first_offset :]


@runs
async def test_what_retention_removed_is_not_served_from_memory() -> None:
    log = open_log(SimulatedDisk(), LogSettings(segment_bytes_max=1024))
    times = range(2000, 2000 - len(VALUES), -1)
    for value, time in zip(VALUES, times, strict=True):
        await append(log, value, timestamp=time)
    await log.truncate_prefix(Index(30))
    assert 20 < log.first_index <= 30
    assert await log.find_timestamp(1990, end_offset=log.end_offset) is None
    assert log.read_entries_nowait(Index(1), end_index=Index(9), bytes_max=1) is None
    with pytest.raises(TrimmedError):
        await log.read_entries(Index(1), end_index=Index(9), bytes_max=1)


@runs
async def test_timestamp_search_finds_the_first_record_that_is_not_older() -> None:
    for tail_bytes in (0, 2500, 1_000_000):
        log = open_log(
            SimulatedDisk(),
            LogSettings(segment_bytes_max=1024, index_interval_bytes=128, tail_cache_bytes_max=tail_bytes),
        )
        times = [100, 300, 200, 500, 400, 400, 900, 800, 700, 1000, 50, 1200]
        log.append([control_batch(b"c", index=1, offset=0, timestamp=5000)])
        for n, time in enumerate(times):
            log.append([data_batch([b"v" * 90], index=n + 2, offset=n, timestamp=time)])
        await wait_durable(log, log.end_index)
        for wanted in range(0, 1300, 50):
            expected = next((n for n, time in enumerate(times) if time >= wanted), None)
            assert await log.find_timestamp(wanted, end_offset=Offset(len(times))) == expected
        assert await log.find_timestamp(1100, end_offset=Offset(11)) is None


@runs
async def test_terms_are_known_for_every_entry_and_the_one_before_the_start() -> None:
    log = open_log(SimulatedDisk())
    for term in (1, 1, 2, 5, 5, 7):
        await append(log, *VALUES[:5], term=term)
    terms = [1] * 10 + [2] * 5 + [5] * 10 + [7] * 5
    assert [log.term_at(Index(n)) for n in range(32)] == [0, *terms, None]
    assert log.term_starts() == [(1, 1), (11, 2), (16, 5), (26, 7)]
    await log.truncate_prefix(Index(16))
    first = log.first_index
    assert log.term_at(Index(first - 1)) == terms[first - 2]
    assert log.term_at(Index(first - 2)) is None
    await append(log, b"pending", term=9)
    assert log.term_starts()[-1] == (31, 9)


@runs
async def test_term_starts_include_what_is_not_flushed_yet() -> None:
    log = open_log(SimulatedDisk(), executor=SteppingExecutor())
    log.append(next_batches(log, b"a", term=1))
    log.append(next_batches(log, b"b", b"c", term=2))
    assert log.term_starts() == [(1, 1), (2, 2)]


@runs
async def test_segments_roll_by_age() -> None:
    clock = FixedClock()
    settings = LogSettings(segment_age_ms_max=1000)
    log = open_log(SimulatedDisk(), settings, clock=clock)
    await append(log, b"a")
    clock.now_ms += 999
    await append(log, b"b")
    assert log.status().segments == 1
    clock.now_ms += 1
    await append(log, b"c")
    assert log.status().segments == 2
    clock.now_ms += 5000
    await log.roll_if_old()
    await log.roll_if_old()
    assert log.status().segments == 3
    assert await all_values(log) == [b"a", b"b", b"c"]
    await log.truncate_prefix(log.end_index)
    assert log.status().segments == 1
    await append(log, b"d")
    assert await all_values(log) == [b"d"]


@pytest.mark.parametrize("end_index", range(1, 42))
@runs
async def test_truncated_suffix_is_gone_immediately_and_after_reopening(end_index: int) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES, term=1)
    log.truncate_suffix(Index(end_index))
    assert (log.end_index, log.end_offset, log.durable_end_index) == (end_index, end_index - 1, end_index)
    replacement = [b"new %d" % n for n in range(10)]
    await append(log, *replacement, term=2)
    expected = VALUES[: end_index - 1] + replacement
    assert await all_values(log) == expected
    assert log.term_at(Index(end_index)) == 2
    await log.close()
    log = open_log(disk)
    assert await all_values(log) == expected
    assert [log.term_at(Index(n)) for n in range(1, end_index + 10)] == [1] * (end_index - 1) + [2] * 10
    assert await log.find_timestamp(1000, end_offset=log.end_offset) == 0


@runs
async def test_cut_of_what_is_in_flight_is_not_reported_durable() -> None:
    executor = SteppingExecutor()
    log = open_log(SimulatedDisk(), executor=executor)
    reported: list[int] = []
    log.on_durable = reported.append
    log.append(next_batches(log, b"a", b"b", b"c", term=1))
    log.append(next_batches(log, b"queued", term=1))
    await asyncio.sleep(0)
    log.truncate_suffix(Index(2))
    log.truncate_suffix(Index(2))
    log.append(next_batches(log, b"B", term=2))
    await executor.step()
    assert reported == [2]
    while executor.waiting:
        await executor.step()
    assert reported == [2, 3]
    assert log.read_entries_nowait(Index(2), end_index=Index(9), bytes_max=9999) is not None


@runs
async def test_two_cuts_while_the_disk_is_busy_leave_the_lower_end() -> None:
    executor = SteppingExecutor()
    disk = SimulatedDisk()
    log = open_log(disk, executor=executor)
    log.append(next_batches(log, *VALUES[:20], term=1))
    await executor.step()
    log.append(next_batches(log, b"in flight", term=1))
    log.truncate_suffix(Index(9))
    log.append(next_batches(log, b"x", term=2))
    log.truncate_suffix(Index(5))
    log.append(next_batches(log, b"y", term=3))
    while executor.waiting:
        await executor.step()
    reopened = open_log(disk)
    assert await all_values(reopened) == [*VALUES[:4], b"y"]


@runs
async def test_reset_starts_over_elsewhere_and_survives_reopening() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES[:30])
    for first_index in (101, 11, 16):
        await log.reset(first_index=Index(first_index), first_offset=Offset(90), previous_term=Term(7))
        assert (log.first_index, log.end_index, log.first_offset, log.last_term) == (first_index, first_index, 90, 7)
        assert log.term_at(Index(first_index - 1)) == 7
        log = open_log(disk)
        assert (log.first_index, log.end_index, log.end_offset, log.last_term) == (first_index, first_index, 90, 7)
        await append(log, *VALUES[:12], term=8)
        assert await all_values(log) == VALUES[:12]
        assert log.warnings == ()


@runs
async def test_reset_discards_pending_entries() -> None:
    executor = SteppingExecutor()
    log = open_log(SimulatedDisk(), executor=executor)
    log.append(next_batches(log, b"in flight"))
    log.append(next_batches(log, b"queued"))
    reported: list[int] = []
    log.on_durable = reported.append
    await asyncio.sleep(0)
    reset = asyncio.ensure_future(log.reset(first_index=Index(9), first_offset=Offset(5), previous_term=Term(1)))
    await asyncio.sleep(0)
    while executor.waiting:
        await executor.step()
    await reset
    assert reported == [], "the discarded entries are never reported as durable"
    assert log.durable_end_index == log.end_index == 9


@pytest.mark.parametrize("durability", ["interval", "none"])
@runs
async def test_weaker_durability_reports_after_the_write(durability: str) -> None:
    disk = SimulatedDisk(keep_journal=True)
    settings = LogSettings(durability=durability, flush_interval_ms=1)  # type: ignore[arg-type]  # parametrized
    log = open_log(disk, settings)
    assert disk.journal is not None
    disk.journal.clear()
    await append(log, b"a")
    assert [kind for kind, _ in disk.journal] == ["write"]
    await asyncio.sleep(0.02)
    syncs = [kind for kind, _ in disk.journal].count("sync")
    assert syncs == (1 if durability == "interval" else 0)
    await append(log, b"b")
    await log.close()
    assert await all_values(open_log(disk, settings)) == [b"a", b"b"]


@runs
async def test_close_flushes_what_waits_and_refuses_more() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    log.append(next_batches(log, *VALUES[:9]))
    log.append(next_batches(log, *VALUES[9:20]))
    log.truncate_suffix(Index(19))
    await log.close()
    await log.close()
    with pytest.raises(LogClosedError):
        log.append([])
    with pytest.raises(LogClosedError):
        log.truncate_suffix(Index(2))
    with pytest.raises(LogClosedError):
        await log.reset(first_index=Index(9), first_offset=Offset(5), previous_term=Term(1))
    assert await all_values(open_log(disk)) == VALUES[:18]


@runs
async def test_a_segment_that_vanishes_is_reported_as_missing() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES)
    disk.remove(f"{DIRECTORY}/{1:020d}.log")
    with pytest.raises(StorageError, match="missing"):
        await log.read_entries(Index(1), end_index=Index(9), bytes_max=1)


@runs
async def test_a_reader_of_a_segment_that_retention_removes_is_told_so() -> None:
    executor = SteppingExecutor()
    log = open_log(SimulatedDisk(), executor=executor)
    log.append(next_batches(log, *VALUES))
    await executor.step()
    reading = asyncio.ensure_future(log.read_entries(Index(1), end_index=Index(9), bytes_max=1))
    await asyncio.sleep(0)
    removing = asyncio.ensure_future(log.truncate_prefix(Index(20)))
    await asyncio.sleep(0)
    read_work = executor.waiting.pop(0)
    executor.waiting[0]()
    read_work()
    with pytest.raises(TrimmedError):
        await reading
    await removing
    with pytest.raises(TrimmedError):
        await log.read_entries(Index(1), end_index=Index(9), bytes_max=1)


@runs
async def test_a_reader_of_entries_that_are_cut_meanwhile_gets_what_replaced_them() -> None:
    executor = SteppingExecutor()
    log = open_log(SimulatedDisk(), executor=executor)
    log.append(next_batches(log, *VALUES, term=1))
    await executor.step()
    reading = asyncio.ensure_future(log.read_entries(Index(20), end_index=Index(41), bytes_max=1))
    searching = asyncio.ensure_future(log.read_records(Offset(19), end_offset=Offset(40), bytes_max=1))
    await asyncio.sleep(0)
    reads = [executor.waiting.pop(0), executor.waiting.pop(0)]
    log.truncate_suffix(Index(10))
    log.append(next_batches(log, *VALUES[::-1], term=2))
    await executor.step()
    for read in reads:
        read()
    (entry,) = await reading
    assert entry.header.term == 2
    (batch,) = await searching
    assert batch.header.term == 2


@runs
async def test_the_offset_behind_every_entry_is_known() -> None:
    for tail_bytes in (0, 1_000_000):
        log = open_log(SimulatedDisk(), LogSettings(segment_bytes_max=1024, tail_cache_bytes_max=tail_bytes))
        log.append(
            [
                data_batch([b"a" * 300] * 2, index=1, offset=0),
                control_batch(b"c" * 700, index=2, offset=2),
                data_batch([b"d"] * 3, index=3, offset=2),
            ]
        )
        await wait_durable(log, Index(4))
        assert [log.offset_after(Index(index)) for index in range(-1, 5)] == [None, 0, 2, 2, 5, None]
