"""The memory of a node under attack, on its wire port and over HTTP.

On the wire: fetches of everything, slow readers, mere lengths, silence. Over HTTP: aborted uploads, crumbs, bodies that
never come, deep JSON, long polls. Both: compressed batches of zeros, which are many times as large when they are read.

    python benches/bench_attacks.py [WORD]

Without a word, all attacks run; with one, those that have it in their names.

Each attack runs against the same node, one after the other, while its resident memory is sampled; the target is the
bound of all nodes under every attack. After each of them an honest client must be served.
"""

from __future__ import annotations

import json
import re
import resource
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "security"))

from wire_attacker import Attacker

import attacks_http
import processes
import quiver
from quiver.model import ConsumerId, Offset, PartitionId, TopicId
from quiver.wire.messages import ConsumeMany, Fetch
from table import Row, show

MIB = 1 << 20
RSS_MIB_MAX = 512
KILL_MIB = 4_096
"""Memory at which a node is killed, for the sake of the machine."""
VALUE = bytes(256 * 1024)
VALUES = 800
SECONDS = 3.0
SERVED_S_MAX = 120.0
"""Time within which an honest client must be served after an attack."""
TOPIC = "attacked"
EMPTY = "empty"
ZEROS = "zeros"
DELAYED_ZEROS = "delayed-zeros"
ZEROS_BYTES = 8 * MIB
ZEROS_BATCHES = 200
"""What a reader that reads all of them at once would hold: 1.6 GiB."""


def main() -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with processes.running_nodes(1, ["--log-durability", "none"]) as nodes:
        node = nodes.nodes[0]
        target = Target(node.wire, node.http, fill(node.wire))
        memory = [Row("idle, 200 MiB of records", rss_mib(node.pid), "MiB", target=RSS_MIB_MAX)]
        served = []
        for name in [name for name in ATTACKS if all(word in name for word in sys.argv[1:])]:
            if name.startswith(ZEROS):
                restart(node)  # so that the records are read from files
            peak_mib = attack(node, name, target)
            memory.append(Row(name, peak_mib, "MiB", target=RSS_MIB_MAX))
            if not node.is_running:
                restart(node)
            served.append(Row(name, seconds_to_serve(node.wire), "s"))
            print(f"{name}: {peak_mib:.0f} MiB, {served[-1].measured:.1f} s", file=sys.stderr, flush=True)
        served.append(Row("slowest /healthz during the long polls", target.slowest_probe_ms / 1_000, "s"))
    status = show(memory, title="resident memory of a node under attack")
    show(served, title="time until an honest client is served after the attack")
    return status


def restart(node: processes.NodeProcess) -> None:
    if node.is_running:
        node.stop()
    node.start()
    node.wait_ready()


def attack(node: processes.NodeProcess, name: str, target: Target) -> float:
    """Run one attack and look on for a while; return the highest memory of the node, in MiB."""
    with PeakMemory(node) as peak, ExitStack() as stack:
        ATTACKS[name](stack, target)
        time.sleep(SECONDS)
    return peak.mib


@dataclass
class Target:
    """The node under attack."""

    wire: str
    http: str
    topic: TopicId
    slowest_probe_ms: float = 0.0


def fill(wire: str) -> TopicId:
    """Make the topics: of plain records, empty, and of zeros that compression has made small."""
    with quiver.connect(wire) as client:
        for topic in (TOPIC, EMPTY, ZEROS, DELAYED_ZEROS):
            client.create_topic(topic, partitions=1)
        with client.producer(TOPIC) as producer:
            for _ in range(VALUES):
                producer.send(VALUE)
        for topic, delay in ((ZEROS, None), (DELAYED_ZEROS, 3_600.0)):
            with client.producer(topic, compression="zstd", batch_bytes=ZEROS_BYTES) as producer:
                for _ in range(ZEROS_BATCHES):
                    producer.send(bytes(ZEROS_BYTES), delay=delay).result()
        return client.describe_topic(TOPIC).topic_id


def seconds_to_serve(wire: str) -> float:
    """Return how long an honest client takes to connect and send a record, trying again for up to `SERVED_S_MAX`."""
    begun = time.monotonic()
    while True:
        try:
            with quiver.connect(wire) as client, client.producer(TOPIC) as producer:
                producer.send(b"x").result()
            return time.monotonic() - begun
        except quiver.QuiverError:
            if time.monotonic() - begun > SERVED_S_MAX:
                raise


def rss_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


class PeakMemory:
    """The highest memory of a node while the block runs; it kills one that would take the memory of all others."""

    def __init__(self, node: processes.NodeProcess) -> None:
        self.mib = 0.0
        self._node = node
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.mib = max(self.mib, rss_mib(self._node.pid))
            if self.mib > KILL_MIB:
                self._node.kill()
                return


def greet(stack: ExitStack, wire: str) -> Attacker:
    attacker = stack.enter_context(Attacker(wire, receive_buffer_bytes=4096))
    attacker.say_hello()
    return attacker


def fetch(topic: TopicId, bytes_max: int) -> Fetch:
    return Fetch(topic_id=topic, partition_id=PartitionId(0), offset=Offset(0), bytes_max=bytes_max)


def fetch_everything(stack: ExitStack, target: Target) -> None:
    for _ in range(4):
        greet(stack, target.wire).request(1, fetch(target.topic, 1 << 40))


def read_slowly(stack: ExitStack, target: Target) -> None:
    for _ in range(12):
        attacker = greet(stack, target.wire)
        for number in range(20):
            attacker.request(number, fetch(target.topic, 16 * MIB))


def claim_lengths(stack: ExitStack, target: Target) -> None:
    for _number in range(64):
        greet(stack, target.wire).send(struct.pack("<I", 70 * MIB))


def fall_short(stack: ExitStack, target: Target) -> None:
    for _number in range(16):
        attacker = greet(stack, target.wire)
        with suppress(ConnectionError):  # the node closes some of them
            attacker.send(struct.pack("<I", 70 * MIB) + bytes(60 * MIB))


def ask_for_nothing(stack: ExitStack, target: Target) -> None:
    for _number in range(12):
        attacker = greet(stack, target.wire)
        for number in range(200):
            attacker.request(number, fetch(target.topic, 0))


def keep_silent(stack: ExitStack, target: Target) -> None:
    for number in range(1_000):
        attacker = stack.enter_context(Attacker(target.wire))
        if number % 2:
            attacker.say_hello()


def abort_uploads(_: ExitStack, target: Target) -> None:
    attacks_http.abort_uploads(target.http)


def send_crumbs(stack: ExitStack, target: Target) -> None:
    attacks_http.send_crumbs(stack, target.http)


def announce_bodies(stack: ExitStack, target: Target) -> None:
    attacks_http.announce_bodies(stack, target.http)


def send_deep_json(stack: ExitStack, target: Target) -> None:
    attacks_http.send_deep_json(stack, target.http)


def poll(stack: ExitStack, target: Target) -> None:
    with quiver.connect(target.wire) as client, client.consumer(EMPTY, name="poller") as consumer:
        path = f"/consumer/consume?topic={EMPTY}&consumer_id={consumer.consumer_id}&wait_ms=20000"
        target.slowest_probe_ms = attacks_http.poll(stack, target.http, path)


def register_for_zeros(target: Target) -> ConsumerId:
    status, answer = attacks_http.ask(target.http, "POST", "/consumer/register", {"topic": ZEROS})
    assert status < 300, answer
    return ConsumerId(json.loads(answer)["consumer_id"])


def take_zeros(stack: ExitStack, target: Target) -> None:
    """Let a node take single records out of batches, which it must decompress for that."""
    consumers = (register_for_zeros(target),) * ZEROS_BATCHES
    with quiver.connect(target.wire) as client:
        topic = client.describe_topic(ZEROS).topic_id
    for _ in range(8):
        request = ConsumeMany(topic_id=topic, partition_id=PartitionId(0), consumer_ids=consumers)
        greet(stack, target.wire).request(1, request)


def consume_zeros(_: ExitStack, target: Target) -> None:
    """Let consumers of HTTP read zeros, a hundred records at a time."""
    path = f"/consumer/consume_batch?topic={ZEROS}&consumer_id={register_for_zeros(target)}&max=100"
    attacks_http.read_repeatedly(target.http, "GET", path)


def browse_zeros(_: ExitStack, target: Target) -> None:
    path = f"/topics/{ZEROS}/records?max=10000&scan=100000"
    attacks_http.read_repeatedly(target.http, "GET", f"{path}&search=none")
    attacks_http.read_repeatedly(target.http, "GET", path)


def receive_zeros(_: ExitStack, target: Target) -> None:
    receive(target, ZEROS)


def receive_delayed_zeros(_: ExitStack, target: Target) -> None:
    receive(target, DELAYED_ZEROS)


def receive(target: Target, topic: str) -> None:
    """Receive a hundred jobs at a time, in a group of the topic's own."""
    body = {"topic": topic, "group": f"{topic}-workers", "max": 100}
    attacks_http.read_repeatedly(target.http, "POST", "/queue/receive", body)


Attack = Callable[[ExitStack, Target], None]
ATTACKS: dict[str, Attack] = {
    "4 fetches of 2⁴⁰ bytes": fetch_everything,
    "12 connections × 20 fetches of 16 MiB, not read": read_slowly,
    "64 lengths of 70 MiB without their bytes": claim_lengths,
    "16 frames of 70 MiB without their end": fall_short,
    "12 connections × 200 fetches of 0 bytes, not read": ask_for_nothing,
    "1,000 silent connections": keep_silent,
    "aborted uploads of 15 MiB, 4 at a time": abort_uploads,
    "8 bodies in chunks of 2 bytes": send_crumbs,
    "8 announced bodies of 16 MiB that never come": announce_bodies,
    "8 bodies of 16 MiB of `[`": send_deep_json,
    "8,192 long polls, or as many as descriptors allow": poll,
    "zeros: taken one by one on the wire, not read": take_zeros,
    "zeros: consumed over HTTP": consume_zeros,
    "zeros: records browsed and searched": browse_zeros,
    "zeros: received from a queue": receive_zeros,
    "zeros: received from a queue, delayed": receive_delayed_zeros,
}


if __name__ == "__main__":
    sys.exit(main())
