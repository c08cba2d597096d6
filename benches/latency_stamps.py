"""Note when a record passes each stage in this process, by wrapping functions of the product from the outside.

    python latency_stamps.py STAMPS python -m quiver node --id 1 ...

runs that node in this process and writes the stamps into the file STAMPS when it has stopped. A stamp is the name of a
stage, the time (`perf_counter_ns`, which is the same clock in all processes of a machine) and the record's key.
The key is an offset on the way between clients and the leader and an index of the Raft group from the proposal to the
commit; `queued` has both. Stages without a key belong to the one record that is under way.

Only batches of records are stamped: those of the metadata and of cursors are control batches. A stamp on one side of a
thread or socket is taken before the system call that wakes the other side, which may run before the call returns.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

NO_KEY = -1

Stamp = tuple[str, int, int, int]
"""Stage, nanoseconds, key, and a second key or a duration."""


class Stamps:
    """The stamps of this process; appending to a list is safe in any thread."""

    def __init__(self) -> None:
        self.all: list[Stamp] = []
        self.threads: dict[int, str] = {threading.get_native_id(): "main"}
        """The names of the threads that were started, by their ids in the kernel."""
        self.arrived_ns = 0
        """When the loop received the bytes that it handles now."""
        self.completed_ns = 0
        """When the loop received the result of the last piece of file work."""
        self.answered: tuple[str, int, int] | None = None
        """The stage and keys of the answer that is being written."""
        self.posted: dict[int, list[int]] = {}
        """Indexes that wait in the envelope to a node."""
        self.durable_index = NO_KEY
        """What this node has made durable and not acknowledged yet."""

    def add(self, stage: str, key: int = NO_KEY, other: int = NO_KEY, *, at_ns: int | None = None) -> None:
        self.all.append((stage, perf_counter_ns() if at_ns is None else at_ns, key, other))

    def save(self, path: Path, **more: Any) -> None:
        """Write all stamps, and the names of the threads by their ids in the kernel."""
        content = {"stamps": self.all, "threads": self.threads, "stamp_ns": self.cost_ns(), **more}
        path.write_text(json.dumps(content))

    def cost_ns(self) -> float:
        """Return the time that one stamp takes here."""
        other, begun = Stamps(), perf_counter_ns()
        call = wrapped(_nothing, before=lambda *_: other.add("", 1))
        for _ in range(20_000):
            call()
        return (perf_counter_ns() - begun) / 20_000


def _nothing() -> None:
    pass


def wrapped(
    function: Callable[..., Any], *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> Callable[..., Any]:
    """Return a function that calls `before` and `after` with the same arguments; not when `function` raises."""

    def call(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            before(*arguments)
        result = function(*arguments, **options)
        if after is not None:
            after(*arguments)
        return result

    return call


def hook(
    owner: Any, name: str, *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> None:
    """Replace a function of a class or module by one that stamps; before anything uses it."""
    setattr(owner, name, wrapped(getattr(owner, name), before=before, after=after))


def keys_of(batches: Sequence[Any]) -> list[tuple[int, int]]:
    """Return index and offset of the batches that hold records."""
    headers = [batch.header for batch in batches if not batch.header.is_control]
    return [(header.index, header.base_offset) for header in headers]


# -- every process -----------------------------------------------------------------------------------


def hook_process(stamps: Stamps) -> None:
    """Note the names of threads, and when bytes arrive; the stage of those is known once they are decoded."""
    from quiver.wire.connection import Connection

    def started(thread: threading.Thread) -> None:
        stamps.threads[thread.native_id or 0] = thread.name

    def arrived(*_: Any) -> None:
        stamps.arrived_ns = perf_counter_ns()

    hook(threading.Thread, "start", after=started)
    hook(Connection, "buffer_updated", before=arrived)


# -- a node ------------------------------------------------------------------------------------------


def hook_node(stamps: Stamps) -> None:
    hook_process(stamps)
    _hook_requests(stamps)
    _hook_log(stamps)
    _hook_replication(stamps)


def _hook_requests(stamps: Stamps) -> None:
    from quiver.broker.requests import BrokerRequests
    from quiver.partition.state import PartitionState
    from quiver.replication.proposer import Proposer
    from quiver.wire import serving
    from quiver.wire.messages import Fetch, Fetched, Produce, Produced
    from quiver.wire.session import RequestSession

    def received(_server: Any, _session: Any, incoming: Any, *_: Any) -> None:
        if type(incoming.request) is Produce:
            stamps.add("produce arrived", at_ns=stamps.arrived_ns)
        elif type(incoming.request) is Fetch:
            stamps.add("fetch arrived", incoming.request.offset, at_ns=stamps.arrived_ns)

    def encoding(_correlation_id: int, request: Any, response: Any, parts: Sequence[Any] = (), **_: Any) -> None:
        if type(response) is Produced:
            stamps.answered = ("produce answered", response.base_offset, NO_KEY)
            stamps.add("produce resumed", response.base_offset)
        elif type(response) is Fetched and parts:
            stamps.answered = ("fetch answered", request.offset, response.end_offset)
            stamps.add("fetch resumed", request.offset, response.end_offset)

    def answered(*_: Any) -> None:
        if stamps.answered is not None:
            stamps.add(*stamps.answered)
            stamps.answered = None

    def applied(_state: Any, batches: Sequence[Any]) -> None:
        for index, offset in keys_of(batches):
            stamps.add("applied", index, offset)

    hook(serving.RequestServer, "handle_request", before=received)
    hook(BrokerRequests, "_produce", before=lambda *_: stamps.add("produce begun"))
    hook(Proposer, "_propose", before=lambda *_: stamps.add("proposed"))
    hook(PartitionState, "apply", after=applied)
    hook(serving, "encode_response", before=encoding)
    hook(RequestSession, "_write", before=answered)


def _hook_log(stamps: Stamps) -> None:
    from quiver.storage.executor import _ThreadLane
    from quiver.storage.writer import LogWriter

    flushing: dict[int, list[int]] = {}
    """The indexes of the flush that a log runs, by the id of its writer; a log runs one at a time."""

    def queued(_writer: Any, batches: Sequence[Any], *_: Any) -> None:
        for index, offset in keys_of(batches):
            stamps.add("queued", index, offset)

    def planned(writer: Any) -> None:
        flushing[id(writer)] = [index for index, _ in keys_of(writer._pending)]

    def begun(writer: Any, _flush: Any) -> None:
        for index in flushing.get(id(writer), ()):
            stamps.add("flush begun", index)

    def ended(writer: Any, flush: Any) -> None:
        for index in flushing.get(id(writer), ()):
            stamps.add("flush ended", index)
            stamps.add("written", index, round(flush.write_s * 1e9))
            stamps.add("synced", index, round(flush.sync_s * 1e9))

    def completed(*_: Any) -> None:
        stamps.completed_ns = perf_counter_ns()

    def finished(writer: Any, *_: Any) -> None:
        for index in flushing.pop(id(writer), ()):
            stamps.add("flush completed", index, at_ns=stamps.completed_ns)
            stamps.add("flush finished", index)
            stamps.durable_index = index

    hook(LogWriter, "enqueue", before=queued)
    hook(LogWriter, "_begin_flush", before=planned)
    hook(LogWriter, "_run_flush", before=begun, after=ended)
    hook(_ThreadLane, "_complete", before=completed)
    hook(LogWriter, "_finish_flush", before=finished)


def _hook_replication(stamps: Stamps) -> None:
    from quiver.raft import AppendResponse
    from quiver.replication.member import Member
    from quiver.replication.sender import MemberSender
    from quiver.wire.link import Link

    def posted(_sender: Any, permission: Any, batches: Sequence[Any]) -> None:
        indexes = [index for index, _ in keys_of(batches)]
        if indexes:
            stamps.posted.setdefault(permission.to, []).extend(indexes)

    def sending(link: Any) -> None:
        for index in stamps.posted.pop(link.peer, ()):
            stamps.add(f"append sent to {link.peer}", index)
        if stamps.durable_index != NO_KEY:
            stamps.add("acknowledged", stamps.durable_index)
            stamps.durable_index = NO_KEY

    def received(_member: Any, sender: int, received: Any) -> None:
        for index, _ in keys_of(received.batches):
            stamps.add("append arrived", index, at_ns=stamps.arrived_ns)
        plain = received.message.plain
        if type(plain) is AppendResponse and plain.accepted:
            stamps.add(f"ack arrived from {sender}", plain.match_index, at_ns=stamps.arrived_ns)

    hook(MemberSender, "_send_append", before=posted)
    hook(Link, "flush", before=sending)
    hook(Member, "receive", before=received)


# -- a client ----------------------------------------------------------------------------------------


def hook_producer(stamps: Stamps) -> None:
    from quiver.client.delivery import Outcome
    from quiver.client.producer import ProducerCore
    from quiver.client.sender import PartitionSender
    from quiver.wire.messages import Produce
    from quiver.wire.requesting import RequestConnection

    hook_process(stamps)

    def answered(connection: Any, response: Any) -> None:
        pending = connection._pending.get(response.correlation_id)
        if pending is not None and type(pending.request) is Produce:
            stamps.add("answer arrived", at_ns=stamps.arrived_ns)

    def settled(_outcome: Any, base_offset: int, *_: Any) -> None:
        stamps.add("settled", base_offset)

    hook(ProducerCore, "_announce", before=lambda *_: stamps.add("announced"))
    hook(ProducerCore, "_wake_senders", before=lambda *_: stamps.add("loop woken"))
    hook(PartitionSender, "_launch", before=lambda *_: stamps.add("launched"))
    hook(RequestConnection, "_send", before=lambda *_: stamps.add("requested"))
    hook(RequestConnection, "_flush", before=lambda *_: stamps.add("request written"))
    hook(RequestConnection, "_handle_response", before=answered)
    hook(Outcome, "_settle", before=settled)


def hook_consumer(stamps: Stamps) -> None:
    from quiver.client.consumer_core import ConsumerCore
    from quiver.client.prefetch import PartitionPrefetcher

    hook_process(stamps)

    def accepting(prefetcher: Any, *_: Any) -> None:
        stamps.add("records arrived", prefetcher._fetch_offset, at_ns=stamps.arrived_ns)

    def accepted(prefetcher: Any, _fetched: Any, payload: memoryview) -> None:
        if payload:
            stamps.add("accepted", prefetcher._fetch_offset)

    hook(PartitionPrefetcher, "_accept", before=accepting, after=accepted)
    hook(ConsumerCore, "consume", before=lambda *_: stamps.add("poll begun"))


def main() -> int:
    path, *command = sys.argv[1:]
    stamps = Stamps()
    hook_node(stamps)
    from quiver.cli import main as run

    try:
        return run(command[command.index("quiver") + 1 :])
    finally:
        stamps.save(Path(path))


if __name__ == "__main__":
    sys.exit(main())
