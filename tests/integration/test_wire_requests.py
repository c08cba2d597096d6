"""Requests on real sockets: answered in any order, held to bounds, ended in time, and never told a lie about."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from wire_hosts import Host, client, error_of, node, run, serve, wait_until

from quiver.errors import (
    NotAllowedError,
    NotLeaderError,
    OutcomeUnknownError,
    OverloadedError,
    QuiverError,
    RequestError,
    TooLargeError,
    UnavailableError,
)
from quiver.model import Buffer, GroupId, Index, NodeId, Offset, PartitionId, TopicId
from quiver.routing.transport import Transport
from quiver.wire import Caller, PoolStatus, RequestPool, WireSettings
from quiver.wire.messages import (
    AnyRequest,
    BrokerHeartbeatRequest,
    CommandSubmitted,
    Fetch,
    Fetched,
    FindOffset,
    GetMembers,
    GetMetadata,
    HeartbeatReceived,
    MetadataFound,
    NodeInfo,
    OffsetFound,
    Produce,
    Produced,
    RestoreTopicRequest,
    SubmitCommand,
)
from quiver.wire.pool import CONNECTIONS_MAX
from quiver.wire.requests import Done, Request, Response

Answer = tuple[Response, Sequence[Buffer]]
KIB = 1024
PRODUCE = Produce(topic_id=TopicId(1), partition_id=PartitionId(0))


def fetch(offset: int = 0, wait_ms: int = 0) -> Fetch:
    return Fetch(topic_id=TopicId(1), partition_id=PartitionId(0), offset=Offset(offset), wait_ms=wait_ms)


def ask_for(offset: int) -> FindOffset:
    return FindOffset(topic_id=TopicId(1), partition_id=PartitionId(0), at=offset)


WRITE_AND_READ: tuple[Request[Any], ...] = (PRODUCE, fetch(wait_ms=60_000))


async def echo(caller: Caller, request: AnyRequest, payload: memoryview) -> Answer:
    """Answer at once with what was asked."""
    match request:
        case FindOffset(at=int(at)):
            return OffsetFound(offset=Offset(at)), (payload,)
        case Produce():
            return Produced(base_offset=Offset(len(payload))), (payload,)
        case Fetch():
            return Fetched(first_offset=Offset(0), end_offset=request.offset), (bytes(request.bytes_max),)
        case BrokerHeartbeatRequest():
            return HeartbeatReceived(is_known=True), ()
        case SubmitCommand():
            return CommandSubmitted(index=Index(7)), (payload,)
        case _:
            return Done(), ()


class Gate:
    """A handler that lets nobody out before it is opened, and knows who is inside."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.inside = 0
        self.cancelled = 0

    async def __call__(self, caller: Caller, request: AnyRequest, payload: memoryview) -> Answer:
        self.inside += 1
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.inside -= 1
        return await echo(caller, request, payload)


async def connect(pool: RequestPool, host: Host) -> None:
    """Make the connection, so that a short time is not spent on that."""
    with pytest.raises(NotAllowedError):
        await pool.call(host.address, GetMembers(group=GroupId(1)), timeout_ms=10_000)


def test_pool_is_the_real_side_of_the_seam() -> None:
    async def test() -> None:
        transport: Transport = client()
        assert transport is not None

    run(test())


@pytest.mark.parametrize("payload", [b"", b"x", bytes(100_000), bytes(3 * KIB * KIB)])
@pytest.mark.parametrize("request_", [PRODUCE, ask_for(3)], ids=["batches", "checked"])
def test_response_and_payload_come_back(request_: Request[Any], payload: bytes) -> None:
    async def test() -> None:
        async with serve(echo) as host, client() as pool:
            response, returned = await pool.call(host.address, request_, [payload[:5], payload[5:]], timeout_ms=5000)
            assert isinstance(response, Produced | OffsetFound)
            assert returned == payload

    run(test())


def test_many_requests_are_under_way_at_once_and_answered_in_any_order() -> None:
    opened: list[asyncio.Event] = []

    async def handle(caller: Caller, request: AnyRequest, payload: memoryview) -> Answer:
        event = asyncio.Event()
        opened.append(event)
        await event.wait()
        return await echo(caller, request, payload)

    async def test() -> None:
        order: list[int] = []

        async def ask(number: int) -> None:
            found, _ = await pool.call(host.address, ask_for(number), timeout_ms=10_000)
            assert found.offset == number
            order.append(number)

        async with serve(handle) as host, client() as pool, asyncio.TaskGroup() as group:
            for number in range(100):
                group.create_task(ask(number))
            await wait_until(lambda: len(opened) == 100)
            for number, event in reversed(tuple(enumerate(opened))):
                event.set()
                await wait_until(lambda number=number: len(order) == 100 - number)  # type: ignore[misc]
            assert order == list(reversed(range(100)))
            assert host.server.status().client_connections == 1

    run(test())


def test_response_longer_than_a_head_arrives_whole() -> None:
    nodes = tuple(NodeInfo(node=NodeId(number), wire_address="host:1") for number in range(20_000))

    async def handle(caller: Caller, request: AnyRequest, payload: memoryview) -> Answer:
        assert isinstance(request, GetMetadata)
        found = MetadataFound(cluster_id="".join(request.topics or ()), index=Index(0), nodes=nodes)
        return found, (payload, b"!")

    async def test() -> None:
        async with serve(handle) as host, client() as pool:
            names = tuple("t" * 300 for _ in range(500))
            response, payload = await pool.call(host.address, GetMetadata(topics=names), [b"more"], timeout_ms=5000)
            assert (response.nodes, response.cluster_id, bytes(payload)) == (nodes, "t" * 150_000, b"more!")

    run(test())


def test_handler_knows_who_asks_and_how_long() -> None:
    callers: list[Caller] = []

    async def handle(caller: Caller, request: AnyRequest, payload: memoryview) -> Answer:
        callers.append(caller)
        return Done(), ()

    async def test() -> None:
        async with serve(handle) as host, client() as pool, node(5) as peer:
            await pool.call(host.address, RestoreTopicRequest(topic="t"), timeout_ms=600_000)
            await peer.call(host.address, RestoreTopicRequest(topic="t"), timeout_ms=6_000_000)

    run(test())
    assert [(caller.name, caller.node, caller.is_node) for caller in callers] == [
        ("test client", None, False),
        ("test node", 5, True),
    ]
    asked, again = callers
    assert asked.address.startswith("127.0.0.1:")
    assert again.deadline_ms - asked.deadline_ms > 5_000_000, "each request has the deadline that its client gave"
    assert asked.remaining_ms(asked.deadline_ms - 7) == 7
    assert asked.remaining_ms(asked.deadline_ms + 7) == 0


@pytest.mark.parametrize(
    "request_",
    [SubmitCommand(), BrokerHeartbeatRequest(node=NodeId(5), identity="disk-5"), GetMembers(group=GroupId(1))],
    ids=lambda request: type(request).__name__,
)
def test_what_is_for_nodes_is_refused_to_clients(request_: Request[Any]) -> None:
    async def handle(caller: Caller, request: AnyRequest, payload: memoryview) -> Answer:
        raise NotLeaderError("reached the handler")

    async def test() -> None:
        async with serve(handle) as host, client() as pool, node(5) as peer:
            with pytest.raises(NotAllowedError, match="is for nodes only"):
                await pool.call(host.address, request_, timeout_ms=5000)
            with pytest.raises(NotLeaderError, match="reached the handler"):
                await peer.call(host.address, request_, timeout_ms=5000)

    run(test())


def test_error_of_the_handler_is_raised_by_the_caller() -> None:
    async def handle(caller: Caller, request: AnyRequest, payload: memoryview) -> Answer:
        raise NotLeaderError("node 3 leads", code="not_leader", leader=NodeId(3), retry_after_ms=20)

    async def test() -> None:
        async with serve(handle) as host, client() as pool:
            error = await error_of(pool.call(host.address, PRODUCE, [b"batch"], timeout_ms=5000))
            assert isinstance(error, NotLeaderError)
            assert (error.leader, error.retry_after_ms, error.message) == (3, 20, "node 3 leads")

    run(test())


@pytest.mark.parametrize(("request_", "kind"), [(PRODUCE, OutcomeUnknownError), (fetch(), QuiverError)])
def test_bug_in_a_handler_is_answered_and_logged_and_service_goes_on(
    caplog: pytest.LogCaptureFixture, request_: Request[Any], kind: type[QuiverError]
) -> None:
    async def handle(caller: Caller, request: AnyRequest, payload: memoryview) -> Answer:
        if isinstance(request, FindOffset):
            return await echo(caller, request, payload)
        raise KeyError("secret")

    async def test() -> None:
        async with serve(handle) as host, client() as pool:
            error = await error_of(pool.call(host.address, request_, timeout_ms=5000))
            assert isinstance(error, QuiverError)
            assert (type(error), error.code, error.message) == (kind, "internal_error", "the node failed: KeyError")
            await pool.call(host.address, ask_for(1), timeout_ms=5000)
            assert host.server.status().handlers_failed == 1

    run(test())
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.message == "request handler failed"
    assert record.exc_info is not None


# Time.


@pytest.mark.parametrize(("request_", "kind"), [(PRODUCE, OutcomeUnknownError), (fetch(), UnavailableError)])
def test_request_whose_time_is_over_is_cancelled_and_its_caller_told_the_truth(
    request_: Request[Any], kind: type[QuiverError]
) -> None:
    async def test() -> None:
        gate = Gate()
        async with serve(gate) as host, client() as pool:
            await connect(pool, host)
            error = await error_of(pool.call(host.address, request_, timeout_ms=50))
            assert isinstance(error, QuiverError)
            assert (type(error), error.code) == (kind, "timed_out")
            await wait_until(lambda: gate.cancelled == 1)
            assert host.server.status().requests == 0

    run(test())


def test_handler_may_finish_what_it_has_begun_when_its_time_is_over() -> None:
    finished: list[int] = []

    async def write() -> None:
        await asyncio.sleep(0.1)
        finished.append(1)

    async def test() -> None:
        async with asyncio.TaskGroup() as group:

            async def handle(caller: Caller, request: AnyRequest, payload: memoryview) -> Answer:
                await asyncio.shield(group.create_task(write()))
                return Produced(base_offset=Offset(0)), ()

            async with serve(handle) as host, client() as pool:
                await connect(pool, host)
                assert isinstance(await error_of(pool.call(host.address, PRODUCE, timeout_ms=30)), OutcomeUnknownError)

    run(test())
    assert finished == [1]


def test_client_that_goes_away_ends_what_it_waits_for() -> None:
    async def test() -> None:
        gate = Gate()
        async with serve(gate) as host:
            async with client() as pool, asyncio.TaskGroup() as group:
                calls = [
                    group.create_task(error_of(pool.call(host.address, request, timeout_ms=60_000)))
                    for request in WRITE_AND_READ
                ]
                await wait_until(lambda: gate.inside == 2)
                await pool.close()
                assert [type(await call) for call in calls] == [OutcomeUnknownError, UnavailableError]
            await wait_until(lambda: gate.cancelled == 2)
            assert host.server.status().requests == 0
            await wait_until(lambda: host.server.status().client_connections == 0)

    run(test())


def test_cancelled_caller_leaves_nothing_behind() -> None:
    async def test() -> None:
        gate = Gate()
        async with serve(gate) as host, client() as pool, asyncio.TaskGroup() as group:
            task = group.create_task(pool.call(host.address, fetch(), timeout_ms=60_000))
            await wait_until(lambda: gate.inside == 1)
            task.cancel()
            # The other side learns of it: a long poll does not go on for nobody.
            await wait_until(lambda: gate.cancelled == 1)
            gate.opened.set()
            found, _ = await pool.call(host.address, ask_for(5), timeout_ms=5000)
            assert found.offset == 5
            assert host.server.status().requests == 0

    run(test())


def test_client_at_its_bound_can_cancel_and_go_on() -> None:
    async def test() -> None:
        gate = Gate()
        settings = WireSettings(connection_requests_max=4)
        async with serve(gate, settings=settings) as host, client(settings) as pool, asyncio.TaskGroup() as group:
            polls = [group.create_task(pool.call(host.address, fetch(at), timeout_ms=60_000)) for at in range(4)]
            await wait_until(lambda: gate.inside == 4)
            for poll in polls:
                poll.cancel()
            call = group.create_task(pool.call(host.address, ask_for(5), timeout_ms=10_000))
            await wait_until(lambda: gate.cancelled == 4)
            gate.opened.set()
            assert (await call)[0].offset == 5

    run(test())


# Bounds.


def test_connection_at_its_bound_is_not_read_and_nothing_is_lost() -> None:
    async def test() -> None:
        gate = Gate()
        host_settings = WireSettings(connection_requests_max=4)
        async with serve(gate, settings=host_settings) as host, client() as pool, asyncio.TaskGroup() as group:
            calls = [group.create_task(pool.call(host.address, ask_for(at), timeout_ms=20_000)) for at in range(50)]
            await wait_until(lambda: gate.inside == 5)
            await asyncio.sleep(0.05)
            assert (gate.inside, host.server.status().requests_refused) == (5, 0)
            gate.opened.set()
            assert [(await call)[0].offset for call in calls] == list(range(50))

    run(test())


def test_connection_that_does_not_read_its_answers_is_not_read_either() -> None:
    async def test() -> None:
        settings = WireSettings(connection_bytes_max=256 * KIB)
        async with serve(echo, settings=settings) as host, client() as pool, asyncio.TaskGroup() as group:
            calls = [group.create_task(pool.call(host.address, fetch(at), timeout_ms=20_000)) for at in range(64)]
            assert [len((await call)[1]) for call in calls] == [KIB * KIB] * 64
            assert host.server.status().requests_bytes == 0

    run(test())


def test_caller_waits_for_room_instead_of_being_refused() -> None:
    async def test() -> None:
        gate = Gate()
        async with (
            serve(gate) as host,
            client(WireSettings(connection_requests_max=3)) as pool,
            asyncio.TaskGroup() as group,
        ):
            calls = [group.create_task(pool.call(host.address, ask_for(at), timeout_ms=20_000)) for at in range(30)]
            await wait_until(lambda: gate.inside == 3)
            assert pool.status() == PoolStatus(connections=1, dialling=0, requests=3)
            late = await error_of(pool.call(host.address, PRODUCE, timeout_ms=30))
            assert isinstance(late, UnavailableError)
            assert late.code == "timed_out"
            calls[10].cancel()
            gate.opened.set()
            for at, call in enumerate(calls):
                if at != 10:
                    assert (await call)[0].offset == at

    run(test())


def test_long_polls_leave_room_for_others_and_get_further_connections() -> None:
    async def test() -> None:
        gate = Gate()
        settings = WireSettings(connection_requests_max=4)

        async def handle(caller: Caller, request: AnyRequest, payload: memoryview) -> Answer:
            return await (gate if request.is_long_poll else echo)(caller, request, payload)

        async with serve(handle) as host, client(settings) as pool, asyncio.TaskGroup() as group:

            def poll(at: int) -> asyncio.Task[Any]:
                return group.create_task(pool.call(host.address, fetch(at, wait_ms=60_000), timeout_ms=60_000))

            polls = [poll(at) for at in range(2)]
            await wait_until(lambda: gate.inside == 2)
            assert pool.status().connections == 1, "half of the room is theirs"
            polls += [poll(at) for at in range(2, 5)]
            await wait_until(lambda: gate.inside == 5)
            assert pool.status().connections == 3
            found, _ = await pool.call(host.address, ask_for(7), timeout_ms=20_000)
            assert found.offset == 7, "long polls are in nobody's way"
            polls += [poll(at) for at in range(5, 30)]
            # Two on each further connection; the rest shares the first one's room, and waits there.
            await wait_until(lambda: gate.inside == 2 * CONNECTIONS_MAX + 2)
            assert pool.status().connections == CONNECTIONS_MAX
            gate.opened.set()
            assert [(await one)[0].end_offset for one in polls] == list(range(30))

    run(test())


def test_long_polls_wait_on_one_connection_if_the_node_accepts_no_other() -> None:
    async def test() -> None:
        gate = Gate()
        settings = WireSettings(connection_requests_max=4)
        async with (
            serve(gate, settings=WireSettings(client_connections_max=1)) as host,
            client(settings) as pool,
            asyncio.TaskGroup() as group,
        ):
            requests = [fetch(at, wait_ms=60_000) for at in range(6)]
            polls = [group.create_task(pool.call(host.address, one, timeout_ms=60_000)) for one in requests]
            await wait_until(lambda: gate.inside == 4)
            assert pool.status().connections == 1
            gate.opened.set()
            for one in polls:
                await one

    run(test())


def test_clients_beyond_the_common_bound_are_refused_early_but_nodes_are_not() -> None:
    async def test() -> None:
        gate = Gate()
        settings = WireSettings(requests_max=2)
        async with (
            serve(gate, settings=settings) as host,
            client() as pool,
            client() as other,
            node(5) as peer,
            asyncio.TaskGroup() as group,
        ):
            calls = [group.create_task(pool.call(host.address, ask_for(at), timeout_ms=20_000)) for at in range(2)]
            await wait_until(lambda: gate.inside == 2)
            error = await error_of(other.call(host.address, PRODUCE, timeout_ms=5000))
            assert isinstance(error, OverloadedError)
            assert error.retry_after_ms is not None
            calls.append(group.create_task(peer.call(host.address, ask_for(2), timeout_ms=20_000)))
            await wait_until(lambda: gate.inside == 3)
            gate.opened.set()
            assert [(await call)[0].offset for call in calls] == [0, 1, 2]
            await other.call(host.address, PRODUCE, timeout_ms=5000)

    run(test())


def test_bytes_of_all_clients_are_bounded() -> None:
    async def test() -> None:
        gate = Gate()
        settings = WireSettings(requests_bytes_max=64 * KIB)
        async with serve(gate, settings=settings) as host, client() as pool, asyncio.TaskGroup() as group:
            call = group.create_task(pool.call(host.address, PRODUCE, [bytes(64 * KIB)], timeout_ms=20_000))
            await wait_until(lambda: gate.inside == 1)
            error = await error_of(pool.call(host.address, PRODUCE, timeout_ms=5000))
            assert isinstance(error, OverloadedError)
            gate.opened.set()
            await call
            await pool.call(host.address, PRODUCE, timeout_ms=5000)

    run(test())


def test_request_larger_than_a_frame_is_refused_before_it_is_sent() -> None:
    async def test() -> None:
        settings = WireSettings(frame_bytes_max=64 * KIB)
        async with serve(echo) as host, client(settings) as pool:
            with pytest.raises(TooLargeError):
                await pool.call(host.address, PRODUCE, [bytes(64 * KIB)], timeout_ms=5000)
            await pool.call(host.address, PRODUCE, [bytes(60 * KIB)], timeout_ms=5000)

    run(test())


# Connecting.


def test_callers_at_once_share_one_attempt_to_connect() -> None:
    async def test() -> None:
        async with serve(echo) as host, client() as pool, asyncio.TaskGroup() as group:
            calls = [group.create_task(pool.call(host.address, ask_for(at), timeout_ms=5000)) for at in range(20)]
            calls[0].cancel()
            assert [(await call)[0].offset for call in calls[1:]] == list(range(1, 20))
            assert host.server.status().client_connections == 1

    run(test())


def test_node_that_cannot_be_reached_is_reported_at_once_to_all_and_tried_again() -> None:
    async def test() -> None:
        async with client() as pool:
            async with serve(echo) as host:
                address = host.address
            errors = await asyncio.gather(*(error_of(pool.call(address, PRODUCE, timeout_ms=60_000)) for _ in range(5)))
            assert {(type(error), getattr(error, "code", "")) for error in errors} == {
                (UnavailableError, "not_reached")
            }

    run(test())


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:x", "host:65536", "::1:80", "[host:1", "[h]:1"])
def test_what_is_no_address_is_a_bad_request(address: str) -> None:
    async def test() -> None:
        async with client() as pool:
            error = await error_of(pool.call(address, PRODUCE, timeout_ms=5000))
            assert isinstance(error, RequestError)
            assert error.code == "bad_address"

    run(test())


def test_connection_that_broke_is_made_again_by_the_next_call() -> None:
    async def test() -> None:
        async with serve(echo) as host, client() as pool:
            await pool.call(host.address, PRODUCE, timeout_ms=5000)
            for connection in tuple(host.network._context.connections):
                connection.abort("cut")
            await wait_until(lambda: host.server.status().client_connections == 0)
            await asyncio.sleep(0.01)
            await pool.call(host.address, PRODUCE, timeout_ms=5000)

    run(test())


def test_idle_connection_is_closed() -> None:
    async def test() -> None:
        async with serve(echo) as host, client(WireSettings(idle_timeout_ms=100)) as pool:
            await pool.call(host.address, PRODUCE, timeout_ms=5000)
            assert host.server.status().client_connections == 1
            await wait_until(lambda: host.server.status().client_connections == 0)
            await pool.call(host.address, PRODUCE, timeout_ms=5000)

    run(test())


def test_node_known_by_another_identity_is_refused() -> None:
    async def test() -> None:
        async with (
            serve(echo, identity_of=lambda node: "disk-5") as host,
            node(5, identity="disk-5") as known,
            node(5, identity="disk-6") as wiped,
        ):
            await known.call(host.address, BrokerHeartbeatRequest(node=NodeId(5), identity=""), timeout_ms=5000)
            with pytest.raises(UnavailableError, match="other_identity"):
                await wiped.call(host.address, BrokerHeartbeatRequest(node=NodeId(5), identity=""), timeout_ms=5000)

    run(test())


def test_clients_beyond_the_bound_of_connections_are_refused_but_nodes_are_not() -> None:
    async def test() -> None:
        settings = WireSettings(client_connections_max=1)
        begun, end = asyncio.Event(), asyncio.Event()

        async def wait(caller: Caller, request: AnyRequest, payload: memoryview) -> Answer:
            if not caller.is_node:
                begun.set()
                await end.wait()
            return await echo(caller, request, payload)

        async with serve(wait, settings=settings) as host, client() as pool, client() as other, node(5) as peer:
            busy = asyncio.ensure_future(pool.call(host.address, PRODUCE, timeout_ms=5000))
            await begun.wait()
            with pytest.raises(UnavailableError, match="too_many_connections"):
                await other.call(host.address, PRODUCE, timeout_ms=5000)
            await peer.call(host.address, PRODUCE, timeout_ms=5000)
            end.set()
            await busy
            await other.call(host.address, PRODUCE, timeout_ms=5000)  # in place of the one that is idle now

    run(test())


# Stopping.


def test_server_that_stops_answers_what_it_has_accepted() -> None:
    async def test() -> None:
        gate = Gate()
        async with serve(gate) as host, client() as pool, asyncio.TaskGroup() as group:
            call = group.create_task(pool.call(host.address, ask_for(9), [bytes(4 * KIB * KIB)], timeout_ms=20_000))
            await wait_until(lambda: gate.inside == 1)
            closing = group.create_task(host.server.close(10_000))
            await asyncio.sleep(0.01)
            late = await error_of(pool.call(host.address, PRODUCE, timeout_ms=5000))
            assert isinstance(late, UnavailableError)
            assert late.code == "stopping"
            gate.opened.set()
            response, payload = await call
            assert (response.offset, len(payload)) == (9, 4 * KIB * KIB)
            await closing
            # The first to try may find the old connection, and that it is closed.
            assert isinstance(await error_of(pool.call(host.address, PRODUCE, timeout_ms=5000)), UnavailableError)
            with pytest.raises(UnavailableError, match="not_serving"):
                await pool.call(host.address, PRODUCE, timeout_ms=5000)

    run(test())


def test_server_that_stops_ends_what_outlasts_its_grace() -> None:
    async def test() -> None:
        gate = Gate()
        async with serve(gate) as host, client() as pool, asyncio.TaskGroup() as group:
            calls = [
                group.create_task(error_of(pool.call(host.address, request, timeout_ms=20_000)))
                for request in WRITE_AND_READ
            ]
            await wait_until(lambda: gate.inside == 2)
            await host.server.close(20)
            errors = [await call for call in calls]
            assert [(type(error), getattr(error, "code", "")) for error in errors] == [
                (OutcomeUnknownError, "stopping"),
                (UnavailableError, "stopping"),
            ]

    run(test())
