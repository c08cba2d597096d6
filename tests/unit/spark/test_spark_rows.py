"""Rows on their way out: what is refused, and where each goes."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from quiver.client.batching import partition_of
from quiver.errors import RequestError
from quiver.spark.columns import check_row_schema, split_rows


def schema(**columns: object) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])  # type: ignore[arg-type] # types


def test_rows_that_cannot_be_records_are_refused_with_a_sentence() -> None:
    check_row_schema(schema(value=StringType()), "logs")
    check_row_schema(schema(value=StringType(), topic=StringType()), "")
    for columns, topic, sentence in (
        ({"value": StringType()}, "", "no topic given: set the option topic"),
        ({"key": StringType()}, "logs", "column value is missing"),
        ({"value": IntegerType()}, "logs", "column value must be string or binary, not int"),
        ({"value": StringType(), "level": StringType()}, "logs", "unknown column 'level'"),
    ):
        with pytest.raises(RequestError, match=sentence):
            check_row_schema(schema(**columns), topic)


def split(batch: dict[str, list[object]], topic: str = "") -> dict[tuple[str, int | None], list[object]]:
    parts = split_rows(pa.RecordBatch.from_pydict(batch), topic, lambda _: 4)
    return {target: columns["value"].to_pylist() for target, columns in parts}


def test_rows_go_where_columns_and_keys_say() -> None:
    assert split({"value": ["a", "b"]}, "logs") == {("logs", None): ["a", "b"]}
    assert split({"value": ["a", "b", "c"], "topic": ["x", "y", "x"]}) == {("x", None): ["a", "c"], ("y", None): ["b"]}
    assert split({"value": ["a"], "topic": ["x"]}, "logs") == {("logs", None): ["a"]}
    found = split({"value": ["a", "b", "c"], "partition": [2, None, 2], "key": ["k", "k", None]}, "logs")
    assert found == {("logs", 2): ["a", "c"], ("logs", partition_of(b"k", 4)): ["b"]}


def test_row_without_a_topic_is_an_error() -> None:
    with pytest.raises(RequestError, match="column topic is null"):
        split({"value": ["a"], "topic": pa.array([None], pa.string())})  # type: ignore[dict-item] # a typed null
