"""The small command language of `tests/scenarios/*.txt`: commands in, a readable account out.

A transcript is a story for people that a machine re-enacts. Lines that begin with `#` tell it; a block is one
or more commands, a line `----`, and what happened, up to the next empty line.

    cluster 3                   three members (voters=1,2 learners=3 blank=4 and any setting of RaftConfig)
    given n1 term=2 1:a 2:b     start n1 with this log (term:data of each entry) and term instead
    quietly <command>           do it without an account
    elect n1                    let n1 time out and deliver everything
    campaign n1                 let n1 time out, and deliver nothing
    propose n1 a b              append two entries at n1
    settle                      deliver everything that is under way, quietly
    deliver n1 n2               deliver what is under way from n1 to n2 (`*` is anybody; add a kind of message)
    drop n1 n2                  lose it instead
    again n1 n2 Append          deliver the last message of a kind once more
    wake n1                     let n1's driver wake it
    reconnect n1 n2             let n1 know that its connection to n2 broke
    messages                    show what is under way
    cut n1 n2 / isolate n1 / heal
    hold-sync n1 / sync n1 [2]  keep n1's disk from reporting writes / report them: all, or the oldest two
    crash n1 / restart n1       power failure: what was not synced is gone
    wipe n1                     lose the whole disk and come back under the same name
    damage n1 4                 lose the log from index 4 on, and know it
    read n1 7 / transfer n1 n2 / compact n1 5
    change n1 voters=1,2,4 learners=3
    elapse 500                  let time pass: timers ring, everything is delivered
    skip 500 / tick n1          let time pass without anybody noticing yet / let n1 notice
    stop n1 / continue n1       stop n1's process (SIGSTOP): what is sent to it waits
    logs                        show role, term, commit and log of everybody (`*`: not durable)
    safety                      check that logs agree below every common entry
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raft_harness import Cluster, Envelope, Member

from quiver.errors import QuiverError
from quiver.model import Index, NodeId, Term
from quiver.raft import (
    Append,
    AppendResponse,
    Entry,
    EntryKind,
    HardState,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    RaftMessage,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)

SEPARATOR = "----"


def replay(text: str) -> str:
    """Run a transcript and return it with what happens now."""
    stage = Stage()
    result: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        result.append(line)
        if not line or line.startswith("#"):
            continue
        commands = [line]
        for command in lines:
            result.append(command)
            if command == SEPARATOR:
                break
            commands.append(command)
        result.extend(stage.run(commands))
        for expected in lines:  # skip what happened when it was recorded
            if not expected:
                result.append("")
                break
    return "\n".join(result).rstrip("\n") + "\n"


class Stage:
    """The cluster of one transcript and the commands that move it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.cluster = Cluster(1)

    def run(self, commands: list[str]) -> list[str]:
        """Run commands and return what they reported."""
        self.lines = []
        for command in commands:
            reported = len(self.lines)
            name, *arguments = command.removeprefix("quietly ").split()
            action: Callable[..., None] = getattr(self, "do_" + name.replace("-", "_"))
            options = dict(argument.split("=") for argument in arguments if "=" in argument)
            words = [argument for argument in arguments if "=" not in argument]
            try:
                action(*words, **options)
            except QuiverError as error:
                self.lines.append(f"refused: {error}")
            if command.startswith("quietly "):
                del self.lines[reported:]
        return self.lines or ["ok"]

    def member(self, name: str) -> Member:
        return self.cluster[node_id(name)]

    def do_cluster(self, count: str, **options: str) -> None:
        settings: dict[str, Any] = {}
        for key, value in options.items():
            settings[key] = numbers(value) if key in ("voters", "learners", "blank") else int(value)
        self.cluster = Cluster(int(count), report=self.lines.append, **settings)
        self.cluster.report = lambda line: self.lines.append(line)

    def do_given(self, name: str, *log: str, term: str) -> None:
        disk = self.member(name).disk
        for position, item in enumerate(log):
            entry_term, data = item.split(":")
            disk.append([Entry(Index(position + 1), Term(int(entry_term)), data=data.encode())])
        disk.synced = disk.last_index
        disk.hard_state = HardState(Term(int(term)), None)
        self.member(name).start()

    def do_elect(self, name: str) -> None:
        self.cluster.elect(node_id(name))

    def do_campaign(self, name: str) -> None:
        self.cluster.campaign(node_id(name))

    def do_propose(self, name: str, *data: str) -> None:
        self.member(name).propose(*(item.encode() for item in data))

    def do_settle(self) -> None:
        self.cluster.settle()

    def do_deliver(self, from_: str, to: str, kind: str = "*") -> None:
        for envelope in self._matching(from_, to, kind):
            self.lines.append(describe(envelope))
            self.cluster.deliver(envelope)

    def do_drop(self, from_: str, to: str, kind: str = "*") -> None:
        for envelope in self._matching(from_, to, kind):
            self.lines.append(f"lost: {describe(envelope)}")
            self.cluster.network.remove(envelope)

    def do_again(self, from_: str, to: str, kind: str) -> None:
        envelope = next(
            e
            for e in reversed(self.cluster.delivered)
            if (f"n{e.from_}", f"n{e.to}", type(e.message).__name__) == (from_, to, kind)
        )
        self.lines.append(f"again: {describe(envelope)}")
        self.cluster.deliver(envelope)

    def do_tick(self, name: str) -> None:
        self.member(name).tick()

    def do_wake(self, name: str) -> None:
        member = self.member(name)
        member.run(member.raft.wake(self.cluster.now_ms))

    def do_reconnect(self, name: str, other: str) -> None:
        member = self.member(name)
        member.run(member.raft.peer_unreachable(NodeId(node_id(other))))

    def do_messages(self) -> None:
        self.lines.extend(describe(envelope) for envelope in self.cluster.network)
        if not self.cluster.network:
            self.lines.append("nothing is under way")

    def do_cut(self, one: str, other: str) -> None:
        self.cluster.cut(node_id(one), node_id(other))

    def do_isolate(self, name: str) -> None:
        self.cluster.cut(node_id(name))

    def do_heal(self) -> None:
        self.cluster.heal()

    def do_hold_sync(self, name: str) -> None:
        self.member(name).auto_sync = False

    def do_sync(self, name: str, count: str | None = None) -> None:
        member = self.member(name)
        before = member.raft.durable_index
        member.sync(int(count) if count is not None else None)
        after = member.raft.durable_index
        self.lines.append(f"n{member.id}: durable {before} -> {after}" if after != before else "no news")

    def do_crash(self, name: str) -> None:
        self.member(name).crash()

    def do_restart(self, name: str) -> None:
        self.member(name).auto_sync = True
        self.member(name).restart()

    def do_wipe(self, name: str) -> None:
        disk = self.member(name).disk
        disk.restore(disk.snapshot())
        disk.base, disk.synced = (Index(0), Term(0)), Index(0)
        disk.configurations, disk.hard_state = [], HardState(Term(0), None)
        self.do_restart(name)

    def do_damage(self, name: str, first_index: str) -> None:
        disk = self.member(name).disk
        disk.recover_until = disk.last_index
        disk.truncate(Index(int(first_index)))
        self.do_restart(name)

    def do_read(self, name: str, context: str) -> None:
        self.member(name).read(int(context))

    def do_transfer(self, name: str, to: str) -> None:
        self.member(name).transfer(node_id(to))

    def do_change(self, name: str, voters: str, learners: str = "") -> None:
        self.member(name).change(numbers(voters), numbers(learners))

    def do_compact(self, name: str, first_index: str) -> None:
        self.member(name).compact(int(first_index))

    def do_elapse(self, duration_ms: str) -> None:
        self.cluster.elapse(int(duration_ms))

    def do_skip(self, duration_ms: str) -> None:
        self.cluster.now_ms += int(duration_ms)

    def do_stop(self, name: str) -> None:
        self.cluster.stopped.add(node_id(name))

    def do_continue(self, name: str) -> None:
        self.cluster.stopped.remove(node_id(name))

    def do_logs(self) -> None:
        self.lines.extend(describe_member(member) for member in self.cluster.members.values())

    def do_safety(self) -> None:
        self.cluster.check_logs()

    def _matching(self, from_: str, to: str, kind: str) -> list[Envelope]:
        return [
            envelope
            for envelope in self.cluster.network
            if from_ in ("*", f"n{envelope.from_}")
            and to in ("*", f"n{envelope.to}")
            and kind in ("*", type(envelope.message).__name__)
        ]


def node_id(name: str) -> int:
    return int(name.removeprefix("n"))


def numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",") if item]


def describe(envelope: Envelope) -> str:
    return f"n{envelope.from_}->n{envelope.to} {describe_message(envelope.message)}"


def describe_message(message: RaftMessage) -> str:
    name = f"{type(message).__name__} term {message.term}"
    match message:
        case Append():
            carried = " ".join(describe_entry(entry) for entry in message.entries) or "nothing"
            return f"{name}: {carried} after {message.prev_index}/{message.prev_term}, commit {message.commit}"
        case AppendResponse(accepted=True):
            return f"{name}: match {message.match_index}"
        case AppendResponse():
            return f"{name}: rejects {message.rejected_index}, try {message.hint_index}/{message.hint_term}"
        case Heartbeat():
            return f"{name}: commit {message.commit}, round {message.round}"
        case HeartbeatResponse():
            return f"{name}: match {message.match_index}, round {message.round}"
        case VoteRequest():
            kind = "pre-vote" if message.pre else "vote"
            return f"{name}: {kind} for a log up to {message.last_index}/{message.last_term}"
        case VoteResponse():
            return f"{name}: {'granted' if message.granted else 'refused'}{' (pre-vote)' if message.pre else ''}"
        case InstallSnapshot():
            return f"{name}: up to {message.snapshot.last_index}/{message.snapshot.last_term}"
        case TimeoutNow():
            return name


def describe_entry(entry: Entry) -> str:
    if entry.kind is EntryKind.CONFIG:
        return f"{entry.term}:{{{entry.configuration}}}"
    return f"{entry.term}:{bytes(entry.data).decode() or '-'}"


def describe_member(member: Member) -> str:
    disk, raft = member.disk, member.raft
    entries = " ".join(describe_entry(entry) + ("" if entry.index <= disk.synced else "*") for entry in disk.entries)
    start = f"({disk.base[0]} before) " if disk.base[0] else ""
    role = str(raft.role) if member.is_up else "down"
    return f"n{member.id} {role:<13} term {raft.term} commit {raft.commit_index:>2} | {start}{entries}".rstrip()
