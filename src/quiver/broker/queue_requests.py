"""Handlers of the requests of work queues, on the broker that leads the partition.

They check that the group is registered for the partition and reads its topics as queues, record that it is alive, and
call the replica's `QueueHandler`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from quiver.broker.client_checks import check_consumer, start_of
from quiver.broker.heartbeats import ClientActivity
from quiver.broker.replica_table import ReplicaTable
from quiver.errors import ConflictError, OverloadedError
from quiver.groups.settings import QueueSettings
from quiver.metadata import GroupKind, View
from quiver.model import ConsumerId
from quiver.partition import DefaultStart, Replica
from quiver.partition.queue_handler import QUEUES_MAX, ReceiveRequest
from quiver.partition.reads import LargeRecords, admit_up_to
from quiver.security.limits import is_share_used
from quiver.wire.queue_messages import (
    GetQueue,
    QueueFound,
    QueueReceive,
    QueueReceived,
    QueueRequest,
    QueueSettle,
    QueueSettled,
    encode_queue_records,
)
from quiver.wire.requests import Request
from quiver.wire.serving import Answer, Caller, RequestHandler

Poll = Callable[[Caller, int], AbstractContextManager[int]]
"""Grants how long a request may wait for records, in ms."""


class QueueRequests:
    """The handlers of a broker's work queues."""

    def __init__(self, table: ReplicaTable, view: Callable[[], View], clients: ClientActivity, *, poll: Poll) -> None:
        self._table = table
        self._view = view
        self._clients = clients
        self._poll = poll

    def handlers(self) -> dict[type[Request[Any]], RequestHandler]:
        """Return the handlers, for `dispatch`; each raises the errors of `QueueHandler` and of `find_leader`."""
        return {QueueReceive: self._receive, QueueSettle: self._settle, GetQueue: self._get_queue}

    async def _receive(self, caller: Caller, request: QueueReceive, _: memoryview) -> Answer:
        replica, view, start = self._admit(request)
        settings = find_queue_settings(view, request.group_id)
        if request.group_id not in replica.state.queues:
            _check_share(view, request.group_id, replica.state.queues)
        try:
            with self._poll(caller, request.wait_ms) as wait_ms:
                found = await replica.queues.receive(
                    ReceiveRequest(
                        group_id=request.group_id,
                        settings=settings,
                        records_max=request.records_max,
                        bytes_max=request.answer_bytes,
                        lease_ms=request.lease_ms,
                        wait_ms=wait_ms,
                        default_start=start,
                        checked_index=view.index,
                        admit=admit_up_to(caller.reserve, request.decoded_bytes_max),
                    )
                )
        except LargeRecords as large:
            return QueueReceived(large_bytes=large.size_bytes), ()
        response = QueueReceived(
            leases=found.leases,
            grant=found.grant,
            deadline_ms=found.deadline_ms,
            lease_ms=found.lease_ms,
            stall=found.stall,
        )
        return response, (encode_queue_records(found.rows),) if found.leases else ()

    async def _settle(self, _: Caller, request: QueueSettle, __: memoryview) -> Answer:
        replica, view, _start = self._admit(request)
        settled = await replica.queues.settle(request, find_queue_settings(view, request.group_id))
        response = QueueSettled(
            stale=settled.stale, settled_before=settled.settled_before, deadline_ms=settled.deadline_ms
        )
        return response, ()

    async def _get_queue(self, _: Caller, request: GetQueue, __: memoryview) -> Answer:
        replica, view, start = self._admit(request)
        settings = find_queue_settings(view, request.group_id)
        found = await replica.queues.describe(request.group_id, settings, start=start)
        return (
            QueueFound(
                ready=found.ready,
                leased=found.leased,
                waiting=found.waiting,
                dying=found.dying,
                next_offset=found.next_offset,
                first_unsettled=found.first_unsettled,
                first_offset=found.first_offset,
                end_offset=found.end_offset,
                in_flight_max=settings.in_flight_max,
                stall=found.stall,
            ),
            (),
        )

    def _admit(self, request: QueueRequest) -> tuple[Replica, View, DefaultStart]:
        key = (request.topic_id, request.partition_id)
        replica, view = self._table.find_leader(*key), self._view()
        registration = check_consumer(view, request.group_id, key=key)
        if not isinstance(request, GetQueue):
            self._clients.record("consumer", request.group_id)
        return replica, view, start_of(registration)


def _check_share(view: View, group_id: ConsumerId, queues: Collection[ConsumerId]) -> None:
    """Raise `OverloadedError` if a partition has no room for one queue more of a group's owner.

    Queues keep their state until their group is deleted: one reader of the topic could take the room of all others. The
    queue handler has the bound on all queues together.
    """
    owner, used = _owner_of(view, group_id), len(queues)
    own = sum(_owner_of(view, one) == owner for one in queues) if owner else 0
    if own and is_share_used(own=own, used=used, most=QUEUES_MAX):
        raise OverloadedError(
            f"not done: {used} work queues, of at most {QUEUES_MAX}, have state in this partition, {own} of them of "
            f"{owner}; delete groups that are not used",
            code="too_many_queues",
        )


def _owner_of(view: View, group_id: ConsumerId) -> str:
    row = view.consumers.get(group_id)
    return "" if row is None else row.owner


def find_queue_settings(view: View, group_id: ConsumerId) -> QueueSettings:
    """Return the settings of a work queue.

    A consumer or group that reads its topics as streams is refused, rather than turned into a queue: it moves one
    cursor past everything that it reads, so records that workers have not finished would be lost, and its own reads
    would be refused from then on.

    Raises:
        ConflictError: not done; the group reads its topics as streams (`not_a_queue`).
    """
    group = view.consumer_groups.get(group_id)
    if group is None or group.kind is not GroupKind.QUEUE:
        raise ConflictError(
            f"not done: group {group_id} reads its topics as streams; receive with another group, which is created as "
            "a queue when it is opened",
            code="not_a_queue",
        )
    return group.settings
