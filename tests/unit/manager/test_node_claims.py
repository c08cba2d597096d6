"""A node speaks for itself: what it says about others is refused, unless a manager forwards it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from metadata_world import NOW_MS, create_topic, do, formed_state, init_cluster, register_broker

from quiver.errors import NotAllowedError
from quiver.manager.node_claims import check_sender
from quiver.metadata import BeginMove, Command, DeleteTopicCommand, FinishMove, PromoteMove, PurgeTopic, View
from quiver.metadata.rows import MoveId
from quiver.model import NodeId, PartitionId, TopicId
from quiver.wire.messages import BrokerHeartbeatRequest, SubmitCommand

MANAGERS = (NodeId(1), NodeId(2))
MOVE = MoveId(1)
BEAT = BrokerHeartbeatRequest(node=NodeId(3), identity="identity-3")


@pytest.fixture(scope="module")
def view() -> View:
    """Topic `moved` has a replica on brokers 1 and 2; the one on 1 moves to 3."""
    state = formed_state()
    do(state, create_topic("moved", (1, 2)))
    begin = BeginMove(
        now_ms=NOW_MS,
        topic_id=state.view().topics_by_name["moved"],
        partition_id=PartitionId(0),
        target=NodeId(3),
        source=NodeId(1),
    )
    do(state, begin)
    return state.view()


@pytest.mark.parametrize(
    ("command", "sender", "is_allowed"),
    [
        (register_broker(4), 4, True),
        (register_broker(4), 5, False),
        (register_broker(4), 1, False),
        (PromoteMove(now_ms=NOW_MS, move_id=MOVE), 2, True),
        (FinishMove(now_ms=NOW_MS, move_id=MOVE), 1, True),
        (FinishMove(now_ms=NOW_MS, move_id=MOVE), 3, True),
        (FinishMove(now_ms=NOW_MS, move_id=MOVE), 4, False),
        (FinishMove(now_ms=NOW_MS, move_id=MoveId(77)), 4, True),
        (DeleteTopicCommand(now_ms=NOW_MS, topic="logs", purge_ms=NOW_MS), 2, False),
        (PurgeTopic(now_ms=NOW_MS, topic_id=TopicId(1)), 4242, False),
        (init_cluster(), 1, False),
        (None, 1, False),
    ],
)
def test_command_of_a_node(view: View, command: Command[Any] | None, sender: int, is_allowed: bool) -> None:
    def check(*, is_forwarded: bool) -> None:
        request = SubmitCommand(is_forwarded=is_forwarded)
        check_sender(NodeId(sender), request, command, view=view, managers=MANAGERS)

    if not is_allowed:
        with pytest.raises(NotAllowedError, match="not done: "):
            check(is_forwarded=False)
    else:
        check(is_forwarded=False)
    if sender in MANAGERS:
        check(is_forwarded=True)
    elif not is_allowed:
        with pytest.raises(NotAllowedError):
            check(is_forwarded=True)


def test_heartbeat_of_another_node_is_refused(view: View) -> None:
    check_sender(NodeId(3), BEAT, None, view=view, managers=MANAGERS)
    forwarded = msgspec.structs.replace(BEAT, is_forwarded=True)
    check_sender(NodeId(1), forwarded, None, view=view, managers=MANAGERS)
    for sender, request in ((2, BEAT), (4, forwarded)):
        with pytest.raises(NotAllowedError, match="a heartbeat of node 3"):
            check_sender(NodeId(sender), request, None, view=view, managers=MANAGERS)
