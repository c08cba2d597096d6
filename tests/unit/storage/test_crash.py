"""Power loss at every point: no durable entry lost, none invented, none altered, and the log goes on.

A scripted workload runs over a simulated disk and a `Ledger` writes down what the log has promised. The
disk loses power at a chosen operation, forgets a seeded part of what was not synced, and the log is opened
again: it must keep every promise, take new appends, and keep those over another restart.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from log_world import (
    DIRECTORY,
    InlineExecutor,
    all_entries,
    control_batch,
    data_batch,
    next_batches,
    open_log,
    wait_durable,
)

from quiver.model import Index, NodeId, Offset, Term
from quiver.record import Batch
from quiver.storage import HardStateFile, Log, SnapshotStore, StoredHardState, StoredSnapshot
from quiver.storage.sealing import LogCipher
from quiver.testing import PowerLoss, SimulatedDisk
from quiver.testing.disk_faults import Moment

MOMENTS: tuple[Moment, ...] = ("before", "during", "after")
SEEDS = 12
"""How often each crash point is tried, each time with another choice of what the disk forgets."""
SEEDS_ENCRYPTED = 2
"""The same for an encrypted log, whose order of operations is the same."""
PAIRS = 1500
"""How many pairs of crashes are drawn, the second during recovery or soon after."""
PAIRS_ENCRYPTED = 200
PLAIN_OR_ENCRYPTED = pytest.mark.parametrize("cipher", [None, LogCipher(bytes(range(32)))], ids=["plain", "encrypted"])


class Ledger:
    """What a crashed log must, and what it may, hold."""

    def __init__(self, cipher: LogCipher | None = None) -> None:
        self.cipher = cipher
        self.allowed: dict[int, set[bytes]] = {}
        self.required: dict[int, bytes] = {}
        self.first_index_min = 1
        self.hard_states: list[StoredHardState] = []
        self.snapshots: list[StoredSnapshot] = []

    def appending(self, batches: list[Batch]) -> None:
        for batch in batches:
            self.allowed.setdefault(batch.header.index, set()).add(bytes(batch.data))

    def durable(self, batches: list[Batch]) -> None:
        self.required |= {int(batch.header.index): bytes(batch.data) for batch in batches}

    def cutting(self, *, first: int = 0, end: int = 1 << 60) -> None:
        self.required = {index: data for index, data in self.required.items() if first <= index < end}

    async def check(self, log: Log) -> None:
        assert log.damage == ()
        entries = await all_entries(log)
        held = {int(batch.header.index): bytes(batch.data) for batch in entries}
        assert [batch.header.index for batch in entries] == list(range(log.first_index, log.end_index))
        for index, data in self.required.items():
            assert held.get(index) == data, f"durable entry {index} is lost or altered"
        for index, data in held.items():
            assert data in self.allowed[index], f"entry {index} was never appended like this"
        assert log.first_index >= self.first_index_min, "the log's start went back"


class Workload:
    """A script that uses everything a log can do; each step says first what it may break."""

    def __init__(self, disk: SimulatedDisk, ledger: Ledger, executor: InlineExecutor) -> None:
        self.disk, self.ledger, self.executor = disk, ledger, executor

    async def run(self) -> None:
        log = open_log(self.disk, executor=self.executor, cipher=self.ledger.cipher)
        await self.append(log, b"one", b"two" * 50)
        self.save_hard_state(StoredHardState(term=Term(1), vote=NodeId(1)))
        await self.append(log, *[b"%d-" % n * 20 for n in range(6)])
        self.queue(log, b"not waited for", b"nor this" * 30)
        await self.append(log, b"big" * 200)
        self.save_snapshot(
            StoredSnapshot(last_index=Index(3), last_term=Term(1), end_offset=Offset(3), state=b"s" * 700)
        )
        await self.append_mixed(log)
        await self.cut(log, Index(log.end_index - 4), term=2)
        await self.cut(log, Index(3), term=3)
        self.save_hard_state(StoredHardState(term=Term(3), vote=NodeId(2), membership=b"m" * 600))
        await self.append(log, *[b"after the cut %d" % n * 9 for n in range(8)])
        await log.close()
        log = open_log(self.disk, executor=self.executor, cipher=self.ledger.cipher)
        await self.trim(log)
        self.save_snapshot(
            StoredSnapshot(last_index=Index(8), last_term=Term(3), end_offset=Offset(8), state=b"t" * 90)
        )
        self.save_snapshot(StoredSnapshot(last_index=Index(9), last_term=Term(3), end_offset=Offset(9), state=b""))
        await self.append(log, b"before the reset")
        await self.reset(log, Index(9))
        await self.append(log, *[b"after the reset %d" % n * 9 for n in range(6)])
        await log.close()

    def queue(self, log: Log, *values: bytes) -> list[Batch]:
        batches = next_batches(log, *values)
        self.ledger.appending(batches)
        log.append(batches)
        return batches

    async def append(self, log: Log, *values: bytes) -> None:
        self.queue(log, *values)
        await self.settle(log)

    async def append_mixed(self, log: Log) -> None:
        index, offset, term = log.end_index, log.end_offset, log.last_term
        batches = [
            control_batch(b"cursor", index=index, offset=offset, term=term),
            data_batch([b"a", b"b" * 80, b""], index=index + 1, offset=offset, term=term),
            control_batch(b"", index=index + 2, offset=offset + 3, term=term),
            data_batch([b"\0" * 1500], index=index + 3, offset=offset + 3, term=term),
        ]
        self.ledger.appending(batches)
        log.append(batches)
        await self.settle(log)

    async def settle(self, log: Log) -> None:
        await wait_durable(log, log.end_index)
        self.ledger.durable(await all_entries(log))

    async def cut(self, log: Log, end_index: Index, *, term: int) -> None:
        self.ledger.cutting(end=end_index)
        log.truncate_suffix(end_index)
        batches = next_batches(log, b"new in term %d" % term, b"more" * 40, term=term)
        self.ledger.appending(batches)
        log.append(batches)
        await self.settle(log)

    async def trim(self, log: Log) -> None:
        self.ledger.cutting(first=7)
        await log.truncate_prefix(Index(7))
        self.ledger.first_index_min = log.first_index
        await log.roll_if_old()

    async def reset(self, log: Log, first_index: Index) -> None:
        self.ledger.cutting(end=0)
        await log.reset(first_index=first_index, first_offset=Offset(8), previous_term=Term(3))

    def save_hard_state(self, state: StoredHardState) -> None:
        self.ledger.hard_states.append(state)
        file = HardStateFile(self.disk, DIRECTORY)
        file.load()
        file.save(state)
        self.ledger.hard_states = [state]

    def save_snapshot(self, snapshot: StoredSnapshot) -> None:
        self.ledger.snapshots.append(snapshot)
        SnapshotStore(self.disk, DIRECTORY, cipher=self.ledger.cipher).save(snapshot)
        self.ledger.snapshots = [snapshot]


async def run_until_power_loss(executor: InlineExecutor, work: Callable[[], Awaitable[None]]) -> bool:
    """Run `work`; return whether the power went away under it."""
    task = asyncio.ensure_future(work())
    lost = asyncio.ensure_future(executor.power_lost.wait())
    await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
    lost.cancel()
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
        return True
    try:
        task.result()
    except PowerLoss:
        return True
    return executor.power_lost.is_set()


async def check_and_go_on(disk: SimulatedDisk, ledger: Ledger, executor: InlineExecutor) -> None:
    """Open what a crash left, check it against the ledger, append again, restart, check again."""
    log = open_log(disk, executor=executor, cipher=ledger.cipher)
    await ledger.check(log)
    check_small_state(disk, ledger)
    workload = Workload(disk, ledger, executor)
    await workload.append(log, b"appended after recovery", b"again" * 60)
    await ledger.check(log)
    log = open_log(disk, executor=executor, cipher=ledger.cipher)
    await ledger.check(log)
    await workload.append(log, b"and once more")
    await log.close()
    await ledger.check(open_log(disk, executor=executor, cipher=ledger.cipher))


def check_small_state(disk: SimulatedDisk, ledger: Ledger) -> None:
    state = HardStateFile(disk, DIRECTORY).load()
    assert state in ledger.hard_states or (state is None and len(ledger.hard_states) <= 1)
    snapshot, warnings = SnapshotStore(disk, DIRECTORY, cipher=ledger.cipher).load_newest()
    assert warnings == ()
    assert snapshot in ledger.snapshots or (snapshot is None and len(ledger.snapshots) <= 1)


async def crash_at(disk: SimulatedDisk, ledger: Ledger, operation: int, moment: Moment, seed: int) -> bool:
    executor = InlineExecutor()
    disk.crash_after(operation, moment=moment, written_share=random.Random(seed).random())
    lost = await run_until_power_loss(executor, Workload(disk, ledger, executor).run)
    disk.crash(random.Random(seed))
    return lost


def count_operations() -> int:
    disk = SimulatedDisk()
    executor = InlineExecutor()
    assert not asyncio.run(run_until_power_loss(executor, Workload(disk, Ledger(), executor).run))
    return disk.operation_count


OPERATIONS = count_operations()


@PLAIN_OR_ENCRYPTED
@pytest.mark.parametrize("moment", MOMENTS)
def test_crash_at_every_operation_keeps_every_promise(moment: Moment, cipher: LogCipher | None) -> None:
    async def crash_everywhere() -> None:
        for operation in range(1, OPERATIONS + 1):
            for seed in range(SEEDS if cipher is None else SEEDS_ENCRYPTED):
                disk, ledger = SimulatedDisk(), Ledger(cipher)
                assert await crash_at(disk, ledger, operation, moment, seed)
                await check_and_go_on(disk, ledger, InlineExecutor())

    asyncio.run(crash_everywhere())


@PLAIN_OR_ENCRYPTED
def test_second_crash_during_recovery_or_right_after_keeps_every_promise(cipher: LogCipher | None) -> None:
    async def crash_twice() -> None:
        rng = random.Random("pairs")
        for _ in range(PAIRS if cipher is None else PAIRS_ENCRYPTED):
            disk, ledger = SimulatedDisk(), Ledger(cipher)
            await crash_at(disk, ledger, 1 + rng.randrange(OPERATIONS), rng.choice(MOMENTS), rng.randrange(1 << 30))
            executor = InlineExecutor()
            disk.crash_after(1 + rng.randrange(25), moment=rng.choice(MOMENTS))
            await run_until_power_loss(executor, partial(check_and_go_on, disk, ledger, executor))
            disk.crash(random.Random(rng.randrange(1 << 30)))
            await check_and_go_on(disk, ledger, InlineExecutor())

    asyncio.run(crash_twice())


@PLAIN_OR_ENCRYPTED
def test_cut_at_every_byte_of_the_last_batches_loses_only_what_was_cut(cipher: LogCipher | None) -> None:
    async def cut_everywhere() -> None:
        source, ledger = SimulatedDisk(), Ledger(cipher)
        executor = InlineExecutor()
        log = open_log(source, executor=executor, cipher=cipher)
        workload = Workload(source, ledger, executor)
        await workload.append(log, b"kept")
        kept_bytes = len(source.read_file(f"{DIRECTORY}/{1:020d}.log"))
        await workload.append(log, b"x" * 200)
        await workload.append(log, b"y" * 90, b"z" * 11)
        path = f"{DIRECTORY}/{1:020d}.log"
        whole = source.read_file(path)
        for length in range(kept_bytes, len(whole), 1 if cipher is None else 5):
            for filler in (b"", bytes(len(whole) - length)):
                disk = source.clone()
                disk.write_file(path, whole[:length] + filler)
                expected = Ledger(cipher)
                expected.allowed = {index: set(data) for index, data in ledger.allowed.items()}
                expected.required = {1: ledger.required[1]}
                await check_and_go_on(disk, expected, InlineExecutor())

    asyncio.run(cut_everywhere())


def test_at_least_five_thousand_crash_points_are_tried() -> None:
    assert OPERATIONS * len(MOMENTS) * SEEDS + PAIRS >= 5000
