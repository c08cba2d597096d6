"""Entry point of Spark's data source discovery: Spark imports modules named `pyspark_*` and reads `DefaultSource`.

`spark.read.format("quiver")` works without `quiver.spark.register`, also from SQL and Spark Connect, if the driver's
Python has Quiver installed. Discovery does not search files shipped with `--py-files`: call `register` there.
"""

from __future__ import annotations

from quiver.spark.source import QuiverDataSource as DefaultSource

__all__ = ["DefaultSource"]
