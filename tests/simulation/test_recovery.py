"""A majority is lost for good in a simulated cluster, and `quiver recover` saves what it says, or a checker notices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from quiver.clock import Rng
from quiver.operations import recover
from quiver.operations.survivors import Copy
from quiver.testing.clusters.recovery import RecoveryModel
from quiver.testing.clusters.swarm import ClusterKnobs, TopicPlan
from quiver.testing.simulator.runner import run_seed
from quiver.wire.messages import RetentionInfo

SEEDS_MAX = 8


@dataclass(frozen=True, slots=True)
class FewSurvivors(RecoveryModel):
    """Five nodes with everything on each, of which two are left after a short chaos."""

    survivors: int | None = 2

    def draw_knobs(self, rng: Rng) -> ClusterKnobs:
        knobs = RecoveryModel.draw_knobs(self, rng)
        topics = (TopicPlan("topic-0", partitions=1, replicas=5, retention=RetentionInfo()),)
        weights = {"isolate": 1, "split": 1}
        return replace(knobs, managers=5, brokers=0, topics=topics, weights=weights, chaos_ms=2_000, makers=0)


def worst_copy(copies: Sequence[Copy]) -> Copy:
    """Go on with the copy that has least."""
    return min(copies, key=lambda copy: copy.rank)


ABLATIONS: dict[str, tuple[Any, str, Any, tuple[str, ...], int]] = {
    "best_copy": (recover, "best_copy", worst_copy, ("L1", "F1", "F2", "invariant broken"), 1),
}
"""By name: what is replaced by what, what the finding begins with, and the first seed."""


@pytest.mark.parametrize(("model", "seed"), [(RecoveryModel(), 4), (FewSurvivors(), 1)], ids=["any", "few"])
def test_nothing_is_lost_that_the_plan_does_not_give_up(model: RecoveryModel, seed: int) -> None:
    report = run_seed(model, seed)
    assert report.finding is None, f"{report.finding} (seed {seed})\n" + "\n".join(report.tail)
    assert report.sends["ok"], "the recovered cluster acknowledged nothing"


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, replacement, says, first = ABLATIONS[name]
    monkeypatch.setattr(owner, attribute, replacement)
    for seed in range(first, first + SEEDS_MAX):
        finding = run_seed(FewSurvivors(), seed).finding
        if finding is not None:
            assert finding.startswith(says), finding
            return
    pytest.fail(f"{SEEDS_MAX} seeds without {name} found nothing")
