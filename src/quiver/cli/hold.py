"""`quiver hold`: list and release holds, which keep retention from removing records."""

from __future__ import annotations

import click

from quiver.cli.options import connect, json_option, url_option
from quiver.cli.output import Cell, format_time, print_json, print_table
from quiver.wire.admin_messages import HoldInfo

COLUMNS = ("hold", "topic", "from", "until", "owner")


@click.group(epilog="Example: quiver hold list")
def hold() -> None:
    """Work with holds, which keep records that a reader still needs from being removed by retention."""


@hold.command("list", epilog="Example: quiver hold list --json")
@json_option
@url_option
def list_(*, as_json: bool, url: str) -> None:
    """Print all holds: their owner, first held offsets, and when they expire unless renewed."""
    with connect(url) as cluster:
        found = cluster.holds()
    if as_json:
        print_json(found)
        return
    print_table(COLUMNS, [hold_cells(one) for one in found])


@hold.command(epilog="Example: quiver hold release report-5f0c9a1e")
@click.argument("name")
@click.option("--topic", help="Only on this topic.")
@url_option
def release(*, name: str, topic: str | None, url: str) -> None:
    """Release the hold NAME; an owner that is still running places it again."""
    with connect(url) as cluster:
        cluster.release_hold(name, topic)
    click.echo(f"hold {name} is released")


def hold_cells(one: HoldInfo) -> tuple[Cell, ...]:
    """Return a hold as a row of a table."""
    places = " ".join(f"{partition}:{offset}" for partition, offset in one.offsets)
    return (one.name, one.topic, places, format_time(one.expires_ms), one.owner or None)
