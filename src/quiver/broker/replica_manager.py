"""Opens, closes and removes the replicas of this node, as the metadata requires.

The manager reconciles this node with the metadata, group by group, several groups at a time. It resumes after a crash:
everything that it must remember is on disk and in the metadata.

- **Opening.** A replica with files on this node is opened from them. A new replica first gets its files, then the
  `joined` marker (`GroupFolders`), then a member. The first members of a group are bootstrapped with each other's ids
  only while no leader has ever been reported, according to metadata that is confirmed to be current: until then it
  names the nodes with which the partition was created (`membership` ensures that), and none of them has left. Every
  other replica joins blank and learns the members from the log. If the files are gone although this node has joined,
  they are never recreated, and a node that is registered under another identity opens nothing (R22).
- **Deleted topics.** Their replicas are closed; the files stay until the topic is purged. While one of a partition's
  replicas moves, the partition's replicas are open, because the move is a change of their group. An aborted move may
  leave a node that must know whether the group counts it: whoever it asks opens its replica for a while.
- **Removing.** Never based on this node's own metadata alone (R19): the group's leader must confirm that this node is
  no longer a member, or the primary that the topic was purged. Until then the files stay, and a replica that was moved
  away stays open.
- **Stopping.** A replica whose code an unexpected error escapes is taken out of service (`quiver.faults`): its member
  has handed leadership on and sends nothing more. It is reopened from its files after a pause, which grows each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from quiver.backoff import Backoff
from quiver.broker.membership import find_move
from quiver.broker.new_replicas import NewReplicas
from quiver.broker.replica_table import HostedReplica, PartitionKey, ReplicaState, ReplicaTable
from quiver.clock import Clock, Rng
from quiver.config import Settings
from quiver.errors import DamageError, DiskFullError, OutcomeUnknownError, QuiverError, StorageError, UnavailableError
from quiver.faults import describe_fault
from quiver.logs import facts
from quiver.manager.node_router import NodeRouter
from quiver.metadata import (
    BrokerState,
    Change,
    FinishMove,
    MetadataStore,
    MoveId,
    MoveRow,
    MoveState,
    PartitionRow,
    Table,
    TopicState,
    View,
    WatchEvent,
)
from quiver.model import GroupId, Index, NodeId
from quiver.partition import Meters, PartitionState, Replica
from quiver.raft import Configuration
from quiver.record.decoded import DecodedBatchBudget
from quiver.replication import Member, Replicator
from quiver.storage import DiskSpace, Executor, GroupFolders, Lane, is_out_of_space
from quiver.wire.messages import GetMetadata

logger = logging.getLogger(__name__)

RETRY_MS = 1_000
"""Backoff before a failed reconciliation is retried, plus up to half of it as jitter."""

STOPPED_MS_MAX = 60_000
"""Longest pause before a stopped replica is reopened; the first is `RETRY_MS`. One that ran for longer starts again."""

ASKED_MS = 10_000
"""How long the replica of a deleted topic stays open for a node that asks for its group's members. Such a node asks
again about every `RETRY_MS`, until the group has changed back and no longer counts it."""


class ReplicaManager:
    """Opens, closes and removes this node's replicas."""

    def __init__(
        self,
        node: NodeId,
        *,
        identity: str,
        table: ReplicaTable,
        folders: GroupFolders,
        store: MetadataStore,
        replicator: Replicator,
        router: NodeRouter,
        executor: Executor,
        clock: Clock,
        rng: Rng,
        settings: Settings,
        space: DiskSpace,
        meters: Meters,
        decoded: DecodedBatchBudget,
        on_open: Callable[[HostedReplica, Replica], None],
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
        self._meters = meters
        self._decoded = decoded
        self._on_open = on_open
        self._new_replicas = NewReplicas(folders, replicator, executor)
        self._keys: dict[GroupId, PartitionKey] = {}
        self._groups: dict[PartitionKey, GroupId] = {}
        """The reverse of `_keys`."""
        self._moving: dict[MoveId, GroupId] = {}
        """The groups on this node whose replicas move."""
        self._present: set[GroupId] = set()
        self._joined: set[GroupId] = set()
        self._dirty: dict[GroupId, None] = {}
        """Groups to reconcile, in the order in which they were queued."""
        self._busy: set[GroupId] = set()
        self._work = asyncio.Event()
        self._ready = asyncio.Event()
        self._unknown: set[GroupId] = set()
        self._asked_ms: dict[GroupId, int] = {}
        """When another node last asked for the members of a group of a deleted topic."""
        self._has_begun = False
        self.stops = 0
        """How often an error has stopped a replica since the node started."""

    # -- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Reconcile after changes of the metadata, until the store closes.

        Raises:
            StorageError: the data directory is unusable.
        """
        try:
            await self._executor.submit(self._folders.prepare, Lane.RECOVERY)
            self._present = set(await self._executor.submit(self._folders.present, Lane.RECOVERY))
            self._joined = set(await self._executor.submit(self._folders.joined, Lane.RECOVERY))
        except OSError as error:
            raise StorageError(f"the data directory of the replicas is unusable: {error}") from error
        if not self._present and not self._joined:
            self._ready.set()
        async with asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(self._work_off()) for _ in range(self._settings.broker.openings_max)]
            async for changed in self._store.watch(Index(0)):
                self._handle_changed(changed)
            for worker in workers:
                worker.cancel()

    async def wait_ready(self) -> None:
        """Wait until every replica on this node's disk is open, or known to be unwanted or unusable."""
        await self._ready.wait()

    @property
    def is_ready(self) -> bool:
        """Return whether `wait_ready` would return immediately."""
        return self._ready.is_set()

    def emptied_ms(self) -> int:
        """Return when the drain began after which this node holds nothing, and will hold nothing; 0 if it does.

        The metadata alone does not tell: a group may have carried out a move that was aborted, and count this node.
        """
        view = self._store.view()
        broker = view.brokers.get(self._node)
        if broker is None or broker.state is not BrokerState.DRAINING or not self._is_empty:
            return 0
        return 0 if view.partitions_on(self._node) else broker.changed_ms

    @property
    def _is_empty(self) -> bool:
        """Whether no group can count this node as a member; files of unknown groups stay for operators."""
        is_known = self._present | self._joined <= self._unknown
        return self._has_begun and is_known and not self._busy and not len(self._table)

    def enqueue(self, group: GroupId) -> None:
        """Reconcile a group soon."""
        self._dirty[group] = None
        self._work.set()

    def open_for_question(self, group: GroupId) -> None:
        """Open the replica of a deleted topic for a while: another node asks for the members of its group."""
        view = self._store.view()
        row = view.partitions.get(self._keys[group]) if group in self._joined and group in self._keys else None
        if row is not None and not _is_active(view, row):
            self._asked_ms[group] = self._clock.monotonic_ms()
            self.enqueue(group)

    def handle_fault(self, member: Member, error: Exception) -> None:
        """Stop the replica of a member that an unexpected error has stopped; reopen it from its files later."""
        self.stops += 1
        hosted = self._table.get_group(member.group)
        pause_ms = 0.0
        if hosted is not None and hosted.replica is not None and hosted.replica.member is member:
            now_ms = self._clock.monotonic_ms()
            if now_ms - hosted.opened_ms > STOPPED_MS_MAX:
                hosted.stops = 0
            hosted.replica.abandon()
            hosted.stop(describe_fault(error))
            backoff = Backoff(self._rng, first_ms=2 * RETRY_MS, max_ms=STOPPED_MS_MAX)
            backoff.attempts = hosted.stops - 1
            pause_ms = backoff.next_ms()
            asyncio.get_running_loop().call_later(pause_ms / 1000, self._end_pause, hosted)
        extra = facts(group=member.group, retry_ms=round(pause_ms))
        logger.error("partition stopped, reopened later", exc_info=error, extra=extra)

    def _end_pause(self, hosted: HostedReplica) -> None:
        hosted.is_paused = False
        self.enqueue(hosted.group)

    # -- metadata changes ------------------------------------------------------------------------

    def _handle_changed(self, changed: WatchEvent) -> None:
        self._has_begun = True
        if changed.view is not None:
            self._enqueue_all(changed.view)
        else:
            for change in changed.changes:
                self._enqueue_change(change)

    def _enqueue_all(self, view: View) -> None:
        self._groups = {key: row.group_id for key, row in view.partitions.items()}
        self._keys = {group: key for key, group in self._groups.items()}
        assigned = {row.group_id for row in view.partitions_on(self._node)}
        leaving = {view.partitions[_key_of(move)].group_id for move in view.moves.values() if move.source == self._node}
        moving = [(move.move_id, view.partitions[_key_of(move)].group_id) for move in view.moves.values()]
        self._moving = {move_id: group for move_id, group in moving if group in assigned | leaving}
        for group in sorted(
            assigned | leaving | self._present | self._joined | {hosted.group for hosted in self._table}
        ):
            self.enqueue(group)

    def _enqueue_change(self, change: Change) -> None:
        match change.table:
            case Table.PARTITIONS:
                self._enqueue_partition(change)
            case Table.TOPICS:
                for group, key in list(self._keys.items()):
                    if key[0] == change.key and self._is_local(group):
                        self.enqueue(group)
            case Table.MOVES if isinstance(change.row, MoveRow):
                row = self._store.view().partitions.get(_key_of(change.row))
                if row is not None and (change.row.source == self._node or row.is_on(self._node)):
                    self._moving[change.row.move_id] = row.group_id
                    self.enqueue(row.group_id)
            case Table.MOVES:  # one has ended
                if change.key in self._moving:
                    self.enqueue(self._moving.pop(change.key))
            case _:
                pass

    def _enqueue_partition(self, change: Change) -> None:
        row = change.row
        if isinstance(row, PartitionRow):
            earlier = self._groups.get(row.key)
            if earlier not in (None, row.group_id):  # the partition began again, after a recovery
                del self._keys[earlier]
                self.enqueue(earlier)  # its replica is closed
            self._keys[row.group_id], self._groups[row.key] = row.key, row.group_id
            if row.is_on(self._node) or self._is_local(row.group_id):
                self.enqueue(row.group_id)
            return
        group = self._groups.pop(change.key, None)
        if group is not None:
            del self._keys[group]
            if self._is_local(group):
                self.enqueue(group)

    def _is_local(self, group: GroupId) -> bool:
        return group in self._present or group in self._joined or self._table.get_group(group) is not None

    # -- workers ---------------------------------------------------------------------------------

    async def _work_off(self) -> None:
        """Reconcile queued groups one by one; `_busy` keeps two workers from the same group."""
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
                await self._reconcile(group)
            except StorageError:
                raise
            except (UnavailableError, OutcomeUnknownError) as error:
                logger.debug("replica not reconciled yet", extra=facts(group=group, reason=error.message))
                self._enqueue_later(group)
            except QuiverError as error:  # a peer's refusal: what it refuses now, it may allow later
                logger.warning("replica not reconciled", extra=facts(group=group, error=describe_fault(error)))
                self._enqueue_later(group)
            finally:
                self._busy.discard(group)
                self._work.set()

    def _enqueue_later(self, group: GroupId) -> None:
        delay_s = RETRY_MS / 1000 * (1 + self._rng.random() / 2)
        asyncio.get_running_loop().call_later(delay_s, self.enqueue, group)

    async def _reconcile(self, group: GroupId) -> None:
        """Reconcile one group with the metadata; idempotent, since a crash may have interrupted any earlier attempt."""
        view, hosted = self._store.view(), self._table.get_group(group)
        key = self._keys.get(group)
        row = None if key is None else view.partitions.get(key)
        if row is None or row.group_id != group:
            await self._reconcile_purged(group, hosted)
        elif not row.is_on(self._node):
            await self._reconcile_moved_away(row, hosted)
        elif not self._is_served(view, row):
            await self._close(hosted)  # files stay: the topic can be restored
        elif _is_to_open(hosted):
            self._check_openable(view)
            await self._open(row, hosted, await self._find_first_members(row))

    def _is_served(self, view: View, row: PartitionRow) -> bool:
        """Return whether the replicas of a partition are to be open; if it is only for a while, check again then."""
        if _is_active(view, row) or find_move(view, row.key) is not None:
            self._asked_ms.pop(row.group_id, None)
            return True
        asked_ms = self._asked_ms.get(row.group_id)
        if asked_ms is None:
            return False
        left_ms = asked_ms + ASKED_MS - self._clock.monotonic_ms()
        if left_ms <= 0:
            del self._asked_ms[row.group_id]
            return False
        asyncio.get_running_loop().call_later(left_ms / 1000, self.enqueue, row.group_id)
        return True

    # -- opening ---------------------------------------------------------------------------------

    def _check_openable(self, view: View) -> None:
        """Open nothing while another identity is registered under this node's id: its replicas are not ours (R22).

        Raises:
            UnavailableError: this node is not registered with its identity yet; heartbeats retry that.
            OverloadedError: too much waits to be opened; it is retried.
        """
        self._executor.check_room(Lane.RECOVERY)
        known = view.brokers.get(self._node)
        if known is None or known.identity != self._identity:
            raise UnavailableError(f"node {self._node} is not registered with identity {self._identity!r}")

    async def _find_first_members(self, row: PartitionRow) -> Configuration | None:
        """Return the first members of a new group, this node among them; None for a replica that joins later.

        Uses metadata that is confirmed to be current: with stale metadata, this node may have been a member, and left,
        in the meantime.
        """
        if row.group_id in self._joined or row.epoch or self._node not in row.replicas:
            return None
        now = (await self._router.catch_up()).partitions.get(row.key)
        if now is None or now.group_id != row.group_id or not now.is_on(self._node):
            raise UnavailableError(f"the metadata of group {row.group_id} was stale")
        return Configuration(voters=tuple(sorted(now.replicas))) if not now.epoch else None

    async def _open(self, row: PartitionRow, hosted: HostedReplica | None, first_members: Configuration | None) -> None:
        """Open a replica. Damage is permanent; any other disk failure, such as a full disk, is retried."""
        hosted, known = self._table.add(row.key, row.group_id) if hosted is None else hosted, hosted
        if hosted.halted is not None:
            await hosted.halted.close()
            await hosted.halted.member.close()
            hosted.halted = None
        try:
            replica = await self._open_replica(row, hosted, first_members)
        except DamageError as error:
            hosted.fail_permanently(error.message)
            logger.exception("replica cannot be opened", extra=facts(group=row.group_id, topic_id=row.topic_id))
            return
        except (StorageError, DiskFullError) as error:
            if known is None:
                logger.exception("replica cannot be opened yet", extra=facts(group=row.group_id, topic_id=row.topic_id))
            hosted.fail(error.message)
            self._enqueue_later(row.group_id)
            return
        except Exception as error:  # a defect in the code of this partition; see `quiver.faults`
            logger.exception("partition stopped while it was opened", extra=facts(group=row.group_id))
            self.stops += 1
            hosted.fail(describe_fault(error))
            self._enqueue_later(row.group_id)
            return
        if replica is not None:
            hosted.open(replica)
            hosted.opened_ms = self._clock.monotonic_ms()
            self._on_open(hosted, replica)
            if first_members is not None and row.replicas[0] == self._node:
                replica.member.campaign()  # so that clients need not wait for a timeout

    async def _open_replica(
        self, row: PartitionRow, hosted: HostedReplica, first_members: Configuration | None
    ) -> Replica | None:
        group, directory = row.group_id, self._folders.path(row.group_id)
        topic = self._store.view().topics.get(row.topic_id)
        is_encrypted = topic is not None and topic.is_encrypted
        is_new = group not in self._joined
        if not is_new and group not in self._present:
            hosted.fail_permanently("its files are gone, and with them its votes; move the replica to another node")
            logger.error("replica files are missing", extra=facts(group=group, topic_id=row.topic_id))
            return None
        is_synced = is_new and not is_encrypted and await self._new_replicas.make(group, first_members)
        if is_new and not is_synced:  # an earlier attempt has left some of its files
            await self._replicator.make_member(directory, bootstrap=first_members, is_encrypted=is_encrypted)
            self._present.add(group)
            await self._run(partial(self._folders.join, group))  # durable before the member can vote or acknowledge
        self._present.add(group)
        self._joined.add(group)
        state = PartitionState(level_max=self._store.level_max)
        member = await self._replicator.open_member(
            group,
            directory,
            state,
            is_encrypted=is_encrypted,
            is_synced=is_synced,
            is_patient=first_members is not None and row.replicas[0] != self._node,
        )
        logger.info(
            "replica opened",
            extra=facts(group=group, topic_id=row.topic_id, partition_id=row.partition_id, is_new=is_new),
        )
        meter = self._meters.of(row.topic_id)
        return Replica(
            member,
            state,
            settings=self._settings.partition,
            space=self._space,
            meter=meter,
            feature_level=lambda: self._store.feature_level,
            decoded=self._decoded,
            clock=self._clock,
        )

    # -- removing --------------------------------------------------------------------------------

    async def _reconcile_moved_away(self, row: PartitionRow, hosted: HostedReplica | None) -> None:
        """Remove the replica of a partition that has moved away, once its group does not count it any more.

        It runs until then, also after a restart: if the metadata is wrong, it may be the only one that can lead.
        """
        if row.group_id in self._joined and _is_to_open(hosted):
            self._check_openable(self._store.view())
            await self._open(row, hosted, None)
            hosted = self._table.get_group(row.group_id)
        if hosted is not None or self._is_local(row.group_id):
            members = await self._router.find_members(row, everywhere=not _is_active(self._store.view(), row))
            if self._node in members.voters or self._node in members.learners:
                raise UnavailableError(f"node {self._node} is still a member of group {row.group_id}")
            if self._store.view().partitions.get(row.key, row).is_on(self._node):
                return  # it is to come back: the change of the row has queued this group again
            await self._leave(row.group_id, hosted)
        move = _promoted_move(self._store.view(), row, source=self._node)
        if move is not None:
            await self._submit_finish(move)

    async def _reconcile_purged(self, group: GroupId, hosted: HostedReplica | None) -> None:
        await self._close(hosted)
        if group in self._unknown or not self._is_local(group):
            return
        found = await self._router.ask_primary(GetMetadata(topics=(), groups=(group,), is_linearizable=True))
        if group in found.purged_groups:
            await self._leave(group, None)
        elif group not in self._keys:
            self._unknown.add(group)
            logger.warning("files of an unknown group are kept", extra=facts(group=group))

    async def _leave(self, group: GroupId, hosted: HostedReplica | None) -> None:
        await self._close(hosted)
        await self._run(partial(self._folders.leave, group))
        self._present.discard(group)
        self._joined.discard(group)
        logger.info("replica removed", extra=facts(group=group))

    async def _close(self, hosted: HostedReplica | None) -> None:
        if hosted is None:
            return
        replica = hosted.close()
        if replica is not None:
            await replica.close()
            await self._replicator.close_member(hosted.group)
            await replica.member.close()  # the replicator no longer knows a stopped one
            logger.info("replica closed", extra=facts(group=hosted.group))
        self._table.remove(hosted)

    async def _submit_finish(self, move: MoveRow) -> None:
        try:
            await self._router.submit(FinishMove(now_ms=self._clock.wall_ms(), move_id=move.move_id))
        except QuiverError as error:
            if error.code != "unknown_move":  # otherwise an earlier attempt has ended the move
                raise

    async def _run(self, work: Callable[[], None]) -> None:
        try:
            await self._executor.submit(work, Lane.RECOVERY)
        except OSError as error:
            if is_out_of_space(error):
                raise DiskFullError(f"not done: no room in the data directory of the replicas: {error}") from error
            failure = StorageError(f"the data directory of the replicas is unusable: {error}")
            self._replicator.fail(failure)
            raise failure from error


_RETRIED = (ReplicaState.UNUSABLE, ReplicaState.STOPPED)


def _is_to_open(hosted: HostedReplica | None) -> bool:
    return hosted is None or (hosted.state in _RETRIED and hosted.is_retried and not hosted.is_paused)


def _is_active(view: View, row: PartitionRow) -> bool:
    topic = view.topics.get(row.topic_id)
    return topic is not None and topic.state is TopicState.ACTIVE


def _key_of(move: MoveRow) -> PartitionKey:
    return (move.topic_id, move.partition_id)


def _promoted_move(view: View, row: PartitionRow, *, source: NodeId) -> MoveRow | None:
    moves: Sequence[MoveRow] = [view.moves[move_id] for move_id in sorted(view.moves)]
    wanted = (MoveState.PROMOTED, source, row.key)
    return next((move for move in moves if (move.state, move.source, _key_of(move)) == wanted), None)
