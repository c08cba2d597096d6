"""Many seeds over all cores, and what they add up to.

A campaign that injected too little proves nothing: it fails as vacuous. Results come in any order, are merged
in the order of their seeds, and depend on nothing but the seeds.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice

from quiver.testing.report import Report, Run

SEEDS_PER_FAULT_KIND = 10
"""A campaign must inject each kind of fault at least once for every so many seeds."""


@dataclass(slots=True)
class Summary:
    """What a campaign did and found."""

    kinds: tuple[str, ...]
    """The kinds of faults that it must have injected."""
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
    findings: list[Report] = field(default_factory=list)

    def add(self, report: Report) -> None:
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
        """Return how long the simulated clusters ran, in hours."""
        return self.simulated_ms / 3_600_000

    def missing_faults(self) -> list[str]:
        """Return the kinds of faults that too few seeds suffered, so that the campaign says nothing of them."""
        needed = self.seeds // SEEDS_PER_FAULT_KIND
        return [kind for kind in self.kinds if self.faults[kind] < needed]


def run_campaign(
    run: Run,
    seeds: Sequence[int],
    *,
    kinds: Iterable[str],
    jobs: int,
    seconds_max: float | None = None,
    on_report: Callable[[Report], None] | None = None,
) -> Summary:
    """Run seeds in `jobs` processes until all are done or the time is up; `on_report` hears of each.

    `kinds` are the faults that it must have injected to mean anything.
    """
    summary = Summary(tuple(kinds))
    started = time.monotonic()
    for report in _reports(run, seeds, jobs, started + seconds_max if seconds_max is not None else None):
        summary.add(report)
        if on_report is not None:
            on_report(report)
    summary.real_s = time.monotonic() - started
    return summary


def _reports(run: Run, seeds: Sequence[int], jobs: int, deadline: float | None) -> Iterator[Report]:
    waiting = iter(seeds)
    if jobs == 1:
        for seed in waiting:
            if _is_over(deadline):
                return
            yield run(seed)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks of the parent's threads
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        running = {pool.submit(run, seed) for seed in islice(waiting, 4 * jobs)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from _results(done)
            if not _is_over(deadline):
                running |= {pool.submit(run, seed) for seed in islice(waiting, len(done))}


def _results(done: set[Future[Report]]) -> list[Report]:
    return sorted((future.result() for future in done), key=lambda report: report.seed)


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline
