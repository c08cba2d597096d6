"""`quiver doctor`: check a whole cluster, and print what needs attention and what to do about it."""

from __future__ import annotations

import shutil
import textwrap

import click
import msgspec

from quiver.cli.options import connect, json_option, url_option
from quiver.cli.output import format_count, print_json
from quiver.client.checks import ClusterFinding
from quiver.client.checkup import SEVERITIES, Checkup
from quiver.errors import UnavailableError

HEALTHY = 0
FINDINGS = 1
UNREACHABLE = 2
_COLOURS = {"critical": "red", "warning": "yellow", "notice": "blue"}


@click.command(
    short_help="Check the whole cluster and print what to do.",
    epilog="Example: quiver doctor --at-least warning",
)
@click.option(
    "--at-least",
    type=click.Choice(SEVERITIES),
    default=SEVERITIES[-1],
    show_default=True,
    help="Only findings that are at least this severe.",
)
@json_option
@url_option
@click.pass_context
def doctor(context: click.Context, *, at_least: str, as_json: bool, url: str) -> None:
    """Check nodes, partitions, disks, clocks, limits, versions, consumers, holds, certificates and settings.

    Each finding says what is wrong and what to do. Exit codes: 0 healthy, 1 findings, 2 no node was reached.
    """
    try:
        with connect(url) as cluster:
            found = cluster.checkup()
    except UnavailableError as error:
        click.echo(f"error {error.code}: no node of the cluster was reached: {error.message}", err=True)
        context.exit(UNREACHABLE)
    worst = SEVERITIES.index(at_least)
    findings = [one for one in found.findings if SEVERITIES.index(one.severity) <= worst]
    if as_json:
        shown = msgspec.structs.replace(found, findings=tuple(findings))
        print_json({"is_healthy": not findings, **msgspec.structs.asdict(shown)})
    else:
        print_checkup(found, findings)
    context.exit(FINDINGS if findings else HEALTHY)


def print_checkup(found: Checkup, findings: list[ClusterFinding]) -> None:
    """Print the findings for people, wrapped to the terminal."""
    nodes = f"{found.answered} of {format_count(found.nodes, 'node')}"
    partitions = format_count(found.partitions, "partition")
    click.echo(f"cluster {found.cluster_id}: {nodes} answered, {partitions}, {len(found.checks)} checks")
    for finding in findings:
        _print_finding(finding)
    click.echo("healthy" if not findings else format_count(len(findings), "finding"))


def _print_finding(finding: ClusterFinding) -> None:
    width = max(40, shutil.get_terminal_size().columns - 1)
    click.echo("")
    click.secho(f"{finding.severity.upper()} {finding.code}", fg=_COLOURS[finding.severity], bold=True)
    for text in (f"{finding.subject}: {finding.sentence}", f"what to do: {finding.advice}"):
        click.echo(textwrap.fill(text, width, initial_indent="  ", subsequent_indent="    ", break_long_words=False))
    if finding.command:
        click.echo(f"  $ {finding.command}")
