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
        self.space = space
        self.is_full = False
        """Whether what leaders send is dropped."""
        self.reported = (False, False)
        """Whether the disk was full, and whether what leaders send was dropped, when `report` was last called."""
        self._group = group
        self._refused: tuple[int, bool] | None = None
        """The size of the last message that found no room, and whether it had no records; None once it would."""

    def report(self) -> dict[str, bool]:
        """Return what the member's answers should say from now on; see `Raft.set_room`."""
        self.reported = (self.space.is_full, self.is_full)
        return {"is_low": self.space.is_full, "is_full": self.is_full}

    def admit(self, received: ReceivedMessage) -> ReceivedMessage:
        """Return a message with its entries or its snapshot, or without them if there is no room."""
        if self._refused is not None and self.space.has_room(self._refused[0], is_control=self._refused[1]):
            self._refused, self.is_full = None, False
        size_bytes = received.message.payload_bytes
        if not size_bytes:
            return received
        # A snapshot replaces the log, so that it makes room in the end: it may use the reserve as control entries may.
        is_control = all(batch.header.is_control for batch in received.batches)
        if self.space.take(size_bytes, is_control=is_control):
            return received
        if self._refused is None:
            logger.warning("disk full, entries refused", extra=facts(group=self._group, size_bytes=size_bytes))
        self._refused, self.is_full = (size_bytes, is_control), True
        return received.without_payload()
