"""Programs of several feature levels in one simulated cluster: nothing is found, unless a safeguard is switched off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from quiver.clock import Rng
from quiver.errors import ConflictError
from quiver.features import LEVEL_MAX, LEVEL_MIN
from quiver.manager.upgrade import ClusterUpgrade, ProgramReport
from quiver.partition.entries import PartitionEntry, build_entry
from quiver.partition.proposal_gate import ProposalGate, ProposalOutcome
from quiver.testing.clusters.model import ClusterModel
from quiver.testing.clusters.swarm import ClusterKnobs, draw_cluster_knobs
from quiver.testing.clusters.versions import list_old_nodes
from quiver.testing.clusters.world import ClusterWorld
from quiver.testing.loop import SimulatedLoop
from quiver.testing.randomness import RandomStreams
from quiver.testing.simulator.runner import run_seed
from quiver.testing.simulator.world import SimulationRun
from quiver.testing.trace import Trace
from quiver.wire.admin_messages import NodeProgram

SEEDS_MAX = 8
WEIGHTS = {"change_program": 10, "upgrade_cluster": 14, "kill": 3, "isolate": 2, "lost_database": 2, "power_loss": 2}


@dataclass(frozen=True, slots=True)
class MixedVersions(ClusterModel):
    """Clusters whose nodes begin with the earlier program and change it often."""

    def draw_knobs(self, rng: Rng) -> ClusterKnobs:
        knobs = replace(draw_cluster_knobs(rng), queue=None, members=None)
        metadata = replace_struct(knobs.settings.metadata, snapshot_entries=20)
        settings = replace_struct(knobs.settings, metadata=metadata)
        return replace(knobs, mixes_versions=True, weights=WEIGHTS, chaos_ms=5_000, gap_ms=400, settings=settings)


def replace_struct(value: Any, **changes: Any) -> Any:
    return type(value)(**{name: getattr(value, name) for name in value.__struct_fields__} | changes)


def believe_that_all_know_everything(upgrade: ClusterUpgrade, **_: object) -> Iterator[NodeProgram]:
    for node in sorted(upgrade._store.view().brokers):
        yield NodeProgram(node=node, level_max=LEVEL_MAX)


def propose_at_the_highest_level(gate: ProposalGate, entry: PartitionEntry) -> ProposalOutcome:
    return gate._propose(build_entry(entry, level=LEVEL_MAX))


def judge_by_what_the_primary_knows(upgrade: ClusterUpgrade, report: ProgramReport) -> None:
    if report.level_max < upgrade._store.level_max:
        raise ConflictError("not done: the program is too old", code="program_too_old")


ABLATIONS = {
    "entries_ignore_the_level": ("V1", ProposalGate, "propose_entry", propose_at_the_highest_level, 1),
    "upgrade_does_not_ask_the_nodes": (
        "V2",
        ClusterUpgrade,
        "_list_programs",
        believe_that_all_know_everything,
        2,
    ),
    "programs_are_not_judged_by_the_level": ("V3", ClusterUpgrade, "check", judge_by_what_the_primary_knows, 0),
}
"""By name: what its finding begins with, the safeguard, what replaces it, and a seed that shows it at present."""


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_found_while_programs_change(seed: int) -> None:
    report = run_seed(MixedVersions(), seed)
    assert report.finding is None, f"{report.finding} (seed {seed})\n" + "\n".join(map(str, report.tail))


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    invariant, owner, attribute, replacement, first_seed = ABLATIONS[name]
    monkeypatch.setattr(owner, attribute, replacement)
    found = (run_seed(MixedVersions(), seed).finding for seed in range(first_seed, first_seed + SEEDS_MAX))
    assert any(str(finding).startswith(f"{invariant}: ") for finding in found)


@pytest.fixture
def world() -> Iterator[ClusterWorld]:
    streams, trace = RandomStreams("versions"), Trace()
    loop = SimulatedLoop(streams.schedule, trace=trace)
    world = ClusterWorld(SimulationRun(loop, trace, streams), MixedVersions().draw_knobs(streams.stream("knobs")))
    yield world
    loop.close()
    world.close()


def test_process_is_judged_by_the_program_that_it_runs_not_by_the_one_installed_meanwhile(world: ClusterWorld) -> None:
    host = world.add_node(is_manager=True)
    host.start()
    world.loop.run_until_complete(asyncio.sleep(0.01))
    host.level_max = LEVEL_MAX
    assert list_old_nodes(world, LEVEL_MAX) == {host: 1}
    host._handle_exit(ConflictError("not done: the program is too old", code="program_too_old"))
    assert world.too_old == [(host.id, LEVEL_MIN)]
    assert list_old_nodes(world, LEVEL_MAX) == {}
    host.start()
    world.loop.run_until_complete(asyncio.sleep(0.01))
    assert list_old_nodes(world, LEVEL_MAX) == {}
