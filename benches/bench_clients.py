"""Measure how long a partition with many clients holds the event loop, and whether clients that come and go leave any.

    python bench_clients.py [--clients 100000] [--registrations 1000000]

*Loop lag*: one real replica on a real disk, whose state has that many producers, eight batches each, and as many
cursors. A ticker of 1 ms runs beside each piece of work; the figure is the most processor time that the loop's thread
used between two ticks, so that other programs on the machine do not count. The work is done as a node does it, beside a
plain run of the same work in one piece. The metadata has as many producers and as many consumers, all of one topic that
keeps its records until they are consumed.

*Soak*: clients register, write or move a cursor, and vanish, in rounds; the primary's expiry and the partition's
cleaner remove them, with their real commands and entries. Memory, the sizes of both snapshots and the number of rows
must be the same at the end as after the first rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from quiver.broker.client_checks import check_has_consumers
from quiver.broker.consumer_lags import find_lags
from quiver.broker.explanation import find_slowest
from quiver.broker.replica_table import HostedReplica, ReplicaTable
from quiver.broker.retention import derive_policy
from quiver.cli.node import _tune_garbage_collector
from quiver.clock import SystemClock
from quiver.config import LogSettings, PartitionSettings, ReplicationSettings
from quiver.features import LEVEL_MAX
from quiver.manager.describe import describe_clients
from quiver.metadata.apply import apply
from quiver.metadata.commands import (
    AnyCommand,
    CreateTopicCommand,
    ExpireClients,
    InitCluster,
    RegisterBroker,
    RegisterConsumerCommand,
    RegisterProducerCommand,
    SilentClient,
    TopicSelection,
)
from quiver.metadata.rows import EntityKind, Retention
from quiver.metadata.state import LogPosition, MetadataState, View
from quiver.metadata.state_machine import MetadataStateMachine
from quiver.model import ConsumerId, GroupId, Index, NodeId, Offset, PartitionId, ProducerId, Term, TopicId
from quiver.partition import PartitionState, Replica
from quiver.partition.entries import ProducerSnapshot, SentBatch
from quiver.partition.maintenance import find_trim
from quiver.partition.producers import WINDOW_BATCHES
from quiver.raft import Configuration
from quiver.record import build_batch
from quiver.replication import Member, Replicator
from quiver.replication.member_files import join_snapshot_state
from quiver.storage import Lane, SystemDisk, ThreadExecutor
from quiver.tasks import gather_in_steps, new_event_loop, run_in_steps
from quiver.wire.admin_messages import ClientsFound, ListClients
from table import Row, show

TICK_S = 0.001
TARGET_MS = 20
BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100)
CLIENTS_PER_ROUND = 10_000
ROUNDS_ALIVE = 2
"""Rounds after which a client is removed."""


class NoNetwork:
    """The network of a group of one."""

    def start(self, handler: object, on_lost: object) -> None:
        pass

    def send(self, to: NodeId, parts: object) -> None:
        pass


class LagMeter:
    """Measure the processor time that the loop's thread uses between two ticks."""

    def __init__(self) -> None:
        self.held_ms: list[float] = []

    async def tick(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.thread_time()
            self.held_ms.append((now - last) * 1000)
            last = now


async def lag_of(work: Coroutine[Any, Any, object]) -> LagMeter:
    """Run a piece of work beside the ticker."""
    meter = LagMeter()
    ticking = asyncio.create_task(meter.tick())
    await asyncio.sleep(5 * TICK_S)
    meter.held_ms.clear()
    await work
    await asyncio.sleep(2 * TICK_S)
    ticking.cancel()
    return meter


def histogram(held_ms: list[float]) -> list[int]:
    """Return the number of ticks up to each bound, and beyond the last."""
    counts = [0] * (len(BOUNDS_MS) + 1)
    for held in held_ms:
        counts[next((at for at, bound in enumerate(BOUNDS_MS) if held <= bound), -1)] += 1
    return counts


async def in_one_piece(work: Callable[[], object]) -> None:
    work()


def fill(state: PartitionState, clients: int) -> None:
    """Put producers with full windows, and cursors in random order, into a state."""
    rows = []
    for number in range(clients):
        sent = tuple(SentBatch(at * 10, at * 10 + 10, Offset(number * 80 + at * 10)) for at in range(WINDOW_BATCHES))
        rows.append(ProducerSnapshot(ProducerId(number), 3, 10 * WINDOW_BATCHES, sent, Index(number)))
    state.producers.replace(rows)
    numbers = list(range(1, clients + 1))
    random.Random(1).shuffle(numbers)
    state.cursors = {ConsumerId(number): Offset(0) for number in numbers}


@contextmanager
def real_executor() -> Iterator[ThreadExecutor]:
    executor = ThreadExecutor()
    try:
        yield executor
    finally:
        executor.close()


def make_replicator(executor: ThreadExecutor) -> Replicator:
    return Replicator(
        NodeId(1),
        incarnation=time.time_ns(),
        network=NoNetwork(),
        disk=SystemDisk(),
        executor=executor,
        clock=SystemClock(),
        rng=random.Random(1),
        settings=ReplicationSettings(election_timeout_ms=100, heartbeat_interval_ms=20),
        log_settings=LogSettings(),
    )


def machine() -> MetadataStateMachine:
    return MetadataStateMachine(MetadataState(), on_failure=lambda _: None)


async def restore(state: PartitionState | MetadataStateMachine, data: bytes) -> None:
    await run_in_steps(state.restore_steps(data))
    state.restore(data)


async def save(view: View, voters: Configuration, executor: ThreadExecutor) -> None:
    """Encode the metadata for a snapshot file, as `LogCompactor` does."""
    parts = await gather_in_steps(view.encode_steps())
    await executor.submit(lambda: join_snapshot_state(voters, parts), Lane.RECOVERY)


def reads(metadata: MetadataState, replica: Replica) -> Iterator[tuple[str, Coroutine[Any, Any, object]]]:
    """Yield what a node does with all clients of a partition, each after one more consumer has registered."""
    for number, (what, read) in enumerate(READS.items()):
        register(metadata, 1_000_000 + number)
        metadata.view()
        yield what, read(metadata, replica)


async def read_lags(metadata: MetadataState, replica: Replica) -> None:
    table = ReplicaTable(NodeId(1), metadata.view, clock=SystemClock(), silence_ms_max=1_000)
    table.add(KEY, GroupId(1)).open(replica)
    assert await find_lags(metadata.view(), table)


async def check_after_registration(metadata: MetadataState, _: Replica) -> None:
    register(metadata, 2_000_000)
    check_has_consumers(metadata.view(), KEY[0])


async def decide_trim(metadata: MetadataState, replica: Replica) -> None:
    policy = derive_policy(metadata.view(), HostedReplica(KEY, GroupId(1)))
    assert policy.consumers is not None
    assert len(policy.consumers) < len(replica.state.cursors), "with too few cursors nothing would be compared"
    assert find_trim(replica.state, policy, now_ms=0) is None


async def explain(metadata: MetadataState, replica: Replica) -> None:
    assert await find_slowest(replica.state, metadata.view(), KEY)


async def list_clients(metadata: MetadataState, _: Replica) -> None:
    assert (await find_clients(metadata, ListClients())).clients


async def list_consumers(metadata: MetadataState, _: Replica) -> None:
    assert msgspec.msgpack.encode(await find_clients(metadata, ListClients(kind="consumer")))


async def find_clients(metadata: MetadataState, asked: ListClients) -> ClientsFound:
    parts = await gather_in_steps(describe_clients(metadata.view(), asked, now_ms=1, alive_ms=1))
    return ClientsFound(clients=tuple(chain.from_iterable(parts)))


KEY = (TopicId(1), PartitionId(0))
ENCODED = "list of consumers, and its answer encoded at once"
"""Without a target: frames are not encoded in steps."""
READS = {
    "consumer lags": read_lags,
    "registration and check for consumers": check_after_registration,
    "retention by consumption": decide_trim,
    "slowest consumers": explain,
    "list of clients": list_clients,
    ENCODED: list_consumers,
}


class AllGone:
    """Metadata in which every client was removed."""

    index = Index(9)

    def gone_producers(self, ids: Iterator[ProducerId]) -> list[ProducerId]:
        return list(ids)

    def gone_consumers(self, ids: Iterator[ConsumerId]) -> list[ConsumerId]:
        return list(ids)


async def measure_lag(clients: int) -> list[Row]:
    rows: list[Row] = []
    _tune_garbage_collector()
    metadata = formed()
    for number in range(clients - len(READS) - 1):
        register(metadata, number)

    def add(what: str, meter: LagMeter, target: float | None = TARGET_MS) -> None:
        rows.append(Row(what, max(meter.held_ms), "ms", target=target))
        print(f"{what:42}", " ".join(f"{share:>5}" for share in histogram(meter.held_ms)), flush=True)

    print(f"{'ticks by the time that the loop was held':42}", " ".join(f"{bound:>5}" for bound in (*BOUNDS_MS, "more")))

    with tempfile.TemporaryDirectory() as folder, real_executor() as executor:
        directory = str(Path(folder) / "group-1")
        async with make_replicator(executor) as replicator:
            state = PartitionState()
            voters = Configuration(voters=(NodeId(1),))
            member = await replicator.open_member(GroupId(1), directory, state, bootstrap=voters)
            replica = Replica(member, state, settings=PartitionSettings(summary_entries=10))
            await wait_ready(member)
            await replica.append(bytearray(build_batch([b"v"], timestamp=1)))
            fill(state, clients)
            gc.collect()
            add("idle", await lag_of(asyncio.sleep(0.3)))
            add("checkpoint in one piece (before)", await lag_of(in_one_piece(state.snapshot)), None)
            add("checkpoint", await lag_of(member.checkpoint()))
            for _ in range(10):
                await replica.append(bytearray(build_batch([b"v"], timestamp=1)))
            add("state snapshot into the log", await lag_of(replica.maintain(0)))
            assert state.trim_points, "a snapshot was written"
            await replica.append(bytearray(build_batch([b"v"], timestamp=1)))
            for what, work in reads(metadata, replica):
                gc.collect()
                add(what, await lag_of(work), None if what == ENCODED else TARGET_MS)
            data = state.snapshot()
            whole, sliced = PartitionState(), PartitionState()
            add("restore in one piece (before)", await lag_of(in_one_piece(lambda: whole.restore(data))), None)
            add("restore", await lag_of(restore(sliced, data)))
            await replica.close()
        gc.collect()
        async with make_replicator(executor) as replicator:
            state = PartitionState()
            add("open", await lag_of(replicator.open_member(GroupId(1), directory, state)))
            assert len(state.cursors) == len(state.producers) == clients
            (member,) = replicator._members.values()
            replica = Replica(member, state)
            await wait_ready(member)
            replica.set_clients(AllGone)  # type: ignore[arg-type] # a seam
            add("forget all clients", await lag_of(replica.maintain(0)))
            assert not state.cursors
            assert not len(state.producers)
            await replica.close()
        view = metadata.view()
        gc.collect()
        add("metadata snapshot in one piece (before)", await lag_of(in_one_piece(view.encode)), None)
        add("metadata snapshot", await lag_of(save(view, voters, executor)))
    data, whole_machine, sliced_machine = view.encode(), machine(), machine()
    add("metadata restore in one piece (before)", await lag_of(in_one_piece(lambda: whole_machine.restore(data))), None)
    gc.collect()
    add("metadata restore", await lag_of(restore(sliced_machine, data)))
    assert sliced_machine.snapshot() == data
    return rows


# -- soak ----------------------------------------------------------------------------------------


KEPT = Retention(until_consumed=True)


def formed() -> MetadataState:
    state = MetadataState()
    commands: list[AnyCommand] = [
        InitCluster(now_ms=1, cluster_id="bench", feature_level=LEVEL_MAX),
        RegisterBroker(now_ms=1, broker_id=NodeId(1), identity="one", wire_address="127.0.0.1:1"),
        CreateTopicCommand(now_ms=1, topic="logs", replicas=1, assignments=((NodeId(1),),), retention=KEPT),
    ]
    for command in commands:
        do(state, command)
    return state


def do(state: MetadataState, command: AnyCommand) -> None:
    refusal = apply(state, command).refusal
    assert refusal is None, refusal
    state.advance_to(LogPosition(Index(state.position.index + 1), Term(1)))


def register(state: MetadataState, number: int) -> None:
    """Register one producer and one consumer, without names."""
    topics = (TopicSelection("logs"),)
    do(state, RegisterProducerCommand(now_ms=number, topics=topics))
    do(state, RegisterConsumerCommand(now_ms=number, topics=topics, request_id=f"http-{number:016x}"))


def expire(state: MetadataState, first: int, end: int) -> None:
    """Remove the producers and consumers of a range of ids, as the primary does."""
    view = state.view()
    for begin in range(first, end, 1_000):
        ids = range(begin, min(end, begin + 1_000))
        silent = [SilentClient(kind, id_, view.last_seen_ms(kind, id_) or 0) for id_ in ids for kind in KINDS]
        do(state, ExpireClients(now_ms=1, clients=tuple(silent)))


KINDS = (EntityKind.PRODUCER, EntityKind.CONSUMER)


BASELINE_REGISTRATIONS = 200_000
"""From here on every living client has an id of more than 16 bits, as at the end: a number of 16 bits takes three bytes
in a snapshot, one of 32 bits five. Before, the snapshots grow with the ids and not with what is left in them."""
SoakRound = tuple[int, int, int, int, int]
"""Registrations so far, rows, bytes of the metadata snapshot, of the partition's, and of resident memory."""


async def soak(registrations: int, *, clients_per_round: int = CLIENTS_PER_ROUND) -> list[SoakRound]:
    """Let clients come and go, in rounds."""
    found: list[SoakRound] = []
    metadata = formed()
    with tempfile.TemporaryDirectory() as folder, real_executor() as executor:
        async with make_replicator(executor) as replicator:
            state, voters = PartitionState(), Configuration(voters=(NodeId(1),))
            member = await replicator.open_member(GroupId(1), str(Path(folder) / "g"), state, bootstrap=voters)
            replica = Replica(member, state)
            replica.set_clients(metadata.view)
            await wait_ready(member)
            per_round = clients_per_round // 2
            for number in range(registrations // clients_per_round):
                first = 1 + number * per_round
                ids = range(first, first + per_round)
                for id_ in ids:
                    register(metadata, id_)
                index = metadata.view().index
                await asyncio.gather(*(write(replica, id_, index) for id_ in ids))
                await replica.move_cursors([(ConsumerId(id_), Offset(0)) for id_ in ids], checked_index=index)
                gone = number + 1 - ROUNDS_ALIVE
                if gone >= 0:
                    expire(metadata, 1 + gone * per_round, 1 + (gone + 1) * per_round)
                replica._maintenance.cleaner.is_scan_due = True
                await replica.maintain(0)
                view = metadata.view()
                rows = len(view.producers) + len(view.consumers) + len(state.producers) + len(state.cursors)
                sizes = (len(view.encode()), len(state.snapshot()), resident_bytes())
                found.append(((number + 1) * clients_per_round, rows, *sizes))
            await replica.close()
    return found


async def wait_ready(member: Member) -> None:
    while not member.is_ready:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.05)


async def write(replica: Replica, id_: int, index: Index) -> None:
    batch = build_batch([b"v"], timestamp=1, producer_id=ProducerId(id_), producer_epoch=0, base_sequence=0)
    await replica.append(bytearray(batch), checked_index=index)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def soak_rows(found: list[SoakRound]) -> list[Row]:
    """Return the growth of each size from the first settled rounds to the last, in percent."""
    early = found[max(ROUNDS_ALIVE, len(found) // 10)]
    settled = next((one for one in found if one[0] >= BASELINE_REGISTRATIONS), early)
    rows = [Row("registrations", found[-1][0], "clients")]
    for column, what, target in (
        (1, "rows", 0.0),
        (2, "metadata snapshot", 1.0),
        (3, "partition snapshot", 10.0),
        (4, "resident memory", 10.0),
    ):
        growth = 100 * (found[-1][column] / settled[column] - 1)
        rows.append(Row(f"growth of {what} since {settled[0]} (now {found[-1][column]:,})", growth, "%", target=target))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure partitions with many clients.")
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--registrations", type=int, default=1_000_000)
    options = parser.parse_args()
    loop = new_event_loop()
    lags = loop.run_until_complete(measure_lag(options.clients))
    status = show(lags, title=f"longest time that the loop is held, {options.clients:,} producers and cursors")
    found = loop.run_until_complete(soak(options.registrations))
    step = max(1, len(found) // 10)
    print("\nregistrations | rows | metadata snapshot | partition snapshot | resident memory")
    for row in found[step - 1 :: step]:
        print(" | ".join(f"{value:,}" for value in row))
    return max(status, show(soak_rows(found), title="clients that come and go"))


if __name__ == "__main__":
    sys.exit(main())
