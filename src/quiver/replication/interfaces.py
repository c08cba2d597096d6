"""The seams of the replication driver, as protocols: state machine, network and host.

- `StateMachine` is implemented by the layer above: a partition's deduplication table and cursors, or the metadata.
- `Network` is implemented by `quiver.wire`; `quiver.testing.SimulatedNetwork` is its in-memory twin with faults.
- `Host` is the node as its members see it; `Replicator` implements it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

from quiver.errors import StorageError
from quiver.model import Buffer, GroupId, Index, NodeId, Term
from quiver.record import Batch
from quiver.replication.catch_up import CatchUpLimiter
from quiver.replication.codec import GroupMessage
from quiver.replication.history import ReplicationCounters
from quiver.storage import DiskSpace

MessageHandler = Callable[[NodeId, memoryview], None]
"""Called with the sending node and one whole message, in the owner's event loop."""

LostHandler = Callable[[NodeId], None]
"""Called with a node whose connection broke: messages to it that were queued or in flight may be lost."""


class StateMachine(Protocol):
    """State that every member of a group computes from the same batches.

    The driver calls it in the event loop, with committed batches only, in order. Until the process ends, it passes each
    batch exactly once.
    """

    @property
    def applied_index(self) -> Index:
        """Return the index up to which the state reflects the log."""
        ...

    def apply(self, batches: Sequence[Batch]) -> None:
        """Apply committed batches, consecutive by index, including control batches of every kind.

        Whatever a batch of a known version contains, every member does the same with it and raises nothing.

        Raises:
            UnknownVersionError: a newer program wrote a batch; those before it, up to `applied_index`, are applied.
        """
        ...

    def apply_steps(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Do the work of an `apply` of these batches that would hold the event loop, in small steps; often none."""
        ...

    def snapshot_steps(self) -> Iterator[bytes]:
        """Freeze the state after all batches applied so far; return its bytes in parts, each made in a small step."""
        ...

    def restore_steps(self, state: bytes) -> Iterator[None]:
        """Do the work of a `restore` of these bytes that would hold the event loop, in small steps.

        Raises:
            UnknownVersionError: as `restore` would.
        """
        ...

    def restore(self, state: bytes) -> None:
        """Replace the state by a snapshot; empty bytes stand for the initial state.

        Raises:
            UnknownVersionError: a newer program wrote the snapshot; the state is unchanged.
        """
        ...


class Network(Protocol):
    """One node's connections to the others.

    A message arrives unchanged or not at all. It may be lost, duplicated, delayed or reordered.
    """

    def start(self, handler: MessageHandler, on_lost: LostHandler) -> None:
        """Begin to deliver incoming messages to `handler`, and to call `on_lost` when the connection to a node breaks.

        `on_lost` is a hint that saves waiting for a timeout: it may come late, wrongly or never.
        """
        ...

    def send(self, to: NodeId, parts: Sequence[Buffer]) -> None:
        """Queue one message, given in parts, for a node; never blocks, never raises for an unreachable node."""
        ...


class Scheduled(Protocol):
    """A member as its node's timer sees it."""

    group: GroupId
    next_deadline_ms: int | None


class Host(Protocol):
    """The node as its members see it."""

    @property
    def id(self) -> NodeId:
        """Return the node's id."""
        ...

    @property
    def catch_up_limiter(self) -> CatchUpLimiter:
        """Return the limit on the rate at which this node sends old entries to learners."""
        ...

    @property
    def space(self) -> DiskSpace:
        """Return the free space of the node's disk."""
        ...

    @property
    def counters(self) -> ReplicationCounters:
        """Return the counters of all members of the node."""
        ...

    def knows(self, node: NodeId) -> bool:
        """Return whether a node belongs to the cluster, for all that this node knows."""
        ...

    def note_refused(self, from_: NodeId, group: GroupId, term: Term) -> None:
        """Count and log a message that a member refused: of a stranger, or of a term that nobody can have reached."""
        ...

    def post(self, to: NodeId, message: GroupMessage, payloads: Sequence[Buffer] = ()) -> None:
        """Add a message to the next envelope to a node, which is sent in this turn of the loop."""
        ...

    def spawn(self, group: GroupId, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Run work of a member as a task; a `StorageError` stops the node, any other error that member."""
        ...

    def contain(self, group: GroupId, error: Exception) -> bool:
        """Stop one member because an unexpected error escaped its code, and leave all others alone.

        Return False if the owner of the node wants to see the error itself: then it must be raised.
        """
        ...

    def fail(self, error: StorageError) -> None:
        """Stop the node: its disk can no longer be trusted."""
        ...

    def deadline_changed(self, member: Scheduled) -> None:
        """Reschedule the member's next tick."""
        ...
