"""One seed of a whole cluster, from beginning to end: chaos, heal, liveness, drain, comparison.

`simulate_cluster` is a pure function of its arguments: the same seed gives the same report, digest and all. A report
with a finding says how to see it again.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections import Counter

from quiver.errors import InvariantBroken
from quiver.testing.clusters.clients import Client, Maker, Watcher
from quiver.testing.clusters.comparison import compare_replicas
from quiver.testing.clusters.readers import Committer, Reader, Taker
from quiver.testing.clusters.senders import Sender
from quiver.testing.clusters.settlement import found_topics, put_right, require_settled
from quiver.testing.clusters.strikes import STRIKES
from quiver.testing.clusters.swarm import ClusterKnobs, draw_cluster
from quiver.testing.clusters.world import ClusterWorld
from quiver.testing.faults import Fault, plan_faults
from quiver.testing.finding import Finding, require
from quiver.testing.judge import Verdict, judge, parse_history
from quiver.testing.loop import SimulatedLoop
from quiver.testing.nemesis import Nemesis
from quiver.testing.randomness import RandomStreams
from quiver.testing.report import Report, describe
from quiver.testing.trace import Trace

PROGRESS_WITHIN_MS = 30_000
"""F3: how long after healing a client may take to get something done."""
END_WITHIN_MS = 60_000
"""F3: how long clients may take to end."""
EVENTS_MAX = 4_000_000
_TIME_MAX_S = 900.0
_LOOK_S = 0.2


def simulate_cluster(seed: int, *, left_out: frozenset[int] = frozenset()) -> Report:
    """Run one seed; `left_out` leaves faults of the schedule out by number."""
    streams = RandomStreams(f"cluster-{seed}")
    knobs = draw_cluster(streams.stream("knobs"))
    schedule = [fault for fault in plan_faults(streams.stream("faults"), knobs) if fault.number not in left_out]
    return simulate_cluster_with(seed, knobs, schedule=schedule)


def simulate_cluster_with(seed: int, knobs: ClusterKnobs, *, schedule: list[Fault]) -> Report:
    """Run a cluster with these knobs and faults; the seed decides all the rest."""
    streams = RandomStreams(f"cluster-{seed}")
    trace = Trace()
    loop = SimulatedLoop(streams.schedule, trace=trace, events_max=EVENTS_MAX, time_max_s=_TIME_MAX_S)
    world = ClusterWorld(loop, trace, streams, knobs)
    nemesis = Nemesis(world, schedule, STRIKES)
    report = Report(seed, is_cluster=True, schedule=[str(fault) for fault in schedule])
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        verdict = loop.run_until_complete(_run(world, nemesis))
        _fill_verdict(report, verdict)
    except (Exception, InvariantBroken, Finding) as error:  # noqa: BLE001 - whatever a run ends with is what it found
        report.finding = describe(error)
    finally:
        logging.disable(level)
        _fill(report, world, nemesis)
        loop.close()
        world.close()
    return report


async def _run(world: ClusterWorld, nemesis: Nemesis[ClusterWorld]) -> Verdict:
    world.populate()
    await found_topics(world)
    clients = _make_clients(world)
    running = [world.spawn(client.run()) for client in clients]
    nemesis.begin()
    await _pass_time(world, world.knobs.chaos_ms)
    nemesis.call_off()
    world.heal()
    await _require_progress(world, clients)
    await put_right(world)
    await require_settled(world)
    world.is_over = True
    await _wait_ended(world, running)
    await require_settled(world)
    await _drain(world)
    await compare_replicas(world)
    verdict = judge(parse_history(io.StringIO(world.history.getvalue())))
    require(verdict.is_clean, "J", str(verdict))
    return verdict


# -- chaos -------------------------------------------------------------------------------------------


def _make_clients(world: ClusterWorld) -> list[Client]:
    knobs = world.knobs
    kinds: tuple[tuple[type[Client], str, int], ...] = (
        (Sender, "sender", knobs.senders),
        (Reader, "reader", knobs.readers),
        (Committer, "committer", knobs.committers),
        (Taker, "taker", knobs.takers),
        (Watcher, "watcher", 1),
        (Maker, "maker", knobs.makers),
    )
    return [
        kind(world, f"{name}-{number}", knobs.topics[number % len(knobs.topics)])
        for kind, name, count in kinds
        for number in range(count)
    ]


async def _pass_time(world: ClusterWorld, duration_ms: int) -> None:
    """Let time pass, noticing soon when something has failed or differs."""
    end_ms = world.now_ms + duration_ms
    while world.now_ms < end_ms:
        await _look(world)


async def _look(world: ClusterWorld) -> None:
    await asyncio.sleep(_LOOK_S)
    world.raise_failures()
    world.compare_metadata()


# -- liveness ----------------------------------------------------------------------------------------


async def _require_progress(world: ClusterWorld, clients: list[Client]) -> None:
    """F3: every client gets something done soon after healing."""
    before = {client.name: client.progress for client in clients}
    waiting = list(clients)
    deadline_ms = world.now_ms + PROGRESS_WITHIN_MS
    while waiting:
        require(world.now_ms < deadline_ms, "F3", "no progress after healing", clients=[one.name for one in waiting])
        await _look(world)
        waiting = [client for client in waiting if client.progress == before[client.name]]


async def _wait_ended(world: ClusterWorld, running: list[asyncio.Task[None]]) -> None:
    """F3: every client ends what it is at."""
    deadline_ms = world.now_ms + END_WITHIN_MS
    while not all(task.done() for task in running):
        require(world.now_ms < deadline_ms, "F3", "clients do not end")
        await _look(world)


async def _drain(world: ClusterWorld) -> None:
    """Read every record of every topic."""
    for topic in world.knobs.topics:
        await Reader(world, f"drain-{topic.name}", topic).drain()


# -- reports -----------------------------------------------------------------------------------------


def _fill_verdict(report: Report, verdict: Verdict) -> None:
    facts = verdict.facts
    report.sends = Counter({outcome: facts[f"sends_{outcome}"] for outcome in ("ok", "fail", "info")})
    report.reads = facts["end_offsets_read"]
    report.consumed = facts["records_read"]


def _fill(report: Report, world: ClusterWorld, nemesis: Nemesis[ClusterWorld]) -> None:
    report.digest = world.trace.digest()
    report.events = world.loop.event_count
    report.simulated_ms = world.now_ms
    report.faults = nemesis.struck
    report.effects = world.fault_counts() + world.counts
    report.tail = world.trace.tail()
