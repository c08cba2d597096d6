"""What protects members and workers matters to the whole-cluster simulation: switch it off, and a checker notices soon.

With everything in place, seeds under the same faults find nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import msgspec
import pytest

from quiver.clock import Rng
from quiver.model import ConsumerId
from quiver.partition import queue_plans
from quiver.partition.cursors import CursorMoves
from quiver.partition.lease_schedule import LeaseSchedule
from quiver.testing import group_ablations, queue_ablations
from quiver.testing.clusters.model import ClusterModel
from quiver.testing.clusters.swarm import (
    ClusterKnobs,
    TopicPlan,
    draw_cluster_knobs,
    draw_members,
    draw_queue,
)
from quiver.testing.group_ablations import GroupSafeguard
from quiver.testing.queue_ablations import QueueSafeguard
from quiver.testing.simulator.runner import run_seed
from quiver.wire.messages import RetentionInfo

SEEDS_MAX = 8


@dataclass(frozen=True, slots=True)
class FewClients(ClusterModel):
    """Three nodes that suffer a few kinds of faults, and hardly a client but those in question."""

    kinds: tuple[str, ...] = ("kill", "stop", "isolate")

    def draw_few(self, rng: Rng) -> ClusterKnobs:
        """Draw knobs without members and workers."""
        return replace(
            draw_cluster_knobs(rng),
            managers=3,
            brokers=0,
            topics=(TopicPlan("topic-0", partitions=3, replicas=3, retention=RetentionInfo()),),
            weights=dict.fromkeys(self.kinds, 1),
            is_calm=False,
            mixes_versions=False,
            wants_encryption=False,
            senders=1,
            readers=0,
            committers=0,
            takers=0,
            makers=0,
            admins=0,
            visitors=0,
            queue=None,
            members=None,
            chaos_ms=9_000,
            gap_ms=400,
            drifts_ppm=(0,),
        )


@dataclass(frozen=True, slots=True)
class Members(FewClients):
    """Members of a group, which die, stand still and leave."""

    outsiders: int = 0

    def draw_knobs(self, rng: Rng) -> ClusterKnobs:
        plan = replace(draw_members(rng, is_calm=False), members=3, instances=0, session_timeout_ms=1_000, p_pause=0.1)
        return replace(self.draw_few(rng), members=replace(plan, outsiders=self.outsiders))


@dataclass(frozen=True, slots=True)
class Workers(FewClients):
    """Workers of a queue, which die and stand still."""

    order: Literal["offset", "key"] = "offset"
    p_break: float = 0.0

    def draw_knobs(self, rng: Rng) -> ClusterKnobs:
        plan = draw_queue(rng, 3, is_calm=False)
        settings = msgspec.structs.replace(
            plan.settings, lease_ms=400, max_attempts=3, in_flight_max=50, order=self.order
        )
        topic = replace(plan.topic, replicas=3, partitions=1)
        plan = replace(plan, topic=topic, settings=settings, workers=3, senders=2, keys=2, p_pause=0.3)
        return replace(self.draw_few(rng), queue=plan, senders=0, p_break=self.p_break)


def accept_any_session(moves: CursorMoves, consumer_id: ConsumerId, session: int) -> bool:
    """Tell whether a session is new, and refuse none."""
    current = moves._planned_sessions.get(consumer_id, moves._state.sessions.get(consumer_id, 0))
    return session > current


def without_group(safeguard: GroupSafeguard) -> Callable[[], AbstractContextManager[object]]:
    return lambda: group_ablations.disabled(safeguard)


def without_queue(safeguard: QueueSafeguard) -> Callable[[], AbstractContextManager[object]]:
    return lambda: queue_ablations.disabled(safeguard)


def without(where: Any, name: str, replacement: Any) -> Callable[[], AbstractContextManager[object]]:
    return lambda: patch.object(where, name, replacement)


MOVERS = ("kill", "stop", "isolate", "broken_requests", "power_loss")
ABLATIONS: dict[str, tuple[ClusterModel, Callable[[], AbstractContextManager[object]], tuple[str, ...], int]] = {
    "fence_in_the_partition": (
        Members(),
        without(CursorMoves, "check_session", accept_any_session),
        ("zombie-commit", "zombie-read", "commit-undone", "cursor-passed"),
        0,
    ),
    "fence_of_outsiders": (Members(outsiders=1), without(CursorMoves, "check_plain", lambda *_: None), ("M6",), 0),
    "epoch_bump": (Members(), without_group(GroupSafeguard.EPOCH_BUMP), ("epoch-shared",), 0),
    "take_before_give": (Members(), without_group(GroupSafeguard.TAKE_BEFORE_GIVE), ("M1", "M5"), 0),
    "failover_grace": (Members(), without_group(GroupSafeguard.FAILOVER_GRACE), ("M4",), 0),
    "lease_expiry": (Workers(), without_queue(QueueSafeguard.LEASE_EXPIRY), ("F3",), 0),
    "lease_exclusion": (
        Workers(),
        without_queue(QueueSafeguard.LEASE_EXCLUSION),
        ("lease-overlap", "lease-refused", "short-delay"),
        0,
    ),
    "stale_receipts": (Workers(), without_queue(QueueSafeguard.STALE_RECEIPTS), ("zombie-settled",), 0),
    "window_summary": (Workers(), without_queue(QueueSafeguard.WINDOW_SUMMARY), ("unsettled", "Q2", "Q3"), 2),
    "commit_before_delivery": (
        Workers(),
        without_queue(QueueSafeguard.COMMIT_BEFORE_DELIVERY),
        ("doubled-grant", "lease-overlap", "attempt-uncounted", "lease-refused"),
        7,
    ),
    "dead_letters_once": (
        Workers(MOVERS, p_break=0.1),
        without_queue(QueueSafeguard.DEAD_LETTERS_ONCE),
        ("dead-twice",),
        67,
    ),
    "max_attempts": (
        Workers(),
        without(queue_plans, "is_exhausted", lambda *_: False),
        ("attempts-exceeded", "dead-early"),
        0,
    ),
    "order_of_keys": (
        Workers(order="key"),
        without(LeaseSchedule, "is_free", lambda *_: True),
        ("key-order",),
        0,
    ),
}
"""By name: the model, what switches the safeguard off, what the finding says, and the first seed."""


@pytest.mark.parametrize("name", ABLATIONS)
def test_simulation_notices_when_a_safeguard_is_off(name: str) -> None:
    model, switch_off, says, first = ABLATIONS[name]
    with switch_off():
        for seed in range(first, first + SEEDS_MAX):
            report = run_seed(model, seed)
            if report.finding is not None:
                assert any(one in report.finding for one in says), report.finding
                return
    pytest.fail(f"{SEEDS_MAX} seeds without {name} found nothing")


@pytest.mark.parametrize(
    "model",
    [Members(), Members(outsiders=1), Workers(), Workers(order="key")],
    ids=["members", "outsiders", "workers", "workers_by_key"],
)
def test_simulation_finds_nothing_while_all_safeguards_are_on(model: ClusterModel) -> None:
    report = run_seed(model, 1)
    assert report.finding is None, f"{report.finding}\n" + "\n".join(report.tail)
    assert report.effects["grant"] or report.effects["ack"]
