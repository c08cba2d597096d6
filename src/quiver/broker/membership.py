"""Reconciles the membership of the groups that this node leads with the metadata.

Only a partition's leader changes its group. It compares the voters with those that the metadata wants, and performs the
next missing step; so a move continues after any crash, under the next leader:

1. wanted voters that are missing are added as learners, which do not count for quorums while they catch up;
2. if this node is to leave, it first transfers leadership to a voter that stays, preferably one with room on its disk;
3. one joint change makes the learners voters and removes the voters that leave;
4. the leader reports to the metadata (`PromoteMove`); the source removes its files and ends the move (`FinishMove`).
   If the source is dead, or the move has none, the leader ends it.

The metadata wants the partition's replicas, and while a move is in state BEGUN, its target in place of its source.
Without a move, group and metadata agree, unless a move was aborted just when the group had completed it. Then the group
is changed back, but only after this node's metadata is confirmed to be current.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from quiver.broker.replica_table import HostedReplica, PartitionKey, ReplicaTable
from quiver.clock import Clock
from quiver.errors import NotAllowedError, OutcomeUnknownError, QuiverError, RequestError, UnavailableError
from quiver.logs import facts
from quiver.manager.node_router import NodeRouter
from quiver.metadata import (
    BrokerState,
    Command,
    CommandDone,
    FinishMove,
    MetadataStore,
    MoveRow,
    MoveState,
    PartitionRow,
    PromoteMove,
    Table,
    View,
    WatchEvent,
)
from quiver.model import Index, NodeId
from quiver.partition import Replica
from quiver.raft import Configuration

logger = logging.getLogger(__name__)

STEP_INTERVAL_MS = 100
"""Interval between two steps of a partition that is not reconciled: a step takes about as long as a write."""
_GONE = (BrokerState.DEAD, BrokerState.REMOVED)


class MembershipReconciler:
    """Changes the members of the groups that this node leads."""

    def __init__(
        self,
        node: NodeId,
        *,
        table: ReplicaTable,
        store: MetadataStore,
        router: NodeRouter,
        clock: Clock,
        request_report: Callable[[], None],
        full_nodes: Callable[[], Collection[NodeId]],
    ) -> None:
        self._node = node
        self._table = table
        self._store = store
        self._router = router
        self._clock = clock
        self._request_report = request_report
        self._full_nodes = full_nodes
        self._dirty: dict[PartitionKey, None] = {}
        self._work = asyncio.Event()

    async def run(self) -> None:
        """Reconcile after changes of the metadata or leadership, until the store closes."""
        async with asyncio.TaskGroup() as tasks:
            worker = tasks.create_task(self._work_off())
            async for changed in self._store.watch(Index(0)):
                self._enqueue_changed(changed)
            worker.cancel()

    def enqueue(self, key: PartitionKey) -> None:
        """Reconcile a partition soon, for example because this node became its leader."""
        self._dirty[key] = None
        self._work.set()

    def _enqueue_changed(self, changed: WatchEvent) -> None:
        if changed.view is not None:
            for hosted in self._table:
                self.enqueue(hosted.key)
            return
        for change in changed.changes:
            if change.table is Table.PARTITIONS and self._table.get(change.key) is not None:
                self.enqueue(change.key)
            elif isinstance(change.row, MoveRow):
                self.enqueue((change.row.topic_id, change.row.partition_id))
            elif change.table is Table.BROKERS:
                for move in self._store.view().moves.values():
                    self.enqueue((move.topic_id, move.partition_id))

    async def _work_off(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            dirty, self._dirty = self._dirty, {}
            for key in dirty:
                if not await self._reconcile(key):
                    self._dirty[key] = None
            if self._dirty:
                await asyncio.sleep(STEP_INTERVAL_MS / 1000)
                self._work.set()

    async def _reconcile(self, key: PartitionKey) -> bool:
        """Perform the next step for a partition; return whether nothing is left to do."""
        hosted = self._table.get(key)
        if hosted is None or hosted.replica is None or not hosted.is_leader:
            return True  # the leader does it
        try:
            return await self._step(hosted, hosted.replica)
        except (UnavailableError, OutcomeUnknownError, NotAllowedError):
            # Not allowed: a manager that was removed meanwhile forwarded the report; the primary does not believe it.
            return False
        except RequestError as error:
            logger.warning(
                "membership change refused", extra=facts(group=hosted.group, code=error.code, reason=error.message)
            )
            return True

    async def _step(self, hosted: HostedReplica, replica: Replica) -> bool:
        view, member = self._store.view(), replica.member
        row = view.partitions.get(hosted.key)
        if row is None:
            return True
        configuration = member.configuration
        if configuration.is_joint or not member.is_ready:
            return False
        move = find_move(view, hosted.key)
        wanted = wanted_voters(row, move)
        if set(configuration.voters) == wanted:
            member.change_membership(voters=configuration.voters)  # drops learners of aborted moves
            return await self._conclude(view, row, move)
        if move is None or move.state is not MoveState.BEGUN:
            await self._confirm(hosted.key, wanted)
        return self._approach(replica, configuration, wanted)

    def _approach(self, replica: Replica, configuration: Configuration, wanted: set[NodeId]) -> bool:
        """Add learners, or make those that have caught up voters; always returns False: the result must be checked."""
        member, voters = replica.member, configuration.voters
        missing = wanted.difference(voters)
        successors = self._table.successors(replica, self._full_nodes())
        staying = [successor.node for successor in successors if successor.node in wanted]
        if not missing.issubset(configuration.learners):
            member.change_membership(voters=voters, learners=tuple(missing))
        elif not all(member.is_caught_up(node) for node in missing):
            return False
        elif self._node not in wanted and len(voters) > 1:
            if staying:
                member.transfer_leadership(staying[0])
        else:
            member.change_membership(voters=tuple(wanted))
            logger.info("members changed", extra=facts(group=member.group, voters=sorted(wanted)))
        return False

    async def _conclude(self, view: View, row: PartitionRow, move: MoveRow | None) -> bool:
        """Report the progress of a move to the metadata."""
        if move is None:
            return True
        now_ms = self._clock.wall_ms()
        if move.state is MoveState.BEGUN:
            if not row.epoch:
                # `ReplicaManager` relies on this: until a leader is reported, the row names the first members.
                self._request_report()
                return False
            await self._submit(PromoteMove(now_ms=now_ms, move_id=move.move_id))
            return False
        if move.source is None or _is_gone(view, move.source):
            await self._submit(FinishMove(now_ms=now_ms, move_id=move.move_id))
        return True

    async def _confirm(self, key: PartitionKey, wanted: set[NodeId]) -> None:
        """Confirm that this node's metadata is current before a group is changed back to it.

        Raises:
            UnavailableError: the primary was not reached, or the metadata has changed.
        """
        view = await self._router.catch_up()
        row = view.partitions.get(key)
        if row is None or wanted_voters(row, find_move(view, key)) != wanted:
            raise UnavailableError(f"not done: the metadata of partition {key[1]} of topic {key[0]} was stale; retry")

    async def _submit(self, command: Command[CommandDone]) -> None:
        try:
            await self._router.submit(command)
        except QuiverError as error:
            if error.code != "unknown_move":  # otherwise another node has already ended the move
                raise


def find_move(view: View, key: PartitionKey) -> MoveRow | None:
    """Return a partition's move; there is at most one."""
    return next((move for move in view.moves.values() if (move.topic_id, move.partition_id) == key), None)


def wanted_voters(row: PartitionRow, move: MoveRow | None) -> set[NodeId]:
    """Return the nodes that the metadata wants as voters of a partition's group."""
    if move is None or move.state is not MoveState.BEGUN:
        return set(row.replicas)
    return {*row.replicas, move.target}.difference((move.source,))


def _is_gone(view: View, node: NodeId) -> bool:
    broker = view.brokers.get(node)
    return broker is None or broker.state in _GONE
