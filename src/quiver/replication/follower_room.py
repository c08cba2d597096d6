"""Decides whether a member stores what its leader sends: only what leaves the reserve of the disk untouched.

What does not fit is dropped as if the leader had not sent it, which Raft allows at any time. The member's answers say
so (`is_full`) until there is room for what was dropped; the leader sends no more entries meanwhile.
"""

from __future__ import annotations

import logging

from quiver.logs import facts
from quiver.model import GroupId
from quiver.replication.codec import ReceivedMessage
from quiver.storage import DiskSpace

logger = logging.getLogger(__name__)


class FollowerRoom:
    """The room of one member on its node's disk."""

    def __init__(self, space: DiskSpace, group: GroupId) -> None:
        self._space = space
        self._group = group
        self._refused: tuple[int, bool] | None = None
        """The size of the last message that found no room, and whether it had no records; None once it would."""

    @property
    def is_low(self) -> bool:
        """Return whether no more records should be accepted for this member."""
        return self._space.is_full

    @property
    def is_full(self) -> bool:
        """Return whether what leaders send is dropped."""
        return self._refused is not None

    def admit(self, received: ReceivedMessage) -> ReceivedMessage:
        """Return a message with its entries or its snapshot, or without them if there is no room."""
        if self._refused is not None and self._space.has_room(self._refused[0], is_control=self._refused[1]):
            self._refused = None
        size_bytes = received.message.payload_bytes
        if not size_bytes:
            return received
        # A snapshot replaces the log, so that it makes room in the end: it may use the reserve as control entries may.
        is_control = all(batch.header.is_control for batch in received.batches)
        if self._space.take(size_bytes, is_control=is_control):
            return received
        if self._refused is None:
            logger.warning("disk full, entries refused", extra=facts(group=self._group, size_bytes=size_bytes))
        self._refused = (size_bytes, is_control)
        return received.without_payload()
