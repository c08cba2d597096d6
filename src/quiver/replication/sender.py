"""Send what the core permits: messages, entries read from the log, and snapshots.

The core holds no entries. It gives a permission (`SendEntries`, `SendSnapshot`); this module reads the bytes, posts
them, and reports to the core what was sent, so that it can permit more. Bytes in memory are sent in the same turn of
the loop; bytes on disk are read by a task first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from quiver.errors import DamageError, LogClosedError, StorageError, UnavailableError
from quiver.model import GroupId, Index, NodeId
from quiver.raft import (
    Append,
    InstallSnapshot,
    Output,
    Raft,
    RaftMessage,
    SendEntries,
    SendSnapshot,
    SnapshotMetadata,
)
from quiver.record import Batch
from quiver.replication.codec import AppendHead, GroupMessage
from quiver.replication.interfaces import Host
from quiver.replication.member_files import decode_snapshot_state
from quiver.replication.persistence import Persistence
from quiver.storage import Log


class MemberSender:
    """Send the messages of one member."""

    def __init__(
        self,
        group: GroupId,
        *,
        host: Host,
        raft: Raft,
        log: Log,
        persistence: Persistence,
        run: Callable[[Callable[[], Any]], Awaitable[Any]],
        carry_out: Callable[[Output], None],
        on_damage: Callable[[StorageError], None],
    ) -> None:
        self._group = group
        self._host = host
        self._raft = raft
        self._log = log
        self._persistence = persistence
        self._run = run
        self._carry_out = carry_out
        self._on_damage = on_damage

    def send(self, to: NodeId, message: RaftMessage) -> None:
        """Send a message that has no payload."""
        assert not isinstance(message, Append | InstallSnapshot), "those are sent with their payload"
        self._host.post(to, GroupMessage(self._group, plain=message))

    def send_entries(self, permission: SendEntries) -> None:
        """Send the permitted entries, now or as soon as they are read from disk."""
        found = self._log.read_entries_nowait(
            permission.first_index, end_index=permission.end_index, bytes_max=permission.bytes_max
        )
        if found is None:
            self._host.spawn(self._group, self._send_from_disk, permission)
        else:
            self._send_append(permission, found)

    async def send_snapshot(self, permission: SendSnapshot) -> None:
        """Send the oldest snapshot that covers the permitted index."""
        try:
            snapshot = await self._run(partial(self._persistence.load_snapshot, permission.needed_index))
        except LogClosedError:
            return  # the member is closed
        if snapshot is None or self._raft.term != permission.term:  # a message must not carry a term that has ended
            self._carry_out(self._raft.snapshot_failed(permission.to, ticket=permission.ticket))
            return
        configuration = decode_snapshot_state(snapshot.state).configuration
        metadata = SnapshotMetadata(snapshot.last_index, snapshot.last_term, configuration)
        message = InstallSnapshot(permission.term, metadata, permission.round)
        payload = snapshot.encode()
        self._host.post(permission.to, GroupMessage(self._group, len(payload), plain=message), [payload])
        self._carry_out(self._raft.snapshot_sent(permission.to, ticket=permission.ticket))

    async def _send_from_disk(self, permission: SendEntries) -> None:
        try:
            found = await self._log.read_entries(
                permission.first_index, end_index=permission.end_index, bytes_max=permission.bytes_max
            )
        except DamageError as error:
            self._on_damage(error)  # else the member that needs these entries would wait forever
            return
        except UnavailableError:
            return  # the log is closed, and with it this member
        except StorageError:
            found = []  # removed by compaction, or unreadable for now: the core sees that nothing was sent
        if permission.to in self._raft.configuration.learners:
            await self._host.catch_up_limiter.wait_turn(sum(len(batch.data) for batch in found))
        self._send_append(permission, found)

    def _send_append(self, permission: SendEntries, batches: list[Batch]) -> None:
        payloads = [batch.data for batch in batches]
        size_bytes = sum(map(len, payloads))
        is_complete = bool(batches) or permission.first_index == permission.end_index  # none requested: a probe
        # The term may have ended during the read: an append of an ended term is not sent.
        if is_complete and self._raft.term == permission.term:
            head = AppendHead(
                permission.term, permission.prev_index, permission.prev_term, permission.commit, permission.round
            )
            self._host.post(permission.to, GroupMessage(self._group, size_bytes, append=head), payloads)
        end_index = Index(permission.first_index + len(batches))
        output = self._raft.sent(permission.to, ticket=permission.ticket, end_index=end_index, size_bytes=size_bytes)
        if output.send or output.send_snapshot:
            self._carry_out(output)
