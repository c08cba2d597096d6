"""What a job is, and what it has of the process that it runs in."""

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
"""How soon a job that waits notices that it is to stop."""
BATCH_END_S: Final = 30.0
"""How long a query that is to stop may take to end its micro-batch; a batch that is cut off is done again."""


def option_name(field: str) -> str:
    """Return how a field is called on the command line, without its dashes, and in a job file."""
    return field.removeprefix("is_").removesuffix("_").replace("_", "-")


class JobProgress(msgspec.Struct, frozen=True):
    """How far a job is: what it does, and how much of that is done, of how much, if that is known."""

    phrase: str
    done: int = 0
    total: int | None = None
    noun: str = "record"
    lines: tuple[str, ...] = ()
    """What else there is to see, for who watches."""


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended: for people, and for programs."""

    sentence: str
    facts: dict[str, object] = {}
    is_clean: bool = True
    """False: the job looked for something that should not be, and found it."""
    is_complete: bool = True
    """False: it was told to stop before it had done what it was asked for."""


class JobRun:
    """What a job has of its process: a Spark session, a way to tell how far it is, and the wish that it stop."""

    def __init__(
        self, open_session: Callable[[], SparkSession], *, report_progress: Callable[[JobProgress], None]
    ) -> None:
        self._open_session = open_session
        self._spark: SparkSession | None = None
        self.report_progress = report_progress
        self.stop_signal: int | None = None
        """The signal that asked the job to stop."""

    @property
    def spark(self) -> SparkSession:
        """Return the session; it is made when it is first needed, since that takes seconds."""
        if self._spark is None:
            self.report_progress(JobProgress("starting Spark"))
            self._spark = self._open_session()
        return self._spark

    @property
    def is_stopping(self) -> bool:
        """Tell whether the job is to end as soon as what it has begun is done."""
        return self.stop_signal is not None

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until the job is to stop; tell whether it is to go on."""
        # No event that a signal handler sets: the handler may run while this very thread holds the event's lock.
        deadline_s = time.monotonic() + seconds
        while not self.is_stopping and (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left_s))
        return not self.is_stopping

    def follow(self, query: StreamingQuery, phrase: str, show: Callable[[], tuple[str, ...]] = tuple) -> None:
        """Return when a query has ended; one that is to stop may end its micro-batch first. `show` is told as well."""
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

    A subclass checks what it is given in `__post_init__`, with a `RequestError` for what cannot be.
    """

    starts_fast: ClassVar[bool] = True
    """Whether Spark's own work is so little that it should start quickly rather than compute quickly."""

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
        """Do the job, or what is left of it."""

    def cluster_servers(self) -> Servers:
        """Return how the cluster is reached."""
        addresses = tuple(part.strip() for part in self.servers.split(",") if part.strip())
        if not addresses:
            raise RequestError("servers names no node: give host:port, several with commas between", code="bad_option")
        return Servers(
            addresses=addresses,
            is_tls=self.is_tls,
            ca_file=self.ca_file,
            certificate_file=self.certificate_file,
            key_file=self.key_file,
        )

    def source_options(self) -> dict[str, str]:
        """Return how the cluster is reached, as options of `format("quiver")`."""
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
"""Where each job is: the module and the struct in it. Loaded when it is run, with the libraries that it needs."""
_NAME_KEY: Final = "job"


def make_job(name: str, given: Mapping[str, Any]) -> Job:
    """Return a job with the options given, by their names; raise `RequestError` (`bad_option`) for what cannot be."""
    kind = _find(name)
    known = msgspec.structs.fields(kind)
    unknown = sorted(given.keys() - {field.encode_name for field in known})
    if unknown:
        names = ", ".join(sorted(field.encode_name for field in known))
        raise _bad(f"{name} has no option {', '.join(map(repr, unknown))}; there are {names}")
    missing = [field.encode_name for field in known if field.required and field.encode_name not in given]
    if missing:
        raise _bad(f"{name} needs {', '.join(missing)}")
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise _bad(f"an option of {name} cannot be used: {error}") from None


def job_from_file(text: str, instead: Mapping[str, Any] = MappingProxyType({})) -> tuple[str, Job]:
    """Return the name and the job that a job file describes, but for some options; raise `RequestError` if it is none.

    Options in `instead`, by their names, come before those in the file.
    """
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"the job file is not TOML: {error}", code="bad_job_file") from None
    name = given.pop(_NAME_KEY, None)
    if not isinstance(name, str):
        raise RequestError(
            f'the job file does not say which job it is: {_NAME_KEY} = "NAME"; {_names()}', code="bad_job_file"
        )
    return name, make_job(name, {**given, **instead})


def _find(name: str) -> type[Job]:
    if name not in JOBS:
        raise RequestError(f"there is no job {name!r}; {_names()}", code="unknown_job")
    module, _, kind = JOBS[name].partition(":")
    found: type[Job] = getattr(import_module(module), kind)
    return found


def _names() -> str:
    return f"jobs are {', '.join(sorted(JOBS))}"


def _bad(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_option")
