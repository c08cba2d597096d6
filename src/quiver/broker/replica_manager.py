"""Keep on this node the replicas that the metadata puts here: open them, close them, let go of their files.

The metadata says what is meant to be; the keeper brings this node there, group by group, a few groups at a time, and
goes on by itself after a crash: nothing that it must remember is anywhere but on disk and in the metadata.

- **Opening.** A replica whose files are here is opened with them. A new one gets its files first, then the note that
  this node has joined (`GroupFolders`), then a member. First members of a group are told of each other
  (`bootstrap`) only while no leader has ever been reported, by metadata that is no older than now: until then it names
  the very nodes the partition was made with (`moves` sees to that), and none of them has left. Everybody else joins
  blank and learns who belongs to the group from its log. Files that are gone although this node has joined are never
  made anew, and a node that is known by another identity opens nothing (R22).
- **Letting go.** Never on the word of this node's own metadata alone (R19): the group's leader must say that this node
  is out, or the primary that the topic was purged. Until then files stay, and a replica that was moved away stays open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from quiver.broker.table import Held, HeldState, Key, PartitionTable
from quiver.clock import Clock, Rng
from quiver.config import Settings
from quiver.errors import DamageError, OutcomeUnknownError, QuiverError, StorageError, UnavailableError
from quiver.logs import facts
from quiver.manager.node_router import NodeRouter
from quiver.metadata import (
    Change,
    FinishMove,
    MetadataStore,
    MoveRow,
    MoveState,
    PartitionRow,
    Table,
    TopicState,
    View,
    WatchEvent,
)
from quiver.model import GroupId, Index, NodeId
from quiver.partition import PartitionState, Replica
from quiver.raft import Configuration
from quiver.replication import Replicator
from quiver.storage import DiskSpace, Executor, GroupFolders
from quiver.wire.messages import GetMetadata

logger = logging.getLogger(__name__)

RETRY_MS = 1_000
"""Wait before something that could not be done is tried again; up to half of it more, by chance."""

CAMPAIGN_DELAYS_MS = (0, 10, 30, 80, 200)
"""When the preferred replica of a new group asks for votes: the others open theirs at about the same time."""


class ReplicaManager:
    """The one who opens and closes this node's replicas. `run` is its life."""

    def __init__(
        self,
        node: NodeId,
        *,
        identity: str,
        table: PartitionTable,
        folders: GroupFolders,
        store: MetadataStore,
        replicator: Replicator,
        router: NodeRouter,
        executor: Executor,
        clock: Clock,
        rng: Rng,
        settings: Settings,
        space: DiskSpace,
        on_open: Callable[[Held, Replica], None],
    ) -> None:
        self._node = node
        self._identity = identity
        self._table = table
        self._folders = folders
        self._store = store
        self._replicator = replicator
        self._router = router
        self._executor = executor
        self._clock = clock
        self._rng = rng
        self._settings = settings
        self._space = space
        self._on_open = on_open
        self._keys: dict[GroupId, Key] = {}
        self._present: set[GroupId] = set()
        self._joined: set[GroupId] = set()
        self._dirty: dict[GroupId, None] = {}
        """Groups to look at, in the order in which they came up."""
        self._busy: set[GroupId] = set()
        self._work = asyncio.Event()
        self._ready = asyncio.Event()
        self._unknown: set[GroupId] = set()
        self._has_begun = False

    # -- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the metadata until the store closes.

        Raises:
            StorageError: the folders cannot be used.
        """
        try:
            await self._executor.submit(self._folders.prepare)
            self._present = set(await self._executor.submit(self._folders.present))
            self._joined = set(await self._executor.submit(self._folders.joined))
        except OSError as error:
            raise StorageError(f"the folders of the replicas cannot be used: {error}") from error
        if not self._present and not self._joined:
            self._ready.set()
        async with asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(self._serve()) for _ in range(self._settings.broker.openings_max)]
            async for changed in self._store.watch(Index(0)):
                self._note(changed)
            for worker in workers:
                worker.cancel()

    async def wait_ready(self) -> None:
        """Return once every replica that this node has on disk is open, or known not to be wanted or usable."""
        await self._ready.wait()

    @property
    def is_ready(self) -> bool:
        """Tell whether `wait_ready` would return at once."""
        return self._ready.is_set()

    def look_at(self, group: GroupId) -> None:
        """Compare a group with what is meant to be, soon."""
        self._dirty[group] = None
        self._work.set()

    # -- what changed ----------------------------------------------------------------------------

    def _note(self, changed: WatchEvent) -> None:
        self._has_begun = True
        if changed.view is not None:
            self._note_all(changed.view)
        else:
            for change in changed.changes:
                self._note_change(change)

    def _note_all(self, view: View) -> None:
        self._keys = {row.group_id: key for key, row in view.partitions.items()}
        meant = {row.group_id for row in view.partitions_on(self._node)}
        leaving = {view.partitions[_key_of(move)].group_id for move in view.moves.values() if move.source == self._node}
        for group in sorted(meant | leaving | self._present | self._joined | {held.group for held in self._table}):
            self.look_at(group)

    def _note_change(self, change: Change) -> None:
        match change.table:
            case Table.PARTITIONS:
                self._note_partition(change)
            case Table.TOPICS:
                for group, key in list(self._keys.items()):
                    if key[0] == change.key and self._concerns_us(group):
                        self.look_at(group)
            case Table.MOVES if isinstance(change.row, MoveRow) and change.row.source == self._node:
                row = self._store.view().partitions.get(_key_of(change.row))
                if row is not None:
                    self.look_at(row.group_id)
            case _:
                pass

    def _note_partition(self, change: Change) -> None:
        row = change.row
        if isinstance(row, PartitionRow):
            self._keys[row.group_id] = row.key
            if row.is_on(self._node) or self._concerns_us(row.group_id):
                self.look_at(row.group_id)
            return
        group = next((group for group, key in self._keys.items() if key == change.key), None)
        if group is not None:
            del self._keys[group]
            if self._concerns_us(group):
                self.look_at(group)

    def _concerns_us(self, group: GroupId) -> bool:
        return group in self._present or group in self._joined or self._table.get_group(group) is not None

    # -- workers ---------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Deal with one group after the other; no group is in two workers' hands."""
        while True:
            group = next((group for group in self._dirty if group not in self._busy), None)
            if group is None:
                self._work.clear()
                if not self._dirty and not self._busy and self._has_begun:
                    self._ready.set()
                await self._work.wait()
                continue
            del self._dirty[group]
            self._busy.add(group)
            try:
                await self._settle(group)
            except (UnavailableError, OutcomeUnknownError) as error:
                logger.debug("replica not settled yet", extra=facts(group=group, reason=error.message))
                self._look_later(group)
            finally:
                self._busy.discard(group)
                self._work.set()

    def _look_later(self, group: GroupId) -> None:
        delay_s = RETRY_MS / 1000 * (1 + self._rng.random() / 2)
        asyncio.get_running_loop().call_later(delay_s, self.look_at, group)

    async def _settle(self, group: GroupId) -> None:
        """Bring one group to what the metadata means; everything in here may have been done in part before."""
        view, held = self._store.view(), self._table.get_group(group)
        key = self._keys.get(group)
        row = None if key is None else view.partitions.get(key)
        if row is None:
            await self._settle_purged(group, held)
        elif not row.is_on(self._node):
            await self._settle_moved_away(row, held)
        elif view.topics[row.topic_id].state is not TopicState.ACTIVE:
            await self._close(held)  # files stay: the topic can be restored
        elif held is None or (held.state is HeldState.UNUSABLE and not held.is_given_up):
            self._check_identity(view)
            await self._open(row, held, await self._find_first_members(row))

    # -- opening ---------------------------------------------------------------------------------

    def _check_identity(self, view: View) -> None:
        """Open nothing while another node is known by this one's id: what was put there is not this one's (R22).

        Raises:
            UnavailableError: this node is not known by its identity; it keeps trying to be.
        """
        known = view.brokers.get(self._node)
        if known is None or known.identity != self._identity:
            raise UnavailableError("this node is not registered as what it is")

    async def _find_first_members(self, row: PartitionRow) -> Configuration | None:
        """Return who the first members of a new group are, this one among them; None for a replica that joins later.

        By metadata that is no older than now: whoever knows only how the cluster was once may have been a member, and
        left, since then.
        """
        is_known = row.group_id in self._present or row.group_id in self._joined
        if is_known or row.epoch or self._node not in row.replicas:
            return None
        now = (await self._router.catch_up()).partitions.get(row.key)
        if now is None or not now.is_on(self._node):
            raise UnavailableError("the metadata was behind")
        return Configuration(voters=tuple(sorted(now.replicas))) if not now.epoch else None

    async def _open(self, row: PartitionRow, held: Held | None, first_members: Configuration | None) -> None:
        """Open a replica. Damage stays what it is; another failure of the disk, such as no space, may pass."""
        held, known = self._table.add(row.key, row.group_id) if held is None else held, held
        try:
            replica = await self._open_replica(row, held, first_members)
        except DamageError as error:
            held.give_up(error.message)
            logger.exception("replica cannot be opened", extra=facts(group=row.group_id, topic_id=row.topic_id))
            return
        except StorageError as error:
            if known is None:
                logger.exception("replica cannot be opened yet", extra=facts(group=row.group_id, topic_id=row.topic_id))
            held.note_problem(error.message)
            self._look_later(row.group_id)
            return
        if replica is not None:
            held.open(replica)
            self._on_open(held, replica)
            if first_members is not None and row.replicas[0] == self._node:
                self._stand_for_election(held, replica)

    def _stand_for_election(self, held: Held, replica: Replica) -> None:
        """Let the preferred replica of a new group ask for votes at once: spare clients the wait for a timeout."""
        for delay_ms in CAMPAIGN_DELAYS_MS:
            asyncio.get_running_loop().call_later(delay_ms / 1000, _campaign, held, replica)

    async def _open_replica(self, row: PartitionRow, held: Held, first_members: Configuration | None) -> Replica | None:
        group, directory = row.group_id, self._folders.path(row.group_id)
        is_new = group not in self._present
        if is_new:
            if group in self._joined:
                held.give_up("its files are gone: this node no longer knows what it promised; move the replica away")
                logger.error("replica lost its files", extra=facts(group=group, topic_id=row.topic_id))
                return None
            await self._replicator.make_member(directory, bootstrap=first_members)
            self._present.add(group)
        if group not in self._joined:
            await self._run(partial(self._folders.join, group))  # before the member can promise anything
            self._joined.add(group)
        state = PartitionState()
        member = await self._replicator.open_member(group, directory, state)
        logger.info(
            "replica opened",
            extra=facts(group=group, topic_id=row.topic_id, partition_id=row.partition_id, is_new=is_new),
        )
        return Replica(member, state, settings=self._settings.partition, space=self._space)

    # -- letting go ------------------------------------------------------------------------------

    async def _settle_moved_away(self, row: PartitionRow, held: Held | None) -> None:
        if held is not None or self._concerns_us(row.group_id):
            members = await self._router.find_members(row)
            if self._node in members.voters or self._node in members.learners:
                raise UnavailableError("the group still counts this node among its members")
            if self._store.view().partitions.get(row.key, row).is_on(self._node):
                return  # it is to come back: whoever changed the row has this group looked at again
            await self._leave(row.group_id, held)
        move = _promoted_move(self._store.view(), row, source=self._node)
        if move is not None:
            await self._submit_finish(move)

    async def _settle_purged(self, group: GroupId, held: Held | None) -> None:
        await self._close(held)
        if group in self._unknown or not self._concerns_us(group):
            return
        found = await self._router.ask_primary(GetMetadata(topics=(), groups=(group,), is_linearizable=True))
        if group in found.purged_groups:
            await self._leave(group, None)
        elif group not in self._keys:
            self._unknown.add(group)
            logger.warning("files of an unknown group are left alone", extra=facts(group=group))

    async def _leave(self, group: GroupId, held: Held | None) -> None:
        await self._close(held)
        await self._run(partial(self._folders.leave, group))
        self._present.discard(group)
        self._joined.discard(group)
        logger.info("replica removed", extra=facts(group=group))

    async def _close(self, held: Held | None) -> None:
        if held is None:
            return
        replica = held.close()
        if replica is not None:
            await replica.close()
            await self._replicator.close_member(held.group)
            logger.info("replica closed", extra=facts(group=held.group))
        self._table.remove(held)

    async def _submit_finish(self, move: MoveRow) -> None:
        try:
            await self._router.submit(FinishMove(now_ms=self._clock.wall_ms(), move_id=move.move_id))
        except QuiverError as error:
            if error.code != "unknown_move":  # else an earlier try has done it
                raise

    async def _run(self, work: Callable[[], None]) -> None:
        try:
            await self._executor.submit(work)
        except OSError as error:
            failure = StorageError(f"the folders of the replicas cannot be used: {error}")
            self._replicator.fail(failure)
            raise failure from error


def _campaign(held: Held, replica: Replica) -> None:
    if held.replica is replica and replica.member.leader is None:
        replica.member.campaign()


def _key_of(move: MoveRow) -> Key:
    return (move.topic_id, move.partition_id)


def _promoted_move(view: View, row: PartitionRow, *, source: NodeId) -> MoveRow | None:
    moves: Sequence[MoveRow] = [view.moves[move_id] for move_id in sorted(view.moves)]
    wanted = (MoveState.PROMOTED, source, row.key)
    return next((move for move in moves if (move.state, move.source, _key_of(move)) == wanted), None)
