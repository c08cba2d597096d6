"""A run that registers itself: it describes its state in records of the topic `_pipelines`, which the console shows.

A description is a JSON object; the newest of a run counts. A run is one job with its options, so that starting the same
job again continues its line in the list. A report that the job wrote is copied to a record of `_pipeline_reports`, so
that it can be read without access to the machine that ran the job. Registering is best effort: a job never fails
because of it, and waits for it only a moment at its end.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from quiver.client.sync import Cluster
from quiver.client.sync_producer import Producer
from quiver.errors import QuiverError
from quiver.wire.messages import RetentionInfo

RUNS_TOPIC: Final = "_pipelines"
REPORTS_TOPIC: Final = "_pipeline_reports"
REPORT_BYTES_MAX: Final = 512 * 1024
"""A larger report stays where the job wrote it."""
REPORTS_BYTES_MAX: Final = 256 * 1024 * 1024
"""Reports that are kept; the oldest are dropped."""
RETENTION_MS: Final = 30 * 24 * 3_600_000
EVERY_S: Final = 5.0
"""Time between two descriptions of a running job."""
IDLE_EVERY_S: Final = 20.0
"""Time between two descriptions of a job that waits for records; the console calls a job silent after a minute."""
END_S: Final = 5.0
"""How long the last description is waited for."""
REPORT_S: Final = 30.0
"""How long the copy of a report is waited for."""


class RunDescription(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run says of itself; `GET /pipelines` returns the newest of each run."""

    run: str
    pipeline: str
    state: str
    """running, done, passed, failed or stopped."""
    started_ms: int
    updated_ms: int
    topics: tuple[str, ...] = ()
    records: int | None = None
    lag: int | None = None
    """Records of the topic that the job has not done yet; None if it does not know."""
    verdict: str = ""
    report: str = ""
    """The file that it writes its report to, on the machine that runs it."""
    report_offset: int | None = None
    """Of the record of `_pipeline_reports`, partition 0, that is the report."""


class RunRegistration:
    """Describe one run to the cluster; use as ``with`` around the run."""

    def __init__(
        self,
        connect: Callable[[], Cluster],
        pipeline: str,
        *,
        topics: tuple[str, ...],
        report: str = "",
        options: bytes = b"",
    ) -> None:
        """Prepare to describe a run of `pipeline`; `options` distinguish it from others of the same topics."""
        name = " ".join((pipeline, *topics))
        now_ms = _now_ms()
        self._connect = connect
        self._last = RunDescription(
            run=f"{name} {hashlib.sha256(options).hexdigest()[:6]}",
            pipeline=pipeline,
            state="running",
            started_ms=now_ms,
            updated_ms=now_ms,
            topics=topics,
            report=report,
        )
        self._producer: Producer | None = None
        self._sent_s = 0.0

    def __enter__(self) -> Self:
        try:
            self._producer = self._open()
        except QuiverError:
            return self  # no permission, or no cluster: the job itself says so if it matters
        self._send(is_last=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._last = msgspec.structs.replace(self._last, state="failed", verdict=str(error)[:500])
        else:
            with suppress(QuiverError, TimeoutError, OSError):
                self._copy_report()
        self._send(is_last=True)

    def note(self, **changes: Any) -> None:
        """Change the description; it is sent if the last one is a while ago."""
        self._last = msgspec.structs.replace(self._last, **changes)
        if time.monotonic() - self._sent_s >= EVERY_S:
            self._send(is_last=False)

    def note_idle(self) -> None:
        """Say that the job still runs, if the last description is a long while ago."""
        if time.monotonic() - self._sent_s >= IDLE_EVERY_S:
            self._send(is_last=False)

    def _open(self) -> Producer:
        return self._open_topic(RUNS_TOPIC, RetentionInfo(ms=RETENTION_MS))

    def _open_topic(self, topic: str, retention: RetentionInfo) -> Producer:
        cluster = self._connect()
        if topic not in cluster.list_topics():
            cluster.create_topic(topic, partitions=1, retention=retention, exist_ok=True)
        return cluster.producer(topic, self._last.run, create_topic=False)

    def _copy_report(self) -> None:
        path = Path(self._last.report)
        if self._producer is None or not self._last.report or path.stat().st_size > REPORT_BYTES_MAX:
            return
        report = path.read_bytes()
        with self._open_topic(REPORTS_TOPIC, RetentionInfo(ms=RETENTION_MS, bytes=REPORTS_BYTES_MAX)) as producer:
            place = producer.send(report, self._last.run.encode(), headers={"name": path.name}).result(REPORT_S)
        self._last = msgspec.structs.replace(self._last, report_offset=place.offset)

    def _send(self, *, is_last: bool) -> None:
        if self._producer is None:
            return
        self._sent_s = time.monotonic()
        self._last = msgspec.structs.replace(self._last, updated_ms=_now_ms())
        with suppress(QuiverError, TimeoutError):
            delivery = self._producer.send(msgspec.json.encode(self._last), self._last.run.encode())
            if is_last:
                delivery.result(END_S)
                self._producer.close()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
