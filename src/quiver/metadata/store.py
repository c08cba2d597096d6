"""The replicated metadata as managers use it: submit commands, read views, watch changes.

One store on each node: managers vote, all others learn. On the primary `submit` brings a command through the Raft
log: it is on a majority of disks before it is applied, applied before it is in the primary's database, and in there
before it is acknowledged. Every node answers reads from its own state; a linearizable read asks the primary's group.

Life: `open` loads the database; the driver's member is opened with `machine`; `attach` joins the two;
`run_compaction` runs as a task of the owner; `close`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TypeVar, cast

import msgspec

from quiver.clock import Clock
from quiver.config import MetadataSettings
from quiver.errors import (
    DecodeError,
    NotLeaderError,
    OutcomeUnknownError,
    OutOfRangeError,
    OverloadedError,
    QuiverError,
    StorageError,
    UnavailableError,
)
from quiver.metadata.change_log import ChangeLog, WatchEvent
from quiver.metadata.commands import Command, decode_payload, encode_command
from quiver.metadata.database import Database
from quiver.metadata.database_writer import DatabaseWriter
from quiver.metadata.state import View
from quiver.metadata.state_machine import MetadataStateMachine
from quiver.model import Index, NodeId, Term
from quiver.raft import Configuration, Role
from quiver.record import Batch
from quiver.replication import Member
from quiver.storage import Executor
from quiver.tasks import timeout

R = TypeVar("R")

SUBMITS_MAX = 10_000
"""How many commands may be on their way at once; one more is refused."""


class NotPrimaryError(NotLeaderError):
    """Report that this manager does not take writes now: not done; `leader` does, if it is known."""

    code = "not_primary"


class MetadataStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one manager's metadata."""

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
    failure: str | None


class MetadataStore:
    """One manager's metadata. Made by `open`."""

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
        """What the driver's member is opened with."""
        self.on_role: Callable[[Role, Term, NodeId | None], None] | None = None
        """Called when the manager's role or primary changes."""
        self._writer = writer
        self._change_log = change_log
        self._database = database
        self._executor = executor
        self._clock = clock
        self._settings = settings
        self._member: Member | None = None
        self._compacted_index = Index(0)
        self._submits = 0

    @classmethod
    async def open(
        cls,
        database: Database,
        *,
        executor: Executor,
        clock: Clock,
        on_failure: Callable[[StorageError], None],
        settings: MetadataSettings | None = None,
    ) -> MetadataStore:
        """Make or migrate the tables and load what they hold. `on_failure` must end the node.

        Raises:
            StorageError: the database cannot be used, or a newer program wrote it.
        """
        await executor.submit(database.prepare)
        state = await executor.submit(database.load)
        machine = MetadataStateMachine(state, on_failure=on_failure)
        writer = DatabaseWriter(database, executor, stored=state.position, on_failure=on_failure)
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
        """Take the member that was opened with `machine`; nothing can be submitted before."""
        self._member = member
        self._compacted_index = Index(member.log.first_index - 1)
        member.on_role = self._handle_role

    async def transfer_primary(self, *, timeout_ms: int) -> None:
        """Let the manager that has most of the log be primary, if this one is; a courtesy, so waited for no longer."""
        member = self._require_member()
        status = member.status().raft
        voters = [peer for peer in status.peers if peer.node in status.configuration.voters]
        if not member.is_ready or not voters:
            return
        best = max(voters, key=lambda peer: (peer.match_index, -peer.node))
        with suppress(QuiverError, TimeoutError):
            member.transfer_leadership(best.node)
            async with timeout(timeout_ms / 1000):
                await self.wait_primary(is_primary=False)

    async def close(self) -> None:
        """End watches, let what is applied reach the database, and close it; idempotent. Close the member first."""
        self._change_log.close()
        await self._writer.close()
        await self._executor.submit(self._database.close)

    # -- questions -------------------------------------------------------------------------------

    @property
    def applied_index(self) -> Index:
        """Return up to where the log is applied here."""
        return self.machine.state.position.index

    @property
    def stored_index(self) -> Index:
        """Return up to where the log is in this manager's database."""
        return self._writer.stored.index

    @property
    def primary(self) -> NodeId | None:
        """Return the primary, as far as known here."""
        return None if self._member is None else self._member.leader

    @property
    def is_primary(self) -> bool:
        """Tell whether this manager takes writes."""
        return self._member is not None and self._member.is_ready

    @property
    def is_closed(self) -> bool:
        """Tell whether the store is closed."""
        return self._change_log.is_closed

    @property
    def members(self) -> Configuration:
        """Return who belongs to the metadata's group, as far as known here."""
        return self._require_member().configuration

    async def wait_primary(self, *, is_primary: bool) -> None:
        """Return once this manager is the primary, or, with `is_primary` false, no longer; or the store closes."""
        while self.is_primary is not is_primary and not self.is_closed:
            await self._change_log.wait_next()  # a new primary has applied the first entry of its own term

    def status(self) -> MetadataStatus:
        """Return a snapshot for people and metrics."""
        failure = self.machine.failure or self._writer.failure
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
            failure=None if failure is None else failure.message,
        )

    # -- writes ----------------------------------------------------------------------------------

    async def submit(self, command: Command[R]) -> R:
        """Carry a command out; return its result when a majority and this manager's database have it.

        Raises:
            RequestError: not done; `code` says why, the same on every manager.
            NotPrimaryError: not done; another manager leads.
            OverloadedError: not done; too many commands are on their way.
            OutcomeUnknownError: perhaps done: leadership or the database was lost on the way.
        """
        data = _checked(command)
        if self._submits >= SUBMITS_MAX:
            raise OverloadedError(f"not done: {SUBMITS_MAX} commands are on their way already")
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
            raise OutcomeUnknownError("perhaps done: this manager has stopped, or no longer knows what came of it")
        if outcome.refusal is not None:
            raise outcome.refusal.error()
        await self._writer.wait_stored(index)
        return outcome.result

    def change_members(self, *, voters: tuple[NodeId, ...], learners: tuple[NodeId, ...]) -> None:
        """Begin to move the metadata's group to these members; `members` tells how far it is.

        Raises:
            UnavailableError: not done; this manager is not the primary, another change is pending, or a learner lags.
            RequestError: not done; the target can never be reached in one change from here.
        """
        self._require_member().change_membership(voters=voters, learners=learners)

    async def compact(self, *, entries_min: int) -> bool:
        """Save a snapshot and shorten the log, if at least so many entries were applied since the last one."""
        member = self._require_member()
        if member.applied_index - self._compacted_index < entries_min:
            return False
        self._compacted_index = member.applied_index
        await member.take_snapshot()
        return True

    async def run_compaction(self) -> None:
        """Save a snapshot and shorten the log whenever it has grown enough, until the store closes."""
        entries = self._settings.snapshot_entries
        while not self.is_closed:
            await self.compact(entries_min=entries)
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
        """Return the metadata as it is known here, however old."""
        return self.machine.state.view()

    async def read(self, *, linearizable: bool = False) -> View:
        """Return the metadata: at most some seconds old, or, on the primary, no older than this call.

        Raises:
            NotPrimaryError: a linearizable read must be asked of the primary.
            OverloadedError: too many linearizable reads wait.
            UnavailableError: this node has been without a primary for too long.
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
                raise UnavailableError(f"this node has had no primary for {alone_ms} ms; ask another")
        return self.view()

    def watch(self, after_index: Index) -> AsyncIterator[WatchEvent]:
        """Iterate over what changes after an index; `Index(0)` begins with everything. Ends when the store closes."""
        return self._change_log.watch(after_index)

    async def wait_applied(self, index: Index) -> None:
        """Return once everything up to an index is applied here, or the store closes."""
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
        """Return once this manager's database stands for an index; see `DatabaseWriter.wait_stored`."""
        await self._writer.wait_stored(index)

    def _require_member(self) -> Member:
        if self._member is None:
            raise NotPrimaryError("not done: this manager is starting")
        return self._member

    def _handle_role(self, role: Role, term: Term, leader: NodeId | None) -> None:
        self._change_log.wake()
        if self.on_role is not None:
            self.on_role(role, term, leader)


def _checked(command: Command[R]) -> bytes:
    """Return a command's batch. What members could not read must never get into the log: it would stop them all."""
    try:
        data = encode_command(command)
        decode_payload(memoryview(Batch.decode(data, verify=False).payload())[1:])
    except (DecodeError, UnicodeEncodeError, OverflowError, TypeError) as error:
        raise OutOfRangeError(f"not done: {error}") from None
    return data
