"""A worker of a queue, or a member of a group, as a process of its own that writes down what it saw and did.

    python chaos_process.py worker PROC HISTORY STOP TOPIC SEED ADDRESS...

It works until SIGTERM, which is a clean restart, or until the file STOP exists: then it helps to settle what is left,
and ends. Each line of its history has the time of the machine's monotonic clock, which is that of all processes: the
histories of a run are merged by it. A process that is killed leaves what it had written.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from chaos_clients import PATIENCE_S

import quiver
from quiver.client.group_consumer import GroupConsumerCore
from quiver.client.queue_jobs import Range, to_ranges
from quiver.client.sync_consumer import Consumer
from quiver.client.sync_queue import Job, Queue
from quiver.errors import FencedError, OutcomeUnknownError, QuiverError, UnavailableError
from quiver.model import PartitionId
from quiver.testing.history import RecordedCall, Recorder

WORKERS = "workers"
MEMBERS = "members"
LEASE_S = 2.0
SESSION_S = 2.0
_MS = 1_000_000


class Program:
    """What workers and members have in common."""

    def __init__(self, proc: str, history: Path, stop: Path, topic: str, seed: str, addresses: Sequence[str]) -> None:
        self.recorder = Recorder(history.open("w", buffering=1))
        self.topic = topic
        self.rng = Random(f"{proc} {seed}")
        self.is_terminated = threading.Event()
        self._history = history
        self._proc = proc
        self._stop = stop
        self._addresses = addresses
        self._lives = 0

    @property
    def proc(self) -> str:
        """Return the process that the history knows it as; a call of unknown outcome ends one."""
        return f"{self._proc}.{self._lives}"

    @property
    def is_ending(self) -> bool:
        """Return whether nobody sends any more, and what is left is to be settled."""
        return self._stop.exists()

    def run(self) -> None:
        """Work until everything is done, or until SIGTERM."""
        with self._connect() as cluster:
            self.work(cluster)
        if not self.is_terminated.is_set():
            self._history.with_suffix(".done").touch()

    def _connect(self) -> quiver.Cluster:
        """Connect as soon as one node runs; the client itself gives up at once while nothing listens anywhere."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return quiver.connect(*self._addresses, timeout=PATIENCE_S)
            except UnavailableError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def work(self, cluster: quiver.Cluster) -> None:
        raise NotImplementedError

    def fail(self, call: RecordedCall, error: QuiverError) -> None:
        """Record what an error says; one that blames the program ends it, which fails the run."""
        if isinstance(error, OutcomeUnknownError):
            call.info(error.code)
            self._lives += 1
        else:
            call.fail(error.code)
            if not isinstance(error, UnavailableError):
                raise error

    def key(self, partition: int) -> str:
        return f"{self.topic}-{partition}"


class Worker(Program):
    """Receives jobs and settles them, one way or the other."""

    def work(self, cluster: quiver.Cluster) -> None:
        with cluster.queue(self.topic, WORKERS, lease=LEASE_S, max_attempts=0, backoff=0.1, backoff_max=1.0) as queue:
            while not self.is_terminated.is_set():
                is_ending = self.is_ending
                if not self._step(queue, is_ending=is_ending) and is_ending and self._is_settled(cluster):
                    return

    def _step(self, queue: Queue, *, is_ending: bool) -> int:
        """Receive some jobs and settle them; return how many came."""
        count = self.rng.choice((1, 20, 200, 1000))
        call = self.recorder.invoke(self.proc, "receive", None, {"group": WORKERS, "max": count})
        try:
            jobs = queue.receive(count, timeout=0.3)
        except QuiverError as error:
            self.fail(call, error)
            return 1
        call.ok([self._row(job) for job in jobs])
        plain = [job for job in jobs if is_ending or not self._treat_specially(job)]
        if not is_ending and self.rng.random() < 0.03:
            time.sleep(self.rng.random() * 2 * LEASE_S)
        self._acknowledge(queue, plain)
        return len(jobs)

    def _row(self, job: Job) -> list[object]:
        sent_ns, until_ns = (job.ends_ms - job.grant.lease_ms) * _MS, job.ends_ms * _MS
        value = (job.value or b"").decode()
        return [self.key(job.partition), job.offset, value, job.attempt, job.grant.grant, sent_ns, until_ns, None, None]

    def _treat_specially(self, job: Job) -> bool:
        """Return, reject or forget some of the jobs; tell whether it was done."""
        draw = self.rng.random()
        if draw > 0.02:
            return False
        if job.offset % 7 == 3:  # never the first record of a partition, by which copies of it are known
            self._settle(job, "reject", lambda: job.reject("not mine"))
        elif draw < 0.01:
            delay_ms = self.rng.randrange(500)
            self._settle(job, "return", lambda: job.nack(delay=delay_ms / 1000), delay_ms)
        elif draw < 0.015:
            self._settle(job, "release", job.release)
        return True

    def _settle(self, job: Job, kind: str, work: Callable[[], None], ms: int = 0) -> None:
        records = [[job.offset, job.grant.grant]]
        argument = {"group": WORKERS, "kind": kind, "records": records, "ms": ms}
        call = self.recorder.invoke(self.proc, "settle", self.key(job.partition), argument)
        try:
            work()
        except FencedError:
            call.ok(records)
        except QuiverError as error:
            self.fail(call, error)
        else:
            call.ok([])

    def _acknowledge(self, queue: Queue, jobs: Sequence[Job]) -> None:
        by_partition: dict[PartitionId, list[Range]] = {}
        for leased, ranges in to_ranges(jobs).items():
            by_partition.setdefault(leased.partition_id, []).extend(ranges)
        for partition_id, ranges in by_partition.items():
            records = [[first + at, grant] for first, count, grant in ranges for at in range(count)]
            argument = {"group": WORKERS, "kind": "ack", "records": records, "ms": 0}
            call = self.recorder.invoke(self.proc, "settle", self.key(partition_id), argument)
            try:
                refused = queue.thread.run(queue.core.settle_ranges("ack", partition_id, ranges))
            except QuiverError as error:
                self.fail(call, error)
            else:
                call.ok(sorted([offset, grant] for grant, offset in refused.stale))

    def _is_settled(self, cluster: quiver.Cluster) -> bool:
        try:
            found = cluster.describe_queue(WORKERS).partitions
        except UnavailableError:
            return False
        return not any(one.ready or one.leased or one.waiting or one.dying for one in found)


class Member(Program):
    """Reads what it is assigned, and commits now and then."""

    def work(self, cluster: quiver.Cluster) -> None:
        self._epochs: dict[int, int] = {}
        self._member = self._proc
        self._consumer: Consumer | None = None
        opened = threading.Event()

        def assign(places: Sequence[tuple[str, int]]) -> None:
            opened.wait()
            self._handle_assigned([partition for _, partition in places])

        with cluster.consumer(self.topic, group=MEMBERS, session_timeout=SESSION_S, on_assign=assign) as consumer:
            self._consumer = consumer
            opened.set()
            while not self.is_terminated.is_set():
                is_ending = self.is_ending
                if not self._step(consumer, is_ending=is_ending) and is_ending and self._is_consumed(cluster):
                    return

    def _handle_assigned(self, partitions: Sequence[int]) -> None:
        consumer = self._consumer
        assert consumer is not None
        assert isinstance(consumer._consumer.core, GroupConsumerCore)
        for partition in partitions:
            epoch = consumer._consumer.core._held[self.topic, PartitionId(partition)].epoch
            position = int(consumer.position(partition))
            self._epochs[partition] = epoch
            note = {"consumer": MEMBERS, "member": self._member, "epoch": epoch, "offset": position}
            self.recorder.note(self.proc, "grant", self.key(partition), note)
            self.recorder.invoke(f"{self.proc}/c", "cursor", self.key(partition), {"consumer": MEMBERS}).ok(position)

    def _step(self, consumer: Consumer, *, is_ending: bool) -> int:
        try:
            records = consumer.poll(500, timeout=0.3)
        except UnavailableError:
            return 1
        found: dict[int, list[list[object]]] = {}
        for record in records:
            assert record.partition is not None
            found.setdefault(record.partition, []).append([record.offset, record.text])
        for partition, part in found.items():
            value = {"consumer": MEMBERS, "max": len(part), "offset": part[0][0]}
            value |= {"epoch": self._epochs[partition], "member": self._member}
            self.recorder.invoke(self.proc, "consume", self.key(partition), value).ok(part)
        if is_ending or self.rng.random() < 0.3:
            self._commit(consumer)
        return len(records)

    def _commit(self, consumer: Consumer) -> None:
        calls = []
        for partition, epoch in sorted(self._epochs.items()):
            reader = consumer._consumer.core.readers.get((self.topic, PartitionId(partition)))
            if reader is not None and reader.position != reader.committed:
                value = {"consumer": MEMBERS, "offset": int(reader.position), "epoch": epoch}
                calls.append(self.recorder.invoke(f"{self.proc}/{partition}", "commit", self.key(partition), value))
        try:
            consumer.commit()
        except (FencedError, UnavailableError, OutcomeUnknownError) as error:
            for call in calls:  # some partitions' may be done, others' not
                call.info(error.code)
            self._lives += 1
        else:
            for call in calls:
                call.ok()

    def _is_consumed(self, cluster: quiver.Cluster) -> bool:
        try:
            return not any(one.lag for one in cluster.group_lag(MEMBERS))
        except UnavailableError:
            return False


def main() -> None:
    """Run the program that the arguments name."""
    kind, proc, history, stop, topic, seed, *addresses = sys.argv[1:]
    program = {"worker": Worker, "member": Member}[kind](proc, Path(history), Path(stop), topic, seed, addresses)
    signal.signal(signal.SIGTERM, lambda *_: program.is_terminated.set())
    program.run()


if __name__ == "__main__":
    main()
