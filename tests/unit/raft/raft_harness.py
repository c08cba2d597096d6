"""A cluster of cores in memory, moved by hand: every delivery, loss, sync and crash is a call.

It carries out outputs exactly as `Output` demands, keeps what each member's disk would hold, and checks
the safety properties (Figure 3; I1-I6 of the invariants' list) after every step.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from quiver.model import Index, NodeId, Term
from quiver.raft import (
    Append,
    Configuration,
    Entry,
    HardState,
    InitialState,
    InstallSnapshot,
    Output,
    Raft,
    RaftConfig,
    RaftMessage,
    Role,
    SendEntries,
    SendSnapshot,
    SnapshotMetadata,
)

Reporter = Callable[[str], None]


class Envelope(NamedTuple):
    from_: NodeId
    to: NodeId
    message: RaftMessage


class Write(NamedTuple):
    end: Index
    term: Term
    generation: int


class Disk:
    """What a member's disk holds, and what was written to it but not synced."""

    def __init__(self, configuration: Configuration | None) -> None:
        self.base = (Index(0), Term(0))
        self.entries: list[Entry] = []
        self.synced = Index(0)
        self.generation = 0
        self.hard_state = HardState(Term(0), None)
        self.configurations = [(Index(0), configuration)] if configuration is not None else []
        self.recover_until: Index | None = None
        self.is_joining = configuration is None

    @property
    def last_index(self) -> Index:
        return Index(self.base[0] + len(self.entries))

    def entry(self, index: Index) -> Entry:
        entry = self.entries[index - self.base[0] - 1]
        assert entry.index == index
        return entry

    def holds(self, index: Index) -> bool:
        return self.base[0] < index <= self.last_index

    def append(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            assert entry.index == self.last_index + 1, "the core appends at the log's end"
            self.entries.append(entry)
            if entry.configuration is not None:
                self.configurations.append((entry.index, entry.configuration))

    def truncate(self, first_index: Index) -> None:
        del self.entries[first_index - self.base[0] - 1 :]
        self.configurations = [pair for pair in self.configurations if pair[0] < first_index]
        self.synced = min(self.synced, self.last_index)
        self.generation += 1

    def restore(self, snapshot: SnapshotMetadata) -> None:
        self.base = (snapshot.last_index, snapshot.last_term)
        self.entries = []
        self.configurations = [(snapshot.last_index, snapshot.configuration)]
        self.synced = snapshot.last_index
        self.generation += 1

    def compact(self, first_index: Index) -> None:
        last = self.entry(Index(first_index - 1))
        del self.entries[: first_index - self.base[0] - 1]
        self.base = (last.index, last.term)

    def snapshot(self) -> SnapshotMetadata:
        index, term = self.base
        known = [configuration for first, configuration in self.configurations if first <= index]
        return SnapshotMetadata(index, term, known[-1])

    def crash(self) -> None:
        """Lose whatever was not synced."""
        if self.last_index > self.synced:
            self.truncate(Index(self.synced + 1))

    def initial_state(self, *, commit: Index = Index(0)) -> InitialState:  # noqa: B008 - a NewType call makes an int
        runs: list[tuple[Index, Term]] = []
        for entry in self.entries:
            if not runs or runs[-1][1] != entry.term:
                runs.append((entry.index, entry.term))
        return InitialState(
            term=self.hard_state.term,
            vote=self.hard_state.vote,
            first_index=Index(self.base[0] + 1),
            last_index=self.last_index,
            base_term=self.base[1],
            terms=tuple(runs),
            commit=commit,
            configurations=tuple(self.configurations),
            recover_until=self.recover_until,
            is_joining=self.is_joining,
        )


class Member:
    """One core, its disk, and the driver's part in between."""

    def __init__(self, cluster: Cluster, config: RaftConfig, configuration: Configuration | None) -> None:
        self.cluster = cluster
        self.config = config
        self.id = config.id
        self.disk = Disk(configuration)
        self.is_up = True
        self.auto_sync = True
        self.auto_restore = True
        self.auto_send = True
        self.start()

    def start(self, *, commit: Index = Index(0)) -> None:  # noqa: B008 - a NewType call makes an int
        """Start from the disk."""
        rng = random.Random(self.cluster.seed * 1_000 + self.id)
        initial = self.disk.initial_state(commit=commit)
        self.raft = Raft(self.config, initial, rng=rng, now_ms=self.cluster.now_ms)
        self.is_up = True
        self.queue: deque[Output] = deque()
        self.writes: deque[Write] = deque()
        self.permissions: list[SendEntries] = []
        self.snapshot_permissions: list[SendSnapshot] = []
        self.restoring: list[SnapshotMetadata] = []
        self.reads: dict[int, Index] = {}
        self.reads_failed: list[int] = []
        self.outputs: list[Output] = []
        self.roles: list[tuple[Role, Term]] = []
        self.highest_term = self.raft.term
        self.highest_commit = self.raft.commit_index

    def run(self, output: Output) -> Output:
        """Carry outputs out in the order in which they came; those that come meanwhile queue behind."""
        self.outputs.append(output)
        self.queue.append(output)
        if len(self.queue) == 1:
            while self.queue:
                self._carry_out(self.queue[0])
                self.queue.popleft()
        return output

    def _carry_out(self, output: Output) -> None:
        """Do what an output asks, in the order of its contract."""
        disk = self.disk
        if output.truncate_from is not None:
            disk.truncate(output.truncate_from)
        if output.append:
            disk.append(output.append)
            self.writes.append(Write(disk.last_index, output.term, disk.generation))
        if output.restore is not None:
            self.restoring.append(output.restore)
            disk.restore(output.restore)
        self._post(output.messages)
        if output.hard_state is not None:
            disk.hard_state = output.hard_state
        else:
            assert not output.messages_after_save
        self._post(output.messages_after_save)
        self._note(output)
        self.cluster.check(self)
        self._automate(output)

    def _post(self, messages: Iterable[Any]) -> None:
        for outgoing in messages:
            self.cluster.post(Envelope(self.id, outgoing.to, outgoing.message))

    def _note(self, output: Output) -> None:
        for index in output.committed:
            self.cluster.note_committed(self, Index(index))
        for ready in output.reads:
            floor = self.cluster.reads_expected.get(ready.context, Index(0))
            assert ready.index >= floor, f"R11: read {ready.context} sees {ready.index}, {floor} was committed before"
            self.reads[ready.context] = ready.index
            self.cluster.report(f"n{self.id}: read {ready.context} may be answered at {ready.index}")
        for context in output.reads_failed:
            self.reads_failed.append(context)
            self.cluster.report(f"n{self.id}: read {context} failed")
        if output.became is not None:
            self.roles.append((output.became.role, output.became.term))
        if output.recovered:
            self.disk.recover_until = None
        if output.joined:
            self.disk.is_joining = False
        for line in output.trace:
            self.cluster.report(f"n{self.id}: {line}")

    def _automate(self, output: Output) -> None:
        self.permissions.extend(output.send)
        self.snapshot_permissions.extend(output.send_snapshot)
        if self.auto_send:
            while self.permissions:
                self.send(self.permissions.pop(0))
        while self.snapshot_permissions and self.auto_send:
            self.send_snapshot(self.snapshot_permissions.pop(0))
        if self.auto_restore:
            self.finish_restore()
        if self.auto_sync:
            self.sync()

    def send(self, permission: SendEntries) -> Output:
        """Send one append under a permission, as a driver would."""
        entries, size = self.read_entries(permission)
        message = Append(
            permission.term,
            permission.prev_index,
            permission.prev_term,
            tuple(entries),
            permission.commit,
            permission.round,
        )
        self.cluster.post(Envelope(self.id, permission.to, message))
        end_index = Index(permission.first_index + len(entries))
        return self.run(self.raft.sent(permission.to, ticket=permission.ticket, end_index=end_index, size_bytes=size))

    def read_entries(self, permission: SendEntries) -> tuple[list[Entry], int]:
        entries: list[Entry] = []
        size = 0
        for index in range(permission.first_index, permission.end_index):
            if not self.disk.holds(Index(index)):
                break
            entry = self.disk.entry(Index(index))
            if entries and size + entry.size > permission.bytes_max:
                break
            entries.append(entry)
            size += entry.size
        return entries, size

    def send_snapshot(self, permission: SendSnapshot) -> Output:
        snapshot = self.disk.snapshot()
        assert snapshot.last_index >= permission.needed_index
        message = InstallSnapshot(permission.term, snapshot, permission.round)
        self.cluster.post(Envelope(self.id, permission.to, message))
        return self.run(self.raft.snapshot_sent(permission.to, ticket=permission.ticket))

    def sync(self, count: int | None = None) -> None:
        """Report writes as durable: all, or the oldest `count`."""
        for write in [self.writes.popleft() for _ in range(len(self.writes) if count is None else count)]:
            if write.generation == self.disk.generation:
                self.disk.synced = max(self.disk.synced, write.end)
            self.run(self.raft.durable(write.end, write.term))

    def finish_restore(self) -> None:
        while self.restoring:
            self.run(self.raft.snapshot_restored(self.restoring.pop(0).last_index))

    # Events

    def tick(self) -> Output:
        return self.run(self.raft.tick(self.cluster.now_ms))

    def receive(self, from_: int, message: RaftMessage) -> Output:
        return self.run(self.raft.receive(NodeId(from_), message, self.cluster.now_ms))

    def propose(self, *data: bytes) -> Output:
        term, index = self.raft.next_slot()
        entries = [Entry(Index(index + position), term, data=item) for position, item in enumerate(data)]
        return self.run(self.raft.propose(entries, self.cluster.now_ms))

    def read(self, context: int) -> Output:
        return self.run(self.raft.read(context, self.cluster.now_ms))

    def transfer(self, to: int) -> Output:
        return self.run(self.raft.transfer_leadership(NodeId(to), self.cluster.now_ms))

    def change(self, voters: Iterable[int], learners: Iterable[int] = ()) -> Output:
        output = self.raft.change_membership(
            voters=tuple(map(NodeId, voters)), learners=tuple(map(NodeId, learners)), now_ms=self.cluster.now_ms
        )
        return self.run(output)

    def compact(self, first_index: int) -> None:
        self.disk.compact(Index(first_index))
        self.raft.compacted(Index(first_index))

    def crash(self) -> None:
        """Lose power: memory and unsynced writes are gone."""
        self.is_up = False
        self.disk.crash()

    def restart(self) -> None:
        self.start()

    @property
    def data(self) -> list[bytes]:
        """The log as a driver would serve it: `.` for entries without data."""
        return [bytes(entry.data) or b"." for entry in self.disk.entries]


class Cluster:
    """Some members and the messages between them."""

    def __init__(
        self,
        count: int = 3,
        *,
        voters: Iterable[int] | None = None,
        learners: Iterable[int] = (),
        blank: Iterable[int] = (),
        seed: int = 1,
        report: Reporter | None = None,
        **settings: Any,
    ) -> None:
        self.seed = seed
        self.now_ms = 1_000
        self.report: Reporter = report or (lambda line: None)
        self.network: list[Envelope] = []
        self.delivered: deque[Envelope] = deque(maxlen=1_000)
        self.cuts: set[tuple[int, int]] = set()
        self.stopped: set[int] = set()
        self.leaders: dict[Term, NodeId] = {}
        self.committed: dict[Index, Entry] = {}
        self.reads_expected: dict[int, Index] = {}
        self.quorum_checked = True
        everybody = range(1, count + 1)
        voting = tuple(map(NodeId, voters if voters is not None else everybody))
        self.configuration = Configuration(voters=voting, learners=tuple(map(NodeId, learners)))
        blanks = set(blank)
        self.members: dict[int, Member] = {}
        for node in everybody:
            config = RaftConfig(id=NodeId(node), trace=report is not None, **settings)
            self.members[node] = Member(self, config, None if node in blanks else self.configuration)

    def __getitem__(self, node: int) -> Member:
        return self.members[node]

    # The network

    def post(self, envelope: Envelope) -> None:
        if (envelope.from_, envelope.to) not in self.cuts and envelope.to in self.members:
            self.network.append(envelope)

    def cut(self, one: int, *others: int) -> None:
        """Cut the links between `one` and the others, both ways."""
        for other in others or [node for node in self.members if node != one]:
            self.cuts |= {(one, other), (other, one)}
        self.network = [e for e in self.network if (e.from_, e.to) not in self.cuts]

    def heal(self) -> None:
        self.cuts.clear()

    def deliver(self, envelope: Envelope) -> None:
        """Deliver one message now; it need not be in the network (a duplicate)."""
        if envelope in self.network:
            self.network.remove(envelope)
        self.delivered.append(envelope)
        member = self.members[envelope.to]
        if member.is_up:
            member.receive(envelope.from_, envelope.message)

    def settle(self, limit: int = 10_000) -> None:
        """Deliver everything, in order, until nothing is left."""
        for _ in range(limit):
            waiting = next((e for e in self.network if e.to not in self.stopped), None)
            if waiting is None:
                return
            self.deliver(waiting)
        raise AssertionError("the cluster does not come to rest")

    def drop(self, kind: type | None = None, *, to: int | None = None, from_: int | None = None) -> int:
        """Lose messages; return how many."""
        before = len(self.network)
        self.network = [
            e
            for e in self.network
            if not (
                (kind is None or isinstance(e.message, kind))
                and (to is None or e.to == to)
                and (from_ is None or e.from_ == from_)
            )
        ]
        return before - len(self.network)

    def pending(self, kind: type, *, to: int | None = None) -> list[Any]:
        """Return the messages of a kind that are under way."""
        return [e.message for e in self.network if isinstance(e.message, kind) and to in (None, e.to)]

    # Time

    def elapse(self, duration_ms: int, *, step_ms: int = 10, deliver: bool = True) -> None:
        """Let time pass: ticks when due, everything delivered in each step."""
        end_ms = self.now_ms + duration_ms
        while self.now_ms < end_ms:
            self.now_ms = min(self.now_ms + step_ms, end_ms)
            for member in self.members.values():
                deadline_ms = member.raft.next_deadline_ms
                is_running = member.is_up and member.id not in self.stopped
                if is_running and deadline_ms is not None and deadline_ms <= self.now_ms:
                    member.tick()
            if deliver:
                self.settle()

    def campaign(self, node: int) -> None:
        """Let one member's election timeout pass, and nobody else's."""
        deadline_ms = self[node].raft.next_deadline_ms
        assert deadline_ms is not None, "this member may not campaign"
        self.now_ms = max(self.now_ms, deadline_ms)
        self[node].tick()

    def elect(self, node: int) -> Member:
        """Make a member the leader, with everything delivered."""
        self.campaign(node)
        self.settle()
        assert self[node].raft.is_leader, f"n{node} was not elected: {self[node].raft.role}"
        return self[node]

    def leader(self) -> Member:
        """Return the leader of the highest term."""
        leaders = [member for member in self.members.values() if member.is_up and member.raft.is_leader]
        assert leaders, "no leader"
        return max(leaders, key=lambda member: member.raft.term)

    # Safety

    def check(self, member: Member) -> None:
        """Check what must hold after every step."""
        raft = member.raft
        assert raft.term >= member.highest_term, "I2: a term never goes back"
        assert raft.commit_index >= member.highest_commit, "I2: commit never goes back"
        member.highest_term, member.highest_commit = raft.term, raft.commit_index
        if raft.is_leader and self.leaders.get(raft.term) != member.id:
            assert raft.term not in self.leaders, f"I1: two leaders in term {raft.term}"
            self.leaders[raft.term] = member.id
            for index, entry in self.committed.items():
                is_there = index <= member.disk.base[0] or member.disk.entry(index) == entry
                assert is_there, f"I4: leader n{member.id} lacks committed {index}"

    def check_logs(self) -> None:
        """I3: logs that agree on an entry's term agree on everything up to it."""
        logs = [member.disk for member in self.members.values()]
        for position, one in enumerate(logs):
            for other in logs[position + 1 :]:
                first = max(one.base[0], other.base[0]) + 1
                agreed = False
                for index in range(min(one.last_index, other.last_index), first - 1, -1):
                    left, right = one.entry(Index(index)), other.entry(Index(index))
                    agreed = agreed or left.term == right.term
                    assert not agreed or left == right, f"I3: logs differ below a common entry at {index}"

    def note_committed(self, member: Member, index: Index) -> None:
        """I5: everybody commits the same; I6: what is committed is durable on a quorum."""
        entry = member.disk.entry(index)
        known = self.committed.setdefault(index, entry)
        assert known == entry, f"I5: n{member.id} commits another entry at {index}: {entry} instead of {known}"
        if member.raft.is_leader and self.quorum_checked:
            holders = {
                m.id
                for m in self.members.values()
                if m.disk.synced >= index and (index <= m.disk.base[0] or m.disk.entry(index) == entry)
            }
            electorates = member.raft.configuration.electorates
            for voters in electorates:
                have = sum(node in holders for node in voters)
                assert 2 * have > len(voters), f"I6: {index} is committed but durable only on {sorted(holders)}"


def core(
    *,
    node: int = 1,
    voters: Iterable[int] = (1, 2, 3),
    learners: Iterable[int] = (),
    log: Iterable[int] = (),
    term: int | None = None,
    vote: int | None = None,
    commit: int = 0,
    recover_until: int | None = None,
    **settings: Any,
) -> Raft:
    """Return one core alone, whose log has entries of these terms; time starts at 0."""
    terms = list(log)
    runs: list[tuple[Index, Term]] = []
    for position, entry_term in enumerate(terms):
        if not runs or runs[-1][1] != entry_term:
            runs.append((Index(position + 1), Term(entry_term)))
    configuration = Configuration(voters=tuple(map(NodeId, voters)), learners=tuple(map(NodeId, learners)))
    initial = InitialState(
        term=Term(term if term is not None else max(terms, default=0)),
        vote=NodeId(vote) if vote is not None else None,
        last_index=Index(len(terms)),
        terms=tuple(runs),
        commit=Index(commit),
        configurations=((Index(0), configuration),),
        recover_until=Index(recover_until) if recover_until is not None else None,
    )
    return Raft(RaftConfig(id=NodeId(node), **settings), initial, rng=random.Random(1), now_ms=0)


def entries(first_index: int, *terms: int) -> tuple[Entry, ...]:
    """Return entries of these terms from an index on."""
    return tuple(
        Entry(Index(first_index + position), Term(term), data=b"%d" % (first_index + position))
        for position, term in enumerate(terms)
    )


def append(term: int, prev: tuple[int, int], *new: Entry, commit: int = 0, round_: int = 1) -> Append:
    """Return an append after the entry `prev`, given as (index, term)."""
    return Append(Term(term), Index(prev[0]), Term(prev[1]), new, Index(commit), round_)


def sole(output: Output) -> Any:
    """Return the only message of an output, whether it waits for the hard state or not."""
    messages = [*output.messages, *output.messages_after_save]
    assert len(messages) == 1, messages
    return messages[0].message
