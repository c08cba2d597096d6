"""One replica in its own process, for the replication benches: reads commands and prints answers, as JSON lines.

    python replica.py NODE GROUPS DIRECTORY PORT PORT PORT

It runs the real driver over real sockets and disks. The load is generated inside the leader's process, as the
connections of a broker would generate it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quiver.clock import SystemClock
from quiver.config import LogSettings, ReplicationSettings
from quiver.errors import QuiverError
from quiver.model import GroupId, Index, NodeId
from quiver.raft import Configuration
from quiver.record import Batch, BatchHeader, build_batch
from quiver.replication import Member, Replicator
from quiver.storage import SystemDisk, ThreadExecutor
from quiver.tasks import SharedOutcome
from quiver.wire import PeerNetwork, WireSettings


class CountingMachine:
    """A state machine that only counts."""

    def __init__(self) -> None:
        self.records = 0
        self.applied_index = Index(0)

    def apply(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.records += batch.header.record_count
        self.applied_index = batches[-1].header.index

    def apply_steps(self, batches: Sequence[Batch]) -> Iterator[None]:  # noqa: ARG002 - it needs no steps
        return iter(())

    def snapshot_steps(self) -> Iterator[bytes]:
        return iter((b"%d" % self.records,))

    def restore_steps(self, state: bytes) -> Iterator[None]:  # noqa: ARG002 - it needs no steps
        return iter(())

    def restore(self, state: bytes) -> None:
        self.records = int(state or b"0")


class Commands:
    """The commands of the parent process."""

    def __init__(self, members: list[Member]) -> None:
        self._members = members

    async def status(self) -> dict[str, Any]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        statuses = [member.raft_status() for member in self._members]
        return {
            "leads": sum(member.is_ready for member in self._members),
            "hibernating": sum(status.hibernating for status in statuses),
            "commit": statuses[0].commit_index,
            "cpu_s": time.process_time(),
            "rss_bytes": usage.ru_maxrss * 1024,
        }

    async def load(self, *, entries: int, in_flight: int, value_bytes: int) -> dict[str, Any]:
        """Propose `entries` batches of one record, `in_flight` at a time; return the time it took."""
        member, loop = self._members[0], asyncio.get_running_loop()
        batch = build_batch([os.urandom(value_bytes)], timestamp=0)  # as a client would build it
        finished: asyncio.Future[None] = loop.create_future()
        latencies: list[float] = []
        sent = 0

        def propose() -> None:
            nonlocal sent
            sent += 1
            start = time.perf_counter()
            member.propose_nowait([batch]).add_done_callback(lambda done: answered(done, start))

        def answered(done: SharedOutcome[list[BatchHeader]], start: float) -> None:
            latencies.append(time.perf_counter() - start)
            if done.error is not None:
                if not finished.done():
                    finished.set_exception(done.error)
            elif sent < entries:
                propose()
            elif len(latencies) == entries:
                finished.set_result(None)

        start = time.perf_counter()
        for _ in range(min(in_flight, entries)):
            propose()
        await finished
        seconds = time.perf_counter() - start
        latencies.sort()
        return {
            "seconds": seconds,
            "p50_s": latencies[len(latencies) // 2],
            "p99_s": latencies[int(len(latencies) * 0.99)],
        }

    async def probe(self) -> dict[str, Any]:
        """Try one write now; return whether it was committed."""
        try:
            await asyncio.wait_for(self._members[0].propose([build_batch([b"probe"], timestamp=0)]), 2)
        except (QuiverError, TimeoutError):
            return {"committed": False}
        return {"committed": True}


async def serve(node: NodeId, groups: int, directory: str, ports: list[int]) -> None:
    addresses = {NodeId(n + 1): ("127.0.0.1", port) for n, port in enumerate(ports)}
    clock, rng = SystemClock(), random.Random()
    network = PeerNetwork(
        node=node,
        cluster_id="bench",
        incarnation=time.time_ns(),
        listen=addresses[node],
        peers={peer: address for peer, address in addresses.items() if peer != node},
        settings=WireSettings(),
        clock=clock,
        rng=rng,
    )
    executor = ThreadExecutor()
    settings = ReplicationSettings()
    async with network:
        replicator = Replicator(
            node,
            incarnation=time.time_ns(),
            network=network,
            disk=SystemDisk(),
            executor=executor,
            clock=clock,
            rng=rng,
            settings=settings,
            log_settings=LogSettings(),
        )
        async with replicator:
            voters = Configuration(voters=tuple(addresses))
            members = [
                await replicator.open_member(
                    GroupId(n), str(Path(directory) / f"group-{n}"), CountingMachine(), bootstrap=voters
                )
                for n in range(groups)
            ]
            say({"ready": True})
            await answer(Commands(members))
    executor.close()


async def answer(commands: Commands) -> None:
    """Carry out commands from standard input until it ends."""
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        request = json.loads(line)
        command: Callable[..., Awaitable[dict[str, Any]]] = getattr(commands, request.pop("command"))
        try:
            say(await command(**request))
        except QuiverError as error:
            say({"error": str(error)})


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _, this_node, group_count, data_directory, *listen_ports = sys.argv
    asyncio.run(serve(NodeId(int(this_node)), int(group_count), data_directory, [int(port) for port in listen_ports]))
