"""Quiver for Spark: the data source `format("quiver")` and a ready-made session.

    spark = quiver.spark.session()
    logs = spark.read.format("quiver").option("servers", "127.0.0.1:8002").option("subscribe", "logs").load()

This is the only package that imports pyspark (the extra `spark`). It uses only the public SDK: to a cluster it is an
ordinary client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quiver.spark.session import session
from quiver.spark.source import QuiverDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["QuiverDataSource", "register", "session", "ship"]


def register(spark: SparkSession) -> SparkSession:
    """Register `format("quiver")` with a session and return the session."""
    spark.dataSource.register(QuiverDataSource)
    return spark


def ship(spark: SparkSession) -> None:
    """Ship this package to executors that do not have it installed, as `--py-files` does; call before the first query.

    Example:
        spark = quiver.spark.session(master="spark://host:7077")
        quiver.spark.ship(spark)
    """
    from quiver.spark.shipping import find_package

    spark.sparkContext.addPyFile(str(find_package()))
    register(spark)  # Spark pickles the source at registration: it must see the shipped zip
