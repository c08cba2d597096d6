"""One seed, from beginning to end: chaos, heal, liveness, drain, comparison.

`simulate` is a pure function of its arguments: the same seed gives the same report, digest and all. A report
with a finding says how to see it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from quiver.errors import DamageError, InvariantBroken, TrimmedError
from quiver.model import GroupId, Index
from quiver.raft import Safeguard
from quiver.testing.checkers.sends import check_sends
from quiver.testing.consumers import Taker
from quiver.testing.faults import Fault, plan_faults
from quiver.testing.finding import Finding, found, require
from quiver.testing.loop import SimulatedLoop
from quiver.testing.nemesis import STRIKES, Nemesis
from quiver.testing.node import SimulatedNode
from quiver.testing.operations import find_leader
from quiver.testing.quiet import keep_quiet
from quiver.testing.randomness import RandomStreams
from quiver.testing.report import Report, describe
from quiver.testing.second_opinion import check_second_opinion
from quiver.testing.swarm import MIXED, Knobs, Profile, draw_knobs
from quiver.testing.trace import Trace
from quiver.testing.world import World

COMMIT_WITHIN_MS = 10_000
"""F3: how long after healing a new write may take."""
CONVERGE_WITHIN_MS = 60_000
"""F3: how long after healing the replicas may differ."""
EVENTS_MAX = 2_000_000
_TIME_MAX_S = 600.0
_READ_BYTES = 64 * 1024


def simulate(
    seed: int,
    *,
    profile: Profile = MIXED,
    disabled: frozenset[Safeguard] = frozenset(),
    left_out: frozenset[int] = frozenset(),
) -> Report:
    """Run one seed; `disabled` switches safeguards off, `left_out` leaves faults of the schedule out by number."""
    streams = RandomStreams(seed)
    knobs = draw_knobs(streams.stream("knobs"), profile)
    schedule = [fault for fault in plan_faults(streams.stream("faults"), knobs) if fault.number not in left_out]
    return simulate_with(seed, knobs, schedule=schedule, disabled=disabled)


def simulate_with(
    seed: int, knobs: Knobs, *, schedule: list[Fault], disabled: frozenset[Safeguard] = frozenset()
) -> Report:
    """Run a cluster with these knobs and faults; the seed decides all the rest."""
    streams = RandomStreams(seed)
    trace = Trace()
    loop = SimulatedLoop(streams.schedule, trace=trace, events_max=EVENTS_MAX, time_max_s=_TIME_MAX_S)
    world = World(loop, trace, streams, knobs, disabled)
    nemesis = Nemesis(world, schedule, STRIKES)
    report = Report(seed, schedule=[str(fault) for fault in schedule])
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        loop.run_until_complete(_run(world, nemesis))
    except (Exception, InvariantBroken, Finding) as error:  # noqa: BLE001 - whatever a run ends with is what it found
        report.finding = describe(error)
    finally:
        logging.disable(level)
        loop.close()
    _fill(report, world, nemesis)
    return report


async def _run(world: World, nemesis: Nemesis[World]) -> None:
    world.populate()
    world.begin_load()
    nemesis.begin()
    await _pass_time(world, world.knobs.chaos_ms)
    nemesis.call_off()
    world.heal()
    await _require_writes(world)
    await world.end_load()
    await _require_convergence(world)
    if world.knobs.has_quiet_phase:
        await keep_quiet(world, world.streams.stream("quiet"))
        await _require_convergence(world)
    await _compare(world)


async def _pass_time(world: World, duration_ms: int) -> None:
    """Let time pass, noticing soon when something of the world has failed."""
    end_ms = world.now_ms + duration_ms
    while world.now_ms < end_ms:
        await asyncio.sleep(0.2)
        world.raise_failures()


async def _require_writes(world: World) -> None:
    """F3: every group commits a new write soon after healing."""
    started_ms = world.now_ms
    before = {group: log.end_offset for group, log in world.observer.committed.items()}
    for group in world.groups:
        producer = world.probe(group)
        send = await producer.send_one()
        world.raise_failures()
        took_ms = world.now_ms - started_ms
        is_done = send.outcome == "ok" and world.observer.committed[group].end_offset > before[group]
        require(is_done and took_ms <= COMMIT_WITHIN_MS, "F3", "no write after healing", group=group, took_ms=took_ms)


async def _require_convergence(world: World) -> None:
    """F3: all replicas reach the same index, and every repair is done."""
    deadline_ms = world.now_ms + CONVERGE_WITHIN_MS
    while True:
        lagging = [text for group in world.groups for text in _lagging(world, group)]
        if not lagging and not world.repairing:
            return
        require(world.now_ms < deadline_ms, "F3", "replicas do not converge", lagging="; ".join(lagging))
        await asyncio.sleep(0.25)
        world.raise_failures()


def _lagging(world: World, group: GroupId) -> list[str]:
    leader = find_leader(world, group)
    if leader is None:
        return [f"group {group} has no leader"]
    raft = leader[1].raft
    lagging = []
    for node_id in raft.configuration.members:
        replica = world.nodes[node_id].replicas.get(group)
        applied = replica.member.applied_index if replica is not None else None
        if applied != raft.last_index:
            lagging.append(f"node {node_id} of group {group} applied {applied} of {raft.last_index}")
    return lagging


async def _compare(world: World) -> None:
    """F1, F2, F4: replicas are byte-equal, and clients' histories agree with them."""
    for group in world.groups:
        committed = world.observer.committed[group]
        leader = find_leader(world, group)
        assert leader is not None, "the group has converged"
        for node_id in leader[1].configuration.members:
            await _read_all(world, world.nodes[node_id], group)
        for consumer in world.consumers:
            if isinstance(consumer, Taker) and consumer.group == group:
                await consumer.finish()
        sends = [send for send in world.history.sends if send.group == group]
        check_sends(sends, committed)
        check_second_opinion(sends, committed.data_batches())


async def _read_all(world: World, node: SimulatedNode, group: GroupId) -> None:
    """Read a replica's whole log from its disk and compare it with what is committed."""
    replica = node.replicas[group]
    log, committed = replica.member.log, world.observer.committed[group]
    committed.snapshot(node.id, replica.member.applied_index, replica.state.snapshot())
    facts = {"node": node.id, "group": group, "start": log.first_offset, "trimmed_to": replica.first_offset}
    is_complete = world.knobs.retention is None or log.first_offset <= replica.first_offset
    require(is_complete, "F1", "a replica does not have every record that is kept", **facts)
    index = log.first_index
    while index < committed.applied_index + 1:
        try:
            batches = await log.read_entries(index, end_index=Index(committed.applied_index + 1), bytes_max=_READ_BYTES)
        except TrimmedError:
            index = log.first_index  # a snapshot was taken meanwhile
            continue
        except DamageError:
            require(node.is_tainted, "F1", "a disk that nobody damaged is damaged", node=node.id, group=group)
            return  # it says so, and serves nothing wrong
        if not batches:
            found("F1", "a replica ends early", node=node.id, group=group, index=index)
        for batch in batches:
            committed.check_read(node.id, batch)
        index = Index(batches[-1].header.index + 1)


def _fill(report: Report, world: World, nemesis: Nemesis[World]) -> None:
    observer = world.observer
    report.digest = world.trace.digest()
    report.events = world.loop.event_count
    report.simulated_ms = world.now_ms
    report.sends = Counter(send.outcome for send in world.history.sends)
    report.reads = world.history.reads_done
    report.consumed = world.history.consumed
    report.trimmed = sum(log.first_offset for log in observer.committed.values())
    report.elections = sum(checker.leader_count for checker in observer.elections.values())
    report.changes = world.changes
    report.faults = nemesis.struck
    report.effects = world.fault_counts()
    report.tail = world.trace.tail()
