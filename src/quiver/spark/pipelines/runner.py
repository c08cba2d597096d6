"""Run a job in this process: open its Spark session, handle signals, translate Spark's errors.

SIGINT and SIGTERM ask a job to stop after its current batch; a second signal stops it immediately. Either way, and
after SIGKILL, the next run resumes: an interrupted batch was never committed.

Spark wraps an exception of a task or planner into the text of its own error, with Java and Python traces.
`to_quiver_error` returns the last Quiver error in that text, else the last line of a Python error.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from quiver import errors
from quiver.errors import QuiverError, UnavailableError
from quiver.spark.pipelines.job import Job, JobProgress, JobResult, JobRun
from quiver.spark.session import session

if TYPE_CHECKING:
    from types import FrameType

    from pyspark.sql import SparkSession

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

    run = JobRun(open_session, report_progress=report_progress)
    with _handling_signals(run):
        try:
            result = job.run(run)
        except (PySparkException, Py4JError) as error:
            if run.stop_signal is None:
                raise to_quiver_error(error) from None
            # A signal to the process group also stops Spark: the batch fails and was not committed.
            result = JobResult(
                sentence="stopped: the current batch was not committed; run the same command to resume",
                is_complete=False,
            )
    return result, run.stop_signal


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
    lines = _PYTHON.findall(text) or text.splitlines() or [type(error).__name__]
    sentence = f"Spark could not run the job: {lines[-1].strip()[:SENTENCE_CHARACTERS_MAX]}"
    return UnavailableError(sentence, code="spark_failed")
