"""Commands on brokers and on moves of replicas between them.

Pure; called only by `apply`. Heartbeats and operators move a broker between these states:

    alive ⇄ suspect → dead                        by heartbeats; registering makes the broker alive again
    alive, suspect, dead → draining → drained     by operators; `alive` undoes it
    drained, dead → removed                       by operators, permanently; forgotten once it has no replicas

A drain survives the states suspect and dead: when the broker returns, it is draining again.

A replica moves to another broker in steps, each of which survives a crash of any node. The metadata holds the desired
membership, the partition's own Raft group the actual one:

    begun      the target is a learner: it opens a replica, and the group's leader adds it and lets it catch up
    promoted   the group has made the target a voter in place of the source; the source deletes its replica
    finished   the source has deleted its replica; the row is deleted
    aborted    before promotion: as if the move had never begun

At most one move per partition. Partitions of deleted topics may move, too: a drained broker must not keep them, and
they can be restored.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from quiver.addresses import parse_address
from quiver.errors import RequestError
from quiver.metadata.commands import (
    AbortMove,
    BeginMove,
    BeginMoveResult,
    ChangeBrokerState,
    ChangeRebalancing,
    FinishMove,
    ForgetBroker,
    PromoteMove,
    RaiseLevel,
    RegisterBroker,
    UndrainBroker,
)
from quiver.metadata.decision import (
    CommandDecision,
    CommandRefusal,
    beat,
    drop_beat,
    find_broker,
    refuse,
    sorted_partitions,
)
from quiver.metadata.rows import (
    ALL_ROLES,
    BrokerRow,
    BrokerState,
    EntityKind,
    MoveId,
    MoveRow,
    MoveState,
    PartitionRow,
    Table,
)
from quiver.metadata.state import MetadataState, drop, put
from quiver.model import NodeId

_A, _S, _D = BrokerState.ALIVE, BrokerState.SUSPECT, BrokerState.DEAD
_DRAINING, _DRAINED, _REMOVED = BrokerState.DRAINING, BrokerState.DRAINED, BrokerState.REMOVED

TRANSITIONS: dict[BrokerState, frozenset[BrokerState]] = {
    _A: frozenset((_S, _D, _DRAINING)),
    _S: frozenset((_A, _D, _DRAINING)),
    _D: frozenset((_A, _DRAINING, _REMOVED)),
    _DRAINING: frozenset((_A, _S, _D, _DRAINED)),
    _DRAINED: frozenset((_A, _S, _D, _REMOVED)),
    _REMOVED: frozenset(),
}
"""The states that may follow each state. A transition to the current state is always allowed and changes nothing."""


def register(state: MetadataState, command: RegisterBroker) -> CommandDecision | CommandRefusal:
    """Register a broker, or update the addresses and roles of a registered one."""
    if not command.identity or not command.wire_address or not command.broker_id or not command.roles:
        return refuse(
            "bad_broker", "not done: a broker needs an id above 0, an identity, a wire address and at least one role"
        )
    for address in filter(None, (command.wire_address, command.http_address)):
        try:
            parse_address(address)
        except RequestError as error:
            return refuse("bad_broker", f"not done: node {command.broker_id} would not be reached: {error.message}")
    known: BrokerRow | None = state.tables[Table.BROKERS].get(command.broker_id)
    if known is not None:
        refusal = _check_same(known, command)
        if refusal is not None:
            return refusal
    is_draining = known is not None and known.is_draining
    state_now = _DRAINING if is_draining else _A
    if known is not None and known.state is _DRAINED:
        state_now = _DRAINED
    broker = BrokerRow(
        broker_id=command.broker_id,
        identity=command.identity,
        wire_address=command.wire_address,
        http_address=command.http_address,
        rack=command.rack,
        roles=tuple(role for role in ALL_ROLES if role in command.roles),
        state=state_now,
        is_draining=is_draining,
        registered_ms=command.now_ms if known is None else known.registered_ms,
        changed_ms=known.changed_ms if known is not None and known.state is state_now else command.now_ms,
    )
    changes = [] if broker == known else [put(broker)]
    return CommandDecision([*changes, *beat(state, EntityKind.BROKER, broker.broker_id, command.now_ms)])


def raise_level(state: MetadataState, command: RaiseLevel) -> CommandDecision | CommandRefusal:
    """Raise the feature level, if every node that is not removed knows the new one."""
    level = command.feature_level
    if level <= state.counters.feature_level:
        return CommandDecision()
    known = {item.node: item.level for item in command.nodes}
    brokers: Mapping[NodeId, BrokerRow] = state.tables[Table.BROKERS]
    low = [node for node in sorted(brokers) if brokers[node].state is not _REMOVED and known.get(node, 0) < level]
    if low:
        return refuse(
            "nodes_too_old",
            f"not done: node {', '.join(map(str, low))} is not known to support feature level {level}; "
            "upgrade or remove it first",
        )
    return CommandDecision(counters=msgspec.structs.replace(state.counters, feature_level=level))


def change_state(state: MetadataState, command: ChangeBrokerState) -> CommandDecision | CommandRefusal:
    """Change a broker's state, if the transition is allowed."""
    broker = find_broker(state, command.broker_id)
    if isinstance(broker, CommandRefusal):
        return broker
    wanted = command.state
    if wanted is broker.state:
        return CommandDecision()
    if wanted is _REMOVED and broker.state not in (_DRAINED, _D):
        return refuse(
            "not_drained",
            f"not done: broker {broker.broker_id} is {broker.state.value}; remove only drained or dead brokers",
        )
    if wanted not in TRANSITIONS[broker.state]:
        message = f"not done: broker {broker.broker_id} is {broker.state.value}, which cannot change to {wanted.value}"
        return refuse("bad_transition", message)
    if wanted is _DRAINED and holds_anything(state, broker.broker_id):
        return refuse(
            "not_drained",
            f"not done: broker {broker.broker_id} still has replicas or moves; wait until they have moved",
        )
    return CommandDecision([put(_changed(broker, wanted, command.now_ms))])


def undrain(state: MetadataState, command: UndrainBroker) -> CommandDecision | CommandRefusal:
    """Allow a broker to hold replicas again; a suspect or dead broker stays in that state."""
    broker = find_broker(state, command.broker_id)
    if isinstance(broker, CommandRefusal):
        return broker
    if not broker.is_draining:
        return CommandDecision()
    if broker.state in (_DRAINING, _DRAINED):
        return CommandDecision([put(_changed(broker, _A, command.now_ms))])
    return CommandDecision([put(msgspec.structs.replace(broker, is_draining=False, changed_ms=command.now_ms))])


def change_rebalancing(state: MetadataState, command: ChangeRebalancing) -> CommandDecision:
    """Record whether a rebalance of the replicas is requested."""
    return CommandDecision(counters=msgspec.structs.replace(state.counters, is_rebalancing=command.is_rebalancing))


def forget(state: MetadataState, command: ForgetBroker) -> CommandDecision | CommandRefusal:
    """Delete the row of a removed broker that has no replicas."""
    broker: BrokerRow | None = state.tables[Table.BROKERS].get(command.broker_id)
    if broker is None:
        return refuse("unknown_broker", f"not done: unknown broker {command.broker_id}")
    if broker.state is not _REMOVED or holds_anything(state, broker.broker_id):
        return refuse(
            "not_drained",
            f"not done: broker {broker.broker_id} is {broker.state.value} or has replicas; drain and remove it first",
        )
    return CommandDecision([drop(broker), drop_beat(EntityKind.BROKER, broker.broker_id)])


def holds_anything(state: MetadataState, broker_id: NodeId) -> bool:
    """Return whether a broker has a replica, or is the source or target of a move."""
    moves: Mapping[object, MoveRow] = state.tables[Table.MOVES]
    return any(partition.is_on(broker_id) for partition in sorted_partitions(state)) or any(
        broker_id in (move.source, move.target) for move in moves.values()
    )


def _check_same(known: BrokerRow, command: RegisterBroker) -> CommandRefusal | None:
    if known.identity != command.identity:
        return refuse(
            "broker_exists",
            f"not done: id {known.broker_id} belongs to a node with another identity; a node that lost its disk "
            "joins with a "
            "new id",
        )
    if known.state is _REMOVED:
        return refuse("broker_removed", f"not done: broker {known.broker_id} was removed; join with a new id")
    return None


def _changed(broker: BrokerRow, wanted: BrokerState, now_ms: int) -> BrokerRow:
    is_draining = broker.is_draining
    if wanted is _A and broker.state in (_DRAINING, _DRAINED):
        is_draining = False
    elif wanted is _A and is_draining:
        wanted = _DRAINING
    elif wanted in (_DRAINING, _DRAINED):
        is_draining = True
    return msgspec.structs.replace(broker, state=wanted, is_draining=is_draining, changed_ms=now_ms)


def begin_move(state: MetadataState, command: BeginMove) -> CommandDecision | CommandRefusal:
    """Add the target as a learner."""
    key = (command.topic_id, command.partition_id)
    partition: PartitionRow | None = state.tables[Table.PARTITIONS].get(key)
    if partition is None:
        return refuse(
            "unknown_partition", f"not done: topic id {command.topic_id} has no partition {command.partition_id}"
        )
    refusal = _check_move(state, command, partition)
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


def promote_move(state: MetadataState, command: PromoteMove) -> CommandDecision | CommandRefusal:
    """Replace the source by the target among the voters."""
    move = _find_move(state, command.move_id)
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


def finish_move(state: MetadataState, command: FinishMove) -> CommandDecision | CommandRefusal:
    """Delete a promoted move."""
    move = _find_move(state, command.move_id)
    if isinstance(move, CommandRefusal):
        return move
    if move.state is not MoveState.PROMOTED:
        return refuse(
            "move_not_promoted",
            f"not done: the target of move {move.move_id}, broker {move.target}, is not promoted yet",
        )
    return CommandDecision([drop(move)])


def abort_move(state: MetadataState, command: AbortMove) -> CommandDecision | CommandRefusal:
    """Delete a move that is not promoted, and its learner."""
    move = _find_move(state, command.move_id)
    if isinstance(move, CommandRefusal):
        return move
    if move.state is MoveState.PROMOTED:
        return refuse(
            "move_promoted", f"not done: the target of move {move.move_id} is a voter already; finish the move"
        )
    partition: PartitionRow = state.tables[Table.PARTITIONS][move.topic_id, move.partition_id]
    learners = tuple(broker for broker in partition.learners if broker != move.target)
    return CommandDecision([put(msgspec.structs.replace(partition, learners=learners)), drop(move)])


def _check_move(state: MetadataState, command: BeginMove, partition: PartitionRow) -> CommandRefusal | None:
    moves: Mapping[object, MoveRow] = state.tables[Table.MOVES]
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


def _find_move(state: MetadataState, move_id: MoveId) -> MoveRow | CommandRefusal:
    move: MoveRow | None = state.tables[Table.MOVES].get(move_id)
    if move is None:
        return refuse("unknown_move", f"not done: unknown move {move_id}; it may be finished or aborted")
    return move
