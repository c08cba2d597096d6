"""Seeds of consensus groups: none has a finding, each repeats exactly, and together they inject every kind of fault.

`SEEDS` seeds run in chunks, so that several processes share them; `make sim` runs thousands. A failure shows the
command that replays it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quiver.testing.groups.model import GroupModel
from quiver.testing.groups.swarm import FAULT_KINDS
from quiver.testing.simulator.campaign import CampaignSummary, ScheduleShrinker, shrink
from quiver.testing.simulator.report import SeedReport
from quiver.testing.simulator.runner import run_seed

FAULT_SEEDS = 30
"""Seeds that together inject every kind of fault."""
SEEDS = 150
CHUNK = 10

MODEL = GroupModel()
_PRINT_DIGEST = (
    "import sys; from quiver.testing.groups.model import GroupModel; "
    "from quiver.testing.simulator.runner import run_seed; print(run_seed(GroupModel(), int(sys.argv[1])).digest)"
)


def run_clean(seed: int) -> SeedReport:
    report = run_seed(MODEL, seed)
    assert report.finding is None, f"{report.finding}\nreplay: {report.replay}\n" + "\n".join(report.tail)
    assert report.sends["ok"], f"seed {seed} acknowledged nothing"
    return report


@pytest.mark.parametrize("first", range(FAULT_SEEDS, SEEDS, CHUNK))
def test_seeds_find_nothing(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run_clean(seed)


def test_leader_that_is_lost_while_replicas_are_compared_is_no_finding() -> None:
    run_clean(6_000_346)


def test_seed_is_the_same_again() -> None:
    first, second = run_seed(MODEL, 3), run_seed(MODEL, 3)
    assert first == second
    assert first.digest != run_seed(MODEL, 4).digest


@pytest.mark.parametrize("seed", [5, 11])
def test_seed_does_not_depend_on_hash_order(seed: int) -> None:
    digests = set()
    for hash_seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", _PRINT_DIGEST, str(seed)]
        digests.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(digests) == 1


def test_campaign_without_enough_of_a_fault_is_vacuous() -> None:
    summary = CampaignSummary(tuple(FAULT_KINDS))
    for seed in range(20):
        report = SeedReport(seed)
        report.faults.update({kind: 1 for kind in FAULT_KINDS if kind != "bit_flip"})
        summary.add(report)
    assert summary.missing_faults() == ["bit_flip"]


def test_seeds_find_nothing_and_inject_every_kind_of_fault() -> None:
    summary = CampaignSummary(tuple(FAULT_KINDS))
    for seed in range(FAULT_SEEDS):
        summary.add(run_clean(seed))
    assert summary.missing_faults() == []
    assert summary.elections > 30
    assert summary.changes > 5
    assert summary.sends["info"] > 0


def test_failing_schedule_is_shrunk_to_what_it_needs() -> None:
    runs = 0

    def run(left_out: frozenset[int]) -> SeedReport:
        nonlocal runs
        runs += 1
        kept = [str(number) for number in range(40) if number not in left_out]
        return SeedReport(1, finding="found" if {"3", "17"} <= set(kept) else None, schedule=kept)

    shortest = ScheduleShrinker(list(range(40)), run, 200).shrink()
    assert shortest is not None
    assert shortest.schedule == ["3", "17"]
    assert runs < 60


def test_seed_that_does_not_fail_is_not_shrunk() -> None:
    assert shrink(run_seed(MODEL, 1), MODEL, runs_max=1) is None
