"""Quiver for Spark: the data source `format("quiver")`, and what makes a session for it.

    spark = quiver.spark.session()
    logs = spark.read.format("quiver").option("servers", "127.0.0.1:8002").option("subscribe", "logs").load()

The only package that imports pyspark (the extra `spark`). It uses the SDK's public face: to a cluster it is a client
like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quiver.spark.session import session
from quiver.spark.source import QuiverDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["QuiverDataSource", "register", "session", "ship"]


def register(spark: SparkSession) -> SparkSession:
    """Make `format("quiver")` known to a session, and return it."""
    spark.dataSource.register(QuiverDataSource)
    return spark


def ship(spark: SparkSession) -> None:
    """Give executors this package, as `--py-files` would, where it is not installed; call it before the first query.

    Example:
        spark = quiver.spark.session(master="spark://host:7077")
        quiver.spark.ship(spark)
    """
    from quiver.spark.shipping import find_package

    spark.sparkContext.addPyFile(str(find_package()))
    register(spark)  # a source takes along what there was when it became known
