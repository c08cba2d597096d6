"""The decision about `RecoverCluster`: what the metadata says after a majority was lost for good. Pure.

`quiver recover` writes the command into a survivor's log while no node runs. It never refuses: what it names and the
metadata does not have is skipped, so that the command does the same wherever it is applied, and again.

The survivor may lack the newest commands. Ids that they assigned are still in use: producers and consumers have state
under them in partitions, groups have files. They must not be assigned again, or a new producer's records would look
like repetitions of another one's, and a new topic would find the records of a lost one. So a range of ids is skipped.
Sessions of consumers, which are indexes of the log, go on above those of lost commands, too, and all groups give their
partitions anew: the partitions may have seen later owners than the metadata knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from quiver.metadata.commands import RecoverCluster, RecoveredPartition
from quiver.metadata.decision import CommandDecision
from quiver.metadata.groups import restart_all
from quiver.metadata.rows import BrokerRow, BrokerState, MoveRow, PartitionRow, Table
from quiver.metadata.state import Change, Counters, MetadataState, drop, put
from quiver.model import ConsumerId, GroupId, NodeId, ProducerId, TopicId

LOST_PREFIX = "lost:"
"""Put before the identity of a lost node: the node itself, if it ever returns, is refused as another one."""
SKIPPED_IDS = 1 << 24
"""Ids of each kind that are never assigned after a recovery: far more than lost commands can have assigned."""


def recover(state: MetadataState, command: RecoverCluster) -> CommandDecision:
    """Remove the lost nodes and their moves, and give partitions without a majority the replicas that are left."""
    lost = frozenset(command.lost)
    wanted = {(one.topic_id, one.partition_id): one for one in command.recovered if _is_possible(state, one, lost)}
    moves: Mapping[int, MoveRow] = state.tables[Table.MOVES]
    ended = [
        move
        for _, move in sorted(moves.items())
        if move.target in lost or move.source in lost or (move.topic_id, move.partition_id) in wanted
    ]
    changes: list[Change] = [drop(move) for move in ended]
    changes += _remove_brokers(state, lost, command.now_ms)
    changes += restart_all(state)
    counters = _skip_ids(state.counters)
    targets = {(move.topic_id, move.partition_id): move.target for move in ended}
    for key in sorted({*wanted, *targets}):
        partition: PartitionRow | None = state.tables[Table.PARTITIONS].get(key)
        if partition is not None:
            row, counters = _recovered(partition, wanted.get(key), targets.get(key), counters)
            changes.append(put(row))
    return CommandDecision(changes, counters)


def _skip_ids(counters: Counters) -> Counters:
    """Return the counters beyond everything that lost commands may have assigned."""
    return msgspec.structs.replace(
        counters,
        next_topic_id=TopicId(counters.next_topic_id + SKIPPED_IDS),
        next_group_id=GroupId(counters.next_group_id + SKIPPED_IDS),
        next_producer_id=ProducerId(counters.next_producer_id + SKIPPED_IDS),
        next_consumer_id=ConsumerId(counters.next_consumer_id + SKIPPED_IDS),
        session_base=counters.session_base + SKIPPED_IDS,
    )


def _is_possible(state: MetadataState, one: RecoveredPartition, lost: frozenset[NodeId]) -> bool:
    """Return whether a partition can have these replicas: it exists, and they are different brokers that are left."""
    brokers: Mapping[NodeId, BrokerRow] = state.tables[Table.BROKERS]
    is_known = (one.topic_id, one.partition_id) in state.tables[Table.PARTITIONS]
    left = [node for node in one.replicas if node in brokers and brokers[node].state is not BrokerState.REMOVED]
    is_left = bool(left) and left == list(one.replicas) and lost.isdisjoint(left)
    return is_known and is_left and len(set(left)) == len(left)


def _remove_brokers(state: MetadataState, lost: frozenset[NodeId], now_ms: int) -> Iterator[Change]:
    for node in sorted(lost):
        broker: BrokerRow | None = state.tables[Table.BROKERS].get(node)
        if broker is not None and not broker.identity.startswith(LOST_PREFIX):
            identity = LOST_PREFIX + broker.identity
            yield put(msgspec.structs.replace(broker, identity=identity, state=BrokerState.REMOVED, changed_ms=now_ms))


def _recovered(
    partition: PartitionRow, given: RecoveredPartition | None, target: NodeId | None, counters: Counters
) -> tuple[PartitionRow, Counters]:
    """Return a partition without the target of a move that ended and, if it lost its majority, with what is left."""
    row = msgspec.structs.replace(partition, learners=tuple(node for node in partition.learners if node != target))
    if given is None:
        return row, counters
    row = msgspec.structs.replace(row, replicas=given.replicas, learners=(), leader=None)
    if not given.is_recreated:
        return row, counters
    # A new group: whatever is left of the old one, on a disk that returns, must never meet it.
    row = msgspec.structs.replace(row, group_id=counters.next_group_id, epoch=0)
    return row, msgspec.structs.replace(counters, next_group_id=GroupId(counters.next_group_id + 1))
