"""How fast a consumer group moves partitions: a clean leave, a killed member, and a join among a thousand.

    python bench_groups.py [--members 1000] [--partitions 3000]

Three nodes as processes, fsync on. Moved partitions count as delivered when another member has received a record of
each that was sent after the member was gone. The thousand members speak the protocol from this process, without reading
records: they measure the coordinator, not a thousand SDKs on one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import quiver
from processes import Nodes, connect, processor_s, running_nodes, wait_until
from quiver.wire.group_messages import GroupAssignment, GroupHeartbeat, JoinGroup, LeaveGroup, PartitionEpoch
from table import Row, show

PARTITIONS = 6
SESSION_TIMEOUT_S = 1.0
REPEATS = 3
QUIET_S = 5.0
"""How long idle members are watched to measure what they cost."""

VICTIM = """
import sys, time, quiver
with quiver.connect(*sys.argv[1:]) as cluster:
    with cluster.consumer("moves", group="bench", session_timeout=1.0) as consumer:
        for record in consumer:
            print(record.partition, flush=True)
"""


# -- few members -------------------------------------------------------------------------------------


class Reader(threading.Thread):
    """A member of the group in a thread; it notes when it last received a record of each partition."""

    def __init__(self, nodes: Nodes, seen: dict[int, float]) -> None:
        super().__init__(daemon=True)
        self._cluster = connect(nodes)
        self.consumer = self._cluster.consumer("moves", group="bench", session_timeout=SESSION_TIMEOUT_S)
        self._seen = seen
        self._is_over = threading.Event()
        self.partitions: set[int] = set()
        self.start()

    def run(self) -> None:
        while not self._is_over.is_set():
            for record in self.consumer.poll(100, timeout=0.05):
                assert record.partition is not None, "a consumer's records have one"
                self.partitions.add(record.partition)
                self._seen[record.partition] = time.monotonic()

    def leave(self) -> None:
        self._is_over.set()
        self.join()
        self.consumer.close()
        self._cluster.close()


def send(nodes: Nodes, stop: threading.Event) -> None:
    """Send a record to every partition again and again."""
    with connect(nodes) as cluster, cluster.producer("moves") as producer:
        while not stop.is_set():
            for partition in range(PARTITIONS):
                producer.send(b"x" * 100, partition=partition)
            stop.wait(0.02)


def wait_delivered(seen: dict[int, float], moved: set[int], begun: float) -> float:
    """Return how long it took until all moved partitions were delivered again."""
    wait_until(lambda: all(seen.get(one, 0.0) > begun for one in moved), what="the partitions of a member that is gone")
    return max(seen[one] for one in moved) - begun


def measure_leave(nodes: Nodes) -> float:
    seen: dict[int, float] = {}
    readers = [Reader(nodes, seen), Reader(nodes, {})]
    wait_until(lambda: all(len(one.consumer.assignment) == PARTITIONS // 2 for one in readers), what="a settled group")
    moved = {partition for _, partition in readers[1].consumer.assignment}
    readers[1].leave()
    took = wait_delivered(seen, moved, time.monotonic())
    readers[0].leave()
    return took


def measure_kill(nodes: Nodes) -> float:
    seen: dict[int, float] = {}
    reader = Reader(nodes, seen)
    wires = [node.wire for node in nodes.nodes]
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, *wires], stdout=subprocess.PIPE, text=True)
    try:
        assert victim.stdout is not None
        moved: set[int] = set()
        while len(moved) < PARTITIONS // 2:
            moved.add(int(victim.stdout.readline()))
        victim.send_signal(signal.SIGKILL)
        took = wait_delivered(seen, moved, time.monotonic())
    finally:
        victim.kill()
        victim.wait()
    reader.leave()
    return took


def measure_few(nodes: Nodes) -> list[Row]:
    with connect(nodes) as cluster:
        cluster.create_topic("moves", partitions=PARTITIONS)
    stop = threading.Event()
    sender = threading.Thread(target=send, args=(nodes, stop), daemon=True)
    sender.start()
    leaves = [measure_leave(nodes) for _ in range(REPEATS)]
    kills = [measure_kill(nodes) for _ in range(REPEATS)]
    stop.set()
    sender.join()
    return [
        Row("clean leave: its partitions are delivered by others, slowest", max(leaves), "s", target=1.0),
        Row("kill -9, session timeout 1 s: the same, slowest", max(kills), "s", target=SESSION_TIMEOUT_S + 1),
    ]


# -- many members ------------------------------------------------------------------------------------


class Member:
    """A member that only speaks to the coordinator."""

    def __init__(self, cluster: quiver.AsyncCluster, number: int) -> None:
        self._router = cluster.router
        self.name = f"{number:08x}"
        self.owned: set[tuple[int, int]] = set()
        self.version = 0
        self.changes = 0
        self.beats = 0
        self._group_id = 0

    async def join(self, topic: str) -> None:
        request = JoinGroup(group="crowd", topics=(topic,), member_id=self.name)
        joined, _ = await self._router.ask(request, deadline=self._router.deadline(60_000))
        self._group_id = joined.group_id

    async def live(self) -> None:
        """Send heartbeats, and release what is asked for."""
        released: tuple[PartitionEpoch, ...] = ()
        while True:
            request = GroupHeartbeat(
                group_id=self._group_id,  # type: ignore[arg-type] # an id
                member_id=self.name,
                seen=self.version,
                released=released,
                wait_ms=3_000,
            )
            found, _ = await self._router.ask(request, deadline=self._router.deadline(30_000))
            self.beats += 1
            released = self._take(found)

    def _take(self, found: GroupAssignment) -> tuple[PartitionEpoch, ...]:
        if found.version != self.version:
            self.changes += 1
        self.version = found.version
        self.owned = {(one.topic_id, one.partition_id) for one in found.owned}
        return tuple(PartitionEpoch(one.topic_id, one.partition_id, one.epoch) for one in found.revoking)

    async def leave(self) -> None:
        request = LeaveGroup(group_id=self._group_id, member_id=self.name)  # type: ignore[arg-type] # an id
        await self._router.ask(request, deadline=self._router.deadline())


async def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what it waits for is spread over a thousand members
        await asyncio.sleep(0.01)


def is_settled(members: list[Member], partitions: int) -> bool:
    counts = [len(member.owned) for member in members]
    return sum(counts) == partitions and max(counts) - min(counts) <= 1


async def measure_crowd(nodes: Nodes, size: int, partitions: int) -> list[Row]:
    async with quiver.connect_async(*(node.wire for node in nodes.nodes)) as cluster, asyncio.TaskGroup() as tasks:
        await cluster.create_topic("crowd", partitions=partitions, replicas=1)
        members = [Member(cluster, number) for number in range(size)]
        begun = time.monotonic()
        await asyncio.gather(*(member.join("crowd") for member in members))
        lives = [tasks.create_task(member.live()) for member in members]
        await wait_for(lambda: is_settled(members, partitions))
        all_s = time.monotonic() - begun
        pids = [node.pid for node in nodes.nodes]
        idle = [processor_s(pid) for pid in pids]
        await asyncio.sleep(QUIET_S)
        idle_s = max(processor_s(pid) - before for pid, before in zip(pids, idle, strict=True)) / QUIET_S
        before = Counter({member.name: member.changes for member in members})
        new, begun = Member(cluster, size), time.monotonic()
        await new.join("crowd")
        lives.append(tasks.create_task(new.live()))
        await wait_for(lambda: is_settled([*members, new], partitions))
        join_s = time.monotonic() - begun
        disturbed = sum(member.changes != before[member.name] for member in members)
        for life in lives:
            life.cancel()
        return [
            Row(f"{size} members join at once, {partitions} partitions: settled", all_s, "s"),
            Row("one more joins: settled", join_s, "s", target=5.0),
            Row("members that noticed", disturbed, "members", target=-(-partitions // size)),
            Row("CPU of the primary for their heartbeats", idle_s * 100, "% of a core"),
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=1_000)
    parser.add_argument("--partitions", type=int, default=3_000)
    arguments = parser.parse_args()
    with running_nodes(3) as nodes:
        rows = measure_few(nodes)
        try:
            rows += asyncio.run(measure_crowd(nodes, arguments.members, arguments.partitions))
        except* asyncio.CancelledError:
            pass
    return show(rows, title="consumer groups, three nodes, fsync on")


if __name__ == "__main__":
    sys.exit(main())
