"""Reads pause while writes are slow, never for long, and not at all without writes."""

from __future__ import annotations

import asyncio
import threading

from test_executor_lanes import status_of
from test_log import runs

from quiver.config import ExecutorSettings
from quiver.storage import Lane, ThreadExecutor
from quiver.storage.pacing import DECREASE_INTERVAL_S, PAUSE_S_MAX, PAUSE_S_MIN, SAMPLE_AGE_S_MAX, LatencyPacer

FAST_S, SLOW_S = 0.001, 0.003


def pacer_after(*latencies_s: float) -> LatencyPacer:
    """Return a pacer that has seen writes while background work ran."""
    pacer = LatencyPacer(target_s=0.002)
    pacer.begin_work()
    for latency_s in latencies_s:
        pacer.add_sample(latency_s, now_s=1.0)
    return pacer


def test_pause_grows_while_writes_are_slow_up_to_a_bound() -> None:
    pauses_s = [pacer_after(*[SLOW_S] * count).pause_s(1.0) for count in range(20)]
    assert pauses_s[:2] == [0.0, PAUSE_S_MIN]
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] == PAUSE_S_MAX


def test_pause_ends_when_writes_are_fast_again() -> None:
    once = pacer_after(SLOW_S, SLOW_S, FAST_S)
    assert PAUSE_S_MIN < once.pause_s(1.0) < pacer_after(SLOW_S, SLOW_S).pause_s(1.0)
    assert pacer_after(SLOW_S, *[FAST_S] * 40).pause_s(1.0) == 0.0


def test_pause_needs_recent_writes() -> None:
    pacer = pacer_after(*[SLOW_S] * 9)
    assert pacer.pause_s(1.0 + SAMPLE_AGE_S_MAX / 2) > 0
    assert pacer.pause_s(1.0 + SAMPLE_AGE_S_MAX) == 0.0


def test_fast_write_speaks_for_the_time_since_the_last() -> None:
    often, seldom = pacer_after(*[SLOW_S] * 9), pacer_after(*[SLOW_S] * 9)
    often.add_sample(FAST_S, now_s=1.0 + DECREASE_INTERVAL_S)
    seldom.add_sample(FAST_S, now_s=1.0 + 8 * DECREASE_INTERVAL_S)
    assert 0 < seldom.pause_s(1.2) < often.pause_s(1.2)


def test_writes_that_are_slow_without_reads_make_no_reader_wait() -> None:
    pacer = LatencyPacer(target_s=0.002)
    for _ in range(9):
        pacer.add_sample(SLOW_S, now_s=1.0)
    assert pacer.pause_s(1.0) == 0.0
    pacer.begin_work()
    pacer.end_work(now_s=1.0)
    pacer.add_sample(SLOW_S, now_s=1.0 + 2 * SLOW_S)
    assert pacer.pause_s(1.0) == 0.0, "the read had ended before the write was submitted"
    pacer.add_sample(SLOW_S, now_s=1.0 + SLOW_S / 2)
    assert pacer.pause_s(1.0) == PAUSE_S_MIN, "the read ended while the write waited"


@runs
async def test_executor_paces_reads_by_the_wait_of_writes() -> None:
    executor = ThreadExecutor(ExecutorSettings(write_threads=1, read_threads=1, write_wait_ms_target=1))
    assert status_of(executor, Lane.READS).pause_s == 0.0
    ended = threading.Event()
    reading = executor.submit(ended.wait, Lane.READS)
    naps = [executor.submit(lambda: threading.Event().wait(0.01)) for _ in range(3)]
    await asyncio.gather(*naps)
    assert status_of(executor, Lane.READS).pause_s >= PAUSE_S_MIN, "two of the writes waited for the first"
    ended.set()
    await reading
    assert status_of(executor, Lane.WRITES).pause_s == 0.0
    reads = [executor.submit(lambda: None, Lane.READS) for _ in range(2)]
    await asyncio.gather(*reads)
    assert status_of(executor, Lane.READS).waited_s_max >= PAUSE_S_MIN, "the second waited for the pause"
    executor.close()
