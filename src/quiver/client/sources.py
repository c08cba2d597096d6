"""Records on their way into a batch, before it has its place in the producer's sequence.

A source is filled by whoever sends and built by the sender, once, when it is known which epoch and sequence it gets.
`Rows` grows record by record; `Columns` is a slice of Arrow arrays, never looked at record by record; `Stored` is a
batch that was read somewhere, never looked into.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from quiver.client.delivery import Outcome
from quiver.model import PartitionId, ProducerId
from quiver.record import Batch, Compression, Value, build_batch, reseal_batch

if TYPE_CHECKING:
    from quiver.record.arrow import ArrowArray

RECORD_BYTES = 24
"""What a record is counted as beside its bytes: its lengths, and its share of what a batch costs."""

RecordHeaders = Iterable[tuple[str, Value]]


class Source(Protocol):
    """Some records for one partition."""

    outcome: Outcome
    opened_ms: int
    """When the first of them was accepted (monotonic)."""
    size_bytes: int

    def __len__(self) -> int: ...

    def build(self, *, compression: Compression, producer_id: ProducerId, epoch: int, sequence: int) -> bytes:
        """Return the batch."""
        ...


class Rows:
    """Records given as Python objects; columns that nobody uses stay None."""

    __slots__ = ("headers", "keys", "opened_ms", "outcome", "size_bytes", "timestamp", "timestamps", "values")

    def __init__(self, partition: PartitionId, *, opened_ms: int, timestamp: int) -> None:
        """Begin with no record; `timestamp` is that of all records without their own."""
        self.outcome = Outcome(partition)
        self.opened_ms = opened_ms
        self.timestamp = timestamp
        self.size_bytes = 0
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] | None = None
        self.timestamps: list[int | None] | None = None
        self.headers: list[RecordHeaders | None] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def add_rest(self, key: bytes | None, timestamp: int | None, headers: RecordHeaders | None) -> None:
        """Add what the record whose value was added last has beside it; must follow for every record once used."""
        before = len(self.values) - 1
        if self.keys is None:
            self.keys = [None] * before
            self.timestamps = [None] * before
            self.headers = [None] * before
        assert self.timestamps is not None
        assert self.headers is not None
        self.keys.append(key)
        self.timestamps.append(timestamp)
        self.headers.append(headers)

    def extend(self, values: Sequence[bytes | None], key: bytes | None, size_bytes: int) -> None:
        """Add many values, all with the same key."""
        before = len(self.values)
        self.values.extend(values)
        self.size_bytes += size_bytes
        if key is not None or self.keys is not None:
            self.keys = (self.keys or [None] * before) + [key] * len(values)
            self.timestamps = (self.timestamps or [None] * before) + [None] * len(values)
            self.headers = (self.headers or [None] * before) + [None] * len(values)

    def build(self, *, compression: Compression, producer_id: ProducerId, epoch: int, sequence: int) -> bytes:
        """Return the batch."""
        return build_batch(
            self.values,
            timestamp=self.timestamp,
            keys=self.keys,
            timestamps=self.timestamps if self.timestamps and any(map(_is_given, self.timestamps)) else None,
            headers=self.headers if self.headers and any(map(_is_given, self.headers)) else None,
            compression=compression,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
        )


class Columns:
    """Records given as Arrow arrays of equal length, by the names that the format gives them."""

    __slots__ = ("_columns", "opened_ms", "outcome", "size_bytes", "timestamp")

    def __init__(
        self, partition: PartitionId, columns: dict[str, ArrowArray], *, opened_ms: int, timestamp: int, size_bytes: int
    ) -> None:
        self.outcome = Outcome(partition)
        self.opened_ms = opened_ms
        self.timestamp = timestamp
        self.size_bytes = size_bytes
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns["value"])

    def build(self, *, compression: Compression, producer_id: ProducerId, epoch: int, sequence: int) -> bytes:
        """Return the batch."""
        from quiver.record.arrow import build_batch_from_arrow  # needs the extra, which made these columns

        return build_batch_from_arrow(
            self._columns["value"],
            timestamp=self.timestamp,
            keys=self._columns.get("key"),
            timestamps=self._columns.get("timestamp"),
            headers=self._columns.get("headers"),
            compression=compression,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
        )


class Stored:
    """The records of a batch that was read and verified: sent on as they are, with their times and compression."""

    __slots__ = ("_batch", "opened_ms", "outcome", "size_bytes")

    def __init__(self, partition: PartitionId, batch: Batch, *, opened_ms: int) -> None:
        self.outcome = Outcome(partition)
        self.opened_ms = opened_ms
        self.size_bytes = len(batch.data)
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch)

    def build(self, *, compression: Compression, producer_id: ProducerId, epoch: int, sequence: int) -> bytes:  # noqa: ARG002 - it is compressed already, or is not to be
        """Return the batch."""
        return reseal_batch(self._batch.data, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)


def _is_given(value: Any) -> bool:
    return value is not None
