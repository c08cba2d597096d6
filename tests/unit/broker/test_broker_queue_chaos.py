"""Workers of a queue under seeded crashes, cuts and lost answers: every record ends once, acknowledged or dead."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from broker_cluster import Cluster, simulate
from test_broker_queues import Queue, wait_moved

from quiver.errors import QuiverError
from quiver.groups.settings import QueueSettings
from quiver.wire.queue_messages import QueueReceived, QueueReject, QueueReturn, ReceiptRange

RECORDS = 80
ROUNDS = 6
MAX_ATTEMPTS = 4


class Workers:
    """What the workers of a queue saw and did."""

    def __init__(self, queue: Queue, rng: random.Random) -> None:
        self.queue = queue
        self.rng = rng
        self.acknowledged: set[int] = set()
        """Acknowledged, and told so, and that they were not settled before."""
        self.doubtful: set[int] = set()
        """Acknowledged, without an answer or refused."""
        self.leased_until: dict[int, int] = {}

    async def run(self) -> None:
        while True:
            settled = frozenset(self.acknowledged)
            try:
                received, values = await self.queue.receive(self.rng.randrange(1, 6), lease_ms=1_500, wait_ms=500)
            except QuiverError:
                continue
            self.note(received, values, settled)
            await asyncio.sleep(self.rng.random() * 2)
            await self.settle(received)

    def note(self, received: QueueReceived, values: list[bytes | None], settled: frozenset[int]) -> None:
        offsets = [at for one in received.leases for at in range(one.first, one.first + one.count)]
        assert values == [b"%d" % offset for offset in offsets]
        assert not settled.intersection(offsets), "acknowledged records are delivered again"
        for lease in received.leases:
            assert lease.attempt <= MAX_ATTEMPTS
        begun_ms = received.deadline_ms - received.lease_ms
        for offset in offsets:
            assert begun_ms >= self.leased_until.get(offset, 0), "a record is leased twice at a time"
            self.leased_until[offset] = max(received.deadline_ms, self.leased_until.get(offset, 0))

    async def settle(self, received: QueueReceived) -> None:
        for lease in received.leases:
            for offset in range(lease.first, lease.first + lease.count):
                choice, grant = self.rng.random(), received.grant
                if choice < 0.6:
                    self.doubtful.add(offset)
                    settled = await self.queue.settle(acks=(ReceiptRange(offset, 1, grant),))
                    if not settled.stale and not settled.settled_before:
                        self.acknowledged.add(offset)
                elif choice < 0.7:
                    await self.queue.settle(rejects=(QueueReject(offset, 1, grant, "bad"),))
                elif choice < 0.85:
                    self.leased_until[offset] = 0
                    await self.queue.settle(returns=(QueueReturn(offset, 1, grant, 100),))


async def trouble(cluster: Cluster, rng: random.Random) -> None:
    """Do one bad thing, and undo it a while later."""
    node = cluster[rng.randrange(len(cluster.nodes)) + 1]
    if rng.random() < 0.6:
        node.kill(loses_power=rng.random() < 0.5)
        await asyncio.sleep(rng.random() * 2)
        node.start()
        await cluster.wait(lambda: node.is_up or None)
    else:
        cluster.network.isolate(node.id)
        await asyncio.sleep(rng.random() * 3)
        cluster.network.heal()


@pytest.mark.parametrize("seed", range(2))
def test_every_record_ends_once(seed: int) -> None:
    async def test(cluster: Cluster) -> None:
        rng = random.Random(seed)
        queue = await Queue.open(cluster, QueueSettings(max_attempts=MAX_ATTEMPTS))
        for first in range(0, RECORDS, 10):
            await cluster.produce(queue.topic_id, *(b"%d" % number for number in range(first, first + 10)))
        # A batch without a producer may be doubled: then the values say other offsets.
        assert len(await cluster.fetch(queue.topic_id)) == RECORDS
        rates = cluster.transport.rates
        rates.p_break_before = rates.p_break_after = 0.02
        workers = Workers(queue, rng)
        tasks = [asyncio.ensure_future(workers.run()) for _ in range(4)]
        for _ in range(ROUNDS):
            await trouble(cluster, rng)
            assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
        rates.p_break_before = rates.p_break_after = 0.0
        dead = await wait_moved(queue, RECORDS)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        counts = Counter(int(dict(one.headers)["quiver-dead-offset"] or b"-1") for one in dead)
        assert set(counts.values()) <= {1}, "dead letters are there twice"
        assert not workers.acknowledged & counts.keys(), "acknowledged records are dead"
        assert workers.acknowledged | workers.doubtful | counts.keys() == set(range(RECORDS)), "records are lost"

    simulate(test, is_managed=True, seed=seed)
