"""Handlers of the requests that clients send to a partition's leader, and nodes to a member of a group.

A handler finds the leading replica, checks that the client is registered, records that the client is alive, and calls
the replica. The replica itself checks bounds and checksums of batches, sequences of producers, offsets and cursors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from quiver.broker.client_checks import check_consumer, check_has_consumers, check_producer, start_of
from quiver.broker.explanation import ReplicaExplainer
from quiver.broker.heartbeats import ClientActivity
from quiver.broker.queue_requests import QueueRequests
from quiver.broker.replica_table import PartitionKey, ReplicaTable
from quiver.clock import Clock
from quiver.errors import NotLeaderError, TrimmedError, UnavailableError
from quiver.groups.machine import epoch_at
from quiver.metadata import GroupKind, Registration, StartFrom, View
from quiver.metrics import MetricFamily, gauge
from quiver.model import NO_PRODUCER, ConsumerId, GroupId, Index, Offset
from quiver.partition import KnownGroups, Replica
from quiver.partition.reads import LargeRecords, admit_up_to
from quiver.record import decode_header
from quiver.tracing import Tracing
from quiver.wire.consumed_records import encode_consumed
from quiver.wire.explain_messages import ExplainReplica
from quiver.wire.messages import (
    BeginEpoch,
    Consume,
    Consumed,
    ConsumeMany,
    CursorsFound,
    EpochBegun,
    Fetch,
    Fetched,
    FindOffset,
    GetCursors,
    GetMembers,
    ManyConsumed,
    MembersFound,
    MoveCursor,
    OffsetFound,
    Produce,
    Produced,
    ReadReplica,
    ReplicaRead,
)
from quiver.wire.requests import Done, Request
from quiver.wire.serving import Answer, Caller, RequestHandler


class BrokerRequests:
    """The handlers of a broker's requests."""

    def __init__(
        self,
        table: ReplicaTable,
        view: Callable[[], View],
        clients: ClientActivity,
        *,
        clock: Clock,
        long_polls_max: int,
        explainer: ReplicaExplainer,
        on_question: Callable[[GroupId], None],
        tracing: Tracing | None = None,
    ) -> None:
        self._table = table
        self._view = view
        self._on_question = on_question
        self._clients = clients
        self._clock = clock
        self._explainer = explainer
        self._tracing = tracing
        self._polls_max = self._polls_left = long_polls_max
        self._queues = QueueRequests(table, view, clients, poll=self._poll)

    def handlers(self) -> dict[type[Request[Any]], RequestHandler]:
        """Return the handlers of the requests that a broker serves, for `dispatch`.

        Each raises the errors of the replica, and those of `ReplicaTable.find_leader`.
        """
        return {
            Produce: self._produce if self._tracing is None else self._tracing.trace_append(self._produce),
            BeginEpoch: self._begin_epoch,
            Fetch: self._fetch,
            FindOffset: self._find_offset,
            ReadReplica: self._read_replica,
            Consume: self._consume,
            ConsumeMany: self._consume_many,
            MoveCursor: self._move_cursor,
            GetCursors: self._get_cursors,
            **self._queues.handlers(),
            GetMembers: self._get_members,
            ExplainReplica: self._explain_replica,
        }

    def metrics(self) -> Iterable[MetricFamily]:
        """Return the metrics of long polls."""
        return (
            gauge("quiver_long_polls", "Requests that wait for records.", self._polls_max - self._polls_left),
            gauge("quiver_long_polls_max", "Limit of requests that wait for records.", self._polls_max),
        )

    # -- producers -------------------------------------------------------------------------------

    async def _produce(self, caller: Caller, request: Produce, payload: memoryview) -> Answer:
        key = (request.topic_id, request.partition_id)
        try:
            replica = self._table.find_leader(*key)
        except UnavailableError as error:
            replica = await self._wait_first_leader(caller, key, error)
        view, header = self._view(), decode_header(payload)
        if header.producer_id != NO_PRODUCER:
            check_producer(view, header.producer_id, header.producer_epoch, key=key)
            self._clients.record("producer", header.producer_id)
        check_has_consumers(view, request.topic_id)
        appended = await replica.append(payload, header, checked_index=view.index)
        return Produced(base_offset=appended.base_offset, is_duplicate=appended.is_duplicate), ()

    async def _begin_epoch(self, caller: Caller, request: BeginEpoch, _: memoryview) -> Answer:
        key = (request.topic_id, request.partition_id)
        try:
            replica = self._table.find_leader(*key)
        except UnavailableError as error:
            replica = await self._wait_first_leader(caller, key, error)
        view = self._view()
        check_producer(view, request.producer_id, request.epoch, key=key)
        self._clients.record("producer", request.producer_id)
        next_sequence = await replica.begin_epoch(request.producer_id, request.epoch, checked_index=view.index)
        return EpochBegun(next_sequence=next_sequence), ()

    async def _wait_first_leader(self, caller: Caller, key: PartitionKey, error: UnavailableError) -> Replica:
        wait_ms = caller.wait_ms(self._clock.monotonic_ms())
        return await self._table.wait_first_leader(key, error, wait_ms=wait_ms)

    # -- readers ---------------------------------------------------------------------------------

    async def _fetch(self, caller: Caller, request: Fetch, _: memoryview) -> Answer:
        replica = self._table.find_leader(request.topic_id, request.partition_id)
        if request.reader is not None:
            replica.check_session(*request.reader)
            if request.reader[0] in self._view().consumers:
                self._clients.record("consumer", request.reader[0])
        with self._poll(caller, request.wait_ms) as wait_ms:
            found = await replica.fetch(
                request.offset,
                bytes_max=request.answer_bytes,
                wait_ms=wait_ms,
                admit=caller.reserve,
            )
        if request.reader is not None:  # a later session may have begun during the wait
            replica.check_session(*request.reader)
        response = Fetched(first_offset=found.first_offset, end_offset=found.end_offset)
        return response, [batch.data for batch in found.batches]

    async def _find_offset(self, _: Caller, request: FindOffset, __: memoryview) -> Answer:
        replica = self._table.find_leader(request.topic_id, request.partition_id)
        return OffsetFound(offset=await replica.find_offset(request.at)), ()

    async def _read_replica(self, caller: Caller, request: ReadReplica, __: memoryview) -> Answer:
        replica = self._table.find_replica(request.topic_id, request.partition_id)
        # Bounds before the read: records committed during the read are not in it.
        response = ReplicaRead(first_offset=replica.first_offset, end_offset=replica.high_watermark)
        if request.offset < response.first_offset:
            message = f"not done: offset {request.offset} is trimmed; the first offset is {response.first_offset}"
            raise TrimmedError(message)
        if request.offset >= response.end_offset:
            return response, ()
        batches = await replica.read(request.offset, bytes_max=request.answer_bytes, admit=caller.reserve)
        return response, [batch.data for batch in batches]

    async def _consume(self, caller: Caller, request: Consume, _: memoryview) -> Answer:
        replica, view = self._table.find_leader(request.topic_id, request.partition_id), self._view()
        registration = self._admit_consumer(view, request.consumer_id, request)
        try:
            with self._poll(caller, request.wait_ms) as wait_ms:
                found = await replica.consume(
                    request.consumer_id,
                    offset=request.offset,
                    default_start=start_of(registration),
                    records_max=request.records_max,
                    bytes_max=request.answer_bytes,
                    wait_ms=wait_ms,
                    checked_index=view.index,
                    groups=_known_groups(view, (request.consumer_id,)),
                    admit=admit_up_to(caller.reserve, request.decoded_bytes_max),
                    decoded_bytes_max=request.decoded_bytes_max,
                )
        except LargeRecords as large:
            nowhere = Offset(0)
            response = Consumed(first_offset=nowhere, cursor=nowhere, end_offset=nowhere, large_bytes=large.size_bytes)
            return response, ()
        response = Consumed(first_offset=found.first_offset, cursor=found.cursor, end_offset=found.end_offset)
        return response, [batch.data for batch in found.batches]

    async def _consume_many(self, caller: Caller, request: ConsumeMany, __: memoryview) -> Answer:
        replica, view = self._table.find_leader(request.topic_id, request.partition_id), self._view()
        ids = request.consumer_ids
        starts = {id_: start_of(self._admit_consumer(view, id_, request)) for id_ in dict.fromkeys(ids)}
        consumers = [(id_, starts[id_]) for id_ in ids]
        groups = _known_groups(view, starts)
        bytes_max = request.decoded_bytes_max
        try:
            records = await replica.consume_many(
                consumers,
                checked_index=view.index,
                groups=groups,
                admit=admit_up_to(caller.reserve, bytes_max),
                bytes_max=bytes_max,
            )
        except LargeRecords as large:
            return ManyConsumed(large_bytes=large.size_bytes), ()
        return ManyConsumed(), (encode_consumed(records),)

    async def _move_cursor(self, _: Caller, request: MoveCursor, __: memoryview) -> Answer:
        replica, view = self._table.find_leader(request.topic_id, request.partition_id), self._view()
        for consumer_id, _offset in request.cursors:
            self._admit_consumer(view, consumer_id, request)
        await replica.move_cursors(
            request.cursors,
            only_new=request.only_new,
            session=request.session,
            checked_index=view.index,
            groups=_known_groups(view, [consumer_id for consumer_id, _ in request.cursors]),
        )
        return Done(), ()

    async def _get_cursors(self, _: Caller, request: GetCursors, __: memoryview) -> Answer:
        key = (request.topic_id, request.partition_id)
        replica, view = self._table.find_leader(*key), self._view()
        starts = [check_consumer(view, consumer_id, key=key).start for consumer_id in request.consumer_ids]
        found = await replica.get_cursors(request.consumer_ids)
        bounds: dict[StartFrom | None, Offset] = {StartFrom.LATEST: found.end_offset}
        cursors = [
            bounds.get(start, found.first_offset) if cursor is None else cursor
            for cursor, start in zip(found.cursors, starts, strict=True)
        ]
        return CursorsFound(cursors=tuple(cursors), first_offset=found.first_offset, end_offset=found.end_offset), ()

    def _admit_consumer(
        self, view: View, consumer_id: ConsumerId, request: Consume | ConsumeMany | MoveCursor
    ) -> Registration:
        registration = check_consumer(view, consumer_id, key=(request.topic_id, request.partition_id))
        self._clients.record("consumer", consumer_id)
        return registration

    @contextmanager
    def _poll(self, caller: Caller, wanted_ms: int) -> Iterator[int]:
        """Yield how long a request may wait for records: 0 if too many requests wait already."""
        if not wanted_ms or not self._polls_left:
            yield 0
            return
        self._polls_left -= 1
        try:
            yield int(min(wanted_ms, caller.wait_ms(self._clock.monotonic_ms())))
        finally:
            self._polls_left += 1

    # -- operators and other nodes ---------------------------------------------------------------

    async def _explain_replica(self, _: Caller, request: ExplainReplica, __: memoryview) -> Answer:
        key = (request.topic_id, request.partition_id)
        return await self._explainer.explain(self._table.get(key), self._view(), key), ()

    async def _get_members(self, _: Caller, request: GetMembers, __: memoryview) -> Answer:
        """Return a group's members, after a read barrier that proves that this node leads it."""
        hosted = self._table.get_group(request.group)
        self._on_question(request.group)
        if hosted is None or hosted.replica is None:
            raise NotLeaderError(f"not done: this node has no open replica of group {request.group}")
        member = hosted.replica.member
        await member.read_barrier()
        # A member that only an uncommitted entry removes is still a member: its replica must not be deleted.
        known = (member.configuration, member.committed_configuration)
        voters = {node for item in known for node in (*item.voters, *item.voters_outgoing)}
        learners = {node for item in known for node in item.learners} - voters
        return MembersFound(voters=tuple(sorted(voters)), learners=tuple(sorted(learners))), ()


def _known_groups(view: View, consumer_ids: Collection[ConsumerId]) -> KnownGroups:
    """Return what the metadata says of the groups among consumers."""
    rows = view.consumer_groups
    return KnownGroups(
        epoch_at(Index(view.index + view.counters.session_base)),
        frozenset(one for one in consumer_ids if view.members_of(one)),
        frozenset(one for one in consumer_ids if one in rows and rows[one].kind is GroupKind.QUEUE),
    )
