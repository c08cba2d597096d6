"""Writes: rows become records once, whatever happens to tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
import spark_faults
from pyspark import TaskContext, cloudpickle
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everywhere in Spark
from reading import read_to_end
from spark_queries import fill, reading, streaming

import quiver
from quiver.client.batching import partition_of
from quiver.testing import LocalCluster


def write(frame: DataFrame, local: LocalCluster, topic: str, **options: str) -> None:
    given = {"servers": ",".join(local.addresses), "topic": topic, **options}
    frame.write.format("quiver").mode("append").options(**given).save()


def copy_stream(
    frame: DataFrame, local: LocalCluster, topic: str, folder: Path, *, sink: str = "quiver", **options: str
) -> None:
    query = (
        frame.writeStream.format(sink)
        .options(**options)
        .option("servers", ",".join(local.addresses))
        .option("topic", topic)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def texts(client: quiver.Cluster, topic: str) -> list[str]:
    with client.consumer(topic) as consumer:
        return sorted(record.text or "" for record in read_to_end(consumer))


def test_rows_become_records_with_keys_headers_and_times(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str
) -> None:
    client.create_topic(topic, partitions=4)
    frame = spark.sql(
        "SELECT 'a' AS value, 'k' AS key, TIMESTAMP_MILLIS(1700000000123) AS timestamp,"
        " array(named_struct('key', 'h', 'value', CAST('x' AS BINARY))) AS headers"
    )
    write(frame, local, topic)
    (record,) = read_to_end(client.consumer(topic))
    assert (record.text, record.key, record.timestamp) == ("a", b"k", 1_700_000_000_123)
    assert list(record.headers or ()) == [("h", b"x")]
    assert record.partition == partition_of(b"k", 4)


def test_transaction_happens_once(spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str) -> None:
    client.create_topic(topic, partitions=2)
    frame = spark.range(1000, numPartitions=3).selectExpr("CAST(id AS STRING) AS value")
    for _ in range(2):
        write(frame, local, topic, txnId=f"{topic}-import")
    assert texts(client, topic) == sorted(map(str, range(1000)))
    write(frame.limit(1), local, topic)
    write(frame.limit(1), local, topic, delivery="atLeastOnce")
    assert len(texts(client, topic)) == 1002


def test_task_that_is_run_again_writes_its_rows_once(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, f"{topic}-in", 3000, 3000)
    client.create_topic(topic, partitions=2)

    def stumble(offset: int, value: str) -> str:
        context = TaskContext.get()
        if offset == 2999 and context is not None and context.attemptNumber() == 0:
            raise RuntimeError("the first attempt fails at its last row")
        return value

    frame = streaming(spark, local, f"{topic}-in", maxOffsetsPerTrigger="2500")
    function = F.udf(stumble, "string", useArrow=False)
    rows = frame.select(function("offset", frame["value"].cast("string")).alias("value"))
    copy_stream(rows, local, topic, folder)
    expected = sorted(f"{partition}-{offset}" for partition in range(2) for offset in range(3000))
    assert texts(client, topic) == expected


def test_stream_goes_on_after_a_restart_and_writes_everything_once(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, f"{topic}-in", 100)
    client.create_topic(topic, partitions=1)
    for round_ in (1, 2):
        frame = streaming(spark, local, f"{topic}-in", maxOffsetsPerTrigger="30")
        copy_stream(frame.select("value"), local, topic, folder)
        assert len(texts(client, topic)) == 100 * round_
        fill(client, f"{topic}-in", 100)
    # What was committed last is replayed as if its commit had not been noted: nothing is added.
    newest = max((folder / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    newest.unlink()
    copy_stream(streaming(spark, local, f"{topic}-in").select("value"), local, topic, folder)
    assert len(texts(client, topic)) == 300
    rows = reading(spark, local, topic).orderBy("offset").collect()
    assert [bytes(row["value"]).decode() for row in rows[:100]] == [f"0-{offset}" for offset in range(100)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_commit_that_fails_is_made_up_for_by_the_next_run(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path, when: str
) -> None:
    cloudpickle.register_pickle_by_value(spark_faults)  # type: ignore[no-untyped-call]
    spark.dataSource.register(spark_faults.FaultySource)
    fill(client, f"{topic}-in", 90, 60)
    client.create_topic(topic, partitions=2)

    def run() -> None:
        frame = streaming(spark, local, f"{topic}-in", maxOffsetsPerTrigger="50").select("value", "partition")
        fault = f"{when}:raise:{folder / 'failed'}"
        copy_stream(frame, local, topic, folder, sink="quiver-faulty", fault=fault)

    with pytest.raises(StreamingQueryException, match="the commit fails"):
        run()
    run()
    rows = reading(spark, local, topic).orderBy("partition", "offset").collect()
    assert [bytes(row["value"]).decode() for row in rows] == [
        f"{partition}-{offset}" for partition, count in enumerate((90, 60)) for offset in range(count)
    ]


@pytest.mark.parametrize(
    ("columns", "mode", "sentence"),
    [
        ("1 AS value", "append", "column value must be string or binary"),
        ("'a' AS value, 'b' AS level", "append", "unknown column 'level'"),
        ("'a' AS value", "overwrite", "cannot be overwritten"),
    ],
)
def test_rows_that_cannot_be_written_are_refused(
    spark: SparkSession, local: LocalCluster, topic: str, columns: str, mode: str, sentence: str
) -> None:
    writer = spark.sql(f"SELECT {columns}").write.format("quiver").mode(mode)
    with pytest.raises(PySparkException, match=sentence):
        writer.options(servers=local.addresses[0], topic=topic).save()
