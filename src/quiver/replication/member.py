"""One member of one Raft group: carries out the core's outputs over the log and the network.

Everything runs in one event loop. An event (message, tick, proposal, durability report) is passed to the core, and its
output is carried out immediately, in the order that `raft.Output` requires. Only two things are waited for: saving the
hard state and restoring a snapshot. Outputs that arrive in the meantime queue up.

Proposals of one turn of the loop share one append, one message per follower and one flush. Batches go to disk and
to followers as the bytes they arrived in.
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
from quiver.raft import Configuration, Output, Raft, RaftStatus, Role
from quiver.record import Batch, BatchHeader
from quiver.replication.applier import Applier
from quiver.replication.codec import ReceivedMessage
from quiver.replication.entries import decode_entry, encode_own_entry
from quiver.replication.history import MemberHistory
from quiver.replication.interfaces import Host, StateMachine
from quiver.replication.log_compactor import LogCompactor, MakeState
from quiver.replication.member_files import MemberFiles, decode_snapshot_state, make_raft_config
from quiver.replication.pending import OutputQueue, PendingOutput, PendingProposals, Proposal
from quiver.replication.persistence import Persistence, as_storage_error
from quiver.replication.sender import MemberSender
from quiver.replication.status import MemberStatus
from quiver.storage import Executor, Lane, Log, StoredSnapshot
from quiver.tasks import SharedOutcome

NOTHING_WRITTEN = (Index(0), Term(0))
"""Stands for the entries that were on disk when the process started: they are durable without a report."""


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
    ) -> None:
        self.group = group
        self.next_deadline_ms: int | None = None
        self.on_role: Callable[[Role, Term, NodeId | None], None] | None = None
        """Called when the member's role or leader changes."""
        self.history = MemberHistory(host.counters, clock, saved_index=files.applied_index)
        self._host = host
        self._executor = executor
        self._clock = clock
        self._now_ms = clock.monotonic_ms
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
        self._pending = PendingProposals(host.counters.commit)
        self._proposals: list[Proposal] = []
        self._contexts = 0
        self._outputs = OutputQueue()
        self._is_blocked = False
        self._unblocked: asyncio.Future[None] | None = None
        self._is_closed = False
        self._damage: StorageError | None = None
        self._write_terms: list[tuple[Index, Term]] = [NOTHING_WRITTEN]
        self._applier.restore(files.machine_state, files.applied_index)
        self._raft = Raft(make_raft_config(host.id, settings), files.initial, rng=rng, now_ms=self._now_ms())
        self._compactor = LogCompactor(
            raft=self._raft,
            log=self._log,
            applier=self._applier,
            persistence=self._persistence,
            run=self._run,
            on_saved=self.history.note_saved,
        )
        self._sender = MemberSender(
            group,
            host=host,
            raft=self._raft,
            log=self._log,
            persistence=self._persistence,
            run=self._run,
            carry_out=self._carry_out,
            on_damage=self.handle_failure,
        )
        self.next_deadline_ms = self._raft.next_deadline_ms
        self._log.on_durable = self._handle_durable
        self._log.on_failure = self.handle_failure
        self._apply()

    # -- state -----------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        """Return whether this member leads; see `is_ready` for whether it may serve."""
        return self._raft.is_leader

    @property
    def is_ready(self) -> bool:
        """Return whether this member leads and, having committed in its own term, knows all that is committed."""
        return self._raft.is_ready

    @property
    def leader(self) -> NodeId | None:
        """Return the leader of the group, as far as known."""
        return self._raft.leader

    @property
    def term(self) -> Term:
        """Return the current term."""
        return self._raft.term

    @property
    def commit_index(self) -> Index:
        """Return the highest index known here to be committed."""
        return self._raft.commit_index

    @property
    def applied_index(self) -> Index:
        """Return the highest index that the state machine has applied."""
        return self._applier.index

    @property
    def configuration(self) -> Configuration:
        """Return the configuration in force: the latest in the log, committed or not."""
        return self._raft.configuration

    @property
    def committed_configuration(self) -> Configuration:
        """Return the latest configuration known here to be committed."""
        return self._raft.committed_configuration

    @property
    def raft(self) -> Raft:
        """Return the core, for tests and checkers; they must not pass events to it."""
        return self._raft

    @property
    def log(self) -> Log:
        """Return the log, for reading; callers must not change it, nor read entries that are not applied."""
        return self._log

    def status(self) -> MemberStatus:
        """Return a snapshot for people and metrics."""
        return MemberStatus(
            group=self.group,
            raft=self._raft.status(),
            log=self._log.status(),
            applied_index=self._applier.index,
            waiting=len(self._pending),
        )

    def raft_status(self) -> RaftStatus:
        """Return the part of the status that the Raft core knows."""
        return self._raft.status()

    def has_member(self, node: NodeId) -> bool:
        """Return whether a node belongs to the group."""
        return self._raft.configuration.includes(node)

    def is_caught_up(self, node: NodeId) -> bool:
        """Return whether this leader knows that another member has almost everything and may become a voter."""
        return self._raft.is_caught_up(node)

    def leader_silence_ms(self) -> int:
        """Return how long ago this member last knew that there is a leader."""
        return self._raft.leader_silence_ms(self._now_ms())

    def silence_ms(self, node: NodeId) -> int:
        """Return how long ago this leader last heard from a member; 0 for itself, else since its start if never."""
        now_ms = self._now_ms()
        heard = [peer.heard_ms for peer in self._raft.status().peers if peer.node == node]
        return now_ms - max(heard, default=0) if node != self._host.id else 0

    # -- calls -----------------------------------------------------------------------------------

    async def propose(self, batches: Sequence[Buffer]) -> list[BatchHeader]:
        """Append unstamped batches; return their stamped headers when they are committed and applied.

        Takes ownership of the buffers: writable ones are stamped in place. All of them are appended, or none.

        Raises:
            NotLeaderError: not done; another member leads, see its `leader`.
            UnavailableError: not done; this member is closing or transferring leadership.
            OverloadedError: not done; too many bytes are uncommitted.
            OutcomeUnknownError: unknown; leadership was lost before the entries were known to be committed.
        """
        return await self.propose_nowait(batches)

    def propose_nowait(
        self, batches: Sequence[Buffer], *, term: Term | None = None
    ) -> SharedOutcome[list[BatchHeader]]:
        """Begin what `propose` waits for; with `term`, refuse unless the batches are appended in exactly that term.

        Proposals of one turn are appended or refused together: after a refused one, none of the same turn succeeds.

        Raises:
            NotLeaderError: not done; another member leads, see its `leader`.
            UnavailableError: not done; this member is closing or transferring leadership.
        """
        if self._is_closed or not self._raft.is_leader:
            raise self._not_leader()
        done: SharedOutcome[list[BatchHeader]] = SharedOutcome()
        self._proposals.append(Proposal(list(batches), done, term))
        if len(self._proposals) == 1:
            asyncio.get_running_loop().call_soon(self._propose_queued)
        return done

    async def read_barrier(self) -> Index:
        """Wait until everything committed before this call is applied here, so that a read is linearizable.

        Raises:
            NotLeaderError: this member does not lead, or lost leadership during the call; see its `leader`.
            OverloadedError: too many reads are pending.
        """
        if self._is_closed or not self._raft.is_leader:
            raise self._not_leader()
        done: asyncio.Future[Index] = asyncio.get_running_loop().create_future()
        self._contexts += 1
        self._pending.add_read(self._contexts, done)
        try:
            self._carry_out(self._raft.read(self._contexts, self._now_ms()))
        except QuiverError:
            self._pending.forget_read(self._contexts)
            raise
        return await done

    def transfer_leadership(self, to: NodeId) -> None:
        """Begin to transfer leadership to another voter; `on_role` is called when it has happened.

        Raises:
            UnavailableError: not done; this member does not lead, or cannot transfer leadership now.
            RequestError: not done; the target is not another voter.
        """
        output = self._raft.transfer_leadership(to, self._now_ms())
        self.history.note_transfer(to, self._raft.term)
        self._carry_out(output)

    def campaign(self) -> None:
        """Campaign now, unless a leader is known: for the preferred replica of a new group. Only a hint."""
        self._carry_out(self._raft.campaign(self._now_ms()))

    def change_membership(self, *, voters: tuple[NodeId, ...], learners: tuple[NodeId, ...] = ()) -> None:
        """Begin to move the group to these members; `configuration` shows the progress.

        Raises:
            UnavailableError: not done; this member does not lead, or another change is pending, or a learner lags.
            RequestError: not done; the target cannot be reached in one change from the current configuration.
        """
        self._carry_out(self._raft.change_membership(voters=voters, learners=learners, now_ms=self._now_ms()))

    async def take_snapshot(self) -> None:
        """Save the state machine's state, and remove from the log what the previous snapshot covers.

        Raises:
            StorageError: the disk failed; the node stops.
        """
        await self._compactor.take_snapshot()

    async def checkpoint(self) -> None:
        """Save the state machine's state without changing the log, to shorten replay; raises as `trim` does."""
        await self._compactor.checkpoint()

    async def trim(self, first_index: Index, make_state: MakeState) -> bool:
        """Remove whole segments below `first_index`, an applied entry, from the log; return whether it was done.

        See `log_compactor`. `make_state` returns a state machine's state without anything before the log's new start. A
        member that receives the log from there gets this state first, so a later entry must replace the whole state.

        Raises:
            StorageError: the disk failed; the node stops.
        """
        return await self._compactor.trim(first_index, make_state)

    def abandon(self) -> None:
        """Stop immediately and fail all pending calls; the files stay as they are."""
        self._is_closed = True
        self.next_deadline_ms = None
        for proposal in self._proposals:
            proposal.refuse(UnavailableError("not done: this member is closing; retry at another"))
        self._proposals.clear()
        self._pending.abandon()

    async def close(self) -> None:
        """Stop, fail all pending calls, and close the files; idempotent."""
        if not self._is_closed:
            self.abandon()
            if self._is_blocked:  # a save or a restore is running on these files
                self._unblocked = asyncio.get_running_loop().create_future()
                await self._unblocked
            await self._log.close()
            self._persistence.close()

    # -- events ----------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Advance the core's time."""
        self._carry_out(self._raft.tick(now_ms))

    def wake(self) -> None:
        """Start the timers of a hibernating group: one of its nodes stopped answering or restarted."""
        self._carry_out(self._raft.wake(self._now_ms()))

    def peer_lost(self, node: NodeId) -> None:
        """Handle a broken connection to a node: in-flight messages may be lost, and the node may be dead."""
        self._carry_out(self._raft.peer_unreachable(node))
        self._carry_out(self._raft.suspect(node, self._now_ms()))

    def receive(self, from_: NodeId, received: ReceivedMessage) -> None:
        """Handle a message from another member.

        Raises:
            DecodeError: its batches or its snapshot are malformed; nothing was done.
        """
        message, snapshot = received.as_message()
        output = self._raft.receive(from_, message, self._now_ms())
        kept = len(output.append)  # the core drops a prefix that the log already has
        self._carry_out(output, received.batches[len(received.batches) - kept :] if kept else (), snapshot)

    def _propose_queued(self) -> None:
        queued, self._proposals = self._proposals, []
        current, proposals = self._raft.term, list[Proposal]()
        for proposal in queued:
            if proposal.term is None or proposal.term == current:
                proposals.append(proposal)
            else:
                proposal.refuse(self._not_leader())
        if not proposals:
            return
        try:
            self._log.check_room(sum([proposal.size_bytes for proposal in proposals]))
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
                self._pending.add_proposal(proposal)
            self.history.note_appended(proposals[-1].end_index)
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
        """Return the log's end offset after all outputs that wait for a save."""
        planned = self._outputs.end_offset() if self._is_blocked else None
        return self._log.end_offset if planned is None else planned

    def _handle_durable(self, durable_end: Index) -> None:
        """Report to the core what is durable, with the term in which it was written (R7)."""
        if self._is_closed:  # the log may still finish writes after its member was abandoned
            return
        terms = self._write_terms
        while len(terms) > 1 and terms[1][0] < durable_end:
            terms.pop(0)
        self._carry_out(self._raft.durable(Index(durable_end - 1), terms[0][1]))
        self._apply()

    # -- carrying out ----------------------------------------------------------------------------

    def _carry_out(self, output: Output, batches: Sequence[Batch] = (), snapshot: StoredSnapshot | None = None) -> None:
        if self._is_closed:
            return
        if output.proposals_lost is not None:
            # Immediately: the entries that replace the lost ones may be applied before this output is carried out.
            self._pending.lose(output.proposals_lost)
        if output.restore is not None:
            self._committed_before = output.restore.last_index  # the core counts everything up to it as applied
        if output.next_deadline_ms != self.next_deadline_ms:
            self.next_deadline_ms = output.next_deadline_ms
            self._host.deadline_changed(self)
        if self._is_blocked:
            self._outputs.append(PendingOutput(output, batches, snapshot))
        elif output.append or output.truncate_from is not None or output.hard_state is not None or output.restore:
            self._begin(PendingOutput(output, batches, snapshot))
        else:
            # Most outputs write nothing: no step of the contract has to be waited for.
            for outgoing in output.messages:
                self._sender.send(outgoing.to, outgoing.message)
            self._finish(output)

    def _begin(self, step: PendingOutput) -> None:
        """Do steps 1 to 5 of the contract of `Output`."""
        self._outputs.current = step
        output = step.output
        if output.hard_state is not None:
            self._persistence.set_vote(output.hard_state.term, output.hard_state.vote)
        changes = [entry for entry in output.append if entry.configuration is not None]
        if changes:
            # A configuration is durable before its entry can reach the log: see `member_files`.
            first_index = changes[0].index if output.truncate_from is None else output.truncate_from
            settled_index = self._raft.applicable_index
            assert changes[-1].configuration is not None
            self.history.note_members(changes[-1].configuration, changes[-1].term)
            self._persistence.add_configurations(changes, first_index=first_index, settled_index=settled_index)
            self._block(self._plan_save(), partial(self._write, step))
        elif output.restore is not None:
            assert step.snapshot is not None, "the core restores what was just received"
            self._is_blocked = True
            self._host.spawn(self._restore(step, step.snapshot))
        else:
            self._write(step)

    def _write(self, step: PendingOutput) -> None:
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
            self._sender.send(outgoing.to, outgoing.message)
        if output.hard_state is not None:
            self._block(self._plan_save(), partial(self._finish, output))
        else:
            self._finish(output)

    def _append(self, step: PendingOutput) -> None:
        output = step.output
        first_index = output.append[0].index
        if self._write_terms[-1][1] != output.term:
            self._write_terms.append((first_index, output.term))
        batches = list(step.batches)
        own = output.append[len(batches) :]  # entries that the core created itself come last
        if own:
            timestamp = self._clock.wall_ms()
            offset = batches[-1].header.end_offset if batches else self._log.end_offset
            batches += [encode_own_entry(entry, base_offset=offset, timestamp=timestamp) for entry in own]
        self._log.append(batches)

    def _finish(self, output: Output) -> None:
        """Do steps 6 and 7 of the contract of `Output`. On disk by now: the hard state, if the output has one."""
        for outgoing in output.messages_after_save:
            self._sender.send(outgoing.to, outgoing.message)
        for permission in output.send:
            self._sender.send_entries(permission)
        for snapshot in output.send_snapshot:
            self._host.spawn(self._sender.send_snapshot(snapshot))
        for context in output.reads_failed:
            self._pending.fail_read(context, leader=self._raft.leader)
        for ready in output.reads:
            self._pending.confirm_read(ready.context, ready.index)
        if output.recovered:
            self._persistence.clear_recovery()
            self._block(self._plan_save(), lambda: None)
        if output.became is not None:
            self.history.note_role(output.became)
            if self.on_role is not None:
                self.on_role(output.became.role, output.became.term, output.became.leader)
        if output.committed:
            self.history.note_committed(self._raft.commit_index)
        if output.committed or output.reads:
            self._apply()

    def _block(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Run `work` on disk, then `then`; all later outputs wait for both."""
        self._is_blocked = True
        self._executor.submit(work).add_done_callback(partial(self._unblock, then))

    def _unblock(self, then: Callable[[], None], finished: asyncio.Future[None]) -> None:
        error = finished.exception()
        if error is not None:
            self._fail(as_storage_error(error))
        else:
            self._resume(then)

    def _resume(self, then: Callable[[], None]) -> None:
        if self._is_closed:  # nothing more is written or sent
            self._let_close()
            return
        self._is_blocked = False
        if self._damage is not None:
            self._stop_at_damage(self._damage)
            return
        then()
        while self._outputs and not self._is_blocked:
            self._begin(self._outputs.pop())

    # -- failing ---------------------------------------------------------------------------------

    def handle_failure(self, error: StorageError) -> None:
        """Stop the node. For damage, first save a mark that makes the next start verify every byte (R18)."""
        if not isinstance(error, DamageError) and not isinstance(error.__cause__, DamageError):
            self._host.fail(error)
        elif self._damage is None:
            self._damage = error
            self._persistence.mark_damaged()
            if not self._is_blocked:
                self._stop_at_damage(error)

    def _stop_at_damage(self, error: StorageError) -> None:
        self._is_blocked = True  # permanently: nothing is carried out any more
        saved = self._executor.submit(self._plan_save())
        saved.add_done_callback(lambda _: self._fail(error))

    def _fail(self, error: StorageError) -> None:
        self._host.fail(error)
        self._let_close()

    def _let_close(self) -> None:
        if self._unblocked is not None and not self._unblocked.done():
            self._unblocked.set_result(None)

    # -- snapshots -------------------------------------------------------------------------------

    async def _restore(self, step: PendingOutput, snapshot: StoredSnapshot) -> None:
        """Replace log and state by a snapshot. Its file is saved first: after a crash `member_files` does the rest."""
        state = decode_snapshot_state(snapshot.state)
        self._persistence.reset_configurations(snapshot.last_index, snapshot.last_term, state.configuration)
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
        self._resume(partial(self._write, step))
        if not self._is_closed:
            self._carry_out(self._raft.snapshot_restored(snapshot.last_index))
            self._apply()

    # -- applying --------------------------------------------------------------------------------

    def _apply(self) -> None:
        self._applier.advance(Index(self._raft.applicable_index + 1))
        if self._pending.has_confirmed_reads:  # proposals are completed by `_handle_applied`
            self._pending.applied(self._applier.index)

    def _handle_applied(self, index: Index) -> None:
        if index > self._committed_before:
            self._raft.applied(index)
        self._pending.applied(index)

    # -- helpers ---------------------------------------------------------------------------------

    async def _run(self, work: Callable[[], Any]) -> Any:
        """Save or load a snapshot: large, and nothing urgent waits for it."""
        try:
            return await self._executor.submit(work, Lane.RECOVERY)
        except OSError as error:
            failure = as_storage_error(error)
            self._fail(failure)
            raise failure from error

    def _plan_save(self) -> Callable[[], None]:
        return self._persistence.plan_save(self._raft.applicable_index)

    def _not_leader(self) -> UnavailableError:
        if self._is_closed or self._raft.is_leader:  # a transfer is running, or the wanted term has passed
            return UnavailableError("not done: this member is closing or transferring leadership; retry")
        leader = self._raft.leader
        hint = "no leader is known yet" if leader is None else f"node {leader} leads"
        return NotLeaderError(f"not done: this member does not lead; {hint}", leader=leader)
