"""`format("quiver-faulty")`: the source and sink as they are, with a commit that fails, or kills its driver, once.

Option `fault` is `WHEN:HOW:FILE`. WHEN is `before` or `after` what the commit of the second batch does; HOW is `raise`,
or `kill`, which ends the whole group of processes of the driver at that very point. FILE is made when it has happened.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from quiver.spark import QuiverDataSource
from quiver.spark.options import SourceMode, WriteOptions, write_options
from quiver.spark.sink import StreamWriter

DRIVER_GROUP = "QUIVER_TEST_DRIVER_GROUP"
"""The variable that tells workers, which have a group of their own, the group of their driver."""
BATCH = 1


class FaultySource(QuiverDataSource):
    """The data source with a fault in its sink."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__({name: value for name, value in options.items() if name.lower() != "fault"})
        self._fault = {name.lower(): value for name, value in options.items()}.get("fault", "")

    @classmethod
    def name(cls) -> str:
        return "quiver-faulty"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        return FaultyWriter(write_options(self._given, SourceMode.STREAM_WRITE), self._fault)


class FaultyWriter(StreamWriter):
    """The writer with a fault in its commit."""

    def __init__(self, options: WriteOptions, fault: str) -> None:
        super().__init__(options)
        self._when, self._how, path = fault.split(":", 2)
        self._path = Path(path)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        self._strike("before", batchId)
        super().commit(messages, batchId)
        self._strike("after", batchId)

    def _strike(self, when: str, batch: int) -> None:
        if batch != BATCH or when != self._when or self._path.exists():
            return
        self._path.touch()
        if self._how == "kill":
            os.killpg(int(os.environ[DRIVER_GROUP]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the commit fails")
