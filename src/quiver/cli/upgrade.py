"""`quiver cluster`: what concerns the cluster as a whole."""

from __future__ import annotations

import sys

import click

from quiver.cli.options import connect, json_option, url_option
from quiver.cli.output import FOUND, Cell, print_json, print_table
from quiver.features import LEVELS
from quiver.wire.admin_messages import ClusterUpgraded


@click.group(epilog="Example: quiver cluster upgrade --dry-run")
def cluster() -> None:
    """Work with the cluster as a whole."""


@cluster.command(epilog="Example: quiver cluster upgrade --yes")
@click.option("--to", "level", type=click.IntRange(min=1), help="Feature level.  [default: the highest]")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and whether every node is ready for it.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
@url_option
def upgrade(*, level: int | None, dry_run: bool, yes: bool, as_json: bool, url: str) -> None:
    """Raise the cluster's feature level once every node runs a program that knows it.

    Until then, nodes can be upgraded and downgraded one by one. The level is never lowered: afterwards, older programs
    refuse to start.
    """
    if as_json and not (yes or dry_run):
        raise click.UsageError("--json does not ask for confirmation: add --yes, or --dry-run to change nothing")
    with connect(url) as connected:
        found = connected.upgrade(level, is_dry_run=True)
        if not (dry_run or yes or found.refusal or found.level == found.level_before):
            _print(found)
            click.confirm("Older programs cannot join the cluster any more. Raise the level?", abort=True)
        if not dry_run and found.level > found.level_before:
            found = connected.upgrade(found.level)
    if as_json:
        print_json(found)
    else:
        _print(found)
        _print_outcome(found, is_dry_run=dry_run)
    if found.refusal:
        sys.exit(FOUND)


def _print(found: ClusterUpgraded) -> None:
    rows: list[tuple[Cell, ...]] = [(node.node, node.program or None, node.level_max) for node in found.nodes]
    print_table(("node", "version", "knows level"), rows)
    for each in LEVELS:
        if found.level_before < each.level <= found.level:
            click.echo(f"level {each.level} turns on: {'; '.join(each.turns_on)}")


def _print_outcome(found: ClusterUpgraded, *, is_dry_run: bool) -> None:
    if found.refusal:
        click.echo(f"would be refused: {found.refusal}")
    elif found.level == found.level_before:
        click.echo(f"the cluster is at feature level {found.level}")
    elif is_dry_run:
        click.echo(f"feature level {found.level_before} would be raised to {found.level}")
    else:
        click.echo(f"feature level {found.level_before} is raised to {found.level}")
