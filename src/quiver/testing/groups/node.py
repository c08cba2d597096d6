"""One simulated machine that runs the real driver, observed by the checkers.

A node whose storage fails is killed, as its exit would do, and restarted later; one whose files stay damaged is
replaced under a new id (R22).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from quiver.errors import DamageError, DiskFullError, StorageError, UnavailableError
from quiver.model import Buffer, GroupId, Index, NodeId, Term
from quiver.partition import PartitionState, Replica
from quiver.partition.entries import StateSnapshot
from quiver.raft import Configuration
from quiver.record import Batch
from quiver.replication import Member, Replicator
from quiver.replication.codec import GroupMessage, ReceivedMessage
from quiver.storage import DiskSpace
from quiver.testing.checkers.durability import Copy, PlatterReader, PromiseChecker
from quiver.testing.checkers.observer import Observer
from quiver.testing.simulator.machine import SimulatedMachine
from quiver.testing.simulator.report import require

if TYPE_CHECKING:
    from quiver.testing.groups.world import GroupWorld


_TRIES = 2
"""How often a node that cannot open its files is restarted before its machine is replaced."""


class ObservedState(PartitionState):
    """A partition's state that shows the checkers what it applies."""

    def __init__(self, node: NodeId, group: GroupId, observer: Observer) -> None:
        super().__init__()
        self._node = node
        self._observer = observer
        self._committed = observer.committed[group]
        self.is_verifying = True

    def apply(self, batches: Sequence[Batch]) -> None:
        """Show each batch, then apply it."""
        self._observer.look(self._node)  # the commit that this follows from may be of this very event
        expected = self.applied_index
        for batch in batches:
            expected = Index(expected + 1)
            require(batch.header.index == expected, "I5", "a member skips an entry", node=self._node, index=expected)
            self._committed.apply(self._node, batch)
        super().apply(batches)

    def snapshot_steps(self) -> Iterator[bytes]:
        """Show the state that is saved."""
        parts = list(super().snapshot_steps())
        if self.is_complete:
            self._committed.snapshot(self._node, self.applied_index, b"".join(parts))
        return iter(parts)

    def restore(self, state: bytes) -> None:
        """Show the state that is restored."""
        super().restore(state)
        if state and self.is_complete:
            self._committed.snapshot(self._node, self.applied_index, b"".join(super().snapshot_steps()))

    def _apply_snapshot(self, contents: StateSnapshot, batch: Batch) -> None:
        """Show that a summary says what this replica knows, if it knows everything."""
        if self.is_complete:
            facts = {"node": self._node, "group": self._committed.group, "index": batch.header.index}
            require(self.contents() == contents, "I14", "a summary is not the state that it stands for", **facts)
        super()._apply_snapshot(contents, batch)


class ObservedReplicator(Replicator):
    """The real driver, whose every message is shown to the checkers before it leaves."""

    checkers: dict[GroupId, tuple[PromiseChecker, Member]]

    def post(self, to: NodeId, message: GroupMessage, payloads: Sequence[Buffer] = ()) -> None:
        """Show a message, then send it."""
        watched = self.checkers.get(message.group)
        if watched is not None:
            checker, member = watched
            if message.plain is not None:
                checker.say(to, message.plain, member.raft, member.log)
            elif message.append is not None:
                checker.say_term(message.append.term)
        super().post(to, message, payloads)


class MemberCopy:
    """A member's copy of its log, for the durability checker; a dead member's is what it was when it died."""

    def __init__(self, node: SimulatedNode, member: Member) -> None:
        self._node = node
        self._member = member
        self._platter = PlatterReader(node.disk, member.log)

    @property
    def term(self) -> Term:
        """Return the member's term."""
        return self._member.raft.term

    def holds(self, index: Index, term: Term) -> bool:
        """Return whether an entry is durable, by the log's own word."""
        log = self._member.log
        if self._node.is_damaged:
            return True  # what it has lost since, it had when it said so; other checks are for that
        if index >= log.durable_end_index:
            return False
        return index < log.first_index - 1 or log.term_at(index) == term

    def holds_on_platter(self, index: Index, term: Term) -> bool:
        """Return whether the entry is on the platter; a damaged disk is taken at its word."""
        if self._node.is_damaged:
            return self.holds(index, term)
        return self._platter.holds(index, term)


def _watch_messages(
    member: Member, checker: PromiseChecker, copies: Mapping[NodeId, Copy], knows: Callable[[NodeId], bool]
) -> None:
    """Show the checkers each message that a member has taken; promises are not made to strangers."""
    take = member.receive

    def receive(from_: NodeId, received: ReceivedMessage) -> None:
        if not knows(from_):
            take(from_, received)
            return
        belief = checker.belief(from_, received.message, member.raft)
        take(from_, received)
        checker.hear(from_, received.message, member.raft, copies.get(from_), belief)

    member.receive = receive  # type: ignore[method-assign] # the member is made by the driver itself


class SimulatedNode(SimulatedMachine):
    """One machine with the real driver on it."""

    def __init__(self, world: GroupWorld, node: NodeId) -> None:
        super().__init__(world, node)
        self.world = world
        self.replicas: dict[GroupId, Replica] = {}
        self._failures_in_a_row = 0
        self._bootstraps: dict[GroupId, Configuration] = {}

    def directory(self, group: GroupId) -> str:
        """Return where a group's files are."""
        return f"/data/group-{group}"

    def serve(self, group: GroupId) -> Replica:
        """Return the replica that serves a call, or refuse it."""
        replica = self.replicas.get(group)
        if replica is None:
            raise UnavailableError("not done: this node is starting")
        return replica

    def bootstrap(self, group: GroupId, configuration: Configuration) -> None:
        """Make the next start create a first member of a group."""
        self._bootstraps[group] = configuration

    # -- one process -----------------------------------------------------------------------------

    async def _run(self) -> None:
        world = self.world
        replicator = ObservedReplicator(
            self.id,
            incarnation=world.next_incarnation(),
            network=world.network.port(self.id),
            disk=self.disk,
            executor=self._make_executor(),
            clock=self.clock,
            rng=self._rng,
            settings=world.knobs.replication,
            log_settings=world.knobs.log,
            on_failure=self._handle_failure,
            knows=world.nodes.__contains__,
        )
        replicator.checkers = {}
        async with replicator:
            world.loop.create_task(self._watch_space(replicator.space))
            try:
                for group in world.groups:
                    await self._open(replicator, group)
            except StorageError as error:
                self._handle_failure(error)
            await asyncio.Event().wait()

    async def _open(self, replicator: ObservedReplicator, group: GroupId) -> None:
        world = self.world
        state = ObservedState(self.id, group, world.observer)
        member = await replicator.open_member(
            group, self.directory(group), state, bootstrap=self._bootstraps.get(group)
        )
        self._bootstraps.pop(group, None)  # once in the member's life
        checker = world.observer.promises(self.id, group)
        replicator.checkers[group] = (checker, member)
        _watch_messages(member, checker, world.observer.copies[group], replicator.knows)
        world.observer.copies[group][self.id] = MemberCopy(self, member)
        world.observer.watch(self.id, member)
        replica = self.replicas[group] = Replica(member, state, settings=world.knobs.partition, clock=self.clock)
        world.loop.create_task(self._run_background_work(replica))
        if world.knobs.retention is None:
            world.loop.create_task(self._take_snapshots(replica))

    async def _watch_space(self, space: DiskSpace) -> None:
        """Notice room that comes back, as a broker does."""
        with suppress(StorageError):  # a disk that does not even say that fails elsewhere, too
            await space.run()

    async def _run_background_work(self, replica: Replica) -> None:
        """Run the replica's background work; the driver reports a failure of its disk to the supervisor."""
        if self.world.knobs.retention is not None:
            replica.set_retention(self.world.knobs.retention)
        try:
            await replica.run(self.clock)
        except StorageError as error:
            self.world.trace.record("housekeeping_failed", self.world.now_ms, self.id, type(error).__name__)

    async def _take_snapshots(self, replica: Replica) -> None:
        """Take a snapshot whenever enough was applied since the last one."""
        member = replica.member
        taken_index = member.applied_index
        while True:
            await asyncio.sleep(self.world.knobs.snapshot_poll_ms / 1000)
            if member.applied_index - taken_index >= self.world.knobs.snapshot_entries:
                taken_index = member.applied_index
                await self.take_snapshot(replica)

    async def take_snapshot(self, replica: Replica) -> None:
        """Take a snapshot, or trim and checkpoint; the driver reports a failure of the disk to the supervisor."""
        try:
            if self.world.knobs.retention is None:
                await replica.member.take_snapshot()
            else:
                await replica.maintain(self.clock.wall_ms())
                await replica.member.checkpoint()
        except (StorageError, DiskFullError) as error:
            self.world.trace.record("snapshot_failed", self.world.now_ms, self.id, type(error).__name__)

    def _drop_process(self) -> None:
        self.world.observer.forget(self.id)
        self.replicas = {}

    # -- failures --------------------------------------------------------------------------------

    def _handle_failure(self, error: StorageError) -> None:
        """Do what a supervisor does with a node that exits: start it again, or call the operator."""
        if not self.is_up:
            return
        self.world.trace.record("storage_failed", self.world.now_ms, self.id, str(error))
        is_damage = isinstance(error, DamageError) or isinstance(error.__cause__, DamageError)
        require(
            self.is_damaged or not is_damage,
            "F1",
            f"a disk is damaged although no fault damaged it: {error}",
            node=self.id,
        )
        is_open = len(self.replicas) == len(self.world.groups)
        self._failures_in_a_row = 0 if is_open else self._failures_in_a_row + 1
        self.kill(power_loss=False)
        if is_damage and self._failures_in_a_row > _TRIES:
            self.world.replace(self)
        else:
            self.world.restart_later(self)
