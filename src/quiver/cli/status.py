"""`quiver status`: print the state of the whole cluster."""

from __future__ import annotations

import click

from quiver.cli.hold import COLUMNS, hold_cells
from quiver.cli.options import connect, json_option, url_option
from quiver.cli.output import Cell, print_json, print_table
from quiver.client.overview import ClusterOverview, NodeOverview


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
        print_table(COLUMNS, [hold_cells(one) for one in overview.holds])


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
