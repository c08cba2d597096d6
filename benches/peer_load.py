"""One client process of `run_peers.py`: it gets commands as JSON lines and answers each with a JSON line.

    python peer_load.py '{"peer": "redis", "addresses": ["127.0.0.1:6379"], "nodes": 1, "is_synced": true}'

Quiver's runs with Quiver's Python, all others with the Python that has their clients: it imports nothing of Quiver
before it knows that it is to load Quiver. Values are log lines of 100 bytes.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from peer_clients import CLIENTS, PeerClient, Target
from queue_peer_load import BATCH, BATCH_WORKERS, LOADS, SINGLE_WORKERS

LINE_BYTES = 100
_DISTINCT = 1_000
_STAMP = 20
"""Digits of the time at which a value was sent, in nanoseconds, at its beginning."""


def make_lines(count: int) -> list[bytes]:
    """Return log lines of `LINE_BYTES` bytes; a thousand different ones, again and again."""
    lines = []
    for number in range(min(count, _DISTINCT)):
        text = f"2026-11-16T22:{number // 60 % 60:02}:{number % 60:02}Z INFO gateway request={number * 7919:08x} "
        text += f"status={200 if number % 9 else 503} bytes={number * 37 % 9973} path=/v1/items/{number}"
        lines.append(text.encode().ljust(LINE_BYTES, b".")[:LINE_BYTES])
    return [lines[at % _DISTINCT] for at in range(count)]


def stamp(sent: float) -> bytes:
    """Return a value that was sent at this time of the machine's monotonic clock, which all its processes share."""
    return b"%0*d" % (_STAMP, round(sent * 1e9)) + b"." * (LINE_BYTES - _STAMP)


def is_stamped(value: bytes) -> bool:
    return value[:_STAMP].isdigit()


def age_s(value: bytes) -> float:
    """Return the time since a stamped value was sent."""
    return time.perf_counter() - int(value[:_STAMP]) / 1e9


def quantiles_ms(times_s: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in milliseconds."""
    ordered = sorted(times_s)
    return {
        name: 1000 * ordered[max(0, -(-len(ordered) * share // 100) - 1)] for name, share in (("p50", 50), ("p99", 99))
    }


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


class QuiverJobs:
    """The work queue of `bench_queue.py`, with the methods that the loads of other queues have."""

    def __init__(self, queue: str, target: Target) -> None:
        self._bench: Any = importlib.import_module("bench_queue")
        self._queue = queue
        self._target = target

    async def fill(self, records: int) -> None:
        await self._bench.prepare(self._target.addresses, records, replicas=self._target.nodes, topic=self._queue)

    async def drain(self, records: int, workers: int, batch: int) -> None:
        await self._bench.drain(self._target.addresses, workers, batch, records, topic=self._queue)


class Commands:
    """What the process can be asked to do."""

    def __init__(self, peer: str, target: Target) -> None:
        self._client: PeerClient = CLIENTS[peer](target)
        self._peer = peer
        self._target = target

    def create(self, topic: str) -> dict[str, Any]:
        self._client.create(topic)
        return {}

    def produce(self, topic: str, records: int) -> dict[str, Any]:
        values = make_lines(records)
        return self._timed(lambda: self._client.produce(topic, values))

    def consume(self, topic: str, records: int) -> dict[str, Any]:
        return self._timed(lambda: self._client.consume(topic, records))

    def consume_arrow(self, topic: str, records: int) -> dict[str, Any]:
        client: Any = self._client
        return self._timed(lambda: client.consume_arrow(topic, records))

    def awaited(self, topic: str, records: int) -> dict[str, Any]:
        """Send twice as many; only the second half is counted."""
        return quantiles_ms(self._client.awaited(topic, make_lines(2 * records))[records:])

    def pace(self, topic: str, records: int, per_s: int) -> dict[str, Any]:
        begun = time.perf_counter()
        self._client.pace(topic, [begun + number / per_s for number in range(2 * records)], stamp)
        return {"seconds": time.perf_counter() - begun}

    def tail(self, topic: str, records: int) -> dict[str, Any]:
        """Read what `pace` sends; only the second half is counted."""
        ages_s: list[float] = []

        def handle(value: bytes) -> bool:
            ages_s.append(age_s(value))
            return len(ages_s) == 2 * records

        self._client.tail(topic, handle, lambda: say({"ready": True}))
        return quantiles_ms(ages_s[records:])

    def fill(self, queue: str, records: int) -> dict[str, Any]:
        return self._timed(lambda: asyncio.run(self._jobs(queue).fill(records)))

    def batches(self, queue: str, records: int) -> dict[str, Any]:
        return self._timed(lambda: asyncio.run(self._jobs(queue).drain(records, BATCH_WORKERS, BATCH)))

    def single(self, queue: str, records: int) -> dict[str, Any]:
        return self._timed(lambda: asyncio.run(self._jobs(queue).drain(records, SINGLE_WORKERS, 1)))

    def _jobs(self, queue: str) -> Any:
        if self._peer == "quiver":
            return QuiverJobs(queue, self._target)
        port = int(self._target.addresses[0].rstrip("/").rpartition(":")[2].partition("/")[0])
        return LOADS[self._peer](port, queue=queue, replicas=self._target.nodes, is_synced=self._target.is_synced)

    def _timed(self, work: Callable[[], object]) -> dict[str, Any]:
        begun = time.perf_counter()
        work()
        return {"seconds": time.perf_counter() - begun}


def main(settings: str) -> None:
    try:
        wanted = json.loads(settings)
        peer = wanted.pop("peer")
        commands = Commands(peer, Target(**{**wanted, "addresses": tuple(wanted["addresses"])}))
        say({"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            say(getattr(commands, request.pop("command"))(**request))
    except Exception as error:  # noqa: BLE001 - whoever asked shows it
        say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main(sys.argv[1])
