"""`quiver log`: inspect the files of a partition's log, whether a node runs or not.

Both commands open files for reading only and change nothing. Each frame of a segment file is described once, and both
outputs, text and JSON, are made from that description. Values are shown only on request; bytes that are not text are
shown in base64, and control characters never reach the terminal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice

import click

from quiver.cli.options import load_keys
from quiver.cli.output import FOUND, Cell, Facts, describe_record, format_time, print_json, print_json_line, print_table
from quiver.errors import DecodeError, RequestError
from quiver.model import NO_PRODUCER
from quiver.record.batch import Batch
from quiver.record.compression import Compression
from quiver.record.header import ENCODING_SEALED, BatchHeader
from quiver.storage.data_key import open_cipher
from quiver.storage.dry_run import ReadOnlyDisk
from quiver.storage.hardstate import HARD_STATE_NAME
from quiver.storage.inspection import LogFinding, LogInspection, SegmentInspection, read_frames, verify_directory
from quiver.storage.scan import BadRange, SegmentFrame
from quiver.storage.sealing import LogCipher
from quiver.storage.segment import is_segment_name

_KEY_FILE = click.option(
    "--encryption-key-file", "key_file", metavar="FILE", help="The node's key file, to decrypt an encrypted log."
)
_DIRECTORY = click.argument("directory", type=click.Path(exists=True, file_okay=False))


@click.group(epilog="Example: quiver log verify quiver-data/node-1/groups/2")
def log() -> None:
    """Inspect the log of a partition on disk."""


@log.command(
    short_help="Read every byte and check it.", epilog="Example: quiver log verify quiver-data/node-1/groups/2 --json"
)
@_DIRECTORY
@_KEY_FILE
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def verify(context: click.Context, *, directory: str, key_file: str | None, as_json: bool) -> None:
    """Read and check every byte of the log in DIRECTORY, or of all logs below it; exit with 1 if anything is damaged.

    Changes nothing: a torn tail, which a restart would cut, is reported and left alone. The checksums of an encrypted
    log are checked without its key; whether its entries can be decrypted, only with it.
    """
    logs = find_logs(directory)
    inspections = {path: verify_directory(ReadOnlyDisk(), path, _find_cipher(path, key_file)) for path in logs}
    if as_json:
        print_json(inspections[directory_name(directory)] if logs == [directory_name(directory)] else inspections)
    else:
        for path, inspection in inspections.items():
            if len(logs) > 1:
                click.echo(f"{path}:")
            _print_inspection(inspection)
    if not all(inspection.is_whole for inspection in inspections.values()):
        context.exit(FOUND)


def _find_cipher(directory: str, key_file: str | None) -> LogCipher | None:
    """Return the cipher of an encrypted log, if its key was given."""
    if key_file is None:
        return None
    return open_cipher(ReadOnlyDisk(), directory, load_keys(key_file), is_encrypted=False)


def directory_name(directory: str) -> str:
    """Return a directory's path without the slash that shells add."""
    return directory.rstrip("/") or "/"


def find_logs(directory: str) -> list[str]:
    """Return the directory itself if it holds a log, else every directory below it that does, such as a node's.

    Raises:
        RequestError: there is no log, so that nothing can be said about one.
    """
    found = [path for path, _, names in os.walk(directory_name(directory)) if any(map(_belongs_to_log, names))]
    if directory_name(directory) in found:
        return [directory_name(directory)]
    if not found:
        message = f"{directory} holds no log, nor does any directory below it: name a node's --data directory"
        raise RequestError(message, code="no_log")
    return sorted(found)


def _belongs_to_log(name: str) -> bool:
    return name == HARD_STATE_NAME or is_segment_name(name)


@log.command(
    short_help="Print one line for each frame.",
    epilog="Example: quiver log dump quiver-data/node-1/groups/2 --from 1200 --limit 10 --values",
)
@_DIRECTORY
@click.option("--from", "first_index", type=click.IntRange(min=0), default=0, help="First entry to print.")
@click.option("--limit", type=click.IntRange(min=1), help="Print no more frames than this.")
@click.option("--values", is_flag=True, help="Print the records of each batch, too.")
@_KEY_FILE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def dump(
    *, directory: str, first_index: int, limit: int | None, values: bool, key_file: str | None, as_json: bool
) -> None:
    """Print one line for each frame of the log in DIRECTORY, and for each range of bytes that is none.

    The first column is the byte in the segment's file where the frame begins; ranges are half-open.
    """
    logs = find_logs(directory)
    if len(logs) > 1:
        raise RequestError(f"{directory} holds {len(logs)} logs: name one of {', '.join(logs[:10])}", code="many_logs")
    frames = read_frames(ReadOnlyDisk(), logs[0], first_index=first_index)
    cipher = _find_cipher(logs[0], key_file)
    segment = ""
    for name, frame in islice(frames, limit):
        facts = describe_frame(name, frame, with_records=values, cipher=cipher)
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


_COLUMNS = "{:>12} {:<7} {:>10} {:>6} {:>21} {:>8} {:>10} {:<5} {:<14} {}"
FRAME_HEADING = _COLUMNS.format(
    "position", "kind", "entry", "term", "offsets", "records", "bytes", "codec", "producer", "timestamps"
)


def describe_frame(
    segment: str, frame: SegmentFrame | BadRange, *, with_records: bool, cipher: LogCipher | None = None
) -> Facts:
    """Return what is known of a frame, by the names that the JSON output has."""
    facts: Facts = {"segment": segment, "position": frame.position, "bytes": frame.end - frame.position}
    if isinstance(frame, BadRange):
        return {**facts, "kind": "bad", "reason": frame.reason}
    if frame.header is None:
        return {**facts, "kind": "mark", "vouched_bytes": frame.durable_end}
    facts |= _describe_header(frame.header)
    if with_records and not frame.header.is_control:
        facts |= _describe_records(frame, frame.header, cipher)
    return facts


def format_frame(facts: Facts) -> str:
    """Return a frame's line under `FRAME_HEADING`."""
    if facts["kind"] == "bad":
        rest = ["-", "-", "-", "-", facts["bytes"], "-", "-", facts["reason"]]
    elif facts["kind"] == "mark":
        rest = ["-", "-", "-", "-", facts["bytes"], "-", "-", f"on disk up to byte {facts['vouched_bytes']}"]
    else:
        rest = [
            facts["index"],
            facts["term"],
            f"{facts['base_offset']}..{facts['end_offset']}",
            facts["record_count"],
            facts["bytes"],
            facts["compression"],
            _format_producer(facts),
            f"{format_time(facts['first_timestamp'])}..{format_time(facts['max_timestamp'])}",
        ]
    return _COLUMNS.format(facts["position"], facts["kind"], *rest)


def format_records(facts: Facts) -> Iterator[str]:
    """Yield a line for each record of a described frame, if they were asked for."""
    for record in facts.get("records", ()):
        parts = [f"offset={record['offset']}", f"timestamp={format_time(record['timestamp'])}"]
        parts += [f"{name}={_shown(record[name])}" for name in ("key", "value", "headers") if name in record]
        yield "             " + " ".join(parts)
    if "records_error" in facts:
        yield f"             records cannot be read: {facts['records_error']}"


def _describe_header(header: BatchHeader) -> Facts:
    has_producer = header.producer_id != NO_PRODUCER
    return {
        "kind": "control" if header.is_control else "data",
        "index": header.index,
        "term": header.term,
        "base_offset": header.base_offset,
        "end_offset": header.end_offset,
        "record_count": header.record_count,
        "compression": Compression(header.compression).name.lower(),
        "raw_bytes": header.raw_bytes,
        "producer_id": header.producer_id if has_producer else None,
        "producer_epoch": header.producer_epoch if has_producer else None,
        "base_sequence": header.base_sequence if has_producer else None,
        "first_timestamp": header.first_timestamp,
        "max_timestamp": header.max_timestamp,
        "append_timestamp": header.append_timestamp,
    }


def _describe_records(frame: SegmentFrame, header: BatchHeader, cipher: LogCipher | None) -> Facts:
    try:
        if cipher is not None:
            batch = cipher.open_batch(frame.data, header)
        elif header.encoding == ENCODING_SEALED:
            raise DecodeError("the entry is encrypted: give the node's --encryption-key-file")
        else:
            batch = Batch(frame.data, header)
        return {"records": [describe_record(record) for record in batch.records()]}
    except DecodeError as error:
        return {"records_error": str(error)}


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


def _format_producer(facts: Facts) -> str:
    if facts["producer_id"] is None:
        return "-"
    return f"{facts['producer_id']}:{facts['producer_epoch']}:{facts['base_sequence']}"
