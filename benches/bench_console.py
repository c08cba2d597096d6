"""What open consoles cost a node: processor time with none, with one and with 50.

    python bench_console.py [--seconds 15] [--consoles 50] [--topics 100]

Three nodes as processes. A console is one stream of server-sent events and a list of topics every three seconds, as the
page asks for them; all are open on the first node. What a node takes anyway is subtracted.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys

from processes import NodeProcess, processor_s, running_nodes
from table import Row, show

SHARE_MAX = 0.05
"""Of a core, for all consoles."""
TOPICS_EVERY_S = 3.0


async def look(host: str, port: int, received: list[int], number: int) -> None:
    """Be a console: read the stream, and ask for the topics now and then."""
    await asyncio.gather(follow(host, port, received), list_topics(host, port, number))


async def follow(host: str, port: int, received: list[int]) -> None:
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    writer.write(b"GET /console/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while data := await reader.read(1 << 16):
        received[0] += data.count(b"event: update")
        received[1] += len(data)


async def list_topics(host: str, port: int, number: int) -> None:
    await asyncio.sleep(number * TOPICS_EVERY_S / 50)
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    while True:
        writer.write(b"GET /console/topics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        await reader.readexactly(length)
        await asyncio.sleep(TOPICS_EVERY_S)


async def measure(node: NodeProcess, consoles: int, seconds: float) -> tuple[float, float, float]:
    """Return the share of a core that a node takes, and updates and bytes of a console per second."""
    host, port = node.http.split(":")
    received = [0, 0]
    open_consoles = [asyncio.create_task(look(host, int(port), received, at)) for at in range(consoles)]
    await asyncio.sleep(3)  # the history is sent, and the first measurements are made
    received[:] = [0, 0]
    before = processor_s(node.pid)
    await asyncio.sleep(seconds)
    share = (processor_s(node.pid) - before) / seconds
    each = max(1, consoles)
    result = share, received[0] / seconds / each, received[1] / seconds / each
    for one in open_consoles:
        one.cancel()
    await asyncio.gather(*open_consoles, return_exceptions=True)
    return result


def create_topics(node: NodeProcess, count: int) -> None:
    client = http.client.HTTPConnection(node.http)
    for number in range(count):
        body = json.dumps({"topic_name": f"topic-{number}", "partitions": 3})
        client.request("POST", "/topics", body)
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
        idle, _, _ = asyncio.run(measure(node, 0, options.seconds))
        one, _, _ = asyncio.run(measure(node, 1, options.seconds))
        many, updates, size = asyncio.run(measure(node, options.consoles, options.seconds))
    rows = [
        Row("no console", 100 * idle, "% of a core"),
        Row("one console, beyond that", 100 * max(0.0, one - idle), "% of a core"),
        Row(
            f"{options.consoles} consoles, beyond that",
            100 * max(0.0, many - idle),
            "% of a core",
            target=100 * SHARE_MAX,
        ),
        Row("updates of a console", updates, "updates/s"),
        Row("bytes of a console", size / 1024, "KiB per second"),
    ]
    return show(rows, title=f"Consoles on a node of three, {options.topics} topics with 3 partitions each")


if __name__ == "__main__":
    sys.exit(main())
