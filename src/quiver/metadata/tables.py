"""The current SQL tables of the metadata, and the mapping between rows and tables.

`migrations` creates the tables; a test checks that both agree. Nested parts of a row (a partition's replicas, a
client's registrations) have a child table, so that people can query them. There are no foreign keys: `apply` has
checked every reference, and a constraint could only stop a correct node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import msgspec
from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, MetaData, Table, Text

from quiver.metadata import rows
from quiver.metadata.rows import AnyRow, EntityKind
from quiver.security.limits import QuotaLimits

Values = dict[str, Any]
"""One SQL row: plain values by column."""

METADATA = MetaData()


def _number(name: str, *, key: bool = False, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, primary_key=key, nullable=nullable, autoincrement=False)


def _text(name: str, *, key: bool = False, nullable: bool = False) -> Column[str]:
    return Column(name, Text, primary_key=key, nullable=nullable)


def _flag(name: str) -> Column[bool]:
    return Column(name, Boolean, nullable=False)


meta = Table(
    "meta",
    METADATA,
    Column("singleton", Integer, primary_key=True, autoincrement=False),
    Column("schema_version", Integer, nullable=False),
    _number("applied_index"),
    _number("applied_term"),
    _text("cluster_id"),
    _number("formed_ms"),
    _number("next_topic_id"),
    _number("next_group_id"),
    _number("next_producer_id"),
    _number("next_consumer_id"),
    _number("next_move_id"),
    _flag("is_rebalancing"),
    _number("feature_level"),
    Column("migrated_version", Integer, nullable=False),
    _number("session_base"),
)
"""One row: the log position and the counters. Written in every transaction."""

brokers = Table(
    "brokers",
    METADATA,
    _number("broker_id", key=True),
    _text("identity"),
    _text("wire_address"),
    _text("http_address"),
    _text("rack"),
    _text("state"),
    _flag("is_draining"),
    _number("registered_ms"),
    _number("changed_ms"),
    _text("roles"),
)

topics = Table(
    "topics",
    METADATA,
    _number("topic_id", key=True),
    _text("name"),
    _number("partitions"),
    _number("replicas"),
    _number("retention_ms", nullable=True),
    _number("retention_bytes", nullable=True),
    _flag("until_consumed"),
    _text("state"),
    _number("created_ms"),
    _number("purge_ms", nullable=True),
    _text("request_id"),
    _text("owner"),
    _flag("is_encrypted"),
    Index("topics_by_name", "name"),
)

partitions = Table(
    "partitions",
    METADATA,
    _number("topic_id", key=True),
    _number("partition_id", key=True),
    _number("group_id"),
    _number("leader", nullable=True),
    _number("epoch"),
)

replicas = Table(
    "replicas",
    METADATA,
    _number("topic_id", key=True),
    _number("partition_id", key=True),
    _number("broker_id", key=True),
    _text("role"),
    _number("position"),
    Index("replicas_by_broker", "broker_id"),
)

producers = Table(
    "producers",
    METADATA,
    _number("producer_id", key=True),
    _text("name"),
    _number("epoch"),
    _number("registered_ms"),
    _text("owner"),
)

consumers = Table(
    "consumers",
    METADATA,
    _number("consumer_id", key=True),
    _number("registered_ms"),
    _text("request_id"),
    _text("owner"),
)

registrations = Table(
    "registrations",
    METADATA,
    _text("kind", key=True),
    _number("client_id", key=True),
    _number("topic_id", key=True),
    _number("partition_id", key=True),
    _text("start", nullable=True),
    Index("registrations_by_topic", "topic_id"),
)

heartbeats = Table(
    "heartbeats",
    METADATA,
    _text("kind", key=True),
    _number("id", key=True),
    _number("last_seen_ms"),
)

moves = Table(
    "moves",
    METADATA,
    _number("move_id", key=True),
    _number("topic_id"),
    _number("partition_id"),
    _number("source", nullable=True),
    _number("target"),
    _text("state"),
    _number("begun_ms"),
    _number("changed_ms"),
)

holds = Table(
    "holds",
    METADATA,
    _number("topic_id", key=True),
    _text("name", key=True),
    _text("owner"),
    _number("placed_ms"),
    _number("expires_ms"),
    _text("principal"),
)

held_positions = Table(
    "held_positions",
    METADATA,
    _number("topic_id", key=True),
    _text("name", key=True),
    _number("partition_id", key=True),
    _number("first_offset"),
)

users = Table(
    "users",
    METADATA,
    _text("name", key=True),
    _flag("is_enabled"),
    _number("created_ms"),
    _text("salt"),
    _number("iterations"),
    _text("stored_key"),
    _text("server_key"),
)

tokens = Table(
    "tokens",
    METADATA,
    _text("token_id", key=True),
    _text("user_name"),
    _text("secret_hash"),
    _number("created_ms"),
    _number("expires_ms", nullable=True),
)

roles = Table(
    "roles",
    METADATA,
    _text("name", key=True),
    _number("created_ms"),
)

memberships = Table(
    "memberships",
    METADATA,
    _text("role", key=True),
    _text("user_name", key=True),
    _number("added_ms"),
)

grants = Table(
    "grants",
    METADATA,
    _text("subject", key=True),
    _text("verb", key=True),
    _text("kind", key=True),
    _text("name", key=True),
    Column("is_prefix", Boolean, primary_key=True, nullable=False),
    _number("granted_ms"),
)

quotas = Table(
    "quotas",
    METADATA,
    _text("subject", key=True),
    *(_number(name, nullable=True) for name in QuotaLimits.__struct_fields__ if name != "weight"),
    _number("changed_ms"),
    _number("weight", nullable=True),
)
"""A limit that is not set is NULL; 0 is no limit."""

consumer_groups = Table(
    "consumer_groups",
    METADATA,
    _number("group_id", key=True),
    _text("kind"),
    _number("created_ms"),
    _text("settings"),
    _number("version"),
    _number("rebalances"),
    _number("last_rebalance_ms"),
    _text("reason"),
    _number("pause_ms"),
)

group_members = Table(
    "group_members",
    METADATA,
    _number("group_id", key=True),
    _text("member_id", key=True),
    _number("joined_ms"),
    _number("session_timeout_ms"),
    _text("instance"),
    _text("rack"),
    _text("topics"),
    _text("pattern"),
    _text("start"),
    _text("client"),
    _text("principal"),
    _text("replaces"),
    _number("version"),
)

group_partitions = Table(
    "group_partitions",
    METADATA,
    _number("group_id", key=True),
    _text("member_id", key=True),
    _number("topic_id", key=True),
    _number("partition_id", key=True),
    _number("epoch"),
    _flag("is_revoking"),
)


class RowMapping:
    """The mapping of one row type: one row in `table`, and one in `children` for each nested part."""

    children: Table | None = None
    children_all: Mapping[str, str] = {}
    """The columns that select these children where several row types share the child table."""

    def __init__(self, row_type: type[AnyRow], table: Table) -> None:
        self.row_type = row_type
        self.table = table
        self.key_columns = tuple(str(column.name) for column in table.primary_key)

    def key_values(self, key: object) -> Values:
        """Return a row's key by column."""
        parts = key if isinstance(key, tuple) else (key,)
        return dict(zip(self.key_columns, msgspec.to_builtins(parts), strict=True))

    def to_sql(self, row: AnyRow) -> tuple[Values, list[Values]]:
        """Return the values of a row and of its children."""
        values: Values = msgspec.to_builtins(row)
        children = self.split(values)
        parent = self.child_key(values)
        return values, [parent | child for child in children]

    def from_sql(self, found: Iterable[Values], children: Iterable[Values]) -> Iterator[AnyRow]:
        """Yield the rows of these values."""
        by_parent: dict[tuple[Any, ...], list[Values]] = {}
        columns = self.child_columns
        for child in children:
            by_parent.setdefault(tuple([child[name] for name in columns]), []).append(child)
        for values in found:
            self.join(values, by_parent.get(tuple(self.child_key(values).values()), []))
            yield msgspec.convert(values, self.row_type)

    @property
    def child_columns(self) -> tuple[str, ...]:
        """Return the columns that refer to the parent."""
        return tuple(self.child_key(dict.fromkeys(self.key_columns)))

    def child_key(self, values: Values) -> Values:
        """Return the values of the columns that refer to the parent."""
        return {name: values[name] for name in self.key_columns}

    def split(self, values: Values) -> list[Values]:  # noqa: ARG002 - subclasses use it
        """Remove the nested parts from a row's values and return them as child values."""
        return []

    def join(self, values: Values, children: list[Values]) -> None:
        """Put the nested parts back."""


class BrokerMapping(RowMapping):
    """Brokers: the roles are one comma-separated column."""

    def split(self, values: Values) -> list[Values]:
        """Join the roles."""
        values["roles"] = ",".join(values["roles"])
        return []

    def join(self, values: Values, children: list[Values]) -> None:  # noqa: ARG002 - a broker has none
        """Split the roles."""
        values["roles"] = values["roles"].split(",")


class TopicMapping(RowMapping):
    """Topics: the retention is three columns."""

    def split(self, values: Values) -> list[Values]:
        """Flatten the retention."""
        retention = values.pop("retention")
        values["retention_ms"], values["retention_bytes"] = retention["ms"], retention["bytes"]
        values["until_consumed"] = retention["until_consumed"]
        return []

    def join(self, values: Values, children: list[Values]) -> None:  # noqa: ARG002 - a topic has none
        """Nest the retention."""
        ms, size_bytes = values.pop("retention_ms"), values.pop("retention_bytes")
        values["retention"] = {"ms": ms, "bytes": size_bytes, "until_consumed": values.pop("until_consumed")}


class PartitionMapping(RowMapping):
    """Partitions: each replica is a child."""

    children = replicas

    def split(self, values: Values) -> list[Values]:
        """Return the replicas, in their order."""
        return [
            {"broker_id": broker_id, "role": role, "position": position}
            for role, name in _ROLES
            for position, broker_id in enumerate(values.pop(name))
        ]

    def join(self, values: Values, children: list[Values]) -> None:
        """Restore the replicas in order."""
        ordered = sorted(children, key=itemgetter("position"))
        for role, name in _ROLES:
            values[name] = [child["broker_id"] for child in ordered if child["role"] == role]


_ROLES = (("voter", "replicas"), ("learner", "learners"))


class ClientMapping(RowMapping):
    """Producers and consumers: each registration is a child."""

    children = registrations

    def __init__(self, row_type: type[AnyRow], table: Table, kind: EntityKind) -> None:
        super().__init__(row_type, table)
        self._kind = kind.value
        self.children_all = {"kind": kind.value}

    def child_key(self, values: Values) -> Values:
        """Return kind and id."""
        return {"kind": self._kind, "client_id": values[self.key_columns[0]]}

    def split(self, values: Values) -> list[Values]:
        """Return the registrations."""
        found: list[Values] = values.pop("registrations")
        return found

    def join(self, values: Values, children: list[Values]) -> None:
        """Restore the registrations in order."""
        ordered = sorted(children, key=itemgetter("topic_id", "partition_id"))
        values["registrations"] = [{name: child[name] for name in _REGISTRATION} for child in ordered]


_REGISTRATION = ("topic_id", "partition_id", "start")


class HoldMapping(RowMapping):
    """Holds: each position is a child."""

    children = held_positions

    def split(self, values: Values) -> list[Values]:
        """Return the positions."""
        found: list[Values] = values.pop("positions")
        return found

    def join(self, values: Values, children: list[Values]) -> None:
        """Restore the positions in order."""
        ordered = sorted(children, key=itemgetter("partition_id"))
        values["positions"] = [{name: child[name] for name in ("partition_id", "first_offset")} for child in ordered]


class UserMapping(RowMapping):
    """Users: the verifier is four columns, empty without a password."""

    def split(self, values: Values) -> list[Values]:
        """Flatten the verifier."""
        values.update(values.pop("verifier") or _NO_VERIFIER)
        return []

    def join(self, values: Values, children: list[Values]) -> None:  # noqa: ARG002 - a user has none
        """Nest the verifier."""
        verifier = {name: values.pop(name) for name in _NO_VERIFIER}
        values["verifier"] = verifier if verifier["salt"] else None


_NO_VERIFIER: Values = {"salt": "", "iterations": 0, "stored_key": "", "server_key": ""}


class UserReferenceMapping(RowMapping):
    """Rows with a user: the column is `user_name`, since `user` is a word of SQL."""

    def split(self, values: Values) -> list[Values]:
        """Rename the column."""
        values["user_name"] = values.pop("user")
        return []

    def child_key(self, values: Values) -> Values:  # noqa: ARG002 - there are no children
        """Return nothing."""
        return {}

    def join(self, values: Values, children: list[Values]) -> None:  # noqa: ARG002 - there are no children
        """Rename the field."""
        values["user"] = values.pop("user_name")


class QuotaMapping(RowMapping):
    """Quotas: each limit is a column."""

    def split(self, values: Values) -> list[Values]:
        """Flatten the limits."""
        values.update(dict.fromkeys(QuotaLimits.__struct_fields__) | values.pop("limits"))
        return []

    def join(self, values: Values, children: list[Values]) -> None:  # noqa: ARG002 - a quota has none
        """Nest the limits."""
        values["limits"] = {name: values.pop(name) for name in QuotaLimits.__struct_fields__}


class GroupMapping(RowMapping):
    """Groups: the settings of a queue are one column of JSON, those that are not the default."""

    def split(self, values: Values) -> list[Values]:
        """Encode the settings."""
        values["settings"] = msgspec.json.encode(values["settings"], order="sorted").decode()
        return []

    def join(self, values: Values, children: list[Values]) -> None:  # noqa: ARG002 - a group has none
        """Decode the settings."""
        values["settings"] = msgspec.json.decode(values["settings"])


class GroupMemberMapping(RowMapping):
    """Members of groups: each partition is a child; the topics are one comma-separated column."""

    children = group_partitions

    def split(self, values: Values) -> list[Values]:
        """Join the topics; return the partitions."""
        values["topics"] = ",".join(values["topics"])
        found: list[Values] = values.pop("owned")
        return found

    def join(self, values: Values, children: list[Values]) -> None:
        """Split the topics; restore the partitions in order."""
        values["topics"] = values["topics"].split(",") if values["topics"] else []
        ordered = sorted(children, key=itemgetter("topic_id", "partition_id"))
        values["owned"] = [{name: child[name] for name in rows.OwnedPartition.__struct_fields__} for child in ordered]


ROW_MAPPINGS: tuple[RowMapping, ...] = (
    BrokerMapping(rows.BrokerRow, brokers),
    TopicMapping(rows.TopicRow, topics),
    PartitionMapping(rows.PartitionRow, partitions),
    ClientMapping(rows.ProducerRow, producers, EntityKind.PRODUCER),
    ClientMapping(rows.ConsumerRow, consumers, EntityKind.CONSUMER),
    RowMapping(rows.HeartbeatRow, heartbeats),
    RowMapping(rows.MoveRow, moves),
    HoldMapping(rows.HoldRow, holds),
    UserMapping(rows.UserRow, users),
    UserReferenceMapping(rows.TokenRow, tokens),
    RowMapping(rows.RoleRow, roles),
    UserReferenceMapping(rows.MembershipRow, memberships),
    RowMapping(rows.GrantRow, grants),
    QuotaMapping(rows.QuotaRow, quotas),
    GroupMapping(rows.GroupRow, consumer_groups),
    GroupMemberMapping(rows.GroupMemberRow, group_members),
)
"""Every row type, in the order in which tables are written."""
