"""The metadata in memory: tables of frozen rows, a few counters, and the log position that they reflect.

Pure. Only `apply_changes` modifies a `MetadataState`, with the same changes that are written to SQL, so both stay
equal. Readers get a `View`, which never changes. Views are copy-on-write: a table is copied only if it changes after
a view of it was taken, so taking a view for every request is cheap. Of the tables of clients, which may be large, only
the changed buckets are copied (`bucket_table`).

Nothing here depends on insertion order: everything listed, encoded or hashed is sorted by key. Equal states have equal
snapshots and digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from quiver.errors import DecodeError, UnknownVersionError
from quiver.features import LEVEL_MAX, LEVEL_MIN, shrink
from quiver.metadata.bucket_table import BucketTable, by_id, by_kind_and_id, by_name
from quiver.metadata.consumer_index import ConsumerIndex, PartitionConsumers
from quiver.metadata.rows import (
    FIRST_PARTITION_GROUP,
    ROW_TYPES,
    AnyRow,
    BrokerRow,
    ConsumerRow,
    EntityKind,
    GrantRow,
    GroupMemberRow,
    GroupRow,
    HeartbeatRow,
    HoldRow,
    MembershipRow,
    MoveId,
    MoveRow,
    PartitionRow,
    ProducerRow,
    QuotaRow,
    RoleRow,
    Table,
    TokenRow,
    TopicRow,
    TopicState,
    UserRow,
)
from quiver.model import ConsumerId, GroupId, Index, NodeId, Offset, PartitionId, ProducerId, Term, TopicId
from quiver.replication import SLICE_ROWS, array_header, encode_rows, encode_sorted, map_header
from quiver.security.limits import QuotaTable
from quiver.security.permissions import AccessTable


class Counters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cluster id, the next ids to assign, and cluster-wide flags."""

    cluster_id: str = ""
    formed_ms: int = 0
    next_topic_id: TopicId = TopicId(1)
    next_group_id: GroupId = FIRST_PARTITION_GROUP
    next_producer_id: ProducerId = ProducerId(1)
    next_consumer_id: ConsumerId = ConsumerId(1)
    next_move_id: MoveId = MoveId(1)
    is_rebalancing: bool = False
    """Whether a rebalance is requested and not yet complete."""
    feature_level: int = LEVEL_MIN
    """The cluster's feature level; data from before there were levels has the lowest."""
    session_base: int = 0
    """Added to an index of the log where it becomes a session of a consumer: a recovered log may be shorter."""


class Change(msgspec.Struct, frozen=True):
    """One row that is put under its key, or deleted if `row` is None."""

    table: Table
    key: Any
    row: AnyRow | None


def put(row: AnyRow) -> Change:
    """Return the change that puts a row."""
    return Change(row.table, row.key, row)


def drop(row: AnyRow) -> Change:
    """Return the change that deletes a row."""
    return Change(row.table, row.key, None)


class LogPosition(msgspec.Struct, frozen=True, order=True):
    """The last applied entry of the log: its index, and the term that identifies it."""

    index: Index = Index(0)
    term: Term = Term(0)


NO_ROWS = msgspec.Raw(array_header(0))


class _Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The encoded form of a state: each table is an array of rows, decoded in slices."""

    position: LogPosition
    counters: Counters
    brokers: msgspec.Raw
    topics: msgspec.Raw
    partitions: msgspec.Raw
    producers: msgspec.Raw
    consumers: msgspec.Raw
    heartbeats: msgspec.Raw
    moves: msgspec.Raw
    holds: msgspec.Raw = NO_ROWS
    """A snapshot from before there were holds has none."""
    users: msgspec.Raw = NO_ROWS
    tokens: msgspec.Raw = NO_ROWS
    roles: msgspec.Raw = NO_ROWS
    memberships: msgspec.Raw = NO_ROWS
    grants: msgspec.Raw = NO_ROWS
    quotas: msgspec.Raw = NO_ROWS
    consumer_groups: msgspec.Raw = NO_ROWS
    group_members: msgspec.Raw = NO_ROWS


_snapshot_decoder = msgspec.msgpack.Decoder(_Snapshot)
_table_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_rows_decoders: Mapping[Table, msgspec.msgpack.Decoder[list[AnyRow]]] = {
    row_type.table: msgspec.msgpack.Decoder(list[row_type])  # type: ignore[valid-type] # a value
    for row_type in ROW_TYPES
}


class View:
    """The immutable metadata at one index. Listings are sorted by key."""

    __slots__ = (
        "_access",
        "_consumer_index",
        "_held_offsets",
        "_members_by_group",
        "_quota_table",
        "brokers",
        "consumer_groups",
        "consumers",
        "consumers_by_name",
        "counters",
        "grants",
        "group_members",
        "heartbeats",
        "holds",
        "memberships",
        "moves",
        "partitions",
        "position",
        "producers",
        "quotas",
        "roles",
        "tokens",
        "topics",
        "topics_by_name",
        "users",
    )

    def __init__(self, state: MetadataState, previous: View | None) -> None:
        tables = state.tables
        self.position = state.position
        self.counters = state.counters
        self.brokers: Mapping[NodeId, BrokerRow] = tables[Table.BROKERS]
        self.topics: Mapping[TopicId, TopicRow] = tables[Table.TOPICS]
        self.partitions: Mapping[tuple[TopicId, PartitionId], PartitionRow] = tables[Table.PARTITIONS]
        self.producers: Mapping[ProducerId, ProducerRow] = tables[Table.PRODUCERS]
        self.consumers: Mapping[ConsumerId, ConsumerRow] = tables[Table.CONSUMERS]
        self.heartbeats: Mapping[tuple[EntityKind, int], HeartbeatRow] = tables[Table.HEARTBEATS]
        self.moves: Mapping[MoveId, MoveRow] = tables[Table.MOVES]
        self.holds: Mapping[tuple[TopicId, str], HoldRow] = tables[Table.HOLDS]
        self.users: Mapping[str, UserRow] = tables[Table.USERS]
        self.tokens: Mapping[str, TokenRow] = tables[Table.TOKENS]
        self.roles: Mapping[str, RoleRow] = tables[Table.ROLES]
        self.memberships: Mapping[tuple[str, str], MembershipRow] = tables[Table.MEMBERSHIPS]
        self.grants: Mapping[tuple[str, str, str, str, bool], GrantRow] = tables[Table.GRANTS]
        self.quotas: Mapping[str, QuotaRow] = tables[Table.QUOTAS]
        self.consumer_groups: Mapping[ConsumerId, GroupRow] = tables[Table.CONSUMER_GROUPS]
        self.group_members: Mapping[tuple[ConsumerId, str], GroupMemberRow] = tables[Table.GROUP_MEMBERS]
        self.topics_by_name: Mapping[str, TopicId] = state.names[Table.TOPICS]
        self.consumers_by_name: Mapping[str, ConsumerId] = state.names[Table.CONSUMERS]
        self._consumer_index = state.consumer_index
        self._members_by_group: dict[ConsumerId, tuple[GroupMemberRow, ...]] | None = None
        if previous is not None and previous.group_members is self.group_members:
            self._members_by_group = previous._members_by_group
        self._held_offsets: dict[tuple[TopicId, PartitionId], Offset] | None = None
        if previous is not None and previous.holds is self.holds:
            self._held_offsets = previous._held_offsets
        self._access: AccessTable | None = None
        if previous is not None and self._has_access_of(previous):
            self._access = previous._access
        self._quota_table: QuotaTable | None = None
        if previous is not None and previous.quotas is self.quotas and previous.memberships is self.memberships:
            self._quota_table = previous._quota_table

    def _has_access_of(self, other: View) -> bool:
        return (
            other.users is self.users
            and other.tokens is self.tokens
            and other.memberships is self.memberships
            and other.grants is self.grants
        )

    @property
    def access(self) -> AccessTable:
        """Return grants and memberships: the same object until users, tokens, memberships or grants change."""
        if self._access is None:
            grants = (row.grant for _, row in sorted(self.grants.items()))
            self._access = AccessTable(grants, self._roles())
        return self._access

    @property
    def quota_table(self) -> QuotaTable:
        """Return the limits by subject: the same object until quotas or memberships change."""
        if self._quota_table is None:
            limits = {subject: row.limits for subject, row in self.quotas.items()}
            self._quota_table = QuotaTable(limits, self._roles())
        return self._quota_table

    def _roles(self) -> dict[str, list[str]]:
        roles: dict[str, list[str]] = {}
        for role, user in sorted(self.memberships):
            roles.setdefault(user, []).append(role)
        return roles

    @property
    def index(self) -> Index:
        """Return the log index of the view."""
        return self.position.index

    @property
    def cluster_id(self) -> str:
        """Return the cluster's id; empty before it is formed."""
        return self.counters.cluster_id

    @property
    def feature_level(self) -> int:
        """Return the cluster's feature level."""
        return self.counters.feature_level

    def topic(self, name: str) -> TopicRow | None:
        """Return the active topic of a name."""
        topic_id = self.topics_by_name.get(name)
        return None if topic_id is None else self.topics[topic_id]

    def consumer(self, name: str) -> ConsumerRow | None:
        """Return the consumer of a name."""
        consumer_id = self.consumers_by_name.get(name)
        return None if consumer_id is None else self.consumers[consumer_id]

    def topic_made_by(self, request_id: str, name: str) -> TopicRow | None:
        """Return the topic that a request created, even if it was deleted since."""
        return find_made_topic(self.topics, request_id=request_id, name=name)

    def active_topics(self) -> list[TopicRow]:
        """Return the active topics, sorted by name."""
        return [self.topics[self.topics_by_name[name]] for name in sorted(self.topics_by_name)]

    def deleted_topics(self) -> list[TopicRow]:
        """Return the deleted topics that can be restored, sorted by id."""
        return [topic for _, topic in sorted(self.topics.items()) if topic.state is TopicState.DELETED]

    def partitions_of(self, topic_id: TopicId) -> list[PartitionRow]:
        """Return a topic's partitions in order."""
        topic = self.topics[topic_id]
        return [self.partitions[topic_id, PartitionId(number)] for number in range(topic.partitions)]

    def partitions_on(self, broker_id: NodeId) -> list[PartitionRow]:
        """Return the partitions that have a voter or learner on a broker."""
        return [partition for _, partition in sorted(self.partitions.items()) if partition.is_on(broker_id)]

    def has_consumers(self, topic_id: TopicId) -> bool:
        """Return whether a consumer is registered for a topic, or for some of its partitions."""
        return self._consumer_index.has_consumers(topic_id)

    def consumers_on(self, topic_id: TopicId, partition_id: PartitionId) -> PartitionConsumers:
        """Return the consumers registered for a partition, or for its whole topic; costs the same for any number."""
        return self._consumer_index.consumers_on(topic_id, partition_id)

    def members_of(self, group_id: ConsumerId) -> tuple[GroupMemberRow, ...]:
        """Return the members of a consumer group, sorted by id."""
        if self._members_by_group is None:
            grouped: dict[ConsumerId, list[GroupMemberRow]] = {}
            for key in sorted(self.group_members):
                grouped.setdefault(key[0], []).append(self.group_members[key])
            self._members_by_group = {id_: tuple(found) for id_, found in grouped.items()}
        return self._members_by_group.get(group_id, ())

    def gone_producers(self, ids: Iterable[ProducerId]) -> list[ProducerId]:
        """Return those of these producers that were registered and are not any more: an id is never reused."""
        producers, next_id = self.producers, self.counters.next_producer_id
        return [id_ for id_ in ids if id_ not in producers and id_ < next_id]

    def gone_consumers(self, ids: Iterable[ConsumerId]) -> list[ConsumerId]:
        """Return those of these consumers that were registered and are not any more."""
        consumers, next_id = self.consumers, self.counters.next_consumer_id
        return [id_ for id_ in ids if id_ not in consumers and id_ < next_id]

    def held_offset(self, topic_id: TopicId, partition_id: PartitionId) -> Offset | None:
        """Return the lowest held offset of a partition; None without holds."""
        if self._held_offsets is None:
            self._held_offsets = _gather_holds(self.holds)
        return self._held_offsets.get((topic_id, partition_id))

    def last_seen_ms(self, kind: EntityKind, id_: int) -> int | None:
        """Return the time of the last recorded heartbeat."""
        heartbeat = self.heartbeats.get((kind, id_))
        return None if heartbeat is None else heartbeat.last_seen_ms

    def rows(self) -> Iterator[AnyRow]:
        """Yield every row, table by table, sorted by key."""
        for row_type in ROW_TYPES:
            table: Mapping[Any, AnyRow] = getattr(self, row_type.table.value)
            for key in sorted(table):
                yield table[key]

    def encode(self) -> bytes:
        """Return the view as bytes, its position included; equal views give equal bytes."""
        return b"".join(self.encode_steps())

    def encode_steps(self) -> Iterator[bytes]:
        """Yield the bytes of `encode` in parts, each made in a small step."""
        return self._encode_steps(self.position)

    def digest(self) -> str:
        """Return a hash of everything except the position: equal on all members at equal index."""
        return hashlib.sha256(b"".join(self._encode_steps(LogPosition()))).hexdigest()

    def _encode_steps(self, position: LogPosition) -> Iterator[bytes]:
        level, encode = self.feature_level, msgspec.msgpack.encode
        empty = {table.value: NO_ROWS for table in Table}
        saved = shrink(_Snapshot(position=position, counters=self.counters, **empty), level)
        fields = saved if isinstance(saved, dict) else msgspec.structs.asdict(saved)
        # Its version is the cluster's feature level: every node can read the snapshot of every other.
        yield bytes((level,)) + map_header(len(fields))
        for name, value in fields.items():
            table: Mapping[Any, AnyRow] = getattr(self, name) if name in empty else {}
            yield encode(name) + (array_header(len(table)) if name in empty else encode(value))
            if isinstance(table, BucketTable):  # sorted already, bucket by bucket
                yield from encode_rows(shrink(row, level) for row in table.values())
            else:
                yield from encode_sorted(table, lambda key, table=table: shrink(table[key], level))  # type: ignore[misc] # bound early


_AnyTable = dict[Any, Any] | BucketTable[Any, Any]
_CLIENTS = (Table.PRODUCERS, Table.CONSUMERS)


def _make_table(table: Table) -> _AnyTable:
    """Return an empty table: in buckets where there may be as many rows as clients."""
    if table is Table.HEARTBEATS:
        return BucketTable[Any, Any](by_kind_and_id)
    return BucketTable[Any, Any](by_id) if table in _CLIENTS else {}


class MetadataState:
    """The current metadata. Only `apply_changes` and `advance_to` change it."""

    __slots__ = (
        "_shared",
        "_view",
        "assigned",
        "consumer_index",
        "counters",
        "members",
        "names",
        "owned",
        "position",
        "shown",
        "tables",
    )

    def __init__(
        self, rows: Iterable[AnyRow] = (), *, counters: Counters | None = None, position: LogPosition | None = None
    ) -> None:
        self.counters = counters or Counters()
        self.position = position or LogPosition()
        self.tables: dict[Table, _AnyTable] = {table: _make_table(table) for table in Table}
        self.names: dict[Table, _AnyTable] = {
            table: BucketTable(by_name) if table in _CLIENTS else {} for table in Table
        }
        """Keys by secondary name: see `_name`."""
        self.consumer_index = ConsumerIndex()
        """The consumers by what they are registered for."""
        self.owned: dict[tuple[Table, str], int] = {}
        """What each principal owns, by table: producers, consumers, topics, and partitions of its topics."""
        self.members: dict[ConsumerId, set[str]] = {}
        """The members of each consumer group that has any, by id."""
        self.assigned = 0
        """Partitions that members of groups own, of all groups together."""
        self._view: View | None = None
        self.shown: View | None = None
        """The view of the current state; None until `view` makes it."""
        self._shared: set[Table] = set()
        for row in rows:
            self._put(row)

    @classmethod
    def decode(cls, data: bytes, *, level_max: int = LEVEL_MAX) -> MetadataState:
        """Return the state that `View.encode` encoded; empty bytes mean the initial state.

        Raises:
            UnknownVersionError: a newer program wrote the snapshot.
            DecodeError: the bytes are no snapshot.
        """
        state = cls()
        for _ in state.decode_steps(data, level_max=level_max):
            pass
        return state

    def decode_steps(self, data: bytes, *, level_max: int = LEVEL_MAX) -> Iterator[None]:
        """Fill this new state as `decode` does, in small steps; not to be used before the last of them."""
        if not data:
            return
        if not LEVEL_MIN <= data[0] <= level_max:
            raise UnknownVersionError(
                f"a metadata snapshot of version {data[0]}, but this program reads versions {LEVEL_MIN} to "
                f"{level_max}: upgrade this node"
            )
        try:
            saved = _snapshot_decoder.decode(memoryview(data)[1:])
            yield
            for table in Table:
                encoded = _table_decoder.decode(getattr(saved, table.value))
                for first in range(0, len(encoded), SLICE_ROWS):
                    rows = encoded[first : first + SLICE_ROWS]
                    for row in _rows_decoders[table].decode(array_header(len(rows)) + b"".join(rows)):
                        self._put(row)
                    yield
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise DecodeError(f"a metadata snapshot that cannot be read: {error}") from None
        self.counters, self.position = saved.counters, saved.position

    def view(self) -> View:
        """Return an immutable view of the current state."""
        if self.shown is None:
            self.shown = self._view = View(self, self._view)
            self._shared = set(Table)
        return self.shown

    def advance_to(self, position: LogPosition) -> None:
        """Record that the log is applied up to a position."""
        self.position = position
        self.shown = None

    def apply_changes(self, changes: Sequence[Change], counters: Counters) -> None:
        """Apply row changes and new counters."""
        self.counters = counters
        self.shown = None
        for change in changes:
            if change.table in self._shared:
                self._shared.remove(change.table)
                self.tables[change.table] = self.tables[change.table].copy()
                self.names[change.table] = self.names[change.table].copy()
                if change.table is Table.CONSUMERS:
                    self.consumer_index = self.consumer_index.copy()
            if change.row is None:
                self._drop(change.table, change.key)
            else:
                self._put(change.row)

    def _put(self, row: AnyRow) -> None:
        table, names = self.tables[row.table], self.names[row.table]
        old, name = table.get(row.key), _name(row)
        if old is not None and _name(old) != name:
            names.pop(_name(old), None)
        if name:
            names[name] = row.key
        if old is not None:
            self._count_owned(old, -1)
        self._count_owned(row, 1)
        if isinstance(row, ConsumerRow):
            self.consumer_index.replace(old, row)
        if isinstance(row, GroupMemberRow):
            self.members.setdefault(row.group_id, set()).add(row.member_id)
            self.assigned += len(row.owned) - (0 if old is None else len(old.owned))
        table[row.key] = row  # not delete and insert: copying a dict without gaps is several times faster

    def _drop(self, table: Table, key: object) -> None:
        row = self.tables[table].pop(key, None)
        if row is not None:
            self.names[table].pop(_name(row), None)
            self._count_owned(row, -1)
            if isinstance(row, ConsumerRow):
                self.consumer_index.replace(row, None)
            if isinstance(row, GroupMemberRow):
                self.assigned -= len(row.owned)
                self.members[row.group_id].discard(row.member_id)
                if not self.members[row.group_id]:
                    del self.members[row.group_id]

    def _count_owned(self, row: AnyRow, times: int) -> None:
        if not isinstance(row, TopicRow | ProducerRow | ConsumerRow) or not row.owner:
            return
        counts = {row.table: 1}
        if isinstance(row, TopicRow):
            counts[Table.PARTITIONS] = row.partitions
        for table, count in counts.items():
            key = (table, row.owner)
            self.owned[key] = self.owned.get(key, 0) + times * count
            if not self.owned[key]:
                del self.owned[key]


def _name(row: AnyRow) -> str:
    """Return the secondary name of a row; empty if it has none."""
    match row:
        case TopicRow(state=TopicState.ACTIVE):
            return row.name
        case ProducerRow():
            return row.name
        case ConsumerRow():
            return row.request_id
        case _:
            return ""


def find_made_topic(topics: Mapping[TopicId, TopicRow], *, request_id: str, name: str) -> TopicRow | None:
    """Return the topic of that name that a request created: a repeated request creates no second one.

    A deleted topic counts, too: the deletion came after the first attempt, and a second topic would undo it.
    """
    if not request_id:
        return None
    made = (topic for topic in topics.values() if topic.request_id == request_id and topic.name == name)
    return min(made, key=lambda topic: topic.topic_id, default=None)


def _gather_holds(holds: Mapping[Any, HoldRow]) -> dict[tuple[TopicId, PartitionId], Offset]:
    """Return the lowest held offset of each partition."""
    lowest: dict[tuple[TopicId, PartitionId], Offset] = {}
    for hold in holds.values():
        for position in hold.positions:
            key = (hold.topic_id, position.partition_id)
            lowest[key] = Offset(min(position.first_offset, lowest.get(key, position.first_offset)))
    return lowest
