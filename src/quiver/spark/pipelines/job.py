"""Jobs: their options, results and progress, and how they are created from flags or job files.

A job file is TOML: `job` names the job, every other key is one of its options, named as on the command line.

    job = "archive"
    topic = "logs"
    to = "/srv/lake"
    every = "10s"
"""

from __future__ import annotations

import time
import tomllib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from quiver.errors import RequestError
from quiver.spark.connections import Servers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

POLL_S: Final = 0.2
"""Poll interval for the stop signal while a job waits."""
BATCH_END_S: Final = 30.0
"""Time that a stopping query has to finish its micro-batch; an interrupted batch is repeated by the next run."""


def option_name(field: str) -> str:
    """Return the option name of a field, as in job files and, with two dashes, on the command line."""
    return field.removeprefix("is_").removesuffix("_").replace("_", "-")


class JobProgress(msgspec.Struct, frozen=True):
    """The progress of a job: what it does, how much is done, and the total if known."""

    phrase: str
    done: int = 0
    total: int | None = None
    noun: str = "record"
    lines: tuple[str, ...] = ()
    """More lines to display, such as live counts."""


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job: a sentence for people, fields for programs."""

    sentence: str
    facts: dict[str, object] = {}
    is_clean: bool = True
    """False: the job checked something and found a problem."""
    is_complete: bool = True
    """False: the job was stopped before its end."""


class JobRun:
    """The environment of a running job: Spark session, progress callback, stop signal."""

    def __init__(
        self, open_session: Callable[[], SparkSession], *, report_progress: Callable[[JobProgress], None]
    ) -> None:
        self._open_session = open_session
        self._spark: SparkSession | None = None
        self.report_progress = report_progress
        self.stop_signal: int | None = None
        """The signal that stops the job; None while it runs."""

    @property
    def spark(self) -> SparkSession:
        """Return the session; open it on first use, since that takes seconds."""
        if self._spark is None:
            self.report_progress(JobProgress("starting Spark"))
            self._spark = self._open_session()
        return self._spark

    @property
    def is_stopping(self) -> bool:
        """Return whether the job must stop after its current batch."""
        return self.stop_signal is not None

    def wait(self, seconds: float) -> bool:
        """Wait for a time or until the job must stop; return False if it must stop."""
        # Poll instead of threading.Event: the signal handler could run while this thread holds the event's lock.
        deadline_s = time.monotonic() + seconds
        while not self.is_stopping and (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left_s))
        return not self.is_stopping

    def follow(self, query: StreamingQuery, phrase: str, show: Callable[[], tuple[str, ...]] = tuple) -> None:
        """Wait until a query ends and report its progress; on a stop signal let it finish its micro-batch first."""
        counts: dict[int, int] = {}
        while not query.awaitTermination(POLL_S):  # type: ignore[arg-type] # Spark takes fractions, too
            counts |= {progress["batchId"]: progress["numInputRows"] for progress in query.recentProgress}
            self.report_progress(JobProgress(phrase, sum(counts.values()), lines=show()))
            if self.is_stopping:
                _end(query)
                return


def _end(query: StreamingQuery) -> None:
    deadline_s = time.monotonic() + BATCH_END_S
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    query.stop()


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=option_name):
    """A pipeline with its options, which are flags on the command line and keys in a job file.

    A subclass checks its options in `__post_init__` and raises `RequestError` for invalid ones.
    """

    starts_fast: ClassVar[bool] = True
    """Whether Spark should start fast rather than compute fast."""

    servers: str = "127.0.0.1:8002"
    is_tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    master: str = "local[*]"
    conf: dict[str, str] = {}
    is_dry_run: bool = False

    @abstractmethod
    def run(self, run: JobRun) -> JobResult:
        """Run the job, or resume it."""

    def cluster_servers(self) -> Servers:
        """Return the addresses and TLS files of the cluster."""
        addresses = tuple(part.strip() for part in self.servers.split(",") if part.strip())
        if not addresses:
            raise RequestError(
                "servers is empty: set it to host:port, or several separated by commas", code="bad_option"
            )
        return Servers(
            addresses=addresses,
            is_tls=self.is_tls,
            ca_file=self.ca_file,
            certificate_file=self.certificate_file,
            key_file=self.key_file,
        )

    def source_options(self) -> dict[str, str]:
        """Return the addresses and TLS files of the cluster as options of `format("quiver")`."""
        files = {"caFile": self.ca_file, "certificateFile": self.certificate_file, "keyFile": self.key_file}
        given = {name: path for name, path in files.items() if path}
        return {"servers": self.servers, "tls": str(self.is_tls).lower(), **given}


JOBS: Final = {
    "analyze": "quiver.spark.pipelines.analyze:Analyze",
    "archive": "quiver.spark.pipelines.archive:Archive",
    "audit": "quiver.spark.pipelines.audit:Audit",
    "ingest": "quiver.spark.pipelines.ingest:Ingest",
    "replay": "quiver.spark.pipelines.replay:Replay",
}
"""Module and struct of each job; imported when it runs, since each needs different libraries."""
_NAME_KEY: Final = "job"


def make_job(name: str, given: Mapping[str, Any]) -> Job:
    """Create a job from options by name; raise `RequestError` (`bad_option`) if one is invalid."""
    kind = _find(name)
    known = msgspec.structs.fields(kind)
    unknown = sorted(given.keys() - {field.encode_name for field in known})
    if unknown:
        names = ", ".join(sorted(field.encode_name for field in known))
        raise _bad(f"unknown option {', '.join(map(repr, unknown))} of job {name}; its options are {names}")
    missing = [field.encode_name for field in known if field.required and field.encode_name not in given]
    if missing:
        raise _bad(f"job {name} needs the options {', '.join(missing)}")
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise _bad(f"invalid option of job {name}: {error}") from None


def job_from_file(text: str, instead: Mapping[str, Any] = MappingProxyType({})) -> tuple[str, Job]:
    """Parse a job file; return the job's name and the job. Raise `RequestError` if the file is invalid.

    Options in `instead` override those in the file.
    """
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"the job file is not TOML: {error}", code="bad_job_file") from None
    name = given.pop(_NAME_KEY, None)
    if not isinstance(name, str):
        raise RequestError(
            f'the job file does not name a job: add {_NAME_KEY} = "NAME"; {_names()}', code="bad_job_file"
        )
    return name, make_job(name, {**given, **instead})


def _find(name: str) -> type[Job]:
    if name not in JOBS:
        raise RequestError(f"unknown job {name!r}; {_names()}", code="unknown_job")
    module, _, kind = JOBS[name].partition(":")
    found: type[Job] = getattr(import_module(module), kind)
    return found


def _names() -> str:
    return f"jobs are {', '.join(sorted(JOBS))}"


def _bad(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_option")
