"""A driver to be killed: copies one topic into another, in small batches, until it has all that was there."""

from __future__ import annotations

import os
import sys

import spark_faults
from pyspark import cloudpickle

import quiver.spark


def main(servers: str, source: str, target: str, checkpoint: str, master: str = "local[2]", way: str = "") -> None:
    os.environ[spark_faults.DRIVER_GROUP] = str(os.getpgid(0))
    spark = quiver.spark.session("copy", master=master, is_short=True)
    sink, fault = ("quiver-faulty", {"fault": way}) if ":" in way else ("quiver", {})
    if fault:
        cloudpickle.register_pickle_by_value(spark_faults)  # type: ignore[no-untyped-call]
        spark.dataSource.register(spark_faults.FaultySource)
    if way == "ship":
        quiver.spark.ship(spark)
    spark.sparkContext.setLogLevel("OFF")
    frame = (
        spark.readStream.format("quiver")
        .options(servers=servers, subscribe=source, startingOffsets="earliest", maxOffsetsPerTrigger="400")
        .load()
    )
    query = (
        frame.select("value", "partition")
        .writeStream.format(sink)
        .options(servers=servers, topic=target, checkpointLocation=checkpoint, **fault)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
