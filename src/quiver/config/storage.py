"""The settings of logs on disk and of the threads that do blocking work; see `settings`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.config.network import KIB, MIB
from quiver.errors import ConfigError

Durability = Literal["fsync", "interval", "none"]


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Storage of a partition's log on disk."""

    durability: Annotated[
        Durability,
        Meta(
            description="When a batch counts as durable: `fsync` after fdatasync, `interval` after the write, with an "
            "fdatasync every flush_interval_ms, `none` after the write. Anything but `fsync` can lose "
            "acknowledged records if the machines of a majority lose power together."
        ),
    ] = "fsync"
    flush_interval_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=60_000,
            description="Milliseconds between fdatasyncs if durability is `interval`; lower it to lose less in a "
            "power failure, at the cost of throughput.",
        ),
    ] = 50
    segment_bytes_max: Annotated[
        int,
        Meta(
            ge=KIB,
            le=4096 * MIB,
            description="Size in bytes at which a segment is sealed and the next one starts. After a crash up to this "
            "much of each partition is read again, and retention removes whole segments: lower it for "
            "faster restarts and finer retention, raise it for fewer files.",
        ),
    ] = 16 * MIB
    segment_age_ms_max: Annotated[
        int,
        Meta(
            ge=100,
            description="Age in milliseconds at which the active segment is sealed; lower it if retention by time "
            "must remove the records of slow partitions sooner.",
        ),
    ] = 7 * 24 * 3_600_000
    index_interval_bytes: Annotated[
        int,
        Meta(
            ge=64,
            le=16 * MIB,
            description="Bytes of log between two entries of a segment's sparse index; lower it to read less per "
            "random access, at the cost of memory.",
        ),
    ] = 64 * KIB
    tail_cache_bytes_max: Annotated[
        int,
        Meta(
            ge=0,
            le=4096 * MIB,
            description="Memory in bytes for the newest batches of one partition; raise it if consumers that are "
            "slightly behind should not read from disk.",
        ),
    ] = 16 * MIB
    tail_caches_bytes_max: Annotated[
        int,
        Meta(
            ge=0,
            description="Memory in bytes for the newest batches of all partitions of the node; the partitions that "
            "were written longest ago are evicted first.",
        ),
    ] = 256 * MIB
    pending_bytes_max: Annotated[
        int,
        Meta(
            ge=KIB,
            le=4096 * MIB,
            description="Bytes of one partition that may wait to be written; appends beyond it are rejected and "
            "retried by clients. Raise it to absorb bursts, at the cost of memory and latency.",
        ),
    ] = 64 * MIB
    free_bytes_min: Annotated[
        int,
        Meta(
            ge=0,
            description="Free disk space in bytes below which new records are rejected (HTTP 507); reads and deletes "
            "continue. Keep enough to write what frees space again.",
        ),
    ] = 256 * MIB
    free_check_interval_ms: Annotated[
        int, Meta(ge=10, le=600_000, description="Milliseconds between two checks of the free disk space.")
    ] = 2_000


class EncryptionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Encryption of records on this node's disk."""

    key_file: Annotated[
        str,
        Meta(
            description="File with the keys that encrypt the data keys of this node's replicas, readable by its owner "
            "alone; `quiver security key` makes it. The first key is used for new replicas. Without key_file and "
            "key_command this node cannot hold replicas of encrypted topics."
        ),
    ] = ""
    key_command: Annotated[
        str,
        Meta(
            description="Command that prints what key_file would hold, run without a shell when the node starts; for "
            "keys in a key management service."
        ),
    ] = ""
    encrypt_new_topics: Annotated[
        bool,
        Meta(
            description="Whether topics are encrypted whose creator does not say; the value on the primary counts, so "
            "set it on all managers. Existing topics stay as they are."
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.key_file and self.key_command:
            raise ConfigError("set encryption.key_file or encryption.key_command, not both")
        if self.encrypt_new_topics and not self.has_keys:
            raise ConfigError("encryption.encrypt_new_topics needs encryption.key_file or encryption.key_command")

    @property
    def has_keys(self) -> bool:
        """Return whether a source of keys is set."""
        return bool(self.key_file or self.key_command)


class ExecutorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Threads and queues for blocking work: log writes and votes, cold reads, recovery."""

    write_threads: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Threads that write logs and votes; raise it on disks that sync many files concurrently.",
        ),
    ] = 4
    write_queue_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Writes that may wait for a thread; beyond it, records of clients are rejected as overloaded "
            "and retried by clients, while replication and votes continue. Keep it above the number of replicas that "
            "are written at the same time.",
        ),
    ] = 4_096
    read_threads: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Threads that read records from disk for clients that lag; raise it on fast disks for more "
            "throughput of cold reads, at the cost of the latency of everything else.",
        ),
    ] = 2
    read_queue_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Reads that may wait for a thread; further ones are rejected as overloaded and retried by "
            "clients.",
        ),
    ] = 1_024
    write_wait_ms_target: Annotated[
        int,
        Meta(
            ge=1,
            le=60_000,
            description="Milliseconds that a write may wait for a thread and for the event loop; while writes wait "
            "longer, reads from disk are slowed down. Lower it to favour producers, raise it to favour consumers that "
            "lag.",
        ),
    ] = 2
    recovery_threads: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Threads that open replicas, save snapshots and read for replicas that lag; raise it for "
            "faster starts on fast disks.",
        ),
    ] = 4
    recovery_queue_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Recovery tasks that may wait for a thread; beyond it, no further replica is opened until "
            "there is room.",
        ),
    ] = 1_024
