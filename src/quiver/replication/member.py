"""One member of one Raft group: carries out the core's outputs over the log and the network.

Everything runs in one event loop. An event (message, tick, proposal, durability report) is passed to the core, and its
output is carried out immediately, in the order that `raft.Output` requires. Only two things are waited for: saving the
hard state and restoring a snapshot. Outputs that arrive in the meantime queue up.

Proposals of one turn of the loop share one append, one message per follower and one flush. Batches go to disk and
to followers as the bytes they arrived in.

A full disk stops nothing. A follower drops the entries of an append that would use up the reserve (`DiskSpace`), as if
the leader had sent none, and says so in its answers: it is sent no more until it has room. A save of the hard state
that does not fit is repeated until it does: the member is silent meanwhile.

A member that meets an entry of an unknown version (`needs_upgrade`) stops applying and resigns: it still votes and
stores entries, so that the group keeps its quorum, but another member leads. `FaultGuard` contains unexpected errors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from quiver.clock import Clock, Rng
from quiver.config import ReplicationSettings
from quiver.errors import (
    DamageError,
    DiskFullError,
    LogClosedError,
    NotLeaderError,
    OutcomeUnknownError,
    QuiverError,
    StorageError,
    UnavailableError,
    UnknownVersionError,
)
from quiver.logs import facts
from quiver.model import Buffer, GroupId, Index, NodeId, Offset, Term
from quiver.raft import Output, Raft, Role
from quiver.record import Batch, BatchHeader
from quiver.replication.applier import Applier
from quiver.replication.catch_up import CommitSampler
from quiver.replication.codec import ReceivedMessage
from quiver.replication.entries import encode_own_entry
from quiver.replication.fault_guard import FaultGuard
from quiver.replication.follower_room import FollowerRoom
from quiver.replication.history import MemberHistory
from quiver.replication.interfaces import Host, StateMachine
from quiver.replication.log_compactor import LogCompactor, MakeState
from quiver.replication.member_files import MemberFiles, decode_snapshot_state, make_raft_config
from quiver.replication.member_state import MemberState
from quiver.replication.pending import OutputQueue, PendingOutput, PendingProposals
from quiver.replication.persistence import FileJobs, Persistence, as_storage_error
from quiver.replication.proposer import Proposer
from quiver.replication.sender import MemberSender
from quiver.storage import ROOM_RETRY_S, Executor, Lane, StoredSnapshot, is_out_of_space
from quiver.tasks import SharedOutcome

logger = logging.getLogger(__name__)

NOTHING_WRITTEN = (Index(0), Term(0))
"""Stands for the entries that were on disk when the process started: they are durable without a report."""


class Member(MemberState):
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
        self._commits = CommitSampler(host.catch_up_limiter)
        self.history = MemberHistory(host.counters, clock, saved_index=files.applied_index)
        self._host, self._executor = host, executor
        self._clock, self._now_ms = clock, clock.monotonic_ms
        self._settings = settings
        self._log = files.log
        self._persistence = Persistence(files)
        self._committed_before = files.initial.commit
        config = make_raft_config(host.id, settings)
        self._raft = Raft(config, files.initial, rng=rng, now_ms=self._now_ms(), knows=host.knows)
        self._applier = Applier(
            machine,
            self._log,
            group=group,
            host=host,
            applied_index=files.applied_index,
            on_applied=self._handle_applied,
            on_unknown=self._handle_unknown,
            on_unreadable=self.handle_failure,
        )
        self._pending = PendingProposals(host.counters.commit)
        self._contexts = 0
        self._outputs, self._jobs = OutputQueue(), FileJobs()
        self._is_blocked = False
        self._is_closed = self._has_closed_files = False
        self.guard = FaultGuard(host, group)
        self._damage: StorageError | None = None
        self._room = FollowerRoom(host.space, group)
        self._write_terms: list[tuple[Index, Term]] = [NOTHING_WRITTEN]
        self._proposer = self._make_proposer()
        self._compactor = LogCompactor(
            raft=self._raft,
            log=self._log,
            applier=self._applier,
            persistence=self._persistence,
            run=self._run,
            run_with_room=self._run_with_room,
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
        self._log.on_durable = self.guard.callback(self._handle_durable)
        self._log.on_failure = self.guard.callback(self.handle_failure)
        self._applier.restore(files.machine_state, files.applied_index)
        self._apply()

    def _make_proposer(self) -> Proposer:
        return Proposer(
            raft=self._raft,
            log=self._log,
            space=self._host.space,
            pending=self._pending,
            clock=self._clock,
            guard=self.guard,
            end_offset=self._planned_end_offset,
            carry_out=self._carry_out,
            not_leader=self._not_leader,
            on_appended=self._handle_appended,
        )

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
        return self._proposer.add(batches, term)

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
            self.guard.call(partial(self._pass, self._raft.read, self._contexts, self._now_ms()), is_read=True)
        except QuiverError:
            self._pending.forget_read(self._contexts)
            raise
        return await done

    def transfer_leadership(self, to: NodeId) -> None:
        """Begin to transfer leadership to another voter; `on_role` is called when it has happened.

        Raises:
            UnavailableError: not done; this member does not lead, or cannot transfer leadership now.
            RequestError: not done; the target is not another voter.
            OutcomeUnknownError: an unexpected error stopped this member; it may have transferred its leadership.
        """
        output = self._raft.transfer_leadership(to, self._now_ms())
        self.history.note_transfer(to, self._raft.term)
        self.guard.call(partial(self._carry_out, output))

    def campaign(self) -> None:
        """Campaign now, unless a leader is known: for the preferred replica of a new group. Only a hint."""
        self.guard.run(self._pass, self._raft.campaign, self._now_ms())

    def change_membership(self, *, voters: tuple[NodeId, ...], learners: tuple[NodeId, ...] = ()) -> None:
        """Begin to move the group to these members; `configuration` shows the progress.

        Raises:
            UnavailableError: not done; this member does not lead, or another change is pending, or a learner lags.
            RequestError: not done; the target cannot be reached in one change from the current configuration.
            OutcomeUnknownError: an unexpected error stopped this member; the change may be in the log, and go on.
        """
        change = partial(self._raft.change_membership, voters=voters, learners=learners)
        self.guard.call(partial(self._pass, change, now_ms=self._now_ms()))

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
        """Stop immediately and fail all pending calls; the files stay as they are. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.next_deadline_ms = None
        self._applier.stop()
        self._proposer.refuse(UnavailableError("not done: this member is closing; retry at another"))
        self._pending.abandon()

    async def close(self) -> None:
        """Stop, fail all pending calls, and close the files; idempotent."""
        self.abandon()
        if self._has_closed_files:
            return
        self._has_closed_files = True
        self._log.stop_waiting()  # a restore may wait for the log, and the log for room
        await self._jobs.wait_ended()
        await self._log.close()
        await self._jobs.wait_ended()  # a read that the log waited for may have found damage, which is saved

    def hand_over(self) -> None:
        """Ask another voter to lead, if this member leads; best effort, after an error in this member's code."""
        with suppress(Exception):
            self._carry_out(self._raft.resign(self._now_ms()))

    # -- events ----------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Advance the core's time."""
        self.guard.run(self._pass, self._raft.tick, now_ms)

    def wake(self) -> None:
        """Start the timers of a hibernating group: one of its nodes stopped answering or restarted."""
        self.guard.run(self._pass, self._raft.wake, self._now_ms())

    def peer_lost(self, node: NodeId) -> None:
        """Handle a broken connection to a node: in-flight messages may be lost, and the node may be dead."""
        self.guard.run(self._pass, self._raft.peer_unreachable, node)
        self.guard.run(self._pass, self._raft.suspect, node, self._now_ms())

    def receive(self, from_: NodeId, received: ReceivedMessage) -> None:
        """Handle a message from another member.

        Raises:
            DecodeError: its batches or its snapshot are malformed; nothing was done.
        """
        room = self._room
        if received.message.payload_bytes or room.is_full:
            received = room.admit(received)
        if room.space.is_full is not room.reported[0] or room.is_full is not room.reported[1]:
            self._raft.set_room(**room.report())
        if received.message.append is None and received.message.plain is None:
            return  # a snapshot that was dropped
        message, snapshot = received.as_message()
        output = self._raft.receive(from_, message, self._now_ms())
        if output.is_refused:
            self._host.note_refused(from_, self.group, message.term)
            return
        kept = len(output.append)  # the core drops a prefix that the log already has
        self._carry_out(output, received.batches[len(received.batches) - kept :] if kept else (), snapshot)

    def _planned_end_offset(self) -> Offset:
        """Return the log's end offset after all outputs that wait for a save."""
        planned = self._outputs.end_offset() if self._is_blocked else None
        return self._log.end_offset if planned is None else planned

    def _pass(self, event: Callable[..., Output], *arguments: Any, **options: Any) -> None:
        """Pass an event to the core and carry out its output."""
        self._carry_out(event(*arguments, **options))

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
        if output.joined:
            self._persistence.clear_joining()
        changes = [entry for entry in output.append if entry.configuration is not None]
        if changes:
            # A new configuration is durable before its entry can reach the log: see `member_files`.
            first_index = changes[0].index if output.truncate_from is None else output.truncate_from
            settled_index = self._raft.applicable_index
            assert changes[-1].configuration is not None
            self.history.note_members(changes[-1].configuration, changes[-1].term)
            if self._persistence.add_configurations(changes, first_index=first_index, settled_index=settled_index):
                self._block(self._plan_save(), partial(self._write, step))
            else:
                self._write(step)
        elif output.restore is not None:
            assert step.snapshot is not None, "the core restores what was just received"
            self._is_blocked = True
            self._host.spawn(self.group, self._restore, step, step.snapshot)
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
            self._host.spawn(self.group, self._sender.send_snapshot, snapshot)
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
        self._jobs.begin()
        self._executor.submit(work).add_done_callback(self.guard.callback(partial(self._unblock, work, then)))

    def _unblock(self, work: Callable[[], None], then: Callable[[], None], finished: asyncio.Future[None]) -> None:
        self._jobs.end()
        error = finished.exception()
        if is_out_of_space(error):
            logger.warning("disk full, hard state waits for room", extra=facts(group=self.group))
            self._host.space.begin_stall()
            retry = self.guard.callback(partial(self._block_again, work, then))
            asyncio.get_running_loop().call_later(ROOM_RETRY_S, retry)
        elif error is not None:
            self._host.fail(as_storage_error(error))
        else:
            self._resume(then)

    def _block_again(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Try a save again that did not fit; nothing that depends on it was sent."""
        self._host.space.end_stall()
        if not self._is_closed:
            self._block(work, then)

    def _resume(self, then: Callable[[], None]) -> None:
        if self._is_closed:  # nothing more is written or sent
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
        self._jobs.begin()
        saved = self._executor.submit(self._plan_save())
        saved.add_done_callback(lambda _: self._jobs.end())
        saved.add_done_callback(lambda _: self._host.fail(error))

    # -- snapshots -------------------------------------------------------------------------------

    async def _restore(self, step: PendingOutput, snapshot: StoredSnapshot) -> None:
        """Replace log and state by a snapshot. Its file is saved first: after a crash `member_files` does the rest."""
        if self._is_closed:
            return
        self._jobs.begin()  # here: a task that is cancelled before it starts would never end it
        try:
            await self._compactor.replace_log(snapshot)
            machine_state = decode_snapshot_state(snapshot.state).machine
            await self._applier.prepare_restore(machine_state)
            self._applier.restore(machine_state, snapshot.last_index)
        except (StorageError, DiskFullError) as error:
            if self._is_closed:
                return  # it waited for room; the next start finishes or forgets the restore
            if isinstance(error, StorageError):
                self._host.fail(error)
            raise
        finally:
            self._jobs.end()
        if not self.needs_upgrade:
            self._carry_out(self._raft.stand(self._now_ms()))
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

    def _handle_appended(self, end_index: Index) -> None:
        self.history.note_appended(end_index)
        self._commits.note_appended(end_index)

    def _handle_applied(self, index: Index) -> None:
        self._commits.note_applied(index, is_leader=self._raft.is_leader)
        if index > self._committed_before:
            self._raft.applied(index)
        self._pending.applied(index)

    def _handle_unknown(self, error: UnknownVersionError) -> None:
        """Resign soon; not now, in the middle of an output."""
        logger.error("needs_upgrade: entry of a newer program", extra=facts(group=self.group, reason=error.message))
        asyncio.get_running_loop().call_soon(self.guard.callback(self._resign))

    def _resign(self) -> None:
        if self.needs_upgrade:
            self._carry_out(self._raft.resign(self._now_ms()))
            reason = f"may have been done: this node needs an upgrade: {self.needs_upgrade}"
            self._pending.fail(OutcomeUnknownError(reason, code="needs_upgrade"), self._not_leader())

    # -- helpers ---------------------------------------------------------------------------------

    async def _run(self, work: Callable[[], Any]) -> Any:
        """Save or load a snapshot: large, and nothing urgent waits for it. `close` waits for it.

        Raises:
            LogClosedError: not done; the files are closed.
            DiskFullError: not done; there is no room.
            StorageError: the disk failed; the node stops.
        """
        if self._jobs.are_over:
            raise LogClosedError(f"not done: the files of group {self.group} are closed")
        self._jobs.begin()
        running = self._executor.submit(work, Lane.RECOVERY)
        running.add_done_callback(lambda _: self._jobs.end())
        try:
            return await asyncio.shield(running)  # files are in use until it has ended, even if the caller is cancelled
        except OSError as error:
            if is_out_of_space(error):
                raise DiskFullError(f"not done: no room for a snapshot: {error}; it is retried later") from error
            failure = as_storage_error(error)
            self._host.fail(failure)
            raise failure from error

    async def _run_with_room(self, work: Callable[[], Any]) -> Any:
        """Do what `_run` does, as soon as there is room."""
        while True:
            try:
                return await self._run(work)
            except DiskFullError:
                if self._is_closed:
                    raise
            self._host.space.begin_stall()
            try:
                await asyncio.sleep(ROOM_RETRY_S)
            finally:
                self._host.space.end_stall()

    def _plan_save(self) -> Callable[[], None]:
        return self._persistence.plan_save(self._raft.applicable_index)

    def _not_leader(self) -> UnavailableError:
        if self._is_closed or self._raft.is_leader:  # a transfer is running, or the wanted term has passed
            return UnavailableError("not done: this member is closing or transferring leadership; retry")
        leader = self._raft.leader
        if self.needs_upgrade and leader is None:
            return UnavailableError(f"not done: this node needs an upgrade: {self.needs_upgrade}", code="needs_upgrade")
        hint = "no leader is known yet" if leader is None else f"node {leader} leads"
        return NotLeaderError(f"not done: this member does not lead; {hint}", leader=leader)
