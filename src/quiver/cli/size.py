"""`quiver size`: how large a cluster has to be for a load."""

from __future__ import annotations

import math
from typing import get_args

import click

from quiver.cli.options import examples, json_option
from quiver.cli.output import format_bytes, format_count, print_json, print_table
from quiver.cli.quantities import CountType, DurationType, SizeType, format_duration
from quiver.errors import OutOfRangeError
from quiver.operations.sizing import NODES_MAX, ClusterSize, Load, Packing, Way, find_size


@click.command(
    short_help="Calculate how large a cluster has to be.",
    epilog=examples(
        "quiver size --rate 50k --retention 7d",
        "quiver size --rate 200k --mean-rate 60k --retention 30d --record-size 500B --compression lz4 --disk 4TB",
        "quiver size --rate 2k --retention 1d --way http --tls --json",
    ),
)
@click.option("--rate", type=CountType(), required=True, help="Records a second, at the peak.")
@click.option("--retention", "retention_ms", type=DurationType(), required=True, help="How long records are kept.")
@click.option("--mean-rate", type=CountType(), help="Records a second, on average.  [default: --rate]")
@click.option(
    "--record-size", "record_bytes", type=SizeType(), default="200B", show_default=True, help="Key, value and headers."
)
@click.option("--replicas", type=click.IntRange(1, 7), default=3, show_default=True, help="Copies of each record.")
@click.option(
    "--readers", type=click.IntRange(0, 1000), default=1, show_default=True, help="How often each record is read."
)
@click.option(
    "--way",
    type=click.Choice(get_args(Way)),
    default="bulk",
    show_default=True,
    help="How producers send: in batches, one by one and awaited, or by HTTP.",
)
@click.option("--http-readers", is_flag=True, help="Consumers read by HTTP.")
@click.option(
    "--compression",
    type=click.Choice(get_args(Packing)),
    default="none",
    show_default=True,
    help="Of the producers' batches; the ratio is that of log lines.",
)
@click.option("--tls", is_flag=True, help="All connections are encrypted.")
@click.option(
    "--consumer-rate",
    type=CountType(),
    default="50k",
    show_default=True,
    help="Records a second that one consumer processes: more partitions let more of them share the work.",
)
@click.option(
    "--catch-up",
    "catch_up_ms",
    type=DurationType(),
    default="5m",
    show_default=True,
    help="How far a consumer may lag and still be served from memory.",
)
@click.option("--disk", "disk_bytes", type=SizeType(), help="Size of a node's disk.  [default: any]")
@click.option(
    "--network",
    "network_bytes_per_s",
    type=SizeType(),
    default="1250MB",
    show_default=True,
    help="Bytes a second of a node's network in each direction; 10 Gbit/s are 1250MB.",
)
@json_option
def size(
    *,
    rate: int,
    mean_rate: int | None,
    http_readers: bool,
    tls: bool,
    as_json: bool,
    **given: object,
) -> None:
    """Calculate nodes, partitions, disk, network, memory and processors for a load, from measured costs.

    Everything holds while one node is lost. An estimate to start from; docs/operations/sizing.md has the formulas.
    """
    if mean_rate is not None and mean_rate > rate:
        raise click.UsageError("--mean-rate is more than --rate, which is the peak")
    options = {"packing" if name == "compression" else name: value for name, value in given.items()}
    load = Load(rate=rate, mean_rate=mean_rate or rate, reads_by_http=http_readers, is_tls=tls, **options)  # type: ignore[arg-type]  # click has checked them
    found = find_size(load)
    if found is None:
        raise OutOfRangeError(
            f"not even {NODES_MAX} nodes carry this: give several clusters a part of it each", code="too_large_a_load"
        )
    if as_json:
        print_json({"load": load, "size": found})
        return
    _print_size(load, found)


def _print_size(load: Load, found: ClusterSize) -> None:
    node = found.node
    click.echo(f"{format_count(found.nodes, 'node')}, {format_count(found.partitions, 'partition')}")
    click.echo(f"  so many nodes by: {found.bound_by}")
    click.echo("")
    rows = [
        ("cores", f"{node.cores}", f"{node.cpu_cores:.2f} busy at the peak"),
        ("memory", format_bytes(node.memory_bytes), "of the process, all its caches full"),
        ("page cache", format_bytes(node.page_cache_bytes), f"for {format_duration(load.catch_up_ms)} of lag"),
        ("disk", format_bytes(node.disk_bytes), f"{format_count(found.replicas_per_node, 'replica')}"),
        ("disk writes", f"{format_bytes(node.disk_write_bytes_per_s)}/s", "synced"),
        ("network in", f"{format_bytes(node.network_in_bytes_per_s)}/s", ""),
        ("network out", f"{format_bytes(node.network_out_bytes_per_s)}/s", ""),
    ]
    print_table(("each node", "needs", ""), rows)
    click.echo("")
    click.echo(f"stored: {format_bytes(found.stored_bytes)} on all nodes, {load.replicas} copies")
    minutes = max(1, math.ceil(found.rebuild_ms / 60_000))
    click.echo(f"a lost node's replicas are copied within {format_count(minutes, 'minute')}")
