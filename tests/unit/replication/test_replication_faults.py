"""Faults of one member: an entry of a newer program, and an unexpected error in the code of a state machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest
from replication_cluster import DIRECTORY, GROUP, SMALL_LOG, Cluster, Node, ValuesMachine

from quiver.errors import OutcomeUnknownError, QuiverError, UnavailableError, UnknownVersionError
from quiver.model import GroupId, NodeId
from quiver.raft import Configuration
from quiver.record import Batch, build_batch
from quiver.replication import Member
from quiver.storage import Log
from quiver.tasks import timeout

NEWER = b"written by a newer program"
POISON = b"what no code expects"


class OldMachine(ValuesMachine):
    """The state machine of a program that does not know every entry."""

    is_old = True

    def apply(self, batches: Sequence[Batch]) -> None:
        for one in batches:
            values = [] if one.header.is_control else list(one.values())
            if self.is_old and NEWER in values:
                raise UnknownVersionError(f"entry {one.header.index} has an unknown version; upgrade this node")
            if POISON in values:
                raise KeyError("no such thing")
            super().apply([one])


class OldNode(Node):
    """A node whose program may be old, and which contains faults as a real one does."""

    is_old = True

    def __init__(self, cluster: OldCluster, node: NodeId) -> None:
        super().__init__(cluster, node)
        self.faults: list[tuple[Member, Exception]] = []

    async def _run(self, bootstrap: Configuration | None) -> None:
        self.machine = OldMachine()
        self.machine.is_old = self.is_old
        self.replicator = self._make_replicator(settings=self.cluster.settings, log_settings=SMALL_LOG)
        self.replicator._on_fault = lambda member, error: self.faults.append((member, error))
        async with self.replicator as replicator:
            self.member = await replicator.open_member(GROUP, DIRECTORY, self.machine, bootstrap=bootstrap)
            await asyncio.Event().wait()


class OldCluster(Cluster):
    """Three nodes, of which some know every entry and some do not."""

    def make_node(self, node: NodeId) -> OldNode:
        return OldNode(self, node)

    def old(self, node: NodeId) -> OldNode:
        found = self.nodes[node]
        assert isinstance(found, OldNode)
        return found


def run(test: Callable[[OldCluster], Coroutine[Any, Any, None]], *, nodes: int = 3) -> None:
    cluster = OldCluster(nodes)
    cluster.run(lambda: test(cluster))


async def outcome(cluster: OldCluster, node: Node, value: bytes) -> QuiverError:
    """Propose at a node and return the error, which must come soon."""
    with pytest.raises(QuiverError) as caught:
        async with timeout(3):
            await cluster.run_on(node, node.member.propose([build_batch([value], timestamp=1)]))
    return caught.value


def test_leader_that_does_not_know_an_entry_hands_leadership_on_and_catches_up_after_an_upgrade() -> None:
    async def test(cluster: OldCluster) -> None:
        await cluster.propose(b"a")
        old = cluster.old((await cluster.leader()).id)
        for node in cluster.nodes.values():  # the others are upgraded already
            if node is not old:
                node.machine.is_old = False  # type: ignore[attr-defined] # an `OldMachine`
        assert isinstance(await outcome(cluster, old, NEWER), OutcomeUnknownError)
        leader = await cluster.leader()
        assert leader is not old
        assert "unknown version" in old.member.needs_upgrade
        await cluster.propose(b"b")
        assert old.machine.values == [b"a"], "nothing is skipped"
        await cluster.wait(lambda: old.member.log.end_index == leader.member.log.end_index or None)
        old.kill()
        old.is_old = False
        old.start()
        await cluster.wait_equal([b"a", NEWER, b"b"])
        assert not old.member.needs_upgrade

    run(test)


def test_group_keeps_its_quorum_while_a_majority_needs_an_upgrade() -> None:
    async def test(cluster: OldCluster) -> None:
        await cluster.propose(b"a")
        first = await cluster.leader()
        newest = next(node for node in cluster.nodes.values() if node is not first)
        newest.machine.is_old = False  # type: ignore[attr-defined] # an `OldMachine`
        await outcome(cluster, first, NEWER)
        await cluster.wait(lambda: newest.member.is_ready or None)
        await cluster.propose(b"b")
        assert newest.machine.values == [b"a", NEWER, b"b"]
        needing = [node.id for node in cluster.nodes.values() if node.member.needs_upgrade]
        assert len(needing) == 2

    run(test)


def test_member_that_needs_an_upgrade_says_so_when_nobody_can_lead() -> None:
    async def test(cluster: OldCluster) -> None:
        await cluster.propose(b"a")
        node = await cluster.leader()
        assert isinstance(await outcome(cluster, node, NEWER), OutcomeUnknownError)
        error = await outcome(cluster, node, b"b")
        assert isinstance(error, UnavailableError)
        assert error.code == "needs_upgrade"
        assert "unknown version" in error.message
        await asyncio.sleep(10)
        assert not node.member.is_leader

    run(test, nodes=1)


def test_unexpected_error_stops_one_member_and_another_leads_soon() -> None:
    async def test(cluster: OldCluster) -> None:
        await cluster.propose(b"a")
        stopped = cluster.old((await cluster.leader()).id)
        for node in cluster.nodes.values():
            node.machine.is_old = False  # type: ignore[attr-defined] # an `OldMachine`
        error = await outcome(cluster, stopped, POISON)
        assert isinstance(error, OutcomeUnknownError)
        assert [type(fault) for _, fault in stopped.faults] == [KeyError]
        refused = await outcome(cluster, stopped, b"b")
        assert isinstance(refused, UnavailableError)

    run(test)


def fail_after_carrying_out(monkeypatch: pytest.MonkeyPatch, member: Member) -> None:
    """Let an unexpected error escape the member after its next output was carried out."""
    carry_out = member._carry_out

    def fail(*arguments: Any) -> None:
        monkeypatch.undo()
        carry_out(*arguments)
        raise KeyError("no such thing")

    monkeypatch.setattr(member, "_carry_out", fail)


def test_outcome_of_a_change_of_members_is_unknown_when_its_leader_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: OldCluster) -> None:
        await cluster.propose(b"a")
        stopped = cluster.old((await cluster.leader()).id)
        staying = tuple(node for node in stopped.member.configuration.voters if node != stopped.id)
        fail_after_carrying_out(monkeypatch, stopped.member)
        with pytest.raises(OutcomeUnknownError, match="may have been done"):
            stopped.member.change_membership(voters=staying)
        assert [type(fault) for _, fault in stopped.faults] == [KeyError]
        assert (await cluster.leader()) is not stopped

    run(test)


def test_outcome_of_a_transfer_is_unknown_when_its_leader_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: OldCluster) -> None:
        await cluster.propose(b"a")
        stopped = cluster.old((await cluster.leader()).id)
        to = next(node for node in stopped.member.configuration.voters if node != stopped.id)
        fail_after_carrying_out(monkeypatch, stopped.member)
        with pytest.raises(OutcomeUnknownError, match="may have been done"):
            stopped.member.transfer_leadership(to)

    run(test)


def test_read_of_a_member_that_stopped_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: OldCluster) -> None:
        await cluster.propose(b"a")
        stopped = cluster.old((await cluster.leader()).id)
        fail_after_carrying_out(monkeypatch, stopped.member)
        with pytest.raises(UnavailableError, match="not done"):
            await stopped.member.read_barrier()

    run(test)


def test_unexpected_error_in_a_campaign_stops_the_member_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: OldCluster) -> None:
        await cluster.propose(b"a")
        leader = await cluster.leader()
        follower = cluster.old(next(node for node in cluster.nodes if node != leader.id))
        fail_after_carrying_out(monkeypatch, follower.member)
        follower.member.campaign()  # a hint: nobody waits for it, so nobody is told
        assert [type(fault) for _, fault in follower.faults] == [KeyError]
        await cluster.propose(b"b")

    run(test)


def test_member_whose_state_cannot_be_restored_leaves_no_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenMachine(ValuesMachine):
        def restore_steps(self, state: bytes) -> Iterator[None]:
            raise KeyError("no such thing")

    closed: list[Log] = []
    close = Log.close

    async def note(log: Log) -> None:
        await close(log)
        closed.append(log)

    monkeypatch.setattr(Log, "close", note)

    async def test(cluster: OldCluster) -> None:
        node = await cluster.leader()
        for attempt in (1, 2):  # it is retried for as long as the node runs
            with pytest.raises(KeyError):
                await node.replicator.open_member(GroupId(7), f"{DIRECTORY}/7", BrokenMachine())
            assert len(closed) == attempt

    run(test)
