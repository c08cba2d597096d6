"""A driver to be killed: copies one topic into another, in small batches, until it has all that was there."""

from __future__ import annotations

import sys

import quiver.spark


def main(servers: str, source: str, target: str, checkpoint: str, master: str = "local[2]", way: str = "") -> None:
    spark = quiver.spark.session("copy", master=master, is_short=True)
    if way == "ship":
        quiver.spark.ship(spark)
    elif way:
        spark.sparkContext.addPyFile(way)
    spark.sparkContext.setLogLevel("OFF")
    frame = (
        spark.readStream.format("quiver")
        .options(servers=servers, subscribe=source, startingOffsets="earliest", maxOffsetsPerTrigger="400")
        .load()
    )
    query = (
        frame.select("value", "partition")
        .writeStream.format("quiver")
        .options(servers=servers, topic=target, checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
