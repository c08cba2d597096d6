"""Where counts of log lines are written, each batch once: a topic, PostgreSQL, or a Delta table. Run on the driver.

A count belongs to a window, level, source and template. While its window may still get lines it is written again with a
larger count, and the last one is valid. A batch is named by the analysis and its number; a batch that is repeated,
because its outcome was unknown or the driver died, finds its number and changes nothing:

- `TopicCounts` writes through the ledger of the exactly-once sink; the key of a record is the identity of the count.
- `PostgresCounts` stores the number of the last batch in the transaction that writes the batch.
- `DeltaCounts` merges the counts into a table, in a commit that also stores the number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError

from quiver.errors import ConfigError, RequestError, StorageError, UnavailableError
from quiver.spark.connections import Servers, connection
from quiver.spark.ledger import ledger_of_query
from quiver.spark.options import WriteOptions
from quiver.spark.pipelines.log_summary import LogSummary
from quiver.spark.pipelines.place import Place
from quiver.spark.sink import commit, stage_rows

if TYPE_CHECKING:
    import psycopg

MESSAGE_CHARACTERS_MAX: Final = 500
SOURCE_CHARACTERS_MAX: Final = 200


class LineCount(msgspec.Struct, frozen=True, kw_only=True):
    """The count of one template in a window, by level and source."""

    window_start_ms: int
    window_end_ms: int
    level: str
    source: str
    message: str
    """The template; of a long one the beginning, and a digest."""
    template_id: str = ""
    count: int
    latency_ms_sum: int = 0
    latency_ms_max: int = 0

    @property
    def key(self) -> tuple[int, str, str, str]:
        """The identity of the count: window, level, source, message."""
        return (self.window_start_ms, self.level, self.source, self.message)


class CountSink(Protocol):
    """Writes counts."""

    def write(self, query_id: str, batch_id: int, counts: Sequence[LineCount]) -> object:
        """Write a batch of an analysis, unless it is already written."""


def changed_counts(total: LogSummary, batch: LogSummary) -> list[LineCount]:
    """Return the counts that a batch changed, with their totals."""
    keys = ["window_ms", "level", "source", "template_id"]
    texts = dict(zip(*(total.templates[name].to_pylist() for name in ("template_id", "template")), strict=True))
    changed = total.counts.join(batch.counts.select(keys), keys=keys, join_type="left semi")
    return [
        LineCount(
            window_start_ms=row["window_ms"],
            window_end_ms=row["window_ms"] + total.window_ms,
            level=row["level"],
            source=_cut(row["source"], SOURCE_CHARACTERS_MAX),
            message=_cut(texts[row["template_id"]] or "", MESSAGE_CHARACTERS_MAX),
            template_id=row["template_id"],
            count=row["count"],
            latency_ms_sum=row["latency_ms_sum"],
            latency_ms_max=row["latency_ms_max"],
        )
        for row in changed.to_pylist()
    ]


def _cut(text: str, characters_max: int) -> str:
    """Return a text as part of a key: a long one is cut, and stays distinct by a digest."""
    if len(text) <= characters_max:
        return text
    return f"{text[:characters_max]} … {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


class TopicCounts:
    """Writes counts to a topic."""

    def __init__(self, servers: Servers, topic: str) -> None:
        """Create the topic if it does not exist."""
        connection(servers).create_topic(topic, exist_ok=True)
        self._options = WriteOptions(servers=servers, topic=topic)

    def write(self, query_id: str, batch_id: int, counts: Sequence[LineCount]) -> None:
        """Write a batch of a query, unless it is already written."""
        keys = pa.array(["|".join(map(str, own.key)) for own in counts], pa.string())
        values = pa.array([msgspec.json.encode(own) for own in counts], pa.binary())
        rows = pa.RecordBatch.from_arrays([keys, values], names=["key", "value"])
        written = stage_rows(iter([rows]), self._options, ledger=ledger_of_query(query_id), writer=query_id, task=0)
        commit(self._options.servers, [written], batch_id)


_TABLES: Final = """
CREATE TABLE IF NOT EXISTS quiver_analyses (
    query_id text PRIMARY KEY,
    topic text NOT NULL,
    batch_id bigint NOT NULL
);
CREATE TABLE IF NOT EXISTS quiver_line_counts (
    topic text NOT NULL,
    window_start timestamptz NOT NULL,
    window_end timestamptz NOT NULL,
    level text NOT NULL,
    source text NOT NULL,
    message text NOT NULL,
    count bigint NOT NULL,
    latency_ms_sum bigint NOT NULL,
    latency_ms_max bigint NOT NULL,
    PRIMARY KEY (topic, window_start, level, source, message)
);
ALTER TABLE quiver_line_counts ADD COLUMN IF NOT EXISTS template_id text NOT NULL DEFAULT '';
"""
_BEGIN: Final = """
INSERT INTO quiver_analyses AS known VALUES (%s, %s, %s)
ON CONFLICT (query_id) DO UPDATE SET batch_id = excluded.batch_id WHERE known.batch_id < excluded.batch_id
"""
_WRITE: Final = """
INSERT INTO quiver_line_counts VALUES (
    %(topic)s, to_timestamp(%(window_start_ms)s / 1000.0), to_timestamp(%(window_end_ms)s / 1000.0),
    %(level)s, %(source)s, %(message)s, %(count)s, %(latency_ms_sum)s, %(latency_ms_max)s, %(template_id)s
)
ON CONFLICT (topic, window_start, level, source, message) DO UPDATE SET
    count = excluded.count, latency_ms_sum = excluded.latency_ms_sum, latency_ms_max = excluded.latency_ms_max
"""


class PostgresCounts:
    """Writes counts to a database."""

    def __init__(self, url: str, topic: str) -> None:
        """Create the tables if they do not exist.

        Raises:
            ConfigError: psycopg is not installed.
            UnavailableError: the database cannot be reached.
        """
        self._url, self._topic = url.replace("postgresql+psycopg://", "postgresql://", 1), topic
        with self._connect() as connection:
            connection.execute(_TABLES)

    def write(self, query_id: str, batch_id: int, counts: Sequence[LineCount]) -> bool:
        """Write a batch of a query atomically; return False if it is already written."""
        with self._connect() as connection, connection.cursor() as cursor:
            cursor.execute(_BEGIN, (query_id, self._topic, batch_id))
            if not cursor.rowcount:
                return False
            # PostgreSQL's type text cannot store NUL characters.
            rows = [{**msgspec.structs.asdict(own), "topic": self._topic} for own in counts]
            cursor.executemany(_WRITE, [{key: _clean(value) for key, value in row.items()} for row in rows])
        return True

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        """Open a connection; as a context manager it commits at the end, or rolls back after an error."""
        try:
            import psycopg
        except ImportError:
            message = "writing to PostgreSQL needs psycopg: pip install 'quivermq[spark,postgres]'"
            raise ConfigError(message, code="postgres_missing") from None
        try:
            return psycopg.connect(self._url)
        except psycopg.ProgrammingError as error:
            raise RequestError(
                f"{self._url.split('@')[-1]} is not a valid PostgreSQL URL: {error}", code="bad_option"
            ) from None
        except psycopg.OperationalError as error:
            raise UnavailableError(f"PostgreSQL cannot be reached: {error}", code="postgres_unavailable") from None


def _clean(value: object) -> object:
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


_DELTA_TYPES: Final[dict[str, pa.DataType]] = {
    "topic": pa.string(),
    "window_start": pa.timestamp("us", "UTC"),
    "window_end": pa.timestamp("us", "UTC"),
    "level": pa.string(),
    "source": pa.string(),
    "template_id": pa.string(),
    "message": pa.string(),
    "count": pa.int64(),
    "latency_ms_sum": pa.int64(),
    "latency_ms_max": pa.int64(),
}
_DELTA_SCHEMA: Final = pa.schema(_DELTA_TYPES)
_SAME: Final = " AND ".join(
    f"old.{name} = new.{name}" for name in ("topic", "window_start", "level", "source", "message")
)


class DeltaCounts:
    """Writes counts to a Delta table: one row for each count."""

    def __init__(self, place: Place, topic: str) -> None:
        """Create the table if it does not exist.

        Raises:
            StorageError: the place has another table, or cannot be used.
        """
        self._place, self._topic = place, topic
        try:
            DeltaTable.create(
                place.url,
                _DELTA_SCHEMA,
                mode="ignore",
                name="quiver_line_counts",
                storage_options=place.storage_options(),
            )
            self._table = DeltaTable(place.url, storage_options=place.storage_options())
        except (DeltaError, OSError) as error:
            raise self._failed(error) from None
        if [field.name for field in self._table.schema().fields] != _DELTA_SCHEMA.names:
            raise StorageError(f"{place} has a Delta table of something else: use another place", code="other_lake")

    def write(self, query_id: str, batch_id: int, counts: Sequence[LineCount]) -> bool:
        """Merge a batch of a query in one commit; return False if it is already written."""
        name = f"quiver-analyze:{query_id}"
        try:
            self._table.update_incremental()
            known = self._table.transaction_version(name)
            if known is not None and known >= batch_id:
                return False
            rows = [
                {
                    **msgspec.structs.asdict(own),
                    "topic": self._topic,
                    "window_start": datetime.fromtimestamp(own.window_start_ms / 1000, UTC),
                    "window_end": datetime.fromtimestamp(own.window_end_ms / 1000, UTC),
                }
                for own in counts
            ]
            # Delta itself refuses this commit if another one sets the same name meanwhile.
            (
                self._table.merge(
                    pa.Table.from_pylist(rows, _DELTA_SCHEMA),
                    _SAME,
                    source_alias="new",
                    target_alias="old",
                    commit_properties=CommitProperties(app_transactions=[Transaction(name, batch_id)]),
                )
                .when_matched_update_all()
                .when_not_matched_insert_all()
                .execute()
            )
        except (DeltaError, OSError) as error:
            raise self._failed(error) from None
        return True

    def _failed(self, error: Exception) -> StorageError:
        text = " ".join(str(error).split())
        return StorageError(f"the counts in {self._place} cannot be used; not written: {text}", code="lake_failed")
