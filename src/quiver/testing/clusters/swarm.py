"""What a seed draws of a whole cluster: its nodes, topics, settings and clients, and which faults it will suffer.

As in `quiver.testing.groups.swarm`, each seed picks knobs that make rare things common and a mix of faults. About a
quarter of the seeds are calm: operators work and clients come and go, but nothing breaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from quiver.client.options import ClusterOptions
from quiver.clock import Rng
from quiver.config import (
    KIB,
    BrokerSettings,
    LogSettings,
    ManagerSettings,
    MetadataSettings,
    PartitionSettings,
    ReplicationSettings,
    Settings,
)
from quiver.groups.settings import QueueSettings
from quiver.testing.simulator.world import (
    FAR,
    JITTERY,
    NEAR,
    PLAIN_DISK,
    QUICK_DISK,
    STALLING_DISK,
    SimulationKnobs,
    between,
    pick,
)
from quiver.wire.messages import RetentionInfo

FAULT_KINDS: Final[Mapping[str, int]] = {
    "kill": 10,
    "power_loss": 8,
    "power_loss_at_operation": 8,
    "kill_all": 3,
    "power_loss_all": 4,
    "stop": 8,
    "pause": 8,
    "isolate": 6,
    "cut_one_way": 5,
    "cut_both_ways": 5,
    "split": 5,
    "ring": 3,
    "clog": 4,
    "swizzle": 3,
    "slow_network": 3,
    "lossy_network": 5,
    "doubling_network": 3,
    "broken_requests": 8,
    "slow_disk": 3,
    "sync_error": 4,
    "write_error": 4,
    "read_error": 3,
    "full_disk": 4,
    "short_writes": 3,
    "lost_disk": 3,
    "wiped_disk": 3,
    "lost_database": 4,
    "database_error": 4,
    "database_outage": 6,
    "clock_jump": 4,
    "clock_drift": 4,
    "bad_command": 4,
    "unknown_entry": 4,
    "partition_fault": 4,
    "full_disks": 4,
}
"""Every kind of fault, with how often it is drawn when it is on."""

OPERATION_KINDS: Final[Mapping[str, int]] = {
    "drain": 8,
    "undrain": 6,
    "add_broker": 5,
    "remove_broker": 5,
    "rebalance": 6,
    "add_partitions": 4,
    "change_managers": 6,
    "change_program": 10,
    "upgrade_cluster": 6,
}
"""What operators do, calm or not."""

ALL_KINDS: Final = (*FAULT_KINDS, *OPERATION_KINDS)

_RETENTIONS: Final = (
    *[RetentionInfo()] * 4,
    RetentionInfo(ms=2_000),
    RetentionInfo(bytes=4 * KIB),
)

P_CALM: Final = 0.25
P_MIXED: Final = 0.4
"""How likely the programs of the nodes differ."""
P_ENCRYPTED: Final = 0.3
"""How likely the topics of nodes with the same program are encrypted."""
P_QUEUE: Final = 0.35
"""How likely workers share a topic as a work queue."""
P_MEMBERS: Final = 0.35
"""How likely members of a group share the partitions of the topics."""
P_FAULT: Final = 0.45
"""How likely a kind of fault is on in a seed that is not calm."""


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """One topic that clients use."""

    name: str
    partitions: int
    replicas: int
    retention: RetentionInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlan:
    """A work queue, its topic and those who use it."""

    topic: TopicPlan
    settings: QueueSettings
    workers: int
    senders: int
    keys: int
    """Different keys of records; 0: they have none."""
    prefetch: int
    p_delayed: float
    """How likely a batch is to be delivered later."""
    p_crash: float
    """How likely a worker is killed, at each look at it."""
    p_pause: float
    """How likely a worker stands still after it received something, often for longer than its lease."""
    group: str = "workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersPlan:
    """The members of a group that reads all topics except the queue's."""

    members: int
    instances: int
    """How many members have a name that outlives their processes."""
    session_timeout_ms: int
    p_crash: float
    p_pause: float
    p_leave: float
    """How likely a member leaves and comes back, after each step."""
    is_told: bool
    """Whether members ask to be told of partitions that they lose."""
    outsiders: int = 0
    """Clients that use the group's cursors without being members."""
    group: str = "members"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterKnobs(SimulationKnobs):
    """One seed's cluster, load and faults."""

    managers: int
    """Nodes that form the cluster as its managers, and are brokers."""
    brokers: int
    """Nodes that are brokers and standbys, from the beginning on."""
    topics: tuple[TopicPlan, ...]
    settings: Settings
    client: ClusterOptions
    delivery_timeout_ms: int
    p_break: float
    senders: int
    lanes: int
    """Maximum of concurrent sends of one producer."""
    readers: int
    committers: int
    takers: int
    makers: int
    admins: int
    """Administrators of users, tokens, roles, grants and quotas."""
    step_gap_ms: int
    values_max: int
    p_restart: float
    """How likely a client is restarted after a step."""
    is_calm: bool
    mixes_versions: bool
    """Whether the nodes begin with a program of the lowest feature level, and get newer and older ones."""
    visitors: int = 1
    wants_encryption: bool = False
    queue: QueuePlan | None = None
    members: MembersPlan | None = None
    holders: int = 0
    """Programs that hold records against retention."""

    @property
    def all_topics(self) -> tuple[TopicPlan, ...]:
        """Return the topics that clients use, that of the queue included."""
        return (*self.topics, *(() if self.queue is None else (self.queue.topic,)))

    @property
    def encrypts(self) -> bool:
        """Return whether the topics are encrypted on the disks, which old programs cannot do."""
        return self.wants_encryption and not self.mixes_versions

    @property
    def replicas_max(self) -> int:
        """Return the most replicas of any topic."""
        return max(topic.replicas for topic in self.all_topics)


def draw_cluster_knobs(rng: Rng) -> ClusterKnobs:
    """Draw one seed's knobs."""
    managers = pick(rng, (1, 3, 3, 3, 3, 3, 5))
    brokers = pick(rng, (0, 0, 1, 2))
    is_calm = rng.random() < P_CALM
    return ClusterKnobs(
        managers=managers,
        brokers=brokers,
        topics=_draw_topics(rng, managers + brokers),
        settings=_draw_settings(rng),
        client=ClusterOptions(
            timeout_ms=pick(rng, (3_000, 8_000, 20_000)),
            attempt_timeout_ms=pick(rng, (300, 1_000, 3_000)),
            metadata_age_ms_max=pick(rng, (500, 5_000, 30_000)),
        ),
        delivery_timeout_ms=pick(rng, (2_000, 6_000, 20_000)),
        disk_latency=pick(rng, (QUICK_DISK, PLAIN_DISK) if is_calm else (QUICK_DISK, PLAIN_DISK, STALLING_DISK)),
        disk_workers=pick(rng, (1, 2, 4)),
        network_latency=pick(rng, (NEAR, FAR) if is_calm else (NEAR, FAR, JITTERY)),
        p_loss=0.0 if is_calm else pick(rng, (0.0, 0.0, 0.01, 0.05)),
        p_double=0.0 if is_calm else pick(rng, (0.0, 0.0, 0.05)),
        p_break=0.0 if is_calm else pick(rng, (0.0, 0.0, 0.02)),
        keep_order=rng.random() < 0.6,
        senders=pick(rng, (1, 2, 3)),
        lanes=pick(rng, (1, 2, 5)),
        readers=pick(rng, (0, 1, 1)),
        committers=pick(rng, (0, 1, 2)),
        takers=pick(rng, (0, 1, 2)),
        makers=pick(rng, (0, 1, 2)),
        step_gap_ms=pick(rng, (30, 80, 200)),
        values_max=pick(rng, (1, 4, 20)),
        p_restart=pick(rng, (0.0, 0.02, 0.1)),
        is_calm=is_calm,
        chaos_ms=between(rng, (6_000, 14_000)),
        gap_ms=between(rng, (200, 1_200)),
        weights=_draw_weights(rng, is_calm=is_calm),
        drifts_ppm=tuple(pick(rng, (0, 0, 50_000, -50_000, 1_000)) for _ in range(8)),
        disk_queue_max=pick(rng, (None, None, 1, 4)),
        mixes_versions=rng.random() < P_MIXED,
        admins=pick(rng, (0, 1, 1, 2)),
        wants_encryption=rng.random() < P_ENCRYPTED,
        queue=draw_queue(rng, managers + brokers, is_calm=is_calm) if rng.random() < P_QUEUE else None,
        members=draw_members(rng, is_calm=is_calm) if rng.random() < P_MEMBERS else None,
    )


def draw_queue(rng: Rng, nodes: int, *, is_calm: bool) -> QueuePlan:
    """Draw a work queue: short leases and delays, small bounds, workers that die and stand still."""
    order = pick(rng, ("offset", "offset", "key"))
    backoff_ms = pick(rng, (0, 50, 400))
    return QueuePlan(
        topic=TopicPlan(
            "jobs",
            partitions=pick(rng, (1, 1, 2)),
            replicas=pick(rng, tuple(replicas for replicas in (1, 3, 3, 3) if replicas <= nodes)),
            retention=RetentionInfo(),
        ),
        settings=QueueSettings(
            lease_ms=pick(rng, (400, 1_000, 3_000)),
            max_attempts=pick(rng, (0, 2, 3, 5)),
            backoff_ms=backoff_ms,
            backoff_max_ms=pick(rng, (500, 1_500)),
            backoff_multiplier=pick(rng, (1.0, 2.0)),
            in_flight_max=pick(rng, (1, 5, 50, 10_000)),
            order="key" if order == "key" else "offset",
        ),
        workers=pick(rng, (1, 2, 3)),
        senders=pick(rng, (1, 1, 2)),
        keys=pick(rng, (1, 2, 5)) if order == "key" else pick(rng, (0, 2)),
        prefetch=pick(rng, (0, 0, 5)),
        p_delayed=pick(rng, (0.0, 0.1, 0.3)),
        p_crash=0.0 if is_calm else pick(rng, (0.0, 0.005, 0.02)),
        p_pause=0.0 if is_calm else pick(rng, (0.0, 0.03, 0.1)),
    )


def draw_members(rng: Rng, *, is_calm: bool) -> MembersPlan:
    """Draw a group: short sessions, members that join, leave, die and stand still."""
    members = pick(rng, (1, 2, 3, 4))
    return MembersPlan(
        members=members,
        instances=pick(rng, (0, 0, 1, members)),
        session_timeout_ms=pick(rng, (1_000, 2_000, 4_000)),
        p_crash=0.0 if is_calm else pick(rng, (0.0, 0.005, 0.02)),
        p_pause=0.0 if is_calm else pick(rng, (0.0, 0.05, 0.15)),
        p_leave=pick(rng, (0.0, 0.01, 0.05)),
        is_told=rng.random() < 0.6,
        outsiders=pick(rng, (0, 1)),
    )


def _draw_topics(rng: Rng, nodes: int) -> tuple[TopicPlan, ...]:
    count = pick(rng, (1, 1, 2))
    choices = tuple(replicas for replicas in (1, 3, 3, 3, 5) if replicas <= nodes)
    return tuple(
        TopicPlan(
            f"topic-{number}",
            partitions=pick(rng, (1, 2, 3)),
            replicas=pick(rng, choices),
            retention=pick(rng, _RETENTIONS),
        )
        for number in range(count)
    )


def _draw_settings(rng: Rng) -> Settings:
    election_timeout_ms = pick(rng, (200, 300, 400))
    return Settings(
        log=LogSettings(
            segment_bytes_max=pick(rng, (KIB, 4 * KIB, 32 * KIB)),
            index_interval_bytes=pick(rng, (64, 512, 4 * KIB)),
            tail_cache_bytes_max=pick(rng, (0, 2 * KIB, 64 * KIB)),
            segment_age_ms_max=pick(rng, (500, 5_000, 3_600_000)),
            free_bytes_min=pick(rng, (0, 4 * KIB)),
            free_check_interval_ms=200,
        ),
        partition=PartitionSettings(
            checkpoint_bytes=pick(rng, (2 * KIB, 8 * KIB, 1024 * KIB)),
            summary_bytes=pick(rng, (KIB, 4 * KIB, 16 * KIB)),
            summary_entries=pick(rng, (50, 500)),
            retention_interval_ms=pick(rng, (200, 1_000)),
        ),
        replication=ReplicationSettings(
            election_timeout_ms=election_timeout_ms,
            heartbeat_interval_ms=election_timeout_ms // 4,
            append_bytes_max=pick(rng, (KIB, 4 * KIB, 64 * KIB)),
            inflight_messages_max=pick(rng, (1, 4, 64)),
            hibernation=rng.random() < 0.5,
        ),
        metadata=MetadataSettings(
            staleness_ms_max=pick(rng, (1_000, 5_000)), snapshot_entries=pick(rng, (20, 60, 10_000))
        ),
        manager=ManagerSettings(
            heartbeat_interval_ms=pick(rng, (100, 250)),
            suspect_after_ms=800,
            dead_after_ms=pick(rng, (1_500, 3_000)),
            rebuild_after_ms=pick(rng, (500, 3_000, 60_000)),
            record_interval_ms=pick(rng, (300, 1_000)),
            client_alive_ms=400,
            client_expiry_ms=6_000,
            reconcile_interval_ms=300,
            moves_max=pick(rng, (1, 8)),
            broker_moves_max=pick(rng, (1, 2)),
            rebalance=pick(rng, ("on_request", "on_request", "always")),
            purge_delay_ms=pick(rng, (200, 3_000)),
        ),
        broker=BrokerSettings(
            openings_max=pick(rng, (1, 4)), leader_balance_delay_ms=pick(rng, (500, 3_000)), stop_timeout_ms=1_000
        ),
    )


def _draw_weights(rng: Rng, *, is_calm: bool) -> dict[str, int]:
    weights = {kind: weight for kind, weight in OPERATION_KINDS.items() if rng.random() < 0.6}
    for kind, weight in FAULT_KINDS.items():
        is_on = rng.random() < P_FAULT
        if is_on and not is_calm:
            weights[kind] = weight
    return weights or {"rebalance": 1}
