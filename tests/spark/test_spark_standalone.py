"""A real Spark cluster, with executors that share nothing with the driver but the machine: the same job, unchanged.

What executors know of this package comes to them in each of the ways that the guide tells: installed, shipped by the
driver, as `--py-files`, in a packed environment. For the last three they run a Python without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from spark_queries import fill

import quiver
from quiver.spark.shipping import write_package
from quiver.spark.standalone import StandaloneCluster
from quiver.testing import LocalCluster

JOB = Path(__file__).parent / "shared" / "spark_copy_job.py"
SOURCES = Path(quiver.__file__).parent.parent
TIMEOUT_S = 400
NEEDED = ("msgspec*", "pyarrow*", "numpy*", "fastcrc*", "lz4*", "zstandard*")
"""What the package itself needs, as far as executors use it."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def standalone() -> Iterator[StandaloneCluster]:
    with StandaloneCluster(cores=2, memory="1g", environment=without_us(os.environ)) as cluster:
        yield cluster


def without_us(environment: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Leave out what leads to this package, and what the session of other tests has set for itself."""
    return {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "SPARK_HOME")}


def bare_python(folder: Path, *names: str) -> Path:
    """Make a Python that has what is installed here but this package; with `names`, copies of those alone.

    Copies are as old as what they are copies of: else all of it would be compiled again by a worker that Spark awaits.
    """
    venv.create(folder, symlinks=not names, with_pip=False)  # Spark unpacks no link that leads elsewhere
    here = Path(sysconfig.get_path("purelib"))
    (there,) = folder.glob("lib/python*/site-packages")
    for entry in [entry for name in names or ("*",) for entry in here.glob(name)]:
        if "quiver" in entry.name or (there / entry.name).exists():
            continue
        if names:
            subprocess.run(["cp", "-rp", str(entry), str(there)], check=True)
        else:
            (there / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def run_copy(
    standalone: StandaloneCluster,
    local: LocalCluster,
    topic: str,
    folder: Path,
    *,
    way: str = "",
    python: str = sys.executable,
    cwd: Path | None = None,
    spark_options: str = "",
) -> None:
    servers, checkpoint = ",".join(local.addresses), str(folder / "checkpoint")
    arguments = [sys.executable, str(JOB), servers, f"{topic}-in", topic, checkpoint, standalone.master, way]
    environment = without_us(os.environ) | {"PYTHONPATH": str(SOURCES), "PYSPARK_PYTHON": python}
    if spark_options:
        environment["PYSPARK_SUBMIT_ARGS"] = f"{spark_options} pyspark-shell"
    done = subprocess.run(
        arguments, env=environment, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if not line.startswith("\tat "))


def values(client: quiver.Cluster, topic: str) -> list[list[bytes | None]]:
    ends = client.offsets(topic).offsets
    return [
        [value for batch in client.read_range(topic, partition, 0, end) for value in batch.values()]
        for partition, end in sorted(ends.items())
    ]


@pytest.fixture
def copied(client: quiver.Cluster, topic: str) -> Iterator[str]:
    """A topic that a job is to fill with what another one holds; looked at in the end."""
    fill(client, f"{topic}-in", 700, 500)
    client.create_topic(topic, partitions=2)
    yield topic
    assert values(client, topic) == values(client, f"{topic}-in")


def test_job_runs_on_a_cluster_where_the_package_is_installed(
    standalone: StandaloneCluster, local: LocalCluster, copied: str, folder: Path
) -> None:
    python = bare_python(folder / "python")
    (installed,) = (folder / "python").glob("lib/python*/site-packages")
    (installed / "quiver").symlink_to(SOURCES / "quiver")
    run_copy(standalone, local, copied, folder, python=str(python))


def test_driver_ships_the_package(
    standalone: StandaloneCluster, local: LocalCluster, copied: str, folder: Path
) -> None:
    run_copy(standalone, local, copied, folder, way="ship", python=str(bare_python(folder / "python")))


def test_package_comes_as_py_files(
    standalone: StandaloneCluster, local: LocalCluster, copied: str, folder: Path
) -> None:
    package = write_package(folder / "quiver.zip")
    python = bare_python(folder / "python")
    run_copy(standalone, local, copied, folder, python=str(python), spark_options=f"--py-files {package}")


def test_package_comes_in_a_packed_environment(
    standalone: StandaloneCluster, local: LocalCluster, copied: str, folder: Path
) -> None:
    bare_python(folder / "env", *NEEDED)
    (installed,) = (folder / "env").glob("lib/python*/site-packages")
    subprocess.run(["cp", "-rp", str(SOURCES / "quiver"), str(installed)], check=True)
    with tarfile.open(folder / "env.tar.gz", "w:gz", compresslevel=1) as packed:
        for entry in (folder / "env").iterdir():
            packed.add(entry, arcname=entry.name)
    run_copy(
        standalone,
        local,
        copied,
        folder,
        python="./env/bin/python",
        cwd=folder,
        spark_options=f"--archives {folder / 'env.tar.gz'}#env",
    )
