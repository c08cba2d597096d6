"""The replicated metadata: submit commands, read views, watch changes.

Every node has one store; managers are voters of its Raft group, all other nodes learners. On the primary `submit` sends
a command through the Raft log, in this order: on disk on a majority, applied, in the primary's database, acknowledged.
While a database server is unreachable, nothing waits for it: the log is the durable copy.
Every node serves reads from its own state; a linearizable read goes to the primary.

Lifecycle: `open` loads the database; the owner opens the Raft member with `machine` and passes it to `attach`;
`run_compaction` runs as a task of the owner; `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TypeVar, cast

import msgspec

from quiver.clock import Clock, Rng
from quiver.config import MetadataSettings
from quiver.errors import (
    DecodeError,
    DiskFullError,
    NotLeaderError,
    OutcomeUnknownError,
    OutOfRangeError,
    OverloadedError,
    QuiverError,
    StorageError,
    UnavailableError,
)
from quiver.features import LEVEL_MAX, explain_level
from quiver.metadata.apply import check_level
from quiver.metadata.change_log import ChangeLog, WatchEvent
from quiver.metadata.commands import Command, decode_payload, encode_command
from quiver.metadata.database import Database, DatabaseLostError
from quiver.metadata.database_writer import DatabaseWriter
from quiver.metadata.state import LogPosition, MetadataState, View
from quiver.metadata.state_machine import MetadataStateMachine
from quiver.metadata.topic_requests import TopicRequests
from quiver.model import Index, NodeId, Term
from quiver.raft import Configuration, RaftPeerStatus, RaftStatus, Role
from quiver.record import Batch
from quiver.replication import Member
from quiver.security.limits import QuotaTable
from quiver.storage import ROOM_RETRY_S, Executor, Lane
from quiver.tasks import timeout

R = TypeVar("R")

SUBMITS_MAX = 10_000
"""Maximum number of commands in flight; one more is refused as overload."""


class NotPrimaryError(NotLeaderError):
    """Report that this node is not the primary: not done; send the request to `leader`, if it is known."""

    code = "not_primary"


class MetadataStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one node's metadata store."""

    cluster_id: str
    is_primary: bool
    primary: NodeId | None
    commit_index: Index
    applied_index: Index
    stored_index: Index
    database: str
    transactions: int
    pending_rows: int
    submits: int
    malformed_commands: int
    """Commands of the log that were refused because they are malformed, since the start of this process."""
    defects: int
    """Commands of the log that were refused because they made this program fail, since the start of this process."""
    failure: str | None
    outage: str | None
    """Why the database is unreachable, if it is."""
    outage_ms: float
    """How long it has been."""


class MetadataStore:
    """One node's copy of the metadata. Made by `open`."""

    def __init__(
        self,
        machine: MetadataStateMachine,
        writer: DatabaseWriter,
        change_log: ChangeLog,
        *,
        database: Database,
        executor: Executor,
        clock: Clock,
        settings: MetadataSettings,
    ) -> None:
        self.machine = machine
        """The state machine that the Raft member is opened with."""
        self.on_role: Callable[[Role, Term, NodeId | None], None] | None = None
        """Called when this node's Raft role or the primary changes."""
        self._writer = writer
        self._change_log = change_log
        self._database = database
        self._executor = executor
        self._clock = clock
        self._settings = settings
        self._member: Member | None = None
        self._compacted_index = Index(0)
        self._submits = 0
        self._limited_view = machine.state.view()
        self._quota_table = self._limited_view.quota_table
        """The limits in `_limited_view`."""
        self.topic_requests = TopicRequests(machine.state.view())
        """The requests that created topics, for repeats that come after the topic was purged."""
        machine.add_listener(self.topic_requests)

    @classmethod
    async def open(
        cls,
        database: Database,
        *,
        executor: Executor,
        clock: Clock,
        rng: Rng,
        on_failure: Callable[[StorageError], None],
        has_log: bool = False,
        settings: MetadataSettings | None = None,
        level_max: int = LEVEL_MAX,
    ) -> MetadataStore:
        """Create or migrate the tables and load the state. `on_failure` must stop the node.

        With `has_log`, a node whose database server is unreachable starts with an empty state: its log, the durable
        copy, is replayed, and the database is written when it is back. Without a log, a wrong URL is more likely.

        Raises:
            StorageError: the database cannot be used, or a newer program wrote it.
            DatabaseLostError: the database server is unreachable, and this node has no log.
        """
        stored: LogPosition | None = None
        try:
            await executor.submit(database.prepare, Lane.SQL)
            state = await executor.submit(database.load, Lane.SQL)
            stored = state.position
        except DatabaseLostError:
            if not has_log:
                raise
            state = MetadataState()
        if state.counters.feature_level > level_max:
            raise StorageError(explain_level(state.counters.feature_level, level_max=level_max), code="unknown_version")
        machine = MetadataStateMachine(state, on_failure=on_failure, level_max=level_max)
        writer = DatabaseWriter(
            database,
            executor,
            stored=stored,
            view=lambda: machine.state.view(),  # noqa: PLW0108 - a restored snapshot replaces the state
            clock=clock,
            rng=rng,
            on_failure=on_failure,
        )
        change_log = ChangeLog(machine)
        machine.add_listener(writer)
        machine.add_listener(change_log)
        machine.on_skipped = change_log.wake
        return cls(
            machine,
            writer,
            change_log,
            database=database,
            executor=executor,
            clock=clock,
            settings=settings or MetadataSettings(),
        )

    def attach(self, member: Member) -> None:
        """Attach the member that was opened with `machine`; before that nothing can be submitted."""
        self._member = member
        self._compacted_index = Index(member.log.first_index - 1)
        member.on_role = self._handle_role

    async def transfer_primary(self, *, timeout_ms: int) -> None:
        """Transfer leadership to the most up-to-date voter, if this node is the primary; best effort."""
        member = self._require_member()
        status = member.status().raft
        voters = self._able_voters(status)
        if not member.is_ready or not voters:
            return
        best = max(voters, key=lambda peer: (peer.match_index, peer.heard_ms))
        with suppress(QuiverError, TimeoutError):
            member.transfer_leadership(best.node)
            async with timeout(timeout_ms / 1000):
                await self.wait_primary(is_primary=False)

    def make_way(self) -> NodeId | None:
        """Begin to transfer leadership to the most up-to-date voter whose disk has room; return it.

        For a primary whose disk is full. Without such a voter, or if it does not lead, nothing is done.
        """
        member = self._require_member()
        status = member.raft_status()
        roomy = [peer for peer in self._able_voters(status) if not peer.is_low]
        if not member.is_ready or not roomy or status.transfer_to is not None:
            return None
        # Of those with the same log the one heard last: a dead one would only block proposals until it timed out.
        best = max(roomy, key=lambda peer: (peer.match_index, peer.heard_ms)).node
        with suppress(QuiverError):
            member.transfer_leadership(best)
            return best
        return None

    def _able_voters(self, status: RaftStatus) -> list[RaftPeerStatus]:
        """Return the other voters without those that failed to take over leadership a moment ago."""
        now_ms, voters = self._clock.monotonic_ms(), status.configuration.voters
        return [peer for peer in status.peers if peer.node in voters and peer.no_transfer_before_ms <= now_ms]

    async def close(self) -> None:
        """End all watches, write applied changes to the database, and close it; idempotent. Close the member first."""
        self._change_log.close()
        await self._writer.close()
        await self._executor.submit(self._database.close, Lane.SQL)

    # -- status -------------------------------------------------------------------------------

    @property
    def applied_index(self) -> Index:
        """Return the index up to which the log is applied on this node."""
        return self.machine.state.position.index

    @property
    def feature_level(self) -> int:
        """Return the cluster's feature level, as this node knows it."""
        return self.machine.state.counters.feature_level

    @property
    def level_max(self) -> int:
        """Return the highest feature level that this program knows."""
        return self.machine.level_max

    @property
    def stored_index(self) -> Index:
        """Return the index up to which the log is in this node's database."""
        return self._writer.stored.index

    @property
    def primary(self) -> NodeId | None:
        """Return the primary, as far as this node knows."""
        return None if self._member is None else self._member.leader

    @property
    def is_primary(self) -> bool:
        """Return whether this node is the primary and accepts writes."""
        return self._member is not None and self._member.is_ready

    @property
    def is_closed(self) -> bool:
        """Return whether the store is closed."""
        return self._change_log.is_closed

    @property
    def is_attached(self) -> bool:
        """Return whether the member is attached."""
        return self._member is not None

    @property
    def members(self) -> Configuration:
        """Return the members of the metadata group, as far as this node knows."""
        return self._require_member().configuration

    @property
    def committed_members(self) -> Configuration:
        """Return the latest members of the metadata group that this node knows to be committed."""
        return self._require_member().committed_configuration

    def silence_ms(self, node: NodeId) -> int:
        """Return how long ago the primary, which this node is, last heard from a member."""
        return self._require_member().silence_ms(node)

    async def wait_voter(self, node: NodeId, *, is_voter: bool) -> None:
        """Return once a node is a voter in a committed configuration that is final, or is not.

        Raises:
            OutcomeUnknownError: this node stopped to be the primary first; the change may be made.
        """
        while True:
            members = self.committed_members
            if not members.is_joint and (node in members.voters) is is_voter:
                return
            if not self.is_primary or self.is_closed:
                raise OutcomeUnknownError("may have been done: this node stopped to be the primary; list the managers")
            await self._change_log.wait_next()

    async def wait_level(self, level: int) -> None:
        """Return once the cluster's feature level is at least `level`, or the store closes."""
        while self.feature_level < level and not self.is_closed:
            await self._change_log.wait_next()

    async def wait_primary(self, *, is_primary: bool) -> None:
        """Return once this node is the primary, or no longer with `is_primary=False`; or the store closes."""
        while self.is_primary is not is_primary and not self.is_closed:
            await self._change_log.wait_next()  # a new primary has applied the first entry of its own term

    def status(self) -> MetadataStatus:
        """Return a snapshot for people and metrics."""
        failure, outage = self.machine.failure or self._writer.failure, self._writer.outage
        return MetadataStatus(
            cluster_id=self.machine.state.counters.cluster_id,
            is_primary=self.is_primary,
            primary=self.primary,
            commit_index=Index(0) if self._member is None else self._member.commit_index,
            applied_index=self.applied_index,
            stored_index=self.stored_index,
            database=self._database.name,
            transactions=self._writer.transactions,
            pending_rows=self._writer.pending_rows,
            submits=self._submits,
            malformed_commands=self.machine.bad_commands - self.machine.defects,
            defects=self.machine.defects,
            failure=(self._member.needs_upgrade or None if self._member is not None else None)
            if failure is None
            else failure.message,
            outage=None if outage is None else outage.reason,
            outage_ms=0 if outage is None else self._clock.monotonic_ms() - outage.since_ms,
        )

    # -- writes ----------------------------------------------------------------------------------

    async def submit(self, command: Command[R]) -> R:
        """Apply a command; return its result once a majority and this node's database, if reachable, have it.

        Raises:
            RequestError: not done; `code` says why, the same on every manager.
            NotPrimaryError: not done; this node is not the primary.
            OverloadedError: not done; too many commands are in flight.
            OutcomeUnknownError: the outcome is unknown; leadership or the database was lost before the result.
        """
        refusal = check_level(self.machine.state, command)
        if refusal is not None:
            raise refusal.error()  # before it is in the log, where it would stop the nodes that cannot read it
        data = _checked(command)
        if self._submits >= SUBMITS_MAX:
            raise OverloadedError(f"not done: {SUBMITS_MAX} metadata commands are in flight, the maximum; retry later")
        self._submits += 1
        self.machine.keeps_outcomes = True
        try:
            return cast("R", await self._submit(data))
        finally:
            self._submits -= 1
            if not self._submits:
                self.machine.keeps_outcomes = False
                self.machine.forget_outcomes()

    async def _submit(self, data: bytes) -> object:
        member = self._require_member()
        try:
            headers = await member.propose([data])
        except OverloadedError:
            raise
        except UnavailableError as error:
            raise NotPrimaryError(error.message, leader=member.leader) from error
        index = headers[0].index
        outcome = self.machine.pop_outcome(index)
        if outcome is None:
            raise OutcomeUnknownError("may have been done: this node stopped or lost the result of the command")
        if outcome.refusal is not None:
            raise outcome.refusal.error()
        await self._writer.wait_stored(index)
        return outcome.result

    def change_members(self, *, voters: tuple[NodeId, ...], learners: tuple[NodeId, ...]) -> None:
        """Start to change the metadata group to these members; `members` shows the progress.

        Raises:
            UnavailableError: not done; this node is not the primary, another change is pending, or a learner lags.
            RequestError: not done; one change cannot lead from the current members to these.
            OutcomeUnknownError: an unexpected error stopped this member; the change may have begun.
        """
        self._require_member().change_membership(voters=voters, learners=learners)

    async def compact(self, *, entries_min: int) -> bool:
        """Save a snapshot and compact the log if at least `entries_min` entries were applied since the last one.

        Raises:
            DiskFullError: not done; there is no room for the snapshot.
        """
        member = self._require_member()
        if member.applied_index - self._compacted_index < entries_min:
            return False
        compacted_index, self._compacted_index = self._compacted_index, member.applied_index
        try:
            await member.take_snapshot()
        except DiskFullError:
            self._compacted_index = compacted_index
            raise
        return True

    async def run_compaction(self) -> None:
        """Compact the log each time it has grown by `snapshot_entries`, until the store closes."""
        entries = self._settings.snapshot_entries
        while not self.is_closed:
            try:
                await self.compact(entries_min=entries)
            except DiskFullError:  # the log goes on; it is compacted once there is room
                await asyncio.sleep(ROOM_RETRY_S)
                continue
            await self._wait_replayed(Index(self._compacted_index + entries))

    async def _wait_replayed(self, index: Index) -> None:
        """Return once the member has applied everything up to an index, or the store closes.

        The state's own index is no substitute: after a restart the state comes from the database, and is ahead of a
        member that still replays its log.
        """
        member = self._require_member()
        while member.applied_index < index and not self.is_closed:
            await self._change_log.wait_next()

    # -- reads -----------------------------------------------------------------------------------

    def view(self) -> View:
        """Return the metadata as this node knows it, however stale."""
        state = self.machine.state
        return state.shown or state.view()

    def quota_table(self) -> QuotaTable:
        """Return the limits of principals and topics: the same object until quotas or memberships change."""
        shown = self.machine.state.shown
        if shown is None or shown is not self._limited_view:  # asked for each request
            self._limited_view = shown = self.view()
            self._quota_table = shown.quota_table
        return self._quota_table

    async def read(self, *, linearizable: bool = False) -> View:
        """Return the metadata: at most `staleness_ms_max` old, or linearizable, on the primary only.

        Raises:
            NotPrimaryError: only the primary serves linearizable reads.
            OverloadedError: too many linearizable reads are waiting.
            UnavailableError: this node has had no primary for longer than `staleness_ms_max`.
        """
        member = self._require_member()
        if linearizable:
            try:
                await member.read_barrier()
            except OverloadedError:
                raise
            except UnavailableError as error:
                raise NotPrimaryError(error.message, leader=member.leader) from error
        else:
            alone_ms = member.leader_silence_ms()
            if alone_ms > self._settings.staleness_ms_max:
                raise UnavailableError(f"this node has had no primary for {alone_ms} ms; ask another node")
        return self.view()

    def watch(self, after_index: Index) -> AsyncIterator[WatchEvent]:
        """Iterate over the changes after an index; `Index(0)` starts with a full view. Ends when the store closes."""
        return self._change_log.watch(after_index)

    async def wait_applied(self, index: Index) -> None:
        """Return once everything up to an index is applied on this node, or the store closes."""
        await self._change_log.wait_newer(Index(index - 1))

    async def wait_known(self, index: Index, timeout_ms: float) -> None:
        """Return once everything up to an index is applied here.

        Raises:
            UnavailableError: not done; this node has not caught up within the timeout (`behind`).
        """
        try:
            async with timeout(timeout_ms / 1000):
                await self.wait_applied(index)
        except TimeoutError:
            message = f"not done: this node has applied the metadata up to index {self.applied_index}, not yet {index}"
            raise UnavailableError(message, code="behind") from None

    async def wait_stored(self, index: Index) -> None:
        """Return once this node's database has an index; see `DatabaseWriter.wait_stored`."""
        await self._writer.wait_stored(index)

    def _require_member(self) -> Member:
        if self._member is None:
            raise NotPrimaryError("not done: this node is starting; retry")
        return self._member

    def _handle_role(self, role: Role, term: Term, leader: NodeId | None) -> None:
        self._change_log.wake()
        if self.on_role is not None:
            self.on_role(role, term, leader)


def _checked(command: Command[R]) -> bytes:
    """Return a command's batch. A command that cannot be decoded must never be logged: it would stop every member."""
    try:
        data = encode_command(command)
        decode_payload(memoryview(Batch.decode(data, verify=False).payload())[1:])
    except (DecodeError, UnicodeEncodeError, OverflowError, TypeError) as error:
        raise OutOfRangeError(f"not done: {error}") from None
    return data
