"""Pipelines in tests on Spark: jobs in the shared session, and whole commands as processes that can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

import quiver
from quiver.spark.pipelines import Job, JobResult, JobRun
from quiver.spark.pipelines.lake import FILE_SCHEMA, open_lake, read_in_order
from quiver.spark.pipelines.place import Place
from quiver.testing import LocalCluster

Content = list[tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]]


def run_job(spark: SparkSession, job: Job) -> JobResult:
    """Do a job in a session that is there."""
    return job.run(JobRun(lambda: spark, report_progress=lambda _: None))


def start(local: LocalCluster, *arguments: str) -> subprocess.Popen[str]:
    """Start a pipeline as its users do, in a group of its own."""
    command = [sys.executable, "-m", "quiver", "pipeline", *arguments]
    command += ["--servers", ",".join(local.addresses), "--master", "local[2]"]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> None:
    """End a command and all its processes as a power failure would."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def in_topic(client: quiver.Cluster, topic: str, partition: int) -> Content:
    """Return all records of a partition, in order."""
    end = client.offsets(topic).offsets[partition]
    return [
        (record.timestamp, record.key, record.value, list(record.headers or ()))
        for batch in client.read_range(topic, partition, 0, end)
        for record in batch.records()
    ]


def in_lake(place: str | Place, topic: str, partition: int) -> Content:
    """Return all archived records of a partition, in order; fail if an offset is missing or there twice."""
    lake = open_lake(Place(place) if isinstance(place, str) else place)
    files = [file for file in lake.files(topic) if file.partition == partition]
    rows: list[dict[str, Any]] = pa.Table.from_batches(read_in_order(lake.place, files), FILE_SCHEMA).to_pylist()
    assert [row["offset"] for row in rows] == list(range(len(rows)))
    return [
        (
            round(row["timestamp"].timestamp() * 1000),
            row["key"],
            row["value"],
            [(header["key"], header["value"]) for header in row["headers"] or ()],
        )
        for row in rows
    ]
