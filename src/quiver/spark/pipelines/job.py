"""What a job is, and what it has of the process that it runs in."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from quiver.errors import RequestError
from quiver.spark.options import Servers

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


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended: for people, and for programs."""

    sentence: str
    facts: dict[str, object] = {}
    is_clean: bool = True
    """False: the job looked for something that should not be, and found it."""
    is_complete: bool = True
    """False: it was told to stop before it had done what it was asked for."""


class Run:
    """What a job has of its process: a Spark session, a way to tell how far it is, and the wish that it stop."""

    def __init__(self, open_session: Callable[[], SparkSession], *, tell: Callable[[JobProgress], None]) -> None:
        self._open_session = open_session
        self._spark: SparkSession | None = None
        self.tell = tell
        self.stop_signal: int | None = None
        """The signal that asked the job to stop."""

    @property
    def spark(self) -> SparkSession:
        """Return the session; it is made when it is first needed, since that takes seconds."""
        if self._spark is None:
            self.tell(JobProgress("starting Spark"))
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
            self.tell(JobProgress(phrase, sum(counts.values()), lines=show()))
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
    def run(self, run: Run) -> Result:
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
