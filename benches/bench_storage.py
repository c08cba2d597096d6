"""Measure the log next to bare system calls: ``python benches/bench_storage.py [--gib 10] [--directory DIR]``.

Every figure has its raw limit, measured in the same run and alternating with it: other programs slow both down alike.
Data goes to a temporary directory on the repository's file system (not to a memory file system) and is removed
afterwards, also after an error. Figures that grow with the log are measured with `--gib` gigabytes; memory is the peak
of a child process that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import perf_counter

from quiver.clock import SystemClock
from quiver.config import LogSettings
from quiver.model import Index, Offset, Term
from quiver.record import Batch, build_batch, stamp
from quiver.storage import Log, SystemDisk, ThreadExecutor
from quiver.storage.sealing import LogCipher
from table import Row, show

MIB = 1 << 20
GIB = 1 << 30
LARGE_BATCHES = 64
"""Batches of 1 MiB in one run of the append figure."""
APPENDERS = 8
"""Callers that each wait for their own large batch: enough that some wait during a flush."""
CALLERS = 64
BUILT_BEFORE = 40_000
"""Most records of one run with small records, to bound its memory; the time limit ends a run earlier."""
SECONDS_PER_CALLER_RUN = 0.7
ROUNDS = 7
READ_BYTES_MAX = 4 * MIB
ENCRYPTED_LOG_BYTES = 128 * MIB
VALUE = Random(7).randbytes(100)


def main() -> int:
    """Measure and print; return the exit status."""
    options = parse_options()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-storage-") as made:
        directory, executor = Path(made), ThreadExecutor()
        try:
            rows = encryption_rows(directory, executor)
            if not options.encryption_only:
                rows = [
                    append_row(directory, executor),
                    *caller_rows(directory, executor),
                    *large_log_rows(directory / "large", executor, gib=options.gib),
                    *rows,
                ]
        finally:
            executor.close()
    return show(rows, title=f"storage: fsync on, {options.gib:g} GiB for the large log")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the log beside bare system calls.")
    parser.add_argument("--gib", type=float, default=1, help="size of the large log (default: 1)")
    parser.add_argument("--directory", default=Path(__file__).parent.parent, help="where to put the data")
    parser.add_argument("--encryption-only", action="store_true", help="measure only encrypted logs next to plain ones")
    return parser.parse_args()


class GroupAppender:
    """Append as a replica does: the batches submitted in one turn of the event loop go to the log together."""

    def __init__(self, log: Log) -> None:
        self.end_index, self.end_offset = log.end_index, log.end_offset
        self._log = log
        self._batches: list[Batch] = []
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        log.on_durable = self._wake

    async def append(self, batch: Batch) -> None:
        """Append a batch and wait until it is durable."""
        self.end_index, self.end_offset = Index(batch.header.index + 1), batch.header.end_offset
        loop = asyncio.get_running_loop()
        if not self._batches:
            loop.call_soon(self._submit)
        self._batches.append(batch)
        done: asyncio.Future[None] = loop.create_future()
        self._waiters.append((self.end_index, done))
        await done

    def _submit(self) -> None:
        batches, self._batches = self._batches, []
        self._log.append(batches)

    def _wake(self, durable_end: Index) -> None:
        while self._waiters and self._waiters[0][0] <= durable_end:
            self._waiters.popleft()[1].set_result(None)


Maker = Callable[[GroupAppender], Batch]


# -- appending large batches ---------------------------------------------------------------------


def append_row(directory: Path, executor: ThreadExecutor) -> Row:
    batches = large_batches(LARGE_BATCHES)
    megabytes = sum(len(batch.data) for batch in batches) / 1e6
    raw_s = own_s = float("inf")
    for number in range(ROUNDS):
        raw_s = min(raw_s, raw_append_seconds(directory / f"raw-{number}", batches))
        own_s = min(own_s, asyncio.run(append_seconds(directory / f"append-{number}", executor, batches)))
    raw = megabytes / raw_s
    return Row("append 1 MiB batches, group commit", megabytes / own_s, "MB/s", raw, 0.7 * raw)


def raw_append_seconds(path: Path, batches: list[Batch]) -> float:
    """Write the same bytes, a batch at a time, with an fdatasync after each."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        start = perf_counter()
        for batch in batches:
            os.writev(descriptor, [batch.data])
            os.fdatasync(descriptor)
        return perf_counter() - start
    finally:
        os.close(descriptor)
        path.unlink()


async def append_seconds(
    directory: Path, executor: ThreadExecutor, batches: list[Batch], cipher: LogCipher | None = None
) -> float:
    log, remaining = open_log(directory, executor, cipher), iter(batches)
    appender = GroupAppender(log)

    async def write() -> None:
        for batch in remaining:
            await appender.append(batch)

    start = perf_counter()
    async with asyncio.TaskGroup() as writers:
        for _ in range(APPENDERS):
            writers.create_task(write())
    seconds = perf_counter() - start
    await close_and_remove(log)
    return seconds


# -- many callers with one small record each -----------------------------------------------------


def caller_rows(directory: Path, executor: ThreadExecutor) -> list[Row]:
    """Measure with prebuilt batches, which is the log alone, and with batches that each caller builds."""
    built_before = [stamped_batch(Index(n + 1), Offset(n)) for n in range(BUILT_BEFORE)]
    makers: dict[str, tuple[Maker, bool]] = {
        f"append one 100-byte record, {CALLERS} callers": (lambda appender: built_before[appender.end_index - 1], True),
        "  the same, each builds its own batch": (
            lambda appender: stamped_batch(appender.end_index, appender.end_offset),
            False,
        ),
    }
    rows = []
    for what, (make, has_target) in makers.items():
        rates = {1: 0.0, CALLERS: 0.0}
        for _ in range(ROUNDS):
            for callers, best in rates.items():
                rates[callers] = max(best, asyncio.run(caller_rate(directory / "calls", executor, callers, make)))
        one, many = rates.values()
        rows.append(Row(what, many, "records/s", one, 20 * one if has_target else None))
    return rows


async def caller_rate(
    directory: Path, executor: ThreadExecutor, callers: int, make: Maker, cipher: LogCipher | None = None
) -> float:
    """Return the acknowledged records per second of callers that make a batch, append and wait in a loop."""
    log, deadline = open_log(directory, executor, cipher), perf_counter() + SECONDS_PER_CALLER_RUN
    appender = GroupAppender(log)

    async def call() -> None:
        while perf_counter() < deadline and appender.end_index <= BUILT_BEFORE:
            await appender.append(make(appender))

    start = perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(callers):
            tasks.create_task(call())
    rate = (log.end_index - 1) / (perf_counter() - start)
    await close_and_remove(log)
    return rate


def stamped_batch(index: Index, offset: Offset) -> Batch:
    built = bytearray(build_batch([VALUE], timestamp=1))
    stamp(built, term=Term(1), index=index, base_offset=offset, append_timestamp=1)
    return Batch.decode(built, verify=False)


# -- a large log ---------------------------------------------------------------------------------


def large_log_rows(directory: Path, executor: ThreadExecutor, *, gib: float) -> list[Row]:
    write_peak = child_peak_mib("write", directory, gib=gib)
    raw_s = own_s = open_s = float("inf")
    for _ in range(3):
        drop_from_cache(directory)
        raw_s = min(raw_s, seconds_of(lambda: read_raw(directory)))
        drop_from_cache(directory)
        opened_s, read_s = asyncio.run(open_and_read_seconds(directory, executor))
        own_s, open_s = min(own_s, read_s), min(open_s, opened_s)
    read_peak = child_peak_mib("read", directory, gib=gib)
    gigabytes = sum(path.stat().st_size for path in directory.iterdir()) / 1e9
    raw = gigabytes / raw_s
    return [
        Row("read a cold log, checksums verified", gigabytes / own_s, "GB/s", raw, 0.5 * raw),
        Row(f"open a cold log of {gib:g} GiB", open_s, "s", None, 1),
        Row(f"peak memory, appending {gib:g} GiB", write_peak, "MiB", None, 200),
        Row(f"peak memory, reading {gib:g} GiB", read_peak, "MiB", None, 200),
    ]


def child_peak_mib(work: str, directory: Path, *, gib: float) -> float:
    """Write or read the large log in its own process; return its peak memory."""
    command = [sys.executable, __file__, "--child", work, str(directory), str(gib)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def child(work: str, directory: Path, gib: float) -> None:
    executor = ThreadExecutor()
    if work == "write":
        asyncio.run(write_large_log(directory, executor, bytes_min=int(gib * GIB)))
    else:
        asyncio.run(open_and_read_seconds(directory, executor))
    executor.close()
    print(peak_memory_mib())


def peak_memory_mib() -> float:
    """Return this process's own peak memory; `getrusage` would include the parent's at the fork."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


async def write_large_log(
    directory: Path, executor: ThreadExecutor, *, bytes_min: int, cipher: LogCipher | None = None
) -> None:
    log, values = open_log(directory, executor, cipher), [VALUE] * (MIB // 104)
    appender = GroupAppender(log)

    async def write() -> None:
        while log.status().size_bytes < bytes_min:
            built = bytearray(build_batch(values, timestamp=1))
            end_index, end_offset = appender.end_index, appender.end_offset
            stamp(built, term=Term(1), index=end_index, base_offset=end_offset, append_timestamp=1)
            await appender.append(Batch.decode(built, verify=False))

    async with asyncio.TaskGroup() as writers:
        for _ in range(APPENDERS):
            writers.create_task(write())
    await log.close()


async def open_and_read_seconds(
    directory: Path, executor: ThreadExecutor, cipher: LogCipher | None = None
) -> tuple[float, float]:
    """Open the log and read all its records; return the seconds of each."""
    start = perf_counter()
    log = open_log(directory, executor, cipher)
    opened = perf_counter()
    offset = log.first_offset
    while found := await log.read_records(offset, end_offset=log.end_offset, bytes_max=READ_BYTES_MAX):
        offset = found[-1].header.end_offset
    seconds = perf_counter() - opened
    assert offset == log.end_offset
    await log.close()
    return opened - start, seconds


def read_raw(directory: Path) -> None:
    """Read every segment with bare preads of the size that the log uses."""
    for path in sorted(directory.glob("*.log")):
        descriptor, position = os.open(path, os.O_RDONLY), 0
        while chunk := os.pread(descriptor, READ_BYTES_MAX, position):
            position += len(chunk)
        os.close(descriptor)


def drop_from_cache(directory: Path) -> None:
    """Drop the files from the page cache, so that the next read is from disk."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# -- encrypted logs ------------------------------------------------------------------------------


def encryption_rows(directory: Path, executor: ThreadExecutor) -> list[Row]:
    """Measure encrypted logs; the limit of each figure is the same for a plain log, alternating with it."""
    batches = large_batches(LARGE_BATCHES)
    megabytes = sum(len(batch.data) for batch in batches) / 1e6
    built = [stamped_batch(Index(n + 1), Offset(n)) for n in range(BUILT_BEFORE)]
    ciphers = (None, LogCipher(bytes(32)))
    logs = [directory / "plain", directory / "encrypted"]
    for path, cipher in zip(logs, ciphers, strict=True):
        asyncio.run(write_large_log(path, executor, bytes_min=ENCRYPTED_LOG_BYTES, cipher=cipher))
    appends, calls, reads = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    for _ in range(ROUNDS):
        for at, cipher in enumerate(ciphers):
            path = directory / "measured"
            append_s = asyncio.run(append_seconds(path, executor, batches, cipher))
            appends[at] = max(appends[at], megabytes / append_s)
            rate = caller_rate(path, executor, CALLERS, lambda appender: built[appender.end_index - 1], cipher)
            calls[at] = max(calls[at], asyncio.run(rate))
            _, read_s = asyncio.run(open_and_read_seconds(logs[at], executor, cipher))
            reads[at] = max(reads[at], ENCRYPTED_LOG_BYTES / 1e9 / read_s)
    return [
        Row("encrypted: append 1 MiB batches", appends[1], "MB/s", appends[0], None),
        Row(f"encrypted: append one 100-byte record, {CALLERS} callers", calls[1], "records/s", calls[0], None),
        Row("encrypted: read a log in the page cache", reads[1], "GB/s", reads[0], None),
    ]


# -- shared --------------------------------------------------------------------------------------


def open_log(directory: Path, executor: ThreadExecutor, cipher: LogCipher | None = None) -> Log:
    return Log.open(
        str(directory),
        disk=SystemDisk(),
        executor=executor,
        clock=SystemClock(),
        settings=LogSettings(),
        cipher=cipher,
    )


async def close_and_remove(log: Log) -> None:
    await log.close()
    shutil.rmtree(log.directory)


def large_batches(count: int) -> list[Batch]:
    built = build_batch([VALUE] * (MIB // 104), timestamp=1)
    records = MIB // 104
    return [
        Batch.decode(
            stamp(built, term=Term(1), index=Index(n + 1), base_offset=Offset(n * records), append_timestamp=1)
        )
        for n in range(count)
    ]


def seconds_of(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
    else:
        sys.exit(main())
