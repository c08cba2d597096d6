"""Answer what clients ask of a partition's leader, and what other nodes ask about groups on this one.

Each request: wait until this node knows the metadata as far as the client does, find the leading replica, check that
the client may, note that it lives, and let the replica do it. Nothing is decided here that the replica decides: bounds
and checksums of batches, order of a producer's batches, offsets, cursors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import assert_never

from quiver.broker.admission import Admission, check_consumer, check_is_awaited, check_producer
from quiver.broker.reporter import ClientsHeard
from quiver.broker.table import PartitionTable
from quiver.errors import NotLeaderError, TrimmedError
from quiver.metadata import Registration, StartFrom, View
from quiver.model import NO_PRODUCER, Buffer, ConsumerId, Offset
from quiver.partition import DefaultStart, Replica
from quiver.record import decode_header
from quiver.wire.consume_many import ConsumeMany, Taken, encode_taken
from quiver.wire.exchange import Done, Response
from quiver.wire.messages import (
    BeginEpoch,
    Consume,
    Consumed,
    CursorsFound,
    EpochBegun,
    Fetch,
    Fetched,
    FindOffset,
    GetCursors,
    GetMembers,
    MembersFound,
    MoveCursor,
    OffsetFound,
    PartitionRequest,
    Produce,
    Produced,
    ReadReplica,
    ReplicaRead,
)
from quiver.wire.serving import Caller

BrokerRequest = PartitionRequest | ReadReplica | GetMembers
"""What a broker answers itself."""
Answer = tuple[Response, Sequence[Buffer]]


class BrokerRequests:
    """The broker's answers."""

    def __init__(
        self, table: PartitionTable, admission: Admission, clients: ClientsHeard, *, long_polls_max: int
    ) -> None:
        self._table = table
        self._admission = admission
        self._clients = clients
        self._polls_left = long_polls_max

    async def handle(self, caller: Caller, request: BrokerRequest, payload: memoryview) -> Answer:
        """Carry out a request; raises what the replica raises, and as `PartitionTable.find_leader` does."""
        if isinstance(request, GetMembers):
            return await self._get_members(request)
        view = await self._admission.wait_known(caller, request.known_index)
        if isinstance(request, ReadReplica):
            return await self._read_replica(request)
        replica = self._table.find_leader(request.topic_id, request.partition_id)
        match request:
            case Produce():
                return await self._produce(view, replica, request, payload)
            case Fetch():
                return await self._fetch(caller, replica, request)
            case FindOffset():
                return OffsetFound(offset=await replica.find_offset(request.at)), ()
            case Consume():
                return await self._consume(caller, view, replica, request)
            case ConsumeMany():
                return await self._take_each(view, replica, request)
            case MoveCursor():
                return await self._move_cursor(view, replica, request)
            case GetCursors():
                return await self._get_cursors(view, replica, request)
            case BeginEpoch():
                return await self._begin_epoch(view, replica, request)
            case _:
                assert_never(request)

    # -- producers -------------------------------------------------------------------------------

    async def _produce(self, view: View, replica: Replica, request: Produce, payload: memoryview) -> Answer:
        header = decode_header(payload)
        if header.producer_id != NO_PRODUCER:
            key = (request.topic_id, request.partition_id)
            check_producer(view, header.producer_id, header.producer_epoch, key=key)
            self._clients.hear("producer", header.producer_id)
        check_is_awaited(view, request.topic_id)
        appended = await replica.append(payload)
        return Produced(base_offset=appended.base_offset, is_duplicate=appended.is_duplicate), ()

    async def _begin_epoch(self, view: View, replica: Replica, request: BeginEpoch) -> Answer:
        check_producer(view, request.producer_id, request.epoch, key=(request.topic_id, request.partition_id))
        self._clients.hear("producer", request.producer_id)
        return EpochBegun(next_sequence=await replica.begin_epoch(request.producer_id, request.epoch)), ()

    # -- readers ---------------------------------------------------------------------------------

    async def _fetch(self, caller: Caller, replica: Replica, request: Fetch) -> Answer:
        with self._poll(caller, request.wait_ms) as wait_ms:
            found = await replica.fetch(request.offset, bytes_max=request.bytes_max, wait_ms=wait_ms)
        response = Fetched(first_offset=found.first_offset, end_offset=found.end_offset)
        return response, [batch.data for batch in found.batches]

    async def _read_replica(self, request: ReadReplica) -> Answer:
        replica = self._table.find_replica(request.topic_id, request.partition_id)
        # Before the read: what is committed meanwhile is not in it.
        response = ReplicaRead(first_offset=replica.first_offset, end_offset=replica.high_watermark)
        if request.offset < response.first_offset:
            raise TrimmedError(f"offset {request.offset} was removed; the replica begins at {response.first_offset}")
        if request.offset >= response.end_offset:
            return response, ()
        batches = await replica.read(request.offset, bytes_max=request.bytes_max)
        return response, [batch.data for batch in batches]

    async def _consume(self, caller: Caller, view: View, replica: Replica, request: Consume) -> Answer:
        registration = self._hear_consumer(view, request.consumer_id, request)
        with self._poll(caller, request.wait_ms) as wait_ms:
            found = await replica.consume(
                request.consumer_id,
                offset=request.offset,
                default_start=_start_of(registration),
                records_max=request.records_max,
                bytes_max=request.bytes_max,
                wait_ms=wait_ms,
            )
        response = Consumed(first_offset=found.first_offset, cursor=found.cursor, end_offset=found.end_offset)
        return response, [batch.data for batch in found.batches]

    async def _take_each(self, view: View, replica: Replica, request: ConsumeMany) -> Answer:
        ids = request.consumer_ids
        starts = {id_: _start_of(self._hear_consumer(view, id_, request)) for id_ in dict.fromkeys(ids)}
        records = await replica.consume_many([(id_, starts[id_]) for id_ in ids])
        return Taken(), (encode_taken(records),)

    async def _move_cursor(self, view: View, replica: Replica, request: MoveCursor) -> Answer:
        for consumer_id, _ in request.cursors:
            self._hear_consumer(view, consumer_id, request)
        await replica.move_cursors(request.cursors, only_new=request.only_new)
        return Done(), ()

    async def _get_cursors(self, view: View, replica: Replica, request: GetCursors) -> Answer:
        key = (request.topic_id, request.partition_id)
        starts = [check_consumer(view, consumer_id, key=key).start for consumer_id in request.consumer_ids]
        found = await replica.get_cursors(request.consumer_ids)
        bounds: dict[StartFrom | None, Offset] = {StartFrom.LATEST: found.end_offset}
        cursors = [
            bounds.get(start, found.first_offset) if cursor is None else cursor
            for cursor, start in zip(found.cursors, starts, strict=True)
        ]
        return CursorsFound(cursors=tuple(cursors), first_offset=found.first_offset, end_offset=found.end_offset), ()

    def _hear_consumer(
        self, view: View, consumer_id: ConsumerId, request: Consume | ConsumeMany | MoveCursor
    ) -> Registration:
        registration = check_consumer(view, consumer_id, key=(request.topic_id, request.partition_id))
        self._clients.hear("consumer", consumer_id)
        return registration

    @contextmanager
    def _poll(self, caller: Caller, wanted_ms: int) -> Iterator[int]:
        """Give the time for which a request may wait for records: none, if too many wait already."""
        if not wanted_ms or not self._polls_left:
            yield 0
            return
        self._polls_left -= 1
        try:
            yield int(self._admission.wait_ms(caller, wanted_ms))
        finally:
            self._polls_left += 1

    # -- other nodes -----------------------------------------------------------------------------

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


def _start_of(registration: Registration) -> DefaultStart:
    return "latest" if registration.start is StartFrom.LATEST else "earliest"
