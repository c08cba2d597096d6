"""Answer what clients ask of a partition's leader, and what other nodes ask about groups on this one.

Each request: wait until this node knows the metadata as far as the client does, find the leading replica, check that
the client may, note that it lives, and let the replica do it. Nothing is decided here that the replica decides: bounds
and checksums of batches, order of a producer's batches, offsets, cursors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from quiver.broker.admission import Admission, check_producer
from quiver.broker.reporter import ClientsHeard
from quiver.broker.table import Held, PartitionTable
from quiver.errors import NotLeaderError, RequestError
from quiver.metadata import View
from quiver.model import NO_PRODUCER, Buffer, Offset
from quiver.partition import Replica
from quiver.record import decode_header
from quiver.wire.messages import (
    BeginEpoch,
    Consume,
    Fetch,
    Fetched,
    FindOffset,
    GetCursors,
    GetMembers,
    MembersFound,
    MoveCursor,
    PartitionRequest,
    Produce,
    Produced,
    ReplicaInfo,
    Response,
    request_name,
)
from quiver.wire.serving import Caller

BrokerRequest = PartitionRequest | GetMembers
"""What a broker answers itself."""
Answer = tuple[Response, Sequence[Buffer]]


class BrokerRequests:
    """The broker's answers."""

    def __init__(self, table: PartitionTable, admission: Admission, clients: ClientsHeard) -> None:
        self._table = table
        self._admission = admission
        self._clients = clients

    async def handle(self, caller: Caller, request: BrokerRequest, payload: memoryview) -> Answer:
        """Carry out a request; raises what the replica raises, and as `PartitionTable.find_leader` does."""
        if isinstance(request, GetMembers):
            return await self._get_members(request)
        view = await self._admission.wait_known(caller, request.known_index)
        replica = self._table.find_leader(request.topic_id, request.partition_id)
        match request:
            case Produce():
                return await self._produce(view, replica, request, payload)
            case Fetch():
                return await self._fetch(replica, request)
            case FindOffset() | Consume() | MoveCursor() | GetCursors() | BeginEpoch():
                raise RequestError(f"this broker does not answer {request_name(request)}", code="unknown_request")
            case _:
                assert_never(request)

    async def _produce(self, view: View, replica: Replica, request: Produce, payload: memoryview) -> Answer:
        producer_id = decode_header(payload).producer_id
        check_producer(view, producer_id, request.topic_id, request.partition_id)
        if producer_id != NO_PRODUCER:
            self._clients.hear("producer", producer_id)
        appended = await replica.append(payload)
        return Produced(base_offset=appended.base_offset, is_duplicate=appended.is_duplicate), ()

    async def _fetch(self, replica: Replica, request: Fetch) -> Answer:
        end_offset = await replica.read_end_offset()
        batches = await replica.read(request.offset, bytes_max=request.bytes_max)
        return Fetched(first_offset=Offset(0), end_offset=end_offset), [batch.data for batch in batches]

    async def _get_members(self, request: GetMembers) -> Answer:
        """Prove that this node leads the group before telling who belongs to it."""
        held = self._table.get_group(request.group)
        if held is None or held.replica is None:
            raise NotLeaderError(f"not done: this node has no open replica of group {request.group}")
        member = held.replica.member
        await member.read_barrier()
        # Whoever is let go only by an entry that is not committed yet may still be needed.
        known = (member.raft.configuration, member.raft.committed_configuration)
        voters = {node for item in known for node in (*item.voters, *item.voters_outgoing)}
        learners = {node for item in known for node in item.learners} - voters
        return MembersFound(voters=tuple(sorted(voters)), learners=tuple(sorted(learners))), ()


def describe_replica(table: PartitionTable, held: Held) -> ReplicaInfo:
    """Return what people and other nodes see of a replica."""
    topic_id, partition_id = held.key
    if held.replica is None:
        return ReplicaInfo(
            topic_id=topic_id, partition_id=partition_id, group=held.group, role=held.state, epoch=0, is_ready=False
        )
    member = held.replica.member
    status = member.raft.status()
    return ReplicaInfo(
        topic_id=topic_id,
        partition_id=partition_id,
        group=held.group,
        role=status.role,
        epoch=status.term,
        leader=status.leader,
        first_offset=member.log.first_offset,
        end_offset=held.replica.high_watermark,
        bytes=member.log.status().size_bytes,
        in_sync=table.in_sync(held.replica),
        voters=status.configuration.voters,
        learners=status.configuration.learners,
    )
