"""`quiver status` and `quiver hold`: print the state of the whole cluster; list and release holds."""

from __future__ import annotations

import click

from quiver.cli.options import connect, json_option, url_option
from quiver.cli.output import Cell, format_time, print_json, print_table
from quiver.client.overview import ClusterOverview, NodeOverview
from quiver.wire.admin_messages import HoldInfo

HOLD_COLUMNS = ("hold", "topic", "from", "until", "owner")


@click.command(
    short_help="Print the state of the cluster.", epilog="Example: quiver status --json --url http://127.0.0.1:8002"
)
@json_option
@url_option
def status(*, as_json: bool, url: str) -> None:
    """Print nodes, managers, topics with their partitions, replica moves in progress, and holds."""
    with connect(url) as cluster:
        overview = cluster.status()
    if as_json:
        print_json(overview)
        return
    _print_nodes(overview)
    _print_partitions(overview)
    _print_moves(overview)
    if overview.holds:
        print_table(HOLD_COLUMNS, [hold_cells(one) for one in overview.holds])


def _print_nodes(overview: ClusterOverview) -> None:
    click.echo(f"cluster {overview.cluster_id}, metadata at {overview.index}")
    columns = ("node", "pid", "roles", "state", "manager", "applied", "http", "wire")
    print_table(columns, [_node_cells(node) for node in overview.nodes])


def _node_cells(node: NodeOverview) -> tuple[Cell, ...]:
    manager = None
    if "manager" in node.roles:
        manager = "primary" if node.is_primary else "replica"
    return (
        node.node,
        node.pid,
        ",".join(node.roles),
        node.state if node.is_alive or node.state != "alive" else "no answer",
        manager,
        node.applied_index,
        node.http_address or None,
        node.wire_address,
    )


def _print_partitions(overview: ClusterOverview) -> None:
    rows: list[tuple[Cell, ...]] = [
        (
            topic.topic,
            item.partition,
            item.leader,
            item.epoch,
            " ".join(map(str, item.replicas)),
            " ".join(map(str, item.in_sync)) or None,
            item.first_offset,
            item.end_offset,
            item.bytes,
        )
        for topic in overview.topics
        for item in topic.partitions
    ]
    if not rows:
        click.echo("no topics")
        return
    columns = ("topic", "partition", "leader", "epoch", "replicas", "in sync", "first offset", "end offset", "bytes")
    print_table(columns, rows)


def _print_moves(overview: ClusterOverview) -> None:
    if overview.moves:
        rows: list[tuple[Cell, ...]] = [
            (move.move_id, move.topic, move.partition_id, move.source, move.target, move.state)
            for move in overview.moves
        ]
        print_table(("move", "topic", "partition", "from", "to", "state"), rows)


@click.group(epilog="Example: quiver hold list")
def hold() -> None:
    """Work with holds, which keep records that a reader still needs from being removed by retention."""


@hold.command("list", epilog="Example: quiver hold list --json")
@json_option
@url_option
def list_holds(*, as_json: bool, url: str) -> None:
    """Print all holds: their owner, first held offsets, and when they expire unless renewed."""
    with connect(url) as cluster:
        found = cluster.holds()
    if as_json:
        print_json(found)
        return
    print_table(HOLD_COLUMNS, [hold_cells(one) for one in found])


@hold.command("release", epilog="Example: quiver hold release report-5f0c9a1e")
@click.argument("name")
@click.option("--topic", help="Only on this topic.")
@url_option
def release_hold(*, name: str, topic: str | None, url: str) -> None:
    """Release the hold NAME; an owner that is still running places it again."""
    with connect(url) as cluster:
        cluster.release_hold(name, topic)
    click.echo(f"hold {name} is released")


def hold_cells(one: HoldInfo) -> tuple[Cell, ...]:
    """Return a hold as a row of a table."""
    places = " ".join(f"{partition}:{offset}" for partition, offset in one.offsets)
    return (one.name, one.topic, places, format_time(one.expires_ms), one.owner or None)
