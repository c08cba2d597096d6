"""The core's instructions: one `Output` per event, and the order in which the driver must carry it out.

The types here are the whole contract between the core and its driver; nothing else leaves the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from quiver.model import Index, NodeId, Term
from quiver.raft.messages import Entry, Outgoing, SnapshotMetadata


class Role(StrEnum):
    """The role of a member in its term (§5.1); a learner is a follower."""

    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre_candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


class HardState(Struct, frozen=True, gc=False):
    """The state that must survive a crash besides the log (§5.1, Figure 2)."""

    term: Term
    vote: NodeId | None


class SendEntries(Struct, frozen=True, gc=False):
    """Let the driver send one `Append` with entries from `first_index` on.

    Read as many entries of [first_index, end_index) as fit `bytes_max`, at least one; an empty range asks for
    an append without entries. Send them with the fields given here; then call `Raft.sent` with this `ticket`,
    in the same turn or later. Until then no further permission for this member is given, unless its state
    changed so that this one is void.
    """

    to: NodeId
    ticket: int
    term: Term
    prev_index: Index
    prev_term: Term
    first_index: Index
    end_index: Index
    commit: Index
    round: int
    bytes_max: int


class SendSnapshot(Struct, frozen=True, gc=False):
    """Let the driver send a snapshot whose last index is at least `needed_index`, then `InstallSnapshot`.

    The driver sends the content by its own way, then `InstallSnapshot(term, snapshot, round)`, then calls
    `Raft.snapshot_sent`, or `Raft.snapshot_failed` if it could not.
    """

    to: NodeId
    ticket: int
    term: Term
    needed_index: Index
    round: int


class ReadReady(Struct, frozen=True, gc=False):
    """A read that may be answered once the driver has applied everything up to `index`."""

    context: int
    index: Index


class RoleChange(Struct, frozen=True, gc=False):
    """A member's new role, term and leader."""

    role: Role
    term: Term
    leader: NodeId | None


class Output(Struct, gc=False):
    """Everything that one event asks for.

    The driver's contract. Outputs of one group are carried out strictly in the order in which they were
    returned, and inside one output in this order:

    1. `truncate_from`: remove the log's entries from this index on.
    2. `append`: write these entries at the log's end. *Only this need not be waited for*: when the log
       is durable up to some index, call `Raft.durable(index, term)` with the `term` of the output that
       carried the write.
    3. `restore`: replace log and state by the snapshot received, atomically, wait until that is durable,
       then call `Raft.snapshot_restored`.
    4. `messages`: may be sent immediately.
    5. `hard_state`: save it and **wait until it is durable** (R2). Nothing below, and nothing of any later
       output, may begin before that. Elections alone pay for this wait.
    6. `messages_after_save`, `send`, `send_snapshot`: may leave now. When `hard_state` is set every message
       is in `messages_after_save`, else in `messages`; so no message can say more than the disk does.
    7. The rest is information: `committed`, `reads`, `reads_failed`, `became`, `proposals_lost`, `joined`,
       `recovered`, `is_refused`, `trace`.

    On disk after each step: a crash between 2 and 5 leaves entries of a term that was not saved, which
    `InitialState` allows for; a crash after 5 leaves all that the messages promise, except durable entries,
    which no message promises before `Raft.durable` has said so (R3).
    """

    term: Term
    """The term after this event."""
    next_deadline_ms: int | None
    """When `Raft.tick` must be called at the latest; None: no need (hibernating, or no right to campaign)."""
    truncate_from: Index | None = None
    append: Sequence[Entry] = ()
    restore: SnapshotMetadata | None = None
    hard_state: HardState | None = None
    messages: list[Outgoing] = []
    messages_after_save: Sequence[Outgoing] = ()
    send: list[SendEntries] = []
    send_snapshot: Sequence[SendSnapshot] = ()
    committed: range = range(0)
    """Indexes newly committed: durable on a quorum, perhaps not yet here. See `Raft.applicable_index`."""
    reads: Sequence[ReadReady] = ()
    reads_failed: Sequence[int] = ()
    """Contexts of reads that this member will not answer: leadership was lost."""
    became: RoleChange | None = None
    proposals_lost: Index | None = None
    """Leadership was lost: proposals from this index on may or may not be committed by another leader."""
    joined: bool = False
    """This member has caught up with the group that it joins: clear its mark in the same save as `hard_state`."""
    recovered: bool = False
    """The damage named by `InitialState.recover_until` is repaired: the driver may clear its mark."""
    is_refused: bool = False
    """The message came from a stranger, or from a term that no election can have reached; it changed nothing (R23)."""
    trace: Sequence[str] = ()
