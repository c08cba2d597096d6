"""The batches that consumers are at, decoded: who takes one record at a time takes the next from the same batch.

Only committed batches come here, and those never change; what retention removes is asked for no more, and goes with
time. Bounded in number and bytes; what was used longest ago goes first.
"""

from __future__ import annotations

from quiver.model import Offset
from quiver.record import Batch

BATCHES_MAX = 16
BYTES_MAX = 8 * 1024 * 1024
"""Bytes of the batches as stored; decompressed, they may have some times that."""


class RecentBatches:
    """Some batches of one partition, by the offsets that they hold."""

    def __init__(self, *, batches_max: int = BATCHES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._size_bytes = 0
        self._batches: list[Batch] = []
        """The one that was used last comes last."""

    def find(self, offset: Offset) -> Batch | None:
        """Return the batch that holds an offset, if it is here."""
        batches = self._batches
        for place in range(len(batches) - 1, -1, -1):
            header = batches[place].header
            if header.base_offset <= offset < header.end_offset:
                batch = batches[place]
                if place + 1 < len(batches):
                    batches.append(batches.pop(place))
                return batch
        return None

    def add(self, batch: Batch) -> Batch:
        """Keep a batch, and return it as it is kept: with columns of its own, and bytes of its own."""
        kept = Batch(bytes(batch.data), batch.header)
        self._batches.append(kept)
        self._size_bytes += len(kept.data)
        while len(self._batches) > self._batches_max or (self._size_bytes > self._bytes_max and len(self._batches) > 1):
            self._size_bytes -= len(self._batches.pop(0).data)
        return kept
