"""A node's data directory: its layout, the lock that keeps other processes out, and the identity of its owner.

The file `identity.json` is written when the node first starts, and again when it has joined the cluster. From then on
the directory rejects every other node id and cluster id, and a node whose metadata is gone knows that it must not start
from scratch as if it had never been a member (R22). The file also has the highest feature level that the node has seen
in its cluster, so that an older program does not touch the directory. The operating system releases the lock when its
holder dies.

Invariant: an existing identity file is complete: it is renamed into place after it was synced.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from types import TracebackType

import msgspec

from quiver.errors import ConfigError, DamageError
from quiver.features import LEVEL_MAX, LEVEL_MIN, explain_level
from quiver.model import NodeId
from quiver.storage.disk import Disk
from quiver.storage.flush import write_all

LOCK_NAME = "lock"
IDENTITY_NAME = "identity.json"
FORMAT_VERSION = 2
"""Version of the identity file; this program cannot read a newer one. Version 1 has no feature level."""
_TEMPORARY_NAME = IDENTITY_NAME + ".new"


def metadata_log(data: str) -> str:
    """Return the directory of the node's copy of the metadata log."""
    return f"{data}/metadata"


def metadata_database(data: str) -> str:
    """Return the path of the SQLite file to which the metadata log is applied."""
    return f"{data}/metadata.sqlite"


def replicas(data: str) -> str:
    """Return the directory that contains one directory per replica."""
    return f"{data}/groups"


class DirectoryLock:
    """Locks a data directory for this process inside a ``with`` block; real disks only."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._descriptor = -1

    def __enter__(self) -> DirectoryLock:
        """Acquire the lock.

        Raises:
            ConfigError: another process holds it.
        """
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        with suppress(PermissionError):  # the directory is another user's: what is in it is still this one's
            os.chmod(self._directory, 0o700)  # earlier programs made it readable for everybody
        descriptor = os.open(f"{self._directory}/{LOCK_NAME}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise ConfigError(
                f"{self._directory} is in use by another process (pid {holder}): "
                "stop it first, or pass another directory with --data"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock."""
        os.close(self._descriptor)


class NodeIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The node that a data directory belongs to."""

    node: NodeId
    cluster: str
    identity: str
    """Random; distinguishes this directory from another one created for the same node id."""
    is_member: bool = False
    """Whether this disk holds the node's member of the metadata group."""
    version: int = 1
    level: int = LEVEL_MIN
    """The highest feature level that the node has seen in its cluster."""
    program: str = ""
    """The version of the program that saw it."""
    lost: tuple[NodeId, ...] = ()
    """Nodes that `quiver recover` gave up for good: whoever shows up as one of them is refused."""


def load_identity(disk: Disk, directory: str, *, level_max: int = LEVEL_MAX) -> NodeIdentity | None:
    """Return the identity of a directory's owner; None if it is unclaimed. Blocking.

    Raises:
        DamageError: the file is not valid.
        ConfigError: a newer program wrote it, or this program is too old for its feature level.
    """
    path = f"{directory}/{IDENTITY_NAME}"
    if not disk.exists(path):
        return None
    file = disk.open(path)
    try:
        data = file.read(file.size(), 0)
    finally:
        file.close()
    try:
        # In two steps: a newer program's file may have fields that this one does not know.
        _check_version(path, msgspec.json.decode(data, type=_Versioned), level_max)
        return msgspec.json.decode(data, type=NodeIdentity)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DamageError(f"{path} is damaged: {error}; the owner of this data is unknown") from None


def save_identity(disk: Disk, directory: str, identity: NodeIdentity) -> None:
    """Replace the identity file. Blocking. On disk after this returns: `identity`."""
    disk.make_directory(directory)
    temporary = f"{directory}/{_TEMPORARY_NAME}"
    if disk.exists(temporary):
        disk.remove(temporary)  # left by a save that a crash interrupted
    file = disk.open(temporary, create=True)
    try:
        write_all(file, [msgspec.json.format(_encode(identity), indent=2) + b"\n"], 0)
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, f"{directory}/{IDENTITY_NAME}")
    disk.sync_directory(directory)


def _encode(identity: NodeIdentity) -> bytes:
    """Encode the oldest version that says it all: a program of feature level 1 may still have to read it."""
    if identity.level > LEVEL_MIN:
        return msgspec.json.encode(msgspec.structs.replace(identity, version=FORMAT_VERSION))
    fields = msgspec.to_builtins(identity)
    del fields["level"], fields["program"], fields["lost"]
    return msgspec.json.encode(fields)


def claim_directory(
    disk: Disk, directory: str, *, node: NodeId, cluster: str, fresh: str, level_max: int = LEVEL_MAX
) -> NodeIdentity:
    """Return the identity of this node's directory; claim an unclaimed one with identity `fresh`. Blocking.

    Raises:
        ConfigError: it belongs to another node or cluster, or this program is too old; nothing was changed.
        DamageError: the identity file is damaged.
    """
    found = load_identity(disk, directory, level_max=level_max)
    if found is None:
        found = NodeIdentity(node=node, cluster=cluster, identity=fresh)
        save_identity(disk, directory, found)
        return found
    if found.node != node:
        raise ConfigError(
            f"{directory} belongs to node {found.node}, not to node {node}: "
            f"pass another directory with --data, or --id {found.node}"
        )
    if found.cluster != cluster:
        raise ConfigError(
            f"{directory} belongs to cluster {found.cluster!r}, not to {cluster!r}: pass another directory with --data"
        )
    return found


class _Versioned(msgspec.Struct, frozen=True):
    version: int
    level: int = LEVEL_MIN
    program: str = ""


def _check_version(path: str, found: _Versioned, level_max: int) -> None:
    if found.level > level_max:
        raise ConfigError(f"{path}: {explain_level(found.level, level_max=level_max, program=found.program)}")
    if found.version > FORMAT_VERSION:
        message = f"{path} is of version {found.version}, newer than this program's {FORMAT_VERSION}: upgrade it"
        raise ConfigError(message)
