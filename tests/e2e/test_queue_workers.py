"""`quiver work` as a process: killed, its jobs go to another; stopped, it finishes or gives back what is under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from quiver.testing import LocalCluster

MODULE = """
import asyncio, os, pathlib, time

DONE = pathlib.Path("done")

def note(text):
    with DONE.open("a") as file:
        file.write(text + "\\n")

def handle(job):
    note(f"begin {job.text} {job.attempt} {os.getpid()}")
    if job.text.startswith("broken") and job.attempt == 1:
        raise ValueError("it is broken")
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
    note(f"end {job.text} {job.attempt} {os.getpid()}")

async def handle_async(job):
    note(f"begin {job.text} {job.attempt} {os.getpid()}")
    while not pathlib.Path("go").exists():
        await asyncio.sleep(0.02)
    note(f"end {job.text} {job.attempt} {os.getpid()}")
"""


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1) as running:
        yield running


class Workers:
    """Processes that work on one topic, and the notes of their functions."""

    def __init__(self, local: LocalCluster, directory: Path, topic: str) -> None:
        self._local, self.directory, self.topic = local, directory, topic
        self.processes: list[subprocess.Popen[str]] = []
        (directory / "tasks.py").write_text(MODULE)

    def start(self, function: str = "handle", *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "quiver", "work", f"tasks:{function}", "--topic", self.topic]
        process = subprocess.Popen(
            [*command, "--group", self.topic, "--url", self._local.addresses[0], *options],
            cwd=self.directory,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.processes.append(process)
        return process

    def notes(self) -> list[list[str]]:
        path = self.directory / "done"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def go(self) -> None:
        (self.directory / "go").touch()

    def wait_begun(self, count: int) -> None:
        wait_until(lambda: sum(note[0] == "begin" for note in self.notes()) >= count)


@pytest.fixture
def workers(local: LocalCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Workers]:
    topic = str(request.node.name).removeprefix("test_")[:60].replace("[", "-").replace("]", "")
    made = Workers(local, tmp_path, topic)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def send(local: LocalCluster, topic: str, *values: str) -> None:
    with local.connect() as cluster:
        cluster.create_topic(topic, partitions=1, exist_ok=True)
        with cluster.producer(topic) as producer:
            for value in values:
                producer.send(value)


def test_jobs_of_a_killed_worker_go_to_another(local: LocalCluster, workers: Workers) -> None:
    send(local, workers.topic, "one", "two")
    first = workers.start("handle", "--concurrency", "2", "--lease", "5s")
    workers.wait_begun(2)
    first.send_signal(signal.SIGKILL)
    second = workers.start("handle_async", "--concurrency", "2")
    workers.wait_begun(4)
    workers.go()
    wait_until(lambda: sum(note[0] == "end" for note in workers.notes()) == 2)
    second.terminate()
    assert second.wait(120) == 0
    ends = {(text, attempt, int(pid)) for what, text, attempt, pid in workers.notes() if what == "end"}
    assert ends == {("one", "2", second.pid), ("two", "2", second.pid)}
    with local.connect() as cluster:
        (found,) = cluster.describe_queue(workers.topic).partitions
        assert (found.cursor, found.leased, found.dying) == (2, 0, 0)


@pytest.mark.parametrize("function", ["handle", "handle_async"])
def test_stopped_worker_finishes_what_is_under_way(local: LocalCluster, workers: Workers, function: str) -> None:
    send(local, workers.topic, "one")
    process = workers.start(function)
    workers.wait_begun(1)
    process.terminate()
    send(local, workers.topic, "two")
    workers.go()
    assert process.wait(120) == 0
    assert [note[:3] for note in workers.notes()] == [["begin", "one", "1"], ["end", "one", "1"]]


@pytest.mark.parametrize("function", ["handle", "handle_async"])
def test_worker_gives_back_what_it_cannot_finish(local: LocalCluster, workers: Workers, function: str) -> None:
    send(local, workers.topic, "one")
    process = workers.start(function, "--grace", "100ms", "--lease", "10m")
    workers.wait_begun(1)
    process.terminate()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "1 given back unfinished" in errors
    with local.connect() as cluster, cluster.queue(workers.topic, workers.topic) as queue:
        (job,) = queue.receive(timeout=120)
        assert (job.text, job.attempt) == ("one", 1)
        job.ack()


def test_failed_job_is_reported_and_tried_again(local: LocalCluster, workers: Workers) -> None:
    send(local, workers.topic, "broken")
    workers.go()
    with local.connect() as cluster:
        cluster.queue(workers.topic, workers.topic, backoff=0.05).close()
    process = workers.start("handle", "--idle-exit", "5s")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "ValueError: it is broken" in errors
    assert "1 job done, 1 failed" in errors
    assert [note[:3] for note in workers.notes()] == [
        ["begin", "broken", "1"],
        ["begin", "broken", "2"],
        ["end", "broken", "2"],
    ]


def test_missing_topic_is_refused(workers: Workers) -> None:
    process = workers.start("handle")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "unknown_topic" in errors
