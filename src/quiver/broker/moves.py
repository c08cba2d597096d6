"""Bring the groups that this node leads to the members that the metadata wants.

Only a partition's leader changes its group. It compares, again and again, who votes with who should, and takes the next
step that is missing; so a move goes on after the crash of anyone, under whoever leads then:

1. whoever is to vote and does not is added as a learner, which counts for nothing while it catches up;
2. if this node is to go, it first hands leadership to one that stays;
3. by one joint change the learners vote and those who are to go are out;
4. the metadata is told (`PromoteMove`); the source, once it has let go of its files, ends the move (`FinishMove`).
   For a source that is dead, or a move without one, the leader ends it.

What the metadata wants is the partition's replicas, and, while a move has begun, its target in the place of its source.
Without a move both are the same, unless a move was aborted at the very moment in which the group had carried it out:
then, and only when this node knows the metadata as well as the primary does, the group is brought back.

The first thing a leader does is to write the group's first configuration down, for members that join blank.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from quiver.broker.table import Held, Key, PartitionTable
from quiver.clock import Clock
from quiver.errors import OutcomeUnknownError, QuiverError, RequestError, UnavailableError
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
"""How often a partition that is not as it should be is looked at: a step takes about as long as a write."""
_GONE = (BrokerState.DEAD, BrokerState.REMOVED)


class Mover:
    """The one who changes the members of the groups that this node leads. `run` is its life."""

    def __init__(
        self,
        node: NodeId,
        *,
        table: PartitionTable,
        store: MetadataStore,
        router: NodeRouter,
        clock: Clock,
        on_unreported: Callable[[], None],
    ) -> None:
        self._node = node
        self._table = table
        self._store = store
        self._router = router
        self._clock = clock
        self._on_unreported = on_unreported
        self._dirty: dict[Key, None] = {}
        self._work = asyncio.Event()

    async def run(self) -> None:
        """Follow metadata and leadership until the store closes."""
        async with asyncio.TaskGroup() as tasks:
            worker = tasks.create_task(self._serve())
            async for changed in self._store.watch(Index(0)):
                self._note(changed)
            worker.cancel()

    def look_at(self, key: Key) -> None:
        """Compare a partition's group with what is meant to be, soon: this node has come to lead it, for one."""
        self._dirty[key] = None
        self._work.set()

    def _note(self, changed: WatchEvent) -> None:
        if changed.view is not None:
            for held in self._table:
                self.look_at(held.key)
            return
        for change in changed.changes:
            if change.table is Table.PARTITIONS and self._table.get(change.key) is not None:
                self.look_at(change.key)
            elif isinstance(change.row, MoveRow):
                self.look_at((change.row.topic_id, change.row.partition_id))
            elif change.table is Table.BROKERS:
                for move in self._store.view().moves.values():
                    self.look_at((move.topic_id, move.partition_id))

    async def _serve(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            dirty, self._dirty = self._dirty, {}
            for key in dirty:
                if not await self._look(key):
                    self._dirty[key] = None
            if self._dirty:
                await asyncio.sleep(STEP_INTERVAL_MS / 1000)
                self._work.set()

    async def _look(self, key: Key) -> bool:
        """Take the next step for a partition; tell whether nothing is left to do here."""
        held = self._table.get(key)
        if held is None or held.replica is None or not held.is_leader:
            return True  # whoever leads sees to it
        try:
            return await self._step(held, held.replica)
        except (UnavailableError, OutcomeUnknownError):
            return False
        except RequestError as error:
            logger.warning("members not changed", extra=facts(group=held.group, code=error.code, reason=error.message))
            return True

    async def _step(self, held: Held, replica: Replica) -> bool:
        view, member = self._store.view(), replica.member
        row = view.partitions.get(held.key)
        if row is None:
            return True
        configuration = member.configuration
        if configuration.is_joint or not member.is_ready:
            return False
        move = find_move(view, held.key)
        wanted = wanted_voters(row, move)
        if set(configuration.voters) == wanted:
            member.change_membership(voters=configuration.voters)  # drops learners that nobody wants any more
            return await self._conclude(view, row, move)
        if move is None or move.state is not MoveState.BEGUN:
            await self._confirm(held.key, wanted)
        return self._approach(replica, configuration, wanted)

    def _approach(self, replica: Replica, configuration: Configuration, wanted: set[NodeId]) -> bool:
        """Add learners, or, when they have caught up, let them vote; never done with one step."""
        member, voters = replica.member, configuration.voters
        missing = wanted.difference(voters)
        staying = [node for node in self._table.in_sync(replica) if node in wanted and node != self._node]
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
        """Tell the metadata how far a move has come."""
        if move is None:
            return True
        now_ms = self._clock.wall_ms()
        if move.state is MoveState.BEGUN:
            if not row.epoch:
                self._on_unreported()  # until a leader is reported, the replicas are those the partition was made with
                return False
            await self._submit(PromoteMove(now_ms=now_ms, move_id=move.move_id))
            return False
        if move.source is None or _is_gone(view, move.source):
            await self._submit(FinishMove(now_ms=now_ms, move_id=move.move_id))
        return True

    async def _confirm(self, key: Key, wanted: set[NodeId]) -> None:
        """Make sure that this node's metadata is no older than now before a group is brought back to it.

        Raises:
            UnavailableError: the primary was not reached, or the metadata means something else by now.
        """
        view = await self._router.catch_up()
        row = view.partitions.get(key)
        if row is None or wanted_voters(row, find_move(view, key)) != wanted:
            raise UnavailableError("the metadata was behind")

    async def _submit(self, command: Command[CommandDone]) -> None:
        try:
            await self._router.submit(command)
        except QuiverError as error:
            if error.code != "unknown_move":  # else somebody was faster
                raise


def find_move(view: View, key: Key) -> MoveRow | None:
    """Return a partition's move; there is never more than one."""
    return next((move for move in view.moves.values() if (move.topic_id, move.partition_id) == key), None)


def wanted_voters(row: PartitionRow, move: MoveRow | None) -> set[NodeId]:
    """Return who is to vote in a partition's group."""
    if move is None or move.state is not MoveState.BEGUN:
        return set(row.replicas)
    return {*row.replicas, move.target}.difference((move.source,))


def _is_gone(view: View, node: NodeId) -> bool:
    broker = view.brokers.get(node)
    return broker is None or broker.state in _GONE
