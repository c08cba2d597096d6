"""`quiver metadata`: the managers' write-ahead log for people, and whether the nodes' databases agree.

Both look at data directories, beside running nodes or without them, and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import click

from quiver.cli.data_directories import find_nodes, open_node_database
from quiver.cli.exits import FOUND
from quiver.cli.output import print_json, print_json_line, print_table
from quiver.cli.record_lines import format_time
from quiver.metadata import JournalRow, compare, read_journal
from quiver.record import Batch
from quiver.storage.inspect import read_frames
from quiver.storage.layout import metadata_log
from quiver.storage.rehearsal import ReadOnlyDisk
from quiver.storage.walk import BadRange

_DATA = click.option(
    "--data",
    default="./quiver-data",
    show_default=True,
    help="A node's data directory, or the one that quiver up was given.",
)
_DATABASE = click.option("--metadata-db", default="", help="URL of the nodes' database, if it is not SQLite.")


@click.group(epilog="Example: quiver metadata log --data quiver-data --pending")
def metadata() -> None:
    """Look at what the managers know and how they came to know it."""


@metadata.command(
    short_help="Print the write-ahead log of the metadata.", epilog="Example: quiver metadata log --pending --json"
)
@_DATA
@_DATABASE
@click.option("--node", type=int, help="Whose copy, if the directory holds several; the first by default.")
@click.option("--pending", is_flag=True, help="Only what the node's database does not show yet.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def log(*, data: str, metadata_db: str, node: int | None, pending: bool, as_json: bool) -> None:
    """Print each change of the metadata: its index (the transaction's id), time, request, subject and broker.

    Entries that are older than the newest snapshot may be gone from the log; the database has them.
    """
    nodes = find_nodes(data)
    directory = next((path for path, identity in nodes.items() if node in (None, identity.node)), None)
    if directory is None:
        raise click.UsageError(f"{data} holds no data of node {node}")
    with closing(open_node_database(directory, nodes[directory], metadata_db)) as database:
        applied_index = database.position().index
    rows = read_journal(_batches(directory), applied_index=applied_index, only_pending=pending)
    if as_json:
        for row in rows:
            print_json_line(row)
        return
    print_table(("index", "time", "request", "subject", "broker", "applied"), [_cells(row) for row in rows])


@metadata.command(
    short_help="Compare the nodes' databases.", epilog="Example: quiver metadata verify --data quiver-data --json"
)
@_DATA
@_DATABASE
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def verify(context: click.Context, *, data: str, metadata_db: str, as_json: bool) -> None:
    """Compare the databases of all nodes in a directory: at equal index they must be equal. Exit with 1 if not."""
    nodes = find_nodes(data)
    views = {}
    for path, identity in nodes.items():
        with closing(open_node_database(path, identity, metadata_db)) as database:
            views[f"node {identity.node}"] = database.load().view()
    comparison = compare(views)
    if as_json:
        print_json(comparison)
    else:
        print_table(("node", "index", "digest"), [(item.name, item.index, item.digest) for item in comparison.compared])
        for item in comparison.differences:
            click.echo(f"{item.first} and {item.second} differ at index {item.index}: {item.table} {item.key}")
        click.echo("equal wherever they can be compared" if comparison.is_equal else "NOT EQUAL")
    if not comparison.is_equal:
        context.exit(FOUND)


def _batches(directory: str) -> Iterator[Batch]:
    for _, frame in read_frames(ReadOnlyDisk(), metadata_log(directory)):
        if not isinstance(frame, BadRange) and frame.header is not None:
            yield Batch(frame.data, frame.header)


def _cells(row: JournalRow) -> tuple[str | int | None, ...]:
    is_applied = "yes" if row.is_applied else "pending"
    return (row.index, format_time(row.time_ms), row.request, row.subject, row.broker, is_applied)
