"""Clients over HTTP that record what they ask and what they are told.

Each is a thread with a rhythm of its own. Answers that the contract does not have are kept as surprises, which fail
the run. A client whose call has an unknown outcome continues as a new process, as a history requires.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from chaos_http import Answer, HttpClient, SurpriseError

from quiver.testing.history import RecordedCall, Recorder

PATIENCE_S = 60
"""How long a retrying client tries before it gives up: longer than everything takes to come back."""
_RETRY_S = 0.05


class Workload:
    """What all clients of a run share."""

    def __init__(
        self, recorder: Recorder, addresses: Sequence[str], topic: str, partitions: int, directory: Path | None = None
    ) -> None:
        self.recorder = recorder
        self.directory = directory
        """Where clients that are processes keep their histories."""
        self.addresses = addresses
        self.topic = topic
        self.partitions = partitions
        self.is_over = threading.Event()
        self.surprises: list[str] = []
        self.sdk_failures: list[str] = []
        """Errors that the SDK could not spare its caller."""
        self.counts: Counter[str] = Counter()
        self.slowest_send_s = 0.0
        """The longest time from the beginning of a retried send to its acknowledgement."""
        self.clients: list[Client] = []

    def key(self, partition: int) -> str:
        return f"{self.topic}-{partition}"

    def start(self, clients: Sequence[Client]) -> None:
        self.clients.extend(clients)
        for client in clients:
            client.start()

    def finish(self) -> None:
        """Let every client end what it is at."""
        self.is_over.set()
        for client in self.clients:
            client.join()


class Client(threading.Thread):
    """One thread that does `step` again and again until the workload is over."""

    pause_s = 0.02

    def __init__(self, workload: Workload, name: str, seed: int) -> None:
        super().__init__(name=name, daemon=True)
        self.workload = workload
        self.rng = Random(f"{name} {seed}")
        self.http = HttpClient(workload.addresses, self.rng.randrange(len(workload.addresses)))
        self._generation = 0

    @property
    def proc(self) -> str:
        """Return the process that the history knows this client as."""
        return f"{self.name}.{self._generation}"

    def run(self) -> None:
        try:
            self.begin()
            while not self.workload.is_over.is_set():
                self.step()
                time.sleep(self.pause_s * 2 * self.rng.random())
            self.end()
        except Exception as error:  # noqa: BLE001 - told at the end of the run
            self.workload.surprises.append(f"{self.name}: {type(error).__name__}: {error}")
        finally:
            self.http.close()

    def begin(self) -> None:
        """Register, or whatever comes first."""

    @abstractmethod
    def step(self) -> None:
        """Do one thing."""

    def end(self) -> None:
        """Do what comes last."""

    def invoke(self, f: str, key: str | None, value: Any = None) -> RecordedCall:
        return self.workload.recorder.invoke(self.proc, f, key, value)

    def conclude(self, call: RecordedCall, answer: Answer, value: Any = None, *, key: str | None = None) -> None:
        """Record an answer; `value` is what it says if all went well."""
        self.workload.counts[f"{call.f} {answer.outcome}"] += 1
        if answer.is_ok:
            call.ok(value, key=key)
        elif answer.outcome == "fail":
            call.fail(answer.code)
        else:
            call.info(answer.code)
            self._generation += 1

    def demand(self, method: str, path: str, **parameters: object) -> Answer:
        """Repeat a call that may be repeated until it is done."""
        end = time.monotonic() + PATIENCE_S
        call = self.http.post if method == "post" else self.http.get
        while not (answer := call(path, **parameters)).is_ok:
            if 400 <= answer.status < 429 or time.monotonic() > end:
                raise SurpriseError(f"{path} {parameters}: {answer}")
            time.sleep(_RETRY_S)
        return answer


class SequencedProducer(Client):
    """Numbers its batches and repeats a call until it is answered: nothing may be doubled, and nothing fail."""

    restart_chance = 0.01
    """How often it registers again between two sends, as a restarted client does."""

    def begin(self) -> None:
        self._register()
        self._count = 0

    def _register(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while True:
            call = self.invoke("register", self.name)
            answer = self.http.post("/producer/register", topic=self.workload.topic, prod_name=self.name)
            if answer.is_ok:
                break
            self.conclude(call, answer)
            if 400 <= answer.status < 429 or time.monotonic() > end:
                raise SurpriseError(f"register: {answer}")
            time.sleep(_RETRY_S)
        self._id, self._epoch = answer.body["producer_id"], answer.body["epoch"]
        self._sequences = Counter({int(at): next_ for at, next_ in answer.body["sequences"].items()})
        self.conclude(call, answer, {"id": self._id, "epoch": self._epoch})

    def step(self) -> None:
        partition = self.rng.randrange(self.workload.partitions)
        values = [f"{self.name}:{self._count + i}" for i in range(self.rng.choice((1, 1, 1, 3, 20)))]
        self._count += len(values)
        call = self.invoke("send", self.workload.key(partition), values)
        began = time.monotonic()
        answer = self._send(partition, values)
        if not answer.is_ok:
            self.conclude(call, answer)
            raise SurpriseError(f"a send failed for good after {time.monotonic() - began:.1f} s: {answer}")
        self.conclude(call, answer, answer.body["offset"])
        self.workload.slowest_send_s = max(self.workload.slowest_send_s, time.monotonic() - began)
        self._sequences[partition] += len(values)
        if self.rng.random() < self.restart_chance:
            self._register()

    def _send(self, partition: int, values: list[str]) -> Answer:
        """Repeat until it is done; if that never happens, tell whether it may be."""
        end = time.monotonic() + PATIENCE_S
        may_be_done = False
        while True:
            answer = self.http.post(
                "/producer/produce_batch",
                topic=self.workload.topic,
                producer_id=self._id,
                epoch=self._epoch,
                partition_id=partition,
                sequence=self._sequences[partition],
                messages=values,
            )
            may_be_done = may_be_done or answer.outcome == "info"
            if answer.is_ok or 400 <= answer.status < 429 or time.monotonic() > end:
                break
            time.sleep(_RETRY_S)
        return answer if answer.is_ok or not may_be_done else Answer("info", answer.status, answer.body)


class PlainProducer(Client):
    """Sends without a sequence and never repeats: what it is told about failed calls must be true."""

    def begin(self) -> None:
        answer = self.demand("post", "/producer/register", topic=self.workload.topic)
        self._id = answer.body["producer_id"]
        self._count = 0

    def step(self) -> None:
        value = f"{self.name}:{self._count}"
        self._count += 1
        call = self.invoke("send", None, [value])
        answer = self.http.post("/producer/produce", topic=self.workload.topic, producer_id=self._id, message=value)
        if answer.is_ok:
            key = self.workload.key(answer.body["partition_id"])
            self.conclude(call, answer, answer.body["offset"], key=key)
            return
        self.conclude(call, answer)
        if 400 <= answer.status < 429:
            raise SurpriseError(f"produce: {answer}")
        time.sleep(_RETRY_S)


class OffsetReader(Client):
    """Reads partitions from their beginning by offset, repeating what was not answered."""

    def begin(self) -> None:
        self._id = self.demand("post", "/consumer/register", topic=self.workload.topic).body["consumer_id"]
        self.positions = dict.fromkeys(range(self.workload.partitions), 0)
        self.first_values: dict[str, str] = {}
        for partition in self.positions:
            self.workload.recorder.note(self.proc, "assign", self.workload.key(partition), 0)

    def step(self) -> None:
        self.read(self.rng.randrange(self.workload.partitions))

    def read(self, partition: int) -> int:
        """Read on in a partition; return how many records came."""
        key = self.workload.key(partition)
        call = self.workload.recorder.invoke(self.name, "poll", key)
        answer = self.http.get(
            "/consumer/consume_batch",
            topic=self.workload.topic,
            consumer_id=self._id,
            partition_id=partition,
            offset=self.positions[partition],
            max=500,
        )
        if 400 <= answer.status < 429:
            raise SurpriseError(f"consume_batch from {self.positions[partition]} of {key}: {answer}")
        messages = answer.body.get("messages", [])
        self.workload.counts[f"poll {answer.outcome}"] += 1
        if not answer.is_ok:
            call.fail(answer.code)  # a read leaves nothing behind: to repeat it is to do it
            return 0
        call.ok([[message["offset"], message["message"]] for message in messages])
        if messages:
            self.first_values.setdefault(key, messages[0]["message"])
            self.positions[partition] = messages[-1]["offset"] + 1
        return len(messages)

    @property
    def proc(self) -> str:
        return self.name


class CursorConsumer(Client):
    """Takes whatever is next for it, one or some at a time, and never asks twice for the same."""

    def begin(self) -> None:
        self.id = self.demand("post", "/consumer/register", topic=self.workload.topic).body["consumer_id"]

    def step(self) -> None:
        self.take()

    def take(self) -> int:
        """Consume a little; return how many records came."""
        if self.rng.random() < 0.5:
            return self._take_one()
        return self._take_batch(self.rng.randrange(self.workload.partitions))

    def _take_one(self) -> int:
        call = self.invoke("consume", None, {"consumer": self.name, "max": 1, "offset": None})
        answer = self.http.get("/consumer/consume", topic=self.workload.topic, consumer_id=self.id)
        self._check(answer)
        if answer.status == 200:
            key = self.workload.key(answer.body["partition_id"])
            self.conclude(call, answer, [[answer.body["offset"], answer.body["message"]]], key=key)
            return 1
        self.conclude(call, answer, [])
        return 0

    def _take_batch(self, partition: int) -> int:
        key = self.workload.key(partition)
        call = self.invoke("consume", key, {"consumer": self.name, "max": 50, "offset": None})
        answer = self.http.get(
            "/consumer/consume_batch",
            topic=self.workload.topic,
            consumer_id=self.id,
            partition_id=partition,
            max=50,
        )
        self._check(answer)
        messages = answer.body.get("messages", [])
        self.conclude(call, answer, [[message["offset"], message["message"]] for message in messages])
        return len(messages)

    def _check(self, answer: Answer) -> None:
        if 400 <= answer.status < 429:
            raise SurpriseError(f"consume: {answer}")

    def end(self) -> None:
        """Read to the end, so that whatever it was not given shows."""
        end = time.monotonic() + PATIENCE_S
        empty = 0
        while empty < 3 * self.workload.partitions and time.monotonic() < end:
            empty = 0 if any(self._take_batch(at) for at in range(self.workload.partitions)) else empty + 1


class EndWatcher(Client):
    """Asks for partitions' ends: the size of what a consumer that never consumed has before it."""

    pause_s = 0.1

    def begin(self) -> None:
        self._id = self.demand("post", "/consumer/register", topic=self.workload.topic).body["consumer_id"]

    def step(self) -> None:
        partition = self.rng.randrange(self.workload.partitions)
        call = self.invoke("list_offsets", self.workload.key(partition))
        answer = self.http.get("/size", topic=self.workload.topic, consumer_id=self._id, partition_id=partition)
        if 400 <= answer.status < 429:
            raise SurpriseError(f"size: {answer}")
        self.conclude(call, answer, answer.body.get("size"))


class TopicMaker(Client):
    """Creates and deletes topics of a few names, against others of its kind."""

    pause_s = 0.4

    def step(self) -> None:
        name = f"made-{self.rng.randrange(3)}"
        if self.rng.random() < 0.5:
            call = self.invoke("create", name)
            answer = self.http.post("/topics", topic_name=name, partitions=1)
            self._conclude(call, answer, refusal=409)
        else:
            call = self.invoke("delete", name)
            answer = self.http.delete(f"/topics/{name}")
            self._conclude(call, answer, refusal=404)

    def _conclude(self, call: RecordedCall, answer: Answer, *, refusal: int) -> None:
        """A refusal is an answer: it says that there is nothing to change."""
        if answer.status == refusal:
            self.conclude(call, Answer("ok", answer.status, answer.body), value=False)
        elif 400 <= answer.status < 429:
            raise SurpriseError(f"{call.f}: {answer}")
        else:
            self.conclude(call, answer, value=True)
