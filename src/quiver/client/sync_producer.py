"""The blocking producer: `send` appends to the accumulator in the caller's thread, everything else runs on the loop."""

from __future__ import annotations

from datetime import datetime
from types import TracebackType
from typing import Any, Self

from quiver.client.batching import RecordHeaders, to_headers
from quiver.client.delivery import Deliveries, Delivery, Outcome
from quiver.client.presentation import describe, html_table
from quiver.client.producer import AsyncProducer, encode_json, record_bytes
from quiver.client.thread import LoopThread
from quiver.errors import OverloadedError
from quiver.model import ProducerId
from quiver.record import Value


class Producer:
    """Send records to a topic; made by `Cluster.producer`.

    Example:
        producer = cluster.producer("logs", name="web-1")
        position = producer.send("hello").result()
        producer.send_many(f"line {number}" for number in range(1000))
        producer.flush()
    """

    def __init__(self, producer: AsyncProducer, thread: LoopThread, *, timeout_ms: int) -> None:
        self._producer = producer
        self._thread = thread
        self._timeout_s = timeout_ms / 1000
        self._add = producer.core.add

    @property
    def producer_id(self) -> ProducerId:
        """The id that the cluster assigned; a name always gets the same id."""
        return self._producer.producer_id

    @property
    def topic(self) -> str:
        """The topic of this producer."""
        return self._producer.topic

    @property
    def pending_bytes(self) -> int:
        """Bytes of accepted records whose outcome is not known yet."""
        return self._producer.pending_bytes

    def send(
        self,
        value: Value,
        key: Value = None,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: RecordHeaders | None = None,
        *,
        delay: float | None = None,
        deliver_at: int | datetime | None = None,
    ) -> Delivery:
        """Accept a record and return a delivery; `.result()` waits for the partition and offset.

        The partition is the given one, else the hash of the key, else any. Work queues deliver it after `delay` seconds
        or at `deliver_at` (a `datetime` or milliseconds); other consumers at once. Waits only while the buffer is full.

        Raises:
            OverloadedError: the buffer stayed full for `timeout`; the record was not accepted.
            FencedError: another producer registered under the same name; this record was not accepted.
            RequestError: the record is not valid; it was not accepted.
        """
        if delay is not None or deliver_at is not None:
            headers = self._producer.core.delay(headers, delay, deliver_at)
        elif headers is not None:
            headers = to_headers(headers)  # an iterator can be read once, and `_add` may have to be called again
        delivery = self._add(value, key, partition, timestamp, headers)
        while delivery is None:
            self._wait_room(record_bytes(value, key))
            delivery = self._add(value, key, partition, timestamp, headers)
        return delivery

    def send_json(
        self,
        value: Any,
        key: Value = None,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: RecordHeaders | None = None,
        *,
        delay: float | None = None,
        deliver_at: int | datetime | None = None,
    ) -> Delivery:
        """Accept a record whose value is JSON, made of any value that JSON can hold; otherwise as `send`."""
        encoded = encode_json(value)
        return self.send(encoded, key, partition, timestamp, headers, delay=delay, deliver_at=deliver_at)

    def send_many(
        self,
        values: Any,
        key: Value = None,
        partition: int | None = None,
        *,
        delay: float | None = None,
        deliver_at: int | datetime | None = None,
    ) -> Deliveries:
        """Accept many records, waiting while the buffer is full; return one delivery for all of them.

        `values` is an iterable of text and bytes, an Arrow array, or columns: an Arrow table, a pandas or polars frame,
        or a mapping, with `value` and optionally `key`, `timestamp` and `headers`. A batch that was read is sent
        unchanged. Without a partition or key they are spread over the partitions batch by batch. `delay` and
        `deliver_at` are as in `send`, for text and bytes only: columns have headers of their own.
        """
        parts: list[tuple[Outcome, int, int]] = []
        for put, size_bytes, count in self._producer.core.chunks(values, key, partition, delay, deliver_at):
            while (placed := put()) is None:
                self._wait_room(size_bytes)
            parts.append((*placed, count))
        return Deliveries(parts)

    def next_sequence(self, partition: int) -> int:
        """Return the sequence of the next record for a partition: the number of records this producer ever sent there.

        Right after a restart under the same name it is the number of records that the partition already has: skip so
        many to resume exactly.
        """
        return self._thread.run(self._producer.next_sequence(partition))

    def flush(self, timeout: float | None = None) -> None:
        """Send all records accepted so far and wait until every outcome is known, at most `timeout` seconds.

        Raises:
            OutcomeUnknownError: not every outcome is known after `timeout`; the records are still being sent.
            QuiverError: the first failure of any record since the last flush.
        """
        self._thread.run(self._producer.flush(timeout))

    def close(self) -> None:
        """Flush, then close; idempotent. Raises as `flush`."""
        self._thread.run(self._producer.close())

    def abort(self) -> None:
        """Close without sending pending records; their deliveries fail as not done, or unknown if they were sent."""
        self._thread.run(self._producer.abort())

    def __repr__(self) -> str:
        return describe(type(self), self._producer.facts())

    def _repr_html_(self) -> str:
        return html_table(type(self), self._producer.facts())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.run(self._producer.__aexit__(kind, error, trace))

    def _wait_room(self, size_bytes: int) -> None:
        if not self._producer.core.accumulator.wait_room(size_bytes, self._timeout_s):
            message = f"not sent: the buffer was full for {self._timeout_s} s; retry, or raise buffer_bytes"
            raise OverloadedError(message, code="buffer_full")
