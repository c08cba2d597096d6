"""`quiver explain`: one partition, and why it does not accept or deliver records just now."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap

import click

from quiver.cli.cluster import HOLD_COLUMNS, hold_cells
from quiver.cli.options import connect, examples, json_option, url_option
from quiver.cli.output import Cell, format_time, print_json, print_table
from quiver.cli.topic import describe_retention
from quiver.client.explanation import ExplainedReplica, PartitionEvent, PartitionExplanation
from quiver.model import NodeId
from quiver.wire.explain_messages import ObstacleInfo

_PLACE = re.compile(r"(?P<topic>[^/@]+)/(?P<partition>\d+)(?:@(?P<offset>\d+))?")
EVENTS_MAX = 10
"""Events that are printed; `--json` has all that the nodes keep."""


@click.command(
    short_help="Explain a partition: who leads, how far each replica is, what is in the way.",
    epilog=examples("quiver explain logs/0", "quiver explain logs/0@812 --json"),
)
@click.argument("place", metavar="TOPIC/PARTITION[@OFFSET]")
@json_option
@url_option
def explain(*, place: str, as_json: bool, url: str) -> None:
    """Print who leads a partition since when, each replica's log, and why it does not accept or deliver records.

    With an offset, also whether that record can be read. Nodes that do not answer are listed with the reason.
    """
    found = _PLACE.fullmatch(place)
    if found is None:
        raise click.BadParameter(
            f"{place!r} is not TOPIC/PARTITION or TOPIC/PARTITION@OFFSET, such as logs/0@812", param_hint="PLACE"
        )
    offset = None if found["offset"] is None else int(found["offset"])
    with connect(url) as cluster:
        explanation = cluster.explain(found["topic"], int(found["partition"]), offset)
    if as_json:
        print_json(explanation)
        return
    print_explanation(explanation)


def print_explanation(one: PartitionExplanation) -> None:
    """Print an explanation for people."""
    click.echo(f"{one.topic}/{one.partition}" + ("" if one.offset is None else f"@{one.offset}"))
    _print_fact("leader", _describe_leader(one))
    _print_fact("in sync", _nodes(one.in_sync))
    _print_obstacles("produce", one.produce_obstacles, "accepts records")
    works = "records are delivered" if one.offset is None else f"offset {one.offset} is committed and can be read"
    _print_obstacles("consume", one.consume_obstacles, works)
    _print_fact("retention", _describe_retention(one))
    columns = ("node", "role", "log end", "committed", "lag", "entries behind", "since")
    print_table(columns, [_replica_cells(replica) for replica in one.replicas])
    for replica in one.replicas:
        if replica.error:
            click.echo(f"node {replica.node} did not answer: {replica.error}")
        elif replica.report is not None and replica.report.problem:
            click.echo(f"node {replica.node} is {replica.report.state}: {replica.report.problem}")
        elif reason := _full_follower(replica):
            click.echo(f"node {replica.node} is full: {reason}")
    if one.holds:
        print_table(HOLD_COLUMNS, [hold_cells(hold) for hold in one.holds])
    for move in one.moves:
        click.echo(f"move {move.move_id}: from node {move.source} to node {move.target}, {move.state}")
    if one.events:
        rows = [_event_cells(event) for event in one.events[-EVENTS_MAX:]]
        print_table(("time", "node", "epoch", "event"), rows)
    for sentence in one.unanswered:
        click.echo(f"not known: {sentence}")


def _print_fact(name: str, sentence: str) -> None:
    line = f"{name + ':' * bool(name):<11}{sentence}"
    if sys.stdout.isatty():
        line = textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent=" " * 11)
    click.echo(line)


def _print_obstacles(name: str, obstacles: tuple[ObstacleInfo, ...], works: str) -> None:
    if not obstacles:
        _print_fact(name, works)
    for obstacle in obstacles:
        _print_fact(name, f"NO ({obstacle.code}): {obstacle.sentence}")
        name = ""


def _describe_leader(one: PartitionExplanation) -> str:
    if one.leader is None:
        last = "" if one.recorded_leader is None else f"; the last one known is node {one.recorded_leader}"
        return f"none, epoch {one.epoch}{last}"
    since = "" if one.since_ms is None else f" since {_format_second(one.since_ms)}"
    return f"node {one.leader}{since}, epoch {one.epoch}"


def _describe_retention(one: PartitionExplanation) -> str:
    sentence = describe_retention(one.retention)
    if one.first_offset is not None:
        sentence += f"; first record at {one.first_offset}"
    if one.holds:
        sentence += f"; held from {one.holds[0].offsets[0][1]} by {one.holds[0].name}"
    slowest = next((item.report.slowest for item in one.replicas if item.report and item.report.slowest), ())
    if slowest:
        cursor = "no cursor" if slowest[0].cursor is None else f"cursor {slowest[0].cursor}"
        sentence += f"; kept for consumer {slowest[0].consumer}, {cursor}"
    return sentence


def _full_follower(replica: ExplainedReplica) -> str:
    """Return why a follower stores no more entries; empty if it does store them."""
    report = replica.report
    if report is None or report.role == "leader":
        return ""
    return next((obstacle.sentence for obstacle in report.obstacles if obstacle.code == "disk_full"), "")


def _replica_cells(replica: ExplainedReplica) -> tuple[Cell, ...]:
    report = replica.report
    if report is None or not report.role:
        state = "no answer" if report is None else report.state
        return (replica.node, state, None, None, None, replica.lag_entries, None)
    role = "learner" if replica.is_learner else report.role
    state = "full" if _full_follower(replica) else report.state
    return (
        replica.node,
        role if state == "open" else f"{role}, {state}",
        report.log_end_offset,
        report.high_watermark,
        replica.lag_records,
        replica.lag_entries,
        _format_second(report.since_ms),
    )


def _event_cells(item: PartitionEvent) -> tuple[Cell, ...]:
    event = item.event
    if event.kind == "members":
        learners = f", learners {_nodes(event.learners)}" if event.learners else ""
        text = f"members are {_nodes(event.members)}{learners}"
    elif event.kind == "transfer":
        text = f"begins to transfer its leadership to node {event.leader}"
    elif event.kind == "leader":
        text = "becomes the leader"
    elif event.leader is not None:
        text = f"follows node {event.leader}"
    else:
        text = {"candidate": "campaigns", "pre_candidate": "asks for pre-votes"}.get(event.kind, "knows no leader")
    return (format_time(event.at_ms), item.node, event.epoch, text)


def _format_second(timestamp: int) -> str:
    return f"{format_time(timestamp)[:19]}Z"


def _nodes(nodes: tuple[NodeId, ...]) -> str:
    return " ".join(map(str, nodes)) or "none"
