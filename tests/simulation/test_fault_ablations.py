"""The fault policy matters to the whole-cluster simulation: switch one part of it off, and a checker notices soon.

With everything in place, seeds under the same faults find nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from unittest.mock import patch

import msgspec
import pytest

from quiver.clock import Rng
from quiver.errors import DecodeError
from quiver.metadata.apply import ApplyOutcome
from quiver.metadata.state_machine import MetadataStateMachine
from quiver.metadata.store import MetadataStore
from quiver.model import Index
from quiver.raft import Output, Raft
from quiver.replication import Replicator
from quiver.testing.clusters.model import ClusterModel
from quiver.testing.clusters.swarm import ClusterKnobs, draw_cluster_knobs
from quiver.testing.simulator.runner import run_seed

SEEDS_MAX = 8
SPIN_SECONDS_MAX = 6.0
"""Processor time after which a seed counts as one that does not end."""


@dataclass(frozen=True, slots=True)
class OneKind(ClusterModel):
    """Clusters that suffer one kind of fault only."""

    kind: str = ""

    def draw_knobs(self, rng: Rng) -> ClusterKnobs:
        knobs = replace(draw_cluster_knobs(rng), queue=None, members=None)
        metadata = msgspec.structs.replace(knobs.settings.metadata, snapshot_entries=20)
        return replace(
            knobs,
            admins=0,
            weights={self.kind: 1},
            settings=msgspec.structs.replace(knobs.settings, metadata=metadata),
        )


def let_errors_out(_: Replicator, *__: object) -> bool:
    return False


def stay_leader(raft: Raft, now_ms: int) -> Output:
    raft._state.begin(now_ms)
    return raft._state.finish()


def raise_on_bad_commands(_: MetadataStateMachine, index: Index, outcome: ApplyOutcome) -> None:
    if outcome.refusal is not None and outcome.refusal.code == "bad_command":
        raise DecodeError(f"a bad command at {index}")


async def wait_for_the_state(store: MetadataStore, index: Index) -> None:
    """Wait as `run_compaction` once did: the state may be ahead of the member, and then this never waits."""
    await store.wait_applied(index)


Ablation = Callable[[], AbstractContextManager[object]]
ABLATIONS: dict[str, tuple[str, Ablation, str, int]] = {
    "containment": (
        "partition_fault",
        lambda: patch.object(Replicator, "contain", let_errors_out),
        "injected at entry",
        0,
    ),
    "resigning": ("unknown_entry", lambda: patch.object(Raft, "resign", stay_leader), "F3", 0),
    "refusing_bad_commands": (
        "bad_command",
        lambda: patch.object(MetadataStateMachine, "_note", raise_on_bad_commands),
        "a node crashed",
        0,
    ),
    "waiting_for_the_member": (
        "kill",
        lambda: patch.object(MetadataStore, "_wait_replayed", wait_for_the_state),
        "did not end",
        0,
    ),
}
"""By name: the kind of fault, what switches the safeguard off, what the finding says, and the first seed."""


@pytest.mark.parametrize("name", ABLATIONS)
def test_simulation_notices_when_a_safeguard_is_off(name: str) -> None:
    kind, switch_off, says, first = ABLATIONS[name]
    with switch_off():
        for seed in range(first, first + SEEDS_MAX):
            report = run_seed(OneKind(kind=kind), seed, seconds_max=SPIN_SECONDS_MAX)
            if report.finding is not None:
                assert says in report.finding
                return
    pytest.fail(f"{SEEDS_MAX} seeds without {name} found nothing")


@pytest.mark.parametrize("kind", ["partition_fault", "unknown_entry", "bad_command"])
def test_simulation_finds_nothing_while_all_safeguards_are_on(kind: str) -> None:
    report = run_seed(OneKind(kind=kind), 2)
    assert report.finding is None, f"{report.finding}\n" + "\n".join(report.tail)
    assert report.faults[kind]
