"""`quiver manager`: the nodes that vote on the metadata."""

from __future__ import annotations

import click

from quiver.cli.options import connect, json_option, url_option
from quiver.cli.output import Cell, print_json, print_table
from quiver.wire.admin_messages import manager_role

_NODE = click.argument("node", type=click.IntRange(min=1))


@click.group(epilog="Example: quiver manager list")
def manager() -> None:
    """Work with managers, which vote on the cluster's metadata.

    To replace a manager, add the new one, then remove the old one. Use one, three or five managers.
    """


@manager.command("list", epilog="Example: quiver manager list --json")
@json_option
@url_option
def list_managers(*, as_json: bool, url: str) -> None:
    """Print the managers, and the standbys: nodes with the role manager that do not vote."""
    with connect(url) as cluster:
        found = cluster.managers()
    if as_json:
        print_json(found)
        return
    rows: list[tuple[Cell, ...]] = [
        (
            one.node,
            manager_role(one, found.primary),
            one.state or None,
            one.wire_address or None,
            one.http_address or None,
        )
        for one in found.managers
    ]
    print_table(("node", "role", "state", "wire", "http"), rows)
    if found.is_changing:
        click.echo("a change of the managers is in progress")


@manager.command("add", epilog="Example: quiver manager add 4")
@_NODE
@url_option
def add_manager(*, node: int, url: str) -> None:
    """Make NODE a manager; it must run, and have been started with the role manager."""
    with connect(url) as cluster:
        cluster.add_manager(node)
    click.echo(f"node {node} is a manager")


@manager.command("remove", epilog="Example: quiver manager remove 2")
@_NODE
@url_option
def remove_manager(*, node: int, url: str) -> None:
    """Remove NODE, dead or alive, from the managers; it stays in the cluster with its other roles."""
    with connect(url) as cluster:
        cluster.remove_manager(node)
    click.echo(f"node {node} is no longer a manager")
