"""`quiver log`: look at the files of a partition's log, with no node running or beside one.

Both commands open files for reading only and change nothing.
"""

from __future__ import annotations

from itertools import islice

import click

from quiver.cli.exits import FOUND
from quiver.cli.frame_lines import FRAME_HEADING, describe_frame, format_frame, format_records
from quiver.cli.output import Cell, print_json, print_json_line, print_table
from quiver.storage.dry_run import ReadOnlyDisk
from quiver.storage.inspection import LogFinding, LogInspection, SegmentInspection, read_frames, verify_directory

_DIRECTORY = click.argument("directory", type=click.Path(exists=True, file_okay=False))


@click.group(epilog="Example: quiver log verify quiver-data/partition-0")
def log() -> None:
    """Inspect the log of a partition on disk."""


@log.command(
    short_help="Read every byte and check it.", epilog="Example: quiver log verify quiver-data/partition-0 --json"
)
@_DIRECTORY
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def verify(context: click.Context, directory: str, as_json: bool) -> None:
    """Read every byte of the log in DIRECTORY and check it; exit with 1 if anything is damaged.

    Changes nothing: a torn tail, which a restart would cut, is reported and left alone.
    """
    inspection = verify_directory(ReadOnlyDisk(), directory.rstrip("/") or "/")
    if as_json:
        print_json(inspection)
    else:
        _print_inspection(inspection)
    if not inspection.is_whole:
        context.exit(FOUND)


@log.command(
    short_help="Print one line for each frame.",
    epilog="Example: quiver log dump quiver-data/partition-0 --from 1200 --limit 10 --values",
)
@_DIRECTORY
@click.option("--from", "first_index", type=click.IntRange(min=0), default=0, help="First entry to print.")
@click.option("--limit", type=click.IntRange(min=1), help="Print no more frames than this.")
@click.option("--values", is_flag=True, help="Print the records of each batch, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def dump(*, directory: str, first_index: int, limit: int | None, values: bool, as_json: bool) -> None:
    """Print one line for each frame of the log in DIRECTORY, and for each range of bytes that is none.

    The first column is the byte in the segment's file where the frame begins; ranges are half-open.
    """
    frames = read_frames(ReadOnlyDisk(), directory.rstrip("/") or "/", first_index=first_index)
    segment = ""
    for name, frame in islice(frames, limit):
        facts = describe_frame(name, frame, with_records=values)
        if as_json:
            print_json_line(facts)
            continue
        if name != segment:
            segment = name
            click.echo(f"{name}\n{FRAME_HEADING}")
        click.echo(format_frame(facts))
        for line in format_records(facts):
            click.echo(line)


def _print_inspection(inspection: LogInspection) -> None:
    columns = ("segment", "state", "entries", "offsets", "terms", "batches", "records", "marks", "bytes", "torn bytes")
    print_table(columns, [_segment_row(segment) for segment in inspection.segments])
    if state := inspection.hard_state:
        click.echo(f"hard state: term {state.term}, vote {state.vote}, commit index at least {state.commit_index}")
    for snapshot in inspection.snapshots:
        click.echo(f"{snapshot.name}: up to entry {snapshot.last_index}, offset {snapshot.end_offset}")
    for note in inspection.notes:
        click.echo(f"note: {note}")
    for finding in inspection.damage:
        click.echo(f"damage: {_sentence(finding)}")
    click.echo(_verdict(inspection))


def _segment_row(segment: SegmentInspection) -> tuple[Cell, ...]:
    terms = segment.terms
    return (
        segment.name,
        "sealed" if segment.is_sealed else "active",
        f"{segment.first_index}..{segment.end_index}",
        f"{segment.first_offset}..{segment.end_offset}",
        None if not terms else str(terms[0]) if len(terms) == 1 else f"{terms[0]}..{terms[-1]}",
        segment.batches,
        segment.records,
        segment.marks,
        segment.size_bytes,
        segment.torn_bytes,
    )


def _sentence(finding: LogFinding) -> str:
    entries = ""
    if finding.first_index is not None and finding.first_index == finding.end_index_max:
        entries = ", no entry"
    elif finding.first_index is not None:
        entries = f", entries {finding.first_index}..{finding.end_index_max} at most"
    return f"{finding.name}: bytes {finding.first_position}..{finding.end_position}{entries}: {finding.reason}"


def _verdict(inspection: LogInspection) -> str:
    segments = inspection.segments
    facts = {
        "segments": len(segments),
        "batches": sum(segment.batches for segment in segments),
        "records": sum(segment.records for segment in segments),
        "bytes": sum(segment.size_bytes for segment in segments),
    }
    counts = " ".join(f"{name}={count}" for name, count in facts.items())
    return f"whole: {counts}" if inspection.is_whole else f"damaged: places={len(inspection.damage)} {counts}"
