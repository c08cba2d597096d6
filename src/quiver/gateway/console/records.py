"""Look at records without a consumer: by offset, time or key, with a search in a bounded range, also as a file.

One call reads at most so many records and bytes of a partition, however many match; `next_offset` says where to go on.
"""

from __future__ import annotations

import csv
import heapq
import io
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from quiver.errors import DecodeError, NotFoundError, OutOfRangeError, RequestError, TrimmedError, UnavailableError
from quiver.gateway.codec import record_fields
from quiver.gateway.console import contract
from quiver.gateway.contract import MessageItem
from quiver.gateway.http import HttpResponse
from quiver.model import Offset, PartitionId
from quiver.record import Batch, Record, decode_batches
from quiver.record.decoded import DecodedBatchBudget
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.wire.messages import Fetch, Fetched, FindOffset, TopicInfo

STEP_BYTES: Final = 1024 * 1024
"""Bytes of batches that are asked for at once."""
SCANNED_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of batches of a partition that one call reads, at most one step more."""
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of values and keys in one answer; a single larger record is returned whole."""
_encode = msgspec.json.Encoder().encode
Matches = Callable[[Record], bool]


class PartitionRecords(NamedTuple):
    """What was read of one partition."""

    range: contract.RecordRangeItem
    records: list[Record]
    scanned: int


class PartitionScan:
    """Choose records of one partition as they are read; ends at its bounds."""

    def __init__(self, start: Offset, stop: Offset, wanted: int, *, matches: Matches | None, is_newest: bool) -> None:
        self.start = start
        self.position = start
        self.records: list[Record] = []
        self._stop = stop
        self._wanted = wanted
        self._matches = matches
        self._is_newest = is_newest
        self._read_bytes = 0
        self._kept_bytes = 0

    @property
    def is_done(self) -> bool:
        """Whether nothing more is to be read."""
        return self.position >= self._stop or self._read_bytes >= SCANNED_BYTES_MAX or self._is_full

    @property
    def _is_full(self) -> bool:
        """Whether enough was found; of the newest records, the later ones replace those before."""
        has_all = len(self.records) >= self._wanted or self._kept_bytes >= ANSWER_BYTES_MAX
        return has_all and not self._is_newest

    def accept(self, batches: Sequence[Batch], size_bytes: int) -> None:
        """Look at the records of batches that were read."""
        self._read_bytes += size_bytes
        for batch in batches:
            if batch.header.end_offset <= self.position:
                continue
            for record in batch.records(self.position, self._stop):
                if self._is_full:
                    return
                self._look(record)
            self.position = min(self._stop, max(self.position, batch.header.end_offset))

    def _look(self, record: Record) -> None:
        self.position = Offset(record.offset + 1)
        if self._matches is not None and not self._matches(record):
            return
        self.records.append(record)
        self._kept_bytes += len(record.value or b"") + len(record.key or b"")
        if self._is_newest and len(self.records) > 2 * self._wanted:
            del self.records[: -self._wanted]


class RecordBrowser:
    """Read records for people."""

    def __init__(self, router: Router, decoded: DecodedBatchBudget, *, timeout_ms: int) -> None:
        self._router = router
        self._decoded = decoded
        self._timeout_ms = timeout_ms

    async def browse(self, given: contract.RecordsQuery) -> contract.RecordsAnswer | HttpResponse:
        """Return records of a topic, or a file with them."""
        if sum(one is not None for one in (given.from_, given.offset, given.time_ms)) > 1:
            raise RequestError("give at most one of from, offset and time_ms")
        if given.offset is not None and given.partition_id is None:
            raise RequestError("an offset needs a partition_id: offsets of different partitions have nothing in common")
        deadline = self._router.deadline(self._timeout_ms)
        info = await self._router.find_topic(given.topic, deadline=deadline, age_ms_max=0)
        numbers = range(len(info.partitions)) if given.partition_id is None else (given.partition_id,)
        if given.partition_id is not None and given.partition_id >= len(info.partitions):
            message = f"topic {given.topic!r} has no partition {given.partition_id}"
            raise NotFoundError(message, code="unknown_partition")
        wanted = given.max or contract.RECORDS_DEFAULT
        matches = make_matcher(given.key, given.search)
        # A partition at a time: what is decoded at once stays small, and leaders are asked one after the other.
        found = [await self._read(info, PartitionId(one), given, wanted, matches, deadline) for one in numbers]
        is_newest = _is_newest(given)
        chosen = choose(found, wanted, is_newest=is_newest)
        if not is_newest:
            found = read_back(found, chosen)
        file_format = given.format or "json"
        if file_format == "json":
            return contract.RecordsAnswer(
                records=[MessageItem(partition_id=at, **record_fields(one)) for at, one in chosen],
                partitions=[one.range for one in found],
                scanned=sum(one.scanned for one in found),
            )
        return _make_file(given.topic, file_format, chosen)

    async def _read(
        self,
        info: TopicInfo,
        partition_id: PartitionId,
        given: contract.RecordsQuery,
        wanted: int,
        matches: Matches | None,
        deadline: Deadline,
    ) -> PartitionRecords:
        try:
            return await self._scan(info, partition_id, given, wanted, matches, deadline)
        except (UnavailableError, TrimmedError) as error:
            if given.partition_id is not None:
                raise
            shown = contract.RecordRangeItem(
                partition_id=partition_id, first_offset=0, end_offset=0, start=0, next_offset=0, error=error.message
            )
            return PartitionRecords(shown, [], 0)

    async def _scan(
        self,
        info: TopicInfo,
        partition_id: PartitionId,
        given: contract.RecordsQuery,
        wanted: int,
        matches: Matches | None,
        deadline: Deadline,
    ) -> PartitionRecords:
        scan_max = given.scan or max(wanted, contract.SCANNED_DEFAULT if matches else wanted)

        def begin(start: Offset, end: Offset) -> PartitionScan:
            stop = min(end, Offset(start + scan_max))
            return PartitionScan(start, stop, wanted, matches=matches, is_newest=_is_newest(given))

        if given.offset is None:
            first, end = await self._find_bounds(info, partition_id, deadline)
            count = scan_max if matches else wanted
            scan = begin(await self._find_start(info, partition_id, given, first, end, count, deadline), end)
        else:
            first, end, scan = await self._scan_from(info, partition_id, Offset(given.offset), begin, deadline)
        while not scan.is_done:
            with self._decoded.reserve(STEP_BYTES):
                _, payload = await self._fetch(info, partition_id, scan.position, deadline)
                scan.accept(self._decode(payload, partition_id), len(payload))
            if not payload:
                break
        shown = contract.RecordRangeItem(
            partition_id=partition_id, first_offset=first, end_offset=end, start=scan.start, next_offset=scan.position
        )
        return PartitionRecords(shown, scan.records[-wanted:], scan.position - scan.start)

    async def _scan_from(
        self,
        info: TopicInfo,
        partition_id: PartitionId,
        offset: Offset,
        begin: Callable[[Offset, Offset], PartitionScan],
        deadline: Deadline,
    ) -> tuple[Offset, Offset, PartitionScan]:
        """Read from a known offset: one request, whose answer has the bounds, as for who follows a partition."""
        with self._decoded.reserve(STEP_BYTES):
            try:
                fetched, payload = await self._fetch(info, partition_id, offset, deadline)
            except OutOfRangeError:
                first, end = await self._find_bounds(info, partition_id, deadline)
                return first, end, begin(end, end)
            scan = begin(offset, fetched.end_offset)
            scan.accept(self._decode(payload, partition_id), len(payload))
        return fetched.first_offset, fetched.end_offset, scan

    async def _find_start(
        self,
        info: TopicInfo,
        partition_id: PartitionId,
        given: contract.RecordsQuery,
        first: Offset,
        end: Offset,
        count: int,
        deadline: Deadline,
    ) -> Offset:
        if given.time_ms is not None:
            return await self._find_offset(info, partition_id, given.time_ms, deadline)
        return first if given.from_ == "earliest" else Offset(max(first, end - count))

    async def _find_bounds(
        self, info: TopicInfo, partition_id: PartitionId, deadline: Deadline
    ) -> tuple[Offset, Offset]:
        first = await self._find_offset(info, partition_id, "earliest", deadline)
        return first, await self._find_offset(info, partition_id, "latest", deadline)

    async def _find_offset(
        self, info: TopicInfo, partition_id: PartitionId, at: Literal["earliest", "latest"] | int, deadline: Deadline
    ) -> Offset:
        found, _ = await self._router.ask_leader(
            info.topic,
            partition_id,
            lambda now: FindOffset(topic_id=now.topic_id, partition_id=partition_id, at=at),
            deadline=deadline,
        )
        return found.offset

    async def _fetch(
        self, info: TopicInfo, partition_id: PartitionId, offset: Offset, deadline: Deadline
    ) -> tuple[Fetched, memoryview]:
        return await self._router.ask_leader(
            info.topic,
            partition_id,
            lambda now: Fetch(topic_id=now.topic_id, partition_id=partition_id, offset=offset, bytes_max=STEP_BYTES),
            deadline=deadline,
        )

    def _decode(self, payload: memoryview, partition_id: PartitionId) -> list[Batch]:
        try:
            return [batch for batch in decode_batches(payload) if not batch.header.is_control]
        except DecodeError as error:
            raise UnavailableError(
                f"not read: the answer of partition {partition_id} is damaged: {error}; retry", code="damaged"
            ) from error


def _is_newest(given: contract.RecordsQuery) -> bool:
    """Return whether the last records are wanted, not the first ones from somewhere on."""
    return given.offset is None and given.time_ms is None and given.from_ != "earliest"


def make_matcher(key: str | None, search: str | None) -> Matches | None:
    """Return whether a record is one of those that are looked for; None if all are."""
    if key is None and not search:
        return None
    wanted_key = None if key is None else key.encode()
    wanted = (search or "").lower().encode()

    def matches(record: Record) -> bool:
        if wanted_key is not None and record.key != wanted_key:
            return False
        return not wanted or wanted in bytes(record.value or b"").lower() or wanted in bytes(record.key or b"").lower()

    return matches


def choose(found: Sequence[PartitionRecords], wanted: int, *, is_newest: bool) -> list[tuple[PartitionId, Record]]:
    """Return the records of all partitions by time; those of one partition stay in order."""
    each = [[(PartitionId(one.range.partition_id), record) for record in one.records] for one in found]
    every = list(heapq.merge(*each, key=lambda item: (item[1].timestamp, item[0])))
    return every[-wanted:] if is_newest else every[:wanted]


def read_back(
    found: Sequence[PartitionRecords], chosen: Sequence[tuple[PartitionId, Record]]
) -> list[PartitionRecords]:
    """Return what was read without the records that were not chosen: who reads on begins with them."""
    counts = Counter(partition_id for partition_id, _ in chosen)
    return [_read_back(one, counts[PartitionId(one.range.partition_id)]) for one in found]


def _read_back(one: PartitionRecords, count: int) -> PartitionRecords:
    if count == len(one.records):
        return one
    next_offset = one.records[count].offset
    shown = msgspec.structs.replace(one.range, next_offset=next_offset)
    return PartitionRecords(shown, one.records[:count], next_offset - one.range.start)


def _make_file(topic: str, file_format: str, records: Sequence[tuple[PartitionId, Record]]) -> HttpResponse:
    if file_format == "jsonl":
        items = (MessageItem(partition_id=at, **record_fields(one)) for at, one in records)
        body = b"".join(_encode(item) + b"\n" for item in items)
    elif file_format == "csv":
        body = _make_csv(records)
    else:
        body = _make_columns(topic, file_format, records)
    name = f'attachment; filename="{topic}.{file_format}"'
    return HttpResponse(
        status=200, body=body, content_type=contract.FILE_TYPES[file_format], headers=(("Content-Disposition", name),)
    )


def _make_csv(records: Sequence[tuple[PartitionId, Record]]) -> bytes:
    """Return records as CSV; values that are not text are in base64, in a column of their own.

    A cell that a spreadsheet would take for a formula begins with an apostrophe.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(("partition", "offset", "timestamp", "key", "key_b64", "message", "message_b64", "headers"))
    for partition_id, record in records:
        fields = record_fields(record)
        headers = {**fields.get("headers", {}), **fields.get("headers_b64", {})}
        writer.writerow(
            (
                partition_id,
                record.offset,
                record.timestamp,
                _as_cell(fields.get("key")),
                fields.get("key_b64", ""),
                _as_cell(fields.get("message")),
                fields.get("message_b64", ""),
                _encode(headers).decode() if headers else "",
            )
        )
    return text.getvalue().encode()


def _as_cell(value: str | None) -> str:
    if value is None:
        return ""
    return f"'{value}" if value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _make_columns(topic: str, file_format: str, records: Sequence[tuple[PartitionId, Record]]) -> bytes:
    """Return records as a stream of Arrow IPC, or as a Parquet file, with the columns of the SDK's tables."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        message = "this node cannot write Arrow and Parquet: install quivermq[arrow] there, or choose jsonl or csv"
        raise RequestError(message, code="no_arrow") from None
    from quiver.client.tables import TABLE_SCHEMA

    rows = [
        {
            "topic": topic,
            "partition": partition_id,
            "offset": record.offset,
            "timestamp": record.timestamp,
            "key": record.key,
            "value": record.value,
            "headers": [{"key": key, "value": value} for key, value in record.headers] or None,
        }
        for partition_id, record in records
    ]
    table = pa.Table.from_pylist(rows, schema=TABLE_SCHEMA)
    sink = pa.BufferOutputStream()
    if file_format == "parquet":
        pq.write_table(table, sink)
    else:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()
