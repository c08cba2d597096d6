"""What a node may say, and about whom: a node speaks for itself. Pure.

The connection of a request has proved which node sent it (`quiver.wire.listener`). A node registers itself, reports its
own heartbeat, and reports the progress of the moves that it takes part in; nothing else comes from a node as a command.
A manager that is not the primary forwards what other nodes sent it, and has checked it; as a member that may become the
primary it is trusted with the metadata anyway.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from quiver.errors import NotAllowedError
from quiver.metadata import Command, FinishMove, PromoteMove, RegisterBroker, View
from quiver.metadata.commands import command_name
from quiver.model import NodeId
from quiver.wire.messages import BrokerHeartbeatRequest, SubmitCommand


def check_sender(
    sender: NodeId,
    request: SubmitCommand | BrokerHeartbeatRequest,
    command: Command[Any] | None,
    *,
    view: View,
    managers: Container[NodeId],
) -> None:
    """Check a request for nodes only; `command` is the one that a `SubmitCommand` carries.

    Raises:
        NotAllowedError: the sender may not say this; nothing was done.
    """
    if request.is_forwarded and sender in managers:
        return
    match request, command:
        case BrokerHeartbeatRequest(), _:
            _require(request.node == sender, f"node {sender} sent a heartbeat of node {request.node}")
        case _, RegisterBroker():
            _require(command.broker_id == sender, f"node {sender} registers node {command.broker_id}")
        case _, (PromoteMove() | FinishMove()):
            _require(_takes_part(view, command, sender), f"node {sender} takes no part in move {command.move_id}")
        case _, None:
            _require(False, f"node {sender} sent no command")  # noqa: FBT003 - always refused
        case _:
            _require(False, f"{command_name(command)} does not come from a node")  # noqa: FBT003 - always refused


def _takes_part(view: View, command: PromoteMove | FinishMove, sender: NodeId) -> bool:
    move = view.moves.get(command.move_id)
    if move is None:
        return True  # `apply` refuses it: another node has ended it, or this node lags behind
    row = view.partitions.get((move.topic_id, move.partition_id))
    return sender in (move.source, move.target) or (row is not None and sender in row.replicas)


def _require(condition: bool, claim: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not condition:
        raise NotAllowedError(f"not done: {claim}, which is not allowed")
