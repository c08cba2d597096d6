"""Harness of the partition tests: one real replica on a simulated loop and disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from quiver.config import LogSettings, PartitionSettings, ReplicationSettings
from quiver.model import GroupId, NodeId, ProducerId
from quiver.partition import PartitionState, Replica
from quiver.raft import Configuration
from quiver.record import build_batch
from quiver.record.decoded import DecodedBatchBudget
from quiver.replication import Replicator
from quiver.storage import DiskSpace
from quiver.testing import (
    RandomStreams,
    SimulatedClock,
    SimulatedDisk,
    SimulatedExecutor,
    SimulatedLoop,
    SimulatedNetwork,
)

NODE = NodeId(1)
GROUP = GroupId(1)
CALM = ReplicationSettings(hibernation=False)
LARGE = 1 << 20
DIRECTORY = "/data"


def batch(
    sequence: int, *, epoch: int = 0, value: bytes = b"v", producer: int = 3, count: int = 1, timestamp: int = 1
) -> bytearray:
    data = build_batch(
        [value] * count,
        timestamp=timestamp,
        producer_id=ProducerId(producer),
        producer_epoch=epoch,
        base_sequence=sequence,
    )
    return bytearray(data)


def record(*values: bytes, timestamp: int = 1) -> bytearray:
    """Return a batch without a producer."""
    return bytearray(build_batch(list(values), timestamp=timestamp))


class PartitionHarness:
    """One replica on one disk, which may be opened several times."""

    def __init__(self, loop: SimulatedLoop, streams: RandomStreams, settings: ReplicationSettings) -> None:
        self.disk = SimulatedDisk()
        self.clock = SimulatedClock(loop)
        self.log_settings = LogSettings()
        self.settings = PartitionSettings()
        self.space: DiskSpace | None = None
        self.decoded: DecodedBatchBudget | None = None
        self._loop = loop
        self._streams = streams
        self._network = SimulatedNetwork(loop, streams.network)
        self._replication = settings
        self._starts = 0
        self.executor = SimulatedExecutor(loop, streams.disk)
        self.replica: Replica

    @asynccontextmanager
    async def open_replica(self, voters: tuple[int, ...] = (1,)) -> AsyncIterator[Replica]:
        """Open the replica, wait until it is elected if it can be, and stop it without closing it at the end."""
        self._starts += 1
        replicator = Replicator(
            NODE,
            incarnation=self._starts,
            network=self._network.port(NODE),
            disk=self.disk,
            executor=self.executor,
            clock=self.clock,
            rng=self._streams.workload,
            settings=self._replication,
            log_settings=self.log_settings,
        )
        async with replicator:
            state = PartitionState()
            configuration = Configuration(voters=tuple(NodeId(voter) for voter in voters))
            bootstrap = configuration if self._starts == 1 else None
            member = await replicator.open_member(GROUP, DIRECTORY, state, bootstrap=bootstrap)
            self.opened_index = member.applied_index
            replica = Replica(
                member, state, settings=self.settings, space=self.space, decoded=self.decoded, clock=self.clock
            )
            await asyncio.sleep(5)  # longer than an election takes
            assert member.is_ready == (voters == (1,))
            yield replica


def run_harness(test: Callable[[PartitionHarness], Awaitable[None]], *, settings: ReplicationSettings = CALM) -> None:
    """Run a test that opens and closes the replica itself."""
    streams = RandomStreams(1)
    loop = SimulatedLoop(streams.schedule, policy="fifo")
    loop.run_until_complete(test(PartitionHarness(loop, streams, settings)))
    loop.close()


def run(
    test: Callable[[Replica], Awaitable[None]],
    *,
    voters: tuple[int, ...] = (1,),
    settings: ReplicationSettings = CALM,
) -> None:
    """Run a test on the replica of a group whose other voters, if any, do not exist."""

    async def run_once(partition: PartitionHarness) -> None:
        async with partition.open_replica(voters) as replica:
            await test(replica)

    run_harness(run_once, settings=settings)
