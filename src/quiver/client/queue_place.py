"""What the dispatcher of a work queue knows of one partition: whether it is asked, and when to ask it again.

`queue_core` owns and changes it; it does nothing by itself.
"""

from __future__ import annotations

from quiver.backoff import Backoff
from quiver.client.queue_settler import PartitionSettler
from quiver.model import PartitionId


class QueuePlace:
    """What is known of the queue in one partition."""

    __slots__ = (
        "backoff",
        "checked_ms",
        "empty_until_ms",
        "expected",
        "is_asked",
        "is_polled",
        "partition_id",
        "sent_ms",
        "settler",
    )

    def __init__(self, partition_id: PartitionId, settler: PartitionSettler, backoff: Backoff) -> None:
        self.partition_id, self.settler, self.backoff = partition_id, settler, backoff
        self.empty_until_ms = 0
        """It is not asked again before, unless to wait for records."""
        self.is_asked = False
        """Whether a receive is in flight."""
        self.is_polled = False
        """Whether that waits for records."""
        self.expected = 0
        """The records that it was sent for."""
        self.sent_ms = 0
        self.checked_ms = -1
        """When it answered last, or could not be asked."""
