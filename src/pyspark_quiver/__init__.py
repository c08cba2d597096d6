"""Spark finds data sources by itself in modules that are called `pyspark_*`: this one names ours, and nothing else.

It lets `spark.read.format("quiver")` work without `quiver.spark.register`, also from SQL and Spark Connect, wherever
the driver's Python has Quiver installed. It is not found in what `--py-files` ships: register there.
"""

from __future__ import annotations

from quiver.spark.source import QuiverDataSource as DefaultSource

__all__ = ["DefaultSource"]
