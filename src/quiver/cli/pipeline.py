"""`quiver pipeline`: run jobs on Spark, from flags or from a job file.

Commands name their options like the fields of the jobs' structs and pass them to the job, which checks them. Spark and
its libraries are imported only when a job runs, so the help works without them. The progress of a job is shown on
standard error: a live line on a terminal, periodic lines in a pipe.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from quiver.cli.options import (
    CREDENTIAL_HELP,
    URL_HELP,
    USER_FILE_HELP,
    USER_HELP,
    examples,
    json_option,
    refuse_secrets,
)
from quiver.cli.output import DONE, FOUND, format_count, print_json
from quiver.errors import ConfigError

if TYPE_CHECKING:
    from quiver.spark.pipelines import Job, JobProgress


SIGNALLED = 128
"""Base of the exit code after a signal; the signal number is added, as in shells."""
LINE_EVERY_S = 5.0
"""Interval of repeated progress lines when standard error is not a terminal."""

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(
    short_help="Ingest, archive, parse, analyze, replay and audit records on Spark.",
    epilog=examples("quiver pipeline run archive.toml"),
)
def pipeline() -> None:
    """Run a job on Spark: locally, or on a Spark cluster.

    SIGTERM and Ctrl-C stop a job after its current batch; run the same command to resume.

    Exit codes: 0 complete, or a continuous job was stopped; 1 the audit found differences, or files
    could not be ingested; 130 or 143 stopped by Ctrl-C
    or SIGTERM before completion.

    Needs: pip install 'quivermq[spark]'
    """


def topic_option(meaning: str) -> Callable[[Command], Command]:
    """Add `--topic` to a command."""
    return click.option("--topic", required=True, help=meaning)


endpoint_option = click.option(
    "--endpoint",
    metavar="URL",
    help="Server of the object store. An http:// URL allows connections without TLS. [default: the public one]",
)


def lake_format_option(flag: str, help_: str) -> Callable[[Command], Command]:
    """Return the option for the format in which a job makes a lake or a table."""
    return click.option(flag, type=click.Choice(("delta", "parquet")), default="delta", show_default=True, help=help_)


def cluster_options(command: Command) -> Command:
    """Add to a command what names the cluster of a job, as `url_option` does for all other commands."""
    options = (
        click.option("--url", "--servers", "servers", default="", help=URL_HELP),
        click.option("--context", metavar="NAME", help="Cluster that `quiver context add` stored."),
        click.option(
            "--timeout",
            type=click.FloatRange(min=0.001, max=86_400.0),
            metavar="SECONDS",
            help="Longest time of a request to the cluster, all its attempts included.  [default: 60]",
        ),
        click.option(
            "--tls", is_flag=True, help="Connect to the cluster with TLS; implied by each of the three file options."
        ),
        click.option("--ca-file", metavar="FILE", help="CA certificates that verify the certificates of the cluster."),
        click.option("--certificate-file", metavar="FILE", help="Client certificate."),
        click.option("--key-file", metavar="FILE", help="Private key of the client certificate."),
        click.option("--token-file", metavar="FILE", help=CREDENTIAL_HELP),
        click.option("--username", "user", metavar="USER", help=USER_HELP),
        click.option("--password-file", metavar="FILE", help=USER_FILE_HELP),
        refuse_secrets,
    )
    for option in reversed(options):
        command = option(command)
    return command


def job_options(command: Command) -> Command:
    """Add the options that all jobs have to a command."""
    options = (
        cluster_options,
        click.option(
            "--master", default="local[*]", show_default=True, help="Spark master: local[N] or spark://HOST:PORT."
        ),
        click.option("--conf", multiple=True, metavar="KEY=VALUE", help="Spark setting; may be repeated."),
        click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing."),
        click.option(
            "--register", is_flag=True, help="Describe the run in the topic _pipelines, which the console shows."
        ),
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@pipeline.command(
    short_help="Ingest files into a topic.",
    epilog=examples(
        "quiver pipeline ingest /var/log/app --topic logs",
        "quiver pipeline ingest events.jsonl.gz more.parquet --topic events --key user --time at",
    ),
)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@topic_option("Topic to send to; created if it does not exist.")
@click.option("--key", metavar="FIELD", help="JSON field that becomes the record's key; lines are then JSON objects.")
@click.option("--time", metavar="FIELD", help="JSON field that becomes the timestamp: milliseconds or ISO 8601.")
@click.option(
    "--name", default="ingest", show_default=True, help="Name of this ingest; another name ingests every file again."
)
@click.option(
    "--final",
    is_flag=True,
    help="Also send last lines without a line feed: nothing writes to these files any more.",
)
@job_options
@click.pass_context
def ingest(context: click.Context, /, *, as_json: bool, **options: Any) -> None:
    """Send each line of files, and of all files in directories, to a topic as a record; each file's content once.

    Files are plain text, .gz or .zst with one record per line, or .parquet with the column value and optionally key,
    timestamp and headers. Lines of one file stay in order in one partition, unless they have keys. Run the command
    again after a crash, or when there are new files: it sends new files, and new lines of files that have grown. A file
    that was renamed, copied or compressed is not sent again. A plain file is read up to its last line feed.

    The exit code is 1 if a file could not be read; all others are ingested, and the output names it.
    """
    run_job(context, "ingest", options, as_json=as_json)


@pipeline.command(
    short_help="Archive a topic into a lake.",
    epilog=examples(
        "quiver pipeline archive --topic logs --to ./lake --once",
        "quiver pipeline archive --topic logs --to s3://bucket/lake",
        "quiver pipeline archive --topic logs --to /srv/lake --every 10s --compact --vacuum --keep 30d",
    ),
)
@topic_option("Topic to archive.")
@click.option(
    "--to", required=True, metavar="PLACE", help="Directory or URL of the lake; created if it does not exist."
)
@endpoint_option
@lake_format_option("--format", "Format of a new lake.")
@click.option(
    "--once", is_flag=True, help="Exit when all records that exist at the start are archived. [default without --every]"
)
@click.option("--every", metavar="TIME", help="Run continuously: archive new records at this interval (10s, 5m).")
@click.option("--consumer", metavar="NAME", help="Store the archived offsets as cursors of this consumer.")
@click.option(
    "--skip-lost", is_flag=True, help="Continue after records that retention removed before they were archived."
)
@click.option("--compact", is_flag=True, help="Merge small files, at the end or every hour.")
@click.option("--vacuum", is_flag=True, help="Delete files that no retained version needs, at the end or every hour.")
@click.option(
    "--keep", metavar="TIME", default="7d", show_default=True, help="Age up to which --vacuum retains versions."
)
@job_options
@click.pass_context
def archive(context: click.Context, /, *, as_json: bool, **options: Any) -> None:
    """Archive the records of a topic into a lake, each record once: a Delta table, or plain Parquet files.

    A lake is in a directory, or in an object store: s3://, gs://, az:// or abfss://, with credentials from the usual
    environment variables. Files are grouped by topic, partition and hour of the records' timestamps. The lake also
    stores the archived offsets: run the command again, on any machine, also after kill -9, and it resumes there.
    """
    run_job(context, "archive", options, as_json=as_json)


@pipeline.command(
    short_help="Parse log lines into a table.",
    epilog=examples(
        "quiver pipeline parse --topic logs --to ./events --once",
        "quiver pipeline parse --topic logs --to s3://bucket/events --every 10s",
        "quiver pipeline parse --topic logs --to ./events --from-archive ./lake",
        "quiver pipeline parse --topic logs --to ./events --format '{time} {level} [{thread}] {source}: {message}'",
    ),
)
@topic_option("Topic whose records are log lines.")
@click.option(
    "--to", required=True, metavar="PLACE", help="Directory or URL of the table; created if it does not exist."
)
@endpoint_option
@click.option(
    "--from-archive", metavar="PLACE", help="Read the records from this lake, a directory or URL, not from the cluster."
)
@click.option(
    "--format",
    multiple=True,
    metavar="FORMAT",
    help="How lines begin, such as '{time} {level} {source}: {message}'; may be repeated. [default: found out]",
)
@lake_format_option("--table-format", "Format of a new table.")
@click.option(
    "--once", is_flag=True, help="Exit when all records that exist at the start are parsed. [default without --every]"
)
@click.option("--every", metavar="TIME", help="Run continuously: parse new records at this interval (10s, 5m).")
@click.option(
    "--skip-lost", is_flag=True, help="Continue after records that retention removed before they were parsed."
)
@job_options
@click.pass_context
def parse(context: click.Context, /, *, as_json: bool, **options: Any) -> None:
    """Parse log lines into a table, each record once: time, level, source, template and parameters.

    How lines are put together is learned from the lines, without configuration: time stamps of all common notations,
    levels, hosts, processes, threads; JSON and logfmt by their fields. Stack traces become one row. Which words of a
    message are constant and which vary is learned, too. The table also stores the parsed offsets and what was learned:
    run the command again, on any machine, also after kill -9, and it resumes there.
    """
    run_job(context, "parse", options, as_json=as_json)


@pipeline.command(
    short_help="Find what is new, what changed and what fails in log lines.",
    epilog=examples(
        "quiver pipeline analyze --topic logs",
        "quiver pipeline analyze --topic logs --once --report logs.html",
        "quiver pipeline analyze --topic logs --table ./events --since 1d --report logs.html",
        "quiver pipeline analyze --topic logs --to-postgres postgresql://db/stats --checkpoint /srv/analyze",
    ),
)
@topic_option("Topic whose records are log lines.")
@click.option(
    "--table",
    metavar="PLACE",
    help="Analyze this table of `quiver pipeline parse`, a directory or URL, without the cluster.",
)
@endpoint_option
@click.option("--to-topic", metavar="TOPIC", help="Write counts to this topic. [default: print them]")
@click.option("--to-postgres", metavar="URL", help="Write counts to the table quiver_line_counts of this database.")
@click.option("--to-delta", metavar="PLACE", help="Write counts to this Delta table, a directory or URL.")
@click.option(
    "--window",
    metavar="TIME",
    help="Length of a window of the lines' own time. [default: by the time range; 10s if counts are written]",
)
@click.option(
    "--watermark",
    metavar="TIME",
    default="1m",
    show_default=True,
    help="Longest accepted delay of a line in a continuous analysis with windows of a given length.",
)
@click.option(
    "--since",
    metavar="TIME",
    help="What is first seen after this is new: a time (2026-11-15T00:00), or a time before the newest line (1d). "
    "[default: after the first quarter]",
)
@click.option(
    "--format",
    multiple=True,
    metavar="FORMAT",
    help="How lines begin, such as '{time} {level} {source}: {message}'; may be repeated. [default: found out]",
)
@click.option(
    "--start",
    type=click.Choice(("earliest", "latest")),
    help="Start of a job without a checkpoint; one with a checkpoint resumes there. [default: earliest with --once, "
    "else latest]",
)
@click.option("--once", is_flag=True, help="Exit when all lines that exist at the start are counted.")
@click.option("--every", metavar="TIME", default="2s", show_default=True, help="Interval between batches.")
@click.option(
    "--checkpoint",
    metavar="DIR",
    help="Directory or URL of the analysis' offsets and counts; required by --to-topic, --to-postgres and --to-delta.",
)
@click.option(
    "--report", metavar="FILE", type=click.Path(dir_okay=False), help="Write a self-contained HTML page at the end."
)
@job_options
@click.pass_context
def analyze(context: click.Context, /, *, as_json: bool, **options: Any) -> None:
    """Find what is new, what changed and where errors burst in the log lines of a topic, or of a parsed table.

    Lines are parsed as `quiver pipeline parse` does it, and counted in windows of their own time, by level, source and
    template. Prints what is found, or writes all counts to a topic, PostgreSQL or a Delta table, each batch once.
    """
    run_job(context, "analyze", options, as_json=as_json)


@pipeline.command(
    short_help="Replay archived records into a topic.",
    epilog=examples(
        "quiver pipeline replay --from /srv/lake --topic logs",
        "quiver pipeline replay --from /srv/lake --source logs --topic again --time 2026-11-15T10:00/2026-11-15T12:00",
    ),
)
@click.option("--from", "from_", required=True, metavar="PLACE", help="Directory or URL of the lake.")
@endpoint_option
@topic_option("Topic to send to; created if it does not exist.")
@click.option(
    "--source", metavar="TOPIC", help="Archived topic. [default: the topic of the same name, or the only one]"
)
@click.option(
    "--offsets", metavar="RANGE", help="Only these offsets: FIRST:END, or by partition 0=FIRST:END,2=FIRST:END."
)
@click.option("--time", metavar="FROM/TO", help="Only records with timestamps in this range: ISO 8601, UTC by default.")
@click.option(
    "--name",
    default="replay",
    show_default=True,
    help="Name of this replay; another name replays everything again.",
)
@click.option(
    "--more-partitions",
    is_flag=True,
    help="Allow a topic with more partitions than the archive: new records of a key go to another partition.",
)
@click.option(
    "--same", is_flag=True, help="Allow replaying into the archived topic itself, which duplicates its records."
)
@job_options
@click.pass_context
def replay(context: click.Context, /, *, as_json: bool, **options: Any) -> None:
    """Send the records of a lake to a topic, each once, to the partition that it came from, in the same order.

    Run the command again after a crash, or when more was archived: it sends the missing records.
    """
    run_job(context, "replay", options, as_json=as_json)


@pipeline.command(
    short_help="Check that all copies have the same records.",
    epilog=examples(
        "quiver pipeline audit --topic logs",
        "quiver pipeline audit --topic logs --archive /srv/lake --consumers report,billing --report audit.md",
    ),
)
@topic_option("Topic to audit.")
@click.option(
    "--archive", metavar="PLACE", help="Also compare this lake, a directory or URL, up to its archived offsets."
)
@endpoint_option
@click.option("--source", metavar="TOPIC", help="Name of the topic in the archive that it was replayed from.")
@click.option(
    "--consumers", metavar="NAMES", help="Consumers that must have reported digests. [default: all that have]"
)
@click.option(
    "--report", metavar="FILE", type=click.Path(dir_okay=False), help="Write the report to this file, as Markdown."
)
@job_options
@click.pass_context
def audit(context: click.Context, /, *, as_json: bool, **options: Any) -> None:
    """Compare the records of a topic in all sources: leaders, replicas, the archive, and what clients have seen.

    Compares digests, and single records where digests differ. The exit code is 0 if all sources agree. It is 1 if a
    record is lost, duplicated, changed or swapped in any source, or if a source could not be read; the output names it.
    """
    run_job(context, "audit", options, as_json=as_json)


@pipeline.command(
    epilog=examples("quiver pipeline run jobs/archive.toml", "quiver pipeline run audit.toml --context production")
)
@click.argument("file", type=click.File(encoding="utf-8"))
@cluster_options
@click.option("--master", help="Spark master.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@json_option
@click.pass_context
def run(running: click.Context, /, *, file: Any, as_json: bool, **options: Any) -> None:
    """Run the job in FILE: TOML with `job = "NAME"` and the job's options, named as on the command line.

    Options of the command line override those in FILE. With --context, FILE does not name the cluster at all.
    """
    with _needing_spark():
        from quiver.spark.pipelines import job_from_file

        name, job = job_from_file(
            file.read(), {key.replace("_", "-"): value for key, value in options.items() if value}
        )
    running.exit(_execute(name, job, as_json=as_json))


def run_job(context: click.Context, name: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Run a job with options by parameter name, print its result, and exit with its exit code."""
    given = {key.removesuffix("_").replace("_", "-"): value for key, value in options.items() if value is not None}
    given["conf"] = dict(map(_setting, given["conf"]))
    with _needing_spark():
        from quiver.spark.pipelines import make_job

        job = make_job(name, given)
    context.exit(_execute(name, job, as_json=as_json))


def _execute(name: str, job: Job, *, as_json: bool) -> int:
    from quiver.spark.pipelines import execute

    with ProgressDisplay(name) as progress:
        result, stopped_by = execute(name, job, report_progress=progress.report_progress)
    if as_json:
        print_json({"job": name, "clean": result.is_clean, "complete": result.is_complete, **result.facts})
    else:
        click.echo(result.sentence)
    if not result.is_clean:
        return FOUND
    return DONE if result.is_complete or stopped_by is None else SIGNALLED + stopped_by


@contextmanager
def _needing_spark() -> Iterator[None]:
    """Report what to install if a library of the extra `spark` is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"pipelines run on Spark, and Python has no module {error.name!r}: pip install 'quivermq[spark]'"
        raise ConfigError(message, code="spark_missing") from None


def _setting(text: str) -> tuple[str, str]:
    key, is_there, value = text.partition("=")
    if not is_there or not key:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--conf")
    return key, value


class ProgressDisplay:
    """Display the progress of a job; use as ``with``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_terminal = sys.stderr.isatty()
        self._last_line: tuple[str, float] = ("", 0.0)
        self._bar = _ProgressWithLines(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not self._is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task(name, total=None)

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def report_progress(self, state: JobProgress) -> None:
        """Display the job's progress."""
        text = f"{self._name}: {describe(state)}"
        self._bar.lines = state.lines
        self._bar.update(self._task, description=text, completed=state.done, total=state.total)
        phrase, shown_s = self._last_line
        now_s = time.monotonic()
        if not self._is_terminal and (state.phrase != phrase or now_s - shown_s >= LINE_EVERY_S):
            click.echo("\n  ".join((text, *state.lines)), err=True)
            self._last_line = (state.phrase, now_s)


class _ProgressWithLines(Progress):
    """A progress bar with lines below it."""

    lines: tuple[str, ...] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text("\n".join(self.lines), overflow="ellipsis", no_wrap=True)


def describe(state: JobProgress) -> str:
    """Describe what a job does, and how much of it is done."""
    if state.total is not None:
        return f"{state.phrase}, {state.done:,} of {format_count(state.total, state.noun)}"
    return f"{state.phrase}, {format_count(state.done, state.noun)}" if state.done else state.phrase
