"""Durability of what members call committed or acknowledge to each other (I2, I6, I10).

`check_majority` requires that an entry that a leader calls committed is durable on a majority. At every commit it asks
the members (for a dead member: its state when it died), and from time to time the simulated platters: after a power
loss at this moment, would the whole entry and the name of its file be there?

`PromiseChecker` checks every message that leaves a member. A vote is given once per term, over all lives of the member;
terms in messages never go back; an acknowledged entry is durable at that moment; and a member that votes still has
every committed entry that it ever acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from quiver.model import GroupId, Index, NodeId, Term
from quiver.raft import AppendResponse, Configuration, HeartbeatResponse, Raft, RaftMessage, VoteRequest, VoteResponse
from quiver.raft.progress import PeerProgress
from quiver.replication.codec import GroupMessage
from quiver.storage import Log
from quiver.storage.scan import SegmentFrame, decode_frame
from quiver.storage.segment import Segment
from quiver.testing.checkers.committed import CommittedLog
from quiver.testing.disk import SimulatedDisk
from quiver.testing.simulator.report import require, violated

_LOOK_BYTES = 64 * 1024
"""More than any simulated batch."""


class Copy(Protocol):
    """One member's copy of a group's log, alive or not."""

    @property
    def term(self) -> Term:
        """Return the member's term."""
        ...

    def holds(self, index: Index, term: Term) -> bool:
        """Return whether an entry is durable there, by the member's own word."""
        ...

    def holds_on_platter(self, index: Index, term: Term) -> bool:
        """Return whether a restart after a power loss would find the entry there."""
        ...


def check_majority(
    configuration: Configuration,
    copies: Mapping[NodeId, Copy],
    *,
    group: GroupId,
    index: Index,
    term: Term,
    on_platter: bool,
) -> None:
    """Fail unless an entry is durable on a majority of every electorate."""
    for voters in configuration.electorates:
        holders = [
            node for node in voters if node in copies and _holds(copies[node], index, term, on_platter=on_platter)
        ]
        require(
            2 * len(holders) > len(voters),
            "I6",
            "an entry is committed that is not durable on a majority" + (" of platters" if on_platter else ""),
            group=group,
            index=index,
            term=term,
            voters=_list(voters),
            holders=_list(holders),
        )


class PlatterReader:
    """Look entries of one log up on the platter of its disk.

    It continues from where the last entry was found, since requested indexes grow; otherwise the log's own bookkeeping
    says where to search, and nothing more. A segment that was cut is another object and is searched from its start.
    """

    def __init__(self, disk: SimulatedDisk, log: Log) -> None:
        self._disk = disk
        self._log = log
        self._segment: Segment | None = None
        self._index = Index(0)
        self._position = 0

    def holds(self, index: Index, term: Term) -> bool:
        """Return whether an entry is on the platter, whole, in a file whose name is there, too."""
        if index < self._log.first_index:
            return True  # the log starts after it: a snapshot covers it
        segments = self._log._segments
        segment = next((segment for segment in segments if segment.first_index <= index < segment.end_index), None)
        if segment is None:
            return False
        position = segment.position_before_index(index)
        if segment is self._segment and self._index <= index:
            position = max(position, self._position)
        while (frame := self._read_frame(segment, position)) is not None:
            if frame.header is not None and frame.header.index == index:
                self._segment, self._index, self._position = segment, index, position
                return frame.header.term == term
            position += frame.end
        return False

    def _read_frame(self, segment: Segment, position: int) -> SegmentFrame | None:
        data = self._disk.read_platter(f"{self._log.directory}/{segment.name}", position, _LOOK_BYTES)
        frame = decode_frame(data, 0) if data else None
        return frame if isinstance(frame, SegmentFrame) else None


def _holds(copy: Copy, index: Index, term: Term, *, on_platter: bool) -> bool:
    return copy.holds_on_platter(index, term) if on_platter else copy.holds(index, term)


def _list(nodes: Iterable[NodeId]) -> str:
    return "(" + " ".join(f"n{node}" for node in nodes) + ")"


Belief = tuple[PeerProgress, Index, Index]
"""What a leader knows of a member, and the match and received indexes in it at some moment."""

_KEPT_MAX = 64
"""How many acknowledgements of a member are remembered, besides the highest committed one."""


class PromiseChecker:
    """Check the messages of one member, over all its lives."""

    def __init__(self, node: NodeId, committed: CommittedLog) -> None:
        self._node = node
        self._committed = committed
        self._term_said = Term(0)
        self._votes: dict[Term, NodeId] = {}
        self._acknowledged: dict[Index, Term] = {}

    def say(self, to: NodeId, message: RaftMessage, raft: Raft, log: Log) -> None:
        """Take a message that leaves the member."""
        kind = type(message)
        if kind is VoteResponse or kind is VoteRequest:
            self._ask_or_vote(to, message, raft)  # type: ignore[arg-type] # narrowed by the line above
            return
        self._say_term(message.term)
        if (kind is AppendResponse or kind is HeartbeatResponse) and message.match_index:  # type: ignore[union-attr] # as above
            self._acknowledge(message.match_index, raft, log)  # type: ignore[union-attr] # as above

    def say_term(self, term: Term) -> None:
        """Take the term of an append."""
        self._say_term(term)

    def belief(self, from_: NodeId, item: GroupMessage, raft: Raft) -> Belief | None:
        """Return what a leader believes of a member whose answer of an earlier term it is about to take."""
        leadership = raft._state.leadership
        if leadership is None or item.plain is None or item.plain.term >= raft.term:
            return None
        progress = leadership.progress.get(from_)
        return None if progress is None else (progress, progress.match, progress.received)

    def hear(
        self, from_: NodeId, item: GroupMessage, raft: Raft, copy: Copy | None, belief: Belief | None = None
    ) -> None:
        """Take a message that the member has taken; `copy` is the sender's log, `belief` what was believed before.

        One of a later term moves the member there (§5.1); an answer makes a leader believe no more than is true,
        and one to an earlier leader nothing at all (R7).
        """
        message = item.append or item.plain
        assert message is not None
        kind = type(message)
        if belief is not None:
            self._keep(belief, from_, raft, answered=message.term)
        if message.term > raft.term and kind is not VoteRequest and kind is not VoteResponse:
            violated(
                "I2",
                "a member heard of a later term and stays in its own",
                group=self._committed.group,
                node=self._node,
                term=raft.term,
                heard=message.term,
            )
        leadership = raft._state.leadership
        is_answer = kind is AppendResponse or kind is HeartbeatResponse
        # A leader that was replaced and does not know it may take an answer that was slow: what the member had when it
        # answered, a later leader may have overwritten since.
        if leadership is not None and copy is not None and is_answer and copy.term <= raft.term:
            progress = leadership.progress.get(from_)
            if progress is not None:
                self._believe(from_, progress.match, raft, copy)

    def _keep(self, belief: Belief, peer: NodeId, raft: Raft, *, answered: Term) -> None:
        progress, match, received = belief
        require(
            (progress.match, progress.received) == (match, received),
            "I6",
            "an answer of an earlier term moves what a leader believes",
            group=self._committed.group,
            leader=self._node,
            member=peer,
            term=raft.term,
            answered=answered,
        )

    def _believe(self, peer: NodeId, match: Index, raft: Raft, copy: Copy) -> None:
        term = raft.term_at(match)
        if match and term is not None and not copy.holds(match, term):
            violated(
                "I6",
                "a leader believes that a member has what it has not",
                group=self._committed.group,
                leader=self._node,
                member=peer,
                index=match,
                term=term,
            )

    def _say_term(self, term: Term) -> None:
        if term < self._term_said:
            violated(
                "I2",
                "a member speaks in an earlier term than before",
                group=self._committed.group,
                node=self._node,
                term=term,
                before=self._term_said,
            )
        self._term_said = term

    def _ask_or_vote(self, to: NodeId, message: VoteRequest | VoteResponse, raft: Raft) -> None:
        if message.pre:
            return
        self._say_term(message.term)
        if isinstance(message, VoteRequest):
            self._vote(message.term, self._node, raft)
        elif message.granted:
            self._vote(message.term, to, raft)

    def _vote(self, term: Term, candidate: NodeId, raft: Raft) -> None:
        known = self._votes.setdefault(term, candidate)
        facts = {"group": self._committed.group, "node": self._node, "term": term}
        require(known == candidate, "I2", "a member votes twice in one term", first=known, second=candidate, **facts)
        kept = self._highest_kept_promise()
        if kept and kept >= raft.first_index and raft.term_at(kept) != self._committed.terms[kept]:
            violated("I10", "a member votes without an entry that it acknowledged", index=kept, **facts)

    def _acknowledge(self, index: Index, raft: Raft, log: Log) -> None:
        require(
            index < log.durable_end_index,
            "I6",
            "a member acknowledges what is not durable",
            group=self._committed.group,
            node=self._node,
            index=index,
            durable_end=log.durable_end_index,
        )
        term = raft.term_at(index)
        if term is not None and index not in self._acknowledged:
            self._acknowledged[index] = term
            if len(self._acknowledged) > _KEPT_MAX:
                self._forget()

    def _highest_kept_promise(self) -> Index:
        """Return the highest acknowledged entry that was committed."""
        terms = self._committed.terms
        return max(
            (index for index, term in self._acknowledged.items() if index < len(terms) and terms[index] == term),
            default=Index(0),
        )

    def _forget(self) -> None:
        highest = self._highest_kept_promise()
        self._acknowledged = {index: term for index, term in self._acknowledged.items() if index >= highest}
