"""`quiver sim` and `quiver history`: run simulated clusters under faults, and check recorded histories.

One seed is one cluster on simulated time, disks and network: bare Raft members whose every event is checked, or, with
`--cluster`, whole nodes and clients whose history is checked. A history is a record of client operations, checked
against the guarantees. Exit code 1 means a finding, or a campaign that injected too few faults to be meaningful.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quiver.cli.options import json_option
from quiver.cli.output import FOUND, print_json, print_table
from quiver.errors import DecodeError
from quiver.testing.clusters.model import ClusterModel
from quiver.testing.clusters.recovery import RecoveryModel
from quiver.testing.groups.model import GroupModel
from quiver.testing.history import HistoryError, check_history, parse_history
from quiver.testing.simulator.campaign import CampaignSummary, run_campaign, shrink
from quiver.testing.simulator.limits import SECONDS_MAX
from quiver.testing.simulator.report import SeedReport
from quiver.testing.simulator.runner import Model, run_seed

_TAIL_LINES = 50


@click.command(short_help="Try to break simulated clusters.", epilog="Example: quiver sim --seeds 1000 --jobs 2")
@click.option(
    "--seeds", "count", type=click.IntRange(min=1), default=100, show_default=True, help="Number of seeds to run."
)
@click.option("--first", "first_seed", type=click.IntRange(min=0), default=0, show_default=True, help="First seed.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Start no seed after this many minutes.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="Run only this seed; if it fails, print its last events and a shorter schedule.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=lambda: os.cpu_count() or 1,
    show_default="one per core",
    help="Number of parallel processes.",
)
@click.option(
    "--seed-seconds",
    "seed_seconds_max",
    type=click.FloatRange(min=0, min_open=True),
    default=SECONDS_MAX,
    show_default=True,
    help="Processor time that one seed may use; a seed that does not end is a finding, and the next one begins.",
)
@click.option(
    "--cluster", "is_cluster", is_flag=True, help="Run whole nodes: managers, brokers, moves and SDK clients."
)
@click.option(
    "--recovery",
    "is_recovery",
    is_flag=True,
    help="Run whole nodes that lose a majority for good at the end, and recover them as `quiver recover` does.",
)
@json_option
@click.pass_context
def sim(
    context: click.Context,
    *,
    count: int,
    first_seed: int,
    minutes: float | None,
    seed: int | None,
    jobs: int,
    seed_seconds_max: float,
    is_cluster: bool,
    is_recovery: bool,
    as_json: bool,
) -> None:
    """Run the real consensus, driver and log in simulated clusters under injected faults.

    A seed determines the cluster, its settings, its load and its faults; the same seed always gives the same run. With
    --cluster, the clusters consist of whole nodes; with --recovery, most of them are lost at the end.
    """
    model: Model[Any, Any] = RecoveryModel() if is_recovery else ClusterModel() if is_cluster else GroupModel()
    if seed is not None:
        is_clean = _run_one(model, seed, seconds_max=seed_seconds_max, as_json=as_json)
    else:
        seconds_max = None if minutes is None else minutes * 60
        seeds = range(first_seed, first_seed + count)
        limits = (seconds_max, seed_seconds_max)
        summary = _run_many(model, seeds, jobs=jobs, limits=limits)
        if as_json:
            print_json(_facts(summary))
        else:
            _print_summary(summary)
        is_clean = not summary.findings and not summary.missing_faults()
    if not is_clean:
        context.exit(FOUND)


def _run_one(model: Model[Any, Any], seed: int, *, seconds_max: float, as_json: bool) -> bool:
    report = run_seed(model, seed, seconds_max=seconds_max)
    if as_json:
        print_json(report)
        return report.finding is None
    click.echo(f"seed={seed} simulated_ms={report.simulated_ms} events={report.events} digest={report.digest}")
    if report.finding is None:
        click.echo("nothing found")
        return True
    click.echo(f"finding: {report.finding}")
    click.echo("last events:")
    for line in report.tail[-_TAIL_LINES:]:
        click.echo(f"  {line}")
    shorter = shrink(report, model)
    if shorter is not None:
        click.echo(f"shortest failing schedule found ({len(shorter.schedule)} of {len(report.schedule)} faults):")
        for line in shorter.schedule:
            click.echo(f"  {line}")
        click.echo(f"which gives: {shorter.finding}")
    click.echo(f"replay: {report.replay}")
    return False


def _run_many(
    model: Model[Any, Any], seeds: range, *, jobs: int, limits: tuple[float | None, float]
) -> CampaignSummary:
    """Run a campaign; `limits` are its real time, if limited, and the processor time of each seed."""
    columns = (
        TextColumn("seeds"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
        bar = progress.add_task("", total=len(seeds))

        def show(report: SeedReport) -> None:
            if report.finding is not None:
                console.print(f"seed {report.seed}: {report.finding}", markup=False, highlight=False)
            progress.advance(bar)

        seconds_max, seed_seconds_max = limits
        return run_campaign(
            model, seeds, jobs=jobs, seconds_max=seconds_max, seed_seconds_max=seed_seconds_max, on_report=show
        )


def _print_summary(summary: CampaignSummary) -> None:
    faults = sum(summary.faults.values())
    print_table(("fault", "count"), [(kind, summary.faults[kind]) for kind in sorted(summary.faults)])
    speed = summary.simulated_ms / 1000 / summary.real_s if summary.real_s else 0.0
    click.echo(
        f"seeds={summary.seeds} cluster_hours={summary.cluster_hours:.2f} events={summary.events} faults={faults} "
        f"elections={summary.elections} membership_changes={summary.changes}"
    )
    sends = summary.sends
    click.echo(f"sends ok={sends['ok']} fail={sends['fail']} info={sends['info']} reads={summary.reads}")
    click.echo(f"consumed={summary.consumed} trimmed={summary.trimmed}")
    seeds_per_s = summary.seeds / max(summary.real_s, 0.001)
    click.echo(f"real_s={summary.real_s:.1f} seeds_per_s={seeds_per_s:.2f} times_real={speed:.0f}")
    for kind in summary.missing_faults():
        click.echo(f"vacuous: too few faults of kind {kind}")
    for report in summary.findings:
        click.echo(f"finding: {report.finding}")
        click.echo(f"  replay: {report.replay}")
    click.echo(f"findings={len(summary.findings)}")


def _facts(summary: CampaignSummary) -> dict[str, object]:
    return {
        "seeds": summary.seeds,
        "cluster_hours": round(summary.cluster_hours, 3),
        "events": summary.events,
        "real_s": round(summary.real_s, 1),
        "elections": summary.elections,
        "membership_changes": summary.changes,
        "reads": summary.reads,
        "consumed": summary.consumed,
        "trimmed": summary.trimmed,
        "sends": dict(summary.sends),
        "faults": dict(summary.faults),
        "effects": dict(summary.effects),
        "missing_faults": summary.missing_faults(),
        "findings": [
            {"seed": report.seed, "finding": report.finding, "replay": report.replay} for report in summary.findings
        ],
    }


@click.group(epilog="Example: quiver history check history.jsonl")
def history() -> None:
    """Check recorded histories of client operations."""


@history.command(epilog="Example: quiver history check chaos/history.jsonl")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@json_option
@click.pass_context
def check(context: click.Context, *, file: str, as_json: bool) -> None:
    """Find violations of the guarantees: lost, duplicated, reordered and changed records, stale reads.

    FILE holds one event per line; the module `quiver.testing.history.events` describes the format.
    """
    try:
        with open(file, encoding="utf-8") as lines:
            verdict = check_history(parse_history(lines))
    except HistoryError as error:
        raise DecodeError(str(error)) from error
    if as_json:
        print_json(verdict.to_json())
    else:
        click.echo(str(verdict))
    if not verdict.is_clean:
        context.exit(FOUND)
