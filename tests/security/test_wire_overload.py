"""More requests than a node can do, on the wire: fair turns, early refusals, nothing done past a deadline."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from wire_attacker import Attacker
from wire_hosts import Host, client, node, run, serve, wait_until

from quiver.model import Offset, PartitionId, TopicId
from quiver.security import user_principal
from quiver.turns import TURN_STARTS
from quiver.wire import WireSettings
from quiver.wire.envelope import decode_response
from quiver.wire.messages import AnyRequest, FindOffset, OffsetFound
from quiver.wire.security_messages import Authenticate
from quiver.wire.serving import Answer, Caller

WORK_S = 0.002


def find(topic: int) -> FindOffset:
    return FindOffset(topic_id=TopicId(topic), partition_id=PartitionId(0), at="latest")


class Worker:
    """A handler whose requests take time of the loop, and that remembers which it did."""

    def __init__(self, work_s: float = WORK_S) -> None:
        self._work_s = work_s
        self.done: list[int] = []
        self.late = 0

    async def handle(self, caller: Caller, request: AnyRequest, _: memoryview) -> Answer:
        self.done.append(request.topic_id if isinstance(request, FindOffset) else 0)
        self.late += time.monotonic() * 1000 > caller.deadline_ms + 1
        time.sleep(self._work_s)  # noqa: ASYNC251 - it takes the loop's time, which is the point
        return OffsetFound(offset=Offset(0)), ()


async def connect(host: Host) -> Attacker:
    attacker = await asyncio.to_thread(Attacker, host.address)
    await asyncio.to_thread(attacker.say_hello)
    return attacker


def flood(attacker: Attacker, requests: Sequence[AnyRequest], *, timeout_ms: int = 20_000) -> None:
    """Send requests in one piece."""
    attacker.send(attacker.encode(requests, timeout_ms=timeout_ms))


async def outcomes(attacker: Attacker, count: int) -> Counter[tuple[str, str]]:
    """Return the code and the outcome of each answer; both empty for a success."""

    def read() -> Counter[tuple[str, str]]:
        found: Counter[tuple[str, str]] = Counter()
        for _ in range(count):
            frame = attacker.next_frame()
            assert frame is not None, "closed"
            failure = decode_response(frame).failure
            found["" if failure is None else failure.code, "" if failure is None else failure.outcome] += 1
        return found

    return await asyncio.to_thread(read)


def test_other_topic_is_served_before_the_rest_of_a_flood() -> None:
    async def test() -> None:
        worker = Worker()
        async with serve(worker.handle) as host, client() as pool:
            await pool.call(host.address, find(2), timeout_ms=5_000)
            with await connect(host) as attacker:
                flood(attacker, [find(1)] * 200)
                await wait_until(lambda: host.server.turns.waiting > 100)
                before = len(worker.done)
                await pool.call(host.address, find(2), timeout_ms=20_000)
                assert len(worker.done) - before < 60, "it did not wait for the flood"
                assert await outcomes(attacker, 200) == {("", ""): 200}
            assert host.server.status().queued == 0

    run(test())


def test_nodes_and_strangers_who_authenticate_do_not_wait_for_a_flood() -> None:
    async def test() -> None:
        worker = Worker()
        async with serve(worker.handle) as host, client() as pool, node(2, identity="disk-2") as peer:
            await pool.call(host.address, find(2), timeout_ms=5_000)
            await peer.call(host.address, find(3), timeout_ms=5_000)
            with await connect(host) as attacker:
                flood(attacker, [find(1)] * 300)
                await wait_until(lambda: host.server.turns.waiting > 200)
                before = len(worker.done)
                await peer.call(host.address, find(3), timeout_ms=20_000)
                between = len(worker.done)
                assert between - before < 60
                with pytest.raises(Exception):  # noqa: B017, PT011 - the worker answers with something else
                    await pool.call(host.address, Authenticate(token="qv_a_b"), timeout_ms=20_000)
                assert len(worker.done) - between < 60
                await outcomes(attacker, 300)

    run(test())


def test_nothing_is_done_for_requests_past_their_deadline() -> None:
    async def test() -> None:
        worker = Worker(0.005)
        async with serve(worker.handle) as host:
            with await connect(host) as attacker:
                flood(attacker, [find(1)] * 100, timeout_ms=60)
                found = await outcomes(attacker, 100)
                assert found["", ""] == len(worker.done) < 100
                assert found["timed_out", "not_done"] == 100 - len(worker.done)
                assert worker.late <= TURN_STARTS, "the first ones begin without a look at the clock"

    run(test())


def test_nothing_is_done_for_clients_that_are_gone() -> None:
    async def test() -> None:
        worker = Worker()
        async with serve(worker.handle) as host:
            with await connect(host) as attacker:
                flood(attacker, [find(1)] * 400)
                await wait_until(lambda: host.server.turns.waiting > 200)
            await wait_until(lambda: host.server.status().requests == 0)
            assert len(worker.done) < 300
            assert (host.server.memory.bytes, host.server.status().client_connections) == (0, 0)

    run(test())


def test_stopping_node_answers_what_waits_as_not_done() -> None:
    async def test() -> None:
        worker = Worker()
        async with serve(worker.handle) as host:
            with await connect(host) as attacker:
                flood(attacker, [find(1)] * 300)
                await wait_until(lambda: host.server.turns.waiting > 100)
                await host.server.close()
                found = await outcomes(attacker, 300)
                assert found["stopping", "not_done"] > 100
                assert found["", ""] <= len(worker.done) == 300 - found["stopping", "not_done"]

    run(test())


def test_flood_is_refused_with_a_time_to_retry_and_its_connection_is_read_more_slowly() -> None:
    async def test() -> None:
        worker = Worker()
        async with serve(worker.handle, settings=WireSettings(connection_requests_max=10_000)) as host:
            with await connect(host) as attacker:
                flood(attacker, [find(1)] * 1_500)
                await wait_until(lambda: "overloaded" in host.server.status().errors)
                assert host.server.status().errors["overloaded"] < 10, "hundreds more have arrived and are not read now"
                failure = None
                while failure is None:
                    frame = await asyncio.to_thread(attacker.next_frame)
                    assert frame is not None
                    failure = decode_response(frame).failure
                assert (failure.kind, failure.code, failure.outcome) == ("overloaded", "overloaded", "not_done")
                assert failure.retry_after_ms

    run(test())


def test_refused_connection_that_has_ended_is_forgotten() -> None:
    async def test() -> None:
        async with serve(Worker().handle) as host:
            with await connect(host):
                (session,) = host.server._client_sessions
                session.penalize()
                assert host.server.status().throttled == 1
                session._connection.abort("others need it")
                for _ in range(3):
                    await asyncio.sleep(0)
                assert (host.server.status().client_connections, host.server.status().throttled) == (0, 0)

    run(test())


def test_principal_has_its_share_of_the_requests_in_flight() -> None:
    limit = 40

    async def test() -> None:
        end = asyncio.Event()

        async def poll(caller: Caller, request: AnyRequest, payload: memoryview) -> Answer:
            await end.wait()
            return OffsetFound(offset=Offset(0)), ()

        async with serve(poll, settings=WireSettings(requests_max=limit)) as host:
            with await connect(host) as anonymous, await connect(host) as known:
                flood(anonymous, [find(1)] * limit)
                await wait_until(lambda: host.server.status().requests_refused > 0)
                taken = host.server.status().requests
                assert limit // 2 < taken < limit
                for session in tuple(host.server._client_sessions):
                    if not session.is_busy:
                        session.identity.principal = user_principal("alice")
                flood(known, [find(1)])
                await wait_until(lambda: host.server.status().requests == taken + 1)
                end.set()
                assert await outcomes(known, 1) == {("", ""): 1}

    run(test())
