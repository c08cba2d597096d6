"""The blocking consumer: fetching and commits run on the loop; records are decoded in the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from quiver.client.arguments import check_arguments
from quiver.client.consumer import AsyncConsumer
from quiver.client.consumer_core import SeekTarget, iterate
from quiver.client.presentation import describe, html_table
from quiver.client.ranges import OnProgress
from quiver.client.thread import LoopThread
from quiver.model import ConsumerId, Offset, PartitionId
from quiver.record import Record

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa


@check_arguments
class Consumer:
    """Read the records of topics; made by `Cluster.consumer`.

    Example:
        consumer = cluster.consumer("logs", name="report", idle_timeout=5)
        for record in consumer:
            print(record.partition, record.offset, record.text)
        consumer.commit()
    """

    def __init__(self, consumer: AsyncConsumer, thread: LoopThread) -> None:
        self._consumer = consumer
        self._thread = thread
        self._consuming = threading.Lock()

    @property
    def consumer_id(self) -> ConsumerId | None:
        """The id that the cluster assigned; None for a consumer without a name."""
        return self._consumer.consumer_id

    @property
    def member_id(self) -> str | None:
        """The id of this member of its group, which changes when it joins again; None if it is not a member now."""
        return self._consumer.member_id

    @property
    def topic(self) -> str:
        """The topic of this consumer; raises `RequestError` if it reads several."""
        return self._consumer.topic

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that this consumer reads now."""
        return self._consumer.topics

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions of its topic that this consumer reads, sorted; of several topics, see `assignment`."""
        return self._consumer.partitions

    @property
    def assignment(self) -> tuple[tuple[str, int], ...]:
        """The topics and partitions that this consumer reads now, sorted."""
        return self._consumer.assignment

    @property
    def skipped_count(self) -> int:
        """Records that retention removed before they were read (with `on_trimmed="earliest"`)."""
        return self._consumer.skipped_count

    def __iter__(self) -> Iterator[Record]:
        """Yield records as they arrive, forever, or until none arrived for `idle_timeout`."""
        while (found := self._thread.run(self._consumer.wait_batch())) is not None:
            yield from iterate(*found)

    def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[Record]:
        """Return the available records, at most `max_records`; wait at most `timeout` seconds for the first."""
        with self._consuming:
            return self._thread.run(self._consumer.poll(max_records, timeout))

    def fetch_arrow(
        self,
        max_records: int = 1_000_000,
        timeout: float = 5.0,
        *,
        with_headers: bool = False,
        schema: pa.Schema | None = None,
        progress: OnProgress | None = None,
    ) -> pa.Table:
        """Return records as a `pyarrow.Table`: topic, partition, offset, timestamp, key, value, optionally headers.

        Returns at `max_records`, at the current end of all partitions, or after `timeout` seconds with the records that
        arrived until then. With a `schema`, values are JSON objects and become its columns; if one does not fit, no
        record is consumed. `progress` is called with a `ReadProgress` after each batch.

        Raises:
            DecodeError: a value is not a JSON object of the schema (`bad_json`).
        """
        options: dict[str, Any] = {"with_headers": with_headers, "schema": schema, "progress": progress}
        with self._consuming:
            return self._thread.run(self._consumer.fetch_arrow(max_records, timeout, **options))

    def fetch_pandas(
        self,
        max_records: int = 1_000_000,
        timeout: float = 5.0,
        *,
        with_headers: bool = False,
        schema: pa.Schema | None = None,
        progress: OnProgress | None = None,
    ) -> pd.DataFrame:
        """Return records as a pandas frame; otherwise as `fetch_arrow`."""
        options: dict[str, Any] = {"with_headers": with_headers, "schema": schema, "progress": progress}
        with self._consuming:
            return self._thread.run(self._consumer.fetch_pandas(max_records, timeout, **options))

    def fetch_polars(
        self,
        max_records: int = 1_000_000,
        timeout: float = 5.0,
        *,
        with_headers: bool = False,
        schema: pa.Schema | None = None,
        progress: OnProgress | None = None,
    ) -> pl.DataFrame:
        """Return records as a polars frame; otherwise as `fetch_arrow`."""
        options: dict[str, Any] = {"with_headers": with_headers, "schema": schema, "progress": progress}
        with self._consuming:
            return self._thread.run(self._consumer.fetch_polars(max_records, timeout, **options))

    def commit(self, timeout: float | None = None) -> None:
        """Store the positions as cursors in the cluster: every record returned so far counts as processed.

        `timeout` (seconds) replaces the cluster's.

        Raises:
            FencedError: another consumer of this name has been opened since, or another member of the group has got
                partitions of this one; it reads them now. Nothing was moved there.
        """
        self._thread.run(self._consumer.commit(timeout))

    def seek(
        self,
        partition: int | None = None,
        offset: SeekTarget | None = None,
        *,
        timestamp: int | datetime | None = None,
        topic: str | None = None,
    ) -> None:
        """Continue at an offset, "earliest", "latest", or the first record since a timestamp.

        Without a `partition`, in all partitions of the `topic`; without a `topic`, of all topics.
        """
        self._thread.run(self._consumer.seek(partition, offset, timestamp=timestamp, topic=topic))

    def position(self, partition: int, topic: str | None = None) -> Offset:
        """Return the offset of the next record to return from a partition."""
        return self._consumer.position(partition, topic)

    def size(self) -> int:
        """Return the exact number of committed records that this consumer has not returned yet."""
        return self._thread.run(self._consumer.size())

    def end_offsets(self, topic: str | None = None) -> dict[PartitionId, Offset]:
        """Return the current end offset of each partition: the offset that the next produced record gets."""
        return self._thread.run(self._consumer.end_offsets(topic))

    def close(self) -> None:
        """Commit if `auto_commit` is set, or as a member of a group, which it leaves; then close. Idempotent."""
        self._thread.run(self._consumer.close())

    def __repr__(self) -> str:
        return describe(type(self), self._consumer.facts())

    def _repr_html_(self) -> str:
        return html_table(type(self), self._consumer.facts())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.run(self._consumer.__aexit__(kind, error, trace))
