"""Checkpoints shorten replay and nothing else; trims shorten the log and lose no record that is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from replication_cluster import DIRECTORY, Cluster, Node, run_in, simulate

from quiver.errors import NotLeaderError
from quiver.model import Buffer, Index, NodeId, Offset, Term
from quiver.raft import Configuration, InstallSnapshot, SendSnapshot
from quiver.record import Batch, build_batch, build_control_batch
from quiver.replication import CONTROL_STATE, find_in_sync
from quiver.replication.codec import GroupMessage
from quiver.storage import SnapshotStore, StoredSnapshot, decode_snapshot

CHECKPOINT = f"{DIRECTORY}/checkpoint"


def blank(last_index: Index, end_offset: Offset) -> bytes:
    """Return what a `ValuesMachine` knows that knows nothing."""
    del last_index, end_offset
    return msgspec.msgpack.encode([])


def files(node: Node, prefix: str) -> list[str]:
    return [path for path in node.disk.paths() if path.startswith(f"{DIRECTORY}/{prefix}")]


def checkpoint_of(node: Node) -> StoredSnapshot:
    file = node.disk.open(CHECKPOINT)
    return decode_snapshot(file.read(file.size(), 0))


async def propose_many(cluster: Cluster, count: int, *, start: int = 0) -> list[bytes]:
    values = [b"%06d" % n * 8 for n in range(start, start + count)]
    for value in values:
        await cluster.propose(value)
    return values


async def restart(cluster: Cluster, node: Node) -> None:
    node.kill(loses_power=True)
    node.start()
    await cluster.wait(lambda: hasattr(node, "member"))


async def records_of(node: Node) -> list[bytes | None]:
    """Return every value that a node's log holds from its start on."""
    log, found = node.member.log, list[bytes | None]()
    offset = log.first_offset
    while offset < log.end_offset:
        batches: list[Batch] = await log.read_records(offset, end_offset=log.end_offset, bytes_max=1 << 20)
        for batch in batches:
            found += batch.values()
        offset = batches[-1].header.end_offset
    return found


@simulate
async def test_checkpoint_leaves_the_log_alone_and_spares_its_replay(cluster: Cluster) -> None:
    values = await propose_many(cluster, 60)
    await cluster.wait_equal(values)
    node = next(iter(cluster.nodes.values()))
    await node.member.checkpoint()
    assert node.member.log.first_index == 1
    assert not files(node, "snapshot-")
    taken = checkpoint_of(node).last_index
    await restart(cluster, node)
    assert node.member.applied_index >= taken, "what the checkpoint covers is known before anything is applied"
    assert node.machine.values[: len(values)] == values
    await cluster.propose(b"more")
    await cluster.wait_equal([*values, b"more"])


@simulate
async def test_damaged_checkpoint_is_ignored(cluster: Cluster) -> None:
    values = await propose_many(cluster, 20)
    await cluster.wait_equal(values)
    node = next(iter(cluster.nodes.values()))
    await node.member.checkpoint()
    node.kill()
    node.disk.flip_bit(CHECKPOINT, 50)
    node.start()
    await cluster.wait_equal(values)


@pytest.mark.parametrize("changed", ["term", "behind", "offset"])
def test_checkpoint_at_odds_with_the_log_is_ignored(changed: str) -> None:
    async def test(cluster: Cluster) -> None:
        values = await propose_many(cluster, 20)
        await cluster.wait_equal(values)
        node = next(iter(cluster.nodes.values()))
        await node.member.checkpoint()
        taken = checkpoint_of(node)
        forged = {
            "term": msgspec.structs.replace(taken, last_term=taken.last_term + 1),
            "behind": msgspec.structs.replace(taken, last_index=taken.last_index + 1000),
            "offset": msgspec.structs.replace(taken, end_offset=taken.end_offset + 1),
        }[changed]
        node.kill()
        SnapshotStore(node.disk, DIRECTORY).save_checkpoint(forged)
        node.start()
        await cluster.wait(lambda: hasattr(node, "member"))
        assert node.member.applied_index < taken.last_index, "everything is replayed"
        assert node.member.log.first_index == 1, "it is never taken for a snapshot that was being installed"
        await cluster.wait_equal(values)

    run_in(Cluster(), test)


@simulate
async def test_checkpoint_of_nothing_is_not_taken(cluster: Cluster) -> None:
    fresh = cluster.add(9)
    await cluster.wait(lambda: hasattr(fresh, "member"))
    await fresh.member.checkpoint()
    assert not files(fresh, "checkpoint")


@simulate
async def test_trim_removes_whole_segments_and_stands_at_the_logs_start(cluster: Cluster) -> None:
    values = await propose_many(cluster, 60)
    await cluster.wait_equal(values)
    for node in cluster.nodes.values():
        await node.member.trim(Index(30), blank)
        log = node.member.log
        assert 1 < log.first_index <= 30
        (snapshot,) = files(node, "snapshot-")
        assert snapshot.endswith(f"{log.first_index - 1:020d}")
        assert await records_of(node) == values[log.first_offset :]
        await node.member.trim(Index(30), blank)
        assert files(node, "snapshot-") == [snapshot], "the same trim again changes nothing"


@simulate
async def test_late_member_gets_every_kept_record_after_a_trim_and_a_change_of_leader(cluster: Cluster) -> None:
    old = await cluster.leader()
    late = next(node for node in cluster.nodes.values() if node is not old)
    late.kill()
    values = await propose_many(cluster, 60)
    others = [node for node in cluster.nodes.values() if node is not late]
    await cluster.wait_equal(values, *(node.id for node in others))
    for node in others:
        await node.member.trim(Index(30), blank)
    start = max(node.member.log.first_offset for node in others)
    assert start > 0
    late.start()
    learner = cluster.add(4)
    leader = await cluster.leader()
    leader.member.change_membership(voters=(NodeId(1), NodeId(2), NodeId(3)), learners=(NodeId(4),))
    everybody = list(cluster.nodes.values())
    await cluster.wait(lambda: all(node.member.log.end_offset == 60 for node in everybody if hasattr(node, "member")))
    await cluster.wait(lambda: leader.member.is_caught_up(learner.id))
    target = next(node for node in others if node is not leader)
    leader.member.transfer_leadership(target.id)
    values += await propose_many(cluster, 20, start=60)
    await cluster.wait(lambda: all(node.member.log.end_offset == 80 for node in everybody))
    for node in everybody:
        kept = await records_of(node)
        assert node.member.log.first_offset <= start
        assert kept == values[node.member.log.first_offset :]


@simulate
async def test_restart_after_a_trim_replays_what_is_kept(cluster: Cluster) -> None:
    values = await propose_many(cluster, 60)
    await cluster.wait_equal(values)
    node = next(iter(cluster.nodes.values()))
    await node.member.trim(Index(30), blank)
    start = node.member.log.first_offset
    node.kill(loses_power=True)
    node.disk.remove(CHECKPOINT)
    node.start()
    await cluster.wait(lambda: hasattr(node, "member") and node.machine.values == values[start:])


@simulate
async def test_damage_to_the_snapshot_at_the_logs_start_is_survived_by_the_checkpoint(cluster: Cluster) -> None:
    values = await propose_many(cluster, 60)
    await cluster.wait_equal(values)
    node = next(iter(cluster.nodes.values()))
    await node.member.trim(Index(30), blank)
    node.kill()
    (snapshot,) = files(node, "snapshot-")
    node.disk.flip_bit(snapshot, 50)
    node.start()
    await cluster.propose(b"more")
    await cluster.wait_equal([*values, b"more"])


@simulate
async def test_trim_survives_a_change_of_members_that_came_behind_it(cluster: Cluster) -> None:
    await propose_many(cluster, 40)
    leader = await cluster.leader()
    added = cluster.add(4)
    leader.member.change_membership(voters=(NodeId(1), NodeId(2), NodeId(3)), learners=(NodeId(4),))
    await cluster.wait(lambda: leader.member.is_caught_up(added.id))
    leader.member.change_membership(voters=(NodeId(1), NodeId(2), NodeId(3), NodeId(4)))
    voters = tuple(NodeId(n) for n in (1, 2, 3, 4))
    await cluster.wait(lambda: leader.member.configuration == Configuration(voters=voters))
    await leader.member.trim(Index(20), blank)
    await restart(cluster, leader)
    assert leader.member.configuration.voters == voters
    await cluster.propose(b"more")
    await cluster.wait(lambda: leader.machine.values[-1:] == [b"more"])


@simulate
async def test_only_what_is_applied_is_trimmed(cluster: Cluster) -> None:
    await propose_many(cluster, 60)
    leader = await cluster.leader()
    with pytest.raises(SystemExit, match="only applied entries are removed"):
        await leader.member.trim(Index(10_000), blank)


def test_member_that_campaigns_leads_a_new_group_without_the_random_wait() -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.wait(lambda: all(hasattr(node, "member") for node in cluster.nodes.values()))
        preferred = cluster.nodes[NodeId(2)]
        preferred.member.campaign()
        await asyncio.sleep(0.1)
        assert preferred.member.is_ready
        term = preferred.member.term
        for node in cluster.nodes.values():
            node.member.campaign()
        await asyncio.sleep(2)
        assert (preferred.member.is_ready, preferred.member.term) == (True, term), "a leader is left alone"

    run_in(Cluster(), test)


@simulate
async def test_refusal_names_the_leader(cluster: Cluster) -> None:
    leader = await cluster.leader()
    follower = await cluster.wait(
        lambda: next(
            (node for node in cluster.nodes.values() if node.member.leader == leader.id and node is not leader), None
        )
    )
    with pytest.raises(NotLeaderError) as refused:
        await follower.member.propose([build_batch([b"x"], timestamp=1)])
    assert refused.value.leader == leader.id
    with pytest.raises(NotLeaderError) as refused:
        await follower.member.read_barrier()
    assert refused.value.leader == leader.id


@simulate
async def test_leader_knows_who_keeps_up(cluster: Cluster) -> None:
    leader = await cluster.leader()
    await leader.member.propose([build_control_batch(CONTROL_STATE, timestamp=1)])
    late = next(node for node in cluster.nodes.values() if node is not leader)

    def in_sync() -> tuple[NodeId, ...]:
        return find_in_sync(leader.member.raft_status(), now_ms=int(cluster.loop.time() * 1000), silence_ms_max=800)

    await cluster.wait(lambda: in_sync() == (1, 2, 3))
    assert find_in_sync(late.member.raft_status(), now_ms=0, silence_ms_max=800) == ()
    late.kill()
    await cluster.wait(lambda: late.id not in in_sync())
    assert not leader.member.is_caught_up(NodeId(9))


@simulate
async def test_snapshot_that_was_read_too_late_is_not_sent_in_a_term_that_was_left(cluster: Cluster) -> None:
    await propose_many(cluster, 40)
    leader = await cluster.leader()
    await leader.member.take_snapshot()
    other = next(node for node in cluster.nodes.values() if node is not leader)
    sent: list[GroupMessage] = []
    post = leader.replicator.post

    def overhear(to: NodeId, message: GroupMessage, payloads: Sequence[Buffer] = ()) -> None:
        sent.append(message)
        post(to, message, payloads)

    leader.replicator.post = overhear  # type: ignore[method-assign] # to hear what leaves
    for term in (leader.member.term, Term(leader.member.term - 1)):
        permission = SendSnapshot(other.id, ticket=999, term=term, needed_index=Index(1), round=1)
        await leader.member._sender.send_snapshot(permission)
    installs = [item.plain for item in sent if isinstance(item.plain, InstallSnapshot)]
    assert [message.term for message in installs] == [leader.member.term]
