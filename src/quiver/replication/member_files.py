"""Open the files of one member and build the core's initial state from them.

The member's directory holds the log, the hard state (term, vote, configurations, a recovery mark) and the snapshots.
They are written in an order that makes every crash recoverable here:
- a configuration is saved in the hard state *before* its entry is appended to the log, with the entry's term. So the
  configurations of the log are known without reading it, and one whose entry is not in the log is recognised. A group's
  first entry, which repeats the configuration that all members were made with, needs no save;
- a snapshot that is not part of the log was being installed: the log restarts after it;
- a checkpoint only shortens replay: it is used if its last entry is in the log, and otherwise ignored. If the snapshot
  at the log's start cannot be read, the checkpoint replaces it;
- damage is marked in the hard state before it is cut off. Until the entries are back the member does not vote (R18),
  not even after another restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from quiver.clock import Clock
from quiver.config import LogSettings, ReplicationSettings
from quiver.errors import DamageError, DecodeError, StorageError
from quiver.model import TERM_MAX, Index, NodeId, Term
from quiver.raft import TERM_FREE_MAX, Configuration, InitialState, RaftConfig
from quiver.replication.entries import KnownConfiguration
from quiver.storage import (
    Disk,
    DiskSpace,
    Executor,
    HardStateFile,
    Lane,
    Log,
    LogTimings,
    SnapshotStore,
    StoredHardState,
    StoredSnapshot,
    TailBudget,
)
from quiver.storage.data_key import open_cipher
from quiver.storage.hardstate import write_new_hard_state
from quiver.storage.log_directory import write_new_log

if TYPE_CHECKING:
    from quiver.security.key_ring import KeyRing
    from quiver.storage.sealing import LogCipher

T = TypeVar("T")

TERM_REPLACING = Term(TERM_FREE_MAX // 2)
"""The term in which a member continues whose saved one is impossible."""


class Membership(msgspec.Struct, frozen=True):
    """The driver's part of the hard state, beside term and vote."""

    configurations: tuple[KnownConfiguration, ...] = ()
    recover_until: Index | None = None
    """The last entry that this member may have acknowledged and then lost."""
    is_suspect: bool = False
    """Stored bytes failed their checksum when they were read: the next start reads and verifies all of them."""
    is_joining: bool = False
    """This member started without a log and has not caught up with the group that it joins."""


class SnapshotState(msgspec.Struct, frozen=True):
    """The content of a snapshot file: the state machine's part and the driver's."""

    configuration: Configuration
    machine: bytes


class MemberFiles(msgspec.Struct):
    """The open files of one member, and the state read from them."""

    log: Log
    hard_state: HardStateFile
    snapshots: SnapshotStore
    initial: InitialState
    membership: Membership
    machine_state: bytes
    applied_index: Index
    warnings: tuple[str, ...]


class MemberStorage(msgspec.Struct, frozen=True):
    """The seams through which a member's files are accessed."""

    disk: Disk
    executor: Executor
    clock: Clock
    settings: LogSettings
    tails: TailBudget
    timings: LogTimings
    keys: KeyRing | None = None
    """The keys of this node, if it has any; without them encrypted logs cannot be opened."""
    space: DiskSpace | None = None

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run the blocking work of opening a member; it must not delay the writes of open members."""
        return self.executor.submit(work, Lane.RECOVERY)

    def open_log(
        self,
        directory: str,
        *,
        verify: bool,
        cipher: LogCipher | None,
        discard_damage: bool = False,
        is_synced: bool = False,
    ) -> Log:
        """Open a log; blocks."""
        return Log.open(
            directory,
            disk=self.disk,
            executor=self.executor,
            clock=self.clock,
            settings=self.settings,
            tails=self.tails,
            timings=self.timings,
            cipher=cipher,
            space=self.space,
            discard_damage=discard_damage,
            verify=verify,
            is_synced=is_synced,
        )


def write_new_files(disk: Disk, directory: str, *, bootstrap: Configuration | None, now_ms: int) -> None:
    """Write the files of a new member, not encrypted, into an empty directory; blocks. The caller makes them durable.

    `bootstrap` names the first members of a new group; without it the member joins a group that exists.
    """
    write_new_log(disk, directory, now_ms)
    write_new_hard_state(disk, directory, _first_hard_state(bootstrap))


async def open_files(
    storage: MemberStorage,
    directory: str,
    *,
    bootstrap: Configuration | None,
    is_encrypted: bool = False,
    is_synced: bool = False,
) -> MemberFiles:
    """Open or create a member's files. `bootstrap` names the first members of a new group, once in its life.

    With `is_encrypted` new files are encrypted; existing ones say themselves whether they are. With `is_synced` the
    files are new and known to be durable: they are not synced again.

    Raises:
        StorageError: the disk failed, or the files cannot be used.
    """
    try:
        return await _open_files(storage, directory, bootstrap, is_encrypted=is_encrypted, is_synced=is_synced)
    except OSError as error:
        raise StorageError(f"{directory}: cannot open the files of this member: {error}") from error


async def _open_files(
    storage: MemberStorage, directory: str, bootstrap: Configuration | None, *, is_encrypted: bool, is_synced: bool
) -> MemberFiles:
    file = HardStateFile(storage.disk, directory)
    async with AsyncExitStack() as opened:  # a retry must not find handles that are still open
        read = partial(_read, storage, directory, file, is_encrypted=is_encrypted, is_synced=is_synced)
        files = await _settle(storage, file, await storage.submit(read), bootstrap, opened)
        opened.pop_all()
    return files


class _Found(NamedTuple):
    """What the files of a member say, before anything that a crash or damage left is settled."""

    cipher: LogCipher | None
    saved: StoredHardState | None
    is_suspect: bool
    log: Log
    snapshots: SnapshotStore
    checkpoint: tuple[StoredSnapshot | None, tuple[str, ...]]
    newest: tuple[StoredSnapshot | None, tuple[str, ...]] | DamageError


def _read(
    storage: MemberStorage, directory: str, file: HardStateFile, *, is_encrypted: bool, is_synced: bool
) -> _Found:
    """Read all files of a member; blocks. One piece of work: to hand over each part to a thread costs as much as it."""
    # The cipher first: a member without its key stays exactly as it is.
    cipher = open_cipher(storage.disk, directory, storage.keys, is_encrypted=is_encrypted)
    saved = file.load()
    is_suspect = saved is not None and decode_membership(saved.membership).is_suspect
    # Nothing has to be closed after an error: a log to which nothing was written holds no file open.
    log = storage.open_log(directory, verify=is_suspect, cipher=cipher, is_synced=is_synced)
    snapshots = SnapshotStore(storage.disk, directory, cipher=cipher)
    checkpoint = snapshots.load_checkpoint()
    newest: tuple[StoredSnapshot | None, tuple[str, ...]] | DamageError
    try:
        newest = snapshots.load_newest()
    except DamageError as error:
        newest = error
    return _Found(cipher, saved, is_suspect, log, snapshots, checkpoint, newest)


async def _settle(
    storage: MemberStorage,
    file: HardStateFile,
    found: _Found,
    bootstrap: Configuration | None,
    opened: AsyncExitStack,
) -> MemberFiles:
    submit, saved, log = storage.submit, found.saved, found.log
    opened.push_async_callback(log.close)
    hard_state = saved if saved is not None else await submit(partial(_make_hard_state, file, log, bootstrap))
    findings: tuple[str, ...] = ()
    if hard_state.term > TERM_MAX:
        hard_state, findings = await submit(partial(_replace_impossible_term, file, log, hard_state))
    if log.damage:
        hard_state, log = await _cut_damage(storage, log, file, hard_state, found.cipher)
        opened.push_async_callback(log.close)
    base = await _find_base(log, found)
    membership = decode_membership(hard_state.membership)
    membership = Membership(
        _configurations_in_log(log, membership, base.snapshot),
        membership.recover_until,
        is_joining=membership.is_joining,
    )
    if found.is_suspect:  # any damage is cut off by now
        await submit(partial(file.save, _with_membership(hard_state, membership)))
    newest = base.newest
    return MemberFiles(
        log=log,
        hard_state=file,
        snapshots=found.snapshots,
        initial=_initial_state(log, hard_state, membership, newest),
        membership=membership,
        machine_state=decode_snapshot_state(newest.state).machine if newest else b"",
        applied_index=newest.last_index if newest else Index(0),
        warnings=(*findings, *log.warnings, *base.warnings),
    )


def make_raft_config(node: NodeId, settings: ReplicationSettings) -> RaftConfig:
    """Return the core's settings for a member on `node`."""
    return RaftConfig(
        id=node,
        election_timeout_ms=settings.election_timeout_ms,
        heartbeat_interval_ms=settings.heartbeat_interval_ms,
        append_bytes_max=settings.append_bytes_max,
        inflight_messages_max=settings.inflight_messages_max,
        inflight_bytes_max=settings.inflight_bytes_max,
        uncommitted_bytes_max=settings.uncommitted_bytes_max,
        hibernation=settings.hibernation,
    )


def encode_membership(membership: Membership) -> bytes:
    """Encode the driver's part of the hard state."""
    return msgspec.msgpack.encode(membership)


def decode_membership(data: bytes) -> Membership:
    """Decode what `encode_membership` returned; the hard state's checksum has been verified."""
    return msgspec.msgpack.decode(data, type=Membership) if data else Membership()


def encode_snapshot_state(state: SnapshotState) -> bytes:
    """Encode the content of a snapshot file."""
    return msgspec.msgpack.encode(state)


def join_snapshot_state(configuration: Configuration, machine_parts: Sequence[bytes]) -> bytes:
    """Return what `encode_snapshot_state` returns for a machine's state in parts, which are copied only once."""
    empty = encode_snapshot_state(SnapshotState(configuration, b""))
    head = empty.removesuffix(_bytes_header(0)) + _bytes_header(sum(map(len, machine_parts)))
    return b"".join((head, *machine_parts))  # releases the interpreter's lock while it copies


def _bytes_header(count: int) -> bytes:
    """Return the header of msgpack bytes."""
    if count < 1 << 8:
        return b"\xc4" + count.to_bytes(1, "big")
    return b"\xc5" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xc6" + count.to_bytes(4, "big")


def decode_snapshot_state(data: bytes) -> SnapshotState:
    """Decode what `encode_snapshot_state` returned.

    Raises:
        DecodeError: the bytes are malformed.
    """
    try:
        return msgspec.msgpack.decode(data, type=SnapshotState)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DecodeError(f"malformed snapshot state: {error}") from None


def _make_hard_state(file: HardStateFile, log: Log, bootstrap: Configuration | None) -> StoredHardState:
    if log.end_index > 1:
        raise DamageError(
            f"{log.directory}: the log has entries but no hard state, so this member's vote is unknown; "
            "remove the replica and add it again under a new node id"
        )
    hard_state = _first_hard_state(bootstrap)
    file.save(hard_state)
    return hard_state


def _first_hard_state(bootstrap: Configuration | None) -> StoredHardState:
    known = () if bootstrap is None else (KnownConfiguration(Index(0), Term(0), bootstrap),)
    return StoredHardState(membership=encode_membership(Membership(known, is_joining=bootstrap is None)))


def _replace_impossible_term(
    file: HardStateFile, log: Log, hard_state: StoredHardState
) -> tuple[StoredHardState, tuple[str, ...]]:
    """Replace a saved term that no election can have reached: a forged message brought it, to a program without bounds.

    Every member takes the same term in its place. It is far above every term that the group ever had, so that nobody
    can have voted in it, and low enough to be believed by members that the forged message did not reach.
    """
    starts = log.term_starts()
    if starts and starts[-1][1] >= TERM_REPLACING:
        raise DamageError(
            f"{log.directory}: the log has entries of term {starts[-1][1]}, which no election can have reached: they "
            "are forged; remove the replica and add it again under a new node id"
        )
    finding = (
        f"the saved term {hard_state.term} is one that no election can have reached, so a forged message brought it; "
        f"this member continues in term {TERM_REPLACING}"
    )
    hard_state = msgspec.structs.replace(hard_state, term=TERM_REPLACING, vote=None)
    file.save(hard_state)  # on disk after this: the term in which this member has no vote
    return hard_state, (finding,)


async def _cut_damage(
    storage: MemberStorage, log: Log, file: HardStateFile, hard_state: StoredHardState, cipher: LogCipher | None
) -> tuple[StoredHardState, Log]:
    membership = decode_membership(hard_state.membership)
    lost_until = max(damage.end_index_max for damage in log.damage) - 1
    membership = msgspec.structs.replace(
        membership, recover_until=Index(max(lost_until, membership.recover_until or 0))
    )
    hard_state = _with_membership(hard_state, membership)
    await storage.submit(partial(file.save, hard_state))
    await log.close()
    open_log = partial(
        storage.open_log, log.directory, verify=membership.is_suspect, cipher=cipher, discard_damage=True
    )
    return hard_state, await storage.submit(open_log)


def _with_membership(hard_state: StoredHardState, membership: Membership) -> StoredHardState:
    return msgspec.structs.replace(hard_state, membership=encode_membership(membership))


class _Base(msgspec.Struct, frozen=True):
    """The snapshot at a log's start (None: the log is complete), the newest state usable with it, and warnings."""

    snapshot: StoredSnapshot | None
    newest: StoredSnapshot | None
    warnings: tuple[str, ...]


async def _find_base(log: Log, found: _Found) -> _Base:
    checkpoint, findings = found.checkpoint
    try:
        if isinstance(found.newest, DamageError):
            raise found.newest
        snapshot, warnings = found.newest
        if snapshot is not None and log.term_at(snapshot.last_index) != snapshot.last_term:
            await _restart_after(log, snapshot)
    except DamageError as error:
        if checkpoint is None or not _belongs_to(log, checkpoint):
            raise
        return _Base(checkpoint, checkpoint, (*findings, f"{error}; the checkpoint replaces it"))
    is_newer = checkpoint is not None and (snapshot is None or checkpoint.last_index > snapshot.last_index)
    is_shortcut = checkpoint is not None and is_newer and _belongs_to(log, checkpoint)
    return _Base(snapshot, checkpoint if is_shortcut else snapshot, (*findings, *warnings))


def _belongs_to(log: Log, checkpoint: StoredSnapshot) -> bool:
    """Return whether a checkpoint certainly belongs to this log: term and offset at its last index agree."""
    if log.term_at(checkpoint.last_index) != checkpoint.last_term:
        return False
    return log.offset_after(checkpoint.last_index) == checkpoint.end_offset


async def _restart_after(log: Log, snapshot: StoredSnapshot) -> None:
    """Restart the log after a snapshot whose installation was interrupted by a crash."""
    if snapshot.last_index < log.first_index - 1:
        raise DamageError(
            f"{log.directory}: the log starts at index {log.first_index} but the newest intact snapshot ends at "
            f"{snapshot.last_index}: the entries in between are lost on this node"
        )
    await log.reset(
        first_index=Index(snapshot.last_index + 1),
        first_offset=snapshot.end_offset,
        previous_term=snapshot.last_term,
    )


def _configurations_in_log(
    log: Log, membership: Membership, base: StoredSnapshot | None
) -> tuple[KnownConfiguration, ...]:
    """Return the configurations whose entries the log holds, or held before its start."""
    known = [item for item in membership.configurations if _is_in_log(log, item)]
    if base is not None:
        known = [item for item in known if item.index > base.last_index]
        configuration = decode_snapshot_state(base.state).configuration
        known.insert(0, KnownConfiguration(base.last_index, base.last_term, configuration))
    return tuple(known)


def _is_in_log(log: Log, item: KnownConfiguration) -> bool:
    return item.index < log.first_index or log.term_at(item.index) == item.term


def _initial_state(
    log: Log, hard_state: StoredHardState, membership: Membership, snapshot: StoredSnapshot | None
) -> InitialState:
    last_index = Index(log.end_index - 1)
    committed = max(hard_state.commit_index, snapshot.last_index if snapshot else 0)
    vote: NodeId | None = hard_state.vote
    return InitialState(
        term=hard_state.term,
        vote=vote,
        first_index=log.first_index,
        last_index=last_index,
        base_term=log.term_at(Index(log.first_index - 1)) or Term(0),
        terms=tuple(log.term_starts()),
        commit=Index(min(committed, last_index)),
        configurations=tuple((item.index, item.configuration) for item in membership.configurations),
        recover_until=membership.recover_until,
        is_joining=membership.is_joining,
    )
