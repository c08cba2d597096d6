"""Analyze log lines as they come: one streaming query that counts them, into a terminal, a topic or PostgreSQL.

The query's checkpoint remembers how far it has read and what it has counted, so that it goes on exactly there. Into a
topic each batch goes through the exactly-once sink's ledger; into PostgreSQL it is one transaction. A terminal and a
page show what was counted since the job was started.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Literal

from quiver.errors import RequestError
from quiver.spark.connections import connection
from quiver.spark.options import parse_duration
from quiver.spark.pipelines.job import Job, Result, Run
from quiver.spark.pipelines.line_counts import LineCount, LineCounts
from quiver.spark.pipelines.line_report import MESSAGES_MAX, SOURCES_MAX, render_lines, render_page
from quiver.spark.pipelines.log_lines import count_lines, read_lines
from quiver.spark.pipelines.postgres_counts import PostgresCounts
from quiver.spark.pipelines.topic_counts import TopicCounts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

QUERY_ID: Final = "sql.streaming.queryId"
COLUMNS: Final = "partition,timestamp,key,value"


class Board:
    """What is shown meanwhile: made by the thread that counts, shown by another."""

    lines: tuple[str, ...] = ()


class Analyze(Job, frozen=True, kw_only=True):
    """Count log lines by level, source and message, in windows of event time."""

    topic: str
    to_topic: str = ""
    to_postgres: str = ""
    window: str = "10s"
    watermark: str = "1m"
    start: Literal["earliest", "latest"] = "latest"
    is_once: bool = False
    every: str = "2s"
    checkpoint: str = ""
    report: str = ""

    def __post_init__(self) -> None:
        if self.to_topic and self.to_postgres:
            raise _bad("counts are written to a topic or to PostgreSQL: give one of to-topic, to-postgres")
        if (self.to_topic or self.to_postgres) and not self.checkpoint:
            raise _bad("counts that are kept need a checkpoint, so that each is written once: give its folder")
        if self.to_topic == self.topic:
            raise _bad("counts cannot be written to the topic that is analyzed: they would be counted")
        for name in ("window", "watermark", "every"):
            if parse_duration(getattr(self, name), name) < (0 if name == "every" else 1):
                raise _bad(f"{name} is a second at least")

    def run(self, run: Run) -> Result:
        """Count what there is (`once`), or what comes until told to stop."""
        connection(self.cluster_servers()).offsets(self.topic, {})  # a topic that is not there is told at once
        if self.is_dry_run:
            return Result(sentence=f"would analyze {self.topic} from {self.start}, into {self._where()}", facts={})
        counts, board = LineCounts(), Board()
        with ExitStack() as stack:
            folder = self.checkpoint or stack.enter_context(tempfile.TemporaryDirectory(prefix="quiver-analyze-"))
            query = self._begin(run.spark, counts, board, folder)
            run.follow(query, f"analyzing {self.topic}", show=lambda: board.lines)
        if self.report:
            with open(self.report, "w", encoding="utf-8") as file:
                file.write(render_page(self.topic, counts))
        return self._result(counts, is_complete=not (self.is_once and run.is_stopping))

    def _begin(self, spark: SparkSession, counts: LineCounts, board: Board, folder: str) -> StreamingQuery:
        # Few groups: each shuffle partition is a task and a state of its own in every micro-batch.
        spark.conf.set("spark.sql.shuffle.partitions", str(spark.sparkContext.defaultParallelism))
        records = (
            spark.readStream.format("quiver")
            .options(**self.source_options())
            .options(subscribe=self.topic, columns=COLUMNS, startingOffsets=self.start)
            .load()
        )
        counted = count_lines(read_lines(records), window=_interval(self.window), watermark=_interval(self.watermark))
        writer: DataStreamWriter = counted.writeStream.outputMode("update").option("checkpointLocation", folder)
        writer = (
            writer.trigger(availableNow=True) if self.is_once else writer.trigger(processingTime=_interval(self.every))
        )
        target = self._target()

        def take(frame: DataFrame, batch_id: int) -> None:
            found = [LineCount(**row.asDict()) for row in frame.collect()]
            if target is not None:
                query_id = frame.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
                assert query_id, "Spark did not tell which query this is"
                target.write(query_id, batch_id, found)
            counts.take(found)
            board.lines = render_lines(counts)

        return writer.foreachBatch(take).start()

    def _target(self) -> TopicCounts | PostgresCounts | None:
        """Return where counts are kept, if they are."""
        if self.to_topic:
            return TopicCounts(self.cluster_servers(), self.to_topic)
        return PostgresCounts(self.to_postgres, self.topic) if self.to_postgres else None

    def _where(self) -> str:
        return f"topic {self.to_topic}" if self.to_topic else "PostgreSQL" if self.to_postgres else "the terminal"

    def _result(self, counts: LineCounts, *, is_complete: bool) -> Result:
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
        told = f"analyzed {self.topic}, into {self._where()}: lines {facts['lines']:,}, windows {facts['windows']:,}"
        told = "\n".join((told, *render_lines(counts)))
        return Result(sentence=told, facts=facts, is_complete=is_complete)


def _interval(text: str) -> str:
    """Return a time as Spark writes it."""
    return f"{round(parse_duration(text, 'time') * 1000)} milliseconds"


def _bad(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_option")
