"""A log on a simulated disk, with work done at once: what the storage tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from quiver.config import LogSettings
from quiver.errors import StorageError
from quiver.model import Index, Offset, Term
from quiver.record import Batch, build_batch, build_control_batch, stamp
from quiver.storage import Lane, Log, TailBudget
from quiver.storage.executor import overloaded
from quiver.storage.sealing import LogCipher
from quiver.testing import PowerLoss, SimulatedDisk

T = TypeVar("T")
DIRECTORY = "/data/log"
TINY = LogSettings(segment_bytes_max=1024, index_interval_bytes=256, tail_cache_bytes_max=2500)
"""Settings under which a handful of batches fills several segments and overflows the tail cache."""


class FixedClock:
    """A clock that a test moves by hand."""

    def __init__(self, wall_ms: int = 1_000_000) -> None:
        self.now_ms = wall_ms

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms


class InlineExecutor:
    """Do work when it is submitted; after a power loss nothing ever completes."""

    def __init__(self) -> None:
        self.power_lost = asyncio.Event()
        self.full_lanes: set[Lane] = set()
        self.lanes: list[Lane] = []
        """The lane of each piece of work, in order."""

    def check_room(self, lane: Lane) -> None:
        if lane in self.full_lanes:
            raise overloaded(lane, 1)

    def submit(self, work: Callable[[], T], lane: Lane = Lane.WRITES) -> asyncio.Future[T]:
        self.lanes.append(lane)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            done.set_result(work())
        except PowerLoss:
            self.power_lost.set()
        except Exception as error:  # noqa: BLE001 - a pool hands every outcome to the caller
            done.set_exception(error)
        return done


class SteppingExecutor:
    """Keep work until the test lets it happen."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def check_room(self, lane: Lane) -> None:
        pass

    def submit(self, work: Callable[[], T], lane: Lane = Lane.WRITES) -> asyncio.Future[T]:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def perform() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001 - a pool hands every outcome to the caller
                done.set_exception(error)

        self.waiting.append(perform)
        return done

    async def step(self) -> None:
        await asyncio.sleep(0)  # a flush begins in the turn after the append
        self.waiting.pop(0)()
        for _ in range(5):
            await asyncio.sleep(0)


def open_log(
    disk: SimulatedDisk,
    settings: LogSettings = TINY,
    *,
    executor: InlineExecutor | SteppingExecutor | None = None,
    clock: FixedClock | None = None,
    discard_damage: bool = False,
    verify: bool = False,
    tails: TailBudget | None = None,
    cipher: LogCipher | None = None,
) -> Log:
    return Log.open(
        DIRECTORY,
        disk=disk,
        executor=executor or InlineExecutor(),
        clock=clock or FixedClock(),
        settings=settings,
        discard_damage=discard_damage,
        verify=verify,
        tails=tails,
        cipher=cipher,
    )


def data_batch(values: list[bytes], *, index: int, offset: int, term: int = 1, timestamp: int = 1000) -> Batch:
    built = build_batch(values, timestamp=timestamp)
    return _stamped(built, index=index, offset=offset, term=term, timestamp=timestamp)


def control_batch(payload: bytes, *, index: int, offset: int, term: int = 1, timestamp: int = 1000) -> Batch:
    built = build_control_batch(payload, timestamp=timestamp)
    return _stamped(built, index=index, offset=offset, term=term, timestamp=timestamp)


def _stamped(built: bytes, *, index: int, offset: int, term: int, timestamp: int) -> Batch:
    stamped = stamp(built, term=Term(term), index=Index(index), base_offset=Offset(offset), append_timestamp=timestamp)
    return Batch.decode(bytes(stamped))


def next_batches(log: Log, *values: bytes, term: int | None = None, timestamp: int = 1000) -> list[Batch]:
    """One batch of one record for each value, following the log's end."""
    term = log.last_term or 1 if term is None else term
    return [
        data_batch([value], index=log.end_index + n, offset=log.end_offset + n, term=term, timestamp=timestamp)
        for n, value in enumerate(values)
    ]


async def append(log: Log, *values: bytes, term: int | None = None, timestamp: int = 1000) -> list[Batch]:
    """Append one batch per value and wait until they are durable."""
    batches = next_batches(log, *values, term=term, timestamp=timestamp)
    log.append(batches)
    await wait_durable(log, log.end_index)
    return batches


async def wait_durable(log: Log, end_index: int) -> None:
    """Wait until every entry below `end_index` is durable; raise the log's failure if it fails first."""
    if end_index <= log.durable_end_index:
        return
    if log._writer.failure is not None:
        raise log._writer.failure
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    on_durable, on_failure = log.on_durable, log.on_failure

    def handle_durable(durable_end: Index) -> None:
        if on_durable is not None:
            on_durable(durable_end)
        if durable_end >= end_index and not done.done():
            done.set_result(None)

    def handle_failure(error: StorageError) -> None:
        if on_failure is not None:
            on_failure(error)
        if not done.done():
            done.set_exception(error)

    log.on_durable, log.on_failure = handle_durable, handle_failure
    try:
        await done
    finally:
        if log.on_durable is handle_durable:  # of concurrent waits, only the newest can take its callbacks off again
            log.on_durable, log.on_failure = on_durable, on_failure


async def all_entries(log: Log) -> list[Batch]:
    found: list[Batch] = []
    index = log.first_index
    while index < log.end_index:
        found += await log.read_entries(index, end_index=log.end_index, bytes_max=500)
        index = Index(found[-1].header.index + 1)
    return found


async def all_values(log: Log) -> list[bytes | None]:
    found: list[bytes | None] = []
    offset = log.first_offset
    while batches := await log.read_records(offset, end_offset=log.end_offset, bytes_max=500):
        found += [value for batch in batches for value in batch.values(first_offset=offset)]
        offset = batches[-1].header.end_offset
    return found
