"""Throw made-up sequences of frames at a live node, before and after the hello, and hold it to going on.

    python tests/fuzz/live/wire_sequences.py [--cases 500] [--seed N]

A case is one connection: a hello (of a client, of a node with or without the nodes' secret, mutated, or none), then
steps in any order: requests with ordinary and extreme numbers, Raft messages, cancels, responses, mutated and truncated
frames, silence. A finding is a node that has ended, a handler that failed with a defect, memory beyond the bound, or a
node that does not serve an honest client afterwards. The node is real: its own process, its own disk.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "security"))

import msgspec
from wire_attacker import Attacker

import quiver
from quiver.model import GroupId, Index, NodeId, Term
from quiver.raft import AppendResponse, Heartbeat, TimeoutNow, VoteRequest, VoteResponse
from quiver.replication.codec import GroupMessage, encode_envelope
from quiver.wire.envelope import ErrorInfo, encode_cancel, encode_failure
from quiver.wire.frames import FrameKind, encode_frame
from quiver.wire.handshake import encode_hello, make_hello, make_requester_hello

RSS_BYTES_MAX = 512 * 1024 * 1024
STEPS_MAX = 12
NUMBERS = (0, 1, 2, 3, 7, -1, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 40, (1 << 53) - 1, 1 << 53, 1 << 62, (1 << 64) - 1)
TAGS = [
    "get_metadata",
    "create_topic",
    "configure_topic",
    "add_partitions",
    "register_producer",
    "register_consumer",
    "fetch",
    "read_replica",
    "find_offset",
    "consume",
    "take_each",
    "move_cursor",
    "get_cursors",
    "begin_epoch",
    "produce",
    "submit_command",
    "heartbeat",
    "get_members",
    "describe_node",
    "list_clients",
    "list_moves",
    "list_managers",
    "list_holds",
    "place_hold",
    "release_hold",
    "explain_replica",
    "nonsense",
]
FIELDS = [
    "topic_id",
    "partition_id",
    "offset",
    "bytes_max",
    "wait_ms",
    "records_max",
    "consumer_id",
    "consumer_ids",
    "cursors",
    "producer_id",
    "epoch",
    "at",
    "session",
    "topic",
    "topics",
    "partitions",
    "replicas",
    "group",
    "groups",
    "known_index",
    "node",
    "identity",
    "name",
    "kind",
    "id",
    "lasting_ms",
    "offsets",
    "with_replicas",
    "with_metrics",
    "level_max",
    "request_id",
    "is_linearizable",
    "is_handed_on",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500, help="how many connections (default: 500)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quiver-fuzz-") as directory:
        return fuzz(Path(directory), options.cases, random.Random(options.seed))


def fuzz(directory: Path, cases: int, rng: random.Random) -> int:
    """Run a node, throw sequences at it, and judge it."""
    command = [sys.executable, "-m", "quiver", "node", "--id", "1", "--data", str(directory / "data")]
    command += ["--wire", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    with (directory / "node.log").open("wb") as log:
        node = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            wire = wait_ready(node)
            serve_honestly(wire, "before")
            peak_bytes = 0
            for number in range(cases):
                with suppress(OSError, AssertionError, quiver.QuiverError):
                    attack(wire, random.Random(rng.getrandbits(64)))
                if number % 20 == 0:
                    assert node.poll() is None, f"case {number}: the node has ended\n{tail(directory)}"
                    peak_bytes = max(peak_bytes, rss_bytes(node.pid))
            serve_honestly(wire, "after")
            peak_bytes = max(peak_bytes, rss_bytes(node.pid))
        finally:
            node.send_signal(signal.SIGTERM)
            status = node.wait(timeout=60)
    defects = (directory / "node.log").read_text(errors="replace").count("request handler failed")
    sys.stdout.write(f"cases: {cases}, peak memory: {peak_bytes >> 20} MiB, defects: {defects}, exit: {status}\n")
    if defects or status or peak_bytes > RSS_BYTES_MAX:
        sys.stdout.write(tail(directory))
        return 1
    return 0


def tail(directory: Path) -> str:
    return (directory / "node.log").read_text(errors="replace")[-4000:]


def wait_ready(node: subprocess.Popen[str]) -> str:
    """Return the wire address that the node prints when it is ready."""
    assert node.stdout is not None
    for line in node.stdout:
        if found := re.search(r"^ready .*wire=(\S+)", line):
            return found[1]
    raise AssertionError("the node ended before it was ready")


def serve_honestly(wire: str, topic: str) -> None:
    """Hold the node to serving an honest client."""
    with quiver.connect(wire) as client:
        client.create_topic(topic, partitions=1)
        with client.producer(topic) as producer:
            assert producer.send(b"x").result().offset == 0


def rss_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


# -- one case ------------------------------------------------------------------------------------------


def attack(wire: str, rng: random.Random) -> None:
    """Run one sequence."""
    with Attacker(wire, receive_buffer_bytes=rng.choice((None, 4096))) as attacker:
        attacker.socket.settimeout(0.5)
        rng.choice(HELLOS)(attacker, rng)
        for _ in range(rng.randrange(STEPS_MAX)):
            rng.choice(STEPS)(attacker, rng)
        if rng.random() < 0.5:
            read_some(attacker)


def read_some(attacker: Attacker) -> None:
    with suppress(socket.timeout):
        for _ in range(20):
            if attacker.next_frame() is None:
                return


def say_client(attacker: Attacker, rng: random.Random) -> None:
    attacker.say_hello()


def say_node(attacker: Attacker, rng: random.Random) -> None:
    attacker.pretend(rng.choice((2, 4242)), cluster_id="quiver")


def say_unproven(attacker: Attacker, rng: random.Random) -> None:
    attacker.send(encode_hello(make_hello(cluster_id="quiver", node=NodeId(3), incarnation=1)))


def say_mutated(attacker: Attacker, rng: random.Random) -> None:
    attacker.send(mutate(encode_hello(make_requester_hello(name="x")), rng))


def say_nothing(attacker: Attacker, rng: random.Random) -> None:
    pass


def send_request(attacker: Attacker, rng: random.Random) -> None:
    body = {"type": rng.choice(TAGS), **{name: value(rng) for name in rng.sample(FIELDS, rng.randrange(7))}}
    if rng.random() < 0.7:
        body |= {"topic_id": rng.choice((0, 1, 2)), "partition_id": 0}
    head = msgspec.msgpack.encode((rng.choice(NUMBERS[:5]), rng.choice((0, 100, 5_000)), body))
    payload = rng.randbytes(rng.choice((0, 0, 100, 70_000)))
    data = b"".join(encode_frame(FrameKind.REQUEST, head, (payload,), check_payload=rng.random() < 0.8))
    attacker.send(data if rng.random() < 0.8 else mutate(data, rng))


def value(rng: random.Random) -> Any:
    return rng.choice(
        (
            rng.choice(NUMBERS),
            rng.choice(("", "before", "x" * 400, "latest", "\0")),
            None,
            True,
            [rng.choice(NUMBERS) for _ in range(rng.randrange(4))],
            [[rng.choice(NUMBERS), rng.choice(NUMBERS)]],
            {"topic": "before"},
        )
    )


def send_raft(attacker: Attacker, rng: random.Random) -> None:
    def number() -> int:
        return rng.choice([each for each in NUMBERS if each >= 0])

    message = rng.choice(
        (
            Heartbeat(Term(number()), Index(number()), number()),
            VoteRequest(Term(number()), Index(number()), Term(number()), rng.random() < 0.5, rng.random() < 0.5),
            VoteResponse(Term(number()), True, rng.random() < 0.5),
            AppendResponse(Term(number()), True, Index(number()), Index(number()), Index(number()), number()),
            TimeoutNow(Term(number())),
        )
    )
    parts = encode_envelope(number(), [GroupMessage(GroupId(rng.choice((0, 1, 2, 99))), plain=message)], ())
    attacker.send(b"".join(encode_frame(FrameKind.MESSAGE, bytes(parts[0]), parts[1:])))


def send_cancel(attacker: Attacker, rng: random.Random) -> None:
    attacker.send(b"".join(encode_cancel(rng.choice((0, 1, 2, 3)))))


def send_response(attacker: Attacker, rng: random.Random) -> None:
    attacker.send(b"".join(encode_failure(1, ErrorInfo(kind="request", code="x"))))


def send_junk(attacker: Attacker, rng: random.Random) -> None:
    attacker.send(rng.randbytes(rng.randrange(1, 200)))


def send_length(attacker: Attacker, rng: random.Random) -> None:
    attacker.send(struct.pack("<I", rng.choice((0, 7, 4096, 70 << 20, 0xFFFFFFFF))) + rng.randbytes(rng.randrange(64)))


def mutate(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed[: rng.randrange(1, len(changed))] if rng.random() < 0.3 else changed)


Step = Callable[[Attacker, random.Random], None]
HELLOS: tuple[Step, ...] = (say_client, say_client, say_client, say_node, say_unproven, say_mutated, say_nothing)
STEPS: tuple[Step, ...] = (
    *(send_request,) * 6,
    *(send_raft,) * 2,
    send_cancel,
    send_response,
    send_junk,
    send_length,
)


if __name__ == "__main__":
    sys.exit(main())
