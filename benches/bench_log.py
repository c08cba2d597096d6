"""What a partition's log costs on this machine's disk: `python benches/bench_log.py [DIRECTORY]`.

Batches are of 1,000 values of 100 bytes, built before the clock starts. Raw limits are bare system calls
on the same file system in the same run: one `write` and `fdatasync` for each flush, one `read` of the file.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from quiver.clock import SystemClock
from quiver.config import Durability, LogSettings
from quiver.model import Index, Offset, Term
from quiver.record import Batch, build_batch, stamp
from quiver.record.arrow import to_arrow
from quiver.storage import Log, SystemDisk, ThreadExecutor
from quiver.storage.inspect import verify_directory
from quiver.storage.scan import CHUNK_BYTES
from table import Row, best_seconds, show

BATCHES = 1000
RECORDS = 1000
WRITERS = 64
"""Appenders that each wait for their own batch: what arrives during an fdatasync shares the next."""
SINGLES = 300
READ_BYTES_MAX = 4 << 20
RUNS = 5


def main(directory: Path) -> bool:
    """Measure in `directory` and print; return whether every target was reached."""
    executor = ThreadExecutor()
    batches = stamped_batches(BATCHES, RECORDS)
    rows = [
        *append_rows(directory, executor, batches),
        *latency_rows(directory, executor),
        *read_rows(directory / "log-fsync", executor, batches),
    ]
    executor.close()
    return show(rows, title=f"log: {BATCHES:,} batches of {RECORDS:,} values of 100 bytes")


def append_rows(directory: Path, executor: ThreadExecutor, batches: list[Batch]) -> list[Row]:
    records = BATCHES * RECORDS / 1e6
    raw = records / raw_append_seconds(directory / "raw", batches)
    kinds: tuple[Durability, ...] = ("fsync", "interval", "none")
    rows = []
    for durability in kinds:
        seconds = asyncio.run(append_seconds(directory / f"log-{durability}", executor, batches, durability))
        target = 1.5 if durability == "fsync" else None
        rows.append(Row(f"append, {WRITERS} writers, {durability}", records / seconds, "M records/s", raw, target))
    return rows


def latency_rows(directory: Path, executor: ThreadExecutor) -> list[Row]:
    singles = stamped_batches(SINGLES, 1)
    raw = raw_append_latencies(directory / "raw-single", singles)
    own = asyncio.run(append_latencies(directory / "single", executor, singles))
    return [
        Row("awaited append of one record, p50", median(own) * 1e3, "ms", median(raw) * 1e3),
        Row("awaited append of one record, p99", percentile(own, 99) * 1e3, "ms", percentile(raw, 99) * 1e3),
    ]


def read_rows(directory: Path, executor: ThreadExecutor, batches: list[Batch]) -> list[Row]:
    records, size = len(batches) * RECORDS / 1e6, sum(len(batch.data) for batch in batches) / 1e9
    raw_s = best_seconds(lambda: read_raw(directory), loops=1, repeats=RUNS)
    read_s = min(asyncio.run(read_seconds(directory, executor)) for _ in range(RUNS))
    verify_s = best_seconds(lambda: verify_directory(SystemDisk(), str(directory)), loops=1, repeats=RUNS)
    open_s = best_seconds(lambda: open_log(directory, executor, "fsync"), loops=1, repeats=RUNS)
    return [
        Row("read from disk to Arrow", records / read_s, "M records/s", records / raw_s, 5),
        Row("verify every byte", size / verify_s, "GB/s", size / raw_s),
        Row(f"open a log of {size * 1e3:,.0f} MB", open_s * 1e3, "ms"),
    ]


async def append_seconds(
    directory: Path, executor: ThreadExecutor, batches: list[Batch], durability: Durability
) -> float:
    log, remaining = open_log(directory, executor, durability), iter(batches)

    async def write() -> None:
        for batch in remaining:
            log.append([batch])
            await log.wait_durable(Index(batch.header.index + 1))

    start = perf_counter()
    async with asyncio.TaskGroup() as writers:
        for _ in range(WRITERS):
            writers.create_task(write())
    seconds = perf_counter() - start
    await log.close()
    return seconds


async def append_latencies(directory: Path, executor: ThreadExecutor, batches: list[Batch]) -> list[float]:
    log, latencies = open_log(directory, executor, "fsync"), []
    for batch in batches:
        start = perf_counter()
        log.append([batch])
        await log.wait_durable(Index(batch.header.index + 1))
        latencies.append(perf_counter() - start)
    await log.close()
    return latencies


async def read_seconds(directory: Path, executor: ThreadExecutor) -> float:
    log = open_log(directory, executor, "fsync")
    start, position = perf_counter(), log.first_offset
    while found := await log.read_records(position, end_offset=log.end_offset, bytes_max=READ_BYTES_MAX):
        for batch in found:
            to_arrow(batch)
        position = found[-1].header.end_offset
    seconds = perf_counter() - start
    await log.close()
    return seconds


def raw_append_seconds(path: Path, batches: list[Batch]) -> float:
    """Write the same bytes in as many flushes as `WRITERS` appenders need, each with its fdatasync."""
    flushes = [b"".join(b.data for b in batches[at : at + WRITERS]) for at in range(0, len(batches), WRITERS)]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    start = perf_counter()
    for flush in flushes:
        os.write(descriptor, flush)
        os.fdatasync(descriptor)
    seconds = perf_counter() - start
    os.close(descriptor)
    return seconds


def raw_append_latencies(path: Path, batches: list[Batch]) -> list[float]:
    descriptor, latencies = os.open(path, os.O_WRONLY | os.O_CREAT), []
    for batch in batches:
        start = perf_counter()
        os.write(descriptor, batch.data)
        os.fdatasync(descriptor)
        latencies.append(perf_counter() - start)
    os.close(descriptor)
    return latencies


def stamped_batches(count: int, records: int) -> list[Batch]:
    built = build_batch([b"%0100d" % n for n in range(records)], timestamp=1)
    stamped = (
        stamp(built, term=Term(1), index=Index(n + 1), base_offset=Offset(n * records), append_timestamp=1)
        for n in range(count)
    )
    return [Batch.decode(batch) for batch in stamped]


def open_log(directory: Path, executor: ThreadExecutor, durability: Durability) -> Log:
    settings = LogSettings(durability=durability, tail_cache_bytes_max=0)
    return Log.open(str(directory), disk=SystemDisk(), executor=executor, clock=SystemClock(), settings=settings)


def read_raw(directory: Path) -> None:
    """Read every segment in the chunks that the log reads in."""
    for path in directory.glob("*.log"):
        with path.open("rb", buffering=0) as file:
            while file.read(CHUNK_BYTES):
                pass


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None, prefix="quiver-bench-") as made:
        sys.exit(not main(Path(made)))
