"""What changed between two states of the metadata, as sentences for people. Pure.

Tables of the metadata that did not change are the same objects, so that comparing costs nothing while nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, TypeVar

import msgspec

from quiver.metadata import BrokerRow, BrokerState, MoveRow, PartitionRow, TopicRow, TopicState, View
from quiver.metadata.rows import HoldRow

ROWS_MAX: Final = 100
"""Changes of one kind that are told one by one; more are counted in one event."""
K = TypeVar("K")
R = TypeVar("R")
EventLevel = Literal["info", "warning", "critical"]


class ConsoleEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened in the cluster."""

    id: int
    time_ms: int
    kind: str
    """node, topic, leader, move, hold, primary or rebalance."""
    text: str
    level: EventLevel = "info"


class Happening(msgspec.Struct, frozen=True):
    """An event without its number."""

    kind: str
    text: str
    level: EventLevel = "info"


_STATES: Final[Mapping[BrokerState, tuple[str, EventLevel]]] = {
    BrokerState.ALIVE: ("is alive", "info"),
    BrokerState.SUSPECT: ("is suspect: its heartbeats are late", "warning"),
    BrokerState.DEAD: ("is dead: its heartbeats have stopped", "critical"),
    BrokerState.DRAINING: ("is being drained", "info"),
    BrokerState.DRAINED: ("is drained", "info"),
    BrokerState.REMOVED: ("was removed", "info"),
}


def find_happenings(before: View, after: View) -> Iterator[Happening]:
    """Yield what happened between two views."""
    if before.brokers is not after.brokers:
        yield from _compare(before.brokers, after.brokers, _tell_node, kind="node")
    if before.topics is not after.topics:
        yield from _compare(before.topics, after.topics, _tell_topic, kind="topic")
    if before.partitions is not after.partitions:
        names = {topic_id: row.name for topic_id, row in after.topics.items()}
        yield from _compare(
            before.partitions, after.partitions, lambda old, new: _tell_leader(old, new, names), kind="leader"
        )
    if before.moves is not after.moves:
        names = {topic_id: row.name for topic_id, row in after.topics.items()}
        yield from _compare(before.moves, after.moves, lambda old, new: _tell_move(old, new, names), kind="move")
    if before.holds is not after.holds:
        yield from _compare(before.holds, after.holds, _tell_hold, kind="hold")
    if before.counters.is_rebalancing != after.counters.is_rebalancing:
        state = "began" if after.counters.is_rebalancing else "is complete"
        yield Happening("rebalance", f"rebalance {state}")


def _compare(
    before: Mapping[K, R], after: Mapping[K, R], tell: Callable[[R | None, R | None], Happening | None], *, kind: str
) -> Iterator[Happening]:
    told = 0
    untold = 0
    for key in (*after, *(key for key in before if key not in after)):
        old, new = before.get(key), after.get(key)
        if old is new or (happening := tell(old, new)) is None:
            continue
        if told < ROWS_MAX:
            told += 1
            yield happening
        else:
            untold += 1
    if untold:
        yield Happening(kind, f"{untold} more changes of the kind {kind}")


def _tell_node(old: BrokerRow | None, new: BrokerRow | None) -> Happening | None:
    if new is None:
        return None
    name = f"node {new.broker_id}"
    if old is None:
        return Happening("node", f"{name} joined at {new.wire_address}")
    if old.state is not new.state:
        text, level = _STATES[new.state]
        return Happening("node", f"{name} {text}", level)
    if old.wire_address != new.wire_address:
        return Happening("node", f"{name} moved to {new.wire_address}")
    return None


def _tell_topic(old: TopicRow | None, new: TopicRow | None) -> Happening | None:
    if new is None:
        return None if old is None else Happening("topic", f"topic {old.name} was purged")
    if old is None:
        end = " and deleted" if new.state is TopicState.DELETED else ""
        return Happening("topic", f"topic {new.name} was created with {_count_partitions(new)}{end}")
    if old.state is not new.state:
        is_deleted = new.state is TopicState.DELETED
        return Happening("topic", f"topic {new.name} was {'deleted' if is_deleted else 'restored'}")
    if old.partitions != new.partitions:
        return Happening("topic", f"topic {new.name} now has {_count_partitions(new)}")
    if old.retention != new.retention:
        return Happening("topic", f"the retention of topic {new.name} was changed")
    return None


def _count_partitions(topic: TopicRow) -> str:
    return "1 partition" if topic.partitions == 1 else f"{topic.partitions} partitions"


def _tell_leader(old: PartitionRow | None, new: PartitionRow | None, names: Mapping[Any, str]) -> Happening | None:
    if old is None or new is None or old.leader == new.leader or old.leader is None or new.leader is None:
        return None
    name = names.get(new.topic_id, f"id {new.topic_id}")
    return Happening("leader", f"{name}/{new.partition_id}: node {new.leader} leads after node {old.leader}")


def _tell_move(old: MoveRow | None, new: MoveRow | None, names: Mapping[Any, str]) -> Happening | None:
    row = new or old
    if row is None or (old is not None and new is not None):
        return None
    name = names.get(row.topic_id, f"id {row.topic_id}")
    source = "a new replica" if row.source is None else f"the replica of node {row.source}"
    state = "began" if old is None else "ended"
    return Happening("move", f"{name}/{row.partition_id}: move of {source} to node {row.target} {state}")


def _tell_hold(old: HoldRow | None, new: HoldRow | None) -> Happening | None:
    if old is not None and new is not None:
        return None
    row = new or old
    return None if row is None else Happening("hold", f"hold {row.name} was {'placed' if old is None else 'released'}")
