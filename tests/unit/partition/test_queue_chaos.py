"""Random workers on a queue whose replica restarts: nothing is lost, leases exclude each other, keys keep order."""

from __future__ import annotations

import asyncio
import random

import pytest
from partition_harness import LARGE, PartitionHarness, run_harness

from quiver.config import PartitionSettings
from quiver.errors import QuiverError
from quiver.groups.settings import QueueSettings
from quiver.model import ConsumerId, PartitionId, TopicId
from quiver.partition import Replica
from quiver.partition.queue_handler import ReceiveRequest
from quiver.record import build_batch
from quiver.record.delay import DELIVER_AT_HEADER, encode_deliver_at
from quiver.testing.queue_ablations import QueueSafeguard, disabled
from quiver.wire.queue_messages import QueueExtension, QueueReject, QueueReturn, QueueSettle, ReceiptRange

WORKERS = ConsumerId(5)
RECORDS = 120
KEYS = 6
ROUNDS_MAX = 300
"""Rounds in which everything ends after the workers have stopped."""


class History:
    """What workers saw and did, and the rules that it must keep."""

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self.keys: dict[int, bytes | None] = {}
        self.deliver_at: dict[int, int] = {}
        self.settled: set[int] = set()
        """Acknowledged or rejected, and told so."""
        self.doubtful: set[int] = set()
        """Acknowledged or rejected without an answer."""
        self.leased_until: dict[int, int] = {}
        self.dead: set[int] = set()
        self.grants: dict[int, int] = {}
        """The last grant by which each record was delivered."""

    def deliver(self, offset: int, attempt: int, grant: int, *, now_ms: int, deadline_ms: int) -> None:
        assert offset not in self.settled, f"{offset} is settled, and delivered again"
        assert now_ms >= self.deliver_at.get(offset, 0), f"{offset} is delivered early"
        assert now_ms >= self.leased_until.get(offset, 0), f"{offset} is leased to another until then"
        assert not self.settings.max_attempts or attempt <= self.settings.max_attempts
        key = self.keys[offset]
        if self.settings.order == "key" and key is not None:
            earlier = {one for one, its in self.keys.items() if its == key and one < offset}
            assert earlier <= self.settled | self.doubtful | self.dead, f"{offset} overtakes its key"
        self.leased_until[offset] = deadline_ms
        self.grants[offset] = grant


class Workload:
    """Random workers of one seed."""

    def __init__(self, seed: int, settings: QueueSettings) -> None:
        self.rng = random.Random(seed)
        self.settings = settings
        self.history = History(settings)

    async def fill(self, replica: Replica, now_ms: int) -> None:
        offset = int(replica.high_watermark)
        while offset < RECORDS:
            count = min(self.rng.randrange(1, 12), RECORDS - offset)
            values, keys, headers = [], [], []
            for at in range(offset, offset + count):
                key = None if self.rng.random() < 0.2 else b"%d" % self.rng.randrange(KEYS)
                values.append(b"%d" % at)
                keys.append(key)
                self.history.keys[at] = key
                is_late = self.rng.random() < 0.1
                late_ms = now_ms + self.rng.randrange(20_000)
                headers.append([(DELIVER_AT_HEADER, encode_deliver_at(late_ms))] if is_late else [])
                if is_late:
                    self.history.deliver_at[at] = late_ms
            await replica.append(bytearray(build_batch(values, timestamp=1, keys=keys, headers=headers)))
            offset += count

    async def work(self, replica: Replica, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < until_s:
            try:
                await self.take_and_settle(replica)
            except QuiverError:
                await asyncio.sleep(0.05)

    async def take_and_settle(self, replica: Replica) -> None:
        history, rng = self.history, self.rng
        clock = replica.queues._clock
        received = await replica.queues.receive(
            ReceiveRequest(
                group_id=WORKERS,
                settings=self.settings,
                records_max=rng.randrange(1, 9),
                bytes_max=LARGE,
                lease_ms=rng.randrange(200, 3_000),
                wait_ms=500,
            )
        )
        offsets: list[int] = []
        granted_ms = received.deadline_ms - received.lease_ms
        self.note_dead(replica)
        for lease in received.leases:
            for offset in range(lease.first, lease.first + lease.count):
                history.deliver(
                    offset, lease.attempt, received.grant, now_ms=granted_ms, deadline_ms=received.deadline_ms
                )
                offsets.append(offset)
        assert [row[1] for row in received.rows] == [b"%d" % offset for offset in offsets]
        await asyncio.sleep(rng.random() * 1.5)
        for offset in offsets:
            await self.settle(replica, offset, received.grant, clock.wall_ms())

    def note_dead(self, replica: Replica) -> None:
        for one in replica.queues.dead_letters(WORKERS):
            self.history.dead.update(range(one.first, one.first + one.count))

    async def settle(self, replica: Replica, offset: int, grant: int, now_ms: int) -> None:
        history, choice = self.history, self.rng.random()
        may_be_settled = offset in history.settled | history.doubtful
        target = {"topic_id": TopicId(1), "partition_id": PartitionId(0), "group_id": WORKERS}
        until = history.leased_until[offset]
        if choice < 0.5:
            history.doubtful.add(offset)
            request = QueueSettle(**target, acks=(ReceiptRange(offset, 1, grant),))  # type: ignore[arg-type]
        elif choice < 0.6:
            history.doubtful.add(offset)
            request = QueueSettle(**target, rejects=(QueueReject(offset, 1, grant, "bad"),))  # type: ignore[arg-type]
        elif choice < 0.75:
            delay_ms = self.rng.randrange(2_000)
            request = QueueSettle(**target, returns=(QueueReturn(offset, 1, grant, delay_ms),))  # type: ignore[arg-type]
            history.leased_until[offset] = min(until, now_ms)
        elif choice < 0.85:
            request = QueueSettle(**target, releases=(ReceiptRange(offset, 1, grant),))  # type: ignore[arg-type]
            history.leased_until[offset] = min(until, now_ms)
        elif choice < 0.92:
            request = QueueSettle(**target, extends=(QueueExtension(offset, 1, grant, 50),))  # type: ignore[arg-type]
            history.leased_until[offset] = min(until, now_ms)
        else:
            return  # it crashes
        settled = await replica.queues.settle(request, self.settings)
        if not settled.stale and not may_be_settled:
            assert grant == history.grants[offset], f"a receipt of {offset} is good although another one has it"
        if choice < 0.6:
            if settled.stale:
                history.doubtful.discard(offset)
            else:
                history.settled.add(offset)

    async def finish(self, replica: Replica) -> None:
        """Acknowledge everything that is left."""
        target = {"topic_id": TopicId(1), "partition_id": PartitionId(0), "group_id": WORKERS}
        for _ in range(ROUNDS_MAX):
            if replica.state.cursors.get(WORKERS, 0) >= RECORDS:
                return
            received = await replica.queues.receive(
                ReceiveRequest(group_id=WORKERS, settings=self.settings, records_max=50, bytes_max=LARGE, wait_ms=5_000)
            )
            acks = tuple(ReceiptRange(one.first, one.count, received.grant) for one in received.leases)
            await replica.queues.settle(QueueSettle(**target, acks=acks), self.settings)  # type: ignore[arg-type]
            for one in acks:
                self.history.settled.update(range(one.first, one.first + one.count))
            self.note_dead(replica)
            dead = replica.queues.dead_letters(WORKERS)
            if dead:
                await replica.queues.bury(WORKERS, dead[-1].sequence + dead[-1].count)
        raise AssertionError("some records are neither acknowledged nor dead")


def run_seed(seed: int) -> None:
    """Run random workers and restarts; raise if a promise is broken."""
    rng = random.Random(seed)
    settings = QueueSettings(
        order="key" if seed % 2 else "offset",
        max_attempts=rng.choice((0, 3, 50)),
        in_flight_max=rng.choice((10, 40, 1_000)),
    )
    workload = Workload(seed, settings)

    async def test(partition: PartitionHarness) -> None:
        partition.settings = PartitionSettings(summary_entries=20)
        for _ in range(4):
            async with partition.open_replica() as replica:
                await workload.fill(replica, partition.clock.wall_ms())
                until_s = asyncio.get_running_loop().time() + 8
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(5):
                        tasks.create_task(workload.work(replica, until_s))
                await replica.maintain(partition.clock.wall_ms())
                if rng.random() < 0.5:
                    await replica.close()  # the next start restores its checkpoint; else it reads the log
        async with partition.open_replica() as replica:
            await workload.finish(replica)
            assert replica.state.queues[WORKERS].outstanding == 0
            history = workload.history
            assert history.settled | history.doubtful | history.dead == set(range(RECORDS)), "records are lost"

    run_harness(test)


@pytest.mark.parametrize("seed", range(4))
def test_queue_keeps_its_promises_under_random_workers_and_restarts(seed: int) -> None:
    run_seed(seed)


@pytest.mark.parametrize(
    "safeguard",
    [
        QueueSafeguard.LEASE_EXPIRY,
        QueueSafeguard.LEASE_EXCLUSION,
        QueueSafeguard.STALE_RECEIPTS,
        QueueSafeguard.WINDOW_SUMMARY,
    ],
)
def test_missing_safeguard_is_noticed(safeguard: QueueSafeguard) -> None:
    with disabled(safeguard):
        assert any(is_broken(seed) for seed in range(6))


def is_broken(seed: int) -> bool:
    try:
        run_seed(seed)
    except (AssertionError, ExceptionGroup):
        return True
    return False
