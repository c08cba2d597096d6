"""The folder of a backup: its files, their checksums, and the manifest that makes it complete.

    <folder>/manifest.json                     written last: a folder without it is no backup
    <folder>/cluster.json                      topics, named producers and consumers, cursors, owners, settings, quotas
    <folder>/topics/<number>/<partition>.batches   the batches of one partition, as they were on the wire

Batches have checksums of their own; the manifest adds the SHA-256 of every file and, for each partition, the digest of
its records (`docs/protocol/digest.md`), by which a restore is compared with the source. Invariant: a manifest that
exists names only files that were synced before it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from quiver.errors import ConflictError, DamageError, DecodeError
from quiver.groups.settings import QueueSettings
from quiver.record import Batch, decode_batches
from quiver.record.header import HEADER_BYTES, decode_header
from quiver.security.limits import QuotaLimits
from quiver.wire.messages import RetentionInfo

T = TypeVar("T")

VERSION = 1
MANIFEST_NAME = "manifest.json"
CLUSTER_NAME = "cluster.json"
READ_BYTES = 1 << 20


class PartitionBackup(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one partition, from its first offset up to its high watermark at the time of the backup."""

    partition: int
    first_offset: int
    end_offset: int
    digest: str
    """Of all records with their offsets, as 32 hexadecimal digits."""
    file: str


class TopicBackup(msgspec.Struct, frozen=True, kw_only=True):
    """One topic with its configuration."""

    topic: str
    topic_id: int
    created_ms: int
    replicas: int
    retention: RetentionInfo
    partitions: tuple[PartitionBackup, ...]
    is_encrypted: bool = False
    """Whether the cluster's disks held it encrypted; the backup itself does not."""
    owner: str | None = None
    """The user that it belongs to, such as `user:alice`; empty: nobody; None: an earlier program made the backup."""


class ConsumerBackup(msgspec.Struct, frozen=True, kw_only=True):
    """A named consumer, which is a group, and its cursors, by topic and partition."""

    name: str
    cursors: dict[str, dict[int, int]]
    """Of a work queue: the first record of each partition that is not settled."""
    owner: str | None = None
    """As in `TopicBackup`."""
    queue: QueueSettings | None = None
    """The settings of a work queue; None: it is none."""


class ProducerBackup(msgspec.Struct, frozen=True, kw_only=True):
    """A named producer and the topics that it is registered for."""

    name: str
    topics: tuple[str, ...]
    owner: str | None = None
    """As in `TopicBackup`."""


class QuotaBackup(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a user, a role, a topic, or the default."""

    subject: str
    limits: QuotaLimits


class ClusterBackup(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `cluster.json`."""

    cluster_id: str
    metadata_index: int
    """The index of the metadata, read after all end offsets."""
    topics: tuple[TopicBackup, ...]
    consumers: tuple[ConsumerBackup, ...]
    producers: tuple[ProducerBackup, ...]
    quotas: tuple[QuotaBackup, ...] = ()
    left_out: tuple[str, ...] = ()
    """What of the cluster is not in the backup although it might be: a sentence each."""


class BackupCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How much a backup holds, or how much was restored."""

    records: int
    topics: int
    producers: int
    consumers: int
    cursors: int
    quotas: int


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the backup."""

    name: str
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `manifest.json`."""

    version: int
    program: str
    created_ms: int
    cluster_id: str
    records: int
    files: tuple[FileEntry, ...]
    checksum: str = ""
    """SHA-256 of this manifest with an empty checksum."""


class BackupFile:
    """One file that is being written: hashes what it writes, and syncs it when it is closed."""

    def __init__(self, folder: str, name: str) -> None:
        self._name = name
        self._path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._hash = hashlib.sha256()
        self._size = 0
        self._file = open(self._path, "xb")  # noqa: SIM115 - closed by `finish`

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def finish(self) -> FileEntry:
        """Sync and close the file. On disk after this returns: all of it, and its name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sync_folder(os.path.dirname(self._path))
        return FileEntry(name=self._name, bytes=self._size, sha256=self._hash.hexdigest())


def prepare_folder(folder: str) -> None:
    """Create the folder of a new backup.

    Raises:
        ConflictError: it has files already, of a complete or an interrupted backup (`backup_exists`).
    """
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        kind = "a backup" if os.path.exists(os.path.join(folder, MANIFEST_NAME)) else "files, of no complete backup"
        raise ConflictError(
            f"not done: {folder} has {kind}; name an empty folder, or remove that one", code="backup_exists"
        )


def write_manifest(folder: str, manifest: Manifest) -> None:
    """Complete a backup. On disk after this returns: the manifest, and all that it names."""
    sealed = msgspec.structs.replace(manifest, checksum=_checksum(manifest))
    path = os.path.join(folder, MANIFEST_NAME)
    with open(path + ".new", "xb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(sealed), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)
    sync_folder(folder)


def read_manifest(folder: str) -> Manifest:
    """Return a backup's manifest.

    Raises:
        DamageError: there is none, so the backup is incomplete (`backup_incomplete`), or it is damaged.
    """
    path = os.path.join(folder, MANIFEST_NAME)
    if not os.path.exists(path):
        raise DamageError(
            f"{folder} has no {MANIFEST_NAME}: it is no backup, or one that was interrupted", code="backup_incomplete"
        )
    manifest = _decode(path, Manifest)
    if manifest.checksum != _checksum(manifest):
        raise DamageError(f"{path} is damaged: its checksum does not match", code="backup_damaged")
    if manifest.version > VERSION:
        raise DamageError(f"{path} is of version {manifest.version}, newer than this program's {VERSION}: upgrade it")
    return manifest


def read_cluster(folder: str) -> ClusterBackup:
    """Return the topics and clients of a backup; raises `DamageError`."""
    return _decode(os.path.join(folder, CLUSTER_NAME), ClusterBackup)


def count_content(content: ClusterBackup) -> BackupCounts:
    """Return how much a backup holds."""
    cursors = (len(by_partition) for one in content.consumers for by_partition in one.cursors.values())
    partitions = (one for topic in content.topics for one in topic.partitions)
    return BackupCounts(
        records=sum(one.end_offset - one.first_offset for one in partitions),
        topics=len(content.topics),
        producers=len(content.producers),
        consumers=len(content.consumers),
        cursors=sum(cursors),
        quotas=len(content.quotas),
    )


def find_damage(folder: str, manifest: Manifest) -> Iterator[str]:
    """Yield a sentence for each file of a manifest that is missing or changed."""
    for entry in manifest.files:
        path = os.path.join(folder, entry.name)
        if not os.path.exists(path):
            yield f"{entry.name} is missing"
        elif (size := os.path.getsize(path)) != entry.bytes:
            yield f"{entry.name} has {size} bytes, not {entry.bytes}"
        elif _hash_file(path) != entry.sha256:
            yield f"{entry.name} is damaged: its checksum does not match"


def read_batches(folder: str, name: str) -> Iterator[Batch]:
    """Yield the batches of a partition's file, each verified by its own checksum.

    Raises:
        DamageError: the file is damaged.
    """
    path = os.path.join(folder, name)
    with open(path, "rb") as file:
        while head := file.read(HEADER_BYTES):
            try:
                data = head + file.read(decode_header(head).batch_bytes - HEADER_BYTES)
                yield from decode_batches(data)
            except DecodeError as error:
                raise DamageError(f"{path} is damaged: {error.message}", code="backup_damaged") from None


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _decode(path: str, kind: type[T]) -> T:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, OSError) as error:
        raise DamageError(f"{path} is damaged: {error}", code="backup_damaged") from None


def _checksum(manifest: Manifest) -> str:
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(manifest, checksum=""))).hexdigest()


def _hash_file(path: str) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            found.update(data)
    return found.hexdigest()
