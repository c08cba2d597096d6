"""All Raft groups of one node over one network: message routing, envelopes, ticks and peer liveness.

The messages of all members for one node in one turn of the loop leave together in one envelope, in that turn. Once per
heartbeat interval every other node gets an envelope, an empty one if there is nothing to send: it proves that this node
is alive, for all groups that the two share, including hibernating ones. When a node is silent for an election timeout,
or comes back as a new process, the groups shared with it are woken.

An asynchronous context manager: members exist inside it, and the first failure inside ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from quiver.clock import Clock, Rng
from quiver.config import LogSettings, ReplicationSettings
from quiver.errors import DecodeError, RequestError, StorageError
from quiver.logs import RateLimitedLogger, facts
from quiver.model import Buffer, GroupId, NodeId, Term
from quiver.raft import Configuration, Knows, know_everyone
from quiver.raft.messages import VoteRequest
from quiver.replication.applier import prepare_restore
from quiver.replication.catch_up import CatchUpLimiter
from quiver.replication.codec import GroupMessage, ReceivedMessage, decode_envelope, encode_envelope
from quiver.replication.history import ReplicationCounters
from quiver.replication.interfaces import Network, Scheduled, StateMachine
from quiver.replication.member import Member
from quiver.replication.member_files import MemberStorage, open_files, write_new_files
from quiver.replication.status import ReplicationPeerStatus, ReplicatorStatus
from quiver.replication.timers import DeadlineTimer
from quiver.storage import Disk, DiskSpace, Executor, LogTimings, TailBudget

if TYPE_CHECKING:
    from quiver.security.key_ring import KeyRing

logger = logging.getLogger(__name__)

TICKS_PER_HEARTBEAT = 4
"""Most ticks in one heartbeat interval: deadlines in between share the next tick."""
ENVELOPE_BYTES_MAX = 4 * 1024 * 1024
"""Size at which the messages to a node in one turn are split into several envelopes; one message may exceed it."""
PATIENCE_TIMEOUTS = 10
"""Election timeouts for which the members of a new group leave its first election to one of them, unless a connection
breaks: where many groups are opened together it may take seconds. Without it they compete, for rounds."""
EARLY_GROUPS_MAX = 10_000
"""Most groups whose requests for votes wait until they are opened."""


class _Peer:
    """Liveness of another node, and the messages queued for it."""

    __slots__ = ("heard_ms", "incarnation", "is_alive", "messages", "payloads", "sent_ms", "size_bytes")

    def __init__(self, now_ms: int) -> None:
        self.heard_ms = now_ms
        self.sent_ms = 0
        self.incarnation: int | None = None
        self.is_alive = True
        self.messages: list[GroupMessage] = []
        self.payloads: list[Buffer] = []
        self.size_bytes = 0


class Replicator:
    """The Raft groups of one node."""

    def __init__(
        self,
        node: NodeId,
        *,
        incarnation: int,
        network: Network,
        disk: Disk,
        executor: Executor,
        clock: Clock,
        rng: Rng,
        settings: ReplicationSettings,
        log_settings: LogSettings,
        on_failure: Callable[[StorageError], None] | None = None,
        on_fault: Callable[[Member, Exception], None] | None = None,
        knows: Knows = know_everyone,
        keys: KeyRing | None = None,
        space: DiskSpace | None = None,
    ) -> None:
        """Make the groups of a node; `on_fault` gets a member that an unexpected error has stopped, to close it.

        Without it such an error passes through, to the event loop or to whoever called. `knows` says which nodes
        belong to the cluster: the others get no answer, except from a blank member. `keys` open encrypted logs.
        Without `space`, which the owner keeps up to date, followers store what fits on the disk.
        """
        self._node = node
        self._incarnation = incarnation
        self._network = network
        self.counters = ReplicationCounters()
        self.tails = TailBudget(log_settings.tail_caches_bytes_max)
        self.timings = LogTimings()
        self.space = space or DiskSpace(disk, "/", executor=executor, settings=log_settings)
        self._storage = MemberStorage(disk, executor, clock, log_settings, self.tails, self.timings, keys, self.space)
        self._clock = clock
        self._rng = rng
        self._settings = settings
        self._on_failure = on_failure
        self._on_fault = on_fault
        self._knows = knows
        self._warnings = RateLimitedLogger(logger, clock)
        self._members: dict[GroupId, Member] = {}
        self._awake: dict[GroupId, Member] = {}
        self._patient: set[GroupId] = set()
        """New groups whose first election is left to another member, until they have a leader or waited in vain."""
        self._early: dict[GroupId, dict[NodeId, GroupMessage]] = {}
        """The last request for a vote of each sender for groups that are not open here: they may be opened soon."""
        self._peers: dict[NodeId, _Peer] = {}
        self._dirty: list[NodeId] = []
        self._tasks = asyncio.TaskGroup()
        spacing_ms = max(1, settings.heartbeat_interval_ms // TICKS_PER_HEARTBEAT)
        self._timer = DeadlineTimer(clock, spacing_ms=spacing_ms, action=self._handle_tick)
        self.catch_up_limiter = CatchUpLimiter(clock, bytes_per_second=settings.catch_up_bytes_per_second)
        self._failure: StorageError | None = None
        self._failed = asyncio.Event()
        self.envelopes_sent = 0
        self.envelopes_refused = 0
        self.messages_refused = 0

    # -- lifecycle -------------------------------------------------------------------------------

    async def __aenter__(self) -> Replicator:
        """Start to receive and to tick."""
        await self._tasks.__aenter__()
        self._network.start(self._handle_envelope, self._handle_lost)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every member and wait for the running tasks."""
        self._timer.close()
        self._awake.clear()
        try:
            for member in list(self._members.values()):
                await member.close()
            self._members.clear()
        except (Exception, asyncio.CancelledError) as failure:
            # A cancellation may be the group's own, because a task failed: it must see it.
            await self._tasks.__aexit__(type(failure), failure, failure.__traceback__)
            raise
        await self._tasks.__aexit__(kind, error, trace)

    async def open_member(
        self,
        group: GroupId,
        directory: str,
        machine: StateMachine,
        *,
        bootstrap: Configuration | None = None,
        is_encrypted: bool = False,
        is_synced: bool = False,
        is_patient: bool = False,
    ) -> Member:
        """Join a group with the files in `directory`; `bootstrap` names the first members of a new group.

        With `is_encrypted` new files are encrypted. With `is_synced` the files are those of `plan_files`, durable.
        With `is_patient` another member of the new group campaigns as soon as it is open, and this one leaves it time.

        Raises:
            RequestError: the group is already open.
            StorageError: its files cannot be used, or the disk has already failed for another group.
        """
        if group in self._members:
            raise RequestError(f"group {group} is already open on this node")
        files = await open_files(
            self._storage, directory, bootstrap=bootstrap, is_encrypted=is_encrypted, is_synced=is_synced
        )
        if self._failure is not None:
            raise StorageError(f"group {group} is not opened: the disk of this node has failed: {self._failure}")
        for warning in files.warnings:
            logger.warning("log recovered with a finding", extra=facts(group=group, finding=warning))
        try:
            await prepare_restore(machine, files.machine_state)
            member = Member(
                group,
                files,
                machine,
                host=self,
                executor=self._storage.executor,
                clock=self._clock,
                rng=self._rng,
                settings=self._settings,
            )
        except Exception:
            await files.log.close()
            raise
        self._members[group] = member
        (self._patient.add if is_patient else self._patient.discard)(group)
        self.deadline_changed(member)
        if group in self._early:  # the caller, who is not done with the new member yet, comes first
            asyncio.get_running_loop().call_soon(self._deliver_early, group)
        return member

    async def make_member(
        self, directory: str, *, bootstrap: Configuration | None = None, is_encrypted: bool = False
    ) -> None:
        """Create the files of a new member without joining yet. On disk after this returns: its hard state.

        Changes nothing if they exist. `bootstrap` and `is_encrypted` as for `open_member`, which then no longer needs
        the first.

        Raises:
            StorageError: the files cannot be created or used.
        """
        files = await open_files(self._storage, directory, bootstrap=bootstrap, is_encrypted=is_encrypted)
        await files.log.close()

    def plan_files(self, bootstrap: Configuration | None) -> Callable[[str], None]:
        """Return blocking work that writes the files of a new member into an empty directory, and syncs nothing."""
        storage, now_ms = self._storage, self._clock.wall_ms()
        return lambda directory: write_new_files(storage.disk, directory, bootstrap=bootstrap, now_ms=now_ms)

    async def close_member(self, group: GroupId) -> None:
        """Leave a group and keep its files. After a disk failure no group is open, so this does nothing."""
        member = self._members.pop(group, None)
        self._awake.pop(group, None)
        if member is not None:
            await member.close()

    async def wait_failed(self) -> StorageError:
        """Wait until the disk fails; the node must then exit with a non-zero status."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    def status(self) -> ReplicatorStatus:
        """Return a snapshot for people and metrics."""
        return ReplicatorStatus(
            members=tuple(self._members[group].status() for group in sorted(self._members)),
            peers=self.peers_status(),
            envelopes_sent=self.envelopes_sent,
            envelopes_refused=self.envelopes_refused,
            messages_refused=self.messages_refused,
        )

    def peers_status(self) -> tuple[ReplicationPeerStatus, ...]:
        """Return the other nodes as this one sees them."""
        now_ms = self._clock.monotonic_ms()
        return tuple(
            ReplicationPeerStatus(node, peer.is_alive, now_ms - peer.heard_ms)
            for node, peer in sorted(self._peers.items())
        )

    # -- for members -----------------------------------------------------------------------------

    @property
    def id(self) -> NodeId:
        """Return this node's id."""
        return self._node

    def knows(self, node: NodeId) -> bool:
        """Return whether a node belongs to the cluster, for all that this node knows."""
        return self._knows(node)

    def note_refused(self, from_: NodeId, group: GroupId, term: Term) -> None:
        """Count and log a message that a member refused."""
        self.messages_refused += 1
        self._warnings.warn(
            f"refused {from_}",
            "replication message refused",
            sender=from_,
            group=group,
            term=term,
            reason="the sender is not a member of the group, or no election can have reached the term",
        )

    def post(self, to: NodeId, message: GroupMessage, payloads: Sequence[Buffer] = ()) -> None:
        """Add a message to the next envelope to a node, which is sent in this turn of the loop."""
        peer = self._peers.get(to) or self._peer(to)
        if peer.size_bytes + message.payload_bytes > ENVELOPE_BYTES_MAX:
            self._send(to, peer)
        if not peer.messages:
            if not self._dirty:
                asyncio.get_running_loop().call_soon(self._send_all)
            self._dirty.append(to)
        peer.messages.append(message)
        peer.payloads.extend(payloads)
        peer.size_bytes += message.payload_bytes

    def spawn(self, group: GroupId, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Run work of a member as a task; a `StorageError` stops the node, any other error that member."""
        task = self._run(group, work, *arguments)
        try:
            self._tasks.create_task(task)
        except RuntimeError:  # the node is ending, and takes no more work
            task.close()

    async def _run(self, group: GroupId, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        try:
            await work(*arguments)
        except StorageError:
            raise
        except Exception as error:
            if not self.contain(group, error):
                raise

    def contain(self, group: GroupId, error: Exception) -> bool:
        """Stop one member because an unexpected error escaped its code; see `Host.contain`."""
        if self._on_fault is None:
            return False
        member = self._members.pop(group, None)
        self._awake.pop(group, None)
        if member is not None:
            member.hand_over()
            member.abandon()
            self._on_fault(member, error)
        return True

    def fail(self, error: StorageError) -> None:
        """Stop all groups of this node immediately: its disk can no longer be trusted (R5)."""
        if self._failure is not None:
            return
        self._failure = error
        logger.error("storage failed, node stops", extra=facts(node=self._node, error=str(error)))
        for member in self._members.values():
            member.abandon()
        self._members.clear()
        self._awake.clear()
        self._failed.set()
        if self._on_failure is not None:
            self._on_failure(error)

    def deadline_changed(self, member: Scheduled) -> None:
        """Check a member's deadline at every tick; stop checking it if it has none."""
        if member.next_deadline_ms is None:
            self._awake.pop(member.group, None)
        elif member.group in self._members:
            self._awake[member.group] = self._members[member.group]
            self._timer.fire_by(member.next_deadline_ms + self._patience_ms(self._members[member.group]))

    def _patience_ms(self, member: Member) -> int:
        """Return how much later than its deadline a member is ticked."""
        if member.group not in self._patient:
            return 0
        if member.leader is not None:
            self._patient.discard(member.group)
            return 0
        return PATIENCE_TIMEOUTS * self._settings.election_timeout_ms

    # -- envelopes -------------------------------------------------------------------------------

    def _send_all(self) -> None:
        dirty, self._dirty = self._dirty, []
        for node in dirty:
            peer = self._peers[node]
            if peer.messages:
                self._send(node, peer)

    def _send(self, to: NodeId, peer: _Peer) -> None:
        messages, payloads = peer.messages, peer.payloads
        peer.messages, peer.payloads, peer.size_bytes = [], [], 0
        peer.sent_ms = self._clock.monotonic_ms()
        self.envelopes_sent += 1
        self._network.send(to, encode_envelope(self._incarnation, messages, payloads))

    def _handle_envelope(self, from_: NodeId, data: memoryview) -> None:
        try:
            incarnation, messages = decode_envelope(data)
        except DecodeError as error:
            self._refuse(from_, error)
            return
        self._hear(from_, incarnation)
        for received in messages:
            member = self._members.get(received.message.group)
            if member is not None:
                self._deliver(member, from_, received)
            else:
                self._keep_early(from_, received.message)

    def _keep_early(self, from_: NodeId, message: GroupMessage) -> None:
        """Keep a request for a vote until its group is opened: a new group's members are opened at about the same time.

        For the members it is a message that was slow.
        """
        if isinstance(message.plain, VoteRequest) and self._knows(from_):
            if message.group not in self._early and len(self._early) >= EARLY_GROUPS_MAX:
                del self._early[next(iter(self._early))]
            self._early.setdefault(message.group, {})[from_] = message

    def _deliver_early(self, group: GroupId) -> None:
        early, member = self._early.pop(group, {}), self._members.get(group)
        for node, message in early.items():
            if member is not None:
                self._deliver(member, node, ReceivedMessage(message, [], memoryview(b"")))

    def _deliver(self, member: Member, from_: NodeId, received: ReceivedMessage) -> None:
        """Pass a message to its member; one that it cannot read does not keep the others from theirs."""
        try:
            member.receive(from_, received)
        except DecodeError as error:
            self._refuse(from_, error)
        except Exception as error:
            if not self.contain(member.group, error):
                raise

    def _refuse(self, from_: NodeId, error: DecodeError) -> None:
        self.envelopes_refused += 1
        self._warnings.warn(f"envelope {from_}", "replication envelope refused", sender=from_, reason=str(error))

    # -- liveness --------------------------------------------------------------------------------

    def _peer(self, node: NodeId) -> _Peer:
        peer = self._peers.get(node)
        if peer is None:
            now_ms = self._clock.monotonic_ms()
            peer = self._peers[node] = _Peer(now_ms)
            self._timer.fire_by(now_ms)
        return peer

    def _hear(self, node: NodeId, incarnation: int) -> None:
        peer = self._peers.get(node)
        if peer is None:
            if not self._knows(node):
                return  # strangers cost nothing; a leader that a blank member answers becomes a peer by that answer
            peer = self._peer(node)
        peer.heard_ms = self._clock.monotonic_ms()
        if peer.incarnation != incarnation:
            if peer.incarnation is not None:
                self._wake_shared(node)
            peer.incarnation = incarnation
        peer.is_alive = True

    def _handle_lost(self, node: NodeId) -> None:
        """Handle a broken connection: let members resend soon, and wake hibernating groups."""
        for member in list(self._members.values()):
            if member.has_member(node):
                self._patient.discard(member.group)
                member.peer_lost(node)
                member.wake()

    def _wake_shared(self, node: NodeId) -> None:
        for member in list(self._members.values()):
            if member.has_member(node):
                member.wake()

    # -- ticks -----------------------------------------------------------------------------------

    def _handle_tick(self, now_ms: int) -> int:
        """Tick the members and peers that are due; return the next deadline."""
        for member in list(self._awake.values()):
            deadline_ms = member.next_deadline_ms
            if deadline_ms is not None and deadline_ms + self._patience_ms(member) <= now_ms:
                self._patient.discard(member.group)
                member.tick(now_ms)
        next_ms = now_ms + self._settings.heartbeat_interval_ms
        for node in sorted(self._peers):
            peer = self._peers[node]
            self._check_peer(node, peer, now_ms)
            next_ms = min(next_ms, peer.sent_ms + self._settings.heartbeat_interval_ms)
        for member in self._awake.values():
            deadline_ms = member.next_deadline_ms
            if deadline_ms is not None and deadline_ms < next_ms:
                next_ms = min(next_ms, deadline_ms + self._patience_ms(member))
        return next_ms

    def _check_peer(self, node: NodeId, peer: _Peer, now_ms: int) -> None:
        """Send a node-level heartbeat if one is due, and detect when the other node stops sending."""
        if not peer.messages and now_ms - peer.sent_ms >= self._settings.heartbeat_interval_ms:
            self._send(node, peer)
        if peer.is_alive and now_ms - peer.heard_ms > self._settings.election_timeout_ms:
            peer.is_alive = False
            self._wake_shared(node)
