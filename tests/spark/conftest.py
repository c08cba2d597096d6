"""One Spark session and one cluster for the whole run: a session costs more than all that a test does with it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from object_store import CREDENTIALS
from walkthrough import make_environment

import quiver
from quiver.testing import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session", autouse=True)
def credentials() -> Iterator[None]:
    """Set credentials of object stores before Spark starts: tasks take them from the environment of its processes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    import quiver.spark

    session = quiver.spark.session("tests", master="local[2,2]", is_short=True)
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def local() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1, settings={"partition.retention_interval_ms": "200"}) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def client(local: LocalCluster) -> Iterator[quiver.Cluster]:
    with local.connect() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with Quiver from a wheel."""
    return make_environment(tmp_path_factory.mktemp("newcomer"))


@pytest.fixture
def topic() -> str:
    """A name that no other test uses."""
    return f"t-{uuid4().hex[:12]}"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of its own, also for what Spark writes into it after the test has ended."""
    path = Path(tempfile.mkdtemp(prefix="quiver-spark-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
