"""What a producer has sent and a consumer was given, as digests that it states in a topic of the cluster.

A *run* is offsets one behind the other with the digest of the records that the client saw there; a *statement* is some
runs of one partition. Statements are records of the topic `quiver.digests`, for `quiver pipeline audit`, which compares
them with what the cluster holds. A consumer states what it was given before its cursor moves past it: after a crash a
record may be stated twice, as it was given twice, and none is passed over.

A run never crosses a multiple of `RUN_RECORDS`, so that a difference is told to so many offsets; few enough that
statements are a thousandth of what they are about. Loaded when digests are asked for: it needs the extra `arrow`.
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
"""How long statements are kept unless the topic is configured otherwise: longer than audits are apart."""
VERSION: Final = 1
RUN_RECORDS: Final = 1024
"""Most records of one run."""
RUNS_MAX: Final = 256
"""Runs that wait at which they are stated without waiting for a commit or flush."""

Role = Literal["producer", "consumer"]


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Offsets from the first up to the end, and the digest of what was seen there."""

    first_offset: int
    end_offset: int
    text: str

    @property
    def digest(self) -> Digest:
        """The digest, with its count."""
        return Digest.from_text(self.end_offset - self.first_offset, self.text)


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """What a client says that it saw of one partition."""

    v: int = VERSION
    role: Role
    name: str
    topic: str
    topic_id: int
    partition: int
    runs: tuple[Run, ...]


class DigestReporter:
    """Digest what one client sees, and state it; on the client's loop."""

    def __init__(self, core: ProducerCore, *, role: Role, name: str, topic: str, topic_id: int) -> None:
        """Take a producer of the topic of statements; it is closed with this."""
        self._core = core
        self._role: Role = role
        self._name, self._topic, self._topic_id = name, topic, topic_id
        self._waiting: dict[PartitionId, list[tuple[int, Digest]]] = {}

    def add_received(self, partition: PartitionId, batch: Batch, first_offset: Offset, end_offset: Offset) -> None:
        """Take note of the records of a batch from one offset up to another."""
        self._add(partition, to_arrow(batch, first_offset, end_offset), first_offset, end_offset)

    def add_sent(self, partition: PartitionId, data: bytes, base_offset: Offset) -> None:
        """Take note of a whole batch as it was sent, and of where it was put."""
        records = to_arrow(Batch.decode(data, verify=False))
        end_offset = Offset(base_offset + len(records))
        columns = [pa.array(range(base_offset, end_offset), pa.int64()), *records.columns[1:]]
        placed = pa.RecordBatch.from_arrays(columns, schema=records.schema)
        self._add(partition, placed, base_offset, end_offset)

    async def flush(self) -> None:
        """State everything that was taken note of, durably.

        Raises:
            QuiverError: it is not known to be stated.
        """
        self._publish()
        await self._core.drain()
        if (error := self._core.pop_error()) is not None:
            raise error

    async def close(self) -> None:
        """Flush, then end; idempotent. Raises as `flush`."""
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
        """Send what waits; without room for it, it waits on."""
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
    """Read a statement; raise `DecodeError` for what is none, or of a later version."""
    try:
        statement = msgspec.json.decode(value or b"", type=Statement)
        for run in statement.runs:
            if not 0 <= run.first_offset < run.end_offset or run.digest.count < 1:
                raise DecodeError(f"a statement has a run from {run.first_offset} to {run.end_offset}")
    except (msgspec.DecodeError, ValueError) as error:
        raise DecodeError(f"not a statement of digests: {error}") from None
    if statement.v != VERSION:
        raise DecodeError(f"a statement of version {statement.v}, not {VERSION}")
    return statement
