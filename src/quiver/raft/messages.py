"""The messages between members, and the entries of the log.

Every message carries its sender's term (a pre-vote: the term the sender would take). Messages say
nothing about groups or addresses: the driver adds those. They may be lost, duplicated, delayed and
reordered. Tags name the kinds on the wire.

`round` numbers a leader's heartbeats. Every answer of a follower echoes the highest round it has
received in this term, which proves that it still followed this leader after that round began.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated

from msgspec import Meta, Struct

from quiver.model import POSITION_MAX, Buffer, Index, NodeId, Term
from quiver.raft.configuration import Configuration

Round = Annotated[int, Meta(ge=0, le=POSITION_MAX)]


class EntryKind(IntEnum):
    """The purpose of an entry."""

    DATA = 0
    NOOP = 1
    CONFIG = 2


class Entry(Struct, frozen=True, gc=False):
    """One entry of a log; `configuration` is set exactly for `CONFIG`.

    The core never reads `data`, and keeps no entry after the event that brought it.
    """

    index: Index
    term: Term
    kind: EntryKind = EntryKind.DATA
    data: Buffer = b""
    configuration: Configuration | None = None

    @property
    def size(self) -> int:
        """Return the bytes that count for flow control."""
        return len(self.data)


class SnapshotMetadata(Struct, frozen=True, gc=False):
    """A snapshot of everything up to `last_index`, without its content."""

    last_index: Index
    last_term: Term
    configuration: Configuration


class VoteRequest(Struct, frozen=True, gc=False, tag="vote"):
    """Ask for a vote (§5.2), or with `pre` whether one would be given (dissertation §9.6).

    `transfer` says that the leader itself asked for this election (dissertation §3.10).
    """

    term: Term
    last_index: Index
    last_term: Term
    pre: bool = False
    transfer: bool = False


class VoteResponse(Struct, frozen=True, gc=False, tag="vote_response"):
    """Answer a vote request; a granted pre-vote carries the request's term, all else the sender's."""

    term: Term
    granted: bool
    pre: bool = False


class Append(Struct, frozen=True, gc=False, tag="append"):
    """Carry entries `prev_index + 1 …` from the leader (§5.3)."""

    term: Term
    prev_index: Index
    prev_term: Term
    entries: Sequence[Entry]
    commit: Index
    round: Round


class AppendResponse(Struct, frozen=True, gc=False, tag="append_response"):
    """Answer an append or a snapshot.

    `match_index` is what counts: equal to the leader's log *and* durable here. `received_index` is equal
    but perhaps not durable yet, `durable_index` durable but perhaps not equal. When not accepted,
    `rejected_index` names the append and the hint is the highest entry that could be common. With `disk_low`
    the member should get no more records, with `disk_full` it stores no entries for now. One that is `joining` has no
    vote yet (R24).
    """

    term: Term
    accepted: bool
    match_index: Index
    received_index: Index
    durable_index: Index
    round: Round
    rejected_index: Index = Index(0)
    hint_index: Index = Index(0)
    hint_term: Term = Term(0)
    recovering: bool = False
    disk_low: bool = False
    disk_full: bool = False
    joining: bool = False


class Heartbeat(Struct, frozen=True, gc=False, tag="heartbeat"):
    """Assert leadership, begin a round, carry the commit index; with `hibernate`, ask the follower to hibernate."""

    term: Term
    commit: Index
    round: Round
    hibernate: bool = False


class HeartbeatResponse(Struct, frozen=True, gc=False, tag="heartbeat_response"):
    """Answer a heartbeat; the fields mean what they mean in `AppendResponse`."""

    term: Term
    match_index: Index
    received_index: Index
    durable_index: Index
    round: Round
    recovering: bool = False
    disk_low: bool = False
    disk_full: bool = False
    joining: bool = False


class InstallSnapshot(Struct, frozen=True, gc=False, tag="install_snapshot"):
    """Say that the snapshot's content has arrived by the driver's own way (§7); answered by `AppendResponse`."""

    term: Term
    snapshot: SnapshotMetadata
    round: Round


class TimeoutNow(Struct, frozen=True, gc=False, tag="timeout_now"):
    """Ask a caught-up voter to campaign immediately (dissertation §3.10)."""

    term: Term


RaftMessage = (
    Append | AppendResponse | Heartbeat | HeartbeatResponse | VoteRequest | VoteResponse | InstallSnapshot | TimeoutNow
)
"""Everything that `Raft.receive` takes."""


class Outgoing(Struct, frozen=True, gc=False):
    """A message and the member it is for."""

    to: NodeId
    message: RaftMessage
