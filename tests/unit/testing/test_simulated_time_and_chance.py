"""Clocks, random streams and traces depend on the seed and on virtual time alone."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import pytest

from quiver.clock import Clock, Rng
from quiver.testing import RandomStreams, SimulatedClock, SimulatedLoop, Trace


class Time:
    now_ns = 0


def test_clock_follows_virtual_time() -> None:
    loop = SimulatedLoop(random.Random(1))
    clock: Clock = SimulatedClock(loop, wall_start_ms=1_000_000)
    loop.call_later(2.5, loop.stop)
    loop.run_forever()
    assert (clock.monotonic_ms(), clock.wall_ms()) == (2500, 1_002_500)


def test_clock_drifts_by_parts_per_million() -> None:
    time = Time()
    fast, slow = SimulatedClock(time, drift_ppm=500), SimulatedClock(time, drift_ppm=-500)
    time.now_ns = 1000 * 10**9
    assert (fast.monotonic_ms(), slow.monotonic_ms()) == (1_000_500, 999_500)


def test_change_of_drift_does_not_move_the_clock() -> None:
    time = Time()
    clock = SimulatedClock(time, drift_ppm=100_000)
    time.now_ns = 10 * 10**9
    before = clock.monotonic_ms(), clock.wall_ms()
    clock.set_drift(-100_000)
    assert (clock.monotonic_ms(), clock.wall_ms()) == before
    time.now_ns = 20 * 10**9
    assert clock.monotonic_ms() == 11_000 + 9_000


def test_wall_clock_jumps_and_the_monotonic_one_does_not() -> None:
    clock = SimulatedClock(Time(), monotonic_start_ms=50, wall_start_ms=1000)
    clock.jump_wall(-400)
    assert (clock.monotonic_ms(), clock.wall_ms()) == (50, 600)


def test_clock_cannot_run_backwards() -> None:
    with pytest.raises(ValueError, match="run back"):
        SimulatedClock(Time(), drift_ppm=-1_000_000)


def test_streams_are_independent_and_repeatable() -> None:
    one, two = RandomStreams(7), RandomStreams(7)
    stream: Rng = one.schedule
    drawn = [stream.random() for _ in range(5)]
    assert [two.schedule.random() for _ in range(5)] == drawn
    assert one.network.random() == two.network.random()
    firsts = {two.stream(name).random() for name in ("schedule", "network", "disk", "workload", "disk/1")}
    assert len(firsts) == 5
    assert RandomStreams(8).schedule.random() != drawn[0]


def test_streams_give_the_same_numbers_on_every_host() -> None:
    assert RandomStreams(42).schedule.randrange(10**9) == 523173798


def test_trace_digest_depends_on_every_event_and_their_order() -> None:
    def digest(*events: tuple[Any, ...]) -> str:
        trace = Trace()
        for kind, *facts in events:
            trace.record(kind, *facts)
        return trace.digest()

    assert digest(("a", 1), ("b", 2)) == digest(("a", 1), ("b", 2))
    different = [
        digest(("a", 1), ("b", 2)),
        digest(("b", 2), ("a", 1)),
        digest(("a", 1)),
        digest(("a", "1"), ("b", 2)),
        digest(("a", 1, "b", 2)),
    ]
    assert len(set(different)) == len(different)


def test_trace_digest_can_be_read_at_any_time() -> None:
    trace = Trace()
    digests = {trace.digest()}
    for number in range(10_000):
        trace.record_step(number, number)
    digests.add(trace.digest())
    assert trace.digest() in digests
    assert len(digests) == 2


def test_trace_keeps_the_last_events_for_people() -> None:
    trace = Trace(tail_length=2)
    for number in range(5):
        trace.record("vote", number, b"x", None)
    assert trace.tail() == ["4 vote 3 b'x' None", "5 vote 4 b'x' None"]
    assert trace.event_count == 5


@pytest.mark.parametrize("fact", [{1, 2}, object(), [1], (1,)])
def test_trace_refuses_facts_whose_text_may_differ_between_runs(fact: Any) -> None:
    with pytest.raises(TypeError, match="plain value"):
        Trace().record("kind", fact)


PROGRAM = """
import asyncio
from quiver.testing import Latency, RandomStreams, SimulatedDisk, SimulatedExecutor, SimulatedLoop, Trace
streams, trace = RandomStreams("seed"), Trace()
loop, disk = SimulatedLoop(streams.schedule, trace=trace), SimulatedDisk()
executor = SimulatedExecutor(loop, streams.disk, Latency(spread_ms=5), workers=3)
async def work(name):
    file = await executor.run(lambda: disk.open(name, create=True))
    for position in range(0, 3000, 300):
        await executor.run(lambda: file.write([name.encode() * 300], position))
        if streams.workload.random() < 0.3:
            await executor.run(file.sync)
async def main():
    async with asyncio.TaskGroup() as group:
        for name in ORDER({"alpha", "beta", "gamma", "delta"}):
            group.create_task(work(name))
loop.run_until_complete(main())
disk.sync_directory("/")
disk.crash(streams.disk)
for path in disk.paths():
    trace.record("file", path, disk.read_file(path))
loop.close()
print(trace.digest(), loop.event_count, disk.paths())
"""


def run_program(order: str, hash_seed: int) -> str:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("ORDER", order)],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_same_seed_gives_the_same_run_under_other_hash_seeds() -> None:
    assert len({run_program("sorted", hash_seed) for hash_seed in (0, 1, 4242)}) == 1


def test_digest_shows_a_program_that_depends_on_hash_order() -> None:
    assert len({run_program("list", hash_seed) for hash_seed in (0, 1, 4242)}) > 1
