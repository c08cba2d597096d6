"""What goes wrong, drawn from a seed: kills of leaders, followers, the primary and everybody; pauses; restarts.

Every strike ends with what it broke running again, but the next may begin before the cluster has caught up. About a
quarter of the kills hit all nodes at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from random import Random

from chaos_cluster import Cluster, NodeProcess
from chaos_http import HttpClient

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
        while self.kills < kills:
            self.rng.choices([strike for strike, _ in strikes], [weight for _, weight in strikes])[0]()
            time.sleep(self.rng.random() * CALM_S)

    def kill_leader(self) -> None:
        """Kill the node that leads some partition."""
        leader = self._leaders().get(self.rng.choice(sorted(self._leaders() or {0: 0})))
        self._kill("leader", self._pick(leader))

    def kill_follower(self) -> None:
        """Kill a node that does not lead some partition."""
        leaders = self._leaders()
        leader = leaders[self.rng.choice(sorted(leaders))] if leaders else None
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
        leaders = self._leaders()
        chosen = self.rng.choice(sorted(filter(None, leaders.values()))) if any(leaders.values()) else None
        node = self._pick(chosen if self.rng.random() < 0.5 else None)
        seconds = self.rng.choice((0.3, 1.0, 3.0, 6.0))
        self._say(f"pause node {node.id} for {seconds} s")
        node.pause()
        self.counts["pauses"] += 1
        time.sleep(seconds)
        node.resume()

    def restart_one(self) -> None:
        """Stop a node as an operator does, and start it again."""
        node = self._pick(None)
        self._say(f"restart node {node.id}")
        code = node.stop()
        if code:
            raise AssertionError(f"node {node.id} ended with {code} when it was asked to stop:\n{node.last_words()}")
        self.counts["restarts"] += 1
        node.start()
        self._wait_ready([node])

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

    def _leaders(self) -> dict[int, int | None]:
        """Return the leader of each partition, as far as a node that answers knows."""
        for node in self._cluster.nodes:
            client = HttpClient([node.http])
            answer = client.get("/partitions", topic=self._topic)
            client.close()
            if answer.is_ok:
                return {item["partition_id"]: item["leader"] for item in answer.body["partitions"]}
        return {}

    def _primary(self) -> int | None:
        for node in self._cluster.nodes:
            client = HttpClient([node.http])
            answer = client.get("/managers")
            client.close()
            if answer.is_ok and answer.body["primary"]:
                return int(answer.body["primary"])
        return None

    def _say(self, what: str) -> None:
        self.log.append(f"{time.monotonic() - self._began:8.2f} s  {what}")
