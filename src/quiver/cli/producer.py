"""`quiver producer`: list registered producers."""

from __future__ import annotations

import click

from quiver.cli.options import connect, json_option, url_option
from quiver.cli.output import Cell, format_time, print_json, print_table
from quiver.gateway.cluster_handlers import INTERNAL_PREFIX


@click.group(epilog="Example: quiver producer list --topic logs")
def producer() -> None:
    """Work with registered producers."""


@producer.command("list", epilog="Example: quiver producer list --topic logs --json")
@click.option("--topic", help="Only those of this topic.")
@click.option("--all", "with_all", is_flag=True, help="Include the producers with which gateways send HTTP messages.")
@json_option
@url_option
def list_(*, topic: str | None, with_all: bool, as_json: bool, url: str) -> None:
    """Print the registered producers and when each was last seen."""
    with connect(url) as cluster:
        known = cluster.clients("producer", topic)
    found = [client for client in known if with_all or not client.name.startswith(INTERNAL_PREFIX)]
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
