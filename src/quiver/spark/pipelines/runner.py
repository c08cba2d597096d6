"""Run a job in this process: its session, its signals, its end.

SIGINT and SIGTERM ask a job to stop: it ends the batch that it is at, and no other. A second signal does not wait for
that. Either way, and after SIGKILL, the next run goes on where this one was: what is cut off was never committed.
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
"""How much of what Spark said is told when it does not start."""


def execute(name: str, job: Job, *, report_progress: Callable[[JobProgress], None]) -> tuple[JobResult, int | None]:
    """Do a job in the main thread; return how it ended, and the signal that stopped it, if one did.

    Raises:
        QuiverError: the job failed; what it had committed by then stays, and the next run goes on behind it.
        KeyboardInterrupt: it was told twice to stop.
    """

    def open_session() -> SparkSession:
        with _capturing_stderr():
            opened = session(f"quiver-{name}", master=job.master, is_short=job.starts_fast, config=_QUIET | job.conf)
        _install_handlers(run)  # once more: Spark takes SIGINT for itself
        return opened

    run = JobRun(open_session, report_progress=report_progress)
    with _handling_signals(run):
        try:
            result = job.run(run)
        except (PySparkException, Py4JError) as error:
            if run.stop_signal is None:
                raise to_quiver_error(error) from None
            # Whoever sends a signal to the whole group ends Spark under the job: its batch is given up.
            result = JobResult(sentence="stopped; the batch that was under way is given up", is_complete=False)
    return result, run.stop_signal


@contextmanager
def _capturing_stderr() -> Iterator[None]:
    """Let the processes that are started here write their errors into a file; tell its end if they do not start.

    Java and Spark greet with some lines that mean nothing; what matters comes as an exception.
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
            said = file.read().decode(errors="replace").splitlines()[-STDERR_LINES_MAX:]
            raise UnavailableError("\n  ".join(("Spark did not start", *said)), code="no_spark") from error
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
    """Return the error of ours that stands behind one of Spark's; nothing that a job began is lost or half done."""
    if isinstance(error, QuiverError):
        return error
    text = str(error)
    for name, sentence in reversed(_OURS.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, QuiverError):
            return kind(sentence.strip())
    said = _PYTHON.findall(text) or text.splitlines() or [type(error).__name__]
    sentence = f"Spark could not run the job: {said[-1].strip()[:SENTENCE_CHARACTERS_MAX]}"
    return UnavailableError(sentence, code="spark_failed")
