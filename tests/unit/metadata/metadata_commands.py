"""Random commands of every kind, over few names and ids so that they often meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from hypothesis import strategies as st

from quiver.features import LEVEL_MAX, LEVEL_MIN
from quiver.groups.settings import QueueSettings
from quiver.metadata.commands import (
    AnyCommand,
    Beat,
    LeaderReport,
    NodeLevel,
    RecoveredPartition,
    SilentClient,
    TopicSelection,
)
from quiver.metadata.group_commands import (
    GroupMember,
    GroupPartition,
    JoinGroupCommand,
    PartitionGrant,
    PartitionRelease,
)
from quiver.metadata.rows import (
    ALL_ROLES,
    BrokerState,
    EntityKind,
    GroupKind,
    HoldPosition,
    OwnedKind,
    Retention,
    StartFrom,
)
from quiver.model import SESSION_BITS, PartitionId
from quiver.security.limits import QuotaLimits
from quiver.security.permissions import Grant, ResourceKind, Verb
from quiver.security.scram import ScramVerifier

SMALL = st.integers(0, 4)
TIMES = st.integers(0, 50)
TOPICS = st.sampled_from(["logs", "audit", "metrics", ".."])
USERS = st.sampled_from(["alice", "alice", "bob", "no user"])
VERIFIER = ScramVerifier(salt="00" * 16, iterations=4096, stored_key="1" * 64, server_key="2" * 64)
MEMBERS = st.sampled_from(["", "m1", "m1", "m2"])
LEVEL = st.integers(LEVEL_MIN, LEVEL_MAX)
NUMBERS = st.none() | st.integers(0, 10)


def tuples(items: st.SearchStrategy[Any], **bounds: Any) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, **bounds).map(tuple)


GOOD_ASSIGNMENTS = tuples(tuples(st.integers(1, 3), min_size=1, max_size=2, unique=True), min_size=1, max_size=3)
HELD = st.dictionaries(SMALL, SMALL, max_size=2).map(
    lambda held: tuple(HoldPosition(partition_id=PartitionId(part), first_offset=held[part]) for part in sorted(held))
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "now_ms": TIMES,
    "purge_ms": TIMES,
    "cluster_id": st.sampled_from(["c1", "c1", "c1", "c2", ""]),
    "feature_level": LEVEL,
    "nodes": tuples(st.builds(NodeLevel, node=SMALL, level=LEVEL), max_size=5),
    "lost": tuples(st.integers(1, 4), max_size=2),
    "recovered": tuples(
        st.builds(
            RecoveredPartition,
            topic_id=SMALL,
            partition_id=SMALL,
            replicas=tuples(st.integers(1, 4), max_size=2),
            is_recreated=st.booleans(),
        ),
        max_size=2,
    ),
    "broker_id": SMALL,
    "identity": st.sampled_from(["i", "i", "i", "other", ""]),
    "wire_address": st.sampled_from(["host:1", "host:2", ""]),
    "http_address": st.sampled_from(["", "host:3"]),
    "roles": tuples(st.sampled_from(ALL_ROLES), max_size=3),
    "is_rebalancing": st.booleans(),
    "is_encrypted": st.booleans(),
    "leader": SMALL,
    "rack": st.sampled_from(["", "r"]),
    "state": st.sampled_from(list(BrokerState)),
    "topic": TOPICS,
    "topic_id": SMALL,
    "partition_id": SMALL,
    "replicas": st.integers(0, 3),
    "assignments": GOOD_ASSIGNMENTS | tuples(tuples(st.integers(1, 4), max_size=3), max_size=3),
    "retention": st.builds(Retention, ms=NUMBERS, bytes=NUMBERS, until_consumed=st.booleans()),
    "request_id": st.sampled_from(["", "r1", "r2"]),
    "partitions": st.integers(0, 6),
    "reports": tuples(
        st.builds(LeaderReport, topic_id=SMALL, partition_id=SMALL, leader=SMALL, epoch=SMALL), max_size=3
    ),
    "target": SMALL,
    "source": st.none() | SMALL,
    "move_id": SMALL,
    "topics": tuples(st.builds(TopicSelection, topic=TOPICS, partitions=tuples(SMALL, max_size=2)), max_size=2),
    "name": st.sampled_from(["", "p", "q"]),
    "producer_id": st.none() | SMALL,
    "consumer_id": st.none() | SMALL,
    "start": st.sampled_from(list(StartFrom)),
    "kind": st.sampled_from(list(EntityKind)),
    "id": SMALL,
    "positions": HELD,
    "lasting_ms": st.sampled_from([0, 1_000, 2_000]),
    "owner": st.sampled_from(["", "me", "user:alice", "user:bob"]),
    "owned": st.sampled_from(list(OwnedKind)),
    "clients": tuples(
        st.builds(SilentClient, kind=st.sampled_from(list(EntityKind)), id=SMALL, last_seen_ms=TIMES, epoch=SMALL),
        max_size=3,
    ),
    "principal": st.sampled_from(["", "user:alice", "user:bob"]),
    "takes_over": st.booleans(),
    "user": USERS,
    "is_enabled": st.none() | st.booleans(),
    "verifier": st.none() | st.just(VERIFIER),
    "token_id": st.sampled_from(["0" * 16, "1" * 16, "2" * 16, "x"]),
    "secret_hash": st.sampled_from(["0" * 64, "1" * 64, "x"]),
    "expires_ms": st.none() | TIMES,
    "role": st.sampled_from(["ops", "dev", "admin", "no role"]),
    "is_member": st.booleans(),
    "grant": st.builds(
        Grant,
        subject=st.sampled_from(["user:alice", "user:bob", "role:ops", "anonymous", "node:1", "x"]),
        verb=st.sampled_from(Verb),
        kind=st.sampled_from(ResourceKind),
        name=st.sampled_from(["", "logs", "a\x01"]),
        is_prefix=st.booleans(),
    ),
    "subject": st.sampled_from(["user:alice", "role:ops", "default", "anonymous", "topic:logs", "topic:*", "x"]),
    "limits": st.builds(
        QuotaLimits,
        requests_per_second=NUMBERS,
        topics_max=NUMBERS,
        registrations_max=NUMBERS,
        weight=st.none() | st.integers(1, 1000),
    ),
    "group": st.sampled_from(["", "r1", "r1", "r2", "x"]),
    "group_id": st.integers(0, 3),
    "member_id": MEMBERS,
    "members": tuples(st.builds(GroupMember, group_id=st.integers(0, 3), member_id=MEMBERS), max_size=2),
    "pattern": st.sampled_from(["", "*"]),
    "instance": st.sampled_from(["", "", "i1", "i2"]),
    "session_timeout_ms": st.sampled_from([0, 1_000, 10_000]),
    "group_kind": st.sampled_from([None, *[GroupKind.STREAM] * 4, GroupKind.QUEUE]),
    "client": st.sampled_from(["", "host"]),
    "reason": st.sampled_from(["", "left", "expired"]),
    "version": SMALL,
    "grants": tuples(st.builds(PartitionGrant, member_id=MEMBERS, topic_id=SMALL, partition_id=SMALL), max_size=3),
    "revokes": tuples(st.builds(GroupPartition, topic_id=SMALL, partition_id=SMALL), max_size=2),
    "drops": tuples(st.builds(GroupPartition, topic_id=SMALL, partition_id=SMALL), max_size=1),
    "releases": tuples(
        st.builds(
            PartitionRelease,
            group_id=st.integers(0, 3),
            member_id=MEMBERS,
            topic_id=SMALL,
            partition_id=SMALL,
            epoch=SMALL.map(lambda index: index << SESSION_BITS),
        ),
        max_size=2,
    ),
    "settings": st.none() | st.builds(QueueSettings, lease_ms=st.integers(1, 3), backoff_multiplier=st.just(1.7)),
    "is_forced": st.booleans(),
    "pause_ms": st.sampled_from([0, 5, 10**7]),
    "beats": tuples(st.builds(Beat, kind=st.sampled_from(list(EntityKind)), id=SMALL, last_seen_ms=TIMES), max_size=3),
}


def commands(among: Any = AnyCommand) -> st.SearchStrategy[AnyCommand]:
    """Return a strategy over every kind of a union of commands; a kind that is added later is drawn, too."""
    kinds: Sequence[type[AnyCommand]] = get_args(among)
    return st.one_of([_of_kind(kind) for kind in kinds])


def _of_kind(kind: type[AnyCommand]) -> st.SearchStrategy[AnyCommand]:
    names = [field.name for field in msgspec.structs.fields(kind)]
    fields = {name: FIELDS[name] for name in names}
    if kind is JoinGroupCommand:
        fields["group_kind"] = fields["group_kind"].map(lambda found: found or GroupKind.STREAM)
        fields["topics"] = fields["topics"].map(lambda found: tuple(TopicSelection(one.topic) for one in found))
    return st.builds(kind, **fields)
