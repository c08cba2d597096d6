"""Jobs: their options, results and progress, their creation from flags or job files, and their execution.

A job file is TOML: `job` names the job, every other key is one of its options, named as on the command line.

    job = "archive"
    topic = "logs"
    to = "/srv/lake"
    every = "10s"

`execute` runs a job in this process: it opens the Spark session, handles signals and translates Spark's errors. SIGINT
and SIGTERM ask a job to stop after its current batch; a second signal stops it immediately. Either way, and after
SIGKILL, the next run resumes: an interrupted batch was never committed.

Spark wraps an exception of a task or planner into the text of its own error, with Java and Python traces.
`to_quiver_error` returns the last Quiver error in that text, else the last line of a Python error, else the last cause
in Java.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
import tomllib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from quiver import errors
from quiver.errors import QuiverError, RequestError, UnavailableError
from quiver.spark.connections import Servers, connection, find_servers
from quiver.spark.pipelines.place import parse_output_file
from quiver.spark.pipelines.registration import RunRegistration
from quiver.spark.session import session

if TYPE_CHECKING:
    from types import FrameType

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
    lag: int | None = None
    """Records of the topic, as far as it went when the job last looked, that are not done yet; None if unknown."""


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
        self,
        open_session: Callable[[], SparkSession],
        *,
        report_progress: Callable[[JobProgress], None],
        report_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """`report_idle` is called now and then while the job waits for records."""
        self._open_session = open_session
        self._report_idle = report_idle
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
            self._report_idle()
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

    servers: str = ""
    context: str = ""
    timeout: float = 60.0
    is_tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    token_file: str = ""
    user: str = ""
    password_file: str = ""
    master: str = "local[*]"
    conf: dict[str, str] = {}
    is_dry_run: bool = False
    is_register: bool = False
    """Whether the run describes itself in the topic that the console shows."""

    @abstractmethod
    def run(self, run: JobRun) -> JobResult:
        """Run the job, or resume it."""

    def cluster_servers(self) -> Servers:
        """Return the addresses, TLS files and credentials of the cluster."""
        return find_servers(
            self.servers,
            context=self.context,
            tls=self.is_tls,
            ca_file=self.ca_file,
            certificate_file=self.certificate_file,
            key_file=self.key_file,
            token_file=self.token_file,
            user=self.user,
            password_file=self.password_file,
            timeout_s=self.timeout,
        )

    def source_options(self) -> dict[str, str]:
        """Return the addresses and files of the cluster as options of `format("quiver")`."""
        found = self.cluster_servers()
        files = {
            "caFile": found.ca_file,
            "certificateFile": found.certificate_file,
            "keyFile": found.key_file,
            "tokenFile": found.token_file,
            "user": found.user,
            "passwordFile": found.password_file,
        }
        given = {name: path for name, path in files.items() if path}
        named = {"servers": ",".join(found.addresses), "tls": str(found.is_tls).lower()}
        return {**named, "timeout": f"{round(1000 * self.timeout)}ms", **given}


JOBS: Final = {
    "analyze": "quiver.spark.pipelines.analyze:Analyze",
    "archive": "quiver.spark.pipelines.archive:Archive",
    "audit": "quiver.spark.pipelines.audit:Audit",
    "ingest": "quiver.spark.pipelines.ingest:Ingest",
    "parse": "quiver.spark.pipelines.parse:Parse",
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

    Options in `instead` override those in the file; a context replaces everything in the file that names a cluster.
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
    if "context" in instead:
        given = {key: value for key, value in given.items() if key not in _CLUSTER_KEYS}
    elif "servers" in instead:
        given.pop("context", None)
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


_CLUSTER_KEYS: Final = frozenset(
    ("servers", "context", "tls", "ca-file", "certificate-file", "key-file", "token-file", "user", "password-file")
)
"""Options of a job that name its cluster and prove who runs it."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_QUIET = {"spark.log.level": "OFF"}
_STDERR: Final = 2
STDERR_LINES_MAX: Final = 10
"""Last lines of Spark's output that are shown if it does not start."""


def execute(name: str, job: Job, *, report_progress: Callable[[JobProgress], None]) -> tuple[JobResult, int | None]:
    """Run a job in the main thread; return its result, and the signal that stopped it, if any.

    Raises:
        QuiverError: the job failed; committed batches stay, and the next run resumes after them.
        KeyboardInterrupt: a second signal arrived.
    """

    def open_session() -> SparkSession:
        with _capturing_stderr():
            opened = session(f"quiver-{name}", master=job.master, is_short=job.starts_fast, config=_QUIET | job.conf)
        _install_handlers(run)  # again: starting Spark replaces the SIGINT handler
        return opened

    def report(progress: JobProgress) -> None:
        if registration is not None:
            lag = {} if progress.lag is None else {"lag": progress.lag}
            registration.note(records=progress.done or None, verdict=progress.phrase, **lag)
        report_progress(progress)

    registration = _make_registration(name, job) if job.is_register and not job.is_dry_run else None
    idle = (lambda: None) if registration is None else registration.note_idle
    run = JobRun(open_session, report_progress=report, report_idle=idle)
    with registration or nullcontext():
        result = _run_to_its_end(job, run)
        if registration is not None:
            registration.note(**_describe_result(name, result))
    return result, run.stop_signal


def _make_registration(name: str, job: Job) -> RunRegistration:
    topics = tuple(topic for field in ("topic", "to_topic") if (topic := getattr(job, field, "")))
    return RunRegistration(
        lambda: connection(job.cluster_servers()),
        name,
        topics=topics,
        report=_report_path(job),
        options=msgspec.json.encode(job),
    )


def _report_path(job: Job) -> str:
    report = getattr(job, "report", "")
    return parse_output_file(report, option="report") if report else ""


def _describe_result(name: str, result: JobResult) -> dict[str, Any]:
    """Return what a run says of itself at its end; a job that checks something passes or fails."""
    records = result.facts.get("records")
    state = "failed" if not result.is_clean else "stopped" if not result.is_complete else "done"
    return {
        "state": "passed" if state == "done" and name == "audit" else state,
        "verdict": result.sentence.partition("\n")[0][:500],
        **({"records": records} if isinstance(records, int) else {}),
    }


def _run_to_its_end(job: Job, run: JobRun) -> JobResult:
    with _handling_signals(run):
        try:
            return job.run(run)
        except (PySparkException, Py4JError) as error:
            if run.stop_signal is None:
                raise to_quiver_error(error) from None
            # A signal to the process group also stops Spark: the batch fails and was not committed.
            return JobResult(
                sentence="stopped: the current batch was not committed; run the same command to resume",
                is_complete=False,
            )


@contextmanager
def _capturing_stderr() -> Iterator[None]:
    """Redirect standard error of the started processes to a file; raise with its last lines if they do not start.

    Java and Spark always print some irrelevant lines at start; real problems also raise an exception.
    """
    told = sys.stderr
    own = os.dup(_STDERR)
    with tempfile.TemporaryFile() as file, os.fdopen(own, "w", buffering=1) as aside:
        os.dup2(file.fileno(), _STDERR)
        sys.stderr = aside
        try:
            yield
        except QuiverError:
            raise
        except Exception as error:
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()[-STDERR_LINES_MAX:]
            raise UnavailableError("\n  ".join(("Spark did not start", *lines)), code="no_spark") from error
        finally:
            sys.stderr = told
            os.dup2(own, _STDERR)


@contextmanager
def _handling_signals(run: JobRun) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    _install_handlers(run)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _install_handlers(run: JobRun) -> None:
    def handle(number: int, _: FrameType | None) -> None:
        if run.stop_signal is not None:
            raise KeyboardInterrupt
        run.stop_signal = number

    for number in _SIGNALS:
        signal.signal(number, handle)


_OURS: Final = re.compile(r"quiver\.errors\.(\w+): (.+)")
_PYTHON: Final = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception): .+$", flags=re.MULTILINE)
_JAVA: Final = re.compile(r"^(?:Caused by: |: )([\w.]+(?:Error|Exception): .+)$", flags=re.MULTILINE)
SENTENCE_CHARACTERS_MAX: Final = 500


def to_quiver_error(error: Exception) -> QuiverError:
    """Return the Quiver error that caused an error of Spark; the failed batch was not committed."""
    if isinstance(error, QuiverError):
        return error
    text = str(error)
    for name, sentence in reversed(_OURS.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, QuiverError):
            return kind(sentence.strip())
    lines = _PYTHON.findall(text) or _JAVA.findall(text) or text.splitlines() or [type(error).__name__]
    sentence = f"Spark could not run the job: {lines[-1].strip()[:SENTENCE_CHARACTERS_MAX]}"
    return UnavailableError(sentence, code="spark_failed")
