"""Analyze log lines: one streaming query counts them and writes to a terminal, a topic or PostgreSQL.

The query's checkpoint has its offsets and its counts, so it resumes exactly there. Each batch goes to a topic through
the exactly-once sink's ledger, or to PostgreSQL in one transaction. The terminal and the HTML report show what was
counted since the job started.

A line is text or a JSON object. Its *level* is a word in the line or a field, its *source* is the record's key or a
field, and its *message* is the text with numbers and ids replaced, so that lines of one kind count as one. Windows are
of event time: the records' timestamps.

`TopicCounts` writes each batch once, through the ledger. A count is a record keyed by window, level, source and
message; while its window is open it is written again with a larger count, and the last record is valid.
`PostgresCounts` stores the number of a query's last batch as a row, updated in the transaction that writes the batch. A
batch that is repeated, because its outcome was unknown or the driver died, finds its number and writes nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everywhere in Spark

from quiver.errors import ConfigError, RequestError, UnavailableError
from quiver.spark.connections import Servers, connection
from quiver.spark.ledger import ledger_of_query
from quiver.spark.options import WriteOptions, parse_duration
from quiver.spark.pipelines.job import Job, JobResult, JobRun
from quiver.spark.pipelines.line_counts import LEVELS, NO_LEVEL, LineCount, LineCounts
from quiver.spark.pipelines.line_report import MESSAGES_MAX, SOURCES_MAX, render_lines, render_page
from quiver.spark.pipelines.place import parse_output_file
from quiver.spark.sink import commit, stage_rows

if TYPE_CHECKING:
    import psycopg
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


QUERY_ID: Final = "sql.streaming.queryId"
COLUMNS: Final = "partition,timestamp,key,value"


class LiveCounts:
    """Rendered counts: written by the thread that counts, read by the thread that displays progress."""

    lines: tuple[str, ...] = ()


class Analyze(Job, frozen=True, kw_only=True):
    """Count log lines by level, source and message, in windows of event time."""

    topic: str
    to_topic: str = ""
    to_postgres: str = ""
    window: str = "10s"
    watermark: str = "1m"
    start: Literal["", "earliest", "latest"] = ""
    """Empty: earliest with `once`, else latest."""
    is_once: bool = False
    every: str = "2s"
    checkpoint: str = ""
    report: str = ""

    def __post_init__(self) -> None:
        if self.to_topic and self.to_postgres:
            raise _bad("set only one of to-topic, to-postgres")
        if (self.to_topic or self.to_postgres) and not self.checkpoint:
            raise _bad("to-topic and to-postgres need a checkpoint directory, so that each count is written once")
        if self.to_topic == self.topic:
            raise _bad("to-topic must differ from topic: the counts would be counted again")
        if self.report:
            parse_output_file(self.report, option="report")
        for name in ("window", "watermark", "every"):
            if parse_duration(getattr(self, name), name) < (0 if name == "every" else 1):
                raise _bad(f"{name} must be at least 1s")

    @property
    def starting(self) -> str:
        """Return where a query without a checkpoint starts: to count what exists means to count from its beginning."""
        return self.start or ("earliest" if self.is_once else "latest")

    def run(self, run: JobRun) -> JobResult:
        """Count the existing records (`once`), or all records until the job is stopped."""
        connection(self.cluster_servers()).offsets(self.topic, {})  # raise for an unknown topic before Spark starts
        if self.is_dry_run:
            return JobResult(
                sentence=f"would analyze {self.topic} from {self.starting}, into {self._target_name()}", facts={}
            )
        counts, live = LineCounts(), LiveCounts()
        with ExitStack() as stack:
            folder = self.checkpoint or stack.enter_context(tempfile.TemporaryDirectory(prefix="quiver-analyze-"))
            query = self._begin(run.spark, counts, live, folder)
            run.follow(query, f"analyzing {self.topic}", show=lambda: live.lines)
        if self.report:
            with open(parse_output_file(self.report, option="report"), "w", encoding="utf-8") as file:
                file.write(render_page(self.topic, counts))
        return self._result(counts, is_complete=not (self.is_once and run.is_stopping))

    def _begin(self, spark: SparkSession, counts: LineCounts, live: LiveCounts, folder: str) -> StreamingQuery:
        # There are few groups, and each shuffle partition costs a task and a state store in every micro-batch.
        spark.conf.set("spark.sql.shuffle.partitions", str(spark.sparkContext.defaultParallelism))
        records = (
            spark.readStream.format("quiver")
            .options(**self.source_options())
            .options(subscribe=self.topic, columns=COLUMNS, startingOffsets=self.starting)
            .load()
        )
        counted = count_lines(read_lines(records), window=_interval(self.window), watermark=_interval(self.watermark))
        writer: DataStreamWriter = counted.writeStream.outputMode("update").option("checkpointLocation", folder)
        writer = (
            writer.trigger(availableNow=True) if self.is_once else writer.trigger(processingTime=_interval(self.every))
        )
        target = self._target()

        def handle_batch(frame: DataFrame, batch_id: int) -> None:
            found = [LineCount(**row.asDict()) for row in frame.collect()]
            if target is not None:
                query_id = frame.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
                assert query_id, "Spark did not set the query id"
                target.write(query_id, batch_id, found)
            counts.update(found)
            live.lines = render_lines(counts)

        return writer.foreachBatch(handle_batch).start()

    def _target(self) -> TopicCounts | PostgresCounts | None:
        """Return the sink of the counts; None for the terminal."""
        if self.to_topic:
            return TopicCounts(self.cluster_servers(), self.to_topic)
        return PostgresCounts(self.to_postgres, self.topic) if self.to_postgres else None

    def _target_name(self) -> str:
        return f"topic {self.to_topic}" if self.to_topic else "PostgreSQL" if self.to_postgres else "the terminal"

    def _result(self, counts: LineCounts, *, is_complete: bool) -> JobResult:
        levels = {level: sum(own.values()) for level, own in counts.by_level().items()}
        facts: dict[str, Any] = {
            "topic": self.topic,
            "lines": sum(levels.values()),
            "windows": len(counts.windows),
            "levels": levels,
            "sources": {name: sum(own.values()) for name, own in counts.by_source(SOURCES_MAX).items()},
            "messages": [
                {"message": message, "level": level, "count": count}
                for message, level, count in counts.top_messages(MESSAGES_MAX)
            ],
            "bursts": counts.bursts(),
        }
        sentence = (
            f"analyzed {self.topic}, into {self._target_name()}: lines {facts['lines']:,}, windows {facts['windows']:,}"
        )
        sentence = "\n".join((sentence, *render_lines(counts)))
        return JobResult(sentence=sentence, facts=facts, is_complete=is_complete)


def _interval(text: str) -> str:
    """Return a duration in Spark's notation."""
    return f"{round(parse_duration(text, 'time') * 1000)} milliseconds"


def _bad(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_option")


MESSAGE_CHARACTERS_MAX: Final = 120
SOURCE_CHARACTERS_MAX: Final = 80
_SAME: Final = {"CRITICAL": "FATAL", "EMERGENCY": "FATAL", "ALERT": "FATAL", "WARNING": "WARN", "NOTICE": "INFO"}
_WORDS: Final = "|".join((*LEVELS[:-1], *_SAME))
_LEVEL: Final = rf"(?i)\b({_WORDS})\b"
_CHANGING: Final = r"0[xX][0-9a-fA-F]+|\b[0-9a-fA-F]{8,}(?:-[0-9a-fA-F]{4,})*\b|[0-9]+"
"""Parts that differ between lines of one kind: addresses, ids, numbers."""


def read_lines(records: DataFrame) -> DataFrame:
    """Return `timestamp, level, source, message, latency_ms` of records with `partition, timestamp, key, value`.

    The latency is the time from the record's timestamp to its processing, at least 0: clocks may differ.
    """
    text = F.col("value").cast("string")
    said = F.coalesce(_json(text, "message"), _json(text, "msg"), _json(text, "event"), text, F.lit(""))
    source = F.coalesce(
        F.col("key").cast("string"),
        _json(text, "source"),
        _json(text, "service"),
        _json(text, "logger"),
        F.concat(F.lit("partition "), F.col("partition").cast("string")),
    )
    waited_ms = F.unix_millis(F.current_timestamp()) - F.unix_millis("timestamp")
    return records.select(
        "timestamp",
        _level(F.coalesce(_json(text, "level"), _json(text, "severity"), text, F.lit(""))).alias("level"),
        F.substring(source, 1, SOURCE_CHARACTERS_MAX).alias("source"),
        F.substring(F.trim(F.regexp_replace(said, _CHANGING, "#")), 1, MESSAGE_CHARACTERS_MAX).alias("message"),
        F.greatest(waited_ms, F.lit(0)).alias("latency_ms"),
    )


def count_lines(lines: DataFrame, *, window: str, watermark: str) -> DataFrame:
    """Count messages per window of event time, level and source, with their latencies.

    In a stream, lines that are more than `watermark` older than the newest are dropped.
    """
    counted = (
        lines.withWatermark("timestamp", watermark)
        .groupBy(F.window("timestamp", window), "level", "source", "message")
        .agg(
            F.count("*").alias("count"),
            F.sum("latency_ms").alias("latency_ms_sum"),
            F.max("latency_ms").alias("latency_ms_max"),
        )
    )
    bounds = [F.unix_millis(F.col(f"window.{end}")).alias(f"window_{end}_ms") for end in ("start", "end")]
    return counted.select(*bounds, "level", "source", "message", "count", "latency_ms_sum", "latency_ms_max")


def _json(text: Column, name: str) -> Column:
    """Return a field of a JSON line; null if the field is missing or the line is not JSON."""
    return F.get_json_object(F.when(text.startswith("{"), text), f"$.{name}")


def _level(text: Column) -> Column:
    found = F.upper(F.regexp_extract(text, _LEVEL, 1))
    same = F.create_map(*(F.lit(word) for pair in _SAME.items() for word in pair))
    return F.when(found == "", F.lit(NO_LEVEL)).otherwise(F.coalesce(same[found], found))


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
