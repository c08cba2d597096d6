"""A Spark session that is ready for Quiver: the right Java and Python, quick to start, on loopback if it is local.

Nothing is set that the caller's environment or `config` sets, too. What a session costs and why these settings is in
`docs/spark.md`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quiver.spark.java import cache_directory, find_java_home, spark_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
}
_LOOPBACK_SETTINGS = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
_LOCAL_SETTINGS = {
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.shuffle.partitions": "8",
}
_QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
_LASTING_JAVA = "-XX:+UseParallelGC"


def session(
    name: str = "quiver",
    *,
    master: str = "local[*]",
    is_short: bool = False,
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a Spark session in which `format("quiver")` is known; an existing one is taken as it is.

    Args:
        name: The application's name.
        master: `local[*]`, `local[4]`, or `spark://host:7077`.
        is_short: Whether the program runs for a minute rather than for days: it then starts faster and runs slower.
        config: Settings of Spark, which come before all that are chosen here.

    Raises:
        ConfigError: there is no Java that is new enough.

    Example:
        spark = quiver.spark.session(master="local[2]")
        spark.read.format("quiver").option("servers", "127.0.0.1:8002").option("subscribe", "logs").load().show()
    """
    from pyspark.sql import SparkSession

    from quiver.spark import register

    for variable, value in environment_for(os.environ, master=master).items():
        os.environ.setdefault(variable, value)
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in settings_for(master, is_short=is_short, config=config or {}).items():
        builder = builder.config(key, value)
    return register(builder.getOrCreate())


def environment_for(environment: Mapping[str, str], *, master: str) -> dict[str, str]:
    """Return the variables that Spark's processes need and that are not set yet.

    Workers must run this very Python: whatever `python3` is on the path may know neither pyarrow nor Quiver.
    """
    cache = cache_directory(environment)
    wanted = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    java_home = find_java_home(environment, cache)
    if java_home is not None:
        wanted["JAVA_HOME"] = java_home
    if is_on_loopback(master):
        wanted["SPARK_LOCAL_IP"] = "127.0.0.1"
    if is_local(master):
        wanted["SPARK_HOME"] = str(spark_home(cache))
    return {name: value for name, value in wanted.items() if name not in environment}


def settings_for(master: str, *, is_short: bool, config: Mapping[str, str]) -> dict[str, str]:
    """Return Spark's settings for a master: ours, then the caller's."""
    settings = _SETTINGS | (_LOOPBACK_SETTINGS if is_on_loopback(master) else {})
    if is_local(master):
        settings |= _LOCAL_SETTINGS
        settings["spark.driver.extraJavaOptions"] = _QUICK_JAVA if is_short else _LASTING_JAVA
    return settings | dict(config)


def is_local(master: str) -> bool:
    """Tell whether a master runs everything in the driver's own process."""
    return master == "local" or master.startswith("local[")


def is_on_loopback(master: str) -> bool:
    """Tell whether everything runs on this machine, and nobody else needs to reach the driver."""
    return is_local(master) or master.startswith(("spark://127.0.0.1:", "spark://localhost:"))
