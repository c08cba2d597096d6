"""What a member of a group needs of the node that it lives on. `Replicator` is the real one."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from quiver.errors import StorageError
from quiver.model import Buffer, GroupId, NodeId
from quiver.replication.codec import Item
from quiver.replication.rate_limiter import RateLimiter


class Scheduled(Protocol):
    """A member, as far as its node's timer is concerned."""

    group: GroupId
    next_deadline_ms: int | None


class Host(Protocol):
    """What a member needs of the node that it lives on."""

    @property
    def id(self) -> NodeId:
        """Return the node."""
        ...

    @property
    def pace(self) -> RateLimiter:
        """Return how fast it sends old entries to learners."""
        ...

    def post(self, to: NodeId, item: Item, payloads: Sequence[Buffer] = ()) -> None:
        """Send a message with the next parcel to a node, in this turn of the loop."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that belongs to the node; its failure is the node's."""
        ...

    def fail(self, error: StorageError) -> None:
        """Stop the node: its disk can no longer be trusted."""
        ...

    def deadline_changed(self, member: Scheduled) -> None:
        """Take note of when the member wants to be ticked."""
        ...
