"""Many seeds over all cores, and the shrinking of the schedules that fail.

A campaign that injected too little proves nothing: it fails as vacuous. Results arrive in any order, are merged in the
order of their seeds, and depend on nothing but the seeds.

A failing schedule is shrunk as delta debugging does: leave out halves, then smaller parts, then single faults, while
the run still fails; bounded by a number of runs. The finding may change on the way: a shorter schedule that shows
another symptom of the same bug is as good, and the full schedule stays available.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from quiver.testing.simulator.limits import SECONDS_MAX
from quiver.testing.simulator.report import SeedReport
from quiver.testing.simulator.runner import Model, run_seed

SEEDS_PER_FAULT_KIND = 10
"""A campaign must inject each kind of fault at least once per this many seeds."""
GC_THRESHOLDS = (100_000, 50, 100)
"""A seed keeps its whole history in memory: with Python's thresholds the collector, which reads all of it again and
again, takes a sixth of the time."""


@dataclass(slots=True)
class CampaignSummary:
    """Sums over the seeds of a campaign, and the reports that have a finding."""

    kinds: tuple[str, ...]
    """The kinds of faults that the campaign must have injected."""
    seeds: int = 0
    events: int = 0
    simulated_ms: int = 0
    real_s: float = 0.0
    sends: Counter[str] = field(default_factory=Counter)
    reads: int = 0
    consumed: int = 0
    trimmed: int = 0
    elections: int = 0
    changes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    effects: Counter[str] = field(default_factory=Counter)
    findings: list[SeedReport] = field(default_factory=list)

    def add(self, report: SeedReport) -> None:
        """Count one seed."""
        self.seeds += 1
        self.events += report.events
        self.simulated_ms += report.simulated_ms
        self.sends.update(report.sends)
        self.reads += report.reads
        self.consumed += report.consumed
        self.trimmed += report.trimmed
        self.elections += report.elections
        self.changes += report.changes
        self.faults.update(report.faults)
        self.effects.update(report.effects)
        if report.finding is not None:
            self.findings.append(report)
            self.findings.sort(key=lambda found: found.seed)

    @property
    def cluster_hours(self) -> float:
        """Return the simulated time in hours."""
        return self.simulated_ms / 3_600_000

    def missing_faults(self) -> list[str]:
        """Return the kinds of faults that were injected too rarely to prove anything."""
        needed = self.seeds // SEEDS_PER_FAULT_KIND
        return [kind for kind in self.kinds if self.faults[kind] < needed]


def run_campaign(
    model: Model[Any, Any],
    seeds: Sequence[int],
    *,
    jobs: int,
    seconds_max: float | None = None,
    seed_seconds_max: float = SECONDS_MAX,
    on_report: Callable[[SeedReport], None] | None = None,
) -> CampaignSummary:
    """Run seeds in `jobs` processes until all are done or the time is up; call `on_report` with each report.

    A seed that uses more than `seed_seconds_max` of processor time is reported as a finding, and the next one begins.
    """
    summary = CampaignSummary(model.required_faults)
    started = time.monotonic()
    run = partial(run_seed, model, seconds_max=seed_seconds_max)
    for report in _reports(run, seeds, jobs, started + seconds_max if seconds_max is not None else None):
        summary.add(report)
        if on_report is not None:
            on_report(report)
    summary.real_s = time.monotonic() - started
    return summary


def _reports(
    run: Callable[[int], SeedReport], seeds: Sequence[int], jobs: int, deadline: float | None
) -> Iterator[SeedReport]:
    waiting = iter(seeds)
    if jobs == 1:
        for seed in waiting:
            if _is_over(deadline):
                return
            yield run(seed)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks held by the parent's threads
    with ProcessPoolExecutor(jobs, context, gc.set_threshold, GC_THRESHOLDS) as pool:
        running = {pool.submit(run, seed) for seed in islice(waiting, 4 * jobs)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from _results(done)
            if not _is_over(deadline):
                running |= {pool.submit(run, seed) for seed in islice(waiting, len(done))}


def _results(done: set[Future[SeedReport]]) -> list[SeedReport]:
    return sorted((future.result() for future in done), key=lambda report: report.seed)


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


RUNS_MAX = 60

Rerun = Callable[[frozenset[int]], SeedReport]
"""Run a seed without the faults of these numbers."""


def shrink(report: SeedReport, model: Model[Any, Any], *, runs_max: int = RUNS_MAX) -> SeedReport | None:
    """Return the report of the shortest failing schedule found for a report's seed.

    None if the seed does not fail, or did not end: every further run might not end, either.
    """
    if report.finding is None or report.is_cut_off:
        return None
    numbers = list(range(len(report.schedule)))
    return ScheduleShrinker(
        numbers, lambda left_out: run_seed(model, report.seed, left_out=left_out), runs_max
    ).shrink()


class ScheduleShrinker:
    """Search for a short schedule that still fails."""

    def __init__(self, numbers: list[int], run: Rerun, runs_max: int) -> None:
        self._all = frozenset(numbers)
        self._kept = numbers
        self._run = run
        self._runs_left = runs_max
        self._best: SeedReport | None = None

    def shrink(self) -> SeedReport | None:
        """Search until no fault can be left out, or the runs are used up."""
        if not self._still_fails(self._kept):
            return None
        part = len(self._kept)
        while part and self._runs_left:
            if not self._drop_one_part(part):
                part //= 2
            part = min(part, len(self._kept))
        return self._best

    def _drop_one_part(self, part: int) -> bool:
        """Leave out the first part that is not needed; tell whether there was one."""
        return any(
            self._still_fails(self._kept[:first] + self._kept[first + part :])
            for first in range(0, len(self._kept), part)
        )

    def _still_fails(self, kept: list[int]) -> bool:
        if not self._runs_left:
            return False
        self._runs_left -= 1
        report = self._run(self._all.difference(kept))
        if report.finding is None:
            return False
        self._kept, self._best = kept, report
        return True
