"""Holds matter to the whole-cluster simulation: without them, retention trims what programs have yet to read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import pytest

from quiver.broker import retention
from quiver.clock import Rng
from quiver.testing.clusters.model import ClusterModel
from quiver.testing.clusters.swarm import ClusterKnobs, TopicPlan, draw_cluster_knobs
from quiver.testing.simulator.runner import run_seed
from quiver.wire.messages import RetentionInfo

SEEDS_MAX = 8


@dataclass(frozen=True, slots=True)
class Holders(ClusterModel):
    """Clusters whose topic keeps little, and programs that hold its records while nodes are killed."""

    def draw_knobs(self, rng: Rng) -> ClusterKnobs:
        knobs = replace(draw_cluster_knobs(rng), queue=None, members=None, weights={"kill": 1, "stop": 1})
        partition = msgspec.structs.replace(knobs.settings.partition, summary_bytes=1024, retention_interval_ms=200)
        return replace(
            knobs,
            topics=(TopicPlan("topic-0", partitions=2, replicas=1, retention=RetentionInfo(bytes=1024)),),
            settings=msgspec.structs.replace(knobs.settings, partition=partition),
            senders=3,
            values_max=20,
            holders=3,
            is_calm=False,
            mixes_versions=False,
        )


def derive_policy_without_holds(*arguments: object) -> object:
    """Trim by the topic's bounds alone."""
    return msgspec.structs.replace(_derive_policy(*arguments), held_offset=None)  # type: ignore[arg-type] # as it is called


_derive_policy = retention.derive_policy


def test_simulation_notices_when_retention_ignores_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "derive_policy", derive_policy_without_holds)
    for seed in range(SEEDS_MAX):
        report = run_seed(Holders(), seed)
        if report.finding is not None:
            assert report.finding.startswith("H1"), report.finding
            return
    pytest.fail(f"{SEEDS_MAX} seeds without holds found nothing")


def test_simulation_finds_nothing_with_holds() -> None:
    report = run_seed(Holders(), 0)
    assert report.finding is None, f"{report.finding}\n" + "\n".join(report.tail)
    assert report.effects["hold looked at"], "the run looked at no hold"
