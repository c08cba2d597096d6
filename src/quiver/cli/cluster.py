"""`quiver status`, `hold` and `broker`: print the state of the cluster, and administer its parts."""

from __future__ import annotations

import time

import click

import quiver
from quiver.cli.options import connect, examples, json_option, url_option
from quiver.cli.output import Cell, format_bytes, format_time, print_json, print_table
from quiver.cli.quantities import DurationType
from quiver.client.overview import ClusterOverview, NodeOverview
from quiver.errors import ConflictError, NotFoundError, UnavailableError
from quiver.wire.admin_messages import HoldInfo

_BROKER = click.argument("broker", type=click.IntRange(min=1))
_POLL_S = 0.5
HOLD_COLUMNS = ("hold", "topic", "from", "until", "owner")


@click.command(
    short_help="Print the state of the cluster.", epilog="Example: quiver status --json --url http://127.0.0.1:8002"
)
@json_option
@url_option
def status(*, as_json: bool, url: str) -> None:
    """Print nodes and their load, managers, topics with their partitions, replica moves in progress, and holds.

    `--json` has all metrics of every node. `quiver doctor` says what needs attention.
    """
    with connect(url) as cluster:
        overview = cluster.status()
    if as_json:
        print_json(overview)
        return
    _print_nodes(overview)
    _print_load(overview)
    _print_partitions(overview)
    _print_moves(overview)
    if overview.holds:
        print_table(HOLD_COLUMNS, [hold_cells(one) for one in overview.holds])


def _print_nodes(overview: ClusterOverview) -> None:
    level = f"feature level {overview.feature_level}"
    click.echo(f"cluster {overview.cluster_id} at {level}, metadata at {overview.index}")
    silent = [str(node.node) for node in overview.nodes if not node.is_alive]
    if overview.is_stale:
        _warn("there is no primary: this is what the nodes that answer last knew; nothing can be changed")
    if silent:
        _warn(f"no answer from node{'s' * (len(silent) > 1)} {', '.join(silent)}")
    insecure = [str(node.node) for node in overview.nodes if node.security_mode == "insecure"]
    if insecure:
        _warn(
            f"node{'s' * (len(insecure) > 1)} {', '.join(insecure)} run{'s' * (len(insecure) == 1)} with --insecure: "
            "whoever reaches a port may do everything"
        )
    for node in overview.nodes:
        if node.is_alive and not node.is_ready:
            _warn(f"node {node.node} is not ready: {node.unready}")
        if node.database_outage:
            _warn(f"node {node.node} serves from its log, without its database: {node.database_outage}")
        if node.provider_problem:
            _warn(f"node {node.node} keeps the keys that it has: {node.provider_problem}")
        if node.certificate_problem:
            _warn(f"node {node.node}: {node.certificate_problem}")
        for found in node.problems:
            what = "metadata" if found.partition_id is None else f"partition {found.topic}/{found.partition_id}"
            _warn(f"{what} on node {node.node} is {found.state}: {found.problem}")
    columns = ("node", "pid", "version", "level", "roles", "state", "manager", "applied", "http", "wire")
    print_table(columns, [_node_cells(node) for node in overview.nodes])


def _warn(sentence: str) -> None:
    click.echo(f"warning: {sentence}")


def _node_cells(node: NodeOverview) -> tuple[Cell, ...]:
    manager = None
    if "manager" in node.roles:
        manager = "primary" if node.is_primary else "replica"
    return (
        node.node,
        node.pid,
        node.version or None,
        node.level_max,
        ",".join(node.roles),
        node.state if node.is_alive or node.state != "alive" else "no answer",
        manager,
        node.applied_index,
        node.http_address or None,
        node.wire_address,
    )


def _print_load(overview: ClusterOverview) -> None:
    """Print what each node that answers is doing, and its limits; times are the p99 since it started."""
    rows: list[tuple[Cell, ...]] = [_load_cells(node) for node in overview.nodes if node.metrics]
    if rows:
        columns = (
            *("node", "memory", "files", "disk free", "replicas", "leads", "behind"),
            *("wire clients", "http clients", "requests", "fsync", "commit"),
        )
        print_table(columns, rows)


def _load_cells(node: NodeOverview) -> tuple[Cell, ...]:
    found = node.metrics
    memory, free = found.get("process_resident_memory_bytes"), found.get("quiver_disk_free_bytes")
    files, limit = found.get("process_open_fds"), found.get("process_max_fds", 0)
    limit_of = 'quiver_connections_max{kind="%s"}'
    stage = 'quiver_produce_stage_seconds_p99{stage="%s"}'
    return (
        node.node,
        None if memory is None else format_bytes(memory),
        None if files is None else f"{files:.0f}/{limit:.0f}",
        None if free is None else format_bytes(free),
        _format_use(found.get("quiver_partition_replicas"), found.get("quiver_partition_replicas_max")),
        int(found.get("quiver_partition_leads", 0)),
        int(found.get("quiver_partition_out_of_sync", 0)),
        _format_use(found.get('quiver_wire_connections{kind="client"}'), found.get(limit_of % "client")),
        _format_use(found.get("quiver_http_connections"), found.get(limit_of % "http")),
        int(found.get("quiver_wire_requests", 0)),
        _format_ms(found.get(stage % "fsync")),
        _format_ms(found.get(stage % "commit")),
    )


def _format_use(used: float | None, limit: float | None) -> str:
    """Return a number and its limit, which a node derives from its limit of open files."""
    return f"{used or 0:.0f}/{limit:.0f}" if limit else f"{used or 0:.0f}"


def _format_ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:g} ms"


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
        if not any(one.name == name and topic in (None, one.topic) for one in cluster.holds()):
            where = "" if topic is None else f" on topic {topic!r}"
            raise NotFoundError(
                f"not done: there is no hold {name!r}{where}; `quiver hold list` shows all holds", code="unknown_hold"
            )
        cluster.release_hold(name, topic)
    click.echo(f"hold {name} is released")


def hold_cells(one: HoldInfo) -> tuple[Cell, ...]:
    """Return a hold as a row of a table."""
    places = " ".join(f"{partition}:{offset}" for partition, offset in one.offsets)
    return (one.name, one.topic, places, format_time(one.expires_ms), one.owner or None)


@click.group(epilog="Example: quiver broker drain 3")
def broker() -> None:
    """Work with brokers."""


@broker.command("list", epilog="Example: quiver broker list --json")
@json_option
@url_option
def list_brokers(*, as_json: bool, url: str) -> None:
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


@broker.command("wait", epilog=examples("quiver broker wait 4", "quiver broker wait 1 2 3 --within 1m"))
@click.argument("brokers", type=click.IntRange(min=1), nargs=-1, required=True)
@click.option("--within", type=DurationType(), default="5m", show_default=True, help="Longest time to wait.")
@url_option
def wait_brokers(*, brokers: tuple[int, ...], within: int, url: str) -> None:
    """Return when all BROKERS have joined and are alive, as after a start, also if none listens yet."""
    end = time.monotonic() + within / 1000
    with _connect_by(end, url) as cluster:
        while missing := sorted(set(brokers) - {one.node for one in cluster.brokers() if one.state == "alive"}):
            if time.monotonic() > end:
                raise UnavailableError(f"not alive yet: broker {', '.join(map(str, missing))}", code="not_ready")
            time.sleep(_POLL_S)
    click.echo(f"alive: {', '.join(map(str, sorted(set(brokers))))}")


def _connect_by(end_s: float, url: str) -> quiver.Cluster:
    is_told = False
    while True:
        try:
            return connect(url)
        except UnavailableError as error:
            if error.code != "not_reached" or time.monotonic() > end_s:
                raise
            if not is_told:
                click.echo(f"waiting: {error.message}", err=True)
            is_told = True
            time.sleep(_POLL_S)


@broker.command("drain", epilog=examples("quiver broker drain 3", "quiver broker drain 3 --wait"))
@_BROKER
@click.option("--undo", is_flag=True, help="Allow replicas on it again.")
@click.option("--wait", is_flag=True, help="Return when it holds no replicas; Ctrl-C stops the waiting only.")
@url_option
def drain_broker(*, broker: int, undo: bool, wait: bool, url: str) -> None:
    """Move all replicas off BROKER while it keeps serving; `quiver status` shows the progress."""
    with connect(url) as cluster:
        cluster.drain(broker, is_undone=undo)
        if undo:
            click.echo(f"broker {broker} may hold replicas again")
            return
        click.echo(f"broker {broker} is draining")
        if wait:
            _wait_drained(cluster, broker)
            click.echo(f"broker {broker} is drained")


def _wait_drained(cluster: quiver.Cluster, broker: int) -> None:
    while True:
        found = next((node for node in cluster.brokers() if node.node == broker), None)
        if found is None or found.state == "drained":
            return
        if not found.is_draining:
            raise ConflictError(f"broker {broker} is {found.state}: its draining was undone", code="not_drained")
        time.sleep(_POLL_S)


@broker.command("remove", epilog="Example: quiver broker remove 3")
@_BROKER
@url_option
def remove_broker(*, broker: int, url: str) -> None:
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
