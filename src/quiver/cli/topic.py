"""`quiver topic`: create, list, describe, configure and delete topics."""

from __future__ import annotations

import click
import msgspec

from quiver.cli.options import connect, examples, json_option, topic_argument, url_option
from quiver.cli.output import Cell, format_bytes, format_count, print_json, print_table
from quiver.cli.quantities import UNLIMITED, DurationType, SizeType, format_duration, format_size
from quiver.client.consumer_core import INTERNAL_TOPIC_PREFIX
from quiver.client.overview import TopicOverview
from quiver.wire.messages import RetentionInfo

HIDDEN_TOPIC_PREFIXES = ("_", INTERNAL_TOPIC_PREFIX)
"""How the names of topics begin that Quiver and its tools make for themselves."""


@click.group(epilog="Example: quiver topic create logs --partitions 3")
def topic() -> None:
    """Work with topics."""


@topic.command(
    "create",
    epilog=examples(
        "quiver topic create logs --partitions 6",
        "quiver topic create logs --retention 7d",
        "quiver topic create payments --encrypted",
    ),
)
@topic_argument
@click.option("--partitions", type=click.IntRange(min=1), default=3, show_default=True, help="Number of partitions.")
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    help="Replicas of each partition.  [default: 3, or one per broker if fewer]",
)
@click.option(
    "--retention", "--retention-ms", "retention_ms", type=DurationType(), help="Age at which records may be removed."
)
@click.option(
    "--retention-size",
    "--retention-bytes",
    "retention_bytes",
    type=SizeType(),
    help="Size above which a partition's oldest records may be removed.",
)
@click.option(
    "--until-consumed", is_flag=True, help="Records may be removed once every registered consumer has consumed them."
)
@click.option(
    "--encrypted/--not-encrypted",
    "encrypted",
    default=None,
    help="Whether its replicas encrypt their files; cannot be changed later.  [default: encryption.encrypt_new_topics]",
)
@url_option
def create_topic(
    *,
    topic: str,
    partitions: int,
    replicas: int | None,
    retention_ms: int | None,
    retention_bytes: int | None,
    until_consumed: bool,
    encrypted: bool | None,
    url: str,
) -> None:
    """Create TOPIC."""
    retention = RetentionInfo(ms=retention_ms, bytes=retention_bytes, until_consumed=until_consumed)
    with connect(url) as cluster:
        cluster.create_topic(topic, partitions=partitions, replicas=replicas, retention=retention, encrypted=encrypted)
    click.echo(f"created {topic} with {format_count(partitions, 'partition')}")


@topic.command("list", epilog=examples("quiver topic list", "quiver topic list --names | wc -l"))
@click.option(
    "--all",
    "with_internal",
    is_flag=True,
    help=f"Include internal topics: {' and '.join(f'{one}…' for one in HIDDEN_TOPIC_PREFIXES)}.",
)
@click.option("--names", "only_names", is_flag=True, help="Print only the names, one per line.")
@json_option
@url_option
def list_topics(*, with_internal: bool, only_names: bool, as_json: bool, url: str) -> None:
    """Print all topics: partitions, replicas, records, bytes, retention.

    Records and bytes are counted by the leaders; without an answer from one of them they are not known.
    """
    with connect(url) as cluster:
        if only_names and not as_json:
            for name in _shown(cluster.list_topics(), with_internal=with_internal):
                click.echo(name)
            return
        known = {one.topic: one for one in cluster.status().topics}
    found = [known[name] for name in _shown(sorted(known), with_internal=with_internal)]
    if as_json:
        print_json([_summary(one) for one in found])
        return
    if not found:
        click.echo("no topics" if with_internal or not known else "no topics; --all includes internal ones")
        return
    rows: list[tuple[Cell, ...]] = []
    for one in found:
        facts = _summary(one)
        size = None if facts.bytes is None else format_bytes(facts.bytes)
        rows.append((one.topic, facts.partitions, one.replicas, facts.records, size, describe_retention(one.retention)))
    print_table(("topic", "partitions", "replicas", "records", "bytes", "retention"), rows)


def _shown(names: list[str], *, with_internal: bool) -> list[str]:
    return [name for name in names if with_internal or not name.startswith(HIDDEN_TOPIC_PREFIXES)]


class TopicSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One topic in the output of `quiver topic list --json`."""

    topic: str
    partitions: int
    replicas: int
    records: int | None
    bytes: int | None
    retention: RetentionInfo


def _summary(topic: TopicOverview) -> TopicSummary:
    counted = [
        (one.end_offset - one.first_offset, one.bytes or 0)
        for one in topic.partitions
        if one.end_offset is not None and one.first_offset is not None
    ]
    is_known = len(counted) == len(topic.partitions)
    return TopicSummary(
        topic=topic.topic,
        partitions=len(topic.partitions),
        replicas=topic.replicas,
        records=sum(records for records, _ in counted) if is_known else None,
        bytes=sum(size for _, size in counted) if is_known else None,
        retention=topic.retention,
    )


@topic.command("describe", epilog="Example: quiver topic describe logs")
@topic_argument
@json_option
@url_option
def describe_topic(*, topic: str, as_json: bool, url: str) -> None:
    """Print TOPIC's partitions: leader, replicas, those in sync, offsets and bytes."""
    with connect(url) as cluster:
        found = cluster.describe_topic(topic)
    if as_json:
        print_json(found)
        return
    retention = describe_retention(found.retention)
    encrypted = ", encrypted" if found.is_encrypted else ""
    click.echo(f"{found.topic}: {format_count(found.replicas, 'replica')}, retention {retention}{encrypted}")
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


def describe_retention(retention: RetentionInfo) -> str:
    """Return when records may be removed, in a few words."""
    parts = [] if retention.ms is None else [format_duration(retention.ms)]
    parts += [] if retention.bytes is None else [f"{format_size(retention.bytes)} per partition"]
    parts += ["until consumed"] if retention.until_consumed else []
    return ", ".join(parts) or "unlimited"


@topic.command(
    "configure",
    epilog=examples(
        "quiver topic configure logs --retention 7d --retention-size 10GiB",
        "quiver topic configure logs --retention unlimited",
    ),
)
@topic_argument
@click.option(
    "--retention",
    "--retention-ms",
    "retention_ms",
    type=DurationType(or_unlimited=True),
    help="Age at which records may be removed, or unlimited.",
)
@click.option(
    "--retention-size",
    "--retention-bytes",
    "retention_bytes",
    type=SizeType(or_unlimited=True),
    help="Size above which a partition's oldest records may be removed, or unlimited.",
)
@click.option(
    "--until-consumed/--no-until-consumed",
    default=None,
    help="Whether records may be removed once every registered consumer has consumed them.",
)
@url_option
def configure_topic(
    *, topic: str, retention_ms: int | None, retention_bytes: int | None, until_consumed: bool | None, url: str
) -> None:
    """Change the retention of TOPIC; what is not given stays as it is."""
    if retention_ms is None and retention_bytes is None and until_consumed is None:
        raise click.UsageError("nothing to change: give --retention, --retention-size or --until-consumed")
    with connect(url) as cluster:
        now = cluster.describe_topic(topic).retention
        wanted = RetentionInfo(
            ms=_changed(retention_ms, now.ms),
            bytes=_changed(retention_bytes, now.bytes),
            until_consumed=now.until_consumed if until_consumed is None else until_consumed,
        )
        cluster.configure_topic(topic, retention=wanted)
    click.echo(f"retention of {topic}: {describe_retention(wanted)}; was: {describe_retention(now)}")


def _changed(given: int | None, now: int | None) -> int | None:
    if given is None:
        return now
    return None if given == UNLIMITED else given


@topic.command(epilog="Example: quiver topic add-partitions logs 12")
@topic_argument
@click.argument("partitions", type=click.IntRange(min=1))
@url_option
def add_partitions(*, topic: str, partitions: int, url: str) -> None:
    """Raise the number of partitions of TOPIC to PARTITIONS; keys may map to other partitions from then on."""
    with connect(url) as cluster:
        cluster.add_partitions(topic, partitions)
    click.echo(f"{topic} has {partitions} partitions")


@topic.command("delete", epilog="Example: quiver topic delete logs")
@topic_argument
@url_option
def delete_topic(*, topic: str, url: str) -> None:
    """Delete TOPIC; it can be restored for a day (setting manager.purge_delay_ms)."""
    with connect(url) as cluster:
        cluster.delete_topic(topic)
    click.echo(f"deleted {topic}; quiver topic restore {topic} undoes it")


@topic.command("restore", epilog="Example: quiver topic restore logs")
@topic_argument
@url_option
def restore_topic(*, topic: str, url: str) -> None:
    """Restore a deleted TOPIC with all its records."""
    with connect(url) as cluster:
        cluster.restore_topic(topic)
    click.echo(f"restored {topic}")
