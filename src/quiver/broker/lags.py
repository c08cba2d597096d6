"""Which consumers lag behind what this node leads: cursors against high watermarks, for metrics.

Only consumers that are registered count, and only where they have a cursor: one that has not begun has nothing to lag
behind yet. What other nodes lead they tell themselves; whoever wants a consumer's whole lag adds them up.
"""

from __future__ import annotations

from heapq import nlargest

from quiver.broker.table import PartitionTable
from quiver.metadata import View
from quiver.model import ConsumerId, TopicId
from quiver.wire.admin_messages import LAGS_MAX, LagInfo


def find_lags(view: View, table: PartitionTable, *, lags_max: int = LAGS_MAX) -> tuple[LagInfo, ...]:
    """Return the greatest lags, by consumer and topic, the greatest first."""
    found: dict[tuple[ConsumerId, TopicId], int] = {}
    for held, replica in table.led():
        topic_id, state = held.key[0], replica.state
        for consumer_id in view.consumers_of(topic_id):
            cursor = state.cursors.get(consumer_id)
            if cursor is not None:
                key = (consumer_id, topic_id)
                found[key] = found.get(key, 0) + max(0, state.end_offset - max(cursor, state.first_offset))
    greatest = nlargest(lags_max, found, key=lambda key: (found[key], -key[0], -key[1]))
    return tuple(
        LagInfo(
            consumer=view.consumers[consumer_id].request_id or str(consumer_id),
            topic=view.topics[topic_id].name,
            records=found[consumer_id, topic_id],
        )
        for consumer_id, topic_id in greatest
    )
