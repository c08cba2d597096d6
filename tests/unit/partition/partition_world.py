"""One real replica on a simulated loop and disk: what the partition's tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from quiver.config import LogSettings, ReplicationSettings
from quiver.model import GroupId, NodeId, ProducerId
from quiver.partition import PartitionState, Replica
from quiver.raft import Configuration
from quiver.record import build_batch
from quiver.replication import Replicator
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
    """Return a batch of nobody in particular."""
    return bytearray(build_batch(list(values), timestamp=timestamp))


def run(
    test: Callable[[Replica], Awaitable[None]],
    *,
    voters: tuple[int, ...] = (1,),
    settings: ReplicationSettings = CALM,
    log_settings: LogSettings | None = None,
) -> None:
    """Run a test on the replica of a group whose other voters, if any, do not exist."""
    streams = RandomStreams(1)
    loop = SimulatedLoop(streams.schedule, policy="fifo")
    network = SimulatedNetwork(loop, streams.network)

    async def main() -> None:
        replicator = Replicator(
            NODE,
            incarnation=1,
            network=network.port(NODE),
            disk=SimulatedDisk(),
            executor=SimulatedExecutor(loop, streams.disk),
            clock=SimulatedClock(loop),
            rng=streams.workload,
            settings=settings,
            log_settings=log_settings or LogSettings(),
        )
        async with replicator:
            state = PartitionState()
            configuration = Configuration(voters=tuple(NodeId(voter) for voter in voters))
            member = await replicator.open_member(GROUP, "/data", state, bootstrap=configuration)
            await asyncio.sleep(5)  # longer than an election takes
            assert member.is_leader == (voters == (1,))
            await test(Replica(member, state))

    loop.run_until_complete(main())
    loop.close()
