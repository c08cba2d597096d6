"""What a seed draws for consensus groups: their size, settings and load, and the mix of faults.

A `Profile` leans the draw towards one family of faults; tests that switch a safeguard off use it to search where it
matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from quiver.clock import Rng
from quiver.config import KIB, LogSettings, PartitionSettings, ReplicationSettings
from quiver.partition import RetentionPolicy
from quiver.testing.randomness import Latency
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

FAULT_KINDS: Final[Mapping[str, int]] = {
    "kill": 10,
    "power_loss": 10,
    "power_loss_at_operation": 10,
    "kill_all": 4,
    "power_loss_all": 5,
    "pause": 8,
    "isolate": 8,
    "cut_one_way": 6,
    "cut_both_ways": 6,
    "split": 6,
    "ring": 4,
    "clog": 5,
    "swizzle": 5,
    "slow_network": 4,
    "lossy_network": 6,
    "doubling_network": 4,
    "slow_disk": 4,
    "sync_error": 6,
    "write_error": 5,
    "read_error": 5,
    "full_disk": 5,
    "short_writes": 4,
    "bit_flip": 4,
    "lost_disk": 4,
    "clock_jump": 4,
    "clock_drift": 4,
    "add_member": 5,
    "remove_member": 5,
    "swap_member": 5,
    "demote_member": 4,
    "transfer": 6,
    "snapshot": 6,
    "burst": 4,
}
"""Every kind of fault, with how often it is drawn when it is on."""

FORBIDDEN_WEIGHT: Final = 20


@dataclass(frozen=True, slots=True)
class Profile:
    """A leaning: `favoured` kinds are always on and weigh `factor` times as much; the rest are on by chance.

    `forbidden` kinds break the rules that the cluster relies on; they are on only where a test asks for them.
    """

    favoured: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    factor: int = 6
    p_other: float = 0.4
    voters: tuple[int, ...] = (1, 3, 3, 3, 3, 3, 5)
    groups: tuple[int, ...] = (1, 1, 1, 2, 3)
    election_timeouts_ms: tuple[int, ...] = (150, 250, 400)
    hibernation: bool | None = None
    p_stable: float = 0.25
    snapshot_entries: tuple[int, ...] = (20, 60, 200, 1_000_000)
    snapshot_poll_ms: int = 500
    segment_bytes: tuple[int, ...] = (KIB, 4 * KIB, 32 * KIB, 1024 * KIB)
    producers: tuple[int, ...] = (1, 2, 4)
    in_flight: tuple[int, ...] = (1, 2, 5)
    append_bytes: tuple[int, ...] = (KIB, 4 * KIB, 64 * KIB)
    spares: tuple[int, ...] = (0, 1, 2)
    keep_order: float = 0.3
    p_double: tuple[float, ...] = (0.0, 0.0, 0.05)
    networks: tuple[Latency, ...] = (NEAR, FAR, JITTERY)
    disks: tuple[Latency, ...] = (QUICK_DISK, PLAIN_DISK, STALLING_DISK)
    send_gaps_ms: tuple[int, ...] = (20, 50, 100, 300)
    readers_more: int = 0
    gap_ms: tuple[int, int] = (150, 1_200)
    chaos_ms: tuple[int, int] = (6_000, 20_000)
    p_trims: float = 0.5
    """How often logs are shortened by replicated trims instead of snapshots."""
    consumers: tuple[int, ...] = (0, 1, 2, 4)


MIXED: Final = Profile()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKnobs(SimulationKnobs):
    """One seed's consensus groups, load and faults."""

    voters: int
    spares: int
    groups: int
    replication: ReplicationSettings
    log: LogSettings
    snapshot_entries: int
    snapshot_poll_ms: int
    producers: int
    readers: int
    send_gap_ms: int
    batch_records_max: int
    in_flight_max: int
    attempt_timeout_ms: int
    delivery_timeout_ms: int
    has_stable_phase: bool
    consumers: int = 0
    partition: PartitionSettings = field(default_factory=PartitionSettings)
    retention: RetentionPolicy | None = None
    """What partitions are trimmed by; None: logs are shortened by snapshots."""


def draw_group_knobs(rng: Rng, profile: Profile = MIXED) -> GroupKnobs:
    """Draw one seed's knobs."""
    replication = _draw_replication(rng, profile)
    knobs = GroupKnobs(
        voters=pick(rng, profile.voters),
        spares=pick(rng, profile.spares),
        groups=pick(rng, profile.groups),
        replication=replication,
        log=_draw_log(rng, profile),
        disk_latency=pick(rng, profile.disks),
        disk_workers=pick(rng, (1, 2, 4)),
        network_latency=pick(rng, profile.networks),
        p_loss=pick(rng, (0.0, 0.0, 0.01, 0.1)),
        p_double=pick(rng, profile.p_double),
        keep_order=rng.random() < profile.keep_order,
        snapshot_entries=pick(rng, profile.snapshot_entries),
        snapshot_poll_ms=profile.snapshot_poll_ms,
        producers=pick(rng, profile.producers),
        readers=pick(rng, (0, 1, 2)) + profile.readers_more,
        send_gap_ms=pick(rng, profile.send_gaps_ms),
        batch_records_max=pick(rng, (1, 3, 20)),
        in_flight_max=pick(rng, profile.in_flight),
        attempt_timeout_ms=pick(rng, (150, 500, 2_000)),
        delivery_timeout_ms=pick(rng, (1_500, 4_000, 20_000)),
        chaos_ms=between(rng, profile.chaos_ms),
        gap_ms=between(rng, profile.gap_ms),
        has_stable_phase=rng.random() < profile.p_stable,
        weights=_draw_weights(rng, profile),
        drifts_ppm=tuple(pick(rng, (0, 0, 50_000, -50_000, 1_000)) for _ in range(8)),
    )
    return _with_partition(knobs, rng, profile)


def _with_partition(knobs: GroupKnobs, rng: Rng, profile: Profile) -> GroupKnobs:
    """Add what partitions do; a log that snapshots may start anywhere has no consumers."""
    knobs = replace(knobs, partition=_draw_partition(rng))
    if rng.random() >= profile.p_trims:
        return knobs
    return replace(knobs, retention=_draw_retention(rng), consumers=pick(rng, profile.consumers))


def _draw_replication(rng: Rng, profile: Profile) -> ReplicationSettings:
    election_timeout_ms = pick(rng, profile.election_timeouts_ms)
    hibernation = rng.random() < 0.4 if profile.hibernation is None else profile.hibernation
    return ReplicationSettings(
        election_timeout_ms=election_timeout_ms,
        heartbeat_interval_ms=election_timeout_ms // pick(rng, (4, 5, 8)),
        append_bytes_max=pick(rng, profile.append_bytes),
        inflight_bytes_max=pick(rng, (4 * KIB, 64 * KIB, 1024 * KIB)),
        inflight_messages_max=pick(rng, (1, 4, 64)),
        catch_up_bytes_per_second=pick(rng, (64 * KIB, 512 * KIB, 4096 * KIB)),
        uncommitted_bytes_max=pick(rng, (8 * KIB, 64 * KIB, 1024 * KIB)),
        hibernation=hibernation,
    )


def _draw_log(rng: Rng, profile: Profile) -> LogSettings:
    return LogSettings(
        segment_bytes_max=pick(rng, profile.segment_bytes),
        index_interval_bytes=pick(rng, (64, 512, 4 * KIB)),
        tail_cache_bytes_max=pick(rng, (0, 2 * KIB, 64 * KIB)),
        pending_bytes_max=pick(rng, (16 * KIB, 256 * KIB)),
        segment_age_ms_max=pick(rng, (500, 5_000, 3_600_000)),
    )


def _draw_partition(rng: Rng) -> PartitionSettings:
    return PartitionSettings(
        checkpoint_bytes=pick(rng, (2 * KIB, 8 * KIB, 1024 * KIB)),
        summary_bytes=pick(rng, (KIB, 4 * KIB, 16 * KIB)),
        summary_entries=pick(rng, (50, 500)),
        retention_interval_ms=pick(rng, (100, 400, 2_000)),
    )


def _draw_retention(rng: Rng) -> RetentionPolicy:
    size_bytes = pick(rng, (2 * KIB, 8 * KIB, 64 * KIB))
    return pick(rng, (RetentionPolicy(), RetentionPolicy(age_ms=3_000), *[RetentionPolicy(size_bytes=size_bytes)] * 3))


def _draw_weights(rng: Rng, profile: Profile) -> dict[str, int]:
    weights = dict.fromkeys(profile.forbidden, FORBIDDEN_WEIGHT)
    for kind, weight in FAULT_KINDS.items():
        is_on = rng.random() < profile.p_other
        if kind in profile.favoured:
            weights[kind] = weight * profile.factor
        elif is_on:
            weights[kind] = weight
    return weights or {"kill": 1}
