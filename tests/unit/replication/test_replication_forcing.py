"""A forced configuration on simulated disks: the best survivor goes on with all that any survivor knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import pytest
from replication_cluster import DIRECTORY, GROUP, SMALL_LOG, Cluster, Node, run_in

from quiver.clock import SystemClock
from quiver.errors import StorageError
from quiver.model import NodeId, Term
from quiver.operations.survivors import Copy, best_copy, inspect_copy
from quiver.record import build_batch
from quiver.replication.forcing import COPY_NAME, force_configuration
from quiver.replication.member_files import MemberStorage
from quiver.storage import Lane, LaneStatus, LogTimings, TailBudget
from quiver.tasks import timeout
from quiver.testing import PowerLoss, SimulatedClock, SimulatedDisk

T = TypeVar("T")

Choice = Callable[[Sequence[Copy]], Copy]


def storage_of(node: Node) -> MemberStorage:
    clock = SimulatedClock(node.cluster.loop)
    return MemberStorage(node.disk, node._make_executor(), clock, SMALL_LOG, TailBudget(1 << 20), LogTimings())


async def recover(cluster: Cluster, numbers: Sequence[int], *, choose: Choice = best_copy) -> Node:
    """Do what `quiver recover` does to one group: force the best of the survivors, which are stopped."""
    nodes = [cluster.nodes[NodeId(number)] for number in numbers]
    copies = [await inspect_copy(storage_of(node), node.id, GROUP, DIRECTORY) for node in nodes]
    best = choose(copies)
    chosen = cluster.nodes[best.node]
    term = Term(1 + max(copy.term for copy in copies))
    await force_configuration(storage_of(chosen), DIRECTORY, voter=best.node, term=term)
    return chosen


async def lose_majority(cluster: Cluster) -> list[bytes]:
    """Leave nodes 1 and 2 of five: 1 has a long tail that was never committed, 2 has what was. Return the latter."""
    sent = [f"early {number}".encode() for number in range(5)]
    for value in sent:
        await cluster.propose(value)
    deposed = await cluster.leader()
    others = [node for node in cluster.nodes.values() if node is not deposed]
    cluster.network.isolate(deposed.id)
    tail = [build_batch([f"never {number}".encode()], timestamp=1) for number in range(30)]
    pending = [deposed.member.propose_nowait([batch]) for batch in tail]
    assert pending
    await cluster.wait(lambda: next((node for node in others if node.is_up and node.member.is_ready), None))
    await asyncio.sleep(2)
    for number in range(3):
        value = f"late {number}".encode()
        sent.append(value)
        leader = next(node for node in others if node.member.is_ready)
        await leader.member.propose([build_batch([value], timestamp=1)])
    survivor = next(node for node in others if not node.member.is_leader)
    await cluster.wait(lambda: survivor.machine.values == sent or None)
    for node in cluster.nodes.values():
        node.kill(loses_power=True)
    cluster.network.heal()
    cluster.survivors = (int(deposed.id), int(survivor.id))  # type: ignore[attr-defined] # for this test alone
    return sent


def test_best_survivor_has_all_that_was_committed_and_others_follow_it() -> None:
    async def test(cluster: Cluster) -> None:
        sent = await lose_majority(cluster)
        survivors: tuple[int, int] = cluster.survivors  # type: ignore[attr-defined]
        chosen = await recover(cluster, survivors)
        assert chosen.disk.exists(f"{DIRECTORY}/{COPY_NAME}")
        for number in survivors:
            cluster.nodes[NodeId(number)].start()
        await cluster.wait(lambda: (chosen.is_up and chosen.member.is_ready) or None)
        await cluster.wait_equal(sent, int(chosen.id))
        other = next(number for number in survivors if number != chosen.id)
        chosen.member.change_membership(voters=(chosen.id,), learners=(NodeId(other),))
        await cluster.wait_equal(sent, *survivors)
        await chosen.member.propose([build_batch([b"on"], timestamp=1)])
        await cluster.wait_equal([*sent, b"on"], *survivors)

    run_in(Cluster(5), test)


def test_indexes_that_others_may_remember_are_used_up() -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.propose(b"a")
        node = await cluster.leader()
        node.kill()
        storage, term = storage_of(node), Term(9)
        copy = await inspect_copy(storage, node.id, GROUP, DIRECTORY)
        batch = build_batch([b"b"], timestamp=1)
        last = await force_configuration(storage, DIRECTORY, voter=node.id, term=term, skipped=500, batches=[batch])
        assert last == copy.last_index + 1 + 500 + 1
        node.start()
        await cluster.wait_equal([b"a", b"b"], int(node.id))
        assert node.member.applied_index >= last

    run_in(Cluster(1), test)


def test_longest_log_is_not_the_best() -> None:
    """Ablation: without the terms, acknowledged records that a survivor has would be lost."""

    async def test(cluster: Cluster) -> None:
        sent = await lose_majority(cluster)
        survivors: tuple[int, int] = cluster.survivors  # type: ignore[attr-defined]
        chosen = await recover(cluster, survivors, choose=lambda copies: max(copies, key=lambda copy: copy.last_index))
        chosen.start()
        await cluster.wait(lambda: (chosen.is_up and chosen.member.is_ready) or None)
        assert chosen.machine.values != sent
        assert b"late 0" not in chosen.machine.values

    run_in(Cluster(5), test)


class InlineExecutor:
    """Runs work at once; a power loss reaches whoever waits for the work."""

    def submit(self, work: Callable[[], T], lane: Lane = Lane.WRITES) -> asyncio.Future[T]:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            done.set_result(work())
        except (Exception, PowerLoss) as error:  # noqa: BLE001 - the waiter's
            done.set_exception(error)
        return done

    def check_room(self, lane: Lane) -> None:
        """There is always room."""

    def status(self) -> tuple[LaneStatus, ...]:
        return ()


@pytest.fixture(scope="module")
def stopped_disk() -> SimulatedDisk:
    """Return the disk of one of three members, stopped, with ten records."""
    found: list[SimulatedDisk] = []

    async def test(cluster: Cluster) -> None:
        values = [f"value {number}".encode() for number in range(10)]
        for value in values:
            await cluster.propose(value)
        await cluster.wait_equal(values, 1)
        for node in cluster.nodes.values():
            node.kill()
        found.append(cluster.nodes[NodeId(1)].disk)

    run_in(Cluster(3), test)
    return found[0]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("operations", range(1, 16))
def test_forcing_survives_a_power_loss_at_any_operation(
    stopped_disk: SimulatedDisk, operations: int, moment: Literal["before", "after"]
) -> None:
    async def force(disk: SimulatedDisk) -> Copy:
        clock = SystemClock()
        storage = MemberStorage(disk, InlineExecutor(), clock, SMALL_LOG, TailBudget(1 << 20), LogTimings())
        async with timeout(5):
            copy = await inspect_copy(storage, NodeId(1), GROUP, DIRECTORY)
            await force_configuration(storage, DIRECTORY, voter=NodeId(1), term=Term(copy.term + 1))
            return await inspect_copy(storage, NodeId(1), GROUP, DIRECTORY)

    disk = stopped_disk.clone()
    before = disk.operation_count
    disk.crash_after(operations, moment=moment)
    try:
        asyncio.run(force(disk))
    except (PowerLoss, TimeoutError, StorageError):
        disk.crash()
    else:
        assert disk.operation_count - before < operations, "the power loss went unnoticed"
        disk.restart()
    copy = asyncio.run(force(disk))  # the operator repeats it
    assert copy.configuration.voters == (1,)
    assert (copy.first_offset, copy.end_offset) == (0, 10)
