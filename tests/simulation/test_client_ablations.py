"""What protects clients matters to the whole-cluster simulation: switch one rule off, and a checker notices soon.

Clients expire by a replicated step, with two graces: a new primary, and one to which a dead node returns, give everyone
a whole period. And a request is judged by metadata that is no older than what its sender has seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec
import pytest

from quiver.clock import Rng
from quiver.dispatch import RequestDispatcher
from quiver.errors import QuiverError
from quiver.manager.client_expiry import ClientExpiry, ClientKey
from quiver.testing.clusters.host import SimulatedHost
from quiver.testing.clusters.model import ClusterModel
from quiver.testing.clusters.operations import FAULTS
from quiver.testing.clusters.swarm import ClusterKnobs, TopicPlan, draw_cluster_knobs
from quiver.testing.clusters.world import ClusterWorld
from quiver.testing.simulator.faults import FaultInjection
from quiver.testing.simulator.runner import run_seed
from quiver.wire.messages import RetentionInfo

SEEDS_MAX = 8
RETURN_BEFORE_MS = 800
"""How long before clients would expire a node returns that knows better."""


async def dark_leader(fault: FaultInjection[ClusterWorld]) -> None:
    """Cut a leader off from the primary, so that it serves clients and nobody hears of them; then kill it, and what it
    has not reported is gone."""
    world = fault.world
    view, primary = world.view(), world.primary()
    leaders = [] if view is None else [world.leader(one.group_id) for one in view.partitions.values()]
    dark = next((leader[0] for leader in leaders if leader is not None), None)
    if primary is None or dark is None:
        return
    if primary is dark:
        await pass_primacy_on(world, primary)
        primary = world.primary()
        if primary is None or primary is dark:
            return
    world.network.cut(dark.id, primary.id)
    await asyncio.sleep((world.knobs.settings.manager.client_expiry_ms - RETURN_BEFORE_MS) / 1000)
    dark.kill(power_loss=False)
    world.network.mend(dark.id, primary.id)
    dark.start()


async def pass_primacy_on(world: ClusterWorld, primary: SimulatedHost) -> None:
    """Let another manager be the primary."""
    assert primary.node is not None
    other = next(host.id for host in world.running() if host is not primary)
    with suppress(QuiverError), world.loop.node_scope(primary.id):
        primary.node._member.transfer_leadership(other)
    await asyncio.sleep(1)


@dataclass(frozen=True, slots=True)
class Outages(ClusterModel):
    """Clusters whose nodes are killed and restarted while clients come and go."""

    faults: ClassVar[Any] = {**FAULTS, "dark_leader": dark_leader}
    kinds: tuple[str, ...] = ("kill", "stop")

    def draw_knobs(self, rng: Rng) -> ClusterKnobs:
        weights = dict.fromkeys(self.kinds, 1)
        knobs = replace(draw_cluster_knobs(rng), queue=None, members=None)
        return replace(knobs, weights=weights, is_calm=False, mixes_versions=False)


@dataclass(frozen=True, slots=True)
class DarkLeaders(Outages):
    """Clusters of three nodes with one partition, whose leader the primary does not hear; clients ask nobody else."""

    kinds: tuple[str, ...] = ("dark_leader",)

    def draw_knobs(self, rng: Rng) -> ClusterKnobs:
        knobs = Outages.draw_knobs(self, rng)
        manager = msgspec.structs.replace(knobs.settings.manager, dead_after_ms=1_500, rebuild_after_ms=60_000)
        return replace(
            knobs,
            managers=3,
            brokers=0,
            topics=(TopicPlan("topic-0", partitions=1, replicas=3, retention=RetentionInfo()),),
            settings=msgspec.structs.replace(knobs.settings, manager=manager),
            client=msgspec.structs.replace(knobs.client, metadata_age_ms_max=60_000),
            chaos_ms=15_000,
            gap_ms=8_000,
            p_restart=0.0,
            visitors=12,
        )


def take_unknown_for_silent(expiry: ClientExpiry, key: ClientKey, period_ms: int) -> bool:
    """Expire whomever this primary has not heard of, as if it had listened all the time."""
    return key not in expiry._fresh and (key not in expiry._heard_ms or _is_silent(expiry, key, period_ms))


def observe_without_grace(expiry: ClientExpiry, passed_ms: int) -> None:
    """Let the time in which a dead node reported nothing count after its return, too."""
    _observe(expiry, passed_ms)
    expiry._grace_ms = 0


def handle_at_once(dispatcher: RequestDispatcher, *request: Any) -> Awaitable[Any]:
    """Judge a request by the metadata that this node happens to have."""
    return dispatcher._handle_now(*request)


_is_silent = ClientExpiry._is_silent
_observe = ClientExpiry._observe

ABLATIONS: dict[str, tuple[ClusterModel, tuple[type, str, Any], tuple[str, ...], int]] = {
    "grace_of_a_new_primary": (Outages(), (ClientExpiry, "_is_silent", take_unknown_for_silent), ("E1",), 2),
    "grace_after_a_return": (DarkLeaders(), (ClientExpiry, "_observe", observe_without_grace), ("E1",), 3),
    "known_index": (Outages(), (RequestDispatcher, "_handle", handle_at_once), ("C: ", "A1"), 0),
}
"""By name: the model, what is replaced, what the finding begins with, and the first seed."""


@pytest.mark.parametrize("name", ABLATIONS)
def test_simulation_notices_when_a_rule_is_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, replaced, says, first = ABLATIONS[name]
    monkeypatch.setattr(*replaced)
    for seed in range(first, first + SEEDS_MAX):
        report = run_seed(model, seed)
        if report.finding is not None:
            assert report.finding.startswith(says), report.finding
            return
    pytest.fail(f"{SEEDS_MAX} seeds without {name} found nothing")


@pytest.mark.parametrize(("model", "seed"), [(Outages(), 0), (DarkLeaders(), 3)], ids=["outages", "dark_leaders"])
def test_simulation_finds_nothing_with_every_rule_on(model: ClusterModel, seed: int) -> None:
    report = run_seed(model, seed)
    assert report.finding is None, f"{report.finding}\n" + "\n".join(report.tail)
