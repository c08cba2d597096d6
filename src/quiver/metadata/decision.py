"""What the decisions about commands are made of, and the questions that several of them ask of the state.

Pure. A decision names the rows that change; nothing is changed by making one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from quiver.metadata.commands import Result
from quiver.metadata.refusals import REFUSAL_CODES, CommandRefusal
from quiver.metadata.rows import BrokerHeartbeatRow, BrokerRow, BrokerState, Kind, Partition, Table, Topic
from quiver.metadata.state import Change, Counters, State, put
from quiver.model import NodeId


class Decision(msgspec.Struct):
    """What a command does: rows, counters if they change, and a result if there is more to tell than how many."""

    changes: list[Change] = msgspec.field(default_factory=list)
    counters: Counters | None = None
    result: Result | None = None


def refuse(code: str, message: str) -> CommandRefusal:
    """Return a refusal; its code must be one of those listed."""
    assert code in REFUSAL_CODES, code
    return CommandRefusal(code, message)


def find_broker(state: State, broker_id: NodeId) -> BrokerRow | CommandRefusal:
    """Return a broker that is known and not removed."""
    broker: BrokerRow | None = state.tables[Table.BROKERS].get(broker_id)
    if broker is None:
        return refuse("unknown_broker", f"not done: there is no broker {broker_id}")
    if broker.state is BrokerState.REMOVED:
        return refuse("broker_removed", f"not done: broker {broker_id} was removed; a node joins again under a new id")
    return broker


def find_topic(state: State, name: str) -> Topic | CommandRefusal:
    """Return the topic in use that has a name."""
    topic_id = state.names[Table.TOPICS].get(name)
    if topic_id is None:
        return refuse("unknown_topic", f"not done: there is no topic {name!r}")
    topic: Topic = state.tables[Table.TOPICS][topic_id]
    return topic


def check_assignment(state: State, brokers: Sequence[NodeId], *, replicas_max: int) -> CommandRefusal | None:
    """Return why a partition cannot be placed on these brokers; None if it can."""
    if not brokers or len(set(brokers)) != len(brokers) or len(brokers) > replicas_max:
        return refuse("bad_assignment", f"not done: a partition needs 1 to {replicas_max} different brokers")
    for broker_id in brokers:
        broker = find_broker(state, broker_id)
        if isinstance(broker, CommandRefusal):
            return broker
        if not broker.is_eligible:
            return refuse("broker_not_eligible", f"not done: broker {broker_id} is {broker.state.value}")
    return None


def beat(state: State, kind: Kind, id_: int, seen_ms: int) -> Iterator[Change]:
    """Yield the change that notes when somebody was last heard of, unless something newer is known."""
    known: BrokerHeartbeatRow | None = state.tables[Table.HEARTBEATS].get((kind, id_))
    if known is None or known.last_seen_ms < seen_ms:
        yield put(BrokerHeartbeatRow(kind=kind, id=id_, last_seen_ms=seen_ms))


def drop_beat(kind: Kind, id_: int) -> Change:
    """Return the change that forgets when somebody was last heard of; whoever is known has been."""
    return Change(Table.HEARTBEATS, (kind, id_), None)


def sorted_partitions(state: State) -> Iterator[Partition]:
    """Yield every partition in the order of topic and number."""
    partitions: dict[object, Partition] = state.tables[Table.PARTITIONS]
    for key in sorted(partitions):  # type: ignore[type-var]
        yield partitions[key]
