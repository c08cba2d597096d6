"""`quiver explain`: what follows from the answers of a partition's nodes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quiver.cli.explain import print_explanation
from quiver.client.explanation import PartitionExplanation, explain
from quiver.errors import QuiverError, UnavailableError
from quiver.model import GroupId, Index, NodeId, Offset, PartitionId, TopicId
from quiver.wire.explain_messages import FollowerInfo, ObstacleInfo, ReplicaEventInfo, ReplicaExplained
from quiver.wire.messages import NodeInfo, PartitionInfo, RetentionInfo, TopicInfo

NODES = (NodeId(1), NodeId(2), NodeId(3))
ROW = PartitionInfo(
    partition_id=PartitionId(0), group=GroupId(2), replicas=NODES, learners=(), leader=NodeId(1), epoch=3
)
TOPIC = TopicInfo(
    topic="logs", topic_id=TopicId(1), replicas=3, partitions=(ROW,), retention=RetentionInfo(), created_ms=0
)


def follower(node: int, **changes: Any) -> ReplicaExplained:
    one = ReplicaExplained(
        node=NodeId(node), state="open", role="follower", epoch=3, leader=NodeId(1), log_end_offset=Offset(90)
    )
    return msgspec.structs.replace(one, **changes)


LEADER = ReplicaExplained(
    node=NodeId(1),
    state="open",
    role="leader",
    epoch=3,
    leader=NodeId(1),
    since_ms=5,
    is_ready=True,
    end_index=Index(31),
    first_offset=Offset(10),
    log_end_offset=Offset(100),
    high_watermark=Offset(95),
    voters=NODES,
    in_sync=NODES,
    followers=(
        FollowerInfo(node=NodeId(2), state="replicate", match_index=Index(30), silent_ms=1),
        FollowerInfo(node=NodeId(3), state="probe", match_index=Index(12), silent_ms=9_000),
    ),
)


def explained(*answers: ReplicaExplained | QuiverError, offset: int | None = None) -> PartitionExplanation:
    nodes = {node: NodeInfo(node=node, wire_address="a:1", state="alive") for node in NODES}
    return explain(
        TOPIC,
        ROW,
        nodes,
        dict(zip(NODES, answers, strict=True)),
        offset=None if offset is None else Offset(offset),
        holds=(),
        moves=(),
        unanswered=(),
    )


def codes(obstacles: tuple[ObstacleInfo, ...]) -> list[str]:
    return [one.code for one in obstacles]


GONE = UnavailableError("not reached", code="not_reached")


@pytest.mark.parametrize(
    ("offset", "code"),
    [
        (9, ["trimmed"]),
        (10, []),
        (94, []),
        (95, ["not_committed"]),
        (99, ["not_committed"]),
        (100, ["offset_out_of_range"]),
        (None, []),
    ],
)
def test_offset_is_readable_or_the_reason_is_named(offset: int | None, code: list[str]) -> None:
    found = explained(LEADER, follower(2), follower(3), offset=offset)
    assert codes(found.consume_obstacles) == code
    assert found.produce_obstacles == ()


def test_next_record_is_not_an_error_of_the_partition() -> None:
    whole = msgspec.structs.replace(LEADER, log_end_offset=Offset(95))
    assert codes(explained(whole, follower(2), follower(3), offset=95).consume_obstacles) == ["not_produced"]


def test_lag_is_counted_against_the_leader() -> None:
    found = explained(LEADER, follower(2, log_end_offset=Offset(100)), GONE)
    assert [one.lag_records for one in found.replicas] == [0, 0, None]
    assert [one.lag_entries for one in found.replicas] == [None, 0, 18]
    assert (found.leader, found.since_ms, found.in_sync) == (1, 5, NODES)
    assert found.replicas[2].error == "not_reached: not reached"


def test_later_epoch_wins_when_two_lead() -> None:
    newer = msgspec.structs.replace(LEADER, node=NodeId(2), leader=NodeId(2), epoch=4)
    found = explained(LEADER, newer, follower(3))
    assert (found.leader, found.epoch) == (2, 4)


def test_no_majority_names_who_did_not_answer() -> None:
    found = explained(GONE, follower(2, leader=None), GONE)
    assert found.leader is None
    assert codes(found.produce_obstacles) == codes(found.consume_obstacles) == ["no_majority"]
    assert "node 1, node 3" in found.produce_obstacles[0].sentence


def test_replica_that_is_not_open_says_why() -> None:
    broken = ReplicaExplained(node=NodeId(2), state="unusable", problem="its files are gone")
    found = explained(GONE, broken, follower(3, leader=None))
    assert codes(found.produce_obstacles) == ["no_majority", "replica_unusable"]
    assert "its files are gone" in found.produce_obstacles[1].sentence


def test_replicas_that_need_an_upgrade_cannot_lead() -> None:
    old = follower(2, leader=None, state="needs_upgrade", problem="entry 4 is of version 9")
    found = explained(GONE, old, follower(3, leader=None, state="needs_upgrade", problem="entry 4 is of version 9"))
    assert codes(found.produce_obstacles) == ["no_majority", "replica_needs_upgrade", "replica_needs_upgrade"]
    assert "version 9" in found.produce_obstacles[1].sentence


def test_election_in_progress_is_told_apart_from_a_lost_majority() -> None:
    found = explained(follower(1, leader=None), follower(2, leader=None), GONE)
    assert codes(found.produce_obstacles) == ["no_leader"]


def test_events_of_all_nodes_are_in_order() -> None:
    def seen(at_ms: int) -> tuple[ReplicaEventInfo, ...]:
        return (ReplicaEventInfo(at_ms=at_ms, kind="follower", epoch=1),)

    found = explained(follower(1, events=seen(3)), follower(2, events=seen(1)), follower(3, events=seen(2)))
    assert [(one.node, one.event.at_ms) for one in found.events] == [(2, 1), (3, 2), (1, 3)]


def test_command_shows_a_follower_whose_disk_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    full = ObstacleInfo(code="disk_full", sentence="0 bytes are free: it stores no more entries")
    print_explanation(explained(LEADER, follower(2), follower(3, obstacles=(full,))))
    shown = capsys.readouterr().out
    assert "follower, full" in shown
    assert "node 3 is full: 0 bytes are free" in shown
    assert shown.count("full:") == 1


def test_command_shows_retention_in_units_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    kept = RetentionInfo(ms=7 * 24 * 3_600_000, bytes=2**30)
    print_explanation(msgspec.structs.replace(explained(LEADER, follower(2), follower(3)), retention=kept))
    assert "retention: 7d, 1GiB per partition; first record at 10\n" in capsys.readouterr().out
