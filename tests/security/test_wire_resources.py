"""What strangers and clients may take of a node: memory, connections and patience, each within its bound."""

from __future__ import annotations

import asyncio
import gc
import struct
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

from wire_attacker import Attacker
from wire_hosts import Host, client, run, serve, wait_until

from quiver.errors import OverloadedError
from quiver.model import NodeId, Offset, PartitionId, TopicId
from quiver.security import user_principal
from quiver.wire import WireSettings
from quiver.wire.frames import BUFFER_BYTES_MAX, FrameReader
from quiver.wire.handshake import encode_hello, make_hello, make_requester_hello
from quiver.wire.messages import AnyRequest, Fetch, Fetched, FindOffset, OffsetFound
from quiver.wire.requests import ANSWER_BYTES_MAX
from quiver.wire.serving import Answer, Caller

MIB = 1024 * 1024
EVERYTHING = 1 << 40
SMALL = FindOffset(topic_id=TopicId(1), partition_id=PartitionId(0), at="latest")


def fetch(bytes_max: int) -> Fetch:
    return Fetch(topic_id=TopicId(1), partition_id=PartitionId(0), offset=Offset(0), bytes_max=bytes_max)


class Disk:
    """A handler that reads what it is asked for, as a broker does, and counts what it holds."""

    def __init__(self) -> None:
        self.reads = 0
        self.held_bytes_max = 0
        self.server_bytes: Callable[[], int] = lambda: 0

    async def handle(self, caller: Caller, request: AnyRequest, _: memoryview) -> Answer:
        if not isinstance(request, Fetch):
            return OffsetFound(offset=Offset(0)), ()
        await caller.reserve(request.answer_bytes)
        self.held_bytes_max = max(self.held_bytes_max, self.server_bytes())
        self.reads += 1
        await asyncio.sleep(0)
        return Fetched(first_offset=Offset(0), end_offset=Offset(1)), (bytes(request.answer_bytes),)


@asynccontextmanager
async def serving(disk: Disk, **settings: int) -> AsyncIterator[Host]:
    async with serve(disk.handle, settings=WireSettings(**settings)) as host:
        disk.server_bytes = lambda: host.server.memory.bytes
        yield host


def test_length_prefix_allocates_nothing() -> None:
    reader = FrameReader(72 * MIB)
    view = reader.writable()
    view[:4] = struct.pack("<I", 70 * MIB)
    reader.received(4)
    assert reader.next_frame() is None
    assert len(reader.writable()) <= BUFFER_BYTES_MAX


def test_size_that_a_client_asks_for_is_clamped() -> None:
    assert fetch(EVERYTHING).answer_bytes == ANSWER_BYTES_MAX
    assert fetch(1000).answer_bytes == 1000


def test_answers_are_reserved_before_they_exist_and_slow_readers_starve_nobody() -> None:
    limit = 32 * MIB
    bounds = {"requests_bytes_max": limit, "connection_bytes_max": 8 * MIB}

    async def test() -> None:
        disk = Disk()
        async with serving(disk, **bounds) as host, client() as pool:
            with ExitStack() as stack:
                for _ in range(12):
                    attacker = await asyncio.to_thread(Attacker, host.address, receive_buffer_bytes=4096)
                    stack.enter_context(attacker)
                    await asyncio.to_thread(attacker.say_hello)
                    for number in range(20):
                        attacker.request(number, fetch(2 * MIB))
                await wait_until(lambda: host.server.memory.waiting > 0)
                for _ in range(3):
                    await pool.call(host.address, SMALL, timeout_ms=5_000)
                    await pool.call(host.address, fetch(64 * 1024), timeout_ms=5_000)
                assert disk.held_bytes_max <= limit
                assert disk.reads < 12 * 20
            await wait_until(lambda: host.server.memory.bytes == 0)

    run(test())


def test_principal_whose_many_connections_read_nothing_leaves_memory_to_others() -> None:
    """Small answers are not reserved: a connection that does not read them is not read either, and others are."""
    limit, connections, asked = 2 * MIB, 12, 160
    page = bytes(32 * 1024)  # the kernel takes a few MiB of each connection

    async def test() -> None:
        async def describe(caller: Caller, request: AnyRequest, _: memoryview) -> Answer:
            return OffsetFound(offset=Offset(0)), (page,)

        bounds = WireSettings(requests_bytes_max=limit, connection_bytes_max=limit, connection_requests_max=asked)
        async with serve(describe, settings=bounds) as host, client() as pool:
            requests = Attacker.encode([SMALL] * asked)
            with ExitStack() as stack:
                for _ in range(connections):
                    attacker = await asyncio.to_thread(Attacker, host.address, receive_buffer_bytes=4096)
                    stack.enter_context(attacker)
                    await asyncio.to_thread(attacker.say_hello)
                    for session in host.server._client_sessions:
                        session.identity.principal = user_principal("mallory")
                    attacker.send(requests)
                await wait_until(lambda: host.server.memory.bytes > limit)
                await wait_until(lambda: not host.server.status().requests)
                refused = 0
                while host.server.memory.bytes > limit or not refused:
                    try:
                        await pool.call(host.address, SMALL, timeout_ms=5_000)
                    except OverloadedError:
                        refused += 1  # until those that do not read have had their time
                        await asyncio.sleep(0.02)
                for _ in range(20):
                    await pool.call(host.address, SMALL, timeout_ms=5_000)
                assert host.network.status().evicted > 0
                assert host.server.memory.bytes < limit
            await wait_until(lambda: host.server.memory.bytes == 0)

    run(test())


def test_answers_larger_than_the_limits_of_a_small_node_are_sent_one_at_a_time() -> None:
    bounds = {"requests_bytes_max": 64 * 1024, "connection_bytes_max": 64 * 1024}

    async def test() -> None:
        async with serving(Disk(), **bounds) as host, client() as pool:
            calls = [pool.call(host.address, fetch(MIB), timeout_ms=20_000) for _ in range(4)]
            assert [len(payload) for _, payload in await asyncio.gather(*calls)] == [MIB] * 4

    run(test())


def test_answer_that_needs_more_than_was_asked_for_reserves_it_and_never_waits_for_itself() -> None:
    size, limit = 6 * MIB, 8 * MIB

    async def test() -> None:
        held: list[int] = []

        async def read(caller: Caller, request: AnyRequest, _: memoryview) -> Answer:
            assert await caller.reserve(0) > 0, "an answer has at least one batch"
            await asyncio.sleep(0)  # the first batch turns out to be large
            assert await caller.reserve(size) == size
            held.append(host.server.memory.answers_bytes)
            await asyncio.sleep(0)
            return Fetched(first_offset=Offset(0), end_offset=Offset(1)), (bytes(size),)

        bounds = WireSettings(requests_bytes_max=limit, connection_bytes_max=limit)
        async with serve(read, settings=bounds) as host, client() as pool:
            await asyncio.gather(*(pool.call(host.address, fetch(0), timeout_ms=20_000) for _ in range(6)))
            assert max(held) <= limit
            await wait_until(lambda: host.server.memory.bytes == 0)
            assert host.server.memory.answers_bytes == 0

    run(test())


def test_payload_of_a_request_is_freed_at_once() -> None:
    async def test() -> None:
        payloads: list[weakref.ref[memoryview]] = []

        async def handle(caller: Caller, request: AnyRequest, payload: memoryview) -> Answer:
            payloads.append(weakref.ref(payload))
            return OffsetFound(offset=Offset(0)), ()

        async with serve(handle) as host, client() as pool:
            gc.collect()
            gc.disable()  # it must not be what frees the memory of requests
            try:
                for _ in range(3):
                    await pool.call(host.address, SMALL, (bytes(MIB),), timeout_ms=5_000)
                await wait_until(lambda: all(payload() is None for payload in payloads))
            finally:
                gc.enable()

    run(test())


def test_reader_that_does_not_read_is_closed_in_time_and_its_memory_freed() -> None:
    async def test() -> None:
        disk = Disk()
        async with serving(disk, send_timeout_ms=100) as host:
            attacker = await asyncio.to_thread(Attacker, host.address, receive_buffer_bytes=4096)
            with attacker:
                await asyncio.to_thread(attacker.say_hello)
                attacker.request(1, fetch(ANSWER_BYTES_MAX))
                attacker.request(2, fetch(ANSWER_BYTES_MAX))
                await wait_until(lambda: disk.reads == 2)
                await wait_until(lambda: host.server.status().client_connections == 0)
                assert host.server.memory.bytes == 0

    run(test())


def test_frame_that_never_ends_is_cut_off() -> None:
    async def test() -> None:
        async with serving(Disk(), frame_timeout_ms=100) as host:
            attacker = await asyncio.to_thread(Attacker, host.address)
            with attacker:
                await asyncio.to_thread(attacker.say_hello)
                attacker.send(struct.pack("<I", 70 * MIB) + bytes(100))
                await asyncio.to_thread(attacker.wait_closed)
            assert host.network.status().evicted == 1

    run(test())


def test_frames_that_are_nearly_complete_share_the_memory_of_requests() -> None:
    limit = 8 * MIB
    size = 3 * MIB

    async def test() -> None:
        async with serving(Disk(), requests_bytes_max=limit) as host, client() as pool:
            with ExitStack() as stack:
                attackers = [
                    stack.enter_context(await asyncio.to_thread(Attacker, host.address))
                    for _ in range(limit // size + 2)
                ]
                for attacker in attackers:
                    await asyncio.to_thread(attacker.say_hello)
                    await asyncio.to_thread(attacker.send, struct.pack("<I", size) + bytes(size - 1))
                await asyncio.to_thread(attackers[0].wait_closed)
                await asyncio.to_thread(attackers[1].wait_closed)
                await pool.call(host.address, SMALL, (bytes(MIB),), timeout_ms=5_000)
                assert host.network.status().evicted == 2, "the others fit"
                assert host.server.memory.bytes == 0

    run(test())


def test_memory_of_a_frame_is_freed_when_its_connection_ends() -> None:
    reader = FrameReader(72 * MIB)
    memory = reader.writable()
    memory[:4] = struct.pack("<I", 70 * MIB)
    reader.received(4)
    assert reader.next_frame() is None
    memory = reader.writable()
    held = memory.obj
    del memory
    references = sys.getrefcount(held)
    reader.close()
    assert sys.getrefcount(held) == references - 1
    assert not reader.is_partial


def test_silent_connections_end_but_long_polls_and_nodes_do_not_lose_theirs_early() -> None:
    async def test() -> None:
        end = asyncio.Event()

        async def poll(caller: Caller, request: AnyRequest, payload: memoryview) -> Answer:
            await end.wait()
            return OffsetFound(offset=Offset(7)), ()

        async with serve(poll, settings=WireSettings(silence_timeout_ms=100)) as host, client() as pool:
            polling = asyncio.ensure_future(pool.call(host.address, SMALL, timeout_ms=30_000))
            attacker = await asyncio.to_thread(Attacker, host.address)
            with attacker:
                await asyncio.to_thread(attacker.say_hello)
                await asyncio.to_thread(attacker.wait_closed)
            end.set()
            assert (await polling)[0] == OffsetFound(offset=Offset(7))

    run(test())


def test_nodes_that_have_nothing_to_say_stay_connected() -> None:
    async def test() -> None:
        async with serving(Disk(), silence_timeout_ms=100) as host:
            with await asyncio.to_thread(Attacker, host.address) as node, ExitStack() as stack:
                hello = make_hello(cluster_id="test", node=NodeId(2), incarnation=1, identity="disk-2")
                await asyncio.to_thread(node.say_hello, encode_hello(hello))
                stranger = stack.enter_context(await asyncio.to_thread(Attacker, host.address))
                await asyncio.to_thread(stranger.say_hello)
                await asyncio.to_thread(stranger.wait_closed)
                status = host.network.status()
                assert (status.evicted, [peer.is_heard for peer in status.peers]) == (1, [True])

    run(test())


def test_silent_connections_lock_nobody_out() -> None:
    async def test() -> None:
        async with serving(Disk()) as host, client() as pool:
            with ExitStack() as stack:
                for _ in range(2 * WireSettings().handshakes_max):
                    stack.enter_context(await asyncio.to_thread(Attacker, host.address))
                newcomer = stack.enter_context(await asyncio.to_thread(Attacker, host.address))
                await asyncio.to_thread(newcomer.say_hello)
                node = stack.enter_context(await asyncio.to_thread(Attacker, host.address))
                hello = make_requester_hello(name="node-2", cluster_id="test", node=NodeId(2), identity="disk-2")
                await asyncio.to_thread(node.say_hello, encode_hello(hello))
                await pool.call(host.address, SMALL, timeout_ms=5_000)
                assert host.network.status().handshakes <= WireSettings().handshakes_max

    run(test())


def test_idle_connections_of_one_address_make_room_for_others() -> None:
    async def test() -> None:
        async with serving(Disk(), address_connections_max=5) as host, client() as pool:
            with ExitStack() as stack:
                for _ in range(8):
                    attacker = stack.enter_context(await asyncio.to_thread(Attacker, host.address))
                    await asyncio.to_thread(attacker.say_hello)
                await pool.call(host.address, SMALL, timeout_ms=5_000)
                await wait_until(lambda: host.server.status().client_connections <= 5)

    run(test())


def test_each_newcomer_of_a_burst_takes_the_place_of_another() -> None:
    limit, newcomers = 5, 20

    async def test() -> None:
        async with serving(Disk(), address_connections_max=limit) as host:
            with ExitStack() as stack:
                for _ in range(newcomers):  # without letting the node accept: all arrive in one turn of its loop
                    stack.enter_context(Attacker(host.address))
                await wait_until(lambda: host.network.status().evicted == newcomers - limit)
                assert host.network.status().handshakes == limit

    run(test())
