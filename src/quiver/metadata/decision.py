"""The decision about a command, its refusal by stable code, and the lookups that several commands share.

Pure. A decision lists the rows that change and modifies nothing. Refusing is part of `apply`: every member refuses the
same command with the same code, and a refused command changes nothing. The class of the error says what a caller
should do: the thing does not exist (`NotFoundError`), it is not possible in the present state (`ConflictError`), the
request is invalid in any state (`OutOfRangeError`), or the thing belongs to somebody else (`NotAllowedError`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from quiver.errors import ConflictError, NotAllowedError, NotFoundError, OutOfRangeError, RequestError
from quiver.metadata.commands import CommandResult
from quiver.metadata.rows import BrokerRow, BrokerState, EntityKind, HeartbeatRow, PartitionRow, Table, TopicRow
from quiver.metadata.state import Change, Counters, MetadataState, put
from quiver.model import NodeId


class CommandDecision(msgspec.Struct):
    """The effect of a command: changed rows, changed counters, and a result other than the number of changes."""

    changes: list[Change] = msgspec.field(default_factory=list)
    counters: Counters | None = None
    result: CommandResult | None = None


class CommandRefusal(msgspec.Struct, frozen=True):
    """A refusal as the value that `apply` returns."""

    code: str
    message: str

    def error(self) -> RequestError:
        """Return the error that the proposer gets."""
        return _CLASSES.get(self.code, RequestError)(self.message, code=self.code)


_NOT_FOUND = (
    "unknown_topic",
    "unknown_partition",
    "unknown_broker",
    "unknown_producer",
    "unknown_consumer",
    "unknown_move",
    "unknown_user",
    "unknown_role",
    "unknown_token",
    "unknown_grant",
    "unknown_quota",
    "unknown_group",
)
_CONFLICTS = (
    "not_formed",
    "cluster_exists",
    "broker_exists",
    "broker_removed",
    "broker_not_eligible",
    "bad_transition",
    "not_drained",
    "topic_exists",
    "topic_deleted",
    "topic_not_deleted",
    "too_early",
    "already_replica",
    "not_replica",
    "move_in_progress",
    "move_promoted",
    "move_not_promoted",
    "too_many_holds",
    "feature_level",
    "nodes_too_old",
    "user_exists",
    "role_exists",
    "token_exists",
    "too_many_users",
    "too_many_roles",
    "too_many_tokens",
    "too_many_grants",
    "too_many_clients",
    "too_many_quotas",
    "quota_topics",
    "quota_partitions",
    "quota_registrations",
    "group_active",
    "group_kind",
    "group_changed",
    "too_many_groups",
    "too_many_members",
    "too_many_assignments",
)
_OUT_OF_RANGE = (
    "bad_cluster_id",
    "bad_broker",
    "bad_topic_name",
    "bad_partition_count",
    "bad_replica_count",
    "bad_assignment",
    "bad_retention",
    "bad_name",
    "no_topics",
    "bad_hold",
    "bad_command",
    "bad_token",
    "bad_grant",
    "bad_quota",
    "bad_group",
)
_NOT_ALLOWED = ("not_owner",)


_CLASSES: dict[str, type[RequestError]] = {
    code: kind
    for kind, codes in (
        (NotFoundError, _NOT_FOUND),
        (ConflictError, _CONFLICTS),
        (OutOfRangeError, _OUT_OF_RANGE),
        (NotAllowedError, _NOT_ALLOWED),
    )
    for code in codes
}

REFUSAL_CODES = frozenset(_CLASSES)
"""Every code that a refusal can have."""


def refuse(code: str, message: str) -> CommandRefusal:
    """Return a refusal; the code must be in `REFUSAL_CODES`."""
    assert code in REFUSAL_CODES, code
    return CommandRefusal(code, message)


def find_broker(state: MetadataState, broker_id: NodeId) -> BrokerRow | CommandRefusal:
    """Return a registered broker that is not removed, or why there is none."""
    broker: BrokerRow | None = state.tables[Table.BROKERS].get(broker_id)
    if broker is None:
        return refuse("unknown_broker", f"not done: unknown broker {broker_id}")
    if broker.state is BrokerState.REMOVED:
        return refuse("broker_removed", f"not done: broker {broker_id} was removed; a node joins again with a new id")
    return broker


def find_topic(state: MetadataState, name: str) -> TopicRow | CommandRefusal:
    """Return the active topic of a name, or why there is none."""
    topic_id = state.names[Table.TOPICS].get(name)
    if topic_id is None:
        return refuse("unknown_topic", f"not done: unknown topic {name!r}")
    topic: TopicRow = state.tables[Table.TOPICS][topic_id]
    return topic


def check_assignment(state: MetadataState, brokers: Sequence[NodeId], *, replicas_max: int) -> CommandRefusal | None:
    """Return why a partition cannot be placed on these brokers; None if it can."""
    if not brokers or len(set(brokers)) != len(brokers) or len(brokers) > replicas_max:
        message = f"not done: a partition needs 1 to {replicas_max} different brokers, not {list(brokers)}"
        return refuse("bad_assignment", message)
    for broker_id in brokers:
        broker = find_broker(state, broker_id)
        if isinstance(broker, CommandRefusal):
            return broker
        if not broker.is_eligible:
            message = f"not done: broker {broker_id} is {broker.state.value}, draining or not a broker by its roles"
            return refuse("broker_not_eligible", message)
    return None


def beat(state: MetadataState, kind: EntityKind, id_: int, seen_ms: int) -> Iterator[Change]:
    """Yield the change that records a heartbeat, unless a newer one is recorded."""
    known: HeartbeatRow | None = state.tables[Table.HEARTBEATS].get((kind, id_))
    if known is None or known.last_seen_ms < seen_ms:
        yield put(HeartbeatRow(kind=kind, id=id_, last_seen_ms=seen_ms))


def drop_beat(kind: EntityKind, id_: int) -> Change:
    """Return the change that deletes a heartbeat; every registered sender has one."""
    return Change(Table.HEARTBEATS, (kind, id_), None)


def sorted_partitions(state: MetadataState) -> Iterator[PartitionRow]:
    """Yield every partition, ordered by topic id and partition id."""
    partitions: Mapping[object, PartitionRow] = state.tables[Table.PARTITIONS]
    for key in sorted(partitions):  # type: ignore[type-var]
        yield partitions[key]
