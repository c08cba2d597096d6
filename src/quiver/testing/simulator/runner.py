"""One seed from start to end: knobs, world, chaos, healing, checks, report.

A run is a pure function of the model and the seed: the same seed gives the same report, digest included. The report of
a run that found something names the command that replays it.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from quiver.clock import Rng
from quiver.errors import InvariantBroken
from quiver.testing.loop import SimulatedLoop
from quiver.testing.randomness import RandomStreams
from quiver.testing.simulator.faults import FaultInjection
from quiver.testing.simulator.nemesis import Nemesis, PlannedFault, plan_faults
from quiver.testing.simulator.report import SeedReport, Violation, describe
from quiver.testing.simulator.swarm import SimulationKnobs
from quiver.testing.simulator.world import SimulatedWorld, SimulationRun
from quiver.testing.trace import Trace

K = TypeVar("K", bound=SimulationKnobs)
W = TypeVar("W", bound=SimulatedWorld[Any, Any])


class Model(Protocol[K, W]):
    """A kind of simulated system. Instances are immutable and picklable: a campaign sends them to its processes."""

    is_cluster: ClassVar[bool]
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


def run_seed(model: Model[K, W], seed: int, *, left_out: frozenset[int] = frozenset()) -> SeedReport:
    """Run one seed; `left_out` omits faults of the schedule by number."""
    streams = _streams(model, seed)
    knobs = model.draw_knobs(streams.stream("knobs"))
    schedule = [fault for fault in plan_faults(streams.stream("faults"), knobs) if fault.number not in left_out]
    return run_schedule(model, seed, knobs, schedule)


def run_schedule(model: Model[K, W], seed: int, knobs: K, schedule: Sequence[PlannedFault]) -> SeedReport:
    """Run these knobs and faults; the seed decides everything else."""
    streams = _streams(model, seed)
    trace = Trace()
    loop = SimulatedLoop(streams.schedule, trace=trace, events_max=model.events_max, time_max_s=model.time_max_s)
    world = model.make_world(SimulationRun(loop, trace, streams), knobs)
    nemesis = Nemesis(world, schedule, model.faults)
    report = SeedReport(seed, is_cluster=model.is_cluster, schedule=[str(fault) for fault in schedule])
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        loop.run_until_complete(_run(model, world, nemesis))
    except (Exception, InvariantBroken, Violation) as error:  # noqa: BLE001 - whatever ends a run is its finding
        report.finding = describe(error)
    finally:
        logging.disable(level)
        _fill(report, world, nemesis)
        model.fill(report, world)
        loop.close()
        world.close()
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
