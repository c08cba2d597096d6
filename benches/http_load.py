"""A minimal HTTP/1.1 load generator: each connection sends one request, waits for the response, and repeats.

It runs in its own process, so that its CPU time is not the server's. It reads one JSON object from standard input
(`host`, `port`, `seconds`, and `requests`: the bytes of a request for each connection, as Latin-1 text; with `ca_file`,
the authority of the server's certificate, it speaks TLS; `pids` are the server's processes) and prints one: the number
of responses, by status, the seconds they took in all, their latencies, and the CPU time of itself and of the server.
All connections are open before the clocks start.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from collections import Counter
from typing import Any


class Connection(asyncio.Protocol):
    """One connection with one request in flight at any time."""

    def __init__(self, request: bytes, load: Load) -> None:
        self._request = request
        self._load = load
        self._received = b""
        self._sent_at = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        received = self._received + data if self._received else data
        head, separator, body = received.partition(b"\r\n\r\n")
        if not separator or len(body) < content_length(head):
            self._received = received
            return
        self._received = b""
        self._load.answered(head[9:12], time.perf_counter() - self._sent_at)
        self.send()

    def connection_lost(self, _: Exception | None) -> None:
        self._load.lost()

    def send(self) -> None:
        assert self._transport is not None
        self._sent_at = time.perf_counter()
        if self._sent_at < self._load.end:
            self._transport.write(self._request)
        else:
            self._transport.close()


class Load:
    """All connections, and the statistics of their responses."""

    def __init__(self, requests: list[bytes], seconds: float) -> None:
        self.end = 0.0
        self._seconds = seconds
        self._requests = requests
        self._open = len(requests)
        self._statuses: Counter[bytes] = Counter()
        self._times_s: list[float] = []
        self._ended = asyncio.Event()

    async def run(self, host: str, port: int, context: ssl.SSLContext | None, pids: list[int]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        connections = [Connection(request, self) for request in self._requests]
        for connection in connections:
            await loop.create_connection(lambda connection=connection: connection, host, port, ssl=context)
        begun, begun_processor_s, begun_servers_s = time.perf_counter(), time.process_time(), servers_s(pids)
        self.end = begun + self._seconds
        for connection in connections:
            connection.send()
        await self._ended.wait()
        seconds, times_s = time.perf_counter() - begun, sorted(self._times_s)
        return {
            "answers": len(times_s),
            "seconds": seconds,
            "statuses": {status.decode(): count for status, count in self._statuses.items()},
            "p50_ms": 1000 * times_s[len(times_s) // 2],
            "p99_ms": 1000 * times_s[len(times_s) * 99 // 100],
            "processor_s": time.process_time() - begun_processor_s,
            "servers_s": servers_s(pids) - begun_servers_s,
        }

    def answered(self, status: bytes, seconds: float) -> None:
        self._statuses[status] += 1
        self._times_s.append(seconds)

    def lost(self) -> None:
        self._open -= 1
        if not self._open:
            self._ended.set()


def content_length(head: bytes) -> int:
    """Return the length of a response's body; neither server sends chunks."""
    _, found, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0]) if found else 0


def servers_s(pids: list[int]) -> float:
    """Return the CPU time of processes so far: each has a clock, whose number follows from its id."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def main() -> None:
    order = json.load(sys.stdin)
    requests = [request.encode("latin-1") for request in order["requests"]]
    context = ssl.create_default_context(cafile=order["ca_file"]) if order.get("ca_file") else None

    async def run() -> dict[str, Any]:
        load = Load(requests, order["seconds"])
        return await load.run(order["host"], order["port"], context, order.get("pids", []))

    json.dump(asyncio.run(run()), sys.stdout)


if __name__ == "__main__":
    main()
