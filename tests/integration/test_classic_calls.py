"""The HTTP-only library against a gateway that loses answers, refuses, and goes away in the middle of a call."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

import quiver
from quiver.classic import Consumer, Producer, myConsumerError, myProducerError

Answer = tuple[int, dict[str, Any] | None]


class Gateway:
    """Two partitions in memory, behind the calls that the library makes; `faults` go wrong first, in order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.records: dict[str, list[list[str]]] = {}
        self.sequences: dict[tuple[str, int], int] = {}
        self.epochs: dict[str, int] = {}
        self.cursors: dict[tuple[int, str, int], int] = {}
        self.consumer_count = 0
        self.first_offset = 0
        self.faults: list[str] = []
        self.calls: list[str] = []

    def answer(self, method: str, path: str, given: dict[str, Any]) -> Answer:
        self.calls.append(f"{method} {path}")
        match method, path:
            case "GET", "/topics":
                return 200, {"topics": sorted(self.records)}
            case "POST", "/topics":
                if given["topic_name"] in self.records:
                    return 409, {"code": "topic_exists", "message": "it exists"}
                self.records[given["topic_name"]] = [[], []]
                return 201, {}
            case "GET", "/partitions":
                return 200, {"partitions": [{"partition_id": 0}, {"partition_id": 1}]}
            case "POST", "/producer/register":
                return self._register_producer(given)
            case "POST", "/producer/produce":
                return self._produce(given)
            case "POST", "/consumer/register":
                self.consumer_count += 1
                return 200, {"consumer_id": int(given.get("consumer_id", self.consumer_count))}
            case "GET", "/consumer/consume":
                return self._consume(given)
            case "GET", "/size":
                return 200, {"size": self._size(given)}
            case _:
                return self._describe(path.removeprefix("/topics/"))

    def _register_producer(self, given: dict[str, Any]) -> Answer:
        name = given["prod_name"]
        self.records.setdefault(given["topic"], [[], []])
        is_new = name not in self.epochs
        self.epochs[name] = self.epochs.get(name, -1) + 1
        sequences = {} if is_new else {str(at): self.sequences.get((name, at), 0) for at in range(2)}
        return 200, {"producer_id": list(self.epochs).index(name), "epoch": self.epochs[name], "sequences": sequences}

    def _produce(self, given: dict[str, Any]) -> Answer:
        name, epoch = list(self.epochs.items())[given["producer_id"]]
        partition, sequence = given["partition_id"], given["sequence"]
        expected = self.sequences.get((name, partition), 0)
        if given["epoch"] < epoch:
            return 409, {"code": "fenced", "message": "another one has the name"}
        if sequence > expected:
            return 409, {"code": "out_of_sequence", "message": f"{expected} is expected"}
        if sequence == expected:
            self.sequences[name, partition] = expected + 1
            self.records[given["topic"]][partition].append(given.get("message", given.get("message_b64")))
        return 200, {"partition_id": partition, "offset": sequence}

    def _consume(self, given: dict[str, Any]) -> Answer:
        topic, partition, offset = given["topic"], int(given["partition_id"]), int(given["offset"])
        if offset < self.first_offset:
            return 409, {"code": "trimmed", "message": "gone"}
        records = self.records[topic][partition]
        if offset >= len(records):
            return 204, None
        self.cursors[int(given["consumer_id"]), topic, partition] = offset + 1
        return 200, {"message": records[offset], "partition_id": partition, "offset": offset}

    def _size(self, given: dict[str, Any]) -> int:
        wanted = [int(given["partition_id"])] if "partition_id" in given else [0, 1]
        consumer, topic = int(given["consumer_id"]), given["topic"]
        return sum(len(self.records[topic][at]) - self.cursors.get((consumer, topic, at), 0) for at in wanted)

    def _describe(self, topic: str) -> Answer:
        if topic not in self.records:
            return 404, {"code": "unknown_topic", "message": "there is none"}
        partitions = [
            {"partition_id": at, "first_offset": self.first_offset, "end_offset": len(records)}
            for at, records in enumerate(self.records[topic])
        ]
        return 200, {"partitions": partitions}


@contextmanager
def serving(gateway: Gateway) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = urlsplit(self.path)
            given = json.loads(body) if body else dict(parse_qsl(parts.query))
            with gateway.lock:
                fault = gateway.faults.pop(0) if gateway.faults else ""
                answer: Answer = (503, {"code": "unavailable", "message": "not now", "outcome": "not_done"})
                if fault not in ("lost request", "503"):
                    answer = gateway.answer(self.command, parts.path, given)
                if fault == "504":
                    answer = (504, {"code": "timeout", "message": "gave up", "outcome": "unknown"})
            if fault.startswith("lost"):
                self.close_connection = True
                return
            content = b"" if answer[1] is None else json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _serve  # noqa: N815 - what the server calls

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the server's own name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
def address(gateway: Gateway) -> Iterator[str]:
    with serving(gateway) as address:
        yield address


def all_values(gateway: Gateway, topic: str) -> list[str]:
    return [value for partition in gateway.records[topic] for value in partition]


def test_calls_return_what_programs_expect(address: str) -> None:
    producer, consumer = Producer(address), Consumer(address)
    assert producer.CreateTopic("logs") == 0
    assert producer.ListTopics() == consumer.ListTopics() == ["logs"]
    assert isinstance(producer.RegisterProducer("logs"), int)
    assert isinstance(consumer.RegisterConsumer("logs"), int)
    assert producer.Enqueue("logs", "one") == 0
    assert producer.Enqueue("logs", "two") == 0
    assert consumer.Size("logs") == 2
    assert {consumer.Dequeue("logs"), consumer.Dequeue("logs")} == {"one", "two"}
    assert consumer.Size("logs") == 0
    with pytest.raises(myConsumerError) as refused:
        consumer.Dequeue("logs")
    assert refused.value.code == "empty"
    producer.close()
    consumer.close()


def test_errors_are_of_the_library_and_have_codes(address: str) -> None:
    producer, consumer = Producer(address), Consumer(address)
    producer.CreateTopic("logs")
    with pytest.raises(myProducerError) as exists:
        producer.CreateTopic("logs")
    assert (exists.value.code, exists.value.outcome) == ("topic_exists", "not_done")
    with pytest.raises(myProducerError):
        producer.Enqueue("logs", "not registered")
    with pytest.raises(myConsumerError):
        consumer.Dequeue("logs")
    with pytest.raises(myConsumerError):
        consumer.Size("logs")
    with pytest.raises(ValueError, match="address"):
        Producer("ftp://host")
    with pytest.raises(ValueError, match="address"):
        Consumer("")


@pytest.mark.parametrize("fault", ["lost request", "lost answer", "503", "504"])
def test_message_is_enqueued_once_whatever_happens_to_the_call(gateway: Gateway, address: str, fault: str) -> None:
    producer = Producer(address)
    producer.RegisterProducer("logs")
    for number in range(6):
        if number % 2:
            gateway.faults = [fault, fault]
        producer.Enqueue("logs", f"{number}")
    assert sorted(all_values(gateway, "logs")) == [f"{number}" for number in range(6)]


@pytest.mark.parametrize("fault", ["lost request", "lost answer", "503", "504"])
def test_message_is_dequeued_once_whatever_happens_to_the_call(gateway: Gateway, address: str, fault: str) -> None:
    gateway.records["logs"] = [["a", "b"], ["c"]]
    consumer = Consumer(address)
    consumer.RegisterConsumer("logs")
    found = []
    for _ in range(3):
        gateway.faults = [fault, fault]
        found.append(consumer.Dequeue("logs"))
    assert sorted(found) == ["a", "b", "c"]


def test_unknown_outcome_is_told_and_the_next_message_is_not_mistaken_for_it(gateway: Gateway, address: str) -> None:
    producer = Producer(address, max_timeout=2)
    producer.RegisterProducer("logs")
    gateway.faults = ["lost answer"] * 100
    with pytest.raises(myProducerError) as refused:
        producer.Enqueue("logs", "perhaps", partition_id=0)
    assert refused.value.outcome == "unknown"
    gateway.faults = []
    producer.Enqueue("logs", "surely", partition_id=0)
    assert gateway.records["logs"][0] == ["perhaps", "surely"]


def test_refusal_that_stays_says_not_done(gateway: Gateway, address: str) -> None:
    producer = Producer(address, max_timeout=2)
    producer.RegisterProducer("logs")
    gateway.faults = ["503"] * 100
    with pytest.raises(myProducerError) as refused:
        producer.Enqueue("logs", "no")
    assert refused.value.outcome == "not_done"
    assert all_values(gateway, "logs") == []


def test_lost_answer_to_the_creation_of_a_topic_is_no_error(gateway: Gateway, address: str) -> None:
    gateway.faults = ["lost answer"]
    assert Producer(address).CreateTopic("logs", partitions=2) == 0


def test_next_address_is_asked_while_a_node_is_down(gateway: Gateway, address: str) -> None:
    producer = Producer(["http://127.0.0.1:9", address])
    producer.RegisterProducer("logs")
    assert producer.Enqueue("logs", "x") == 0
    assert Consumer(f"127.0.0.1:9,{address}").ListTopics() == ["logs"]


def test_named_producer_goes_on_after_a_restart(gateway: Gateway, address: str) -> None:
    for life in range(3):
        producer = Producer(address, name="web-1")
        producer.RegisterProducer("logs")
        for number in range(4):
            producer.Enqueue("logs", f"{life} {number}")
    assert len(all_values(gateway, "logs")) == 12


def test_one_producer_enqueues_to_several_topics(gateway: Gateway, address: str) -> None:
    producer = Producer(address, name="web-1")
    for topic in ("a", "b", "a"):
        producer.RegisterProducer(topic)
    for number in range(4):
        producer.Enqueue("a", f"a{number}")
        producer.Enqueue("b", f"b{number}", partition_id=0)
    producer.close()
    assert gateway.records == {"a": [["a1", "a3"], ["a0", "a2"]], "b": [["b0", "b1", "b2", "b3"], []]}


def test_second_producer_of_a_name_fences_the_first(address: str) -> None:
    old, new = Producer(address, name="web-1"), Producer(address, name="web-1")
    old.RegisterProducer("logs")
    new.RegisterProducer("logs")
    with pytest.raises(myProducerError) as refused:
        old.Enqueue("logs", "too late")
    assert refused.value.code == "fenced"
    assert new.Enqueue("logs", "in time") == 0


def test_restarted_consumer_goes_on_where_it_was(gateway: Gateway, address: str) -> None:
    gateway.records["logs"] = [["a", "b", "c"], []]
    first = Consumer(address)
    consumer_id = first.RegisterConsumer("logs")
    assert first.Dequeue("logs") == "a"
    again = Consumer(address, consumer_id=consumer_id)
    assert again.RegisterConsumer("logs") == consumer_id
    assert [again.Dequeue("logs"), again.Dequeue("logs", partition_id=0)] == ["b", "c"]


def test_consumer_goes_on_behind_what_retention_removed(gateway: Gateway, address: str) -> None:
    gateway.records["logs"] = [["a", "b", "c"], []]
    consumer = Consumer(address)
    consumer.RegisterConsumer("logs")
    assert consumer.Dequeue("logs", partition_id=0) == "a"
    gateway.first_offset = 2
    with pytest.raises(myConsumerError) as refused:
        consumer.Dequeue("logs", partition_id=0)
    assert refused.value.code == "trimmed"
    assert consumer.Dequeue("logs", partition_id=0) == "c"


def test_run_polls_all_topics_until_nothing_comes(gateway: Gateway, address: str) -> None:
    gateway.records = {"one": [["a", "b"], []], "two": [["c"], ["d"]]}
    consumer = Consumer(address, timeout=2, poll_time=0.05, poll_time_after_error=0.05)
    assert consumer.run() == {}
    for topic in gateway.records:
        consumer.RegisterConsumer(topic)
    found = consumer.run()
    assert found["one"] == ["a", "b"]
    assert sorted(found["two"]) == ["c", "d"]


def test_run_gives_messages_to_a_handler_until_it_is_stopped(gateway: Gateway, address: str) -> None:
    gateway.records = {"one": [["a"], []], "two": [["b"], []]}
    consumer = Consumer(address)
    for topic in gateway.records:
        consumer.RegisterConsumer(topic)
    taken: set[tuple[str, str]] = set()

    def take(topic: str, message: str) -> None:
        taken.add((topic, message))
        if len(taken) == 2:
            consumer.stop()

    _end_within(120, lambda: consumer.run(take, poll_time=0.01))
    assert taken == {("one", "a"), ("two", "b")}


def test_run_goes_on_after_errors(gateway: Gateway, address: str) -> None:
    gateway.records = {"one": [["a"], []]}
    consumer = Consumer(address, max_timeout=0.2)
    consumer.RegisterConsumer("one")
    gateway.faults = ["503"] * 6
    assert consumer.run(timeout=2, poll_time=0.01, poll_time_after_error=0.01) == {"one": ["a"]}


def test_bytes_are_carried(gateway: Gateway, address: str) -> None:
    producer = Producer(address)
    producer.RegisterProducer("logs")
    producer.Enqueue("logs", b"\xff\x00", partition_id=0)
    assert gateway.records["logs"][0] == ["/wA="]


def test_library_needs_nothing_but_the_standard_library() -> None:
    program = (
        "import sys, quiver.classic; "
        "others = {name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names); "
        "assert {name for name in others if not name.startswith('_')} <= {'quiver', 'sitecustomize'}, others; "
        "assert {name for name in sys.modules if name.startswith('quiver.')} == {'quiver.classic'}"
    )
    source = str(Path(quiver.__file__).parents[1])  # -S leaves out all that is installed
    subprocess.run([sys.executable, "-S", "-c", program], check=True, env={"PYTHONPATH": source})


def _end_within(seconds: float, work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begun = time.monotonic()
    thread.join(seconds)
    assert not thread.is_alive(), f"still running after {time.monotonic() - begun:.0f} s"
