"""The record headers of dead letters: where they come from, how often they were delivered, and why they died. Pure.

`delay` has the header of records that are to be delivered later.
"""

from __future__ import annotations

DEAD_TOPIC_HEADER = "quiver-dead-topic"
DEAD_PARTITION_HEADER = "quiver-dead-partition"
DEAD_OFFSET_HEADER = "quiver-dead-offset"
DEAD_GROUP_HEADER = "quiver-dead-group"
DEAD_ATTEMPTS_HEADER = "quiver-dead-attempts"
DEAD_REASON_HEADER = "quiver-dead-reason"
DEAD_TIME_HEADER = "quiver-dead-time"
"""When the record died: milliseconds since 1970 in decimal digits."""
DEAD_LOST_HEADER = "quiver-dead-lost"
"""Why the dead letter has no value although the record had one: retention removed it before it could be moved."""

DEAD_HEADERS = frozenset(
    (
        DEAD_TOPIC_HEADER,
        DEAD_PARTITION_HEADER,
        DEAD_OFFSET_HEADER,
        DEAD_GROUP_HEADER,
        DEAD_ATTEMPTS_HEADER,
        DEAD_REASON_HEADER,
        DEAD_TIME_HEADER,
        DEAD_LOST_HEADER,
    )
)
"""All of them: a dead letter that dies again, or is sent back to its topic, loses the old ones."""
