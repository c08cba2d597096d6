"""`quiver broker`: list the nodes, drain and remove one, rebalance replicas."""

from __future__ import annotations

import click

from quiver.cli.options import connect, json_option, url_option
from quiver.cli.output import format_time, print_json, print_table

_BROKER = click.argument("broker", type=click.IntRange(min=1))


@click.group(epilog="Example: quiver broker drain 3")
def broker() -> None:
    """Work with brokers."""


@broker.command("list", epilog="Example: quiver broker list --json")
@json_option
@url_option
def list_(*, as_json: bool, url: str) -> None:
    """Print all nodes with their state and when each was last seen."""
    with connect(url) as cluster:
        nodes = cluster.brokers()
    if as_json:
        print_json(nodes)
        return
    rows = [
        (
            node.node,
            node.state + (", draining" if node.is_draining and node.state != "draining" else ""),
            ",".join(node.roles),
            node.wire_address,
            node.http_address or None,
            node.rack or None,
            None if node.last_seen_ms is None else format_time(node.last_seen_ms),
        )
        for node in nodes
    ]
    print_table(("node", "state", "roles", "wire", "http", "rack", "last seen"), rows)


@broker.command(epilog="Example: quiver broker drain 3")
@_BROKER
@click.option("--undo", is_flag=True, help="Allow replicas on it again.")
@url_option
def drain(*, broker: int, undo: bool, url: str) -> None:
    """Move all replicas off BROKER while it keeps serving; `quiver status` shows the progress."""
    with connect(url) as cluster:
        cluster.drain(broker, is_undone=undo)
    click.echo(f"broker {broker} may hold replicas again" if undo else f"broker {broker} is draining")


@broker.command(epilog="Example: quiver broker remove 3")
@_BROKER
@url_option
def remove(*, broker: int, url: str) -> None:
    """Remove BROKER, which must be drained, or dead and empty; its id is never reused."""
    with connect(url) as cluster:
        cluster.remove(broker)
    click.echo(f"broker {broker} is removed")


@broker.command(epilog="Example: quiver broker rebalance")
@url_option
def rebalance(*, url: str) -> None:
    """Move replicas until every broker has its share; `quiver status` shows the progress."""
    with connect(url) as cluster:
        cluster.rebalance()
    click.echo("rebalancing replicas")
