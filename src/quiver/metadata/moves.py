"""Commands on moves: a replica moves to another broker in steps, each of which survives a crash of any node.

Pure; called only by `apply`. The metadata holds the desired membership, the partition's own Raft group the actual one:

    begun      the target is a learner: it opens a replica, and the group's leader adds it and lets it catch up
    promoted   the group has made the target a voter in place of the source; the source deletes its replica
    finished   the source has deleted its replica; the row is deleted
    aborted    before promotion: as if the move had never begun

At most one move per partition. Partitions of deleted topics may move, too: a drained broker must not keep them, and
they can be restored.
"""

from __future__ import annotations

import msgspec

from quiver.metadata.commands import AbortMove, BeginMove, BeginMoveResult, FinishMove, PromoteMove
from quiver.metadata.decision import CommandDecision, CommandRefusal, find_broker, refuse
from quiver.metadata.rows import MoveId, MoveRow, MoveState, PartitionRow, Table
from quiver.metadata.state import MetadataState, drop, put


def begin(state: MetadataState, command: BeginMove) -> CommandDecision | CommandRefusal:
    """Add the target as a learner."""
    key = (command.topic_id, command.partition_id)
    partition: PartitionRow | None = state.tables[Table.PARTITIONS].get(key)
    if partition is None:
        return refuse(
            "unknown_partition", f"not done: topic id {command.topic_id} has no partition {command.partition_id}"
        )
    refusal = _check_begin(state, command, partition)
    if refusal is not None:
        return refusal
    move = MoveRow(
        move_id=state.counters.next_move_id,
        topic_id=command.topic_id,
        partition_id=command.partition_id,
        source=command.source,
        target=command.target,
        state=MoveState.BEGUN,
        begun_ms=command.now_ms,
        changed_ms=command.now_ms,
    )
    learning = msgspec.structs.replace(partition, learners=(*partition.learners, command.target))
    counters = msgspec.structs.replace(state.counters, next_move_id=MoveId(move.move_id + 1))
    return CommandDecision([put(learning), put(move)], counters, BeginMoveResult(move.move_id))


def promote(state: MetadataState, command: PromoteMove) -> CommandDecision | CommandRefusal:
    """Replace the source by the target among the voters."""
    move = _find(state, command.move_id)
    if isinstance(move, CommandRefusal):
        return move
    if move.state is MoveState.PROMOTED:
        return CommandDecision()
    partition: PartitionRow = state.tables[Table.PARTITIONS][move.topic_id, move.partition_id]
    if move.source is None:
        replicas = (*partition.replicas, move.target)
    else:
        replicas = tuple(move.target if broker == move.source else broker for broker in partition.replicas)
    learners = tuple(broker for broker in partition.learners if broker != move.target)
    promoted = msgspec.structs.replace(move, state=MoveState.PROMOTED, changed_ms=command.now_ms)
    return CommandDecision(
        [put(msgspec.structs.replace(partition, replicas=replicas, learners=learners)), put(promoted)]
    )


def finish(state: MetadataState, command: FinishMove) -> CommandDecision | CommandRefusal:
    """Delete a promoted move."""
    move = _find(state, command.move_id)
    if isinstance(move, CommandRefusal):
        return move
    if move.state is not MoveState.PROMOTED:
        return refuse(
            "move_not_promoted",
            f"not done: the target of move {move.move_id}, broker {move.target}, is not promoted yet",
        )
    return CommandDecision([drop(move)])


def abort(state: MetadataState, command: AbortMove) -> CommandDecision | CommandRefusal:
    """Delete a move that is not promoted, and its learner."""
    move = _find(state, command.move_id)
    if isinstance(move, CommandRefusal):
        return move
    if move.state is MoveState.PROMOTED:
        return refuse(
            "move_promoted", f"not done: the target of move {move.move_id} is a voter already; finish the move"
        )
    partition: PartitionRow = state.tables[Table.PARTITIONS][move.topic_id, move.partition_id]
    learners = tuple(broker for broker in partition.learners if broker != move.target)
    return CommandDecision([put(msgspec.structs.replace(partition, learners=learners)), drop(move)])


def _check_begin(state: MetadataState, command: BeginMove, partition: PartitionRow) -> CommandRefusal | None:
    moves: dict[object, MoveRow] = state.tables[Table.MOVES]
    if any((move.topic_id, move.partition_id) == partition.key for move in moves.values()):
        message = f"not done: partition {partition.partition_id} of topic id {partition.topic_id} has a move under way"
        return refuse("move_in_progress", message)
    if command.source is not None and command.source not in partition.replicas:
        return refuse("not_replica", f"not done: source broker {command.source} has no replica of this partition")
    if partition.is_on(command.target):
        return refuse(
            "already_replica", f"not done: target broker {command.target} has a replica of this partition already"
        )
    target = find_broker(state, command.target)
    if isinstance(target, CommandRefusal):
        return target
    if not target.is_eligible:
        message = (
            f"not done: target broker {command.target} is {target.state.value}, draining or not a broker by its roles"
        )
        return refuse("broker_not_eligible", message)
    return None


def _find(state: MetadataState, move_id: MoveId) -> MoveRow | CommandRefusal:
    move: MoveRow | None = state.tables[Table.MOVES].get(move_id)
    if move is None:
        return refuse("unknown_move", f"not done: unknown move {move_id}; it may be finished or aborted")
    return move
