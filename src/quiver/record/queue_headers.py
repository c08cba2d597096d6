"""The record headers of work queues: when a record may be delivered, and where a dead letter comes from. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from quiver.errors import RequestError

DELIVER_AT_HEADER = "quiver-deliver-at"
"""Queues deliver the record no earlier than this time: milliseconds since 1970 in decimal digits. Streams ignore it."""
DELIVER_AT_MAX_MS = 1 << 53

DEAD_TOPIC_HEADER = "quiver-dead-topic"
DEAD_PARTITION_HEADER = "quiver-dead-partition"
DEAD_OFFSET_HEADER = "quiver-dead-offset"
DEAD_GROUP_HEADER = "quiver-dead-group"
DEAD_ATTEMPTS_HEADER = "quiver-dead-attempts"
DEAD_REASON_HEADER = "quiver-dead-reason"
DEAD_TIME_HEADER = "quiver-dead-time"
"""When the record died: milliseconds since 1970 in decimal digits."""


def deliver_at_header(deliver_at_ms: int) -> tuple[str, bytes]:
    """Return the header of a record that is delivered no earlier than a time.

    Raises:
        RequestError: the time is before 1970, or too far away.
    """
    if not 0 <= deliver_at_ms <= DELIVER_AT_MAX_MS:
        raise RequestError(f"not done: a record cannot be delivered at {deliver_at_ms} ms since 1970")
    return DELIVER_AT_HEADER, str(deliver_at_ms).encode()


def find_deliver_at(headers: Iterable[tuple[str, bytes | None]]) -> int:
    """Return when a record may be delivered, in ms since 1970; 0 (at once) without a valid header."""
    for name, value in headers:
        if name == DELIVER_AT_HEADER and value is not None and len(value) <= len(str(DELIVER_AT_MAX_MS)):
            return min(int(value), DELIVER_AT_MAX_MS) if value.isdigit() else 0
    return 0
