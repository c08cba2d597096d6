"""Batches that were read lately, decoded.

A consumer that takes one message at a time gets the batch that holds it every time: with a thousand messages in it, it
would be checked and decoded a thousand times. A batch is known by its partition and its header, which holds its place,
its time and the checksum of its payload. Bounded by bytes; what was used longest ago goes first.
"""

from __future__ import annotations

from collections.abc import Iterator

from quiver.model import PartitionId, TopicId
from quiver.record import HEADER_BYTES, Batch, decode_header

BYTES_MAX = 32 * 1024 * 1024
SINGLES_MAX = 1
"""Batches of no more records are not kept: they are hardly ever read twice."""


class DecodedBatchCache:
    """Decode batches, each of them once as long as it is kept."""

    def __init__(self, *, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._size_bytes = 0
        self._batches: dict[tuple[TopicId, PartitionId, bytes], Batch] = {}

    def decode(self, topic_id: TopicId, partition_id: PartitionId, payload: memoryview) -> Iterator[Batch]:
        """Yield the batches that lie one behind the other in a payload, checked; raises `DecodeError`."""
        position = 0
        while position < len(payload):
            header = decode_header(payload, position)
            if header.record_count <= SINGLES_MAX:
                batch = Batch.decode(payload, position)
            else:
                key = (topic_id, partition_id, bytes(payload[position : position + HEADER_BYTES]))
                known = self._batches.pop(key, None)
                batch = known if known is not None else self._take(payload, position)
                self._batches[key] = batch
                self._shrink()
            yield batch
            position += header.batch_bytes

    def _take(self, payload: memoryview, position: int) -> Batch:
        """Decode a batch from bytes of its own: the payload may be a piece of something much larger."""
        batch = Batch.decode(payload, position)
        self._size_bytes += len(batch.data)
        return Batch(bytes(batch.data), batch.header)

    def _shrink(self) -> None:
        while self._size_bytes > self._bytes_max and len(self._batches) > 1:
            oldest = self._batches.pop(next(iter(self._batches)))
            self._size_bytes -= len(oldest.data)
