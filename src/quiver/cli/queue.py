"""`quiver queue`: list, describe and configure work queues; see `dead_letters` for what failed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Literal

import click

import quiver
from quiver.cli.dead_letters import dead
from quiver.cli.options import connect, examples, json_option, url_option
from quiver.cli.output import UNAVAILABLE, Cell, print_json, print_table
from quiver.cli.quantities import DurationType, format_duration
from quiver.client.queue_groups import QueueDescription
from quiver.errors import UnavailableError
from quiver.groups.settings import dead_letter_topic_of

ASKED_AT_ONCE: Final = 8
"""Queues that are described at a time."""
COUNTS: Final = ("ready", "leased", "waiting", "dying")

_GROUP = click.argument("group")


@click.group(epilog="Example: quiver queue describe workers")
def queue() -> None:
    """Work with work queues."""


queue.add_command(dead)


@queue.command("list", epilog="Example: quiver queue list --json")
@json_option
@url_option
@click.pass_context
def list_queues(context: click.Context, *, as_json: bool, url: str) -> None:
    """Print all work queues: what is ready, leased and waiting in all their partitions.

    A queue with a partition that has no leader is printed without numbers, and the exit code is 3.
    """
    with connect(url) as cluster, ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        known = cluster.queues()
        found = list(threads.map(partial(_describe_reached, cluster), known))
    if as_json:
        print_json([one or queue for one, queue in zip(found, known, strict=True)])
    elif not known:
        click.echo("no queues; `quiver work` and cluster.queue() create them")
    else:
        rows = [_queue_cells(queue, one) for one, queue in zip(found, known, strict=True)]
        print_table(("group", "topics", *COUNTS), rows)
    if None in found:
        context.exit(UNAVAILABLE)


@queue.command("describe", epilog="Example: quiver queue describe workers")
@_GROUP
@json_option
@url_option
def describe_queue(*, group: str, as_json: bool, url: str) -> None:
    """Print the settings of GROUP, and what is ready, leased and waiting in each partition.

    The last column says why nothing can be received from a partition now: it is empty, as many records are under way as
    in_flight_max allows, or the rest waits for its time or for an earlier record of its key.
    """
    with connect(url) as cluster:
        found = cluster.describe_queue(group)
    if as_json:
        print_json(found)
        return
    for name, value in _show_settings(found):
        click.echo(f"{name}: {value}")
    click.echo()
    columns = ("topic", "partition", "ready", "leased", "waiting", "dying", "cursor", "next", "end", "stall")
    rows: list[tuple[Cell, ...]] = [
        (
            one.topic,
            one.partition,
            one.ready,
            one.leased,
            one.waiting,
            one.dying,
            one.cursor,
            one.next_offset,
            one.end_offset,
            one.stall or None,
        )
        for one in found.partitions
    ]
    print_table(columns, rows)


@queue.command(
    "configure",
    epilog=examples(
        "quiver queue configure workers --lease 5m --max-attempts 3",
        "quiver queue configure w --order key",
    ),
)
@_GROUP
@click.option("--lease", "lease_ms", type=DurationType(), help="How long a record belongs to its worker.")
@click.option(
    "--max-attempts",
    type=click.IntRange(min=0),
    metavar="N",
    help="Deliveries after which a record is a dead letter; 0: no limit.",
)
@click.option("--backoff", "backoff_ms", type=DurationType(), help="Delay before the first retry.")
@click.option("--backoff-max", "backoff_max_ms", type=DurationType(), help="Longest delay before a retry.")
@click.option("--backoff-multiplier", type=float, metavar="X", help="Factor by which the delay grows.")
@click.option("--in-flight-max", type=click.IntRange(min=1), metavar="N", help="Records under way per partition.")
@click.option("--order", type=click.Choice(("offset", "key")), help="key: one record of a key at a time.")
@click.option("--dead-letter-topic", metavar="TOPIC", help="Topic of dead letters; empty: TOPIC.GROUP.dead.")
@url_option
def configure_queue(
    *,
    group: str,
    lease_ms: int | None,
    max_attempts: int | None,
    backoff_ms: int | None,
    backoff_max_ms: int | None,
    backoff_multiplier: float | None,
    in_flight_max: int | None,
    order: Literal["offset", "key"] | None,
    dead_letter_topic: str | None,
    url: str,
) -> None:
    """Change settings of GROUP for all its workers; those that are not given stay. Leases that run keep their end."""
    given: dict[str, Any] = {
        "lease": None if lease_ms is None else lease_ms / 1000,
        "max_attempts": max_attempts,
        "backoff": None if backoff_ms is None else backoff_ms / 1000,
        "backoff_max": None if backoff_max_ms is None else backoff_max_ms / 1000,
        "backoff_multiplier": backoff_multiplier,
        "in_flight_max": in_flight_max,
        "order": order,
        "dead_letter_topic": dead_letter_topic,
    }
    if all(value is None for value in given.values()):
        raise click.UsageError("name a setting to change, such as --lease 5m")
    with connect(url) as cluster:
        cluster.configure_queue(group, **given)
    click.echo(f"configured {group}")


def _describe_reached(cluster: quiver.Cluster, known: QueueDescription) -> QueueDescription | None:
    """Return a queue with its partitions; None, after saying why, if one of them is not reached."""
    try:
        return cluster.describe_queue(known.group)
    except UnavailableError as error:
        click.echo(f"queue {known.group}: a partition of {' '.join(known.topics)} does not answer: {error}", err=True)
        return None


def _queue_cells(known: QueueDescription, found: QueueDescription | None) -> tuple[Cell, ...]:
    counts: list[Cell] = [None] * len(COUNTS)
    if found is not None:
        counts = [sum(getattr(partition, name) for partition in found.partitions) for name in COUNTS]
    return known.group, " ".join(known.topics) or None, *counts


def _show_settings(found: QueueDescription) -> list[tuple[str, str]]:
    settings = found.settings
    backoff = f"{_duration(settings.backoff_ms)}, times {settings.backoff_multiplier:g} with each attempt"
    letters = [dead_letter_topic_of(settings, topic=topic, group=found.group) for topic in found.topics]
    return [
        ("group", found.group),
        ("topics", " ".join(found.topics)),
        ("lease", _duration(settings.lease_ms)),
        ("max attempts", str(settings.max_attempts) if settings.max_attempts else "no limit"),
        ("backoff", f"{backoff}, at most {_duration(settings.backoff_max_ms)}"),
        ("in flight max", f"{settings.in_flight_max:,} per partition"),
        ("order", settings.order),
        ("dead letters", " ".join(letters)),
    ]


def _duration(milliseconds: int) -> str:
    return format_duration(milliseconds) if milliseconds else "0"
