"""`quiver consumer`, `quiver producer`: list and forget registered clients; show the lag of consumers and reset it."""

from __future__ import annotations

from typing import Literal

import click

import quiver
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
from quiver.cli.output import Cell, format_time, print_json, print_table
from quiver.client.cursors import PartitionLag
from quiver.errors import NotFoundError
from quiver.gateway.cluster_handlers import GATEWAY_PRODUCER_PREFIX

_CONSUMER = click.argument("consumer")
_TOPIC = click.option("--topic", help="Only this topic.")


@click.group(epilog="Example: quiver consumer lag report")
def consumer() -> None:
    """Work with registered consumers."""


@consumer.command("list", epilog="Example: quiver consumer list --topic logs")
@_TOPIC
@json_option
@url_option
def list_consumers(*, topic: str | None, as_json: bool, url: str) -> None:
    """Print the registered consumers and when each was last seen."""
    with connect(url) as cluster:
        found = cluster.clients("consumer", topic)
    if as_json:
        print_json(found)
        return
    print_table(("id", "name", "topics", "alive", "last seen", "registered"), [_client_cells(one) for one in found])


@consumer.command(epilog=examples("quiver consumer lag", "quiver consumer lag report --topic logs --json"))
@click.argument("consumer", required=False)
@_TOPIC
@json_option
@url_option
def lag(*, consumer: str | None, topic: str | None, as_json: bool, url: str) -> None:
    """Print the lag of CONSUMER, a name or an id, in each partition; without it, of every consumer in its topics.

    The lag is the number of records that a consumer has not consumed yet.
    """
    with connect(url) as cluster:
        if consumer is None:
            _print_all(cluster, topic, as_json=as_json)
            return
        found = cluster.lag(_find_id(cluster, consumer), topic)
    if as_json:
        print_json(found)
        return
    _print_lag(found)


@consumer.command(epilog="Example: quiver consumer reset report --topic logs --to earliest")
@_CONSUMER
@click.option("--topic", required=True, help="Topic whose cursors are set.")
@click.option("--to", "start", type=StartType(), required=True, help=f"New position: {START_HELP}.")
@partitions_option
@url_option
def reset(*, consumer: str, topic: str, start: Start, partitions: tuple[int, ...], url: str) -> None:
    """Set the cursors of CONSUMER, a name or an id, in a topic, and print its new lag.

    Stop the consumer first: a running one keeps its position, and its next commit overwrites the reset.
    """
    with connect(url) as cluster:
        id_ = _find_id(cluster, consumer)
        cluster.reset(id_, topic, start.offset, timestamp=start.timestamp, partitions=partitions)
        found = cluster.lag(id_, topic)
    _print_lag([one for one in found if not partitions or one.partition in partitions])


@consumer.command(epilog="Example: quiver consumer forget report")
@_CONSUMER
@url_option
def forget(*, consumer: str, url: str) -> None:
    """Remove CONSUMER, a name or an id, and its cursors; retention no longer waits for it."""
    with connect(url) as cluster:
        cluster.forget("consumer", _find_id(cluster, consumer))
    click.echo(f"consumer {consumer} is forgotten")


def _find_id(cluster: quiver.Cluster, name: str, kind: Literal["producer", "consumer"] = "consumer") -> int:
    """Return the id of the client with this name or, if no client has it, with this id."""
    known = cluster.clients(kind)
    for one in known:
        if one.name == name:
            return one.id
    if name.isascii() and name.isdigit() and any(one.id == int(name) for one in known):
        return int(name)
    raise NotFoundError(f"unknown {kind} {name!r}; `quiver {kind} list` shows all {kind}s", code=f"unknown_{kind}")


def _client_cells(client: quiver.ClientInfo) -> tuple[Cell, ...]:
    return (
        client.id,
        client.name or None,
        " ".join(client.topics) or None,
        "yes" if client.is_alive else "no",
        None if client.last_seen_ms is None else format_time(client.last_seen_ms),
        format_time(client.registered_ms),
    )


def _print_lag(found: list[PartitionLag]) -> None:
    columns = ("topic", "partition", "cursor", "first offset", "end offset", "lag")
    rows: list[tuple[Cell, ...]] = [
        (one.topic, one.partition, one.cursor, one.first_offset, one.end_offset, one.lag) for one in found
    ]
    print_table(columns, rows)


def _print_all(cluster: quiver.Cluster, topic: str | None, *, as_json: bool) -> None:
    found = [
        (client, name, cluster.lag(client.id, name))
        for client in cluster.clients("consumer", topic)
        for name in client.topics
        if topic in (None, name)
    ]
    if as_json:
        print_json([lag for _, _, lags in found for lag in lags])
        return
    rows: list[tuple[Cell, ...]] = [
        (client.id, client.name or None, name, sum(lag.lag for lag in lags), "yes" if client.is_alive else "no")
        for client, name, lags in found
    ]
    print_table(("id", "name", "topic", "lag", "alive"), rows)


@click.group(epilog="Example: quiver producer list --topic logs")
def producer() -> None:
    """Work with registered producers."""


@producer.command("list", epilog="Example: quiver producer list --topic logs --json")
@click.option("--topic", help="Only those of this topic.")
@click.option("--all", "with_all", is_flag=True, help="Include the producers with which gateways send HTTP messages.")
@json_option
@url_option
def list_producers(*, topic: str | None, with_all: bool, as_json: bool, url: str) -> None:
    """Print the registered producers and when each was last seen."""
    with connect(url) as cluster:
        known = cluster.clients("producer", topic)
    found = [client for client in known if with_all or not client.name.startswith(GATEWAY_PRODUCER_PREFIX)]
    if as_json:
        print_json(found)
        return
    rows: list[tuple[Cell, ...]] = [
        (
            client.id,
            client.name or None,
            client.epoch,
            " ".join(client.topics) or None,
            "yes" if client.is_alive else "no",
            None if client.last_seen_ms is None else format_time(client.last_seen_ms),
            format_time(client.registered_ms),
        )
        for client in found
    ]
    print_table(("id", "name", "epoch", "topics", "alive", "last seen", "registered"), rows)


@producer.command("forget", epilog="Example: quiver producer forget web-1")
@click.argument("producer")
@url_option
def forget_producer(*, producer: str, url: str) -> None:
    """Remove PRODUCER, a name or an id, and its sequences in every partition.

    A retry of its earlier batches is refused from then on. Stop the producer first: one that runs without a name
    registers again, one with a name fails.
    """
    with connect(url) as cluster:
        cluster.forget("producer", _find_id(cluster, producer, "producer"))
    click.echo(f"producer {producer} is forgotten")
