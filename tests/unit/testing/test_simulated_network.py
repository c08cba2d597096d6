"""The simulated network loses, doubles, delays and cuts as told, counts it, and never changes a message."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from quiver.model import NodeId
from quiver.replication.interfaces import Network
from quiver.testing import Latency, NetworkFaults, SimulatedLoop, SimulatedNetwork, SimulatedPort, Trace

A, B, C = NodeId(1), NodeId(2), NodeId(3)


@dataclass
class Cluster:
    """Three nodes that note what they receive."""

    seed: int = 1
    rates: NetworkFaults = field(default_factory=lambda: NetworkFaults(Latency(minimum_ms=1, spread_ms=10)))
    keep_order: bool = False
    trace: Trace | None = None

    def __post_init__(self) -> None:
        self.loop = SimulatedLoop(random.Random(self.seed), trace=self.trace)
        self.network = SimulatedNetwork(
            self.loop,
            random.Random(self.seed),
            self.rates,
            keep_order=self.keep_order,
            classify=lambda data: "odd" if len(data) % 2 else "even",
            trace=self.trace,
        )
        self.received: dict[NodeId, list[tuple[NodeId, bytes]]] = {A: [], B: [], C: []}
        self.ports: dict[NodeId, SimulatedPort] = {}
        for node in (A, B, C):
            self.start(node)

    def start(self, node: NodeId) -> None:
        """Begin a life of a node."""
        self.ports[node] = port = self.network.port(node)
        with self.loop.node_scope(node):
            port.start(lambda source, message: self.received[node].append((source, bytes(message))))

    def send(self, source: NodeId, target: NodeId, *numbers: int) -> None:
        """Send numbered messages."""
        for number in numbers:
            self.ports[source].send(target, [b"message ", b"%d" % number])

    def run(self, seconds: float = 1.0) -> None:
        """Let virtual time pass."""
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def numbers(self, node: NodeId) -> list[int]:
        """Return the numbers of the messages that a node received, in order."""
        return [int(data.split()[1]) for _, data in self.received[node]]


def test_port_implements_the_seam_and_joins_the_parts() -> None:
    cluster = Cluster()
    port = cluster.ports[A]
    seam: Network = port
    part = bytearray(b"hello ")
    seam.send(B, [part, memoryview(b"world")])
    part[:] = b"XXXXXX"
    assert port.backlog_bytes(B) == 11
    assert cluster.received[B] == []
    cluster.run()
    assert cluster.received[B] == [(A, b"hello world")]
    assert (port.backlog_bytes(B), cluster.network.bytes_sent, cluster.network.delivered_count) == (0, 11, 1)


def test_messages_take_their_latency() -> None:
    cluster = Cluster(rates=NetworkFaults(Latency(minimum_ms=20)))
    cluster.send(A, B, 1)
    cluster.run(0.019)
    assert cluster.numbers(B) == []
    cluster.run(0.002)
    assert cluster.numbers(B) == [1]


def test_messages_overtake_each_other() -> None:
    cluster = Cluster()
    cluster.send(A, B, *range(50))
    cluster.run()
    assert sorted(cluster.numbers(B)) == list(range(50))
    assert cluster.numbers(B) != list(range(50))
    assert cluster.network.faults["reordered"] > 0


@pytest.mark.parametrize("seed", range(10))
def test_kept_order_is_kept_over_latency_clog_and_pause(seed: int) -> None:
    cluster = Cluster(seed, keep_order=True)
    cluster.send(A, B, *range(20))
    cluster.run(0.005)
    cluster.network.clog(A, B)
    cluster.run(0.01)
    cluster.send(A, B, *range(20, 40))
    cluster.run(0.002)
    cluster.loop.pause(B)
    cluster.network.unclog(A, B)
    cluster.send(A, B, *range(40, 60))
    cluster.run()
    cluster.loop.resume(B)
    cluster.run()
    assert cluster.numbers(B) == list(range(60))
    assert cluster.network.faults["reordered"] == 0


def test_kept_order_makes_messages_wait_for_a_slow_one_before_them() -> None:
    cluster = Cluster(rates=NetworkFaults(Latency(minimum_ms=100)), keep_order=True)
    cluster.send(A, B, 1)
    cluster.rates.latency = Latency(minimum_ms=1)
    cluster.send(A, B, 2)
    cluster.run(0.05)
    assert cluster.numbers(B) == []
    cluster.run(0.06)
    assert cluster.numbers(B) == [1, 2]


def test_kept_order_survives_the_death_of_the_receiver() -> None:
    cluster = Cluster(keep_order=True)
    cluster.send(A, B, *range(10))
    cluster.loop.pause(B)
    cluster.run()
    cluster.loop.kill(B)
    cluster.start(B)
    cluster.send(A, B, *range(10, 20))
    cluster.run()
    assert cluster.numbers(B) == list(range(10, 20))


def test_loss_happens_at_its_rate_and_is_counted() -> None:
    cluster = Cluster()
    cluster.rates.p_loss = 0.3
    cluster.send(A, B, *range(1000))
    cluster.run()
    assert 220 < cluster.network.faults["lost"] < 380
    assert len(cluster.received[B]) == 1000 - cluster.network.faults["lost"]


def test_doubled_messages_arrive_twice() -> None:
    cluster = Cluster()
    cluster.rates.p_double = 0.3
    cluster.send(A, B, *range(1000))
    cluster.run()
    assert 220 < cluster.network.faults["doubled"] < 380
    assert len(cluster.received[B]) == 1000 + cluster.network.faults["doubled"]
    assert set(cluster.numbers(B)) == set(range(1000))


def test_one_way_cut_lets_the_other_way_pass() -> None:
    cluster = Cluster()
    cluster.network.cut(A, B, both=False)
    cluster.send(A, B, 1)
    cluster.send(B, A, 2)
    cluster.send(A, C, 3)
    cluster.run()
    assert (cluster.numbers(B), cluster.numbers(A), cluster.numbers(C)) == ([], [2], [3])
    assert cluster.network.faults["cut"] == 1


def test_cut_loses_what_is_on_its_way_until_mended() -> None:
    cluster = Cluster()
    cluster.send(A, B, 1)
    cluster.network.cut(A, B)
    cluster.run()
    cluster.network.mend(A, B)
    cluster.send(A, B, 2)
    cluster.run()
    assert cluster.numbers(B) == [2]
    assert cluster.network.backlog_bytes(A, B) == 0


def test_isolated_node_reaches_nobody_until_it_rejoins() -> None:
    cluster = Cluster()
    cluster.network.isolate(A)
    cluster.send(A, B, 1)
    cluster.send(C, A, 2)
    cluster.send(B, C, 3)
    cluster.run()
    assert (cluster.numbers(A), cluster.numbers(B), cluster.numbers(C)) == ([], [], [3])
    cluster.network.rejoin(A)
    cluster.send(C, A, 4)
    cluster.run()
    assert cluster.numbers(A) == [4]


def test_clogged_link_holds_messages_and_their_bytes() -> None:
    cluster = Cluster()
    cluster.network.clog(A, B, both=False)
    cluster.send(A, B, *range(10))
    cluster.send(B, A, 99)
    cluster.run()
    assert (cluster.numbers(B), cluster.numbers(A)) == ([], [99])
    assert cluster.network.backlog_bytes(A, B) == 90
    assert cluster.network.faults["clogged"] == 10
    cluster.network.unclog(A, B, both=False)
    cluster.run()
    assert sorted(cluster.numbers(B)) == list(range(10))
    assert cluster.network.backlog_bytes(A, B) == 0


def test_heal_undoes_every_cut_isolation_and_clog() -> None:
    cluster = Cluster()
    cluster.network.cut(A, B)
    cluster.network.isolate(C)
    cluster.network.clog(B, A)
    cluster.network.heal()
    for source, target in ((A, B), (B, A), (A, C), (C, B)):
        cluster.send(source, target, 1)
    cluster.run()
    assert sum(len(received) for received in cluster.received.values()) == 4


def test_swizzle_clogs_each_node_for_a_while_and_loses_nothing() -> None:
    cluster = Cluster()
    cluster.network.swizzle([A, B, C], duration_ms=1000)
    for moment in range(100):
        cluster.send(A, B, moment)
        cluster.send(C, A, moment)
        cluster.run(0.01)
    cluster.run()
    assert cluster.network.faults["clogged"] > 20
    assert sorted(cluster.numbers(B)) == sorted(cluster.numbers(A)) == list(range(100))


def test_messages_to_a_killed_node_are_dropped() -> None:
    cluster = Cluster()
    cluster.send(A, B, 1, 2)
    cluster.loop.kill(B)
    cluster.network.disconnect(B)
    cluster.run()
    assert cluster.received[B] == []
    assert cluster.network.faults["no_receiver"] == 2


def test_messages_to_a_paused_node_are_delivered_at_resume() -> None:
    cluster = Cluster()
    cluster.loop.pause(B)
    cluster.send(A, B, 1, 2)
    cluster.run()
    assert cluster.received[B] == []
    cluster.loop.resume(B)
    cluster.run()
    assert sorted(cluster.numbers(B)) == [1, 2]


def test_messages_of_a_killed_node_arrive_in_part() -> None:
    arrived = set()
    for seed in range(50):
        cluster = Cluster(seed)
        cluster.send(A, B, *range(4))
        cluster.loop.kill(A)
        cluster.network.disconnect(A)
        cluster.run()
        assert len(cluster.received[B]) + cluster.network.faults["disconnected"] == 4
        arrived.add(len(cluster.received[B]))
    assert arrived == {0, 1, 2, 3, 4}


def test_messages_of_a_killed_node_lose_their_end_when_order_is_kept() -> None:
    for seed in range(20):
        cluster = Cluster(seed, keep_order=True)
        cluster.send(A, B, *range(4))
        cluster.network.disconnect(A)
        cluster.run()
        assert cluster.numbers(B) == list(range(len(cluster.received[B])))


def test_port_of_a_former_life_is_silent() -> None:
    cluster = Cluster()
    former = cluster.ports[A]
    cluster.loop.kill(A)
    cluster.start(A)
    former.send(B, [b"message 1"])
    cluster.send(A, B, 2)
    cluster.run()
    assert cluster.numbers(B) == [2]


@pytest.mark.parametrize("is_killed", [True, False])
def test_handler_runs_in_the_scope_of_the_receiver(is_killed: bool) -> None:
    cluster = Cluster()
    timers: list[str] = []

    def handle(source: NodeId, message: memoryview) -> None:
        cluster.loop.call_later(1, timers.append, "fired")

    with cluster.loop.node_scope(B):
        cluster.ports[B].start(handle)
    cluster.send(A, B, 1)
    cluster.run(0.5)
    if is_killed:
        cluster.loop.kill(B)
    cluster.run(3)
    assert timers == ([] if is_killed else ["fired"])


def test_messages_are_counted_by_kind() -> None:
    cluster = Cluster()
    cluster.send(A, B, 1, 10, 2)
    assert cluster.network.messages == {"odd": 2, "even": 1}


def test_same_seed_gives_the_same_deliveries() -> None:
    def digest(seed: int) -> str:
        cluster = Cluster(seed, trace=Trace())
        cluster.rates.p_loss = cluster.rates.p_double = 0.2
        cluster.network.swizzle([A, B], duration_ms=20)
        cluster.send(A, B, *range(50))
        cluster.run()
        assert cluster.trace is not None
        return cluster.trace.digest()

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)
