"""`quiver metadata`: print the metadata's write-ahead log, and compare the nodes' databases.

Both commands read data directories of running or stopped nodes and change nothing. A data directory is a node's own,
or the parent of several nodes' directories, as `quiver up` creates it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import click

from quiver.cli.options import json_lines_option, json_option
from quiver.cli.output import FOUND, format_time, print_json, print_json_line, print_table
from quiver.environment import schema_name
from quiver.errors import ConfigError
from quiver.metadata import Database, JournalRow, compare, open_database, read_journal, sqlite_url
from quiver.record import Batch
from quiver.storage import NodeIdentity, SystemDisk
from quiver.storage.data_directory import IDENTITY_NAME, load_identity, metadata_database, metadata_log
from quiver.storage.dry_run import ReadOnlyDisk
from quiver.storage.inspection import read_frames
from quiver.storage.scan import BadRange

_DATA = click.option(
    "--data",
    default="./quiver-data",
    show_default=True,
    help="Data directory of a node, or of `quiver up`.",
)
_DATABASE = click.option(
    "--metadata-db", default="", help="URL of the nodes' database; SQLite in the data directory if empty."
)


@click.group(epilog="Example: quiver metadata log --data quiver-data --pending")
def metadata() -> None:
    """Inspect the managers' metadata and its log."""


@metadata.command(
    short_help="Print the write-ahead log of the metadata.", epilog="Example: quiver metadata log --pending --json"
)
@_DATA
@_DATABASE
@click.option(
    "--node", type=int, help="Node whose copy to print, if the directory holds several.  [default: the first]"
)
@click.option("--pending", is_flag=True, help="Only entries that the node's database has not applied yet.")
@json_lines_option
def log(*, data: str, metadata_db: str, node: int | None, pending: bool, as_json: bool) -> None:
    """Print each change: its index (the transaction's id), time, request, subject, broker and the principal that asked.

    Entries before the newest snapshot may be compacted away; the database contains their effect. A request that was
    refused when it was applied, such as a third token of a user, is an entry, too: the audit log has the outcome.
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
    print_table(
        ("index", "time", "request", "subject", "broker", "principal", "applied"), [_cells(row) for row in rows]
    )


@metadata.command(
    short_help="Compare the nodes' databases.", epilog="Example: quiver metadata verify --data quiver-data --json"
)
@_DATA
@_DATABASE
@json_option
@click.pass_context
def verify(context: click.Context, *, data: str, metadata_db: str, as_json: bool) -> None:
    """Compare the databases of all nodes in a directory; exit with 1 if two differ at the same index."""
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
    return (row.index, format_time(row.time_ms), row.request, row.subject, row.broker, row.principal, is_applied)


def find_nodes(data: str) -> dict[str, NodeIdentity]:
    """Return the nodes whose directories these are, by directory, in order of their ids.

    Raises:
        ConfigError: there is none.
    """
    candidates = [data, *(entry.path for entry in os.scandir(data) if entry.is_dir())] if os.path.isdir(data) else []
    disk = SystemDisk()
    found = {path: identity for path in candidates if (identity := load_identity(disk, path)) is not None}
    if not found:
        raise ConfigError(f"{data} holds no node's data: neither {IDENTITY_NAME} nor directories that do")
    return dict(sorted(found.items(), key=lambda item: item[1].node))


def open_node_database(data: str, identity: NodeIdentity, url: str) -> Database:
    """Return the database of a node's metadata: at `url`, or, if that is empty, in its data directory."""
    return open_database(url or sqlite_url(metadata_database(data)), schema=schema_name(identity.node))
