"""Measure Spark on topics: reads, streams, the sink, pipelines, micro-batches, a cold job.

    python bench_spark.py [--records 2000000] [--only read|stream|sink|archive|audit|latency|cold] [--kafka]

One node, one replica, fsync on, four partitions; Spark is `local[2]`; all of them share this machine's cores. A rate is
the best of several rounds in a warm session. Raw limits, from the same run: for reads and streams, Arrow batches
from memory through the same interface into Spark; for the sink, `write` and `fdatasync` of the same values; for the
archive, Parquet files written from memory by one process; for the audit, digests of records in memory by one process;
for micro-batches, Spark's own `rate` source; for the cold job, a process that starts Spark and counts one row. With
`--kafka` Spark's own source reads the same records from a real Kafka, alternating with Quiver's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

import quiver
import quiver.spark
from kafka_peer import Kafka, fetch_connector
from memory import touch_memory
from processes import Nodes, connect, disk_directory, running_nodes
from quiver.record.digest import digest_ranges
from quiver.spark.columns import arrow_schema, spark_schema
from quiver.spark.options import COLUMNS
from quiver.spark.pipelines.archive import Archive
from quiver.spark.pipelines.audit import Audit
from quiver.spark.pipelines.job import JobRun
from table import Row, show

SIZES = {"100 B": 100, "1 KiB": 1024}
PARTITIONS = 4
ROUNDS = 3
LATENCY_S = 20.0
BATCH_RECORDS = 10_000
READ_COLUMNS = COLUMNS[:-1]
_names = count()


class Bench:
    """Nodes with a topic for each size of record, and a warm session."""

    def __init__(self, nodes: Nodes, spark: SparkSession, records: int, directory: Path) -> None:
        self.nodes, self.spark, self.directory = nodes, spark, directory
        self.servers = ",".join(node.wire for node in nodes.nodes)
        self.records = {size: max(PARTITIONS, records * 100 // size) for size in SIZES.values()}
        """Equal bytes of each size."""

    def fill(self) -> None:
        with connect(self.nodes) as cluster:
            for size, records in self.records.items():
                cluster.create_topic(topic_of(size), partitions=PARTITIONS)
                with cluster.producer(topic_of(size)) as producer:
                    for partition in range(PARTITIONS):
                        producer.send_many(make_values(size, records // PARTITIONS), partition=partition)

    def read(self, size: int) -> DataFrame:
        return self.spark.read.format("quiver").options(servers=self.servers, subscribe=topic_of(size)).load()

    def rate(self, size: int, work: Callable[[], object], *, rounds: int = ROUNDS, written: int = 0) -> float:
        """Return the best rate of several rounds, each of which writes everything `written` times.

        The rate is in millions of short records per second, or MB of long ones.
        """
        seconds = []
        for _ in range(rounds):
            touch_memory(2 * written * size * self.records[size])
            seconds.append(seconds_of(work))
        return in_unit(size, self.records[size] / min(seconds))


def make_values(size: int, records: int) -> list[bytes]:
    """Return distinct values that are half random and half constant, similar to log lines."""
    half = size // 2
    noise, rest = os.urandom(half * records), b"x" * (size - half)
    return [noise[at : at + half] + rest for at in range(0, half * records, half)]


def topic_of(size: int) -> str:
    return f"bench-{size}"


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def in_unit(size: int, records_per_s: float) -> float:
    return records_per_s / 1e6 if size == 100 else records_per_s * size / 1e6


def rate_row(what: str, size: int, measured: float, *, limit: float | None, targets: Sequence[float | None]) -> Row:
    name, unit = ("100 B", "M rows/s") if size == 100 else ("1 KiB", "MB/s")
    return Row(f"{what}, {name}", measured, unit, limit, targets[0] if size == 100 else targets[1])


def to_noop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


# -- reads ---------------------------------------------------------------------------------------------


class CeilingSource(DataSource):
    """Yield the same Arrow batch from memory until there are enough rows: the cost of the interface into Spark."""

    @classmethod
    def name(cls) -> str:
        return "ceiling"

    def schema(self) -> Any:
        return spark_schema(READ_COLUMNS)

    def reader(self, schema: Any) -> DataSourceReader:  # noqa: ARG002 - Spark's signature
        return CeilingReader(int(self.options["size"]), int(self.options["records"]))


class CeilingReader(DataSourceReader):
    def __init__(self, size: int, records: int) -> None:
        self._size, self._records = size, records

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(number) for number in range(2)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - all are alike
        batch = memory_batch(self._size, BATCH_RECORDS)
        for _ in range(self._records // 2 // BATCH_RECORDS):
            yield batch


def memory_batch(size: int, records: int) -> pa.RecordBatch:
    columns: dict[str, Any] = {
        "topic": ["bench"] * records,
        "partition": [0] * records,
        "offset": list(range(records)),
        "timestamp": [1_700_000_000_000_000] * records,
        "key": [None] * records,
        "value": make_values(size, records),
    }
    schema = arrow_schema(READ_COLUMNS)
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[field.name], type=field.type) for field in schema], schema=schema
    )


def ceiling(bench: Bench, size: int) -> float:
    options = {"size": str(size), "records": str(bench.records[size])}
    return bench.rate(size, lambda: to_noop(bench.spark.read.format("ceiling").options(**options).load()))


def bench_read(bench: Bench) -> list[Row]:
    rows = []
    for size in SIZES.values():
        limit = ceiling(bench, size)
        measured = bench.rate(size, lambda size=size: to_noop(bench.read(size)))  # type: ignore[misc] # size is bound
        rows.append(rate_row("batch read", size, measured, limit=limit, targets=(1.5, 400)))
    return rows


def bench_stream(bench: Bench) -> list[Row]:
    rows = []
    for size in SIZES.values():
        limit = ceiling(bench, size)
        measured = bench.rate(size, lambda size=size: stream(bench, size))  # type: ignore[misc] # size is bound
        rows.append(rate_row("stream read, AvailableNow", size, measured, limit=limit, targets=(1.0, 300)))
    return rows


def stream(bench: Bench, size: int) -> None:
    options = {"servers": bench.servers, "subscribe": topic_of(size), "startingOffsets": "earliest"}
    frame = bench.spark.readStream.format("quiver").options(**options).load()
    query = frame.writeStream.format("noop").option("checkpointLocation", str(bench.directory / f"ck{next(_names)}"))
    query.trigger(availableNow=True).start().awaitTermination()


# -- writes --------------------------------------------------------------------------------------------


def bench_sink(bench: Bench) -> list[Row]:
    rows = []
    for size in SIZES.values():
        limit = in_unit(size, raw_write(bench.directory, size, bench.records[size]))
        measured = bench.rate(size, lambda size=size: sink(bench, size), written=2)  # type: ignore[misc] # size is bound
        rows.append(rate_row("sink, exactly once", size, measured, limit=limit, targets=(0.5, 150)))
    return rows


def sink(bench: Bench, size: int) -> None:
    name = f"sink-{next(_names)}"
    with connect(bench.nodes) as cluster:
        cluster.create_topic(name, partitions=PARTITIONS)
    frame = bench.spark.range(bench.records[size], numPartitions=2).selectExpr(f"lpad('', {size}, 'x') AS value")
    frame.write.format("quiver").mode("append").options(servers=bench.servers, topic=name, txnId=name).save()


def raw_write(directory: Path, size: int, records: int) -> float:
    """Return the values per second of bare writes and syncs, a MiB at a time."""
    touch_memory(2 * records * size)
    blocks = max(1, records * size >> 20)
    file = os.open(directory / "raw", os.O_WRONLY | os.O_CREAT)
    begun = time.perf_counter()
    for _ in range(blocks):
        os.write(file, bytes(1 << 20))
        os.fdatasync(file)
    seconds = time.perf_counter() - begun
    os.close(file)
    return (blocks << 20) / size / seconds


# -- pipelines -----------------------------------------------------------------------------------------


def bench_archive(bench: Bench) -> list[Row]:
    rows = []
    for size in SIZES.values():
        limit = in_unit(size, raw_parquet(bench.directory, size))
        measured = bench.rate(size, lambda size=size: archive(bench, size))  # type: ignore[misc] # size is bound
        rows.append(rate_row("archive, exactly once", size, measured, limit=limit, targets=(1.0, 250)))
    return rows


def archive(bench: Bench, size: int) -> None:
    to = str(bench.directory / f"lake{next(_names)}")
    job = Archive(servers=bench.servers, topic=topic_of(size), to=to, is_once=True)
    assert job.run(run_in(bench)).is_complete


def raw_parquet(directory: Path, size: int) -> float:
    table = pa.Table.from_batches([memory_batch(size, BATCH_RECORDS)] * 10)
    seconds = min(
        seconds_of(lambda: pq.write_table(table, directory / "raw.parquet", compression="zstd")) for _ in range(ROUNDS)
    )
    return table.num_rows / seconds


def bench_audit(bench: Bench) -> list[Row]:
    """One source is the topic, the other its one replica: every record is read and digested twice."""
    job = Audit(servers=bench.servers, topic=topic_of(100))
    measured = 2 * bench.rate(100, lambda: check_clean(job, bench))
    return [rate_row("audit digest", 100, measured, limit=in_unit(100, raw_digest()), targets=(1.5, None))]


def check_clean(job: Audit, bench: Bench) -> None:
    result = job.run(run_in(bench))
    assert result.is_clean, result.sentence


def raw_digest() -> float:
    records = 5 * BATCH_RECORDS
    batch = memory_batch(100, records)
    return records / min(seconds_of(lambda: digest_ranges(batch, (0, records))) for _ in range(ROUNDS))


def run_in(bench: Bench) -> JobRun:
    return JobRun(lambda: bench.spark, report_progress=lambda _: None)


# -- times ---------------------------------------------------------------------------------------------


def bench_latency(bench: Bench) -> list[Row]:
    with connect(bench.nodes) as cluster:
        cluster.create_topic("latency", partitions=2)
        own = median_batch_ms(bench, "quiver", {"servers": bench.servers, "subscribe": "latency"}, feed(cluster))
    limit = median_batch_ms(bench, "rate", {"rowsPerSecond": "100"}, lambda: time.sleep(0.05))
    return [Row("micro-batch, median, little input", own, "ms", limit, 250)]


def feed(cluster: quiver.Cluster) -> Callable[[], None]:
    producer = cluster.producer("latency")

    def send() -> None:
        producer.send(b"x" * 100).result()
        time.sleep(0.05)

    return send


def median_batch_ms(bench: Bench, source: str, options: dict[str, str], feed_once: Callable[[], None]) -> float:
    frame = bench.spark.readStream.format(source).options(**options).load()
    checkpoint = str(bench.directory / f"ck{next(_names)}")
    query = frame.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
    deadline_s = time.monotonic() + LATENCY_S
    while time.monotonic() < deadline_s:
        feed_once()
    times = [one["durationMs"]["triggerExecution"] for one in query.recentProgress if one["numInputRows"]]
    query.stop()
    return float(statistics.median(times[len(times) // 4 :]))  # the first ones are cold


def bench_cold(bench: Bench) -> list[Row]:
    with connect(bench.nodes) as cluster:
        cluster.create_topic("cold", partitions=1)
        cluster.producer("cold").send_many([b"x" * 100] * 1000).result()
    where = ("--servers", bench.servers, "--topic", "cold", "--to", str(bench.directory / "cold"))
    own = seconds_of(lambda: run_python("-m", "quiver", "pipeline", "archive", *where, "--once"))
    bare = "import quiver.spark; quiver.spark.session(master='local[2]', is_short=True).range(1).count()"
    limit = seconds_of(lambda: run_python("-c", bare))
    return [Row("`quiver pipeline archive --once`, whole process", own, "s", limit, 15)]


def run_python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# -- against Kafka -------------------------------------------------------------------------------------


def bench_kafka(bench: Bench, kafka: Kafka) -> list[Row]:
    """Read the same number of records from Kafka and from Quiver, alternately."""
    rows = []
    for (name, size), target in zip(SIZES.items(), (3, 2), strict=True):
        kafka.fill(topic_of(size), partitions=PARTITIONS, records=bench.records[size], size=size)
        options = {"kafka.bootstrap.servers": kafka.address, "subscribe": topic_of(size)}
        theirs, ours = 0.0, 0.0
        for _ in range(ROUNDS):
            frame = bench.spark.read.format("kafka").options(**options).load()
            theirs = max(theirs, bench.rate(size, lambda frame=frame: to_noop(frame), rounds=1))  # type: ignore[misc] # bound
            ours = max(ours, bench.rate(size, lambda size=size: to_noop(bench.read(size)), rounds=1))  # type: ignore[misc] # bound
        rows.append(rate_row("Spark's own source reading Kafka", size, theirs, limit=None, targets=(None, None)))
        rows.append(Row(f"ours as a multiple of it, {name}", ours / theirs, "x/s", None, target))
    return rows


PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "read": bench_read,
    "stream": bench_stream,
    "sink": bench_sink,
    "archive": bench_archive,
    "audit": bench_audit,
    "latency": bench_latency,
    "cold": bench_cold,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure Quiver on Spark.")
    parser.add_argument("--records", type=int, default=2_000_000, help="short records; of long ones as many bytes")
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--kafka", action="store_true", help="read from Kafka, too, which Maven has to fetch first")
    options = parser.parse_args()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    with ExitStack() as stack:
        directory = stack.enter_context(disk_directory())
        config = {"spark.log.level": "OFF"} | ({"spark.jars": fetch_connector(directory)} if options.kafka else {})
        spark = quiver.spark.session("bench", master="local[2]", config=config)
        stack.callback(spark.stop)
        spark.dataSource.register(CeilingSource)
        bench = Bench(stack.enter_context(running_nodes(1)), spark, options.records, directory)
        bench.fill()
        to_noop(bench.read(1024))  # start the workers, find the leaders
        rows = [row for name, part in PARTS.items() if name in (options.only or PARTS) for row in part(bench)]
        if options.kafka:
            rows += bench_kafka(bench, stack.enter_context(Kafka(directory / "kafka").running()))
        return show(rows, title="Quiver on Spark: local[2], one node, four partitions, fsync on")


if __name__ == "__main__":
    sys.exit(main())
