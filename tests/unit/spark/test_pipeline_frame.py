"""What all pipelines have in common: options from flags and files, progress, signals, exit codes, errors told."""

from __future__ import annotations

import builtins
import json
import os
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from pyspark.errors import PySparkException

from quiver.cli import main
from quiver.cli import pipeline as pipeline_cli
from quiver.cli.pipeline import ProgressDisplay, describe, pipeline
from quiver.errors import RequestError, TrimmedError, UnavailableError
from quiver.spark.connections import Servers
from quiver.spark.options import SourceMode, read_options
from quiver.spark.pipelines import JOBS, Job, JobProgress, JobResult, JobRun, execute, job_from_file, make_job
from quiver.spark.pipelines import job as job_module
from quiver.spark.pipelines.job import option_name, to_quiver_error

Output = pytest.CaptureFixture[str]


class Count(Job, frozen=True, kw_only=True):
    """A job that counts as far as it is told, and is told to stop at will."""

    from_: int = 0
    to: int
    signals: tuple[int, ...] = ()
    failure: str = ""
    is_found: bool = False

    def __post_init__(self) -> None:
        if self.to < self.from_:
            raise RequestError(f"nothing lies between {self.from_} and {self.to}", code="bad_option")

    def run(self, run: JobRun) -> JobResult:
        if self.is_dry_run:
            return JobResult(sentence="would count")
        for number in self.signals:
            os.kill(os.getpid(), number)
        if self.failure:
            raise PySparkException(self.failure)
        run.report_progress(JobProgress("counting", self.to, 10))
        is_complete = run.wait(0 if not self.signals else 60)
        return JobResult(sentence="counted", facts={"to": self.to}, is_clean=not self.is_found, is_complete=is_complete)


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(JOBS, "count", f"{__name__}:Count")


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    return tmp_path / "job.toml"


def test_job_file_says_the_same_as_flags() -> None:
    name, job = job_from_file('job = "count"\nfrom = 1\nto = 2\nfound = true\nconf = {"spark.x" = "1"}')
    assert (name, job) == ("count", Count(from_=1, to=2, is_found=True, conf={"spark.x": "1"}))
    assert job == make_job("count", {"from": 1, "to": 2, "found": True, "conf": {"spark.x": "1"}})
    assert job_from_file('job = "count"\nto = 2\nmaster = "x"', {"master": "y"})[1].master == "y"


def test_cluster_of_the_command_line_replaces_that_of_the_job_file() -> None:
    text = 'job = "count"\nto = 2\nservers = "a:1"\nca-file = "a.pem"'
    by_context = job_from_file(text, {"context": "production", "timeout": 5.0})[1]
    assert (by_context.servers, by_context.ca_file, by_context.context) == ("", "", "production")
    assert by_context.timeout == 5.0
    by_address = job_from_file(text, {"servers": "b:1"})[1]
    assert (by_address.servers, by_address.ca_file) == ("b:1", "a.pem")
    named = job_from_file('job = "count"\nto = 2\ncontext = "test"', {"servers": "b:1"})[1]
    assert (named.servers, named.context) == ("b:1", "")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("to = ", "not TOML"),
        ("to = 1", 'does not name a job: add job = "NAME"; jobs are '),
        ('job = "dance"', "unknown job 'dance'; jobs are .*count"),
        (
            'job = "count"\nto = 1\ntoo = 1\nup = 1',
            "unknown option 'too', 'up' of job count; its options are ca-file, .*, dry-run, .*, to",
        ),
        ('job = "count"', "job count needs the options to"),
        ('job = "count"\nto = "far"', "invalid option of job count: Expected `int`, got `str`"),
        ('job = "count"\nto = -1', "nothing lies between 0 and -1"),
        ('job = "count"\nto = 1\nservers = " ,"', "no address given"),
    ],
)
def test_job_file_that_cannot_be_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        job_from_file(text)[1].cluster_servers()


def test_job_says_how_it_ended(job_file: Path, capsys: Output) -> None:
    job_file.write_text('job = "count"\nto = 3')
    assert main(["pipeline", "run", str(job_file)]) == 0
    told = capsys.readouterr()
    assert told.out == "counted\n"
    assert told.err == "count: counting, 3 of 10 records\n"
    assert main(["pipeline", "run", str(job_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"job": "count", "clean": True, "complete": True, "to": 3}
    assert main(["pipeline", "run", str(job_file), "--dry-run"]) == 0
    assert capsys.readouterr().out == "would count\n"


def test_finding_is_told_by_the_exit_code(job_file: Path) -> None:
    job_file.write_text('job = "count"\nto = 3\nfound = true')
    assert main(["pipeline", "run", str(job_file)]) == 1


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGTERM,), 143),
        ((signal.SIGINT,), 130),
        ((signal.SIGTERM, signal.SIGTERM), 130),
    ],
)
def test_signal_lets_a_job_end_and_a_second_one_does_not(
    job_file: Path, signals: tuple[signal.Signals, ...], code: int
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    job_file.write_text(f'job = "count"\nto = 3\nsignals = {[int(number) for number in signals]}')
    assert main(["pipeline", "run", str(job_file)]) == code
    assert signal.getsignal(signal.SIGTERM) == before


def test_job_that_fails_because_it_was_stopped_has_not_failed(job_file: Path, capsys: Output) -> None:
    job_file.write_text(f'job = "count"\nto = 3\nsignals = [{int(signal.SIGTERM)}]\nfailure = "Spark is gone"')
    assert main(["pipeline", "run", str(job_file)]) == 143
    assert "was not committed" in capsys.readouterr().out


def test_failure_is_told_in_our_own_words(job_file: Path, capsys: Output) -> None:
    job_file.write_text(
        'job = "count"\nto = 3\nfailure = "org.apache: x\\nquiver.errors.RequestError: no such thing\\n at"'
    )
    assert main(["pipeline", "run", str(job_file)]) == 2
    assert capsys.readouterr().err.startswith("error bad_request: no such thing\n")


def test_last_error_of_ours_is_what_is_meant() -> None:
    text = (
        "a\nquiver.errors.RequestError: first\n\tat java\nquiver.errors.TrimmedError: begins at 7\n\nDriver stacktrace:"
    )
    found = to_quiver_error(RuntimeError(text))
    assert isinstance(found, TrimmedError)
    assert str(found) == "begins at 7"
    assert to_quiver_error(found) is found


def test_error_that_is_not_ours_is_cut_to_what_was_said() -> None:
    found = to_quiver_error(
        RuntimeError("java.lang.X\nTraceback:\nZeroDivisionError: division by zero\n\tat org.apache")
    )
    assert isinstance(found, UnavailableError)
    assert (found.code, str(found)) == (
        "spark_failed",
        "Spark could not run the job: ZeroDivisionError: division by zero",
    )
    assert str(to_quiver_error(RuntimeError("quiver.errors.invariant: x"))).endswith("quiver.errors.invariant: x")
    assert str(to_quiver_error(RuntimeError())).endswith("RuntimeError")
    java = (
        "An error occurred while calling o7.start.\n"
        ': org.apache.hadoop.fs.UnsupportedFileSystemException: No FileSystem for scheme "s3"\n'
        "\tat org.apache.hadoop.fs.FileSystem.get(FileSystem.java)\n\t... 21 more"
    )
    assert str(to_quiver_error(RuntimeError(java))).endswith('No FileSystem for scheme "s3"')


def test_missing_library_says_what_to_install(job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    real_import = builtins.__import__

    def fail(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "quiver.spark.pipelines":
            raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark")
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", fail)
    job_file.write_text('job = "count"')
    assert main(["pipeline", "run", str(job_file)]) == 2
    assert "no module 'pyspark': pip install 'quivermq[spark]'" in capsys.readouterr().err


def test_job_in_a_pipe_says_something_new_at_once_and_the_same_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    with ProgressDisplay("copy") as progress:
        for done in range(100):
            progress.report_progress(JobProgress("reading", done))
        progress.report_progress(JobProgress("writing", 0, 5, noun="file"))
    assert capsys.readouterr().err == "copy: reading\ncopy: writing, 0 of 5 files\n"
    monkeypatch.setattr(pipeline_cli, "LINE_EVERY_S", 0.0)
    with ProgressDisplay("copy") as progress:
        for done in range(3):
            progress.report_progress(JobProgress("reading", done))
    assert capsys.readouterr().err == "copy: reading\ncopy: reading, 1 record\ncopy: reading, 2 records\n"
    assert describe(JobProgress("reading", 1, 1)) == "reading, 1 of 1 record"


def test_session_is_made_when_it_is_needed_and_once() -> None:
    opened: list[object] = []

    def open_session() -> Any:
        opened.append(object())
        return opened[-1]

    told: list[JobProgress] = []
    run = JobRun(open_session, report_progress=told.append)
    assert not opened
    assert run.spark is run.spark is opened[0]
    assert told == [JobProgress("starting Spark")]


class Query:
    """A streaming query as `follow` sees it: at a batch for so many looks; ends after so many waits, or when told."""

    def __init__(self, *, life: int = 10**6, busy: int = 0) -> None:
        self.life, self.busy, self.is_stopped = life, busy, False
        self.recentProgress = [{"batchId": 0, "numInputRows": 3}, {"batchId": 1, "numInputRows": 4}]
        self.isActive = True

    def awaitTermination(self, timeout: float) -> bool:  # noqa: N802 - Spark's name
        self.life -= 1
        return self.life < 0

    @property
    def status(self) -> dict[str, bool]:
        self.busy -= 1
        return {"isTriggerActive": self.busy >= 0}

    def stop(self) -> None:
        assert self.busy < 0, "it was at a batch"
        self.is_stopped = True


def test_query_is_followed_to_its_end_or_stopped_between_batches() -> None:
    told: list[JobProgress] = []
    run = JobRun(lambda: pytest.fail("no session is needed"), report_progress=told.append)
    ended: Any = Query(life=2)
    run.follow(ended, "copying")
    assert not ended.is_stopped
    assert told == [JobProgress("copying", 7)] * 2
    run.stop_signal = int(signal.SIGTERM)
    running: Any = Query(busy=2)
    run.follow(running, "copying")
    assert running.is_stopped


def test_execute_returns_the_signal_that_stopped_a_job() -> None:
    job = Count(to=1, signals=(int(signal.SIGTERM),))
    result, stopped_by = execute("count", job, report_progress=lambda _: None)
    assert (result.is_complete, stopped_by) == (False, signal.SIGTERM)


@pytest.mark.parametrize("name", JOBS)
def test_flags_are_what_the_job_takes(name: str) -> None:
    """A flag that the job does not know, or an option without a flag or with another default, is a mistake."""
    module, _, kind = JOBS[name].partition(":")
    fields = msgspec.structs.fields(getattr(import_module(module), kind))
    command = pipeline.commands[name]
    flags = {
        option_name(parameter.name or ""): parameter
        for parameter in command.params
        if parameter.name not in ("as_json", "help", "token", "password")  # secrets are there to be refused
    }
    assert flags.keys() == {field.encode_name for field in fields}
    for field in fields:
        parameter = flags[field.encode_name]
        assert parameter.required == field.required
        if isinstance(parameter.default, str):
            assert parameter.default == field.default


def test_defect_of_a_job_is_not_told_as_one_of_spark(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Count, "run", lambda *_: int("no number"))
    job_file.write_text('job = "count"\nto = 3')
    assert main(["pipeline", "run", str(job_file)]) == 70


def test_cluster_is_reached_as_options_say() -> None:
    job = Count(to=1, servers="a:1, b:2", ca_file="ca.pem", key_file="key.pem")
    assert job.cluster_servers() == Servers(addresses=("a:1", "b:2"), is_tls=True, ca_file="ca.pem", key_file="key.pem")
    assert (
        read_options({**job.source_options(), "subscribe": "t"}, SourceMode.BATCH_READ).servers == job.cluster_servers()
    )


def test_what_spark_says_at_its_start_is_told_only_if_it_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        os.write(2, b"WARN of nothing\nno space left\n")
        raise RuntimeError("Java gateway process exited")

    monkeypatch.setattr(job_module, "session", fail)
    with pytest.raises(UnavailableError, match="Spark did not start\n  WARN of nothing\n  no space left"):
        execute("needy", Needy(), report_progress=lambda state: click.echo(state.phrase, err=True))
    assert capfd.readouterr().err == "starting Spark\n"
    monkeypatch.setattr(job_module, "session", lambda *_, **__: os.write(2, b"WARN of nothing\n"))
    assert execute("needy", Needy(), report_progress=lambda _: None)[0].sentence == "16"
    click.echo("told", err=True)
    assert capfd.readouterr().err == "told\n"


class Needy(Job, frozen=True, kw_only=True):
    """A job that needs a session and nothing of it."""

    def run(self, run: JobRun) -> JobResult:
        return JobResult(sentence=str(run.spark))
