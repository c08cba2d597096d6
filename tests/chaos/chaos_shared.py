"""Workers and members as processes that are killed, stopped and restarted, and the history of all of them."""

from __future__ import annotations

import heapq
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import chaos_process
from chaos_clients import Client, Workload
from chaos_http import SurpriseError

import quiver
from quiver.errors import NotFoundError
from quiver.groups.settings import QueueSettings, dead_letter_topic_of
from quiver.record.queue_headers import (
    DEAD_ATTEMPTS_HEADER,
    DEAD_OFFSET_HEADER,
    DEAD_PARTITION_HEADER,
    DEAD_REASON_HEADER,
)
from quiver.testing.history import HistoryEvent, parse_history

END_TIMEOUT_S = 180
CLOCK_ERROR_MS = 500
"""One machine has one clock; the rest is for processes that wait for a processor."""


class ProcessKeeper(Client):
    """Keeps one process running, and does to it what happens to processes."""

    kind = ""
    pause_s = 0.2
    p_kill = 0.02
    p_stop = 0.04
    p_restart = 0.02

    def begin(self) -> None:
        self._lives = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def step(self) -> None:
        process, draw = self._process, self.rng.random()
        assert process is not None
        if process.poll() is not None:
            self._require_clean()
            self._start()
        elif not self._is_at_work:
            return
        elif draw < self.p_kill:
            process.kill()
            process.wait()
            self.workload.counts[f"{self.kind} killed"] += 1
            time.sleep(self.rng.random())
            self._start()
        elif draw < self.p_kill + self.p_stop:
            os.kill(process.pid, signal.SIGSTOP)
            self.workload.counts[f"{self.kind} stopped"] += 1
            time.sleep(self.rng.random() * 2.5 * chaos_process.SESSION_S)
            os.kill(process.pid, signal.SIGCONT)
        elif draw < self.p_kill + self.p_stop + self.p_restart:
            process.terminate()
            self.workload.counts[f"{self.kind} restarted"] += 1

    def end(self) -> None:
        """Let it settle what is left, once nobody sends any more."""
        for other in self.workload.clients:
            if not isinstance(other, ProcessKeeper):
                other.join()
        self._stop_file.touch()
        end = time.monotonic() + END_TIMEOUT_S
        while True:
            assert self._process is not None
            try:
                self._process.wait(max(1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                raise SurpriseError(f"{self.proc} did not end; it said: {self._said()}") from None
            self._require_clean()
            if not self._was_terminated():
                return
            self._start()

    @property
    def proc(self) -> str:
        return f"{self.name}.{self._lives}"

    @property
    def _is_at_work(self) -> bool:
        """Whether it has recorded something; on a busy machine it would be killed before that, time after time."""
        history = self._history
        return history.exists() and history.stat().st_size > 0

    @property
    def _history(self) -> Path:
        return self._directory / f"{self.proc}.jsonl"

    @property
    def _stop_file(self) -> Path:
        return self._directory / "stop"

    @property
    def _directory(self) -> Path:
        assert self.workload.directory is not None, "processes need a place for their histories"
        return self.workload.directory

    def _start(self) -> None:
        self._lives += 1
        with self._output.open("wb") as output:
            command = [sys.executable, chaos_process.__file__, self.kind, self.proc]
            command += [str(self._history), str(self._stop_file), self.workload.topic]
            self._process = subprocess.Popen(
                [*command, str(self.rng.random()), *self.workload.addresses],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def _output(self) -> Path:
        return self._directory / f"{self.proc}.log"

    def _said(self) -> str:
        return self._output.read_text(errors="replace")[-2_000:]

    def _require_clean(self) -> None:
        assert self._process is not None
        if self._process.returncode not in (0, -signal.SIGTERM):  # asked to end before it could listen
            raise SurpriseError(f"{self.proc} ended with {self._process.returncode}: {self._said()}")

    def _was_terminated(self) -> bool:
        """Return whether it ended because it was asked to restart, perhaps before it saw that all was over."""
        return not (self._directory / f"{self.proc}.done").exists()


class WorkerKeeper(ProcessKeeper):
    """Keeps a worker of the queue."""

    kind = "worker"


class MemberKeeper(ProcessKeeper):
    """Keeps a member of the group."""

    kind = "member"


def record_queue(workload: Workload) -> None:
    """Record the queue's settings and its dead letters, once everything is settled."""
    keys = [workload.key(partition) for partition in range(workload.partitions)]
    note = {"group": chaos_process.WORKERS, "keys": keys, "max_attempts": 0, "order": "offset"}
    workload.recorder.note("settlement", "queue", None, {**note, "clock_error_ms": CLOCK_ERROR_MS})
    topic = dead_letter_topic_of(QueueSettings(), topic=workload.topic, group=chaos_process.WORKERS)
    letters = []
    with quiver.connect(*workload.addresses) as cluster:
        try:
            with cluster.consumer(topic) as consumer:
                while consumer.size():
                    for record in consumer.poll(500, timeout=1.0):
                        facts = {name: (value or b"").decode() for name, value in record.headers}
                        key = workload.key(int(facts[DEAD_PARTITION_HEADER]))
                        attempts, reason = int(facts[DEAD_ATTEMPTS_HEADER]), facts[DEAD_REASON_HEADER]
                        letters.append([key, int(facts[DEAD_OFFSET_HEADER]), record.text, attempts, reason])
        except NotFoundError:
            pass  # nothing was rejected
    workload.recorder.note("settlement", "dead", None, {"group": chaos_process.WORKERS, "letters": letters})


def merge_histories(paths: Sequence[Path]) -> Iterator[HistoryEvent]:
    """Yield the events of several processes in the order of the machine's clock."""
    streams = [path.open() for path in paths]
    try:
        events = heapq.merge(*map(parse_history, streams), key=lambda event: event.t_ns)
        for number, event in enumerate(events):
            event.i = number
            yield event
    finally:
        for stream in streams:
            stream.close()
