"""The driver over real logs on simulated disks: proposals, reads, failover, membership, snapshots."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence

import pytest
from replication_cluster import DIRECTORY, GROUP, Cluster, Node, ValuesMachine, run_in, simulate

from quiver.config import ReplicationSettings
from quiver.errors import (
    DamageError,
    OutcomeUnknownError,
    OverloadedError,
    QuiverError,
    RequestError,
    StorageError,
    UnavailableError,
)
from quiver.model import GroupId, Index, NodeId, Term
from quiver.raft import Configuration, Entry, EntryKind, SendSnapshot
from quiver.record import build_batch, build_control_batch
from quiver.replication import CONTROL_STATE, Member
from quiver.replication.persistence import Persistence
from quiver.storage import Lane
from quiver.testing import Latency, SimulatedExecutor


@simulate
async def test_proposals_are_applied_in_order_on_every_node(cluster: Cluster) -> None:
    values = [b"value %d" % n for n in range(50)]
    headers = [(await cluster.propose(value))[0] for value in values]
    assert [header.base_offset for header in headers] == list(range(50))
    await cluster.wait_equal(values)
    logs = [node.member.status().log for node in cluster.nodes.values()]
    assert len({(log.end_index, log.end_offset, log.last_term) for log in logs}) == 1


@simulate
async def test_proposals_of_one_turn_share_one_append(cluster: Cluster) -> None:
    leader = await cluster.leader()
    await cluster.propose(b"first")
    before = leader.replicator.status().envelopes_sent
    await asyncio.gather(*(cluster.propose(b"%d" % n) for n in range(40)))
    assert leader.replicator.status().envelopes_sent - before <= 12
    await cluster.wait(lambda: all(len(node.machine.values) == 41 for node in cluster.nodes.values()))


@simulate
async def test_control_batches_of_the_layer_above_are_ordinary_entries(cluster: Cluster) -> None:
    leader = await cluster.leader()
    (header,) = await leader.member.propose([build_control_batch(CONTROL_STATE + b"cursor", timestamp=1)])
    assert header.is_control
    (after,) = await cluster.propose(b"x")
    assert after.base_offset == header.base_offset


@simulate
async def test_follower_refuses_and_names_the_leader(cluster: Cluster) -> None:
    leader = await cluster.leader()
    follower = await cluster.wait(
        lambda: next(
            (node for node in cluster.nodes.values() if node.member.leader == leader.id and node is not leader), None
        )
    )
    with pytest.raises(UnavailableError, match=f"node {leader.id} leads"):
        await follower.member.propose([build_batch([b"x"], timestamp=1)])
    with pytest.raises(UnavailableError):
        await follower.member.read_barrier()
    with pytest.raises(UnavailableError):
        follower.member.transfer_leadership(leader.id)


@simulate
async def test_killed_leader_is_replaced_and_comes_back_with_everything(cluster: Cluster) -> None:
    for n in range(10):
        await cluster.propose(b"%d" % n)
    old = await cluster.leader()
    old.kill(loses_power=True)
    for n in range(10, 20):
        await cluster.propose(b"%d" % n)
    assert (await cluster.leader()) is not old
    old.start()
    await cluster.wait_equal([b"%d" % n for n in range(20)])


@simulate
async def test_all_nodes_losing_power_lose_nothing(cluster: Cluster) -> None:
    values = [b"%d" % n for n in range(30)]
    for value in values:
        await cluster.propose(value)
    for _ in range(3):
        for node in cluster.nodes.values():
            node.kill(loses_power=True)
        for node in cluster.nodes.values():
            node.start()
        await asyncio.sleep(0)
        values.append(b"again")
        await cluster.propose(b"again")
        await cluster.wait_equal(values)


@simulate
async def test_isolated_leader_answers_unknown_and_its_entries_are_replaced(cluster: Cluster) -> None:
    await cluster.propose(b"before")
    old = await cluster.leader()
    cluster.network.isolate(old.id)
    with pytest.raises(OutcomeUnknownError):
        await old.member.propose([build_batch([b"lost"], timestamp=1)])
    await cluster.propose(b"after")
    cluster.network.heal()
    await cluster.wait_equal([b"before", b"after"])


@simulate
async def test_isolated_leader_does_not_confirm_reads(cluster: Cluster) -> None:
    old = await cluster.leader()
    cluster.network.isolate(old.id)
    with pytest.raises(UnavailableError):
        await old.member.read_barrier()


@simulate
async def test_read_barrier_sees_everything_acknowledged_before(cluster: Cluster) -> None:
    for n in range(20):
        await cluster.propose(b"%d" % n)
        leader = await cluster.leader()
        await leader.member.read_barrier()
        assert len(leader.machine.values) == n + 1


@simulate
async def test_transfer_moves_leadership_without_a_lost_proposal(cluster: Cluster) -> None:
    leader = await cluster.leader()
    roles: list[str] = []
    leader.member.on_role = lambda role, term, node: roles.append(f"{role} {term} {node}")
    target = next(node for node in cluster.nodes.values() if node is not leader)
    leader.member.transfer_leadership(target.id)
    await cluster.propose(b"x")
    assert (await cluster.leader()) is target
    assert roles
    with pytest.raises(RequestError):
        target.member.transfer_leadership(NodeId(99))


@simulate
async def test_members_are_added_and_removed_while_work_goes_on(cluster: Cluster) -> None:
    await cluster.propose(b"1")
    await cluster.leader()
    added = cluster.add(4)
    leader = await cluster.leader()
    leader.member.change_membership(voters=(NodeId(1), NodeId(2), NodeId(3)), learners=(NodeId(4),))
    await cluster.wait(lambda: added.machine.values == [b"1"] and leader.member.is_caught_up(added.id))
    removed = next(node for node in cluster.nodes.values() if node not in (leader, added))
    voters = tuple(n for n in cluster.nodes if n != removed.id)
    leader.member.change_membership(voters=voters)
    await cluster.wait(lambda: leader.member.configuration == Configuration(voters=voters))
    removed.kill()
    await cluster.propose(b"2")
    for node in (leader, added):
        node.kill(loses_power=True)
    for node in (leader, added):
        node.start()
    await cluster.propose(b"3")
    await cluster.wait(lambda: added.machine.values == [b"1", b"2", b"3"])
    assert added.member.configuration == Configuration(voters=voters)


@simulate
async def test_lagging_follower_gets_a_snapshot_and_then_the_rest(cluster: Cluster) -> None:
    leader = await cluster.leader()
    late = next(node for node in cluster.nodes.values() if node is not leader)
    late.kill()
    values = [b"%d" % n * 20 for n in range(60)]
    for n, value in enumerate(values):
        await cluster.propose(value)
        if n % 20 == 19:
            await (await cluster.leader()).member.take_snapshot()
    leader = await cluster.leader()
    assert leader.member.status().log.first_index > 10
    late.start()
    await cluster.wait(lambda: late.machine.values == values)
    assert late.member.status().log.first_index > 10
    await cluster.propose(b"more")
    await cluster.wait_equal([*values, b"more"])
    late.kill(loses_power=True)
    late.start()
    await cluster.wait_equal([*values, b"more"])


@simulate
async def test_snapshot_of_nothing_is_not_taken(cluster: Cluster) -> None:
    fresh = cluster.add(9)
    await cluster.wait(lambda: hasattr(fresh, "member"))
    await fresh.member.take_snapshot()
    assert not [path for path in fresh.disk.paths() if "snapshot" in path]


@simulate
async def test_failed_sync_stops_the_node_and_the_others_go_on(cluster: Cluster) -> None:
    await cluster.propose(b"1")
    leader = await cluster.leader()
    leader.disk.fail("sync", nth=1)
    with pytest.raises(QuiverError):
        await asyncio.wait_for(leader.member.propose([build_batch([b"2"], timestamp=1)]), 5)
    assert await leader.replicator.wait_failed() is leader.failures[0]
    leader.kill()
    await cluster.propose(b"3")
    leader.start()
    await cluster.wait(lambda: len({tuple(node.machine.values) for node in cluster.nodes.values()}) == 1)


@simulate
async def test_node_whose_disk_failed_takes_part_in_no_group(cluster: Cluster) -> None:
    leader = await cluster.leader()
    leader.replicator.fail(StorageError("the disk failed under another group"))
    await leader.replicator.close_member(leader.member.group)  # nothing is left to close
    with pytest.raises(StorageError, match="under another group"):
        await leader.replicator.open_member(GroupId(7), f"{DIRECTORY}/7", leader.machine)


def test_what_becomes_durable_after_the_disk_has_failed_elsewhere_is_not_applied() -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.propose(b"1")
        node = await cluster.leader()
        proposing = asyncio.ensure_future(node.member.propose([build_batch([b"2"], timestamp=1)]))
        log = node.member.log
        while log.end_index == log.durable_end_index:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        node.replicator.fail(StorageError("the disk failed under another group"))
        with pytest.raises(QuiverError):
            await proposing
        await cluster.wait(lambda: log.end_index == log.durable_end_index or None)
        assert node.machine.values == [b"1"]

    run_in(Cluster(1), test)


@simulate
async def test_failed_hard_state_stops_the_node(cluster: Cluster) -> None:
    leader = await cluster.leader()
    follower = next(node for node in cluster.nodes.values() if node is not leader)
    follower.disk.fail("sync", nth=1, path=f"{DIRECTORY}/hardstate", error=errno.ENOSPC)
    leader.kill()
    other = next(node for node in cluster.nodes.values() if node not in (leader, follower))
    await cluster.wait(lambda: follower.failures)
    follower.kill()
    leader.start()
    await cluster.propose(b"x")
    assert other.machine.values is not None


@simulate
async def test_damaged_log_is_repaired_from_the_others(cluster: Cluster) -> None:
    values = [b"%d" % n * 30 for n in range(12)]
    for value in values:
        await cluster.propose(value)
    await cluster.wait_equal(values)
    leader = await cluster.leader()
    victim = next(node for node in cluster.nodes.values() if node is not leader)
    victim.kill()
    path = [path for path in victim.disk.paths() if path.endswith(".log")][-1]
    victim.disk.flip_bit(path, 64 + 150)
    victim.start()
    await cluster.wait(lambda: hasattr(victim, "member") and victim.machine.values == values)
    assert not victim.member.status().raft.recovering
    victim.kill(loses_power=True)
    victim.start()
    await cluster.wait_equal(values)


@simulate
async def test_log_without_its_hard_state_is_refused(cluster: Cluster) -> None:
    await cluster.propose(b"x")
    leader = await cluster.leader()
    victim = next(node for node in cluster.nodes.values() if node is not leader)
    await cluster.wait(lambda: victim.machine.values)
    await victim.replicator.close_member(GROUP)
    victim.disk.remove(f"{DIRECTORY}/hardstate")
    with pytest.raises(DamageError, match="hard state"):
        await victim.replicator.open_member(GROUP, DIRECTORY, ValuesMachine())


@simulate
async def test_group_cannot_be_opened_twice(cluster: Cluster) -> None:
    leader = await cluster.leader()
    with pytest.raises(RequestError):
        await leader.replicator.open_member(GROUP, DIRECTORY, ValuesMachine())


@simulate
async def test_closing_a_member_answers_everybody(cluster: Cluster) -> None:
    leader = await cluster.leader()
    cluster.network.isolate(leader.id)
    proposing = asyncio.ensure_future(leader.member.propose([build_batch([b"x"], timestamp=1)]))
    reading = asyncio.ensure_future(leader.member.read_barrier())
    await asyncio.sleep(0.05)
    late = asyncio.ensure_future(leader.member.propose([build_batch([b"y"], timestamp=1)]))
    await asyncio.sleep(0)
    await leader.replicator.close_member(GROUP)
    results = await asyncio.gather(proposing, reading, late, return_exceptions=True)
    assert isinstance(results[0], OutcomeUnknownError)
    assert isinstance(results[1], UnavailableError)
    assert isinstance(results[2], UnavailableError | OutcomeUnknownError)
    await leader.member.close()


@simulate
async def test_member_closed_during_a_save_does_nothing_more(cluster: Cluster) -> None:
    leader = await cluster.leader()
    end_index = leader.member.status().log.end_index
    leader.member.change_membership(voters=tuple(cluster.nodes), learners=(NodeId(4),))  # saved before it is appended
    await leader.member.close()
    await asyncio.sleep(0.05)  # the loop fails on an error that nobody handles
    assert leader.member.status().log.end_index == end_index


@simulate
async def test_closing_waits_for_a_snapshot_that_is_being_restored(cluster: Cluster) -> None:
    leader = await cluster.leader()
    late = next(node for node in cluster.nodes.values() if node is not leader)
    late.kill()
    for number in range(60):
        await cluster.propose(b"%d" % number * 20)
        if number % 20 == 19:
            await (await cluster.leader()).member.take_snapshot()
    late.start()
    while not hasattr(late, "member") or late.member._outputs.current.snapshot is None:  # noqa: ASYNC110
        await asyncio.sleep(0.0001)  # of simulated time: `wait` looks too seldom
    assert late.member._is_blocked
    await late.member.close()
    assert late.machine.values, "the snapshot was restored"
    await asyncio.sleep(0.05)
    assert late.failures == []


def remove_files(node: Node) -> None:
    """Remove all files of a node's member, as the broker does when a replica has left its group."""
    for path in node.disk.paths():
        if path.startswith(f"{DIRECTORY}/"):
            node.disk.remove(path)
    node.disk.remove_directory(DIRECTORY)


async def slow_reads(node: Node) -> None:
    """Let reads of a node's members wait for others, until cancelled, while writes do not."""
    while True:
        await asyncio.gather(*(node.member._executor.submit(lambda: None, Lane.RECOVERY) for _ in range(20)))


@simulate
async def test_files_are_removed_while_entries_are_being_read_to_apply_them(cluster: Cluster) -> None:
    for number in range(30):
        await cluster.propose(b"%d" % number * 20)
    leader = await cluster.leader()
    late = next(node for node in cluster.nodes.values() if node is not leader)
    others = asyncio.ensure_future(slow_reads(late))
    await asyncio.sleep(0.01)
    late.member._applier.restore(b"", Index(0))  # as after a start from nothing but the log
    late.member._apply()
    assert late.member._applier._is_reading
    await late.replicator.close_member(GROUP)
    remove_files(late)
    await asyncio.sleep(0.05)
    others.cancel()
    assert late.failures == []


@simulate
async def test_files_are_removed_while_a_snapshot_is_being_read_to_send_it(cluster: Cluster) -> None:
    for number in range(60):
        await cluster.propose(b"%d" % number * 20)
        if number % 20 == 19:
            await (await cluster.leader()).member.take_snapshot()
    leader = await cluster.leader()
    to = next(node for node in cluster.nodes if node != leader.id)
    permission = SendSnapshot(to, ticket=0, term=leader.member.term, needed_index=Index(1), round=0)
    others = asyncio.ensure_future(slow_reads(leader))
    await asyncio.sleep(0.01)
    sending = asyncio.ensure_future(leader.member._sender.send_snapshot(permission))
    await asyncio.sleep(0)
    await leader.replicator.close_member(GROUP)
    remove_files(leader)
    await sending
    await leader.member._sender.send_snapshot(permission)  # begun before the member closed, run after it
    await asyncio.sleep(0.05)
    others.cancel()
    assert leader.failures == []


@simulate
async def test_closing_does_not_wait_for_a_restore_that_never_starts(cluster: Cluster) -> None:
    leader = await cluster.leader()
    late = next(node for node in cluster.nodes.values() if node is not leader)
    for number in range(60):
        await cluster.propose(b"%d" % number * 20)
    late.kill()
    for number in range(60):
        await cluster.propose(b"%d" % number * 20)
        if number % 20 == 19:
            await (await cluster.leader()).member.take_snapshot()
    late.start()
    await cluster.wait(lambda: hasattr(late, "member") and late.replicator._members != {})
    spawned: list[object] = []
    late.replicator.spawn = lambda *work: spawned.append(work)  # type: ignore[method-assign] # as if the node were ending
    await cluster.wait(lambda: late.member._is_blocked)
    assert spawned
    await asyncio.wait_for(late.member.close(), 5)


@simulate
async def test_garbage_from_the_network_is_refused_and_harmless(cluster: Cluster) -> None:
    leader = await cluster.leader()
    port = cluster.network.port(NodeId(77))
    for junk in (b"", b"\xff\xff\xff\xff", b"\x04\0\0\0\x93\x01\x02\x03", bytes(100)):
        port.send(leader.id, [junk])
    await cluster.wait(lambda: leader.replicator.status().envelopes_refused >= 4)
    await cluster.propose(b"x")


def test_single_member_group_commits_alone_and_survives_power_loss() -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.propose(b"1")
        (node,) = cluster.nodes.values()
        assert await node.member.read_barrier()
        node.kill(loses_power=True)
        node.start()
        await cluster.propose(b"2")
        await cluster.wait_equal([b"1", b"2"])

    run_in(Cluster(1), test)


def test_overload_is_refused_as_not_done() -> None:
    async def test(cluster: Cluster) -> None:
        leader = await cluster.leader()
        followers = [node for node in cluster.nodes.values() if node is not leader]
        for node in followers:
            cluster.loop.pause(node.id)
        waiting = [
            asyncio.ensure_future(leader.member.propose([build_batch([b"x" * 600], timestamp=1)])) for _ in range(2)
        ]
        await asyncio.sleep(0.01)
        with pytest.raises(OverloadedError):
            await leader.member.propose([build_batch([b"x" * 900], timestamp=1)])
        for node in followers:
            cluster.loop.resume(node.id)
        await asyncio.gather(*waiting, return_exceptions=True)

    run_in(Cluster(settings=ReplicationSettings(uncommitted_bytes_max=2048, hibernation=False)), test)


def test_idle_group_sleeps_and_wakes_when_its_leader_dies() -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.propose(b"1")
        await cluster.wait(lambda: all(node.member.raft_status().hibernating for node in cluster.nodes.values()))
        await asyncio.sleep(5)
        sent = sum(node.replicator.status().envelopes_sent for node in cluster.nodes.values())
        await asyncio.sleep(1)
        sent = sum(node.replicator.status().envelopes_sent for node in cluster.nodes.values()) - sent
        assert sent <= 6 * 11, "one empty parcel per pair of nodes and heartbeat interval"
        assert all(node.member.raft_status().hibernating for node in cluster.nodes.values())
        await cluster.propose(b"2")
        await cluster.wait(lambda: all(node.member.raft_status().hibernating for node in cluster.nodes.values()))
        leader = await cluster.leader()
        cluster.loop.pause(leader.id)
        await cluster.wait(
            lambda: any(node.member.is_ready for node in cluster.nodes.values() if node is not leader) or None
        )
        cluster.loop.resume(leader.id)
        await cluster.propose(b"3")
        await cluster.wait_equal([b"1", b"2", b"3"])

    run_in(Cluster(settings=ReplicationSettings()), test)


def test_many_groups_share_parcels() -> None:
    async def test(cluster: Cluster) -> None:
        groups = [GroupId(n) for n in range(2, 22)]
        await cluster.leader()
        for node in cluster.nodes.values():
            for group in groups:
                with cluster.loop.node_scope(node.id):
                    opening = node.replicator.open_member(
                        group, f"/data/group-{group}", ValuesMachine(), bootstrap=cluster.voters
                    )
                    await cluster.loop.create_task(opening)
        await asyncio.sleep(5)
        statuses = [node.replicator.status() for node in cluster.nodes.values()]
        leaders = [member.raft.leader for status in statuses for member in status.members]
        assert None not in leaders
        sent = sum(status.envelopes_sent for status in statuses)
        await asyncio.sleep(1)
        sent = sum(node.replicator.status().envelopes_sent for node in cluster.nodes.values()) - sent
        assert sent < 20 * 3 * 10, "far fewer parcels than heartbeats of groups"
        assert all(peer.is_alive for status in statuses for peer in status.peers)

    run_in(Cluster(), test)


def test_errors_tell_what_was_done() -> None:
    assert UnavailableError("x").outcome == "not_done"
    assert OutcomeUnknownError("x").outcome == "unknown"
    assert issubclass(DamageError, StorageError)


@simulate
async def test_hard_state_saved_while_a_tail_is_replaced_vouches_for_nothing_of_it(cluster: Cluster) -> None:
    """R4: what is committed, but not in this log yet, is not committed to whoever finds it after a power loss."""
    await cluster.propose(b"1")
    await cluster.wait_equal([b"1"])
    old = await cluster.leader()
    cluster.network.isolate(old.id)
    with cluster.loop.node_scope(old.id):
        old.member.propose_nowait([build_batch([b"old"] * 5, timestamp=1)])
    await cluster.wait(lambda: not old.member.is_ready)
    header = (await cluster.propose(b"new"))[0]
    cluster.network.rejoin(old.id)
    while old.member.commit_index < header.index - 1:  # noqa: ASYNC110 - the new leader's no-op, in the old one's place
        await asyncio.sleep(0.00002)  # of simulated time: `wait` looks too seldom
    old.member._plan_save()()  # as for a vote, just now
    cluster.network.isolate(old.id)
    old.kill(loses_power=True)
    old.start()
    await cluster.wait(lambda: hasattr(old, "member"))
    assert b"old" not in old.machine.values
    cluster.network.rejoin(old.id)
    await cluster.wait_equal([b"1", b"new"])


@simulate
async def test_configuration_in_force_is_kept_until_the_next_one_is_durable_here(cluster: Cluster) -> None:
    """A later one that is committed, but whose entry a power loss may take away, does not replace it."""
    leader = await cluster.leader()
    await cluster.propose(b"1")
    persistence = leader.member._persistence
    members = tuple(cluster.nodes)
    first, second, third = (Configuration(voters=members, learners=(NodeId(10 + n),)) for n in range(3))
    entries = [Entry(Index(100 + n), Term(1), EntryKind.CONFIG, b"", item) for n, item in enumerate((first, second))]
    for entry in entries:
        persistence.add_configurations([entry], first_index=entry.index, settled_index=Index(100))
    last = Entry(Index(102), Term(1), EntryKind.CONFIG, b"", third)
    persistence.add_configurations([last], first_index=last.index, settled_index=Index(100))
    assert persistence.configuration_at(Index(100)) == first
    persistence.add_configurations([], first_index=Index(103), settled_index=Index(102))
    assert persistence.configuration_at(Index(101)) is None, "what is durable and replaced is forgotten"
    assert persistence.configuration_at(Index(102)) == third


@simulate
async def test_member_forgets_no_configuration_for_one_that_is_only_committed(cluster: Cluster) -> None:
    """Its own disk may lag behind the majority that has committed; what it saves must not run ahead of it."""
    leader = await cluster.leader()
    slow = next(node for node in cluster.nodes.values() if node is not leader).member
    assert isinstance(slow._executor, SimulatedExecutor)
    slow._executor.latency = Latency(minimum_ms=30, spread_ms=30)
    seen: list[tuple[Index, Index, Index]] = []
    real = Persistence.add_configurations

    def spy(persistence: Persistence, entries: Sequence[Entry], **about: Index) -> None:
        if persistence is slow._persistence:
            seen.append((about["settled_index"], slow.raft.durable_index, slow.raft.commit_index))
        real(persistence, entries, **about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Persistence, "add_configurations", spy)
        for number in range(6):
            await asyncio.gather(*(cluster.propose(b"%d" % number) for _ in range(5)))
            await asyncio.sleep(0.01)
            learners = (NodeId(9),) if number % 2 else ()
            leader.member.change_membership(voters=tuple(cluster.nodes), learners=learners)
    assert any(durable < commit for _, durable, commit in seen), "else nothing was tried"
    assert all(settled <= durable for settled, durable, _ in seen)


@simulate
async def test_first_leader_of_a_new_group_is_the_one_that_campaigns(cluster: Cluster) -> None:
    """However late the others open it: they hear what was asked before, and leave it the first election."""
    timeout_s = cluster.settings.election_timeout_ms / 1000
    groups = [GroupId(n) for n in range(2, 12)]
    first_members = Configuration(voters=tuple(sorted(cluster.nodes)))

    async def open_on(node: Node, *, is_patient: bool) -> None:
        for group in groups:
            files = f"{DIRECTORY}-{group}"
            member = await node.replicator.open_member(
                group, files, ValuesMachine(), bootstrap=first_members, is_patient=is_patient
            )
            members.setdefault(group, []).append(member)
            if not is_patient:
                member.campaign()

    await cluster.leader()
    members: dict[GroupId, list[Member]] = {}
    preferred, *others = cluster.nodes.values()
    await cluster.run_on(preferred, open_on(preferred, is_patient=False))
    for node in others:
        await asyncio.sleep(timeout_s / 8)
        await cluster.run_on(node, open_on(node, is_patient=True))
    await asyncio.sleep(timeout_s / 2)  # the last one hears of the leader with a heartbeat
    for group in groups:
        assert [member.leader for member in members[group]] == [preferred.id] * 3, "without any election timeout"
        assert members[group][0].term == 1, "without any other election"


@simulate
async def test_patient_members_elect_a_leader_without_the_one_that_should_campaign(cluster: Cluster) -> None:
    await cluster.leader()
    group, (gone, *others) = GroupId(7), cluster.nodes.values()
    first_members = Configuration(voters=tuple(sorted(cluster.nodes)))
    gone.kill()
    members = [
        await cluster.run_on(
            node,
            node.replicator.open_member(
                group, f"{DIRECTORY}-7", ValuesMachine(), bootstrap=first_members, is_patient=True
            ),
        )
        for node in others
    ]
    await cluster.wait(lambda: any(member.is_ready for member in members))
