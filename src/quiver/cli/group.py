"""`quiver group`: list and describe consumer groups, show their lag, reset their cursors, delete them."""

from __future__ import annotations

import click

from quiver.cli.options import (
    START_HELP,
    Start,
    StartType,
    connect,
    examples,
    json_option,
    partitions_option,
    url_option,
)
from quiver.cli.output import Cell, format_count, format_time, print_json, print_table
from quiver.client.cursors import PartitionLag
from quiver.client.group_admin import CursorReset
from quiver.wire.group_messages import GroupInfo

_GROUP = click.argument("group")
_TOPIC = click.option("--topic", help="Only this topic.")


@click.group(epilog="Example: quiver group describe billing")
def group() -> None:
    """Work with consumer groups."""


@group.command("list", epilog=examples("quiver group list", "quiver group list --json"))
@json_option
@url_option
def list_groups(*, as_json: bool, url: str) -> None:
    """Print all groups: their state, members, topics and last rebalance. A named consumer is a group of one."""
    with connect(url) as cluster:
        found = cluster.groups()
    if as_json:
        print_json(found)
        return
    columns = ("group", "kind", "state", "members", "partitions", "unassigned", "topics", "last rebalance")
    print_table(columns, [_group_cells(one) for one in found])


@group.command(epilog=examples("quiver group describe billing", "quiver group describe billing --json"))
@_GROUP
@json_option
@url_option
def describe(*, group: str, as_json: bool, url: str) -> None:
    """Print the members of GROUP, their partitions with the epoch of each, and the last rebalance."""
    with connect(url) as cluster:
        found = cluster.describe_group(group)
    if as_json:
        print_json(found)
        return
    if found.kind == "queue":
        click.echo(
            f"group {found.group} is a work queue of {' '.join(found.topics)}: quiver queue describe {found.group}"
        )
        return
    _print_summary(found)
    columns = ("member", "instance", "client", "topic", "partition", "epoch", "state")
    print_table(columns, _member_rows(found))


@group.command(epilog=examples("quiver group lag billing", "quiver group lag billing --topic logs --json"))
@_GROUP
@_TOPIC
@json_option
@url_option
def lag(*, group: str, topic: str | None, as_json: bool, url: str) -> None:
    """Print the cursor and lag of GROUP in each partition, and the member that has it.

    The lag is the number of records that the group has not consumed yet.
    """
    with connect(url) as cluster:
        known = cluster.describe_group(group)
        found = cluster.group_lag(group, topic)
    if as_json:
        print_json(found)
        return
    print_table(
        ("topic", "partition", "cursor", "first offset", "end offset", "lag", "member"), _lag_rows(known, found)
    )


@group.command(
    epilog=examples(
        "quiver group reset billing --to earliest --dry-run",
        "quiver group reset billing --to 2026-01-31T12:00 --topic logs",
        "quiver group reset billing --shift -100 --partition 0 --force",
    )
)
@_GROUP
@click.option("--to", "start", type=StartType(), help=f"New position: {START_HELP}.")
@click.option("--shift", type=int, metavar="N", help="Move by N records, back if it is negative.")
@_TOPIC
@partitions_option
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@click.option("--force", is_flag=True, help="Also while members are active; they continue at the new cursors.")
@json_option
@url_option
def reset(
    *,
    group: str,
    start: Start | None,
    shift: int | None,
    topic: str | None,
    partitions: tuple[int, ...],
    dry_run: bool,
    force: bool,
    as_json: bool,
    url: str,
) -> None:
    """Move the cursors of GROUP, and print them before and after.

    All cursors are checked before one moves. While the group has members it is refused, unless forced: then the members
    lose their partitions for a moment and continue at the new cursors.
    """
    if (start is None) == (shift is None):
        raise click.UsageError("give either --to or --shift")
    with connect(url) as cluster:
        found = cluster.reset_group(
            group,
            None if start is None else start.offset,
            timestamp=None if start is None else start.timestamp,
            shift=shift,
            topic=topic,
            partitions=partitions,
            dry_run=dry_run,
            force=force,
        )
    if as_json:
        print_json(found)
        return
    _print_resets(found)
    if dry_run:
        click.echo("nothing was moved: --dry-run", err=True)


@group.command(epilog=examples("quiver group delete billing", "quiver group delete billing --force"))
@_GROUP
@click.option("--force", is_flag=True, help="Also while it has members, which then fail.")
@url_option
def delete(*, group: str, force: bool, url: str) -> None:
    """Delete GROUP with its cursors; retention no longer waits for it."""
    with connect(url) as cluster:
        cluster.delete_group(group, force=force)
    click.echo(f"group {group} is deleted")


# -- tables ------------------------------------------------------------------------------------------


def _group_cells(found: GroupInfo) -> tuple[Cell, ...]:
    shares: tuple[Cell, ...] = (found.state, len(found.members), found.partitions, found.unassigned)
    return (
        found.group,
        found.kind,
        *(shares if found.kind == "stream" else (None,) * len(shares)),  # workers share a queue without members
        " ".join(found.topics) or None,
        format_time(found.last_rebalance_ms) if found.last_rebalance_ms else None,
    )


def _print_summary(found: GroupInfo) -> None:
    parts = [f"group {found.group}", found.state, format_count(len(found.members), "member")]
    parts.append(f"{format_count(found.partitions, 'partition')}, {found.unassigned} unassigned")
    parts.append(format_count(found.rebalances, "rebalance"))
    if found.last_rebalance_ms:
        parts.append(f"the last one {format_time(found.last_rebalance_ms)}: {found.last_rebalance_reason}")
    click.echo("; ".join(parts))


def _member_rows(found: GroupInfo) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for member in found.members:
        who: tuple[Cell, ...] = (member.member_id, member.instance or None, member.client or None)
        states = [(one, "owned") for one in member.owned] + [(one, "revoking") for one in member.revoking]
        rows += [(*who, one.topic, one.partition_id, one.epoch, state) for one, state in states]
        if not states:
            rows.append((*who, None, None, None, "idle"))
    return rows


def _lag_rows(known: GroupInfo, found: list[PartitionLag]) -> list[tuple[Cell, ...]]:
    owners = {
        (one.topic, one.partition_id): member.instance or member.member_id
        for member in known.members
        for one in (*member.owned, *member.revoking)
    }
    return [
        (
            one.topic,
            one.partition,
            one.cursor,
            one.first_offset,
            one.end_offset,
            one.lag,
            owners.get((one.topic, one.partition)),
        )
        for one in found
    ]


def _print_resets(found: list[CursorReset]) -> None:
    rows: list[tuple[Cell, ...]] = [
        (one.topic, one.partition, one.cursor, one.target, one.end_offset, one.lag) for one in found
    ]
    print_table(("topic", "partition", "before", "after", "end offset", "lag"), rows)
