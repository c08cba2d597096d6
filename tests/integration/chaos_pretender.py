"""A server that answers HTTP like a node, from memory, and lies on request.

The live harness is tried out on it: honest, nothing may be found; with any one of its faults, something must.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlsplit

FAULTS = (
    "acknowledges without writing",
    "writes and says that it did not",
    "writes repeated batches again",
    "loses a record in the middle",
    "delivers records twice",
    "cursors leave records out",
    "sizes are stale",
    "topics are created twice",
    "epochs are given twice",
)

Result = tuple[int, dict[str, Any]]


class Pretender:
    """The whole cluster's state, behind one lock."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.lock = threading.Lock()
        self.logs: dict[int, list[str]] = defaultdict(list)
        self._rng = Random(1)
        self._ids = count(1)
        self._names: dict[str, list[int]] = {}
        self._written: dict[tuple[int, int, int], int] = {}
        self._next: dict[tuple[int, int], int] = defaultdict(int)
        self._cursors: dict[tuple[int, int], int] = defaultdict(int)
        self._topics: set[str] = set()

    def answer(self, method: str, path: str, parameters: dict[str, Any]) -> Result:
        """Do what a call asks for; now and then refuse, or do it and let the answer be lost (status 504)."""
        name = f"{method} {'/topics/' if path.startswith('/topics/') else path}"
        with self.lock:
            if self._rng.random() < 0.03:
                return 503, {"status": "failure", "code": "unavailable", "outcome": "not_done"}
            calls: dict[str, Callable[[dict[str, Any]], Result]] = {
                "POST /producer/register": self._register_producer,
                "POST /producer/produce": self._produce,
                "POST /producer/produce_batch": self._produce_batch,
                "POST /consumer/register": self._register_consumer,
                "GET /consumer/consume": self._consume,
                "GET /consumer/consume_batch": self._consume_batch,
                "GET /size": self._size,
                "POST /topics": self._create,
                "DELETE /topics/": lambda _: self._delete(path),
            }
            result = calls[name](parameters)
            if self._rng.random() < 0.03:
                return 504, {"status": "failure", "code": "timeout", "outcome": "unknown"}
            return result

    def _lies(self, fault: str) -> bool:
        return self.fault == fault and self._rng.random() < 0.1

    def _register_producer(self, parameters: dict[str, Any]) -> Result:
        known = self._names.setdefault(parameters.get("prod_name", f"#{next(self._ids)}"), [next(self._ids), -1])
        if self.fault != "epochs are given twice":
            known[1] += 1
        sequences = {str(at): next_ for (who, at), next_ in self._next.items() if who == known[0]}
        return 200, {"producer_id": known[0], "epoch": max(known[1], 0), "sequences": sequences}

    def _produce(self, parameters: dict[str, Any]) -> Result:
        partition = self._rng.randrange(3)
        if self._lies("writes and says that it did not"):
            self.logs[partition].append(parameters["message"])
            return 503, {"outcome": "not_done"}
        return 200, {"partition_id": partition, "offset": self._append(partition, [parameters["message"]])}

    def _produce_batch(self, parameters: dict[str, Any]) -> Result:
        producer, partition, sequence = (parameters[name] for name in ("producer_id", "partition_id", "sequence"))
        done = self._written.get((producer, partition, sequence))
        if done is None or self.fault == "writes repeated batches again":
            done = self._append(partition, parameters["messages"])
            self._written[producer, partition, sequence] = done
            self._next[producer, partition] = sequence + len(parameters["messages"])
        return 200, {"partition_id": partition, "offset": done, "count": len(parameters["messages"])}

    def _append(self, partition: int, values: list[str]) -> int:
        log = self.logs[partition]
        offset = len(log)
        if not self._lies("acknowledges without writing"):
            log.extend(values)
        if self._lies("loses a record in the middle"):
            del log[self._rng.randrange(len(log))]
        return offset

    def _register_consumer(self, _: dict[str, Any]) -> Result:
        return 200, {"consumer_id": next(self._ids)}

    def _consume(self, parameters: dict[str, Any]) -> Result:
        for partition in self._rng.sample(range(3), 3):
            _, body = self._consume_batch({**parameters, "partition_id": partition, "max": 1})
            if body:
                return 200, body["messages"][0]
        return 204, {}

    def _consume_batch(self, parameters: dict[str, Any]) -> Result:
        consumer, partition = int(parameters["consumer_id"]), int(parameters["partition_id"])
        first = int(parameters.get("offset", self._cursors[consumer, partition]))
        log = self.logs[partition]
        if "offset" not in parameters and self.fault == "cursors leave records out" and first + 1 < len(log):
            first += 1
        values = log[first : first + int(parameters["max"])]
        if values and not self._lies("delivers records twice"):
            self._cursors[consumer, partition] = first + len(values)
        messages = [
            {"partition_id": partition, "offset": offset, "message": value}
            for offset, value in enumerate(values, first)
        ]
        return (200, {"messages": messages}) if messages else (204, {})

    def _size(self, parameters: dict[str, Any]) -> Result:
        end = len(self.logs[int(parameters["partition_id"])])
        return 200, {"size": end - 1 if end and self._lies("sizes are stale") else end}

    def _create(self, parameters: dict[str, Any]) -> Result:
        name = parameters["topic_name"]
        if name in self._topics and not self._lies("topics are created twice"):
            return 409, {"code": "topic_exists"}
        self._topics.add(name)
        return 201, {}

    def _delete(self, path: str) -> Result:
        name = path.removeprefix("/topics/")
        if name not in self._topics:
            return 404, {"code": "unknown_topic"}
        self._topics.remove(name)
        return 200, {}


@contextmanager
def pretending(pretender: Pretender) -> Iterator[str]:
    """Serve on a free port for as long as the block lasts; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle_any(self) -> None:
            parts = urlsplit(self.path)
            parameters: dict[str, Any] = {name: values[0] for name, values in parse_qs(parts.query).items()}
            if length := int(self.headers.get("Content-Length", 0)):
                parameters |= json.loads(self.rfile.read(length))
            status, body = pretender.answer(self.command, parts.path, parameters)
            content = json.dumps(body).encode() if status != 204 else b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = handle_any  # noqa: N815 - names of the standard library

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
