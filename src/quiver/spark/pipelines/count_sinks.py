"""Sinks for counts of log lines: a topic or PostgreSQL. Each batch of a query is written once.

Topic: batches go through the ledger of the exactly-once sink. A count is a record keyed by window, level, source and
message; while its window is open it is written again with a larger count, and the last record is valid.

PostgreSQL: the number of a query's last batch is a row, updated in the transaction that writes the batch. A batch that
is repeated, because its outcome was unknown or the driver died, finds its number and writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from quiver.errors import ConfigError, RequestError, UnavailableError
from quiver.spark.connections import Servers, connection
from quiver.spark.ledger import ledger_of_query
from quiver.spark.options import WriteOptions
from quiver.spark.pipelines.line_counts import LineCount
from quiver.spark.sink import commit, stage_rows

if TYPE_CHECKING:
    import psycopg


class TopicCounts:
    """Write the counts of one query to a topic. Runs on the driver."""

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
"""
_BEGIN: Final = """
INSERT INTO quiver_analyses AS known VALUES (%s, %s, %s)
ON CONFLICT (query_id) DO UPDATE SET batch_id = excluded.batch_id WHERE known.batch_id < excluded.batch_id
"""
_WRITE: Final = """
INSERT INTO quiver_line_counts VALUES (
    %(topic)s, to_timestamp(%(window_start_ms)s / 1000.0), to_timestamp(%(window_end_ms)s / 1000.0),
    %(level)s, %(source)s, %(message)s, %(count)s, %(latency_ms_sum)s, %(latency_ms_max)s
)
ON CONFLICT (topic, window_start, level, source, message) DO UPDATE SET
    count = excluded.count, latency_ms_sum = excluded.latency_ms_sum, latency_ms_max = excluded.latency_ms_max
"""


class PostgresCounts:
    """Write the counts of one topic to a database. Runs on the driver."""

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
