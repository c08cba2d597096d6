"""The end of a run: every copy of everything is compared with every other.

Replicas must have the same bytes at the same index, and their records go into the history for the judge. Each node's
metadata must be what its own database holds, and the same as everybody's.
"""

from __future__ import annotations

from quiver.errors import TrimmedError
from quiver.metadata import Partition, TopicState
from quiver.model import Index, NodeId
from quiver.partition import Replica
from quiver.record import Batch
from quiver.testing.clusters.host import SimulatedHost
from quiver.testing.clusters.world import ClusterWorld
from quiver.testing.finding import require

_READ_BYTES = 64 * 1024


async def compare_replicas(world: ClusterWorld) -> None:
    """F1, F2: all replicas of a partition are equal, and all copies of the metadata."""
    view = world.view()
    assert view is not None, "the cluster has settled"
    for partition in view.partitions.values():
        topic = view.topics[partition.topic_id]
        if topic.state is TopicState.ACTIVE:
            await _compare_partition(world, partition, f"{topic.name}-{partition.partition_id}")
    world.compare_metadata()
    for host in world.live_nodes():
        _compare_database(host)


async def _compare_partition(world: ClusterWorld, partition: Partition, key: str) -> None:
    stored: dict[Index, tuple[NodeId, bytes]] = {}
    for node in partition.replicas:
        replica = world.replicas(world.hosts[node])[partition.group_id]
        for batch in await _read_all(replica):
            index, data = batch.header.index, bytes(batch.data)
            other, known = stored.setdefault(index, (node, data))
            require(known == data, "F1", "two replicas differ", key=key, index=index, nodes=(other, node))
        facts = {"key": key, "node": node, "start": replica.member.log.first_offset, "kept": replica.first_offset}
        is_complete = replica.member.log.first_offset <= replica.first_offset
        require(is_complete, "F1", "a replica does not have every record that is kept", **facts)
        await _record(world, replica, node, key)


async def _read_all(replica: Replica) -> list[Batch]:
    """Return every entry that is applied, from the disk."""
    log, end_index = replica.member.log, Index(replica.member.applied_index + 1)
    found: list[Batch] = []
    index = log.first_index
    while index < end_index:
        try:
            batches = await log.read_entries(index, end_index=end_index, bytes_max=_READ_BYTES)
        except TrimmedError:
            found, index = [], log.first_index  # the log was shortened meanwhile
            continue
        require(batches, "F1", "a replica ends early", index=index, end_index=end_index)
        found += batches
        index = Index(batches[-1].header.index + 1)
    return found


async def _record(world: ClusterWorld, replica: Replica, node: NodeId, key: str) -> None:
    """Let the judge see a replica's records."""
    offset, records = replica.first_offset, []
    log = replica.member.log
    while offset < replica.high_watermark:
        for batch in await log.read_records(offset, end_offset=replica.high_watermark, bytes_max=_READ_BYTES):
            records += [(int(record.offset), (record.value or b"").decode()) for record in batch.records(offset)]
            offset = batch.header.end_offset
    world.recorder.note("comparison", "replica", key, {"replica": f"node-{node}", "records": records})
    if replica.first_offset:
        world.recorder.note("comparison", "trim", key, int(replica.first_offset))


def _compare_database(host: SimulatedHost) -> None:
    assert host.node is not None, "the cluster has settled"
    stored, known = host.database.load().view(), host.node._store.view()
    if stored.index == known.index:
        require(stored.digest() == known.digest(), "F2", "a database is not what its node knows", node=host.id)
