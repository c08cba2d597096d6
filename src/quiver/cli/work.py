"""`quiver work`: run a Python function for every job of a work queue, until a signal stops it."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

import click

import quiver
from quiver.cli.options import connect, connect_async, examples, url_option
from quiver.cli.output import FOUND, format_count
from quiver.cli.quantities import DurationType
from quiver.client.queue_jobs import LeasedJob
from quiver.client.workers import AsyncWorkers, ThreadWorkers, WorkTally
from quiver.errors import QuiverError

GRACE_MS = 30_000
FOREVER_S = 7 * 24 * 3600.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@click.command(
    short_help="Run a Python function for every job of a queue.",
    epilog=examples(
        "quiver work tasks:send_mail --topic jobs --concurrency 8",
        "quiver work tasks:resize --topic images --group resizers --lease 5m --max-attempts 3",
    ),
)
@click.argument("function", metavar="MODULE:FUNCTION")
@click.option("--topic", required=True, help="Topic whose records are the jobs.")
@click.option("--group", default="workers", show_default=True, help="Group that shares the jobs.")
@click.option(
    "--concurrency",
    type=click.IntRange(min=1, max=10_000),
    default=1,
    show_default=True,
    metavar="N",
    help="Jobs under way at a time: tasks of an async function, threads of any other.",
)
@click.option("--lease", "lease_ms", type=DurationType(), help="Lease of a job, set with a new group.  [default: 30s]")
@click.option(
    "--max-attempts",
    type=click.IntRange(min=0),
    metavar="N",
    help="Deliveries until a job is a dead letter, set with a new group; 0: no limit.  [default: 5]",
)
@click.option("--prefetch", type=click.IntRange(min=0), default=0, metavar="N", help="Jobs to receive in advance.")
@click.option(
    "--max-processing-time",
    "processing_ms",
    type=DurationType(),
    help="Time after which a job's lease is no longer extended while the function runs.  [default: no limit]",
)
@click.option(
    "--grace",
    "grace_ms",
    type=DurationType(),
    default=GRACE_MS,
    show_default="30s",
    help="How long jobs under way may still run after the first signal.",
)
@click.option("--idle-exit", "idle_ms", type=DurationType(), help="End after so long without a job.  [default: run on]")
@url_option
def work(
    *,
    function: str,
    topic: str,
    group: str,
    concurrency: int,
    lease_ms: int | None,
    max_attempts: int | None,
    prefetch: int,
    processing_ms: int | None,
    grace_ms: int,
    idle_ms: int | None,
    url: str,
) -> None:
    """Call MODULE:FUNCTION with every job of the queue that GROUP has of TOPIC.

    The function gets a `quiver.Job` (an async function a `quiver.AsyncJob`): job.text, job.json(), job.key, job.attempt
    and so on. When it returns, the job is acknowledged; when it raises, the job is delivered again later. Its lease is
    extended while it runs. MODULE is imported from the current directory, or as Python finds it.

    After SIGTERM or Ctrl-C it receives no more and lets the jobs under way finish; after --grace, or a second signal,
    it gives them back unfinished. Exit code: 0 if every job was finished, 1 if some were given back.
    """
    called = load_function(function)
    settings: dict[str, Any] = {
        "lease": None if lease_ms is None else lease_ms / 1000,
        "max_attempts": max_attempts,
        "prefetch": prefetch,
        "max_processing_time": None if processing_ms is None else processing_ms / 1000,
        "idle_timeout": None if idle_ms is None else idle_ms / 1000,
    }
    patience = Patience(grace_ms / 1000)
    is_async = inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(getattr(called, "__call__", None))  # noqa: B004 - an object with an async `__call__`
    run = _run_tasks if is_async else _run_threads
    tally, has_ended = run(called, url, topic, group, concurrency, settings, patience)
    click.echo(_describe(tally), err=True)
    sys.stderr.flush()
    if not has_ended:
        os._exit(FOUND)  # threads that still run would keep the process
    if tally.released:
        raise click.exceptions.Exit(FOUND)


def load_function(name: str) -> Callable[[Any], Any]:
    """Return the function that a word such as `tasks:send_mail` names."""
    module_name, sign, path = name.partition(":")
    if not module_name or not sign or not path:
        raise click.UsageError(f"{name!r} is no MODULE:FUNCTION, such as tasks:send_mail")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name and not module_name.startswith(f"{error.name}."):
            raise click.UsageError(f"module {module_name!r} cannot be imported: {error}") from None
        message = f"there is no module {module_name!r} in {os.getcwd()} or on Python's path"
        raise click.UsageError(message) from None
    except Exception as error:  # noqa: BLE001 - a module may raise whatever it likes
        raise click.UsageError(f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}") from None
    for attribute in path.split("."):
        found = getattr(found, attribute, None)
    if not callable(found):
        raise click.UsageError(f"module {module_name!r} has no function {path!r}")
    return found  # type: ignore[no-any-return] # callable


class Patience:
    """How long jobs under way may still run: the whole grace from the first signal on, nothing after the second."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._ends_s: float | None = None
        self.hurried = threading.Event()

    def handle_signal(self) -> None:
        """Handle a signal."""
        if self._ends_s is None:
            self._ends_s = time.monotonic() + self._grace_s
        else:
            self._ends_s = time.monotonic()
            self.hurried.set()

    def remaining_s(self) -> float:
        """Return how much of the grace is left; without a signal, jobs under way may take their time."""
        return FOREVER_S if self._ends_s is None else max(0.0, self._ends_s - time.monotonic())


def _run_threads(
    called: Callable[[quiver.Job], object],
    url: str,
    topic: str,
    group: str,
    concurrency: int,
    settings: dict[str, Any],
    patience: Patience,
) -> tuple[WorkTally, bool]:
    with connect(url) as cluster, cluster.queue(topic, group, **settings) as queue:
        workers = ThreadWorkers(queue, called, concurrency=concurrency, on_failure=report_failure)

        def handle(*_: object) -> None:
            patience.handle_signal()
            workers.stop()

        before = {number: signal.signal(number, handle) for number in SIGNALS}
        try:
            _announce(topic, group, concurrency)
            return workers.tally, workers.run(patience.remaining_s)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _run_tasks(
    called: Callable[[quiver.AsyncJob], Any],
    url: str,
    topic: str,
    group: str,
    concurrency: int,
    settings: dict[str, Any],
    patience: Patience,
) -> tuple[WorkTally, bool]:
    async def main() -> WorkTally:
        async with connect_async(url) as cluster, await cluster.queue(topic, group, **settings) as queue:
            workers = AsyncWorkers(queue, called, concurrency=concurrency, on_failure=report_failure)
            running = asyncio.create_task(workers.run(patience.remaining_s))

            def handle() -> None:
                patience.handle_signal()
                workers.stop()
                if patience.hurried.is_set():
                    running.cancel()

            for number in SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, handle)
            _announce(topic, group, concurrency)
            try:
                await running
            except asyncio.CancelledError:
                if not patience.hurried.is_set():
                    raise
            return workers.tally

    return asyncio.run(main()), True


def _announce(topic: str, group: str, concurrency: int) -> None:
    click.echo(f"working on {topic} as {group}, {format_count(concurrency, 'job')} at a time; Ctrl-C ends it", err=True)


def _describe(tally: WorkTally) -> str:
    text = f"{format_count(tally.done, 'job')} done, {tally.failed:,} failed"
    text += f", {tally.lost:,} finished too late" if tally.lost else ""
    return text + (f", {tally.released:,} given back unfinished" if tally.released else "")


def report_failure(job: LeasedJob, error: BaseException) -> None:
    """Print why a job failed: the function's own traceback, or the error of its settlement."""
    if isinstance(error, QuiverError):
        click.echo(f"job {job.describe()}, attempt {job.attempt}: {error.code}: {error}", err=True)
        return
    click.echo(f"job {job.describe()}, attempt {job.attempt} failed:", err=True)
    trace = error.__traceback__
    own = trace.tb_next if trace is not None else None  # without the frame of the worker
    click.echo("".join(traceback.format_exception(type(error), error, own)).rstrip(), err=True)
