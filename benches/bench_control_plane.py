"""What the control plane costs by number of brokers and partitions: a real manager, brokers without data, virtual time.

    python benches/bench_control_plane.py                         # the table of docs/performance.md
    python benches/bench_control_plane.py --plot docs/images/control-plane.svg     # and its plot
    python benches/bench_control_plane.py --brokers 20 --partitions 1000

Each run starts the cluster, creates all partitions, idles, kills and restarts brokers one after the other (nothing
moves), and then kills one for good, so that its replicas are rebuilt elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from quiver.config import ManagerSettings
from quiver.testing.control_plane.world import ControlPlane, ControlPlaneCosts, run_simulated
from svg import number, picture

SIZES = ((20, 1_000), (20, 4_000), (50, 5_000), (100, 5_000), (100, 10_000), (100, 20_000))
IDLE_S = 20
ROLLS = 3
"""Brokers that are killed and restarted, one after the other."""
REBUILD_AFTER_MS = 60_000


@dataclass
class ControlPlaneRun:
    """The costs of the phases of one run."""

    brokers: int
    partitions: int
    create: ControlPlaneCosts
    idle: ControlPlaneCosts
    roll: ControlPlaneCosts
    rebuild: ControlPlaneCosts
    lost: int
    """Replicas of the broker that was killed for good: the fewest moves."""
    imbalance: int
    real_s: float = 0.0


async def exercise(world: ControlPlane, partitions: int) -> ControlPlaneRun:
    """Run all phases."""
    marks = []
    await world.start()
    marks.append(world.costs())
    await world.create_partitions(partitions)
    marks.append(world.costs())
    await asyncio.sleep(IDLE_S)
    marks.append(world.costs())
    nodes = list(world.brokers)
    for node in nodes[:ROLLS]:
        world.kill(node)
        await asyncio.sleep(5)
        await world.wait(lambda: world.is_led)
        world.brokers[node].start()
        await asyncio.sleep(25)
    marks.append(world.costs())
    victim = nodes[-1]
    lost = world.replicas_on(victim)
    world.kill(victim)
    await world.wait(lambda: not world.replicas_on(victim) and not world.view().moves, poll_s=1)
    marks.append(world.costs())
    create, idle, roll, rebuild = (after.since(before) for before, after in pairwise(marks))
    return ControlPlaneRun(len(nodes), partitions, create, idle, roll, rebuild, lost, world.imbalance())


def measure(brokers: int, partitions: int) -> ControlPlaneRun:
    """Run one size."""
    began_s = time.perf_counter()
    manager = ManagerSettings(
        rebuild_after_ms=REBUILD_AFTER_MS, replicas_per_broker_max=1_000_000, partitions_max=10_000_000
    )
    world = ControlPlane(brokers=brokers, manager=manager)
    run: ControlPlaneRun = run_simulated(world, lambda world: exercise(world, partitions))
    run.real_s = time.perf_counter() - began_s
    return run


def row(run: ControlPlaneRun) -> str:
    """Return a row of the table."""
    idle, roll, rebuild = run.idle, run.roll, run.rebuild
    cells = (
        run.brokers,
        f"{run.partitions:,}",
        f"{run.create.primary_cpu_s:.2f}",
        f"{100 * idle.primary_cpu_s / idle.seconds:.1f} %",
        f"{sum(idle.requests.values()) / idle.seconds / run.brokers:.2f}",
        f"{idle.sent_bytes / idle.seconds / run.brokers / 1000:.2f}",
        f"{roll.commands.get('report_leaders', 0) / ROLLS:.0f}",
        f"{roll.sent_bytes / ROLLS / run.brokers / 1000:.0f}",
        f"{100 * roll.primary_cpu_s / roll.seconds:.1f} %",
        f"{rebuild.commands.get('begin_move', 0)} / {run.lost}",
        f"{rebuild.seconds - REBUILD_AFTER_MS / 1000:.0f}",
        f"{1000 * rebuild.primary_cpu_s / max(1, run.lost):.1f}",
        f"{rebuild.sent_bytes / run.brokers / 1000:.0f}",
        run.imbalance,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


HEAD = """| brokers | partitions | create, CPU s | idle CPU | requests/s per broker | idle KB/s to a broker \
| reports per restart | KB to a broker per restart | CPU while rolling | moves / fewest | rebuild, s | CPU ms per move \
| KB to a broker, rebuild | imbalance |
|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"""


PANELS: tuple[tuple[str, Callable[[ControlPlaneRun], float]], ...] = (
    ("idle: share of a core at the primary, %", lambda run: 100 * run.idle.primary_cpu_s / run.idle.seconds),
    ("create: CPU s at the primary", lambda run: run.create.primary_cpu_s),
    ("rebuild: CPU ms per move at the primary", lambda run: 1000 * run.rebuild.primary_cpu_s / max(1, run.lost)),
    ("rebuild: KB to each broker", lambda run: run.rebuild.sent_bytes / run.brokers / 1000),
)
_PANEL_WIDTH, _LABEL_WIDTH, _BAR = 330, 130, 18


def plot(runs: list[ControlPlaneRun]) -> str:
    """Return a picture: for each cost a bar for each size."""
    parts = []
    panel_height = 34 + _BAR * len(runs)
    for place, (title, value) in enumerate(PANELS):
        left, top = place % 2 * (_PANEL_WIDTH + 40), 34 + place // 2 * panel_height
        most = max(value(run) for run in runs) or 1.0
        parts.append(f'<text x="{left + 8}" y="{top + 14}">{title}</text>')
        for at, run in enumerate(runs):
            y, width = top + 22 + at * _BAR, (_PANEL_WIDTH - _LABEL_WIDTH - 50) * value(run) / most
            label = f"{run.brokers} / {run.partitions:,}"
            parts.append(f'<text class="s" x="{left + _LABEL_WIDTH - 8}" y="{y + 11}" text-anchor="end">{label}</text>')
            parts.append(f'<rect class="a" x="{left + _LABEL_WIDTH}" y="{y}" width="{width:.1f}" height="{_BAR - 4}"/>')
            x = left + _LABEL_WIDTH + width + 5
            parts.append(f'<text class="s" x="{x:.1f}" y="{y + 11}">{number(value(run))}</text>')
    title = "The control plane by brokers / partitions"
    return picture(title, "".join(parts), width=2 * _PANEL_WIDTH + 40, height=44 + panel_height * 2)


def main() -> None:
    """Measure and print."""
    logging.disable()  # a broker that starts before its manager says so
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--brokers", type=int)
    parser.add_argument("--partitions", type=int)
    parser.add_argument("--plot", type=Path, help="Draw the costs into this file.")
    given = parser.parse_args()
    sizes = ((given.brokers, given.partitions),) if given.brokers and given.partitions else SIZES
    print(HEAD)
    runs = []
    for brokers, partitions in sizes:
        run = measure(brokers, partitions)
        runs.append(run)
        print(row(run), flush=True)
        if len(sizes) == 1:
            for name in ("create", "idle", "roll", "rebuild"):
                print(name, getattr(run, name))
            print(f"{run.real_s:.1f} s of real time")
    if given.plot is not None:
        given.plot.write_text(plot(runs))


if __name__ == "__main__":
    main()
