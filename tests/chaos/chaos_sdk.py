"""Clients that use the SDK, recorded like those over HTTP.

The SDK retries by itself; whatever error it still raises must say truly whether the work was done. A producer that
had an error is opened again under its name, and a consumer is opened again now and then and must go on from where it
last committed.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress

from chaos_clients import PATIENCE_S, Client, Workload

import quiver
from quiver.errors import OutcomeUnknownError, UnavailableError


class SdkProducer(Client):
    """Sends one record at a time, or a few at once, and waits for each."""

    def __init__(self, workload: Workload, name: str, seed: int) -> None:
        super().__init__(workload, name, seed)
        self._stack = ExitStack()
        self._count = 0

    def begin(self) -> None:
        cluster = self._stack.enter_context(quiver.connect(*self.workload.addresses, timeout=PATIENCE_S))
        self._producer = self._stack.enter_context(cluster.producer(self.workload.topic, name=self.name))

    def step(self) -> None:
        value = f"{self.name}:{self._count}"
        self._count += 1
        call = self.invoke("send", None, [value])
        try:
            position = self._producer.send(value).result(PATIENCE_S)
        except UnavailableError as error:
            call.fail(error.code)
            self._reopen(error)
        except OutcomeUnknownError as error:
            call.info(error.code)
            self._generation += 1
            self._reopen(error)
        else:
            call.ok(position.offset, key=self.workload.key(position.partition))
            self.workload.counts["sdk send ok"] += 1

    def _reopen(self, error: Exception) -> None:
        self.workload.counts["sdk send failed"] += 1
        self.workload.sdk_failures.append(f"{self.name}: {type(error).__name__}: {error}")
        self._stack.close()
        self.begin()

    def end(self) -> None:
        self._stack.close()


class SdkConsumer(Client):
    """Polls all partitions, commits, and is closed and opened again now and then."""

    def __init__(self, workload: Workload, name: str, seed: int) -> None:
        super().__init__(workload, name, seed)
        self._stack = ExitStack()
        self._committed = dict.fromkeys(range(workload.partitions), 0)
        self._is_committed = True
        """Whether that is known."""
        self._positions = dict(self._committed)

    @property
    def proc(self) -> str:
        return self.name

    def begin(self) -> None:
        cluster = self._stack.enter_context(quiver.connect(*self.workload.addresses, timeout=PATIENCE_S))
        self._consumer = self._stack.enter_context(cluster.consumer(self.workload.topic, name=self.name))
        for partition, offset in self._committed.items():
            assigned = offset if self._is_committed else None
            self.workload.recorder.note(self.proc, "assign", self.workload.key(partition), assigned)
        self._positions = dict(self._committed)

    def step(self) -> None:
        began = time.monotonic()
        try:
            self._work()
        except (UnavailableError, OutcomeUnknownError) as error:
            took_s = time.monotonic() - began
            self.workload.sdk_failures.append(f"{self.name}: {type(error).__name__}: {error}, after {took_s:.1f} s")
            self._reopen()

    def _work(self) -> None:
        self._poll(0.2)
        if self.rng.random() < 0.2:
            self._is_committed = False  # of several partitions some may have come through if this fails
            self._consumer.commit()
            self._committed = dict(self._positions)
            self._is_committed = True
        if self.rng.random() < 0.02:
            self._reopen()

    def _reopen(self) -> None:
        with suppress(UnavailableError, OutcomeUnknownError):
            self._stack.close()
        self.begin()

    def _poll(self, timeout_s: float) -> int:
        records = self._consumer.poll(max_records=500, timeout=timeout_s)
        by_partition: dict[int, list[list[object]]] = {}
        for record in records:
            assert record.partition is not None
            by_partition.setdefault(record.partition, []).append([record.offset, record.text])
            self._positions[record.partition] = record.offset + 1
        for partition, found in by_partition.items():
            # Begun and ended when it is over: for a poll only its end counts.
            self.workload.recorder.invoke(self.proc, "poll", self.workload.key(partition)).ok(found)
        self.workload.counts["sdk poll ok"] += 1
        return len(records)

    def end(self) -> None:
        empty = 0
        while empty < 3:
            empty = 0 if self._poll(1.0) else empty + 1
        self._stack.close()
