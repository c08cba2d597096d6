"""Publishes digests of the records that a producer sent or a consumer received to a topic of the cluster.

A *run* is a range of consecutive offsets with the digest of the records that the client saw there. A *statement* holds
runs of one partition. Statements are records of the topic `quiver.digests`; `quiver pipeline audit` compares them with
the stored records. A consumer publishes a statement before its cursor moves past the records: after a crash a record
may be stated twice, since it was received twice, but none is missing.

A run never crosses a multiple of `RUN_RECORDS`, which bounds how precisely a mismatch is located and keeps statements
at about a thousandth of the data. The module is loaded only if digests are requested: it needs the extra `arrow`.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
import pyarrow as pa

from quiver.client.producer import ProducerCore
from quiver.errors import DecodeError
from quiver.model import Offset, PartitionId
from quiver.record import Batch
from quiver.record.arrow import to_arrow
from quiver.record.digest import Digest, block_edges, digest_ranges
from quiver.wire.messages import RetentionInfo

TOPIC: Final = "quiver.digests"
RETENTION: Final = RetentionInfo(ms=30 * 24 * 3_600_000)
"""Default retention of statements: longer than the interval between audits."""
VERSION: Final = 1
RUN_RECORDS: Final = 1024
"""Maximum records of one run."""
RUNS_MAX: Final = 256
"""Number of pending runs that triggers publishing before the next commit or flush."""

Role = Literal["producer", "consumer"]


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A range of offsets and the digest of the records seen there."""

    first_offset: int
    end_offset: int
    text: str

    @property
    def digest(self) -> Digest:
        """The digest with its record count."""
        return Digest.from_text(self.end_offset - self.first_offset, self.text)


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """The runs that a client saw in one partition."""

    v: int = VERSION
    role: Role
    name: str
    topic: str
    topic_id: int
    partition: int
    runs: tuple[Run, ...]


class DigestReporter:
    """Digest the records of one client and publish statements; runs on the client's loop."""

    def __init__(self, core: ProducerCore, *, role: Role, name: str, topic: str, topic_id: int) -> None:
        """Accept a producer of the statements' topic; `close` closes it."""
        self._core = core
        self._role: Role = role
        self._name, self._topic, self._topic_id = name, topic, topic_id
        self._waiting: dict[PartitionId, list[tuple[int, Digest]]] = {}

    def add_received(self, partition: PartitionId, batch: Batch, first_offset: Offset, end_offset: Offset) -> None:
        """Add received records of a batch, from `first_offset` up to `end_offset`."""
        self._add(partition, to_arrow(batch, first_offset, end_offset), first_offset, end_offset)

    def add_sent(self, partition: PartitionId, data: bytes, base_offset: Offset) -> None:
        """Add a whole batch that was sent and committed at `base_offset`."""
        records = to_arrow(Batch.decode(data, verify=False))
        end_offset = Offset(base_offset + len(records))
        columns = [pa.array(range(base_offset, end_offset), pa.int64()), *records.columns[1:]]
        placed = pa.RecordBatch.from_arrays(columns, schema=records.schema)
        self._add(partition, placed, base_offset, end_offset)

    async def flush(self) -> None:
        """Publish all added digests durably.

        Raises:
            QuiverError: a statement is not known to be committed.
        """
        self._publish()
        await self._core.drain()
        if (error := self._core.pop_error()) is not None:
            raise error

    async def close(self) -> None:
        """Flush, then close; idempotent. Raises as `flush`."""
        self._publish()
        await self._core.close()
        if (error := self._core.pop_error()) is not None:
            raise error

    def _add(self, partition: PartitionId, records: pa.RecordBatch, first_offset: int, end_offset: int) -> None:
        waiting = self._waiting.setdefault(partition, [])
        for first, digest in digest_ranges(records, block_edges(first_offset, end_offset, RUN_RECORDS)).items():
            if waiting and waiting[-1][0] + waiting[-1][1].count == first and first % RUN_RECORDS:
                waiting[-1] = (waiting[-1][0], waiting[-1][1] + digest)
            else:
                waiting.append((first, digest))
        if sum(map(len, self._waiting.values())) >= RUNS_MAX:
            self._publish()

    def _publish(self) -> None:
        """Send the pending runs; without room in the buffer they stay pending."""
        for partition, waiting in list(self._waiting.items()):
            runs = tuple(Run(first, first + digest.count, digest.text) for first, digest in waiting)
            statement = Statement(
                role=self._role,
                name=self._name,
                topic=self._topic,
                topic_id=self._topic_id,
                partition=partition,
                runs=runs,
            )
            if self._core.add(msgspec.json.encode(statement), self._name, None, None, None) is None:
                return
            del self._waiting[partition]


def decode_statement(value: bytes | None) -> Statement:
    """Decode a statement; raise `DecodeError` if it is malformed or of another version."""
    try:
        statement = msgspec.json.decode(value or b"", type=Statement)
        for run in statement.runs:
            if not 0 <= run.first_offset < run.end_offset or run.digest.count < 1:
                raise DecodeError(f"malformed statement: invalid run from {run.first_offset} to {run.end_offset}")
    except (msgspec.DecodeError, ValueError) as error:
        raise DecodeError(f"malformed statement: {error}") from None
    if statement.v != VERSION:
        raise DecodeError(f"unsupported statement version {statement.v}, expected {VERSION}")
    return statement
