"""The write-ahead log for people, and whether managers agree."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from metadata_commands import commands
from metadata_world import (
    NOW_MS,
    change_state,
    create_topic,
    do,
    formed_state,
    init_cluster,
    register_broker,
    register_consumer,
    register_producer,
    select,
)

from quiver.metadata.commands import (
    CONTROL_STATE,
    AnyCommand,
    Beat,
    BeginMove,
    ForgetBroker,
    PurgeTopic,
    RecordHeartbeats,
    ReportLeaders,
    encode_command,
)
from quiver.metadata.comparison import compare
from quiver.metadata.journal import describe, read_journal
from quiver.metadata.rows import BrokerState, EntityKind
from quiver.metadata.state import Counters, LogPosition, MetadataState
from quiver.model import ConsumerId, Index, NodeId, Offset, PartitionId, Term, TopicId
from quiver.record import Batch, build_control_batch, stamp


def stamped(data: bytes, index: int) -> Batch:
    made = stamp(data, term=Term(2), index=Index(index), base_offset=Offset(0), append_timestamp=NOW_MS + index)
    return Batch.decode(made)


def log() -> list[Batch]:
    unknown = build_control_batch(bytes((CONTROL_STATE, 9)), timestamp=1)
    entries = [
        build_control_batch(b"\x01", timestamp=1),
        encode_command(init_cluster()),
        encode_command(register_broker(3)),
        unknown,
    ]
    return [stamped(entry, index) for index, entry in enumerate(entries, start=1)]


def test_journal_tells_every_entry() -> None:
    rows = list(read_journal(log(), applied_index=Index(2)))
    assert [(row.index, row.request, row.broker, row.is_applied) for row in rows] == [
        (1, "-", None, True),
        (2, "init_cluster", None, True),
        (3, "register_broker", 3, False),
        (4, "unreadable", None, False),
    ]
    assert [row.subject for row in rows[:3]] == ["", "cluster c1", "at host3:9002"]
    assert "version 9" in rows[3].subject
    assert (rows[2].time_ms, rows[2].term) == (NOW_MS + 3, 2)


def test_journal_can_tell_only_what_is_pending() -> None:
    assert [row.index for row in read_journal(log(), applied_index=Index(2), only_pending=True)] == [3, 4]


@pytest.mark.parametrize(
    ("command", "subject", "broker"),
    [
        (change_state(2, BrokerState.DEAD), "dead", 2),
        (ForgetBroker(now_ms=1, broker_id=NodeId(2)), "", 2),
        (create_topic(), "topic logs, 2 partitions", None),
        (PurgeTopic(now_ms=1, topic_id=TopicId(7)), "topic id 7", None),
        (ReportLeaders(now_ms=1, reports=()), "0 partitions", None),
        (RecordHeartbeats(now_ms=1, beats=(Beat(EntityKind.BROKER, 1, 1),)), "1 heartbeats", None),
        (register_producer(name="p"), "producer p of logs", None),
        (register_consumer(select("a"), select("b"), consumer_id=ConsumerId(4)), "consumer 4 of a, b", None),
        (
            BeginMove(now_ms=1, topic_id=TopicId(7), partition_id=PartitionId(1), target=NodeId(3)),
            "partition 1 of topic id 7 from nowhere",
            3,
        ),
        (
            BeginMove(now_ms=1, topic_id=TopicId(7), partition_id=PartitionId(1), source=NodeId(2), target=NodeId(3)),
            "partition 1 of topic id 7 from broker 2",
            3,
        ),
    ],
)
def test_commands_are_described_in_a_few_words(command: AnyCommand, subject: str, broker: int | None) -> None:
    assert describe(command) == (subject, broker)


@settings(deadline=None)
@given(commands())
def test_every_command_can_be_described(command: AnyCommand) -> None:
    subject, _ = describe(command)
    assert "\n" not in subject


def view_at(index: int, **changed: Any) -> MetadataState:
    state = formed_state()
    state.advance_to(LogPosition(Index(index), Term(1)))
    if changed:
        do(state, register_broker(3, **changed))
    return state


def test_managers_at_one_index_are_equal_or_told_apart() -> None:
    same = compare({"a": view_at(5).view(), "b": view_at(5).view(), "c": view_at(6, rack="r").view()})
    assert same.is_equal
    assert [item.index for item in same.compared] == [5, 5, 6]
    found = compare({"a": view_at(5).view(), "b": view_at(5, rack="r", now_ms=NOW_MS + 1).view()})
    assert not found.is_equal
    assert [(item.table, item.key) for item in found.differences] == [("brokers", "3"), ("heartbeats", "broker/3")]
    assert {(item.first, item.second, item.index) for item in found.differences} == {("a", "b", 5)}


def test_counters_are_compared_too() -> None:
    one, other = view_at(5), view_at(5)
    other.apply_changes((), Counters(cluster_id="c1"))
    found = compare({"a": one.view(), "b": other.view()})
    assert [(item.table, item.key) for item in found.differences] == [("meta", "counters")]
