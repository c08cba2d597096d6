"""A seeded random walk over the harness: messages, time, disks, crashes, cuts, changes of members.

Every step is checked against I1-I6 by the harness. At the end everything heals, and the group must commit
again and agree: a walk that only stays safe by standing still fails.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

from raft_harness import Cluster, Envelope, Member

from quiver.errors import QuiverError
from quiver.model import Index

STEPS = 1_500
SEEDS = range(160)


class Walk:
    """One seeded run of random events over a cluster."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.rng = random.Random(seed)
        count = self.rng.choice([1, 2, 3, 3, 3, 5])
        voters = range(1, count + 1)
        self.cluster = Cluster(
            count + 1,
            voters=voters,
            blank=[count + 1],
            seed=seed,
            inflight_messages_max=self.rng.choice([1, 2, 8]),
            inflight_bytes_max=self.rng.choice([8, 64]),
            append_bytes_max=self.rng.choice([1, 4, 32]),
            hibernation=self.rng.random() < 0.3,
            idle_ticks_before_hibernation=2,
            **settings,
        )
        self.next_value = 0
        for member in self.cluster.members.values():
            member.auto_sync = self.rng.random() < 0.5
        self.events = [
            (30, self.deliver),
            (3, self.deliver_twice),
            (3, self.lose),
            (12, self.pass_time),
            (10, self.propose),
            (14, self.sync),
            (3, self.read),
            (2, self.time_out),
            (1, self.crash),
            (3, self.restart),
            (1, self.cut),
            (1, self.heal),
            (1, self.transfer),
            (1, self.change),
            (1, self.compact),
            (1, self.unreachable),
            (1, self.wake),
            (1, self.suspect),
        ]

    def run(self) -> None:
        weights = [weight * self.rng.choice([0.3, 1, 3]) for weight, _ in self.events]  # each seed has its own weather
        for step in range(STEPS):
            self.rng.choices(self.events, weights)[0][1]()
            if step % 50 == 0:
                self.cluster.check_logs()
        self.recover()

    def recover(self) -> None:
        """Heal everything: the group must commit again, and everybody must agree."""
        cluster = self.cluster
        cluster.heal()
        for member in cluster.members.values():
            member.auto_sync = True
            if member.is_up:
                member.sync()
            else:
                member.restart()
        for member in cluster.members.values():
            member.run(member.raft.wake(cluster.now_ms))
        for _ in range(200):
            cluster.elapse(100)
            leaders = [m for m in cluster.members.values() if m.raft.is_ready]
            if leaders:
                break
        leader = cluster.leader()
        leader.run(leader.raft.tick(cluster.now_ms))
        cluster.elapse(1_500)
        leader = cluster.leader()
        leader.propose(b"the end")
        cluster.elapse(1_500)
        cluster.check_logs()
        end = cluster.leader().raft.last_index
        for node in cluster.leader().raft.configuration.members:
            assert cluster[node].raft.commit_index == end, f"n{node} did not catch up"

    def member(self) -> Member:
        return self.rng.choice(list(self.cluster.members.values()))

    def up(self) -> Member | None:
        member = self.member()
        return member if member.is_up else None

    def deliver(self) -> None:
        network = self.cluster.network
        if network:
            window = min(len(network), 4)  # mostly in order, sometimes overtaken
            self.cluster.deliver(network[self.rng.randrange(window)])

    def deliver_twice(self) -> None:
        network = self.cluster.network
        if network:
            envelope = self.rng.choice(network)
            self.cluster.deliver(envelope)
            self.cluster.deliver(Envelope(*envelope))

    def lose(self) -> None:
        network = self.cluster.network
        if network:
            network.remove(self.rng.choice(network))

    def pass_time(self) -> None:
        self.cluster.elapse(self.rng.choice([5, 20, 60]), step_ms=20, deliver=False)

    def time_out(self) -> None:
        """Let one member's patience end before everybody else's."""
        member = self.up()
        if member is not None and not member.raft.is_leader and member.raft.next_deadline_ms is not None:
            self.cluster.campaign(member.id)

    def propose(self) -> None:
        leaders = [m for m in self.cluster.members.values() if m.is_up and m.raft.is_leader]
        if leaders:
            values = [b"%d" % (self.next_value + i) for i in range(self.rng.choice([1, 1, 3]))]
            self.next_value += len(values)
            self.attempt(lambda: self.rng.choice(leaders).propose(*values))

    def sync(self) -> None:
        member = self.up()
        if member is not None and member.writes:
            member.sync(self.rng.randrange(len(member.writes)) + 1)

    def read(self) -> None:
        """A read must see every write that was committed anywhere before it began."""
        leaders = [m for m in self.cluster.members.values() if m.is_up and m.raft.is_leader]
        if leaders:
            member = self.rng.choice(leaders)
            self.next_value += 1
            context, floor = self.next_value, max(self.cluster.committed, default=Index(0))
            self.cluster.reads_expected[context] = floor
            self.attempt(lambda: member.read(context))

    def crash(self) -> None:
        member = self.up()
        if member is not None:
            member.crash()

    def restart(self) -> None:
        member = self.member()
        if not member.is_up:
            member.restart()

    def cut(self) -> None:
        one, other = self.member(), self.member()
        if one is not other:
            self.cluster.cuts.add((one.id, other.id))
            if self.rng.random() < 0.7:
                self.cluster.cuts.add((other.id, one.id))

    def heal(self) -> None:
        self.cluster.heal()

    def transfer(self) -> None:
        member, target = self.up(), self.member()
        if member is not None:
            self.attempt(lambda: member.transfer(target.id))

    def change(self) -> None:
        member = self.up()
        if member is None:
            return
        nodes = list(self.cluster.members)
        self.rng.shuffle(nodes)
        voters = nodes[: self.rng.randrange(len(nodes)) + 1]
        learners = [node for node in nodes if node not in voters and self.rng.random() < 0.6]
        self.attempt(lambda: member.change(voters, learners))

    def compact(self) -> None:
        member = self.up()
        if member is None:
            return
        raft = member.raft
        highest = min(raft.commit_index, member.disk.synced)
        if highest > member.disk.base[0]:
            member.compact(self.rng.randint(member.disk.base[0] + 1, highest) + 1)

    def unreachable(self) -> None:
        member = self.up()
        if member is not None:
            member.run(member.raft.peer_unreachable(self.member().id))

    def wake(self) -> None:
        member = self.up()
        if member is not None:
            member.run(member.raft.wake(self.cluster.now_ms))

    def suspect(self) -> None:
        """Rightly or wrongly."""
        member = self.up()
        if member is not None:
            member.run(member.raft.suspect(self.member().id, self.cluster.now_ms))

    @staticmethod
    def attempt(action: Callable[[], object]) -> None:
        """Do what may be refused: a refusal is an answer, too."""
        with contextlib.suppress(QuiverError):
            action()
