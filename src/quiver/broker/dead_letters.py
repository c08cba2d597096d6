"""Moves dead letters of work queues to their dead-letter topics, on the broker that leads the source partition.

Dead records of a queue have dense sequences in the order in which they died (`quiver.partition.queue_window`). They are
sent in that order by a producer that is named for group, topic and partition, with these very sequences, less a *base*
that is fixed in the source partition's log before the first one is sent. So the target partition knows which of them it
has: a mover that starts, here or on another node after a failover, begins an epoch there, which fences the mover before
it, and learns the next sequence. What is there is buried (acknowledged as moved); the rest is sent. A crash between the
two loses nothing and doubles nothing.

The limit of it: if the target has forgotten the producer (it was removed, or its sequences were dropped after a long
idle time) after letters were sent and before they are buried, they are sent again.

A record that cannot be read any more, since retention removed it or its batch is malformed, leaves a dead letter
without a value that says so. A topic that cannot be created (it counts for the quotas of the group's owner) or written
holds the letters up: the queue stops at `in_flight_max`, and says why.

Whether a queue may write where its settings say is decided when it is opened or configured, by the primary
(`quiver.manager.group_requests`) and `quiver.access.rules`; not again for each letter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from quiver.broker.queue_requests import find_queue_settings
from quiver.broker.replica_table import PartitionKey, ReplicaTable
from quiver.clock import Clock
from quiver.errors import (
    ConflictError,
    DecodeError,
    NotFoundError,
    QuiverError,
    TooLargeError,
    TrimmedError,
    UnavailableError,
)
from quiver.faults import describe_fault
from quiver.groups.settings import DEAD_LETTERS_PREFIX, QueueSettings, dead_letter_topic_of
from quiver.logs import facts
from quiver.manager.node_router import NodeRouter
from quiver.metadata import MetadataStore, TopicRow
from quiver.model import Buffer, ConsumerId, Offset, PartitionId, ProducerId, Term
from quiver.partition import Replica
from quiver.partition.queue_operations import DeadRun, DeadTarget
from quiver.record import Batch, Compression, Record, build_batch
from quiver.record.decoded import DecodedAllowance
from quiver.record.queue_headers import (
    DEAD_ATTEMPTS_HEADER,
    DEAD_GROUP_HEADER,
    DEAD_HEADERS,
    DEAD_LOST_HEADER,
    DEAD_OFFSET_HEADER,
    DEAD_PARTITION_HEADER,
    DEAD_REASON_HEADER,
    DEAD_TIME_HEADER,
    DEAD_TOPIC_HEADER,
)
from quiver.wire.messages import BeginEpoch, CreateTopicRequest, Produce, RegisterProducerRequest, Selection

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
"""Interval between two looks at the queues of the partitions that this node leads."""
BATCH_RECORDS_MAX = 500
BATCH_BYTES_MAX = 1024 * 1024
DECODED_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of batches, once decoded, that the letters of one batch are read from, or a single larger batch."""
REPLICAS_PER_STEP = 100
"""Replicas looked at before others get a turn of the event loop."""


class _Session(msgspec.Struct):
    """An epoch of the producer of one queue's dead letters; valid in one term of the source partition."""

    term: Term
    target: DeadTarget
    epoch: int


class _Letter(msgspec.Struct, frozen=True):
    """A dead record, or why there is none."""

    record: Record | None
    offset: Offset
    run: DeadRun
    lost: str = ""


class _LetterBatch:
    """The letters of one batch; `is_full` once there are enough, or the next records would take too much to decode."""

    def __init__(self) -> None:
        self.letters: list[_Letter] = []
        self._allowance = DecodedAllowance(DECODED_BYTES_MAX)
        self._size_bytes = 0
        self._has_ended = False

    @property
    def is_full(self) -> bool:
        """Return whether nothing more should be added."""
        is_over = len(self.letters) >= BATCH_RECORDS_MAX or self._size_bytes >= BATCH_BYTES_MAX
        return is_over or self._has_ended

    def add_lost(self, run: DeadRun, lost: str, *, first: int, end: int) -> None:
        """Add letters for records that cannot be read."""
        end = min(end, first + BATCH_RECORDS_MAX - len(self.letters))
        self.letters += [_Letter(None, Offset(offset), run, lost) for offset in range(first, end)]

    def add_records(self, run: DeadRun, batch: Batch, *, first: Offset, end: Offset) -> None:
        """Add records of a batch until it is full; they are copies, and the batch is not kept."""
        if not self._allowance.take(batch):
            self._has_ended = True
            return
        end = min(end, batch.header.end_offset)
        try:
            lengths = batch.record_lengths(first, end)
            for offset, length in enumerate(lengths, start=first):
                if self.is_full:
                    return
                record = batch.records(Offset(offset), Offset(offset + 1))[0]
                self.letters.append(_Letter(record, record.offset, run))
                self._size_bytes += length
        except DecodeError:
            self.add_lost(run, "its batch cannot be decoded", first=first, end=end)


class DeadLetterMover:
    """Moves the dead letters of the partitions that this node leads, and ends records that have no attempt left."""

    def __init__(self, table: ReplicaTable, store: MetadataStore, router: NodeRouter, clock: Clock) -> None:
        self._table = table
        self._store = store
        self._router = router
        self._clock = clock
        self._sessions: dict[tuple[PartitionKey, ConsumerId], _Session] = {}
        self._failing: set[tuple[PartitionKey, ConsumerId]] = set()

    async def run(self) -> None:
        """Move dead letters until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.move_all()

    async def move_all(self) -> None:
        """Look at every queue of the partitions that this node leads, once."""
        led = self._table.led()
        if self._sessions:
            keys = {hosted.key for hosted, _ in led}
            self._sessions = {where: one for where, one in self._sessions.items() if where[0] in keys}
        for number, (hosted, replica) in enumerate(led):
            if number % REPLICAS_PER_STEP == REPLICAS_PER_STEP - 1:
                await asyncio.sleep(0)
            for group_id in sorted(replica.state.queues):
                await self._move_contained(hosted.key, replica, group_id)

    async def _move_contained(self, key: PartitionKey, replica: Replica, group_id: ConsumerId) -> None:
        """Move the dead letters of one queue; a failure is logged once, and retried in the next round."""
        where = (key, group_id)
        try:
            settings = find_queue_settings(self._store.view(), group_id)
            await replica.queues.expire(group_id, settings)
            while replica.queues.dead_letters(group_id):
                await self._move(key, replica, group_id, settings)
        except QuiverError as error:
            self._sessions.pop(where, None)
            if where not in self._failing and not isinstance(error, UnavailableError):
                self._failing.add(where)
                extra = facts(topic_id=key[0], partition_id=key[1], group=group_id, error=describe_fault(error))
                logger.warning("dead letters are not moved", extra=extra)
        else:
            self._failing.discard(where)

    async def _move(self, key: PartitionKey, replica: Replica, group_id: ConsumerId, settings: QueueSettings) -> None:
        """Send the next dead letters of a queue, and bury them."""
        session = self._sessions.get((key, group_id))
        if session is None or session.term != replica.member.term:
            session = await self._begin(key, replica, group_id, settings)
            self._sessions[key, group_id] = session
        dead = replica.queues.dead_letters(group_id)
        if not dead:
            return
        letters = await self._read(replica, dead)
        first_sequence = dead[0].sequence
        try:
            await self._send(key, group_id, session, letters, first_sequence)
        except TooLargeError:
            letters = [msgspec.structs.replace(letters[0], record=None, lost="too large with its headers")]
            await self._send(key, group_id, session, letters, first_sequence)
        await replica.queues.bury(group_id, first_sequence + len(letters))

    # -- the producer --------------------------------------------------------------------------------

    async def _begin(
        self, key: PartitionKey, replica: Replica, group_id: ConsumerId, settings: QueueSettings
    ) -> _Session:
        """Begin an epoch at the target, and bury what it has."""
        term = replica.member.term
        topic = await self._find_topic(key, group_id, settings)
        partition_id = PartitionId(key[1] % topic.partitions)
        name = f"{DEAD_LETTERS_PREFIX}{group_id}/{key[0]}/{key[1]}"
        selection = Selection(topic=topic.name, partitions=(partition_id,))
        registered = await self._router.ask_primary(
            RegisterProducerRequest(topics=(selection,), name=name, creates_topics=False)
        )
        await self._store.wait_applied(registered.index)
        producer_id, epoch = registered.producer_id, registered.epoch
        await self.bury_moved(replica, group_id, producer_id, epoch)
        begun = BeginEpoch(topic_id=topic.topic_id, partition_id=partition_id, producer_id=producer_id, epoch=epoch)
        next_sequence = (await self._ask_leader(begun)).next_sequence
        dead = replica.queues.dead_letters(group_id)
        known = self._target(replica, group_id)
        target = DeadTarget(topic.topic_id, partition_id, producer_id, 0)
        if known is not None and msgspec.structs.replace(known, base=0) == target:
            target = known
        first = dead[0].sequence if dead else 0
        if dead and (target is not known or target.base + next_sequence != first):
            # A new target, or one that has forgotten the producer.
            target = msgspec.structs.replace(target, base=first - next_sequence)
            await replica.queues.set_target(group_id, target)
        return _Session(term=term, target=target, epoch=epoch)

    async def bury_moved(self, replica: Replica, group_id: ConsumerId, producer_id: ProducerId, epoch: int) -> None:
        """Bury what the target that is recorded in the log has, whether or not it is still the target."""
        target, dead = self._target(replica, group_id), replica.queues.dead_letters(group_id)
        if target is None or not dead or target.producer_id != producer_id:
            return
        begin = BeginEpoch(
            topic_id=target.topic_id, partition_id=target.partition_id, producer_id=producer_id, epoch=epoch
        )
        try:
            begun = await self._ask_leader(begin)
        except NotFoundError:
            return  # that topic was deleted
        end_sequence = min(target.base + begun.next_sequence, dead[-1].sequence + dead[-1].count)
        if end_sequence > dead[0].sequence:
            await replica.queues.bury(group_id, end_sequence)

    def _target(self, replica: Replica, group_id: ConsumerId) -> DeadTarget | None:
        window = replica.state.queues.get(group_id)
        return None if window is None else window.target

    async def _find_topic(self, key: PartitionKey, group_id: ConsumerId, settings: QueueSettings) -> TopicRow:
        """Return the dead-letter topic; create it if it does not exist, as a topic of the group's owner."""
        view = self._store.view()
        source, group = view.topics.get(key[0]), view.consumers.get(group_id)
        if source is None or group is None:
            raise NotFoundError(f"not done: topic {key[0]} or group {group_id} is gone", code="unknown_topic")
        name = dead_letter_topic_of(settings, topic=source.name, group=group.request_id or str(group_id))
        topic = view.topic(name)
        if topic is not None:
            return topic
        request = CreateTopicRequest(
            topic=name,
            partitions=1,
            replicas=source.replicas,
            request_id=f"{DEAD_LETTERS_PREFIX}{group_id}/{key[0]}/{view.index}",
            is_encrypted=True if source.is_encrypted else None,
            owner=group.owner,
        )
        try:
            created = await self._router.ask_primary(request)
        except ConflictError as error:
            if error.code != "topic_exists":
                raise
        else:
            await self._store.wait_applied(created.index)
        topic = self._store.view().topic(name)
        if topic is None:
            raise UnavailableError(f"not done: this node does not know topic {name!r} yet; retry")
        return topic

    async def _ask_leader(self, request: BeginEpoch | Produce, payload: Sequence[Buffer] = ()) -> Any:
        """Ask the leader of the target partition; it answers for itself or names another, for the next round."""
        row = self._store.view().partitions.get((request.topic_id, request.partition_id))
        if row is None:
            raise NotFoundError(f"not done: unknown topic id {request.topic_id}", code="unknown_topic")
        if row.leader is None:
            raise UnavailableError(f"not done: partition {row.partition_id} of the dead-letter topic has no leader")
        # The leader's node may lag behind: it waits until it knows the registration that this node knows.
        request = msgspec.structs.replace(request, known_index=self._store.applied_index)
        return await self._router.ask(row.leader, request, payload)

    # -- letters ---------------------------------------------------------------------------------------

    async def _read(self, replica: Replica, dead: Sequence[DeadRun]) -> list[_Letter]:
        """Read the first dead records, as many as one batch may have, at least one."""
        found = _LetterBatch()
        for run in dead:
            position, end = run.first, run.first + run.count
            while position < end and not found.is_full:
                before = len(found.letters)
                await _read_some(found, replica, run, first=Offset(position), end=Offset(end))
                position += len(found.letters) - before
            if position < end:
                break
        return found.letters

    async def _send(
        self,
        key: PartitionKey,
        group_id: ConsumerId,
        session: _Session,
        letters: Sequence[_Letter],
        first_sequence: int,
    ) -> None:
        view = self._store.view()
        source, group = view.topics.get(key[0]), view.consumers.get(group_id)
        origin = [
            (DEAD_TOPIC_HEADER, (source.name if source is not None else f"#{key[0]}").encode()),
            (DEAD_PARTITION_HEADER, b"%d" % key[1]),
            (DEAD_GROUP_HEADER, (group.request_id if group is not None else str(group_id)).encode()),
        ]
        now_ms, target = self._clock.wall_ms(), session.target
        batch = build_batch(
            [None if one.record is None else one.record.value for one in letters],
            keys=[None if one.record is None else one.record.key for one in letters],
            timestamp=now_ms,
            timestamps=[now_ms if one.record is None else one.record.timestamp for one in letters],
            headers=[[*origin, *_headers_of(one)] for one in letters],
            # Uncompressed, the letters of well compressed records would take a thousand times their space.
            compression=Compression.ZSTD,
            producer_id=target.producer_id,
            producer_epoch=session.epoch,
            base_sequence=first_sequence - target.base,
        )
        request = Produce(topic_id=target.topic_id, partition_id=target.partition_id)
        await self._ask_leader(request, [batch])


async def _read_some(found: _LetterBatch, replica: Replica, run: DeadRun, *, first: Offset, end: Offset) -> None:
    """Read records of one batch; those that cannot be read are letters without a record."""
    try:
        batch = (await replica.read(first, bytes_max=1))[0].undecoded()
    except TrimmedError:
        gone_end = min(end, max(first + 1, replica.first_offset))
        found.add_lost(run, "removed by retention", first=first, end=gone_end)
    else:
        found.add_records(run, batch, first=first, end=end)


def _headers_of(letter: _Letter) -> list[tuple[str, bytes | None]]:
    """Return what a dead letter says of itself, after the headers that the record had."""
    run, kept = letter.run, () if letter.record is None else letter.record.headers
    lost = [(DEAD_LOST_HEADER, letter.lost.encode())] if letter.lost else []
    return [
        (DEAD_OFFSET_HEADER, b"%d" % letter.offset),
        (DEAD_ATTEMPTS_HEADER, b"%d" % run.attempt),
        (DEAD_REASON_HEADER, run.reason.encode()),
        (DEAD_TIME_HEADER, b"%d" % run.time_ms),
        *lost,
        *(one for one in kept if one[0] not in DEAD_HEADERS),
    ]
