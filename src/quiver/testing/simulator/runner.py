"""One seed from start to end: knobs, world, chaos, healing, checks, report.

A run is a pure function of the model and the seed: the same seed gives the same report, digest included. The report of
a run that found something names the command that replays it.

The schedule of faults is drawn before the run begins. Each fault has a number, a time, a kind and a duration, and draws
everything else (its targets, for example) from a random stream of its own when it is injected. So leaving one out does
not change the choices of the others, and a failing schedule can be shrunk. Every fault is a task of the `Nemesis` that
begins, lasts and is undone. When the chaos phase is over the nemesis cancels the rest, and `SimulatedWorld.heal`
repairs everything.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from quiver.clock import Rng
from quiver.errors import InvariantBroken
from quiver.testing.loop import LimitReached, SimulatedLoop, Spinning
from quiver.testing.randomness import RandomStreams
from quiver.testing.simulator.faults import FaultInjection
from quiver.testing.simulator.limits import SECONDS_MAX, limit_seconds
from quiver.testing.simulator.report import CutOff, SeedReport, Violation, describe
from quiver.testing.simulator.world import SimulatedWorld, SimulationKnobs, SimulationRun
from quiver.testing.trace import Trace

K = TypeVar("K", bound=SimulationKnobs)
W = TypeVar("W", bound=SimulatedWorld[Any, Any])

STILL_EVENTS_MAX = 100_000
"""Callbacks that may run at one moment of virtual time: more than whole runs of many seeds take."""
CALM_SHARE = 0.25
"""Share of the time without new faults, in stretches."""
_CALM_STRETCH_MS = (1_000, 4_000)
_DURATIONS_MS = (20, 100, 300, 800, 2_000, 5_000)


class Model(Protocol[K, W]):
    """A kind of simulated system. Instances are immutable and picklable: a campaign sends them to its processes."""

    option: ClassVar[str]
    """The option of `quiver sim` that chooses it."""
    stream_prefix: ClassVar[str]
    """Put before the seed, so that the models draw different numbers from the same seed."""
    events_max: ClassVar[int]
    time_max_s: ClassVar[float]
    faults: ClassVar[Mapping[str, Callable[[FaultInjection[Any]], Awaitable[None]]]]
    """Every kind of fault that a schedule may name."""
    required_faults: ClassVar[tuple[str, ...]]
    """The kinds that a campaign must have injected to prove anything."""

    @abstractmethod
    def draw_knobs(self, rng: Rng) -> K:
        """Draw the knobs of one seed."""

    @abstractmethod
    def make_world(self, run: SimulationRun, knobs: K) -> W:
        """Return the world of one run, with no machine in it."""

    @abstractmethod
    async def begin(self, world: W) -> None:
        """Start the clients, once the machines are started."""

    @abstractmethod
    async def verify(self, world: W) -> None:
        """Check liveness and safety of the healed world; raise `Violation` for what is wrong."""

    @abstractmethod
    def fill(self, report: SeedReport, world: W) -> None:
        """Add the model's own figures to a report."""


def run_seed(
    model: Model[K, W], seed: int, *, left_out: frozenset[int] = frozenset(), seconds_max: float = SECONDS_MAX
) -> SeedReport:
    """Run one seed; `left_out` omits faults of the schedule by number, `seconds_max` limits its processor time."""
    streams = _streams(model, seed)
    knobs = model.draw_knobs(streams.stream("knobs"))
    schedule = [fault for fault in plan_faults(streams.stream("faults"), knobs) if fault.number not in left_out]
    return run_schedule(model, seed, knobs, schedule, seconds_max=seconds_max)


def run_schedule(
    model: Model[K, W],
    seed: int,
    knobs: K,
    schedule: Sequence[PlannedFault],
    *,
    seconds_max: float = SECONDS_MAX,
) -> SeedReport:
    """Run these knobs and faults; the seed decides everything else."""
    streams = _streams(model, seed)
    trace = Trace()
    loop = SimulatedLoop(
        streams.schedule,
        trace=trace,
        events_max=model.events_max,
        time_max_s=model.time_max_s,
        still_events_max=STILL_EVENTS_MAX,
    )
    world = model.make_world(SimulationRun(loop, trace, streams), knobs)
    nemesis = Nemesis(world, schedule, model.faults)
    report = SeedReport(seed, option=model.option, schedule=[str(fault) for fault in schedule])
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with limit_seconds(seconds_max):
            loop.run_until_complete(_run(model, world, nemesis))
    except (Exception, InvariantBroken, Violation) as error:  # noqa: BLE001 - whatever ends a run is its finding
        report.finding = describe(error)
        report.is_cut_off = isinstance(error, CutOff | Spinning | LimitReached)
    finally:
        _fill(report, world, nemesis)
        model.fill(report, world)
        loop.close()
        world.close()
        logging.disable(level)
    return report


async def _run(model: Model[K, W], world: W, nemesis: Nemesis[W]) -> None:
    world.populate()
    await model.begin(world)
    nemesis.begin()
    end_ms = world.now_ms + world.knobs.chaos_ms
    while world.now_ms < end_ms:
        await world.wait_checked()
    nemesis.cancel()
    world.heal()
    await model.verify(world)


def _streams(model: Model[Any, Any], seed: int) -> RandomStreams:
    return RandomStreams(f"{model.stream_prefix}{seed}")


def _fill(report: SeedReport, world: SimulatedWorld[Any, Any], nemesis: Nemesis[Any]) -> None:
    report.digest = world.trace.digest()
    report.events = world.loop.event_count
    report.simulated_ms = world.now_ms
    report.faults = nemesis.injected
    report.effects = world.fault_counts()
    report.tail = world.trace.tail()


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault of a schedule."""

    number: int
    at_ms: int
    kind: str
    duration_ms: int

    def __str__(self) -> str:
        return f"#{self.number} at {self.at_ms} ms: {self.kind} for {self.duration_ms} ms"


def plan_faults(rng: Rng, knobs: SimulationKnobs) -> list[PlannedFault]:
    """Draw the faults of a run: bursts of them, and none during about a quarter of the time."""
    kinds = [kind for kind, weight in knobs.weights.items() for _ in range(weight)]
    faults: list[PlannedFault] = []
    at_ms = 500 + rng.randrange(1_500)
    while at_ms < knobs.chaos_ms:
        duration_ms = _DURATIONS_MS[rng.randrange(len(_DURATIONS_MS))]
        duration_ms += rng.randrange(duration_ms)
        faults.append(PlannedFault(len(faults), at_ms, kinds[rng.randrange(len(kinds))], duration_ms))
        at_ms += 10 + rng.randrange(2 * knobs.gap_ms)
        # A calm stretch is about 2.5 s: this probability makes up the share.
        if rng.random() < CALM_SHARE * knobs.gap_ms / 2_000:
            at_ms += _CALM_STRETCH_MS[0] + rng.randrange(_CALM_STRETCH_MS[1] - _CALM_STRETCH_MS[0])
    return faults


class Nemesis(Generic[W]):
    """Inject the faults of one schedule; `injected` counts them by kind."""

    def __init__(
        self,
        world: W,
        schedule: Sequence[PlannedFault],
        faults: Mapping[str, Callable[[FaultInjection[W]], Awaitable[None]]],
    ) -> None:
        self.injected: Counter[str] = Counter()
        self._world = world
        self._schedule = schedule
        self._faults = faults
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Inject every fault at its time."""
        for fault in self._schedule:
            self._tasks.append(self._world.loop.create_task(self._inject(fault)))

    def cancel(self) -> None:
        """Stop the faults under way and those to come."""
        for task in self._tasks:
            task.cancel()

    async def _inject(self, fault: PlannedFault) -> None:
        await asyncio.sleep(fault.at_ms / 1000)
        self.injected[fault.kind] += 1
        self._world.trace.record("fault", self._world.now_ms, fault.number, fault.kind, fault.duration_ms)
        rng = self._world.streams.stream(f"fault-{fault.number}")
        await self._faults[fault.kind](FaultInjection(self._world, rng, fault.duration_ms))
