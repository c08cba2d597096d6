"""What commands do to topics and partitions."""

from __future__ import annotations

from typing import Any

import pytest
from metadata_world import (
    NOW_MS,
    change_state,
    create_topic,
    do,
    formed_state,
    refused,
    register_consumer,
    register_producer,
    select,
)

from quiver.metadata.commands import (
    AddPartitionsCommand,
    BeginMove,
    CommandDone,
    ConfigureTopicCommand,
    CreateTopicResult,
    DeleteTopicCommand,
    LeaderReport,
    PurgeTopic,
    ReportLeaders,
    RestoreTopicCommand,
)
from quiver.metadata.rows import BrokerState, Retention, TopicState
from quiver.metadata.state import MetadataState
from quiver.metadata.topics import PARTITIONS_MAX
from quiver.model import NodeId, PartitionId, TopicId

LOGS = TopicId(1)


def delete(topic: str = "logs", purge_ms: int = NOW_MS + 100) -> DeleteTopicCommand:
    return DeleteTopicCommand(now_ms=NOW_MS, topic=topic, purge_ms=purge_ms)


def restore(topic_id: int = LOGS) -> RestoreTopicCommand:
    return RestoreTopicCommand(now_ms=NOW_MS, topic_id=TopicId(topic_id))


def purge(topic_id: int = LOGS, now_ms: int = NOW_MS + 100) -> PurgeTopic:
    return PurgeTopic(now_ms=now_ms, topic_id=TopicId(topic_id))


def add(partitions: int, *assignments: tuple[int, ...], topic: str = "logs") -> AddPartitionsCommand:
    placed = tuple(tuple(map(NodeId, assignment)) for assignment in assignments)
    return AddPartitionsCommand(now_ms=NOW_MS, topic=topic, partitions=partitions, assignments=placed)


def report(*reports: tuple[int, int, int, int]) -> ReportLeaders:
    found = tuple(LeaderReport(TopicId(t), PartitionId(p), NodeId(n), epoch) for t, p, n, epoch in reports)
    return ReportLeaders(now_ms=NOW_MS, reports=found)


def test_topic_gets_ids_and_groups_in_order() -> None:
    state = formed_state()
    assert do(state, create_topic("audit", (3, 1), replicas=3)) == CreateTopicResult(TopicId(2), 1)
    view = state.view()
    assert [topic.name for topic in view.active_topics()] == ["audit", "logs"]
    assert [(p.group_id, p.replicas) for p in view.partitions_of(LOGS)] == [(2, (1, 2)), (3, (2, 3))]
    assert [(p.group_id, p.replicas) for p in view.partitions_of(TopicId(2))] == [(4, (3, 1))]
    assert [p.key for p in view.partitions_on(NodeId(3))] == [(1, 1), (2, 0)]


def test_name_in_use_is_refused_unless_it_is_the_same_request() -> None:
    state = formed_state()
    assert refused(state, create_topic()) == "topic_exists"
    created = do(state, create_topic("audit", request_id="r1"))
    assert do(state, create_topic("audit", request_id="r1")) == created
    assert refused(state, create_topic("audit", request_id="r2")) == "topic_exists"
    assert len(state.view().topics) == 2


def test_repeated_request_does_not_bring_a_deleted_topic_back() -> None:
    state = formed_state()
    created = do(state, create_topic("audit", request_id="r1"))
    do(state, delete("audit"))
    assert do(state, create_topic("audit", request_id="r1")) == created
    assert state.view().topic("audit") is None
    do(state, create_topic("audit", request_id="r2"))
    assert do(state, create_topic("audit", request_id="r1")) == created, "its own, whoever has the name now"
    assert do(state, create_topic("other", request_id="r1")) != created


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ä", "a" * 201, "a\n"])
def test_names_that_could_lead_elsewhere_are_refused(name: str) -> None:
    assert refused(formed_state(), create_topic(name)) == "bad_topic_name"


@pytest.mark.parametrize(
    ("fields", "assignments", "code"),
    [
        ({"replicas": 0}, [(1,)], "bad_replica_count"),
        ({"replicas": 16}, [(1,)], "bad_replica_count"),
        ({"retention": Retention(ms=0)}, [(1,)], "bad_retention"),
        ({"retention": Retention(bytes=0)}, [(1,)], "bad_retention"),
        ({}, [(1,)] * (PARTITIONS_MAX + 1), "bad_partition_count"),
        ({}, [()], "bad_assignment"),
        ({}, [(1,), (1, 1)], "bad_assignment"),
        ({}, [(1, 2, 3)], "bad_assignment"),
        ({}, [(1, 9)], "unknown_broker"),
    ],
)
def test_topic_that_cannot_be_is_refused(fields: dict[str, Any], assignments: list[Any], code: str) -> None:
    assert refused(formed_state(), create_topic("audit", *assignments, **fields)) == code


def test_topic_without_partitions_is_refused() -> None:
    state = formed_state()
    none = create_topic("audit").__class__(now_ms=NOW_MS, topic="audit", replicas=1, assignments=())
    assert refused(state, none) == "bad_partition_count"


def test_broker_that_is_not_eligible_gets_nothing() -> None:
    state = formed_state()
    do(state, change_state(2, BrokerState.SUSPECT))
    do(state, create_topic("audit", (2,)))
    do(state, change_state(2, BrokerState.DRAINING))
    assert refused(state, create_topic("metrics", (2,))) == "broker_not_eligible"


def test_retention_is_changed() -> None:
    state = formed_state()
    wanted = Retention(ms=5, until_consumed=True)
    command = ConfigureTopicCommand(now_ms=NOW_MS, topic="logs", retention=wanted)
    assert do(state, command) == CommandDone(1)
    assert state.view().topics[LOGS].retention == wanted
    assert do(state, command) == CommandDone(0)
    assert refused(state, ConfigureTopicCommand(now_ms=NOW_MS, topic="none", retention=wanted)) == "unknown_topic"
    assert (
        refused(state, ConfigureTopicCommand(now_ms=NOW_MS, topic="logs", retention=Retention(ms=0))) == "bad_retention"
    )


def test_partitions_are_added_behind_those_there_are() -> None:
    state = formed_state()
    do(state, add(4, (1, 3), (3,)))
    found = state.view().partitions_of(LOGS)
    assert [(p.partition_id, p.group_id, p.replicas) for p in found[2:]] == [(2, 4, (1, 3)), (3, 5, (3,))]
    assert state.view().counters.next_group_id == 6


@pytest.mark.parametrize(
    "command", [add(2), add(1), add(4, (1,)), add(3, (1,), (2,)), add(PARTITIONS_MAX + 1, *[(1,)] * 4095)]
)
def test_partitions_are_added_one_per_assignment_or_not_at_all(command: AddPartitionsCommand) -> None:
    assert refused(formed_state(), command) == "bad_partition_count"


def test_partitions_are_not_added_to_what_is_not_there() -> None:
    assert refused(formed_state(), add(3, (1,), topic="none")) == "unknown_topic"
    assert refused(formed_state(), add(3, (9,))) == "unknown_broker"


def test_deleted_topic_is_out_of_use_and_comes_back_whole() -> None:
    state = formed_state()
    before = state.view()
    do(state, delete())
    assert state.view().topic("logs") is None
    assert [topic.topic_id for topic in state.view().deleted_topics()] == [LOGS]
    assert refused(state, register_producer()) == "unknown_topic"
    assert refused(state, delete()) == "unknown_topic"
    do(state, restore())
    assert state.view().digest() == before.digest()


def test_name_of_a_deleted_topic_is_free_and_may_be_taken() -> None:
    state = formed_state()
    do(state, delete())
    assert do(state, create_topic()) == CreateTopicResult(TopicId(2), 2)
    assert refused(state, restore()) == "topic_exists"
    do(state, delete())
    do(state, restore())
    assert state.view().topics_by_name == {"logs": LOGS}


def test_only_deleted_topics_are_restored_or_purged() -> None:
    state = formed_state()
    assert refused(state, restore()) == "topic_not_deleted"
    assert refused(state, purge()) == "topic_not_deleted"
    assert refused(state, restore(9)) == "unknown_topic"
    assert refused(state, purge(9)) == "unknown_topic"


def test_topic_is_purged_when_its_time_has_come_with_all_that_hangs_on_it() -> None:
    state = formed_state()
    do(state, create_topic("audit"))
    do(state, register_producer(select("logs"), select("audit", 1)))
    do(state, register_consumer(select("logs")))
    do(state, register_consumer(select("audit")))
    move = BeginMove(now_ms=NOW_MS, topic_id=LOGS, partition_id=PartitionId(0), target=NodeId(3))
    do(state, move)
    do(state, BeginMove(now_ms=NOW_MS, topic_id=TopicId(2), partition_id=PartitionId(0), target=NodeId(3)))
    do(state, delete())
    assert refused(state, purge(now_ms=NOW_MS + 99)) == "too_early"
    do(state, purge())
    view = state.view()
    assert list(view.topics) == [2]
    assert sorted(view.partitions) == [(2, 0), (2, 1)]
    assert [move.topic_id for move in view.moves.values()] == [2]
    assert [[item.topic_id for item in c.registrations] for _, c in sorted(view.consumers.items())] == [[], [2]]
    assert [[item.topic_id for item in p.registrations] for p in view.producers.values()] == [[2]]
    assert do(state, create_topic()) == CreateTopicResult(TopicId(3), 2)


def leaders(state: MetadataState) -> list[tuple[int | None, int]]:
    return [(partition.leader, partition.epoch) for partition in state.view().partitions_of(LOGS)]


def test_newest_epoch_says_who_leads() -> None:
    state = formed_state()
    assert leaders(state) == [(None, 0), (None, 0)]
    assert do(state, report((1, 0, 1, 3), (1, 1, 2, 1), (1, 0, 2, 2), (7, 0, 1, 1), (1, 9, 1, 1))) == CommandDone(2)
    assert leaders(state) == [(1, 3), (2, 1)]
    assert do(state, report((1, 0, 2, 3), (1, 1, 3, 1))) == CommandDone(0)
    assert do(state, report((1, 0, 2, 4), (1, 0, 1, 5))) == CommandDone(1)
    assert leaders(state) == [(1, 5), (2, 1)]


def test_topic_states_are_what_tables_say() -> None:
    state = formed_state()
    do(state, delete(purge_ms=77))
    topic = state.view().topics[LOGS]
    assert (topic.state, topic.purge_ms) == (TopicState.DELETED, 77)
