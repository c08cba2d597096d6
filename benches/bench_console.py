"""What open consoles cost a node: processor time with none, with one and with 50.

    python bench_console.py [--seconds 15] [--consoles 50] [--topics 100]

Three nodes as processes. A console is one stream of server-sent events and what its page repeats, as the page asks for
it: the list of topics every three seconds, or a topic, or a group and its lag, every two, with answers that consoles
share. A third of the consoles each shows the list, a topic and a group; at last, all consoles repeat all of it. All are
open on the first node, and what the node takes anyway is subtracted. Not covered are pages of records, which share
nothing, what people click on, and what the other nodes take to answer.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import sys
from dataclasses import dataclass

from processes import NodeProcess, processor_s, running_nodes
from table import Row, show

SHARE_MAX = 0.05
"""Of a core, for all consoles."""
TOPIC, GROUP = "topic-0", "group-0"
PAGES: tuple[tuple[tuple[str, float], ...], ...] = (
    (("/console/topics", 3.0),),
    ((f"/topics/{TOPIC}?shared=true", 2.0),),
    ((f"/groups/{GROUP}?shared=true", 2.0), (f"/groups/{GROUP}/lag?shared=true", 2.0)),
)
"""What each page repeats, and after how many seconds."""


@dataclass
class Received:
    """What all consoles got."""

    updates: int = 0
    size_bytes: int = 0
    answers: int = 0


async def look(host: str, port: int, received: Received, *, number: int, has_all: bool) -> None:
    """Be a console with one page open, or with all of them."""
    pages = PAGES if has_all else (PAGES[number % len(PAGES)],)
    polls = (poll(host, port, received, path, every_s) for page in pages for path, every_s in page)
    await asyncio.gather(follow(host, port, received), *polls)


async def follow(host: str, port: int, received: Received) -> None:
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    writer.write(b"GET /console/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while data := await reader.read(1 << 16):
        received.updates += data.count(b"event: update")
        received.size_bytes += len(data)


async def poll(host: str, port: int, received: Received, path: str, every_s: float) -> None:
    await asyncio.sleep(random.uniform(0, every_s))  # people do not open their pages at the same time
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    while True:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise RuntimeError(f"{path}: {head!r}")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        await reader.readexactly(length)
        received.answers += 1
        received.size_bytes += len(head) + length
        await asyncio.sleep(every_s)


async def measure(node: NodeProcess, consoles: int, seconds: float, *, has_all: bool = False) -> tuple[float, Received]:
    """Return the share of a core that a node takes, and what all consoles got in that time."""
    host, port = node.http.split(":")
    received = Received()
    async with asyncio.TaskGroup() as tasks:
        opened = [
            tasks.create_task(look(host, int(port), received, number=number, has_all=has_all))
            for number in range(consoles)
        ]
        await asyncio.sleep(5)  # the history is sent, the first measurements are made, and every page has begun
        received.updates = received.size_bytes = received.answers = 0
        before = processor_s(node.pid)
        await asyncio.sleep(seconds)
        share = (processor_s(node.pid) - before) / seconds
        result = Received(received.updates, received.size_bytes, received.answers)
        for one in opened:
            one.cancel()
    return share, result


def create_topics(node: NodeProcess, count: int) -> None:
    client = http.client.HTTPConnection(node.http)
    for number in range(count):
        body = json.dumps({"topic_name": f"topic-{number}", "partitions": 3})
        client.request("POST", "/topics", body)
        client.getresponse().read()
    client.request("POST", "/consumer/register", json.dumps({"topic": TOPIC, "group": GROUP}))
    client.getresponse().read()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--consoles", type=int, default=50)
    parser.add_argument("--topics", type=int, default=100)
    options = parser.parse_args()
    with running_nodes(3) as nodes:
        node = nodes.nodes[0]
        create_topics(node, options.topics)
        idle, _ = asyncio.run(measure(node, 0, options.seconds))
        one, _ = asyncio.run(measure(node, 1, options.seconds))
        many, got = asyncio.run(measure(node, options.consoles, options.seconds))
        most, _ = asyncio.run(measure(node, options.consoles, options.seconds, has_all=True))
    each = options.seconds * options.consoles
    name = f"{options.consoles} consoles, beyond that"
    rows = [
        Row("no console", 100 * idle, "% of a core"),
        Row("one console, beyond that", 100 * max(0.0, one - idle), "% of a core"),
        Row(name, 100 * max(0.0, many - idle), "% of a core", target=100 * SHARE_MAX),
        Row(f"{name}, each with all pages", 100 * max(0.0, most - idle), "% of a core"),
        Row("updates of a console", got.updates / each, "updates/s"),
        Row("answers of a console", got.answers / each, "answers/s"),
        Row("bytes of a console", got.size_bytes / each / 1024, "KiB per second"),
    ]
    return show(rows, title=f"Consoles on a node of three, {options.topics} topics with 3 partitions each")


if __name__ == "__main__":
    sys.exit(main())
