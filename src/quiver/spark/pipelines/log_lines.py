"""What log lines say, and how many say it: DataFrames in, DataFrames out, of batches and of streams alike. Pure.

A line is text or a JSON object. Its *level* stands in it, its *source* is its key or what it says of itself, and its
*message* is what it says, with numbers and ids taken out, so that lines of the same kind count as one. Windows are of
event time: the records' own timestamps.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everywhere in Spark

MESSAGE_CHARACTERS_MAX: Final = 120
SOURCE_CHARACTERS_MAX: Final = 80
NO_LEVEL: Final = "NONE"
LEVELS: Final = ("FATAL", "ERROR", "WARN", "INFO", "DEBUG", "TRACE", NO_LEVEL)
"""Gravest first."""
_SAME: Final = {"CRITICAL": "FATAL", "EMERGENCY": "FATAL", "ALERT": "FATAL", "WARNING": "WARN", "NOTICE": "INFO"}
_WORDS: Final = "|".join((*LEVELS[:-1], *_SAME))
_LEVEL: Final = rf"(?i)\b({_WORDS})\b"
_CHANGING: Final = r"0[xX][0-9a-fA-F]+|\b[0-9a-fA-F]{8,}(?:-[0-9a-fA-F]{4,})*\b|[0-9]+"
"""What differs between lines of the same kind: addresses, ids, numbers."""


def read_lines(records: DataFrame) -> DataFrame:
    """Return `timestamp, level, source, message, latency_ms` of records with `partition, timestamp, key, value`.

    The latency is the time from the record's timestamp to its processing; clocks that differ do not make it negative.
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
    """Return how often each message came in each window of event time, by level and source, and how late it was.

    In a stream, lines that come later than `watermark` behind the newest are not counted any more.
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
    """Return a field of a JSON line; null if there is none, or the line is no JSON."""
    return F.get_json_object(F.when(text.startswith("{"), text), f"$.{name}")


def _level(text: Column) -> Column:
    found = F.upper(F.regexp_extract(text, _LEVEL, 1))
    same = F.create_map(*(F.lit(word) for pair in _SAME.items() for word in pair))
    return F.when(found == "", F.lit(NO_LEVEL)).otherwise(F.coalesce(same[found], found))
