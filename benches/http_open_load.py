"""An HTTP/1.1 load generator that does not wait: requests are sent at a fixed rate, whatever the answers take.

It runs in its own process. It reads one JSON object from standard input (`host`, `port`, `seconds`, `rate`,
`connections`, `timeout_s`, and `request`: its bytes as Latin-1 text) and prints one: how many requests were sent, were
answered with each status, were given up after the timeout, or found no free connection; and the latencies of successes
and of refusals. A connection that is refused rests as long as `Retry-After` says, unless `is_rude` is given.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter, deque
from typing import Any

TICK_S = 0.002
"""Interval at which the requests that are due are sent."""


class Connection(asyncio.Protocol):
    """One connection with at most one request in flight."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._received = b""
        self.sent_at = 0.0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._load.free.append(self)

    def data_received(self, data: bytes) -> None:
        received = self._received + data if self._received else data
        head, separator, body = received.partition(b"\r\n\r\n")
        if not separator or len(body) < number_of(head, b"Content-Length: "):
            self._received = received
            return
        self._received = b""
        self._load.record(head[9:12], time.perf_counter() - self.sent_at)
        self.sent_at = 0.0
        self._load.rest(self, number_of(head, b"Retry-After: "))

    def connection_lost(self, _: Exception | None) -> None:
        if self.sent_at:
            self._load.given_up += 1
        self.sent_at = 0.0
        self.transport = None


class Load:
    """The connections, and what became of the requests."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._request = order["request"].encode("latin-1")
        self.free: deque[Connection] = deque()
        self.connections: list[Connection] = []
        self.given_up = 0
        self._unsent = 0
        self._statuses: Counter[str] = Counter()
        self._times_s: dict[bool, list[float]] = {True: [], False: []}

    def rest(self, connection: Connection, seconds: int) -> None:
        """Use a connection again after so many seconds."""
        if seconds and not self._order.get("is_rude"):
            asyncio.get_running_loop().call_later(seconds, self.free.append, connection)
        else:
            self.free.append(connection)

    def record(self, status: bytes, seconds: float) -> None:
        self._statuses[status.decode()] += 1
        self._times_s[status.startswith(b"2")].append(seconds)

    async def run(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        for _ in range(self._order["connections"]):
            _, connection = await loop.create_connection(
                lambda: Connection(self), self._order["host"], self._order["port"]
            )
            self.connections.append(connection)
        begun = time.perf_counter()
        sent = 0
        while (passed_s := time.perf_counter() - begun) < self._order["seconds"]:
            for _ in range(int(passed_s * self._order["rate"]) - sent):
                sent += 1
                self._send()
            self._give_up()
            await asyncio.sleep(TICK_S)
        await asyncio.sleep(min(0.5, self._order["timeout_s"]))
        return {
            "sent": sent,
            "seconds": self._order["seconds"],
            "statuses": dict(self._statuses),
            "given_up": self.given_up,
            "unsent": self._unsent,
            "done": describe(self._times_s[True]),
            "refused": describe(self._times_s[False]),
        }

    def _send(self) -> None:
        while self.free:
            connection = self.free.popleft()
            if connection.transport is not None:
                connection.sent_at = time.perf_counter()
                connection.transport.write(self._request)
                return
        self._unsent += 1

    def _give_up(self) -> None:
        until = time.perf_counter() - self._order["timeout_s"]
        for connection in self.connections:
            if connection.transport is not None and 0 < connection.sent_at < until:
                connection.transport.abort()


def describe(times_s: list[float]) -> dict[str, float]:
    count = len(times_s)
    times_s = sorted(times_s) or [0.0]
    return {
        "count": count,
        "p50_ms": 1000 * times_s[len(times_s) // 2],
        "p99_ms": 1000 * times_s[len(times_s) * 99 // 100],
        "max_ms": 1000 * times_s[-1],
    }


def number_of(head: bytes, name: bytes) -> int:
    """Return the number in a header; 0 without it."""
    _, found, rest = head.partition(name)
    return int(rest.partition(b"\r\n")[0]) if found else 0


def main() -> None:
    order = json.load(sys.stdin)
    json.dump(asyncio.run(Load(order).run()), sys.stdout)


if __name__ == "__main__":
    main()
