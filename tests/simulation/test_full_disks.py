"""Full disks in whole clusters: nothing ends, a majority with room goes on; without a safeguard, a checker notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
from quiver.testing.clusters import full_disks
from quiver.testing.clusters.host import SimulatedHost
from quiver.testing.clusters.model import ClusterModel
from quiver.testing.clusters.swarm import ClusterKnobs, TopicPlan, draw_cluster_knobs
from quiver.testing.clusters.world import ClusterWorld
from quiver.testing.simulator.runner import run_seed
from quiver.wire.messages import RetentionInfo

SEEDS_MAX = 8


@dataclass(frozen=True, slots=True)
class FullDisks(ClusterModel):
    """Clusters whose disks fill up, and that suffer nothing else."""

    def draw_knobs(self, rng: Rng) -> ClusterKnobs:
        knobs = replace(draw_cluster_knobs(rng), queue=None, members=None)
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


def pick_primary(world: ClusterWorld, _: Rng) -> list[SimulatedHost]:
    primary = world.primary()
    return [] if primary is None else [primary]


def pick_leader(world: ClusterWorld, _: Rng) -> list[SimulatedHost]:
    leaders = (host for host in world.running() if any(one.member.is_leader for one in world.replicas(host).values()))
    return [next(leaders)]


@contextmanager
def fill(pick: object) -> Iterator[None]:
    """Let nothing fit on the disks of chosen machines."""
    with patch.object(full_disks, "_pick_minority", pick), patch.object(full_disks, "_ROOMS", (0,)):
        yield


@contextmanager
def switch_off(part: type, name: str, replacement: object, *, pick: object) -> Iterator[None]:
    """Switch a safeguard off, and fill the disks of chosen machines."""
    with patch.object(part, name, replacement), fill(pick):
        yield


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
        1,
    ),
    "making_way": (
        lambda: switch_off(LeaderBalancer, "_make_way", make_way_as_primary_only, pick=pick_leader),
        "accepts no records",
        2,
    ),
    "primary_making_way": (
        lambda: switch_off(MetadataStore, "make_way", lambda _: None, pick=pick_primary),
        "no client registers",
        2,
    ),
}
"""By name: what switches the safeguard off, what the finding says, and the first seed."""


@pytest.mark.parametrize("name", ABLATIONS)
def test_simulation_notices_when_a_safeguard_is_off(name: str) -> None:
    ablate, says, first = ABLATIONS[name]
    with ablate():
        for seed in range(first, first + SEEDS_MAX):
            report = run_seed(FullDisks(), seed)
            if report.finding is not None:
                assert says in report.finding
                return
    pytest.fail(f"{SEEDS_MAX} seeds without {name} found nothing")


def test_simulation_finds_nothing_while_all_safeguards_are_on() -> None:
    for seed in (2, 4):
        report = run_seed(FullDisks(), seed)
        assert report.finding is None, f"{report.finding}\n" + "\n".join(report.tail)
        assert report.effects["filled"]
        assert report.effects["disk_enospc"]


@pytest.mark.parametrize("pick", [pick_primary, pick_leader])
def test_disks_that_the_ablations_fill_do_no_harm_while_all_safeguards_are_on(pick: object) -> None:
    with fill(pick):
        report = run_seed(FullDisks(), 2)
    assert report.finding is None, f"{report.finding}\n" + "\n".join(report.tail)
    assert report.effects["filled"]
