"""What commands do to moves of replicas."""

from __future__ import annotations

import pytest
from metadata_world import NOW_MS, change_state, do, formed_state, refused

from quiver.metadata.commands import (
    AbortMove,
    BeginMove,
    BeginMoveResult,
    CommandDone,
    DeleteTopicCommand,
    FinishMove,
    PromoteMove,
)
from quiver.metadata.rows import BrokerState, MoveId, MoveState, PartitionRow
from quiver.metadata.state import MetadataState
from quiver.model import NodeId, PartitionId, TopicId

FIRST = MoveId(1)


def begin(source: int | None = 2, target: int = 3, partition: int = 0) -> BeginMove:
    return BeginMove(
        now_ms=NOW_MS,
        topic_id=TopicId(1),
        partition_id=PartitionId(partition),
        source=None if source is None else NodeId(source),
        target=NodeId(target),
    )


def promote(move_id: MoveId = FIRST) -> PromoteMove:
    return PromoteMove(now_ms=NOW_MS + 1, move_id=move_id)


def finish(move_id: MoveId = FIRST) -> FinishMove:
    return FinishMove(now_ms=NOW_MS + 2, move_id=move_id)


def abort(move_id: MoveId = FIRST) -> AbortMove:
    return AbortMove(now_ms=NOW_MS + 2, move_id=move_id)


def first(state: MetadataState) -> PartitionRow:
    return state.view().partitions_of(TopicId(1))[0]


def test_replica_moves_step_by_step() -> None:
    state = formed_state()
    assert do(state, begin(source=1)) == BeginMoveResult(FIRST)
    assert (first(state).replicas, first(state).learners) == ((1, 2), (3,))
    do(state, promote())
    assert (first(state).replicas, first(state).learners) == ((3, 2), ())
    move = state.view().moves[FIRST]
    assert (move.state, move.begun_ms, move.changed_ms) == (MoveState.PROMOTED, NOW_MS, NOW_MS + 1)
    assert do(state, promote()) == CommandDone(0)
    do(state, finish())
    assert not state.view().moves
    assert do(state, begin(source=3, target=1)) == BeginMoveResult(MoveId(2))


def test_move_without_source_adds_a_replica() -> None:
    state = formed_state()
    do(state, begin(source=None))
    do(state, promote())
    assert first(state).replicas == (1, 2, 3)


def test_aborted_move_leaves_no_trace_but_its_number() -> None:
    state = formed_state()
    before = first(state)
    do(state, begin())
    do(state, abort())
    assert first(state) == before
    assert not state.view().moves


def test_steps_come_in_order() -> None:
    state = formed_state()
    for step in (promote(), finish(), abort()):
        assert refused(state, step) == "unknown_move"
    do(state, begin())
    assert refused(state, finish()) == "move_not_promoted"
    do(state, promote())
    assert refused(state, abort()) == "move_promoted"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (begin(partition=7), "unknown_partition"),
        (begin(source=3), "not_replica"),
        (begin(target=1), "already_replica"),
        (begin(target=9), "unknown_broker"),
    ],
)
def test_move_that_makes_no_sense_is_refused(command: BeginMove, code: str) -> None:
    assert refused(formed_state(), command) == code


def test_partition_moves_one_replica_at_a_time() -> None:
    state = formed_state()
    do(state, begin())
    assert refused(state, begin(source=1, target=3)) == "move_in_progress"
    do(state, begin(partition=1, source=3, target=1))


def test_target_must_be_eligible() -> None:
    state = formed_state()
    do(state, change_state(3, BrokerState.DEAD))
    assert refused(state, begin()) == "broker_not_eligible"


def test_partitions_of_deleted_topics_move_too() -> None:
    state = formed_state()
    do(state, DeleteTopicCommand(now_ms=NOW_MS, topic="logs", purge_ms=NOW_MS + 1))
    do(state, begin())
