"""Measure the simulator: simulated seconds per second of one core, without and with faults.

The first figures are three nodes under a steady load without faults; the last is a campaign. Time is CPU time, so that
other programs on the machine do not count.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from quiver.config import LogSettings, ReplicationSettings
from quiver.testing.groups.model import GroupModel
from quiver.testing.groups.swarm import GroupKnobs, Profile, draw_group_knobs
from quiver.testing.randomness import Latency, RandomStreams
from quiver.testing.simulator.runner import run_schedule, run_seed
from quiver.testing.simulator.world import NEAR
from table import Row, show

STEADY = Profile(
    p_other=0.0,
    voters=(3,),
    spares=(0,),
    p_stable=0.0,
    producers=(1,),
    in_flight=(1,),
    networks=(NEAR,),
    p_double=(0.0,),
    snapshot_entries=(1_000,),
    hibernation=False,
)
TARGET = 100.0
CAMPAIGN_SEEDS = 12


def steady_knobs(*, proposals_per_s: int) -> GroupKnobs:
    """Return three nodes, one group, one producer, and no faults."""
    knobs = draw_group_knobs(RandomStreams(1).stream("knobs"), STEADY)
    return replace(
        knobs,
        groups=1,
        replication=ReplicationSettings(hibernation=False),
        log=LogSettings(),
        disk_latency=Latency(0.05, 1.0),
        p_loss=0.0,
        readers=0,
        consumers=0,
        send_gap_ms=max(1, 1000 // proposals_per_s - 5),
        batch_records_max=1,
        chaos_ms=30_000,
    )


def measure_steady(*, proposals_per_s: int) -> Row:
    """Run a steady load and return its figure."""
    started = time.process_time()
    report = run_schedule(GroupModel(), 1, steady_knobs(proposals_per_s=proposals_per_s), [])
    spent_s = time.process_time() - started
    simulated_s = report.simulated_ms / 1000
    rate = sum(report.sends.values()) / simulated_s
    target = TARGET if proposals_per_s == 50 else None
    return Row(f"three nodes, {rate:.0f} proposals/s", simulated_s / spent_s, "s/s", target=target)


def measure_campaign() -> list[Row]:
    """Run some seeds with all their faults and return their figures."""
    started = time.process_time()
    reports = [run_seed(GroupModel(), seed) for seed in range(CAMPAIGN_SEEDS)]
    spent_s = time.process_time() - started
    simulated_s = sum(report.simulated_ms for report in reports) / 1000
    events = sum(report.events for report in reports)
    return [
        Row(f"campaign of {CAMPAIGN_SEEDS} seeds", simulated_s / spent_s, "s/s"),
        Row("campaign", events / spent_s, "events/s"),
        Row("campaign", len(reports) / spent_s, "seeds/s"),
    ]


def main() -> int:
    """Measure, print, and return 1 if the target is missed."""
    rows = [measure_steady(proposals_per_s=rate) for rate in (5, 50, 200)]
    return show([*rows, *measure_campaign()], title="simulator: simulated time per time of one core")


if __name__ == "__main__":
    sys.exit(main())
