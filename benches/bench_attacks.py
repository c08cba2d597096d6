"""The memory of a node under attack on its wire port: fetches of everything, slow readers, mere lengths, silence.

    python benches/bench_attacks.py

Each attack runs against the same node, one after the other, while its resident memory is sampled; the target is the
bound of all nodes under every attack. At the end an honest client must be served.
"""

from __future__ import annotations

import re
import struct
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "security"))

from wire_attacker import Attacker

import processes
import quiver
from quiver.model import Offset, PartitionId, TopicId
from quiver.wire.messages import Fetch
from table import Row, show

MIB = 1 << 20
RSS_MIB_MAX = 512
VALUE = bytes(256 * 1024)
VALUES = 800
SECONDS = 3.0
TOPIC = "attacked"


def main() -> int:
    with processes.running_nodes(1, ["--log-durability", "none"]) as nodes:
        node = nodes.nodes[0]

        topic = fill(node.wire)
        rows = [Row("idle, 200 MiB of records", rss_mib(node.pid), "MiB", target=RSS_MIB_MAX)]
        for name, attack in ATTACKS.items():
            with ExitStack() as stack:
                attack(stack, node.wire, topic)
                rows.append(Row(name, peak_mib(node.pid), "MiB", target=RSS_MIB_MAX))
        serve_honestly(node.wire)
    return show(rows, title="resident memory of a node under attack")


def fill(wire: str) -> TopicId:
    with quiver.connect(wire) as client:
        client.create_topic(TOPIC, partitions=1)
        with client.producer(TOPIC) as producer:
            for _ in range(VALUES):
                producer.send(VALUE)
        return client.describe_topic(TOPIC).topic_id


def serve_honestly(wire: str) -> None:
    with quiver.connect(wire) as client, client.producer(TOPIC) as producer:
        assert producer.send(b"x").result().offset == VALUES


def rss_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def peak_mib(pid: int) -> float:
    """Return the highest memory while an attack goes on."""
    end, peak = time.monotonic() + SECONDS, 0.0
    while time.monotonic() < end:
        peak = max(peak, rss_mib(pid))
        time.sleep(0.02)
    return peak


def greet(stack: ExitStack, wire: str) -> Attacker:
    attacker = stack.enter_context(Attacker(wire, receive_buffer_bytes=4096))
    attacker.say_hello()
    return attacker


def fetch(topic: TopicId, bytes_max: int) -> Fetch:
    return Fetch(topic_id=topic, partition_id=PartitionId(0), offset=Offset(0), bytes_max=bytes_max)


def fetch_everything(stack: ExitStack, wire: str, topic: TopicId) -> None:
    for _ in range(4):
        greet(stack, wire).request(1, fetch(topic, 1 << 40))


def read_slowly(stack: ExitStack, wire: str, topic: TopicId) -> None:
    for _ in range(12):
        attacker = greet(stack, wire)
        for number in range(20):
            attacker.request(number, fetch(topic, 16 * MIB))


def claim_lengths(stack: ExitStack, wire: str, _: TopicId) -> None:
    for _number in range(64):
        greet(stack, wire).send(struct.pack("<I", 70 * MIB))


def fall_short(stack: ExitStack, wire: str, _: TopicId) -> None:
    for _number in range(16):
        attacker = greet(stack, wire)
        with suppress(ConnectionError):  # the node closes some of them
            attacker.send(struct.pack("<I", 70 * MIB) + bytes(60 * MIB))


def ask_for_nothing(stack: ExitStack, wire: str, topic: TopicId) -> None:
    for _number in range(12):
        attacker = greet(stack, wire)
        for number in range(200):
            attacker.request(number, fetch(topic, 0))


def keep_silent(stack: ExitStack, wire: str, _: TopicId) -> None:
    for number in range(1_000):
        attacker = stack.enter_context(Attacker(wire))
        if number % 2:
            attacker.say_hello()


Attack = Callable[[ExitStack, str, TopicId], None]
ATTACKS: dict[str, Attack] = {
    "4 fetches of 2⁴⁰ bytes": fetch_everything,
    "12 connections × 20 fetches of 16 MiB, not read": read_slowly,
    "64 lengths of 70 MiB without their bytes": claim_lengths,
    "16 frames of 70 MiB without their end": fall_short,
    "12 connections × 200 fetches of 0 bytes, not read": ask_for_nothing,
    "1,000 silent connections": keep_silent,
}


if __name__ == "__main__":
    sys.exit(main())
