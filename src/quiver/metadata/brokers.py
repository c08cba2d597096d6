"""Commands on brokers: register, change state, drain and forget.

Pure; called only by `apply`. Heartbeats and operators move a broker between these states:

    alive ⇄ suspect → dead                        by heartbeats; registering makes the broker alive again
    alive, suspect, dead → draining → drained     by operators; `alive` undoes it
    drained, dead → removed                       by operators, permanently; forgotten once it has no replicas

A drain survives the states suspect and dead: when the broker returns, it is draining again.
"""

from __future__ import annotations

import msgspec

from quiver.addresses import parse_address
from quiver.errors import RequestError
from quiver.metadata.commands import (
    ChangeBrokerState,
    ChangeRebalancing,
    ForgetBroker,
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
from quiver.metadata.rows import ALL_ROLES, BrokerRow, BrokerState, EntityKind, MoveRow, Table
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
    moves: dict[object, MoveRow] = state.tables[Table.MOVES]
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
