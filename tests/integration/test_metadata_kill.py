"""A manager as a process that is killed with SIGKILL: what it acknowledged is there, once, in log and database."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from metadata_manager import running_manager

from quiver.errors import RequestError
from quiver.metadata import (
    CreateTopicCommand,
    InitCluster,
    RegisterBroker,
    RegisterConsumerCommand,
    TopicSelection,
    sqlite_url,
)
from quiver.model import NodeId

KILLS = 5
ACKNOWLEDGED_BETWEEN_KILLS = 150


async def form(directory: Path) -> None:
    async with running_manager(directory, database_url(directory)) as manager:
        submit = manager.store.submit
        await submit(InitCluster(now_ms=1, cluster_id="c1"))
        await submit(RegisterBroker(now_ms=1, broker_id=NodeId(1), identity="i", wire_address="host:1"))
        await submit(CreateTopicCommand(now_ms=1, topic="logs", replicas=1, assignments=((NodeId(1),),)))


async def live(directory: Path) -> None:
    """Register consumers for ever, 16 at a time, and print the ids that were acknowledged."""
    async with running_manager(directory, database_url(directory)) as manager, asyncio.TaskGroup() as tasks:

        async def register() -> None:
            while True:
                found = await manager.store.submit(RegisterConsumerCommand(now_ms=2, topics=(TopicSelection("logs"),)))
                sys.stdout.write(f"{found.consumer_id}\n")
                sys.stdout.flush()
                if manager.store.applied_index % 97 == 0:
                    await manager.store.compact(entries_min=1)

        for _ in range(16):
            tasks.create_task(register())


def database_url(directory: Path) -> str:
    return sqlite_url(str(directory / "metadata.db"))


def run_and_kill(directory: Path) -> list[int]:
    """Let a manager live until it has acknowledged enough, kill it, and return what it acknowledged."""
    process = subprocess.Popen([sys.executable, __file__, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = [process.stdout.readline() for _ in range(ACKNOWLEDGED_BETWEEN_KILLS)]
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate(timeout=60)
    lines = "".join([*acknowledged, rest]).splitlines(keepends=True)
    return [int(line) for line in lines if line.endswith("\n")]


def test_killed_manager_comes_back_with_everything_it_acknowledged(tmp_path: Path) -> None:
    async def check(acknowledged: list[int]) -> None:
        async with running_manager(tmp_path, database_url(tmp_path)) as manager:
            view = manager.store.view()
            assert set(acknowledged) <= set(view.consumers)
            assert len(acknowledged) == len(set(acknowledged))
            assert len(view.consumers) == view.counters.next_consumer_id - 1
            await manager.store.wait_stored(view.index)
            assert manager.database.load().view().digest() == view.digest()
            # What the database had was not applied again; what it had not was.
            machine = manager.store.machine
            assert machine.state.position.index == manager.member.applied_index

    asyncio.run(form(tmp_path))
    acknowledged: list[int] = []
    for _ in range(KILLS):
        acknowledged += run_and_kill(tmp_path)
        asyncio.run(check(acknowledged))


def test_refused_command_is_refused_again_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        await form(tmp_path)
        async with running_manager(tmp_path, database_url(tmp_path)) as manager:
            assert manager.store.machine.applied_commands == 0
            with pytest.raises(RequestError) as caught:
                await manager.store.submit(InitCluster(now_ms=1, cluster_id="c2"))
            assert caught.value.code == "cluster_exists"

    asyncio.run(main())


if __name__ == "__main__":
    asyncio.run(live(Path(sys.argv[1])))
