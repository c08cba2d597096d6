"""The state that a member has only while it leads: created on election, dropped on stepping down.

Because a new term gets a new object, nothing of an earlier leadership (progress, permissions to send,
reads, a transfer) can leak into a later one.

Invariants: `progress` names every member of the configuration, this one too; `electorates` lists the
progress of exactly those whose agreement counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from quiver.model import Index, NodeId
from quiver.raft.configuration import Configuration, majority_value
from quiver.raft.output import ReadReady
from quiver.raft.progress import PeerProgress


class Transfer(Struct):
    """A running transfer of leadership."""

    to: NodeId
    deadline_ms: int
    is_target_notified: bool = False


class ReadQueue:
    """The reads of one leadership, in order of arrival (dissertation §6.4).

    A read waits for a round of heartbeats that *began after it arrived* and was answered by a quorum. Reads that arrive
    while a round is in flight share the next one. A round's number is never used twice, so a late answer cannot
    confirm a later read (R11).
    """

    __slots__ = ("_unready", "_waiting")

    def __init__(self) -> None:
        self._unready: list[int] = []
        self._waiting: deque[tuple[int, int, Index]] = deque()

    def __len__(self) -> int:
        return len(self._unready) + len(self._waiting)

    def hold(self, context: int) -> None:
        """Hold a read until the leader has committed in its own term (R10)."""
        self._unready.append(context)

    def add(self, context: int, *, index: Index, needed_round: int) -> None:
        """Queue a read of everything up to `index` until `needed_round` is answered."""
        self._waiting.append((needed_round, context, index))

    def make_ready(self, *, index: Index, needed_round: int) -> bool:
        """Queue the held reads for a round; return whether there were any."""
        for context in self._unready:
            self.add(context, index=index, needed_round=needed_round)
        released = bool(self._unready)
        self._unready.clear()
        return released

    def needs_round_after(self, latest_round: int) -> bool:
        """Return whether a read waits for a round later than the latest one begun."""
        return bool(self._waiting) and self._waiting[-1][0] > latest_round

    def has_round_in_flight(self, latest_round: int) -> bool:
        """Return whether a read waits for a round that has begun."""
        return bool(self._waiting) and self._waiting[0][0] <= latest_round

    def release(self, confirmed_round: int) -> list[ReadReady]:
        """Remove and return the reads whose round a quorum has answered."""
        ready: list[ReadReady] = []
        waiting = self._waiting
        while waiting and waiting[0][0] <= confirmed_round:
            _, context, index = waiting.popleft()
            ready.append(ReadReady(context, index))
        return ready

    def contexts(self) -> list[int]:
        """Return every read that still waits, in order of arrival."""
        return [*(context for _, context, _ in self._waiting), *self._unready]


class Leadership:
    """The volatile state of a leader (Figure 2), and its bounds."""

    __slots__ = (
        "commit_round",
        "electorates",
        "first_own_index",
        "heartbeat_deadline_ms",
        "idle_heartbeats",
        "own",
        "peers",
        "progress",
        "reads",
        "transfer",
        "uncommitted",
        "uncommitted_bytes",
    )

    def __init__(self, node: NodeId, *, first_own_index: Index, now_ms: int) -> None:
        self.own = PeerProgress(node, next_index=first_own_index, now_ms=now_ms)
        self.first_own_index = first_own_index
        self.progress: dict[NodeId, PeerProgress] = {node: self.own}
        self.peers: list[PeerProgress] = []
        self.electorates: list[list[PeerProgress]] = []
        self.heartbeat_deadline_ms = now_ms
        self.reads = ReadQueue()
        self.transfer: Transfer | None = None
        self.uncommitted: deque[tuple[Index, int]] = deque()
        self.uncommitted_bytes = 0
        self.commit_round = 0
        self.idle_heartbeats = 0

    def reconfigure(
        self,
        configuration: Configuration,
        *,
        electorates: Sequence[Sequence[NodeId]],
        next_index: Index,
        now_ms: int,
    ) -> None:
        """Follow a configuration that came into force: count the votes of `electorates`, serve all its members."""
        previous = self.progress
        self.progress = {self.own.node: self.own}
        for node in configuration.members:
            known = previous.get(node) or PeerProgress(node, next_index=next_index, now_ms=now_ms)
            self.progress[node] = known
        self.peers = [progress for node, progress in self.progress.items() if node != self.own.node]
        self.electorates = [[self.progress[node] for node in nodes] for nodes in electorates]

    def agreed_match(self) -> Index:
        """Return the highest index that is durable on a quorum."""
        agreed = majority_value([member.match for member in self.electorates[0]])
        if len(self.electorates) > 1:
            agreed = min(agreed, majority_value([member.match for member in self.electorates[1]]))
        return Index(agreed)

    def agreed_round(self) -> int:
        """Return the latest round that a quorum has answered."""
        return min(majority_value([member.round for member in voters]) for voters in self.electorates)

    def quorum_heard_ms(self) -> int:
        """Return since when a quorum has been heard from."""
        return min(majority_value([member.heard_ms for member in voters]) for voters in self.electorates)

    def has_roomy_quorum(self) -> bool:
        """Return whether a quorum has room for records on its disks."""
        for voters in self.electorates:  # asked for each batch of records: without a generator
            low = 0
            for member in voters:
                low += member.is_low
            if 2 * low >= len(voters):
                return False
        return True

    def begin_round(self, number: int, *, now_ms: int) -> None:
        """Count the leader's own answer to a new round."""
        self.own.round = number
        self.own.heard_ms = now_ms

    def admit(self, last_index: Index, size_bytes: int) -> None:
        """Count proposed bytes as uncommitted until `last_index` is committed."""
        self.uncommitted.append((last_index, size_bytes))
        self.uncommitted_bytes += size_bytes

    def settle(self, commit: Index) -> None:
        """Stop counting proposals that are committed whole."""
        uncommitted = self.uncommitted
        while uncommitted and uncommitted[0][0] <= commit:
            self.uncommitted_bytes -= uncommitted.popleft()[1]

    def successor(self, voters: tuple[NodeId, ...]) -> NodeId:
        """Return the voter that has the most of the log, the lowest id among equals; a lost one has nothing."""
        return max(sorted(voters), key=lambda node: self.progress[node].match)
