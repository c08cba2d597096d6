"""One line, or one JSON object, for each frame of a segment file.

A frame is described once, as plain facts, and both outputs are made from them. Values are shown only when
they were asked for; bytes that are not text are shown in base64, and control characters never reach the
terminal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from quiver.cli.output import Facts, describe_record, format_time
from quiver.errors import DecodeError
from quiver.model import NO_PRODUCER
from quiver.record.batch import Batch
from quiver.record.compression import Compression
from quiver.record.header import BatchHeader
from quiver.storage.scan import BadRange, SegmentFrame

_COLUMNS = "{:>12} {:<7} {:>10} {:>6} {:>21} {:>8} {:>10} {:<5} {:<14} {}"
FRAME_HEADING = _COLUMNS.format(
    "position", "kind", "entry", "term", "offsets", "records", "bytes", "codec", "producer", "timestamps"
)


def describe_frame(segment: str, frame: SegmentFrame | BadRange, *, with_records: bool) -> Facts:
    """Return what is known of a frame, by the names that the JSON output has."""
    facts: Facts = {"segment": segment, "position": frame.position, "bytes": frame.end - frame.position}
    if isinstance(frame, BadRange):
        return {**facts, "kind": "bad", "reason": frame.reason}
    if frame.header is None:
        return {**facts, "kind": "mark", "vouched_bytes": frame.durable_end}
    facts |= _describe_header(frame.header)
    if with_records and not frame.header.is_control:
        facts |= _describe_records(Batch(frame.data, frame.header))
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


def _describe_records(batch: Batch) -> Facts:
    try:
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
