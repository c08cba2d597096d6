# ruff: noqa: S311, S603, T201 - a demonstration prints, starts itself as a child and needs no secret chance
"""What the log does today, shown on this machine's own disk: `make demo`.

1. Build batches of log lines and append them, each acknowledged only after fdatasync.
2. Read them all back as Arrow columns and compare every value.
3. Kill a writing process with SIGKILL in the middle, several times, and show after each restart that
   every record it had been acknowledged is there, unchanged and in place, and that the log goes on.
4. Flip one bit on disk and let `quiver log verify` name it.

Exits with 0 only if all of that held.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from quiver.cli import main as quiver
from quiver.clock import SystemClock
from quiver.config import LogSettings
from quiver.model import Index, Offset, Term
from quiver.record import Batch, build_batch, stamp
from quiver.record.arrow import to_arrow
from quiver.storage import Log, SystemDisk, ThreadExecutor

RECORDS_PER_BATCH = 1000
READ_BYTES_MAX = 4 << 20
WRITERS = 4
"""Appenders that each wait for their own batch before the next: what lets group commit share an fdatasync."""
SETTINGS = LogSettings(segment_bytes_max=8 << 20)


def line(offset: int) -> bytes:
    """Return the one value that the record at an offset can have."""
    return f'{{"level":"info","service":"checkout","request":{offset:012d},"message":"order was placed"}}'.encode()


def next_batch(log: Log, clock: SystemClock) -> Batch:
    """Build the batch that follows the log's last, with the values that belong to its offsets."""
    first, now_ms = log.end_offset, clock.wall_ms()
    built = build_batch(map(line, range(first, first + RECORDS_PER_BATCH)), timestamp=now_ms)
    stamped = stamp(built, term=Term(1), index=log.end_index, base_offset=first, append_timestamp=now_ms)
    return Batch.decode(stamped)


async def append_batches(log: Log, count: int, acknowledge: Callable[[Offset], None]) -> None:
    """Append `count` batches from several writers, telling of each when it is on disk."""
    clock, remaining = SystemClock(), iter(range(count))

    async def write() -> None:
        for _ in remaining:
            batch = next_batch(log, clock)
            log.append([batch])
            await log.wait_durable(Index(batch.header.index + 1))
            acknowledge(batch.header.end_offset)

    async with asyncio.TaskGroup() as writers:
        for _ in range(WRITERS):
            writers.create_task(write())


async def read_all(log: Log) -> pa.Table:
    """Return every record of the log as Arrow columns."""
    batches: list[pa.RecordBatch] = []
    position = log.first_offset
    while found := await log.read_records(position, end_offset=log.end_offset, bytes_max=READ_BYTES_MAX):
        batches.extend(map(to_arrow, found))
        position = found[-1].header.end_offset
    return pa.Table.from_batches(batches)


def open_log(directory: Path, executor: ThreadExecutor) -> Log:
    """Open, and so recover, the log of this demonstration."""
    return Log.open(str(directory), disk=SystemDisk(), executor=executor, clock=SystemClock(), settings=SETTINGS)


def check(table: pa.Table, *, end_offset: int, what: str) -> None:
    """End the demonstration unless the table holds exactly the values of `[0, end_offset)`, in order."""
    if table.num_rows < end_offset:
        raise SystemExit(f"FAILED: {what}: {end_offset - table.num_rows} acknowledged records are lost")
    if table["value"].to_pylist() != [line(offset) for offset in range(table.num_rows)]:
        raise SystemExit(f"FAILED: {what}: a record was changed, moved or doubled")


async def show_append_and_read(directory: Path, batches: int) -> None:
    """Append, read back, compare, and print how fast that was."""
    executor = ThreadExecutor()
    log = open_log(directory, executor)
    started = time.perf_counter()
    await append_batches(log, batches, lambda _: None)
    append_s = time.perf_counter() - started
    await log.close()
    log = open_log(directory, executor)  # again, so that reads come from the files and not from memory
    started = time.perf_counter()
    table = await read_all(log)
    read_s = time.perf_counter() - started
    check(table, end_offset=batches * RECORDS_PER_BATCH, what="read")
    status = log.status()
    print(f"1. appended   {table.num_rows:>9,} records in {batches} batches, each acknowledged after fdatasync")
    print(f"              {table.num_rows / append_s:>9,.0f} records/s, {status.size_bytes / append_s / 1e6:.0f} MB/s,")
    print(f"              making the lines included; {status.segments} segments, {status.size_bytes:,} bytes")
    print(f"2. read back  {table.num_rows:>9,} records as Arrow columns from disk, every checksum verified")
    print(f"              {table.num_rows / read_s:>9,.0f} records/s; every value compared and equal")
    await log.close()
    executor.close()


async def write_until_killed(directory: Path) -> None:
    """Be the child: append for ever and print each acknowledged end offset."""
    log = open_log(directory, ThreadExecutor())
    await append_batches(log, 1 << 60, lambda end: print(end, flush=True))


def kill_a_writer(directory: Path, rng: random.Random) -> int:
    """Start a writer, kill it with SIGKILL at a random moment, and return the last offset it acknowledged."""
    command = [sys.executable, __file__, "--write-to", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        first = writer.stdout.readline()
        time.sleep(rng.uniform(0.05, 0.4))
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged = [int(text) for text in (first, *writer.stdout) if text.endswith("\n")]
    if not acknowledged or writer.returncode != -signal.SIGKILL:
        raise SystemExit(f"FAILED: the writer ended by itself with {writer.returncode}")
    return max(acknowledged)


async def show_kills(directory: Path, kills: int) -> None:
    """Kill writers and check after each that nothing acknowledged is gone."""
    rng, executor = random.Random(), ThreadExecutor()
    total = cut = unacknowledged = 0
    for number in range(kills):
        acknowledged = kill_a_writer(directory, rng)
        log = open_log(directory, executor)
        table = await read_all(log)
        check(table, end_offset=acknowledged, what=f"kill {number + 1}")
        total, unacknowledged = acknowledged, unacknowledged + table.num_rows - acknowledged
        cut += any("torn" in warning for warning in log.warnings)
        await log.close()
    print(f"3. killed     {kills} writers with SIGKILL in the middle of appending")
    print(f"              {total:>9,} records acknowledged, all there and unchanged; 0 lost, 0 doubled")
    print(f"              {unacknowledged:>9,} more had reached the disk unacknowledged; {cut} torn tails cut")
    executor.close()


def show_damage(directory: Path, rng: random.Random) -> None:
    """Flip one bit and let the command line find it."""
    segment = sorted(directory.glob("*.log"))[0]
    data = bytearray(segment.read_bytes())
    position = rng.randrange(len(data) // 4, len(data) // 2)
    data[position] ^= 1
    segment.write_bytes(data)
    print(f"4. flipped    one bit of byte {position} of {segment.name}; quiver log verify says:\n", flush=True)
    code = quiver(["log", "verify", str(directory)])
    if code != 1:
        raise SystemExit(f"FAILED: verify ended with {code}, not with 1, on a damaged log")


def main() -> None:
    """Run all of it in a fresh directory, which is removed at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1000, help="batches to append in the first step")
    parser.add_argument("--kills", type=int, default=5, help="writers to kill")
    parser.add_argument("--write-to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write_to is not None:
        asyncio.run(write_until_killed(options.write_to))
        return
    directory = Path(tempfile.mkdtemp(prefix="quiver-demo-"))
    try:
        print(f"a log in {directory}, durability {SETTINGS.durability}\n")
        asyncio.run(show_append_and_read(directory / "bulk", options.batches))
        asyncio.run(show_kills(directory / "killed", options.kills))
        show_damage(directory / "killed", random.Random())
        print("\nAll of it held.")
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
