"""Whose a data directory is: one node id, one cluster, and an identity that no other directory has.

The file `identity.json` is written once, when the node is first started, and once more when it has taken its place in
the cluster. From then on the directory refuses every other node id and cluster id, and a node that finds its
metadata gone knows that it must not begin anew as if it had never been a member (R22).

Invariant: a directory that holds an identity file holds a whole one: it is renamed into place after it was synced.
"""

from __future__ import annotations

import msgspec

from quiver.errors import ConfigError, DamageError
from quiver.model import NodeId
from quiver.storage.disk import Disk
from quiver.storage.flush import write_all

IDENTITY_NAME = "identity.json"
FORMAT_VERSION = 1
"""How a data directory is laid out; a greater one cannot be read by this program."""
_TEMPORARY_NAME = IDENTITY_NAME + ".new"


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who the node is that a data directory belongs to."""

    node: NodeId
    cluster: str
    identity: str
    """Random; tells this directory from another one that was made for the same node id."""
    is_member: bool = False
    """Whether the node's place in the metadata's group has been made on this disk."""
    version: int = FORMAT_VERSION


def load_identity(disk: Disk, directory: str) -> Identity | None:
    """Return whose a directory is; None if nobody's yet. Blocking.

    Raises:
        DamageError: the file cannot be read.
        ConfigError: a newer program wrote it.
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
        version = msgspec.json.decode(data, type=_Versioned).version
        if version > FORMAT_VERSION:
            raise ConfigError(f"{path} was written by a newer program (version {version}): upgrade this node")
        return msgspec.json.decode(data, type=Identity)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DamageError(f"{path} cannot be read: {error}; whose data this is, is not known") from None


def save_identity(disk: Disk, directory: str, identity: Identity) -> None:
    """Replace the identity file. Blocking. On disk after this returns: `identity`."""
    disk.make_directory(directory)
    temporary = f"{directory}/{_TEMPORARY_NAME}"
    if disk.exists(temporary):
        disk.remove(temporary)  # of a save that a crash interrupted
    file = disk.open(temporary, create=True)
    try:
        write_all(file, [msgspec.json.format(msgspec.json.encode(identity), indent=2) + b"\n"], 0)
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, f"{directory}/{IDENTITY_NAME}")
    disk.sync_directory(directory)


def claim_directory(disk: Disk, directory: str, *, node: NodeId, cluster: str, fresh: str) -> Identity:
    """Return whose the directory is, which must be this node's; an unclaimed one becomes its own as `fresh`. Blocking.

    Raises:
        ConfigError: it belongs to another node or cluster; nothing was changed.
        DamageError: it cannot be told whose it is.
    """
    found = load_identity(disk, directory)
    if found is None:
        found = Identity(node=node, cluster=cluster, identity=fresh)
        save_identity(disk, directory, found)
        return found
    if found.node != node:
        raise ConfigError(
            f"{directory} belongs to node {found.node}, not to node {node}: "
            f"give --data another directory, or --id {found.node}"
        )
    if found.cluster != cluster:
        raise ConfigError(
            f"{directory} belongs to cluster {found.cluster!r}, not to {cluster!r}: give --data another directory"
        )
    return found


class _Versioned(msgspec.Struct, frozen=True):
    version: int
