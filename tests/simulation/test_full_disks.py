"""Full disks in whole clusters: nothing ends, a majority with room goes on; without a safeguard, a checker notices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from unittest.mock import patch

import msgspec
import pytest

from quiver.broker.leader_balancer import LeaderBalancer
from quiver.clock import Rng
from quiver.config import KIB
from quiver.metadata import MetadataStore
from quiver.replication import member
from quiver.storage import writer
from quiver.testing.clusters.model import ClusterModel
from quiver.testing.clusters.swarm import ClusterKnobs, TopicPlan, draw_cluster_knobs
from quiver.testing.simulator.runner import run_seed
from quiver.wire.messages import RetentionInfo

SEEDS_MAX = 8


@dataclass(frozen=True, slots=True)
class FullDisks(ClusterModel):
    """Clusters whose disks fill up, and that suffer nothing else."""

    def draw_knobs(self, rng: Rng) -> ClusterKnobs:
        knobs = draw_cluster_knobs(rng)
        settings = msgspec.structs.replace(
            knobs.settings,
            metadata=msgspec.structs.replace(knobs.settings.metadata, snapshot_entries=20),
            partition=msgspec.structs.replace(knobs.settings.partition, checkpoint_bytes=2 * KIB),
        )
        return replace(
            knobs,
            settings=settings,
            managers=3,
            topics=(TopicPlan("topic-0", partitions=3, replicas=3, retention=RetentionInfo()),),
            weights={"full_disks": 1, "full_disk": 1},
            chaos_ms=4_000,
            mixes_versions=False,
        )


def make_way_as_primary_only(balancer: LeaderBalancer) -> None:
    balancer._store.make_way()


Ablation = Callable[[], AbstractContextManager[object]]
ABLATIONS: dict[str, tuple[Ablation, str, int]] = {
    "waiting_for_room": (
        lambda: patch.object(writer, "is_out_of_space", lambda _: False),
        "a node ended because its disk is full",
        0,
    ),
    "saving_later": (
        lambda: patch.object(member, "is_out_of_space", lambda _: False),
        "a node ended because its disk is full",
        0,
    ),
    "making_way": (
        lambda: patch.object(LeaderBalancer, "_make_way", make_way_as_primary_only),
        "accepts no records",
        0,
    ),
    "primary_making_way": (lambda: patch.object(MetadataStore, "make_way", lambda _: None), "no client registers", 6),
}
"""By name: what switches the safeguard off, what the finding says, and the first seed."""


@pytest.mark.parametrize("name", ABLATIONS)
def test_simulation_notices_when_a_safeguard_is_off(name: str) -> None:
    switch_off, says, first = ABLATIONS[name]
    with switch_off():
        for seed in range(first, first + SEEDS_MAX):
            report = run_seed(FullDisks(), seed)
            if report.finding is not None:
                assert says in report.finding
                return
    pytest.fail(f"{SEEDS_MAX} seeds without {name} found nothing")


def test_simulation_finds_nothing_while_all_safeguards_are_on() -> None:
    for seed in (0, 3):
        report = run_seed(FullDisks(), seed)
        assert report.finding is None, f"{report.finding}\n" + "\n".join(report.tail)
        assert report.effects["filled"]
        assert report.effects["disk_enospc"]
