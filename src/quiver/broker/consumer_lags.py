"""Finds the consumers that lag furthest behind, in the partitions that this node leads.

A partition may have a cursor for each of 100,000 consumers, and a node may lead thousands of partitions: others get a
turn of the event loop after every `CURSORS_PER_STEP` cursors, and after every `REPLICAS_PER_STEP` replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nsmallest
from itertools import groupby, islice

from quiver.broker.replica_table import HostedReplica, ReplicaTable
from quiver.metadata import PartitionConsumers, View
from quiver.model import ConsumerId, TopicId
from quiver.partition import PartitionState, Replica
from quiver.tasks import run_in_steps
from quiver.wire.admin_messages import LAGS_MAX, LagInfo

CURSORS_PER_STEP = 2_000
REPLICAS_PER_STEP = 50

_Lag = tuple[int, ConsumerId, TopicId]
"""The negative number of records, and whose lag it is: the greatest lag is the least of them."""


async def find_lags(view: View, table: ReplicaTable, *, lags_max: int = LAGS_MAX) -> tuple[LagInfo, ...]:
    """Return the greatest consumer lags in the partitions that this node leads, by consumer and topic, greatest first.

    Counts registered consumers that have a cursor. Other nodes report the partitions that they lead; the whole lag of a
    consumer is the sum over all nodes.
    """
    greatest: list[_Lag] = []
    await run_in_steps(_gather(view, table.led(), greatest, lags_max=lags_max))
    return tuple(
        LagInfo(
            consumer=view.consumers[consumer_id].request_id or str(consumer_id),
            topic=view.topics[topic_id].name,
            records=-records,
        )
        for records, consumer_id, topic_id in greatest
    )


def _gather(
    view: View, led: Sequence[tuple[HostedReplica, Replica]], greatest: list[_Lag], *, lags_max: int
) -> Iterator[None]:
    """Put the greatest lags into a list, in small steps; the replicas are sorted by topic."""
    for topic_id, replicas in groupby(enumerate(led, start=1), key=lambda item: item[1][0].key[0]):
        lags: dict[ConsumerId, int] = {}
        for number, (hosted, replica) in replicas:
            yield from _add_lags(lags, replica.state, view.consumers_on(*hosted.key))
            if number % REPLICAS_PER_STEP == 0:
                yield
        found = ((-records, consumer_id, topic_id) for consumer_id, records in lags.items())
        while step := list(islice(found, CURSORS_PER_STEP)):
            greatest[:] = nsmallest(lags_max, [*greatest, *step])
            if len(step) == CURSORS_PER_STEP:
                yield


def _add_lags(lags: dict[ConsumerId, int], state: PartitionState, consumers: PartitionConsumers) -> Iterator[None]:
    """Add the lags of a partition's consumers, in small steps, between which cursors may move and go."""
    left = iter(tuple(state.cursors))
    while step := tuple(islice(left, CURSORS_PER_STEP)):
        for consumer_id in step:
            cursor = state.cursors.get(consumer_id)
            if cursor is not None and consumer_id in consumers:
                records = max(0, state.end_offset - max(cursor, state.first_offset))
                lags[consumer_id] = lags.get(consumer_id, 0) + records
        if len(step) == CURSORS_PER_STEP:
            yield
