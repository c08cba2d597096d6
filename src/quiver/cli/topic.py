"""`quiver topic`: create, list, describe, change and delete topics."""

from __future__ import annotations

import click
import msgspec

from quiver.cli.options import connect, json_option, topic_argument, url_option
from quiver.cli.output import format_count, print_json, print_table
from quiver.wire.messages import RetentionInfo


@click.group(epilog="Example: quiver topic create logs --partitions 3")
def topic() -> None:
    """Work with topics."""


@topic.command(epilog="Example: quiver topic create logs --partitions 6 --retention-ms 604800000")
@topic_argument
@click.option("--partitions", type=click.IntRange(min=1), default=3, show_default=True, help="Number of partitions.")
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    help="Replicas of each partition.  [default: 3, or one per broker if fewer]",
)
@click.option("--retention-ms", type=click.IntRange(min=1), help="Age at which records may be removed.")
@click.option(
    "--retention-bytes",
    type=click.IntRange(min=1),
    help="Size above which a partition's oldest records may be removed.",
)
@click.option(
    "--until-consumed", is_flag=True, help="Records may be removed once every registered consumer has consumed them."
)
@url_option
def create(
    *,
    topic: str,
    partitions: int,
    replicas: int | None,
    retention_ms: int | None,
    retention_bytes: int | None,
    until_consumed: bool,
    url: str,
) -> None:
    """Create TOPIC."""
    retention = RetentionInfo(ms=retention_ms, bytes=retention_bytes, until_consumed=until_consumed)
    with connect(url) as cluster:
        cluster.create_topic(topic, partitions=partitions, replicas=replicas, retention=retention)
    click.echo(f"created {topic} with {format_count(partitions, 'partition')}")


@topic.command("list", epilog="Example: quiver topic list --json")
@json_option
@url_option
def list_(*, as_json: bool, url: str) -> None:
    """Print the names of all topics."""
    with connect(url) as cluster:
        topics = cluster.list_topics()
    if as_json:
        print_json(topics)
        return
    for name in topics:
        click.echo(name)


@topic.command(epilog="Example: quiver topic describe logs")
@topic_argument
@json_option
@url_option
def describe(*, topic: str, as_json: bool, url: str) -> None:
    """Print TOPIC's partitions: leader, replicas, those in sync, offsets and bytes."""
    with connect(url) as cluster:
        found = cluster.describe_topic(topic)
    if as_json:
        print_json(found)
        return
    kept = {key: value for key, value in msgspec.to_builtins(found.retention).items() if value}
    click.echo(f"{found.topic}: {found.replicas} replica{'s' * (found.replicas != 1)}, retention {kept or 'unlimited'}")
    rows = [
        (
            item.partition,
            item.leader,
            " ".join(map(str, item.replicas)),
            " ".join(map(str, item.in_sync)) or None,
            item.first_offset,
            item.end_offset,
            item.bytes,
        )
        for item in found.partitions
    ]
    print_table(("partition", "leader", "replicas", "in sync", "first offset", "end offset", "bytes"), rows)


@topic.command(epilog="Example: quiver topic add-partitions logs 12")
@topic_argument
@click.argument("partitions", type=click.IntRange(min=1))
@url_option
def add_partitions(*, topic: str, partitions: int, url: str) -> None:
    """Raise the number of partitions of TOPIC to PARTITIONS; keys may map to other partitions from then on."""
    with connect(url) as cluster:
        cluster.add_partitions(topic, partitions)
    click.echo(f"{topic} has {partitions} partitions")


@topic.command(epilog="Example: quiver topic delete logs")
@topic_argument
@url_option
def delete(*, topic: str, url: str) -> None:
    """Delete TOPIC; it can be restored for a day (setting manager.purge_delay_ms)."""
    with connect(url) as cluster:
        cluster.delete_topic(topic)
    click.echo(f"deleted {topic}; quiver topic restore {topic} undoes it")


@topic.command(epilog="Example: quiver topic restore logs")
@topic_argument
@url_option
def restore(*, topic: str, url: str) -> None:
    """Restore a deleted TOPIC with all its records."""
    with connect(url) as cluster:
        cluster.restore_topic(topic)
    click.echo(f"restored {topic}")
