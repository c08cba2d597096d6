"""What goes wrong, drawn from a seed: kills of leaders, followers, the primary and everybody; pauses; restarts; cuts.

Every strike ends with what it broke running again, but the next may begin before the cluster has caught up. About a
quarter of the kills hit all nodes at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from random import Random

from chaos_cluster import Cluster, NodeProcess
from chaos_http import Answer, HttpClient, SurpriseError

WARM_UP_S = 2
"""How long clients work before the first strike."""
CALM_S = 1.5
"""Longest quiet between two strikes."""


class Nemesis:
    """Strikes a cluster that serves one topic."""

    def __init__(self, cluster: Cluster, topic: str, seed: int) -> None:
        self.rng = Random(f"nemesis {seed}")
        self.log: list[str] = []
        self.counts: Counter[str] = Counter()
        self._cluster = cluster
        self._topic = topic
        self._began = time.monotonic()

    @property
    def kills(self) -> int:
        """Return how many processes were killed."""
        return self.counts["kills"]

    def run(self, kills: int) -> None:
        """Strike until so many processes were killed."""
        strikes: list[tuple[Callable[[], None], int]] = [
            (self.kill_leader, 4),
            (self.kill_follower, 3),
            (self.kill_primary, 3),
            (self.kill_all, 2),
            (self.pause_one, 3),
            (self.restart_one, 2),
        ]
        if self._cluster.network is not None:
            strikes += [(self.cut_off_one, 3), (self.cut_one_way, 3), (self.cut_ring, 1)]
        time.sleep(WARM_UP_S)
        while self.kills < kills:
            self.rng.choices([strike for strike, _ in strikes], [weight for _, weight in strikes])[0]()
            time.sleep(self.rng.random() * CALM_S)

    def kill_leader(self) -> None:
        """Kill the node that leads some partition."""
        self._kill("leader", self._pick(self._some_leader()))

    def kill_follower(self) -> None:
        """Kill a node that does not lead some partition."""
        leader = self._some_leader()
        others = [node for node in self._cluster.nodes if node.id != leader]
        self._kill("follower", self.rng.choice(others))

    def kill_primary(self) -> None:
        """Kill the primary manager."""
        self._kill("primary", self._pick(self._primary()))

    def kill_all(self) -> None:
        """Kill every node at the same moment."""
        self._say("kill all")
        for node in self._cluster.nodes:
            node.kill()
        self.counts["kill all"] += 1
        self.counts["kills"] += len(self._cluster.nodes)
        time.sleep(self.rng.random() * 0.5)
        for node in self._cluster.nodes:
            node.start()
        self._wait_ready(self._cluster.nodes)

    def pause_one(self) -> None:
        """Let a node, the leader as likely as not, stand still for a while."""
        node = self._pick(self._some_leader() if self.rng.random() < 0.5 else None)
        seconds = self.rng.choice((0.3, 1.0, 3.0, 6.0))
        self._say(f"pause node {node.id} for {seconds} s")
        node.pause()
        self.counts["pauses"] += 1
        time.sleep(seconds)
        node.resume()

    def restart_one(self) -> None:
        """Stop a node as an operator does, and start it again."""
        node = self._pick(None)
        node.wait_ready()  # one that is still starting knows no other end than to be killed
        self._say(f"restart node {node.id}")
        code = node.stop()
        if code:
            raise AssertionError(f"node {node.id} ended with {code} when it was asked to stop:\n{node.last_words()}")
        self.counts["restarts"] += 1
        node.start()
        self._wait_ready([node])

    def cut_off_one(self) -> None:
        """Cut a node, the leader as likely as not, off from the others; clients still reach it."""
        node = self._pick(self._some_leader() if self.rng.random() < 0.5 else None)
        others = [other.id for other in self._cluster.nodes if other is not node]
        self._cut(f"node {node.id} off", [pair for other in others for pair in ((node.id, other), (other, node.id))])

    def cut_one_way(self) -> None:
        """Lose what one node sends to another, and nothing else."""
        sender, receiver = self.rng.sample([node.id for node in self._cluster.nodes], 2)
        self._cut(f"what node {sender} sends to node {receiver}", [(sender, receiver)])

    def cut_ring(self) -> None:
        """Let each node hear only the one before it."""
        numbers = [node.id for node in self._cluster.nodes]
        pairs = zip(numbers, [*numbers[1:], numbers[0]], strict=True)
        self._cut("the ring, one way round", list(pairs))

    def _cut(self, what: str, pairs: list[tuple[int, int]]) -> None:
        network = self._cluster.network
        assert network is not None
        seconds = self.rng.choice((0.5, 2.0, 5.0))
        self._say(f"cut {what} for {seconds} s")
        network.cut(pairs)
        self.counts["cuts"] += 1
        time.sleep(seconds)
        network.heal()

    def _kill(self, why: str, node: NodeProcess) -> None:
        self._say(f"kill node {node.id} ({why})")
        node.kill()
        self.counts[f"kill {why}"] += 1
        self.counts["kills"] += 1
        time.sleep(self.rng.choice((0.0, 0.2, 1.0, 3.0)) * self.rng.random())
        node.start()
        if self.rng.random() < 0.7:  # else the next strike may hit while this one is still coming up
            self._wait_ready([node])

    def _wait_ready(self, nodes: list[NodeProcess]) -> None:
        began = time.monotonic()
        for node in nodes:
            node.wait_ready()
        self._say(f"ready again after {time.monotonic() - began:.2f} s")

    def _pick(self, number: int | None) -> NodeProcess:
        return self._cluster.node(number) if number else self.rng.choice(self._cluster.nodes)

    def _some_leader(self) -> int | None:
        """Return a node that leads a partition, as far as a node that answers knows."""
        for node in self._cluster.nodes:
            answer = self._ask(node, "/partitions", topic=self._topic)
            leaders = sorted({one["leader"] for one in answer.body.get("partitions", ()) if one["leader"]})
            if leaders:
                return int(self.rng.choice(leaders))
        return None

    def _primary(self) -> int | None:
        for node in self._cluster.nodes:
            primary = self._ask(node, "/managers").body.get("primary")
            if primary:
                return int(primary)
        return None

    def _ask(self, node: NodeProcess, path: str, **parameters: object) -> Answer:
        client = HttpClient([node.http])
        try:
            return client.get(path, **parameters)
        except SurpriseError as error:
            return Answer("fail", 0, {"message": str(error)})
        finally:
            client.close()

    def _say(self, what: str) -> None:
        self.log.append(f"{time.monotonic() - self._began:8.2f} s  {what}")
