"""All the Raft groups of one node over one network: routing, parcels, ticks, and who is alive.

What the members have for a node in one turn of the loop leaves together as one parcel, in that turn. Once
per heartbeat interval every other node gets a parcel, if need be an empty one: it tells that this node
is alive for all their common groups, sleeping ones included. A node that is silent for an election timeout,
or that comes back as a new process, has the groups shared with it woken.

An asynchronous context manager: members live inside it, and the first failure inside ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any

import msgspec

from quiver.clock import Clock, Rng
from quiver.config import LogSettings, ReplicationSettings
from quiver.errors import DecodeError, RequestError, StorageError
from quiver.logs import facts
from quiver.model import Buffer, GroupId, NodeId
from quiver.raft import Configuration, Safeguard
from quiver.replication.codec import Item, decode_parcel, encode_parcel
from quiver.replication.deadline_timer import DeadlineTimer
from quiver.replication.host import Scheduled
from quiver.replication.machine import StateMachine
from quiver.replication.member import Member
from quiver.replication.network import Network
from quiver.replication.opening import Storage, open_files
from quiver.replication.rate_limiter import RateLimiter
from quiver.replication.status import MemberStatus
from quiver.storage import Disk, Executor, TailBudget

logger = logging.getLogger(__name__)

TICKS_PER_HEARTBEAT = 4
"""How often, at the most, deadlines are looked at in one heartbeat interval."""
PARCEL_BYTES_MAX = 4 * 1024 * 1024
"""Size at which what goes to a node in one turn is split; one message may exceed it."""


class PeerStatus(msgspec.Struct, frozen=True):
    """Another node as this one sees it."""

    node: NodeId
    is_alive: bool
    silent_ms: int


class ReplicatorStatus(msgspec.Struct, frozen=True):
    """A snapshot of a node's groups."""

    members: tuple[MemberStatus, ...]
    peers: tuple[PeerStatus, ...]
    parcels_sent: int
    parcels_refused: int


class _Peer:
    """What is known of, and waits for, another node."""

    __slots__ = ("heard_ms", "incarnation", "is_alive", "items", "payloads", "sent_ms", "size_bytes")

    def __init__(self, now_ms: int) -> None:
        self.heard_ms = now_ms
        self.sent_ms = 0
        self.incarnation: int | None = None
        self.is_alive = True
        self.items: list[Item] = []
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
        disabled: frozenset[Safeguard] = frozenset(),
    ) -> None:
        self._node = node
        self._incarnation = incarnation
        self._network = network
        self._storage = Storage(disk, executor, clock, log_settings, TailBudget(log_settings.tail_caches_bytes_max))
        self._clock = clock
        self._rng = rng
        self._settings = settings
        self._on_failure = on_failure
        self._disabled = disabled
        self._members: dict[GroupId, Member] = {}
        self._awake: dict[GroupId, Member] = {}
        self._peers: dict[NodeId, _Peer] = {}
        self._dirty: list[NodeId] = []
        self._tasks = asyncio.TaskGroup()
        spacing_ms = max(1, settings.heartbeat_interval_ms // TICKS_PER_HEARTBEAT)
        self._alarm = DeadlineTimer(clock, spacing_ms=spacing_ms, action=self._handle_tick)
        self.pace = RateLimiter(clock, bytes_per_second=settings.catch_up_bytes_per_second)
        self._failure: StorageError | None = None
        self._failed = asyncio.Event()
        self._parcels_sent = 0
        self._parcels_refused = 0

    # -- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Replicator:
        """Begin to receive and to tick."""
        await self._tasks.__aenter__()
        self._network.start(self._handle_parcel, self._handle_lost)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every member and wait for what is under way."""
        self._alarm.close()
        self._awake.clear()
        for member in list(self._members.values()):
            await member.close()
        self._members.clear()
        await self._tasks.__aexit__(kind, error, trace)

    async def open_member(
        self, group: GroupId, directory: str, machine: StateMachine, *, bootstrap: Configuration | None = None
    ) -> Member:
        """Take part in a group with the files in `directory`; `bootstrap` only when the group is made.

        Raises:
            RequestError: the group is open already.
            StorageError: its files cannot be used, or the disk has failed under another group.
        """
        if group in self._members:
            raise RequestError(f"group {group} is open already")
        files = await open_files(self._storage, directory, bootstrap=bootstrap)
        if self._failure is not None:
            raise StorageError(f"not opened: {self._failure}")
        for warning in files.warnings:
            logger.warning("log recovered with a finding", extra=facts(group=group, finding=warning))
        member = Member(
            group,
            files,
            machine,
            host=self,
            executor=self._storage.executor,
            clock=self._clock,
            rng=self._rng,
            settings=self._settings,
            disabled=self._disabled,
        )
        self._members[group] = member
        self.deadline_changed(member)
        return member

    async def make_member(self, directory: str, *, bootstrap: Configuration | None = None) -> None:
        """Make the files of a new member without taking part yet. On disk after this returns: its hard state.

        Changes nothing if they are there. `bootstrap` as for `open_member`, which then needs it no more.

        Raises:
            StorageError: the files cannot be made or used.
        """
        files = await open_files(self._storage, directory, bootstrap=bootstrap)
        await files.log.close()
        files.hard_state.close()

    async def close_member(self, group: GroupId) -> None:
        """Stop taking part in a group; its files stay. A node whose disk has failed takes part in none."""
        member = self._members.pop(group, None)
        self._awake.pop(group, None)
        if member is not None:
            await member.close()

    async def wait_failed(self) -> StorageError:
        """Wait until the disk has failed under a member; the node must end then, with a non-zero status."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    def status(self) -> ReplicatorStatus:
        """Return a snapshot for people and metrics."""
        now_ms = self._clock.monotonic_ms()
        return ReplicatorStatus(
            members=tuple(self._members[group].status() for group in sorted(self._members)),
            peers=tuple(
                PeerStatus(node, peer.is_alive, now_ms - peer.heard_ms) for node, peer in sorted(self._peers.items())
            ),
            parcels_sent=self._parcels_sent,
            parcels_refused=self._parcels_refused,
        )

    # -- for members -----------------------------------------------------------------------------

    @property
    def id(self) -> NodeId:
        """Return this node."""
        return self._node

    def post(self, to: NodeId, item: Item, payloads: Sequence[Buffer] = ()) -> None:
        """Put a message into the next parcel to a node, which leaves in this turn of the loop."""
        peer = self._peer(to)
        if peer.size_bytes + item.payload_bytes > PARCEL_BYTES_MAX:
            self._send(to, peer)
        if not peer.items:
            if not self._dirty:
                asyncio.get_running_loop().call_soon(self._send_all)
            self._dirty.append(to)
        peer.items.append(item)
        peer.payloads.extend(payloads)
        peer.size_bytes += item.payload_bytes

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work as a task of this node."""
        self._tasks.create_task(work)

    def fail(self, error: StorageError) -> None:
        """Stop all groups of this node at once: its disk can no longer be trusted (R5)."""
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
        """Look at a member's deadline at every tick, or no longer."""
        if member.next_deadline_ms is None:
            self._awake.pop(member.group, None)
        elif member.group in self._members:
            self._awake[member.group] = self._members[member.group]
            self._alarm.ring_by(member.next_deadline_ms)

    # -- parcels ---------------------------------------------------------------------------------

    def _send_all(self) -> None:
        dirty, self._dirty = self._dirty, []
        for node in dirty:
            peer = self._peers[node]
            if peer.items:
                self._send(node, peer)

    def _send(self, to: NodeId, peer: _Peer) -> None:
        items, payloads = peer.items, peer.payloads
        peer.items, peer.payloads, peer.size_bytes = [], [], 0
        peer.sent_ms = self._clock.monotonic_ms()
        self._parcels_sent += 1
        self._network.send(to, encode_parcel(self._incarnation, items, payloads))

    def _handle_parcel(self, from_: NodeId, data: memoryview) -> None:
        try:
            incarnation, received = decode_parcel(data)
            self._hear(from_, incarnation)
            for message in received:
                member = self._members.get(message.item.group)
                if member is not None:
                    member.receive(from_, message)
        except DecodeError as error:
            self._parcels_refused += 1
            logger.warning("parcel refused", extra=facts(sender=from_, reason=str(error)))

    # -- who is alive ----------------------------------------------------------------------------

    def _peer(self, node: NodeId) -> _Peer:
        peer = self._peers.get(node)
        if peer is None:
            now_ms = self._clock.monotonic_ms()
            peer = self._peers[node] = _Peer(now_ms)
            self._alarm.ring_by(now_ms)
        return peer

    def _hear(self, node: NodeId, incarnation: int) -> None:
        peer = self._peer(node)
        peer.heard_ms = self._clock.monotonic_ms()
        if peer.incarnation != incarnation:
            if peer.incarnation is not None:
                self._wake_shared(node)
            peer.incarnation = incarnation
        peer.is_alive = True

    def _handle_lost(self, node: NodeId) -> None:
        """Take note of a broken connection: resend soon, and do not let groups sleep over it."""
        for member in list(self._members.values()):
            if member.has_member(node):
                member.peer_lost(node)
                member.wake()

    def _wake_shared(self, node: NodeId) -> None:
        for member in list(self._members.values()):
            if member.has_member(node):
                member.wake()

    # -- ticks -----------------------------------------------------------------------------------

    def _handle_tick(self, now_ms: int) -> int:
        """Do what is due; return when to look again."""
        for member in list(self._awake.values()):
            deadline_ms = member.next_deadline_ms
            if deadline_ms is not None and deadline_ms <= now_ms:
                member.tick(now_ms)
        next_ms = now_ms + self._settings.heartbeat_interval_ms
        for node in sorted(self._peers):
            peer = self._peers[node]
            self._watch(node, peer, now_ms)
            next_ms = min(next_ms, peer.sent_ms + self._settings.heartbeat_interval_ms)
        for member in self._awake.values():
            deadline_ms = member.next_deadline_ms
            if deadline_ms is not None and deadline_ms < next_ms:
                next_ms = deadline_ms
        return next_ms

    def _watch(self, node: NodeId, peer: _Peer, now_ms: int) -> None:
        """Tell a node that this one lives, and notice when it no longer says so itself."""
        if not peer.items and now_ms - peer.sent_ms >= self._settings.heartbeat_interval_ms:
            self._send(node, peer)
        if peer.is_alive and now_ms - peer.heard_ms > self._settings.election_timeout_ms:
            peer.is_alive = False
            self._wake_shared(node)
