"""Settings of the metadata and of the managers that watch over brokers, partitions and clients."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.errors import ConfigError


class MetadataSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Each node's copy of the cluster metadata."""

    staleness_ms_max: Annotated[
        int,
        Meta(
            ge=100,
            le=3_600_000,
            description="Milliseconds without contact to the primary after which a node rejects metadata reads as "
            "stale; raise it to keep serving longer without a primary, at the cost of older answers.",
        ),
    ] = 10_000
    snapshot_entries: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="Metadata entries applied between two snapshots, after each of which the log is compacted; "
            "lower it for faster restarts, at the cost of more writes.",
        ),
    ] = 10_000


class ManagerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Failure detection, replica placement and repair by the managers."""

    creates_topics: Annotated[
        bool,
        Meta(
            description="Whether a producer that registers for a topic that does not exist creates it; turn it off, on "
            "all nodes with the manager role, so that a mistyped name is an error (`unknown_topic`)."
        ),
    ] = True
    replicas_per_broker_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="Replicas that one broker may hold; topics that would exceed it are refused "
            "(`too_many_replicas`). 0 derives it from the primary's limit of open files: half of "
            "them, two for each replica.",
        ),
    ] = 0
    partitions_max: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="Partitions of all topics together; topics that would exceed it are refused "
            "(`too_many_partitions`).",
        ),
    ] = 100_000
    heartbeat_interval_ms: Annotated[
        int, Meta(ge=10, le=60_000, description="Milliseconds between two heartbeats of a node to the primary.")
    ] = 1_000
    suspect_after_ms: Annotated[
        int,
        Meta(
            ge=20,
            le=600_000,
            description="Milliseconds without a heartbeat after which a node is suspected dead; above "
            "heartbeat_interval_ms.",
        ),
    ] = 3_000
    dead_after_ms: Annotated[
        int,
        Meta(
            ge=30,
            le=3_600_000,
            description="Milliseconds without a heartbeat after which a node counts as dead; above suspect_after_ms.",
        ),
    ] = 10_000
    rebuild_after_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=7 * 24 * 3_600_000,
            description="Milliseconds that a node must be dead before its replicas are rebuilt on other nodes; lower "
            "it to restore redundancy sooner, raise it to avoid copying data during a restart.",
        ),
    ] = 300_000
    client_alive_ms: Annotated[
        int,
        Meta(
            ge=100,
            le=24 * 3_600_000,
            description="Milliseconds since its last request during which a client counts as alive.",
        ),
    ] = 60_000
    client_expiry_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=365 * 24 * 3_600_000,
            description="Milliseconds without a sign of life after which a producer or consumer without a name "
            "expires, with its sequences and cursors; 0: never. At least client_alive_ms.",
        ),
    ] = 3_600_000
    named_client_expiry_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=10 * 365 * 24 * 3_600_000,
            description="Milliseconds without a sign of life after which a producer or consumer with a name expires; "
            "0: never. At least client_alive_ms.",
        ),
    ] = 0
    record_interval_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=600_000,
            description="Milliseconds between two writes of last-seen times to the metadata; lower it for fresher "
            "times, at the cost of metadata writes.",
        ),
    ] = 5_000
    reconcile_interval_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=600_000,
            description="Interval of the periodic reconcile in milliseconds; lower it to detect drift sooner, at the "
            "cost of idle CPU.",
        ),
    ] = 1_000
    moves_max: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="Replica moves in progress at once in the cluster; raise it to repair faster, at the cost of "
            "network and disk load.",
        ),
    ] = 8
    broker_moves_max: Annotated[
        int, Meta(ge=1, le=10_000, description="Replica moves in progress at once to or from one broker.")
    ] = 2
    rebalance: Annotated[
        Literal["on_request", "always"],
        Meta(
            description="When replicas are moved only to balance the load: `on_request` on an operator's command, "
            "`always` automatically as well."
        ),
    ] = "on_request"
    purge_delay_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=365 * 24 * 3_600_000,
            description="Milliseconds during which a deleted topic can be restored; its data uses disk space until "
            "then. Below the longest timeout of a call (30 s by default), a creation that is repeated after a restart "
            "of the primary may create a topic again that was deleted meanwhile.",
        ),
    ] = 24 * 3_600_000

    def __post_init__(self) -> None:
        if not self.heartbeat_interval_ms < self.suspect_after_ms < self.dead_after_ms:
            raise ConfigError(
                "manager.heartbeat_interval_ms must be less than manager.suspect_after_ms, "
                f"and that less than manager.dead_after_ms; they are {self.heartbeat_interval_ms}, "
                f"{self.suspect_after_ms} and {self.dead_after_ms}"
            )
        for name in ("client_expiry_ms", "named_client_expiry_ms"):
            if 0 < getattr(self, name) < self.client_alive_ms:
                raise ConfigError(
                    f"manager.{name} is {getattr(self, name)}, less than manager.client_alive_ms "
                    f"({self.client_alive_ms}): clients would expire while they count as alive; raise it, or set 0"
                )

    @property
    def client_report_ms(self) -> int:
        """Return how often a node reports the same client to the primary at most, and the primary records it."""
        return max(1, self.client_alive_ms // 4)
