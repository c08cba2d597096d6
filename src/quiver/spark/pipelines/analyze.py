"""Analyze log lines: what happens when, what is new, what changed, and where errors burst.

The lines come from a topic, and are parsed like `parse` does it, or from a table that `parse` has made. Tasks parse and
summarize their own lines; only summaries reach the driver, which shows them, writes counts to a sink, and renders the
report.

With a checkpoint, an analysis of a topic resumes exactly where it ended, and each batch of counts reaches its sink
once: see `analyze_checkpoint` and `count_sinks`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, Literal
from uuid import uuid4

import msgspec
import pyarrow as pa

from quiver.errors import NotFoundError, QuiverError, RequestError
from quiver.spark.connections import connection
from quiver.spark.holds import QueryHold
from quiver.spark.logs import Model
from quiver.spark.logs.formats import layout_of_format
from quiver.spark.offset_reader import OffsetReader
from quiver.spark.offsets import OffsetRange, StreamOffset, limit_records, ranges_between, records_between
from quiver.spark.options import OffsetBound, ReadOptions, parse_duration
from quiver.spark.pipelines import log_summary
from quiver.spark.pipelines.analyze_checkpoint import AnalyzeCheckpoint, AnalyzeState
from quiver.spark.pipelines.count_sinks import CountSink, DeltaCounts, PostgresCounts, TopicCounts, changed_counts
from quiver.spark.pipelines.events import EVENTS, RECORD_COLUMNS
from quiver.spark.pipelines.job import Job, JobProgress, JobResult, JobRun
from quiver.spark.pipelines.lake import open_lake
from quiver.spark.pipelines.log_findings import LogFindings, find
from quiver.spark.pipelines.log_lines import lines_around, table_lines
from quiver.spark.pipelines.log_report import ShownLine, render_lines, render_page
from quiver.spark.pipelines.log_summary import LogSummary, summarize
from quiver.spark.pipelines.model_store import load_model
from quiver.spark.pipelines.parsing import BATCH_TASKS_MAX, BatchParser, TopicReader, task_records
from quiver.spark.pipelines.place import Place, parse_output_file, parse_place
from quiver.spark.pipelines.table_summary import summarize_table

SINK_WINDOW: Final = "10s"
"""Length of windows of counts that are written, if none is given: a sink's windows must not grow."""
WINDOWS_KEPT: Final = 360
"""Newest windows of a continuous analysis that are kept, at least."""
FACTS_MAX: Final = 10
BURSTS_SHOWN: Final = 5
"""Bursts whose lines are shown."""


class Analyze(Job, frozen=True, kw_only=True):
    """Analyze log lines: rates, templates, what is new, what changed, bursts."""

    topic: str
    table: str = ""
    endpoint: str = ""
    to_topic: str = ""
    to_postgres: str = ""
    to_delta: str = ""
    window: str = ""
    watermark: str = "1m"
    since: str = ""
    format: tuple[str, ...] = ()
    start: Literal["", "earliest", "latest"] = ""
    """Empty: earliest with `once`, else latest."""
    is_once: bool = False
    every: str = "2s"
    checkpoint: str = ""
    report: str = ""

    def __post_init__(self) -> None:
        sinks = [name for name in ("to_topic", "to_postgres", "to_delta") if getattr(self, name)]
        if len(sinks) > 1:
            raise _bad("set only one of to-topic, to-postgres, to-delta")
        if sinks and not self.checkpoint:
            raise _bad(f"{sinks[0].replace('_', '-')} needs a checkpoint directory, so that each count is written once")
        if self.to_topic == self.topic:
            raise _bad("to-topic must differ from topic: the counts would be counted again")
        if self.table and (sinks or self.checkpoint or self.format or self.start):
            raise _bad(
                "a table is analyzed as a whole: without to-topic, to-postgres, to-delta, checkpoint, format, start"
            )
        for name in ("table", "to_delta", "checkpoint"):
            self.place_of(name)
        if self.report:
            parse_output_file(self.report, option="report")
        for name in ("window", "watermark", "every"):
            if parse_duration(getattr(self, name) or "1s", name) < (0 if name == "every" else 1):
                raise _bad(f"{name} must be at least 1s")
        for pattern in self.format:
            layout_of_format(pattern)
        parse_since(self.since)

    def place_of(self, name: str) -> Place | None:
        """Return the place that an option names; raise `RequestError` if it is invalid."""
        text = getattr(self, name)
        if not text:
            return None
        option = name.replace("_", "-")
        is_remote = not parse_place(text, option=option).is_local
        return parse_place(text, option=option, endpoint=self.endpoint if is_remote else "")

    @property
    def starting(self) -> Literal["earliest", "latest"]:
        """Return where a query without a checkpoint starts: to count what exists means to count from its beginning."""
        return self.start or ("earliest" if self.is_once else "latest")

    @property
    def window_ms(self) -> int:
        """Return the length of windows; 0 if it is chosen by the time range."""
        is_written = self.to_topic or self.to_postgres or self.to_delta
        window = self.window or (SINK_WINDOW if is_written else "")
        return round(parse_duration(window, "window") * 1000) if window else 0

    def run(self, run: JobRun) -> JobResult:
        """Count the existing lines (`once`, or a table), or all lines until the job is stopped."""
        if self.table:
            return _analyze_table(self, run)
        if self.is_dry_run:
            connection(self.cluster_servers()).offsets(self.topic, {})  # raise for an unknown topic
            sentence = f"would analyze {self.topic} from {self.starting}, into {self.target_name()}"
            return JobResult(sentence=sentence, facts={})
        work = _AnalyzeRun(self, run)
        every_s = parse_duration(self.every, "every")
        with ExitStack() as stack:
            stack.enter_context(closing(work))
            while True:
                batch_s = time.monotonic()
                is_complete = work.catch_up()
                if self.is_once or not run.wait(every_s - (time.monotonic() - batch_s)):
                    break
            found = work.find()
            if self.report:
                write_report(self, found, work.lines_around(found))
        return result_of(self, found, late=work.late, is_complete=is_complete or not self.is_once)

    def sink(self) -> CountSink | None:
        """Return the sink of the counts; None for the terminal."""
        delta = self.place_of("to_delta")
        if self.to_topic:
            return TopicCounts(self.cluster_servers(), self.to_topic)
        if delta is not None:
            return DeltaCounts(delta, self.topic)
        return PostgresCounts(self.to_postgres, self.topic) if self.to_postgres else None

    def target_name(self) -> str:
        """Return the name of the sink, for people."""
        if self.to_topic:
            return f"topic {self.to_topic}"
        if self.to_delta:
            return f"table {self.to_delta}"
        return "PostgreSQL" if self.to_postgres else "the terminal"


class _AnalyzeRun:
    """A running analysis of a topic; it holds unread records against retention until it is closed."""

    def __init__(self, job: Analyze, run: JobRun) -> None:
        self._job, self._run = job, run
        self._cluster = connection(job.cluster_servers())
        self._options = ReadOptions(
            servers=job.cluster_servers(),
            topics=(job.topic,),
            columns=RECORD_COLUMNS,
            starting=OffsetBound(default=job.starting),
            group_id="analyze",
        )
        self._offsets, self._reader = OffsetReader(self._options), TopicReader(self._options)
        self._checkpoint = AnalyzeCheckpoint(job.place_of("checkpoint"))
        # Offsets first: an unknown topic is told before anything is created or started.
        begin = self._offsets.find(self._options.starting)
        self._state = self._checkpoint.load(job.topic) or AnalyzeState(
            query_id=str(uuid4()), topic=job.topic, offsets=begin
        )
        if self._state.batch_id < 0:
            self._checkpoint.save(self._state)
        self._sink = job.sink()
        self._hold = QueryHold(self._options)
        stored = self._state.summary
        self._total = log_summary.from_bytes(stored) if stored else log_summary.empty_summary(job.window_ms)
        self._model = Model.from_bytes(self._state.model) if self._state.model else Model()
        self._count = 0
        self._lines: tuple[str, ...] = ()

    @property
    def late(self) -> int:
        """Return the number of lines that came too late for their window."""
        return self._state.late

    def catch_up(self) -> bool:
        """Analyze the records that exist now; return False if the job stops before the end."""
        start, target = self._offsets.advance(self._state.offsets)
        self._state = msgspec.structs.replace(self._state, offsets=start)
        self._hold.move(start, target)
        record_bytes = self._offsets.average_record_bytes([self._job.topic])
        while not self._run.is_stopping:
            planned = self._checkpoint.planned(self._state.batch_id + 1)
            if planned is None and not ranges_between(self._state.offsets, target):
                break
            end = planned or limit_records(self._state.offsets, target, BATCH_TASKS_MAX * task_records(record_bytes))
            self._report(target)
            self._run_batch(end, record_bytes)
            self._hold.move(self._state.offsets, target)
        self._report(target)
        return not ranges_between(self._state.offsets, target)

    def _run_batch(self, end: StreamOffset, record_bytes: int) -> None:
        job, state = self._job, self._state
        batch_id = state.batch_id + 1
        self._checkpoint.plan(batch_id, end)
        parser = BatchParser(self._run.spark, self._reader, self._model, formats=job.format)
        now_ms = None if job.is_once else int(time.time() * 1000)
        consume = partial(summarize_rows, window_ms=job.window_ms, now_ms=now_ms)
        ranges = ranges_between(state.offsets, end)
        results = parser.run(ranges, consume, _discard, record_bytes=record_bytes)
        empty = log_summary.empty_summary(job.window_ms)
        batch = log_summary.merge([empty, *(own.output for own in results)])
        batch, late = self._without_late(batch)
        total = log_summary.merge([self._total, batch])
        if self._sink is not None:
            self._sink.write(state.query_id, batch_id, changed_counts(total, batch))
        self._model = parser.model
        self._total, floor_ms = self._forget(total)
        self._state = msgspec.structs.replace(
            state,
            batch_id=batch_id,
            offsets=end,
            model=self._model.to_bytes(),
            summary=log_summary.to_bytes(self._total),
            floor_ms=floor_ms,
            late=state.late + late,
        )
        self._checkpoint.save(self._state)
        self._count += sum(map(len, ranges))
        self._lines = render_lines(self.find())

    def _without_late(self, batch: LogSummary) -> tuple[LogSummary, int]:
        if self._state.floor_ms is None:
            return batch, 0
        kept = log_summary.drop_windows(batch, self._state.floor_ms)
        return kept, batch.lines - kept.lines

    def _forget(self, total: LogSummary) -> tuple[LogSummary, int | None]:
        """Drop old windows of a continuous analysis; lines of theirs are late from then on."""
        if self._job.is_once or not self._job.window_ms or not len(total.counts):
            return total, self._state.floor_ms
        kept_ms = max(WINDOWS_KEPT * total.window_ms, round(parse_duration(self._job.watermark, "watermark") * 1000))
        newest_ms = max(total.counts["window_ms"].to_numpy())
        floor_ms = max(int(newest_ms) - kept_ms, self._state.floor_ms or 0)
        return log_summary.drop_windows(total, floor_ms), floor_ms

    def _report(self, target: StreamOffset) -> None:
        lag = records_between(self._state.offsets, target)
        self._run.report_progress(JobProgress(f"analyzing {self._job.topic}", self._count, lines=self._lines, lag=lag))

    def find(self) -> LogFindings:
        """Return what is found so far."""
        return find_in(self._total, self._model, self._job, with_latency=not self._job.is_once)

    def lines_around(self, found: LogFindings) -> dict[int, list[ShownLine]]:
        """Return the lines around the largest bursts, as far as the topic still has them."""
        around: dict[int, list[ShownLine]] = {}
        first = self._cluster.offsets(self._job.topic, "earliest")
        ends = self._state.offsets.topics[self._job.topic].p
        for at, burst in enumerate(found.bursts[:BURSTS_SHOWN]):
            own = OffsetRange(
                topic=self._job.topic,
                topic_id=first.topic_id,
                partition=burst.partition,
                first_offset=max(first.offsets[burst.partition], burst.offset - 4),
                end_offset=min(ends[burst.partition], burst.offset + 12),
            )
            with suppress(QuiverError):  # retention may remove them meanwhile
                around[at] = lines_around(self._reader.read(own), self._model, burst)
        return around

    def close(self) -> None:
        """Release the hold; idempotent."""
        self._hold.release()


def summarize_rows(
    own: OffsetRange, batches: Iterator[pa.RecordBatch], *, window_ms: int, now_ms: int | None
) -> LogSummary:
    """Summarize the rows of a range. Runs in a task."""
    parts = [log_summary.empty_summary(window_ms)]
    for batch in batches:
        columns: list[Any] = [pa.repeat(pa.scalar(own.partition, pa.int32()), len(batch)), *batch.columns]
        rows = pa.RecordBatch.from_arrays(columns, names=["partition", *batch.schema.names])
        parts.append(summarize(rows, window_ms=window_ms, now_ms=now_ms))
    return log_summary.merge(parts)


def _discard(_: object) -> None:
    """Forget the summary of a range that is parsed again."""


def _analyze_table(job: Analyze, run: JobRun) -> JobResult:
    place = job.place_of("table")
    assert place is not None
    table = open_lake(place, layout=EVENTS)
    files = table.files(job.topic)
    if not files:
        known = ", ".join(table.topics()) or "none"
        raise NotFoundError(
            f"{place} has no lines of topic {job.topic!r}; its topics are {known}", code="unknown_topic"
        )
    if job.is_dry_run:
        return JobResult(
            sentence=f"would analyze {sum(file.count for file in files):,} lines of {job.topic} in {place}"
        )
    run.report_progress(JobProgress(f"analyzing {job.topic}", 0, sum(file.count for file in files)))
    total = summarize_table(run.spark, place, files, window_ms=job.window_ms)
    found = find_in(total, load_model(place, table.model(job.topic)), job, with_latency=False)
    if job.report:
        around = {at: table_lines(place, files, burst) for at, burst in enumerate(found.bursts[:BURSTS_SHOWN])}
        write_report(job, found, around)
    return result_of(job, found, late=0, is_complete=True)


def find_in(total: LogSummary, model: Model, job: Analyze, *, with_latency: bool) -> LogFindings:
    """Return what is found; lines of templates that were merged count for the template that replaced theirs."""
    gone = {old: new[0] for old in model.successors if len(new := model.resolve(old)) == 1}
    view = log_summary.rename_templates(total, gone, model.templates)
    return find(view, since_ms=since_ms_of(job.since, view), with_latency=with_latency)


def parse_since(text: str) -> timedelta | datetime | None:
    """Parse a duration before the newest line, or a time; raise `RequestError` if it is neither."""
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return timedelta(seconds=parse_duration(text, "since"))
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def since_ms_of(text: str, total: LogSummary) -> int | None:
    """Return the time from which on things are new; None if it was not given."""
    since = parse_since(text)
    if since is None or not len(total.counts):
        return None
    if isinstance(since, datetime):
        return round(since.timestamp() * 1000)
    newest_ms = max(total.counts["window_ms"].to_numpy()) + total.window_ms
    return int(newest_ms - since.total_seconds() * 1000)


def write_report(job: Analyze, found: LogFindings, around: dict[int, list[ShownLine]]) -> None:
    """Write the HTML page."""
    with open(parse_output_file(job.report, option="report"), "w", encoding="utf-8") as file:
        file.write(render_page(job.topic, found, around))


def result_of(job: Analyze, found: LogFindings, *, late: int, is_complete: bool) -> JobResult:
    """Return the result of an analysis."""

    def text(template_id: str) -> str:
        return found.templates[template_id].template

    facts: dict[str, Any] = {
        "topic": job.topic,
        "lines": found.lines,
        "without_time": found.without_time,
        "undecodable": found.undecodable,
        "late": late,
        "windows": len(found.windows),
        "window_ms": found.window_ms,
        "start_ms": found.windows[0] if found.windows else None,
        "end_ms": found.windows[-1] + found.window_ms if found.windows else None,
        "since_ms": found.since_ms,
        "levels": found.level_totals,
        "sources": dict(list(found.source_totals.items())[:FACTS_MAX]),
        "templates": len(found.templates),
        "messages": [
            {"message": own.template, "template_id": own.template_id, "level": own.level, "count": own.lines}
            for own in list(found.templates.values())[:FACTS_MAX]
        ],
        "new": [{**msgspec.structs.asdict(own), "template": text(own.template_id)} for own in found.new],
        "changes": [
            {**msgspec.structs.asdict(own), "template": text(own.template_id) if own.template_id else ""}
            for own in found.changes
        ],
        "bursts": [
            {**msgspec.structs.asdict(own), "templates": [text(one) for one in own.template_ids]}
            for own in found.bursts
        ],
    }
    sentence = (
        f"analyzed {job.topic}, into {job.target_name()}: lines {found.lines:,}, windows {len(found.windows):,}, "
        f"templates {len(found.templates):,}"
    )
    sentence += f", too late for their window {late:,}" if late else ""
    return JobResult(sentence="\n".join((sentence, *render_lines(found))), facts=facts, is_complete=is_complete)


def _bad(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_option")
