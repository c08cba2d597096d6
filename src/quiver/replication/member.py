"""One member of one Raft group: the core's outputs carried out over the log and the network.

Everything runs in one event loop. An event (message, tick, proposal, "durable") goes into the core, and its
output is carried out at once, in the order that `raft.Output` demands. Only two things are waited for: a
hard state to be saved and a snapshot to be restored; outputs that come meanwhile queue behind them.

Proposals that arrive in one turn of the loop share one append, one message per follower and one flush.
Batches go to disk and to followers as the bytes they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from quiver.clock import Clock, Rng
from quiver.config import ReplicationSettings
from quiver.errors import DamageError, NotLeaderError, OverloadedError, QuiverError, StorageError, UnavailableError
from quiver.model import Buffer, GroupId, Index, NodeId, Offset, Term
from quiver.raft import (
    Append,
    InstallSnapshot,
    Message,
    Output,
    Raft,
    Role,
    Safeguard,
    SendEntries,
    SendSnapshot,
)
from quiver.raft import Snapshot as SnapshotMark
from quiver.record import Batch, BatchHeader
from quiver.replication.applier import Applier
from quiver.replication.backlog import Backlog, Step
from quiver.replication.codec import AppendHead, Item, Received
from quiver.replication.entries import decode_entry, encode_own_entry
from quiver.replication.host import Host
from quiver.replication.log_compactor import LogCompactor, MakeState
from quiver.replication.machine import StateMachine
from quiver.replication.opening import MemberFiles, decode_snapshot_state, make_raft_config
from quiver.replication.pending_proposals import PendingProposals, Proposal
from quiver.replication.persistence import Persistence, as_storage_error
from quiver.replication.status import MemberStatus
from quiver.storage import Executor, Log, Snapshot

NOTHING_WRITTEN = (Index(0), Term(0))
"""Stands for what was on disk before this life: no report about it is ever waited for."""


class Member:
    """One member of one group. Made by `Replicator.open_member`."""

    def __init__(
        self,
        group: GroupId,
        files: MemberFiles,
        machine: StateMachine,
        *,
        host: Host,
        executor: Executor,
        clock: Clock,
        rng: Rng,
        settings: ReplicationSettings,
        disabled: frozenset[Safeguard] = frozenset(),
    ) -> None:
        self.group = group
        self.next_deadline_ms: int | None = None
        self.on_role: Callable[[Role, Term, NodeId | None], None] | None = None
        """Called when the member's role or leader changes."""
        self._host = host
        self._executor = executor
        self._clock = clock
        self._settings = settings
        self._log = files.log
        self._persistence = Persistence(files)
        self._committed_before = files.initial.commit
        self._applier = Applier(
            machine,
            self._log,
            host=host,
            applied_index=files.applied_index,
            on_applied=self._handle_applied,
            on_unreadable=self.handle_failure,
        )
        self._waiters = PendingProposals()
        self._proposals: list[Proposal] = []
        self._contexts = 0
        self._backlog = Backlog()
        self._is_blocked = False
        self._unblocked: asyncio.Future[None] | None = None
        self._is_closed = False
        self._damage: StorageError | None = None
        self._write_terms: list[tuple[Index, Term]] = [NOTHING_WRITTEN]
        self._applier.restore(files.machine_state, files.applied_index)
        self._raft = Raft(make_raft_config(host.id, settings, disabled), files.initial, rng=rng, now_ms=self._now_ms())
        self._shortener = LogCompactor(
            raft=self._raft, log=self._log, applier=self._applier, persistence=self._persistence, run=self._run
        )
        self.next_deadline_ms = self._raft.next_deadline_ms
        self._log.on_durable = self._handle_durable
        self._log.on_failure = self.handle_failure
        self._apply()

    # -- questions -------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        """Tell whether this member leads and knows everything that is committed."""
        return self._raft.is_ready

    @property
    def leader(self) -> NodeId | None:
        """Return the leader of the group, as far as known."""
        return self._raft.leader

    @property
    def commit_index(self) -> Index:
        """Return up to where entries are committed, as far as known here."""
        return self._raft.commit_index

    @property
    def applied_index(self) -> Index:
        """Return up to where the state machine has been told."""
        return self._applier.index

    @property
    def raft(self) -> Raft:
        """Return the core, for those who watch it; they must not feed it."""
        return self._raft

    @property
    def log(self) -> Log:
        """Return the log, for those who read it; they must not change it, nor read what is not applied."""
        return self._log

    def status(self) -> MemberStatus:
        """Return a snapshot for people and metrics."""
        return MemberStatus(
            group=self.group,
            raft=self._raft.status(),
            log=self._log.status(),
            applied_index=self._applier.index,
            waiting=len(self._waiters),
        )

    def has_member(self, node: NodeId) -> bool:
        """Tell whether a node belongs to the group."""
        return self._raft.configuration.includes(node)

    # -- calls -----------------------------------------------------------------------------------

    async def propose(self, batches: Sequence[Buffer]) -> list[BatchHeader]:
        """Append unstamped batches; return their stamped headers when they are committed and applied.

        Takes the buffers over: writable ones are stamped in place. All of them are appended, or none.

        Raises:
            NotLeaderError: not done; another member leads, see its `leader`.
            UnavailableError: not done; this member is closing or handing over.
            OverloadedError: not done; too much is uncommitted.
            OutcomeUnknownError: leadership was lost on the way; another leader decides.
        """
        return await self.propose_nowait(batches)

    def propose_nowait(
        self, batches: Sequence[Buffer], *, term: Term | None = None
    ) -> asyncio.Future[list[BatchHeader]]:
        """Begin what `propose` waits for; with `term` refuse unless the batches are appended in that very term.

        Everything that is refused has nothing behind it that is not: proposals of one turn share their fate.

        Raises:
            NotLeaderError: not done; another member leads, see its `leader`.
            UnavailableError: not done; this member is closing or handing over.
        """
        if self._is_closed or not self._raft.is_leader:
            raise self._not_leader()
        done: asyncio.Future[list[BatchHeader]] = asyncio.get_running_loop().create_future()
        self._proposals.append(Proposal(list(batches), done, term))
        if len(self._proposals) == 1:
            asyncio.get_running_loop().call_soon(self._propose_queued)
        return done

    async def read_barrier(self) -> Index:
        """Return once everything committed before this call is applied here: what is read then is current.

        Raises:
            NotLeaderError: this member does not lead, or lost leadership meanwhile; see its `leader`.
            OverloadedError: too many reads wait.
        """
        if self._is_closed or not self._raft.is_leader:
            raise self._not_leader()
        done: asyncio.Future[Index] = asyncio.get_running_loop().create_future()
        self._contexts += 1
        self._waiters.add_read(self._contexts, done)
        try:
            self._carry_out(self._raft.read(self._contexts, self._now_ms()))
        except QuiverError:
            self._waiters.forget_read(self._contexts)
            raise
        return await done

    def transfer_leadership(self, to: NodeId) -> None:
        """Begin to hand leadership to another voter; `on_role` tells when it has happened.

        Raises:
            UnavailableError: not done; this member does not lead, or cannot hand over now.
            RequestError: not done; the target is not another voter.
        """
        self._carry_out(self._raft.transfer_leadership(to, self._now_ms()))

    def campaign(self) -> None:
        """Stand for election now, unless a leader is known: for the preferred replica of a new group. Only a hint."""
        self._carry_out(self._raft.campaign(self._now_ms()))

    def change_membership(self, *, voters: tuple[NodeId, ...], learners: tuple[NodeId, ...] = ()) -> None:
        """Begin to move the group to these members; `status().raft.configuration` tells how far it is.

        Raises:
            UnavailableError: not done; this member does not lead, or another change is pending, or a learner lags.
            RequestError: not done; the target can never be reached in one change from here.
        """
        self._carry_out(self._raft.change_membership(voters=voters, learners=learners, now_ms=self._now_ms()))

    async def take_snapshot(self) -> None:
        """Save the state machine's state, and let the log forget what the snapshot before this one covers.

        Raises:
            StorageError: the disk failed; the node stops.
        """
        await self._shortener.take_snapshot()

    async def checkpoint(self) -> None:
        """Save the state machine's state, the log staying as it is, so that less is replayed; raises as `trim` does."""
        await self._shortener.checkpoint()

    async def trim(self, first_index: Index, make_state: MakeState) -> bool:
        """Let the log forget whole segments below `first_index`, an applied entry; return whether it has.

        See `shortening`. `make_state` gives the state of someone who knows nothing of what was before: whoever is sent
        the log from its new start on gets that first, so an entry behind it must replace the whole state.

        Raises:
            StorageError: the disk failed; the node stops.
        """
        return await self._shortener.trim(first_index, make_state)

    def abandon(self) -> None:
        """Stop taking part at once and answer everybody who waits; the files are left as they are."""
        self._is_closed = True
        self.next_deadline_ms = None
        for proposal in self._proposals:
            proposal.refuse(UnavailableError("not done: this member is closing; ask another"))
        self._proposals.clear()
        self._waiters.abandon()

    async def close(self) -> None:
        """Stop taking part, answer everybody who waits, and close the files; idempotent."""
        if not self._is_closed:
            self.abandon()
            if self._is_blocked:  # a save or a restoration is under way on these very files
                self._unblocked = asyncio.get_running_loop().create_future()
                await self._unblocked
            await self._log.close()
            self._persistence.close()

    # -- events ----------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Let time pass."""
        self._carry_out(self._raft.tick(now_ms))

    def wake(self) -> None:
        """Start the timers of a sleeping group: a node of it stopped answering or is new."""
        self._carry_out(self._raft.wake(self._now_ms()))

    def peer_lost(self, node: NodeId) -> None:
        """Take note that the connection to a node broke: what was under way may be lost, and it may be dead."""
        self._carry_out(self._raft.peer_unreachable(node))
        self._carry_out(self._raft.suspect(node, self._now_ms()))

    def receive(self, from_: NodeId, received: Received) -> None:
        """Take a message from another member.

        Raises:
            DecodeError: the bytes that came with it are not what they should be; nothing was done.
        """
        message, snapshot = received.as_message()
        output = self._raft.receive(from_, message, self._now_ms())
        kept = len(output.append)
        self._carry_out(output, received.batches[len(received.batches) - kept :] if kept else (), snapshot)

    def _propose_queued(self) -> None:
        queued, self._proposals = self._proposals, []
        proposals = [proposal for proposal in queued if proposal.term in (None, self._raft.term)]
        if len(proposals) < len(queued):
            for proposal in queued:
                if proposal not in proposals:
                    proposal.refuse(self._not_leader())
        if not proposals:
            return
        try:
            self._log.check_room(sum(proposal.size_bytes for proposal in proposals))
            term, index = self._raft.next_slot()
            batches = self._stamp(proposals, term, index)
            output = self._raft.propose([decode_entry(batch) for batch in batches], self._now_ms())
        except OverloadedError as error:
            for proposal in proposals:
                proposal.refuse(error)
        except QuiverError:
            for proposal in proposals:
                proposal.refuse(self._not_leader())
        else:
            for proposal in proposals:
                self._waiters.add_proposal(proposal)
            self._carry_out(output, batches)

    def _stamp(self, proposals: Sequence[Proposal], term: Term, index: Index) -> list[Batch]:
        now_ms, offset = self._clock.wall_ms(), self._planned_end_offset()
        stamped: list[Batch] = []
        for proposal in proposals:
            for data in proposal.batches:
                batch = Batch.stamped(data, term=term, index=index, base_offset=offset, append_timestamp=now_ms)
                index, offset = Index(index + 1), batch.header.end_offset
                proposal.headers.append(batch.header)
                stamped.append(batch)
            proposal.end_index = index
        return stamped

    def _planned_end_offset(self) -> Offset:
        """Return where the log's records will end when everything that waits behind a save has been carried out."""
        planned = self._backlog.end_offset() if self._is_blocked else None
        return self._log.end_offset if planned is None else planned

    def _handle_durable(self, durable_end: Index) -> None:
        """Tell the core what is durable, with the term in which that was written (R7)."""
        if self._is_closed:  # the log writes on for a while when its member has been abandoned
            return
        terms = self._write_terms
        while len(terms) > 1 and terms[1][0] < durable_end:
            terms.pop(0)
        self._carry_out(self._raft.durable(Index(durable_end - 1), terms[0][1]))
        self._apply()

    # -- carrying out ----------------------------------------------------------------------------

    def _carry_out(self, output: Output, batches: Sequence[Batch] = (), snapshot: Snapshot | None = None) -> None:
        if self._is_closed:
            return
        if output.proposals_lost is not None:
            # At once: the entries that replace the lost ones may be applied before this output is carried out.
            self._waiters.lose(output.proposals_lost)
        if output.restore is not None:
            self._committed_before = output.restore.last_index  # the core counts everything up to there as applied
        if output.next_deadline_ms != self.next_deadline_ms:
            self.next_deadline_ms = output.next_deadline_ms
            self._host.deadline_changed(self)
        step = Step(output, batches, snapshot)
        if self._is_blocked:
            self._backlog.add(step)
        else:
            self._begin(step)

    def _begin(self, step: Step) -> None:
        """Steps 1 to 5 of the contract."""
        self._backlog.under_way = step
        output = step.output
        if output.hard_state is not None:
            self._persistence.set_vote(output.hard_state.term, output.hard_state.vote)
        changes = [entry for entry in output.append if entry.configuration is not None]
        if changes:
            # A configuration is saved before its entry can reach the log: see `opening`.
            first_index = changes[0].index if output.truncate_from is None else output.truncate_from
            settled_index = self._raft.applicable_index
            self._persistence.add_configurations(changes, first_index=first_index, settled_index=settled_index)
            self._block(self._plan_save(), partial(self._write, step))
        elif output.restore is not None:
            assert step.snapshot is not None, "the core restores what was just received"
            self._is_blocked = True
            self._host.spawn(self._restore(step, step.snapshot))
        else:
            self._write(step)

    def _write(self, step: Step) -> None:
        output = step.output
        if output.truncate_from is not None:
            try:
                self._log.truncate_suffix(output.truncate_from)
            except StorageError as error:
                self.handle_failure(error)
                return
            kept = [item for item in self._write_terms if item[0] < output.truncate_from]
            self._write_terms = kept or [NOTHING_WRITTEN]
        if output.append:
            self._append(step)
        for outgoing in output.messages:
            self._post(outgoing.to, outgoing.message)
        if output.hard_state is not None:
            self._block(self._plan_save(), partial(self._finish, step))
        else:
            self._finish(step)

    def _append(self, step: Step) -> None:
        output = step.output
        first_index = output.append[0].index
        if self._write_terms[-1][1] != output.term:
            self._write_terms.append((first_index, output.term))
        batches = list(step.batches)
        own = output.append[len(batches) :]  # what the core added itself comes last
        if own:
            timestamp = self._clock.wall_ms()
            offset = batches[-1].header.end_offset if batches else self._log.end_offset
            batches += [encode_own_entry(entry, base_offset=offset, timestamp=timestamp) for entry in own]
        self._log.append(batches)

    def _finish(self, step: Step) -> None:
        """Steps 6 and 7 of the contract."""
        output = step.output
        for outgoing in output.messages_after_save:
            self._post(outgoing.to, outgoing.message)
        for permission in output.send:
            self._send_entries(permission)
        for snapshot in output.send_snapshot:
            self._host.spawn(self._send_snapshot(snapshot))
        for context in output.reads_failed:
            self._waiters.fail_read(context, leader=self._raft.leader)
        for ready in output.reads:
            self._waiters.confirm_read(ready.context, ready.index)
        if output.recovered:
            self._persistence.clear_recovery()
            self._block(self._plan_save(), lambda: None)
        if output.became is not None and self.on_role is not None:
            self.on_role(output.became.role, output.became.term, output.became.leader)
        if output.committed or output.reads:
            self._apply()

    def _block(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Let `work` be done on disk before `then` and before anything that comes later."""
        self._is_blocked = True
        self._executor.submit(work).add_done_callback(partial(self._unblock, then))

    def _unblock(self, then: Callable[[], None], finished: asyncio.Future[None]) -> None:
        error = finished.exception()
        if error is not None:
            self._fail(as_storage_error(error))
        else:
            self._go_on(then)

    def _go_on(self, then: Callable[[], None]) -> None:
        if self._is_closed:  # what was to come next is neither written nor sent any more
            self._let_close()
            return
        self._is_blocked = False
        if self._damage is not None:
            self._stop_at_damage(self._damage)
            return
        then()
        while self._backlog and not self._is_blocked:
            self._begin(self._backlog.take())

    # -- failing ---------------------------------------------------------------------------------

    def handle_failure(self, error: StorageError) -> None:
        """Stop the node; if it is for damage, on disk by then: a note to look at every byte when it is opened (R18)."""
        if not isinstance(error, DamageError) and not isinstance(error.__cause__, DamageError):
            self._host.fail(error)
        elif self._damage is None:
            self._damage = error
            self._persistence.suspect()
            if not self._is_blocked:
                self._stop_at_damage(error)

    def _stop_at_damage(self, error: StorageError) -> None:
        self._is_blocked = True  # for good: nothing is carried out any more
        saved = self._executor.submit(self._plan_save())
        saved.add_done_callback(lambda _: self._fail(error))

    def _fail(self, error: StorageError) -> None:
        self._host.fail(error)
        self._let_close()

    def _let_close(self) -> None:
        if self._unblocked is not None and not self._unblocked.done():
            self._unblocked.set_result(None)

    # -- sending ---------------------------------------------------------------------------------

    def _post(self, to: NodeId, message: Message) -> None:
        assert not isinstance(message, Append | InstallSnapshot), "those are sent with their payload"
        self._host.post(to, Item(self.group, plain=message))

    def _send_entries(self, permission: SendEntries) -> None:
        found = self._log.read_entries_nowait(
            permission.first_index, end_index=permission.end_index, bytes_max=permission.bytes_max
        )
        if found is None:
            self._host.spawn(self._send_from_disk(permission))
        else:
            self._send_append(permission, found)

    async def _send_from_disk(self, permission: SendEntries) -> None:
        try:
            found = await self._log.read_entries(
                permission.first_index, end_index=permission.end_index, bytes_max=permission.bytes_max
            )
        except DamageError as error:
            self.handle_failure(error)  # else the member that needs these entries would wait for ever
            return
        except StorageError:
            found = []  # removed by compaction, or unreadable for now: the core sees that nothing was sent
        if permission.to in self._raft.configuration.learners:
            await self._host.pace.wait_turn(sum(len(batch.data) for batch in found))
        self._send_append(permission, found)

    def _send_append(self, permission: SendEntries, batches: list[Batch]) -> None:
        size_bytes = sum(len(batch.data) for batch in batches)
        is_complete = bool(batches) or permission.first_index == permission.end_index  # none were asked for: a probe
        if is_complete and self._raft.term == permission.term:
            head = AppendHead(
                permission.term, permission.prev_index, permission.prev_term, permission.commit, permission.round
            )
            payloads = [batch.data for batch in batches]
            self._host.post(permission.to, Item(self.group, size_bytes, append=head), payloads)
        end_index = Index(permission.first_index + len(batches))
        self._carry_out(
            self._raft.sent(permission.to, ticket=permission.ticket, end_index=end_index, size_bytes=size_bytes)
        )

    # -- snapshots -------------------------------------------------------------------------------

    async def _send_snapshot(self, permission: SendSnapshot) -> None:
        snapshot = await self._run(partial(self._persistence.load_snapshot, permission.needed_index))
        if snapshot is None or self._raft.term != permission.term:  # nobody speaks in a term that it has left
            self._carry_out(self._raft.snapshot_failed(permission.to, ticket=permission.ticket))
            return
        configuration = decode_snapshot_state(snapshot.state).configuration
        mark = SnapshotMark(snapshot.last_index, snapshot.last_term, configuration)
        message = InstallSnapshot(permission.term, mark, permission.round)
        payload = snapshot.encode()
        self._host.post(permission.to, Item(self.group, len(payload), plain=message), [payload])
        self._carry_out(self._raft.snapshot_sent(permission.to, ticket=permission.ticket))

    async def _restore(self, step: Step, snapshot: Snapshot) -> None:
        """Replace log and state by a snapshot. The file comes first: a crash behind it is finished by `opening`."""
        state = decode_snapshot_state(snapshot.state)
        self._persistence.stand_on(snapshot.last_index, snapshot.last_term, state.configuration)
        await self._run(partial(self._persistence.save_snapshot, snapshot))
        await self._run(self._plan_save())
        try:
            await self._log.reset(
                first_index=Index(snapshot.last_index + 1),
                first_offset=snapshot.end_offset,
                previous_term=snapshot.last_term,
            )
        except StorageError as error:
            self._fail(error)
            raise
        self._applier.restore(state.machine, snapshot.last_index)
        self._write_terms = [NOTHING_WRITTEN]
        self._go_on(partial(self._write, step))
        if not self._is_closed:
            self._carry_out(self._raft.snapshot_restored(snapshot.last_index))
            self._apply()

    # -- applying --------------------------------------------------------------------------------

    def _apply(self) -> None:
        self._applier.advance(Index(self._raft.applicable_index + 1))
        self._waiters.applied(self._applier.index)

    def _handle_applied(self, index: Index) -> None:
        if index > self._committed_before:
            self._raft.applied(index)
        self._waiters.applied(index)

    # -- small things ----------------------------------------------------------------------------

    async def _run(self, work: Callable[[], Any]) -> Any:
        try:
            return await self._executor.submit(work)
        except OSError as error:
            failure = as_storage_error(error)
            self._fail(failure)
            raise failure from error

    def _plan_save(self) -> Callable[[], None]:
        return self._persistence.plan_save(self._raft.applicable_index)

    def _now_ms(self) -> int:
        return self._clock.monotonic_ms()

    def _not_leader(self) -> UnavailableError:
        if self._is_closed or self._raft.is_leader:  # it is handing over, or another term than the wanted one has begun
            return UnavailableError("not done: this member cannot take proposals now")
        leader = self._raft.leader
        hint = "no leader is known yet" if leader is None else f"node {leader} leads"
        return NotLeaderError(f"not done: this member does not lead; {hint}", leader=leader)
