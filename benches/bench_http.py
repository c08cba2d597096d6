"""What HTTP clients get: one node with fsync in a process of its own, many connections that each wait for their answer.

    python bench_http.py [--seconds 5] [--connections 64]

A message is 100 bytes. The node's processor time per request is what other work on the machine does not change: it
bounds the rate on an idle core. The raw limit is the same server with nothing to do (`GET /healthz`), in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from table import Row, show

WARM_UP_S = 1.0
MESSAGE = "x" * 100
TARGET = 10_000
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Client(asyncio.Protocol):
    """One connection that sends the same request again as soon as it is answered."""

    def __init__(self, request: bytes, counts: dict[bytes, int]) -> None:
        self._request = request
        self._counts = counts
        self._received = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        _, has_body, length = head.partition(b"Content-Length: ")
        size = int(length.split(b"\r\n", 1)[0]) if has_body else 0
        if not end or len(rest) < size:
            return
        self._received = b""
        status = head[9:12]
        self._counts[status] = self._counts.get(status, 0) + 1
        self._transport.write(self._request)


class Node:
    """A node and what it has used of the processor."""

    def __init__(self, process: subprocess.Popen[str], host: str, port: int) -> None:
        self._process = process
        self.host, self.port = host, port

    def processor_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND

    async def load(self, request: bytes, *, connections: int, seconds: float) -> tuple[float, float]:
        """Return answers with 200 a second and the node's processor time for each; nothing else may be answered."""
        counts: dict[bytes, int] = {}
        loop = asyncio.get_running_loop()
        made = [
            (await loop.create_connection(lambda: Client(request, counts), self.host, self.port))[0]
            for _ in range(connections)
        ]
        await asyncio.sleep(WARM_UP_S)
        before, used_s, began = counts.get(b"200", 0), self.processor_s(), time.perf_counter()
        await asyncio.sleep(seconds)
        answered, used_s = counts.get(b"200", 0) - before, self.processor_s() - used_s
        elapsed_s = time.perf_counter() - began
        for transport in made:
            transport.abort()
        await asyncio.sleep(0.2)
        assert set(counts) == {b"200"}, counts
        return answered / elapsed_s, used_s / answered * 1e6


@contextmanager
def running_node(directory: str) -> Iterator[Node]:
    command = [sys.executable, "-m", "quiver", "node", "--id", "1", "--data", f"{directory}/data"]
    command += ["--wire", "127.0.0.1:0", "--http", "127.0.0.1:0", "--logging-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = re.search(r"http=(\S+):(\d+)", process.stdout.readline())
        assert ready, "the node did not start"
        yield Node(process, ready[1], int(ready[2]))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def encode(method: str, path: str, parameters: dict[str, object] | None = None) -> bytes:
    body = b"" if parameters is None else json.dumps(parameters).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nUser-Agent: bench\r\nAccept: */*\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


async def ask(node: Node, request: bytes) -> dict[str, int]:
    reader, writer = await asyncio.open_connection(node.host, node.port)
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length, head
    body: dict[str, int] = json.loads(await reader.readexactly(int(length[1])))
    writer.close()
    assert head.split()[1] in (b"200", b"201"), body
    return body


async def measure(node: Node, *, connections: int, seconds: float) -> list[Row]:
    producer = await ask(node, encode("POST", "/producer/register", {"topic": "bench"}))
    consumer = await ask(node, encode("POST", "/consumer/register", {"topic": "bench"}))
    about: dict[str, object] = {"topic": "bench", "producer_id": producer["producer_id"], "message": MESSAGE}
    produce = encode("POST", "/producer/produce", about)
    consume = encode("GET", f"/consumer/consume?topic=bench&consumer_id={consumer['consumer_id']}")
    idle, idle_us = await node.load(encode("GET", "/healthz"), connections=connections, seconds=seconds)
    rows = [
        Row("nothing (GET /healthz)", idle, "requests/s"),
        Row("nothing: node's processor time", idle_us, "µs"),
    ]
    # What is produced here is what is consumed below: more of it than can be.
    produced, produced_us = await node.load(produce, connections=connections, seconds=2 * seconds)
    consumed, consumed_us = await node.load(consume, connections=connections, seconds=seconds)
    rows += [
        Row("produce", produced, "requests/s", raw_limit=idle, target=TARGET),
        Row("produce: node's processor time", produced_us, "µs", raw_limit=idle_us, target=1e6 / TARGET),
        Row("consume", consumed, "requests/s", raw_limit=idle, target=TARGET),
        Row("consume: node's processor time", consumed_us, "µs", raw_limit=idle_us, target=1e6 / TARGET),
    ]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quiver-bench-") as directory, running_node(directory) as node:
        rows = asyncio.run(measure(node, connections=options.connections, seconds=options.seconds))
    return show(rows, title=f"HTTP, one node, fsync on, {options.connections} connections, 100-byte messages")


if __name__ == "__main__":
    sys.exit(main())
