"""`quiver top`: a live view of nodes, topics, rates and lag, as `top` shows processes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

import quiver
from quiver.cli.options import connect, examples, json_lines_option, url_option
from quiver.cli.output import format_bytes, format_count, print_json_line
from quiver.cli.topic import HIDDEN_TOPIC_PREFIXES
from quiver.client.overview import ClusterOverview, NodeOverview
from quiver.errors import QuiverError, UnavailableError

ROWS_MAX = 20
"""Most topics and consumers of one view: those with the greatest rate and lag."""


class TopicActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One topic between two views."""

    topic: str
    partitions: int
    records: int
    bytes: int
    records_per_second: float | None
    """Produced records; None in the first view, and while no partition has reported twice."""
    under_replicated: int
    """Partitions with replicas that are not in sync."""
    leaderless: int


class ConsumerActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One named consumer in one topic between two views."""

    consumer: str
    topic: str
    lag: int
    records_per_second: float | None
    """Consumed records; None in the first view."""


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """The whole view."""

    time_ms: int
    cluster: str
    is_stale: bool
    nodes: list[NodeOverview]
    leads: dict[int, int]
    topics: list[TopicActivity]
    consumers: list[ConsumerActivity]
    error: str = ""
    """Why the cluster does not answer; the rest is then as it was at `time_ms`."""


@click.command(
    short_help="Show nodes, topics, rates and lag, live.", epilog=examples("quiver top", "quiver top --once")
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2, max=3600),
    default=2.0,
    show_default=True,
    help="Seconds between views.",
)
@click.option("--once", is_flag=True, help="Print one view, with the rates of one interval, and end.")
@click.option("--all", "with_internal", is_flag=True, help="Include internal topics.")
@json_lines_option
@url_option
def top(*, interval: float, once: bool, with_internal: bool, as_json: bool, url: str) -> None:
    """Show the nodes, the busiest topics with their rates, and the consumers with the greatest lag, until Ctrl-C."""
    with connect(url) as cluster:
        views = watch(cluster, interval, with_internal=with_internal)
        if once or as_json:
            next(views)  # rates need two
            for view in views:
                if once and view.error:
                    raise UnavailableError(view.error, code="not_reached")
                if as_json:
                    print_json_line(view)
                else:
                    Console(highlight=False).print(render(view))
                if once:
                    return
        with Live(Text("waiting for the cluster"), auto_refresh=False, screen=True) as live:
            for view in views:
                live.update(render(view), refresh=True)


def watch(cluster: quiver.Cluster, interval_s: float, *, with_internal: bool) -> Iterator[Activity]:
    """Yield what the cluster does, again and again; the first view has no rates."""
    before: Activity | None = None
    positions: Positions = {}
    while True:
        start_s = time.monotonic()
        try:
            overview = cluster.status()
            consumed = _find_consumed(cluster)
        except UnavailableError as error:
            if before is None:
                raise
            yield msgspec.structs.replace(before, error=error.message)
        else:
            passed_s = None if before is None else max(1e-3, time.time() - before.time_ms / 1000)
            before = summarize(overview, consumed, before=positions, passed_s=passed_s, with_internal=with_internal)
            positions = _find_positions(overview, consumed)
            yield before
        time.sleep(max(0.0, interval_s - (time.monotonic() - start_s)))


Consumed = dict[tuple[str, str], dict[int, tuple[int, int]]]
"""By consumer and topic, and by partition: its cursor, and its lag."""
Positions = dict[tuple[str, str], dict[int, int]]
"""By consumer and topic, and by partition: its cursor; without a consumer: the end. A rate needs two of them."""


def _find_consumed(cluster: quiver.Cluster) -> Consumed:
    found: Consumed = {}
    for client in cluster.clients("consumer")[: 4 * ROWS_MAX]:
        try:
            for lag in cluster.lag(client.id):
                name = (client.name or str(client.id), lag.topic)
                found.setdefault(name, {})[lag.partition] = (lag.end_offset - lag.lag, lag.lag)
        except QuiverError:
            continue  # it was forgotten meanwhile, or a partition has no leader
    return found


def _find_positions(overview: ClusterOverview, consumed: Consumed) -> Positions:
    """Return the positions of all partitions that reported one: those without a leader have none."""
    found: Positions = {
        ("", one.topic): {part.partition: part.end_offset for part in one.partitions if part.end_offset is not None}
        for one in overview.topics
    }
    for key, partitions in consumed.items():
        found[key] = {partition: position for partition, (position, _) in partitions.items()}
    return found


def summarize(
    overview: ClusterOverview,
    consumed: Consumed,
    *,
    before: Positions,
    passed_s: float | None,
    with_internal: bool,
) -> Activity:
    """Return the view of an overview, with rates since the one before."""
    positions = _find_positions(overview, consumed)

    def rate(key: tuple[str, str]) -> float | None:
        # Only partitions that reported both times: one whose leader is back brings what it held before, too.
        both = positions[key].keys() & before.get(key, {}).keys()
        if passed_s is None or not both:
            return None
        return max(0.0, sum(positions[key][each] - before[key][each] for each in both) / passed_s)

    topics = [
        TopicActivity(
            topic=one.topic,
            partitions=len(one.partitions),
            records=sum((part.end_offset or 0) - (part.first_offset or 0) for part in one.partitions),
            bytes=sum(part.bytes or 0 for part in one.partitions),
            records_per_second=rate(("", one.topic)),
            under_replicated=sum(len(part.in_sync) < len(part.replicas) for part in one.partitions),
            leaderless=sum(part.end_offset is None for part in one.partitions),
        )
        for one in overview.topics
        if with_internal or not one.topic.startswith(HIDDEN_TOPIC_PREFIXES)
    ]
    consumers = [
        ConsumerActivity(
            consumer=name,
            topic=topic,
            lag=sum(left for _, left in partitions.values()),
            records_per_second=rate((name, topic)),
        )
        for (name, topic), partitions in consumed.items()
    ]
    leaders = [part.leader for one in overview.topics for part in one.partitions]
    return Activity(
        time_ms=round(time.time() * 1000),
        cluster=overview.cluster_id,
        is_stale=overview.is_stale,
        nodes=list(overview.nodes),
        leads={node.node: leaders.count(node.node) for node in overview.nodes},
        topics=sorted(topics, key=lambda one: (-(one.records_per_second or 0), -one.records, one.topic))[:ROWS_MAX],
        consumers=sorted(consumers, key=lambda one: (-one.lag, one.consumer, one.topic))[:ROWS_MAX],
    )


def render(view: Activity) -> RenderableType:
    """Return the view as tables for a terminal."""
    moment = time.strftime("%H:%M:%S", time.localtime(view.time_ms / 1000))
    total = sum(one.records_per_second or 0 for one in view.topics)
    silent = sum(not node.is_alive for node in view.nodes)
    head = Text(f"{view.cluster}  {moment}  {format_count(len(view.nodes), 'node')}  {total:,.0f} records/s in")
    if view.error:
        head.append(f"  as of then: the cluster does not answer: {view.error}", style="bold red")
    elif silent or view.is_stale:
        head.append(f"  {silent} do not answer" + (", no primary" if view.is_stale else ""), style="bold red")
    nodes = _table("node", "state", "role", "leads", "version", right={"leads"})
    for node in view.nodes:
        state = node.state if node.is_alive else "no answer"
        role = "primary" if node.is_primary else ",".join(node.roles)
        nodes.add_row(str(node.node), _coloured(state), role, str(view.leads[node.node]), node.version or "-")
    topics = _table("topic", "partitions", "records/s", "records", "bytes", "not in sync", right=_NUMBERS)
    for one in view.topics:
        behind = one.under_replicated + one.leaderless
        topics.add_row(
            one.topic,
            str(one.partitions),
            _rate(one.records_per_second),
            f"{one.records:,}",
            format_bytes(one.bytes),
            Text(str(behind), style="red" if behind else "dim"),
        )
    consumers = _table("consumer", "topic", "lag", "records/s", right=_NUMBERS)
    for consumer in view.consumers:
        consumers.add_row(consumer.consumer, consumer.topic, f"{consumer.lag:,}", _rate(consumer.records_per_second))
    return Group(head, nodes, *([topics] if view.topics else []), *([consumers] if view.consumers else []))


_NUMBERS = frozenset(("partitions", "records/s", "records", "bytes", "not in sync", "lag"))


def _table(*columns: str, right: frozenset[str] | set[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold", title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in right)
    return table


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}"


def _coloured(state: str) -> Text:
    return Text(state, style={"alive": "green", "no answer": "red", "dead": "red"}.get(state, "yellow"))
