"""Networks of peers on real sockets: messages arrive, connections come back, bounds hold, bugs are loud."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from quiver.clock import SystemClock
from quiver.errors import ConfigError, InvariantBroken, RequestError
from quiver.model import NodeId
from quiver.replication.interfaces import Network
from quiver.wire import Address, ConnectionStatus, FrameKind, FrameReader, PeerNetwork, WireSettings, encode_frame
from quiver.wire.handshake import encode_hello, make_hello

ANYWHERE = ("127.0.0.1", 0)
MIB = 1024 * 1024
QUICK = WireSettings(reconnect_delay_ms_min=5, reconnect_delay_ms_max=20, handshake_timeout_ms=300)


class Node:
    """A network and what it delivered."""

    def __init__(
        self,
        number: int,
        *,
        listen: Address = ANYWHERE,
        incarnation: int = 1,
        settings: WireSettings = QUICK,
        peers: dict[NodeId, Address] | None = None,
    ) -> None:
        self.id = NodeId(number)
        self.network = PeerNetwork(
            node=self.id,
            cluster_id="test",
            incarnation=incarnation,
            listen=listen,
            peers=peers or {},
            settings=settings,
            clock=SystemClock(),
            rng=random.Random(number),
        )
        self.messages: list[tuple[NodeId, bytes]] = []
        self.lost: list[NodeId] = []

    def start(self) -> None:
        self.network.start(lambda node, message: self.messages.append((node, bytes(message))), self.lost.append)

    def about(self, other: Node | NodeId) -> ConnectionStatus:
        node = other.id if isinstance(other, Node) else other
        return next(peer for peer in self.network.status().peers if peer.node == node)


def run(test: Coroutine[object, object, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(bounded())


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event, being seen from outside
            await asyncio.sleep(0.002)


async def send_until(sender: Node, to: NodeId, parts: Sequence[bytes], condition: Callable[[], bool]) -> None:
    """Send until it has the wanted effect: a message may be lost while a connection is made again."""
    async with asyncio.timeout(10):
        while not condition():
            sender.network.send(to, parts)
            await asyncio.sleep(0.01)


def introduce(*nodes: Node) -> None:
    for node in nodes:
        for other in nodes:
            if other is not node:
                node.network.add_peer(other.id, other.network.address)


@asynccontextmanager
async def cluster(*nodes: Node) -> AsyncIterator[None]:
    """Run nodes that all know each other, and wait until all are connected."""
    async with AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node.network)
        introduce(*nodes)
        for node in nodes:
            node.start()
        await asyncio.sleep(0.01)
        await wait_until(lambda: all(is_meshed(node, len(nodes)) for node in nodes))
        yield


def is_meshed(node: Node, count: int) -> bool:
    peers = node.network.status().peers
    return len(peers) == count - 1 and all(peer.is_connected and peer.is_heard for peer in peers)


class SilentPeer:
    """A node that agrees to a handshake and then reads only when told, on a plain socket."""

    def __init__(self, number: int) -> None:
        self.id = NodeId(number)
        self._listener = socket.create_server(ANYWHERE)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        self.address: Address = self._listener.getsockname()
        self._sockets: list[socket.socket] = []

    async def greet(self) -> socket.socket:
        """Accept a connection and say hello."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        accepted, _ = await loop.sock_accept(self._listener)
        accepted.setblocking(False)
        self._sockets.append(accepted)
        await loop.sock_recv(accepted, 4096)
        await loop.sock_sendall(accepted, hello_of(self.id))
        return accepted

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            each.close()


def hello_of(node: NodeId, incarnation: int = 1) -> bytes:
    return encode_hello(make_hello(cluster_id="test", node=node, incarnation=incarnation))


async def receive_messages(source: socket.socket, count: int) -> list[bytes]:
    """Read frames off a plain socket."""
    reader = FrameReader(100 * MIB)
    messages: list[bytes] = []
    while len(messages) < count:
        received = await asyncio.get_running_loop().sock_recv_into(source, reader.writable())
        assert received, "the connection ended"
        reader.received(received)
        while (frame := reader.next_frame()) is not None:
            messages.append(bytes(frame.body))
    return messages


def test_network_is_the_real_side_of_the_seam() -> None:
    network = Node(1).network
    seam: Network = network
    assert seam is network
    assert network.status().peers == ()


def test_three_nodes_exchange_messages_of_all_sizes_in_order() -> None:
    async def test() -> None:
        nodes = [Node(1), Node(2), Node(3)]
        sent = [os.urandom(size) for size in (0, 1, 100, 70_000, 3 * MIB, 5, 400_000, 0, 65_535, 65_536)] * 3
        async with cluster(*nodes):
            for sender in nodes:
                for receiver in nodes:
                    for message in sent:
                        half = len(message) // 2
                        sender.network.send(receiver.id, (message[:half], memoryview(message)[half:]))
            await wait_until(lambda: all(len(node.messages) == 2 * len(sent) for node in nodes))
            for node in nodes:
                for other in nodes:
                    expected = [] if other is node else sent
                    assert [message for source, message in node.messages if source == other.id] == expected
            for node in nodes:
                for peer in node.network.status().peers:
                    assert (peer.messages_out, peer.messages_in, peer.messages_dropped) == (30, 30, 0)
                    assert peer.bytes_out == peer.bytes_in == sum(map(len, sent)) + 30 * 12
                    assert (peer.backlog_bytes, peer.reconnects, peer.incarnation) == (0, 0, 1)
                assert node.network.status().messages_to_unknown == len(sent)

    run(test())


def test_peer_that_restarts_is_reached_again() -> None:
    async def test() -> None:
        first, second = Node(1), Node(2, incarnation=7)
        async with cluster(first):
            async with second.network:
                introduce(first, second)
                second.start()
                await wait_until(lambda: is_meshed(first, 2))
                assert first.about(second.id).incarnation == 7
                address = second.network.address
            await wait_until(lambda: first.lost == [second.id] * 2)
            assert second.lost == []
            assert not first.about(second).is_heard
            again = Node(2, listen=address, incarnation=8, peers={first.id: first.network.address})
            async with again.network:
                again.start()
                await send_until(first, again.id, (b"after",), lambda: (first.id, b"after") in again.messages)
                await send_until(again, first.id, (b"back",), lambda: (again.id, b"back") in first.messages)
                assert first.about(again.id).incarnation == 8
                assert first.about(again).reconnects == 1

    run(test())


CHILD = """
import asyncio, random, sys
from quiver.clock import SystemClock
from quiver.wire import PeerNetwork, WireSettings

async def main():
    network = PeerNetwork(node=2, cluster_id="test", incarnation=9, listen=("127.0.0.1", 0),
        peers={1: ("127.0.0.1", int(sys.argv[1]))}, settings=WireSettings(), clock=SystemClock(), rng=random.Random())
    async with network:
        network.start(lambda node, message: network.send(node, (b"echo ", message)), lambda node: None)
        print(network.address[1], flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_loss_of_a_killed_process_is_reported() -> None:
    async def test() -> None:
        node = Node(1)
        async with cluster(node):
            command = (sys.executable, "-c", CHILD, str(node.network.address[1]))
            child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            try:
                assert child.stdout is not None
                port = await child.stdout.readline()
                node.network.add_peer(NodeId(2), ("127.0.0.1", int(port)))
                await send_until(node, NodeId(2), (b"hi",), lambda: (NodeId(2), b"echo hi") in node.messages)
                assert node.lost == []
            finally:
                child.kill()
                await child.wait()
            await wait_until(lambda: node.lost == [NodeId(2)] * 2)
            assert not node.about(NodeId(2)).is_heard

    run(test())


def test_messages_to_an_unreachable_node_are_dropped_and_counted() -> None:
    async def test() -> None:
        with socket.create_server(ANYWHERE) as unused:
            address: Address = unused.getsockname()
        node = Node(1, peers={NodeId(2): address}, settings=WireSettings())
        async with node.network:
            node.start()
            await wait_until(lambda: node.about(NodeId(2)).last_error != "")
            before = node.about(NodeId(2)).messages_dropped
            node.network.send(NodeId(2), (b"lost",))
            node.network.send(NodeId(9), (b"lost",))
            status = node.about(NodeId(2))
            assert (status.messages_dropped, status.messages_out, status.backlog_bytes) == (before + 1, 0, 0)
            assert not status.is_connected
            assert node.network.status().messages_to_unknown == 1
            assert node.lost == []

    run(test())


@pytest.mark.parametrize("address", [("no.such.host.invalid", 1), ("x" * 300, 1), ("127.0.0.1", 70_000)])
def test_address_that_cannot_be_dialled_is_an_unreachable_node(address: Address) -> None:
    async def test() -> None:
        node = Node(1, peers={NodeId(2): address})
        async with node.network:
            node.start()
            node.network.send(NodeId(2), (b"lost",))
            await wait_until(lambda: node.about(NodeId(2)).last_error != "")
            await wait_until(lambda: node.about(NodeId(2)).messages_dropped == 1)

    run(test())


def test_messages_wait_while_the_connection_is_made() -> None:
    async def test() -> None:
        peer = SilentPeer(2)
        node = Node(1, peers={peer.id: peer.address})
        async with node.network:
            node.start()
            for at in range(3):
                node.network.send(peer.id, (b"%d" % at,))
            assert node.about(peer.id).backlog_bytes == 3 * 13
            assert await receive_messages(await peer.greet(), 3) == [b"0", b"1", b"2"]
            assert node.about(peer.id).backlog_bytes == 0
        peer.close()

    run(test())


def test_newest_messages_are_dropped_while_a_peer_does_not_read() -> None:
    async def test() -> None:
        peer = SilentPeer(2)
        bound = 8 * MIB
        settings = WireSettings(frame_bytes_max=2 * MIB, peer_buffer_bytes_max=bound)
        node = Node(1, peers={peer.id: peer.address}, settings=settings)
        async with node.network:
            node.start()
            source = await peer.greet()
            await wait_until(lambda: node.about(peer.id).is_connected)
            sent = 0
            while node.about(peer.id).messages_dropped == 0:
                node.network.send(peer.id, (sent.to_bytes(4, "little"), bytes(MIB)))
                sent += 1
                assert node.about(peer.id).backlog_bytes <= bound + 256 * 1024
                await asyncio.sleep(0)
            accepted = sent - 1
            assert node.about(peer.id).backlog_bytes > bound - 2 * MIB
            messages = await receive_messages(source, accepted)
            assert [int.from_bytes(message[:4], "little") for message in messages] == list(range(accepted))
            await wait_until(lambda: node.about(peer.id).backlog_bytes == 0)
            node.network.send(peer.id, (b"again",))
            assert await receive_messages(source, 1) == [b"again"]
        peer.close()

    run(test())


def test_what_waits_for_a_connection_that_breaks_is_dropped_and_counted() -> None:
    async def test() -> None:
        peer = SilentPeer(2)
        node = Node(1, peers={peer.id: peer.address})
        async with node.network:
            node.start()
            source = await peer.greet()
            await wait_until(lambda: node.about(peer.id).is_connected)
            for _ in range(40):
                node.network.send(peer.id, (bytes(MIB),))
            assert node.about(peer.id).backlog_bytes > MIB
            source.close()
            await wait_until(lambda: node.lost == [peer.id])
            assert node.about(peer.id).messages_dropped > 0
            assert node.about(peer.id).backlog_bytes == 0
        peer.close()

    run(test())


def test_message_larger_than_any_frame_is_the_callers_mistake() -> None:
    async def test() -> None:
        settings = WireSettings(frame_bytes_max=MIB, peer_buffer_bytes_max=MIB)
        first, second = Node(1, settings=settings), Node(2, settings=settings)
        async with cluster(first, second):
            with pytest.raises(RequestError, match="has 1048577 bytes, at most 1048576 can be sent"):
                first.network.send(second.id, (bytes(MIB - 12), b"x"))
            first.network.send(second.id, (bytes(MIB - 12),))
            await wait_until(lambda: len(second.messages) == 1)

    run(test())


def test_what_was_sent_before_closing_arrives() -> None:
    async def test() -> None:
        first, second = Node(1), Node(2)
        async with cluster(second):
            async with first.network:
                introduce(first, second)
                first.start()
                await wait_until(lambda: is_meshed(first, 2))
                for at in range(5):
                    first.network.send(second.id, (bytes([at]) * 300_000,))
            await wait_until(lambda: len(second.messages) == 5)

    run(test())


def test_closing_does_not_wait_for_a_peer_that_does_not_read() -> None:
    async def test() -> None:
        peer = SilentPeer(2)
        node = Node(1, peers={peer.id: peer.address})
        async with asyncio.timeout(5):
            async with node.network:
                node.start()
                await peer.greet()
                await wait_until(lambda: node.about(peer.id).is_connected)
                for _ in range(40):
                    node.network.send(peer.id, (bytes(MIB),))
                await node.network.close()
                await node.network.close()
                node.network.send(peer.id, (b"late",))
        assert node.lost == []
        peer.close()

    run(test())


@pytest.mark.parametrize("is_greeted", [False, True])
def test_network_closes_in_the_middle_of_anything(is_greeted: bool) -> None:
    async def test() -> None:
        peer = SilentPeer(2)
        node = Node(1, peers={peer.id: peer.address})
        async with node.network:
            node.start()
            await asyncio.sleep(0.02)
            if is_greeted:
                await peer.greet()
        assert not node.about(peer.id).is_connected
        peer.close()

    run(test())


def test_nothing_is_accepted_or_dialled_before_start() -> None:
    async def test() -> None:
        first, second = Node(1), Node(2)
        async with first.network, second.network:
            introduce(first, second)
            second.start()
            await asyncio.sleep(0.05)
            assert not any(peer.is_connected or peer.is_heard for peer in second.network.status().peers)
            first.start()
            await wait_until(lambda: is_meshed(first, 2) and is_meshed(second, 2))
            with pytest.raises(InvariantBroken, match="started only once"):
                first.start()

    run(test())


def test_network_may_be_entered_after_start_and_left_without_it() -> None:
    async def test() -> None:
        first, second = Node(1), Node(2)
        first.start()
        async with first.network:
            async with second.network:
                pass
            assert first.network.status().address.startswith("127.0.0.1:")

    run(test())


def test_removed_peer_gets_nothing_more_and_is_not_reported_lost() -> None:
    async def test() -> None:
        first, second = Node(1), Node(2)
        async with cluster(first, second):
            first.network.remove_peer(second.id)
            first.network.remove_peer(NodeId(9))
            await wait_until(lambda: second.lost == [first.id])
            first.network.send(second.id, (b"lost",))
            second.network.send(first.id, (b"heard",))
            await wait_until(lambda: first.messages == [(second.id, b"heard")])
            assert (second.messages, first.lost) == ([], [])
            status = first.about(second)
            assert (status.address, status.is_connected, status.is_heard, status.messages_in) == ("", False, True, 1)
            second.network.remove_peer(first.id)
            await wait_until(lambda: first.network.status().peers == ())
            assert second.id not in first.network._traffic

    run(test())


def test_peer_is_removed_in_the_middle_of_a_handshake() -> None:
    async def test() -> None:
        peer = SilentPeer(2)
        node = Node(1, peers={peer.id: peer.address})
        async with node.network:
            node.start()
            await asyncio.sleep(0.02)
            node.network.remove_peer(peer.id)
            source = await peer.greet()
            with suppress(ConnectionResetError):
                assert await asyncio.get_running_loop().sock_recv(source, 100) == b""
            assert node.network.status().peers == ()
        peer.close()

    run(test())


def test_peer_that_moved_is_dialled_at_its_new_address() -> None:
    async def test() -> None:
        first, second, moved = Node(1), Node(2), Node(2, incarnation=2)
        async with cluster(first, second), moved.network:
            moved.start()
            first.network.add_peer(second.id, second.network.address)
            assert first.about(second).is_connected, "the same address changes nothing"
            first.network.add_peer(first.id, first.network.address)
            assert len(first.network.status().peers) == 1, "a node is no peer of itself"
            first.network.add_peer(moved.id, moved.network.address)
            await send_until(first, moved.id, (b"here",), lambda: (first.id, b"here") in moved.messages)

    run(test())


def test_node_that_connects_again_replaces_its_former_connection() -> None:
    async def test() -> None:
        node = Node(1)
        async with cluster(node):
            former = await dial(node, hello_of(NodeId(2)))
            newer = await dial(node, hello_of(NodeId(2)))
            assert await former.read() == b""
            assert node.lost == [NodeId(2)]
            newer.write(b"".join(encode_frame(FrameKind.MESSAGE, b"", (b"x",), check_payload=True)))
            await wait_until(lambda: node.messages == [(NodeId(2), b"x")])
            former.close()
            newer.close()
            await wait_until(lambda: node.lost == [NodeId(2)] * 2)

    run(test())


class Dialled:
    """A plain connection to a node, after its answer to the hello."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.write = writer.write
        self.close = writer.close

    async def read(self) -> bytes:
        """Return everything until the end."""
        try:
            return await self._reader.read()
        except ConnectionResetError:
            return b""


async def dial(node: Node, hello: bytes) -> Dialled:
    reader, writer = await asyncio.open_connection(*node.network.address)
    writer.write(hello)
    await reader.readexactly(len(hello_of(node.id)))
    return Dialled(reader, writer)


def test_connection_to_the_former_life_of_a_peer_is_given_up_when_the_new_one_calls() -> None:
    async def test() -> None:
        peer = SilentPeer(2)
        node = Node(1, peers={peer.id: peer.address})
        async with node.network:
            node.start()
            await peer.greet()
            await wait_until(lambda: node.about(peer.id).is_connected)
            same = await dial(node, hello_of(peer.id, incarnation=1))
            await asyncio.sleep(0.02)
            assert node.lost == []
            newer = await dial(node, hello_of(peer.id, incarnation=2))
            await wait_until(lambda: node.lost.count(peer.id) == 2)
            assert node.about(peer.id).last_error == "the peer has restarted"
            assert node.about(peer.id).incarnation == 2
            same.close()
            newer.close()
        peer.close()

    run(test())


def test_peer_that_calls_is_dialled_at_once() -> None:
    async def test() -> None:
        with socket.create_server(ANYWHERE) as unused:
            address: Address = unused.getsockname()
        slow = WireSettings(reconnect_delay_ms_min=60_000, reconnect_delay_ms_max=60_000)
        first = Node(1, peers={NodeId(2): address}, settings=slow)
        async with first.network:
            first.start()
            await wait_until(lambda: first.about(NodeId(2)).last_error != "")
            second = Node(2, listen=address, peers={first.id: first.network.address})
            async with second.network:
                second.start()
                await wait_until(lambda: is_meshed(first, 2))

    run(test())


def test_connection_that_breaks_as_soon_as_it_is_made_is_made_ever_more_slowly() -> None:
    async def test() -> None:
        peer = SilentPeer(2)
        settings = WireSettings(reconnect_delay_ms_min=10, reconnect_delay_ms_max=60_000)
        node = Node(1, peers={peer.id: peer.address}, settings=settings)
        async with node.network:
            node.start()
            times = []
            for _ in range(6):
                (await peer.greet()).close()
                times.append(asyncio.get_running_loop().time())
            waits = [later - earlier for earlier, later in itertools.pairwise(times)]
            assert waits[-1] >= 0.08, waits
        peer.close()

    run(test())


@pytest.mark.parametrize("fails", ["handler", "on_lost"])
def test_handler_that_raises_ends_the_network_loudly(fails: str) -> None:
    async def test() -> None:
        first, second = Node(1), Node(2)
        messages: list[memoryview] = []
        expected = 1 if fails == "handler" else 3

        def handle(node: NodeId, message: memoryview) -> None:
            messages.append(message)
            if fails == "handler":
                raise LookupError("a bug")

        def lose(node: NodeId) -> None:
            raise LookupError("a bug")

        async def live() -> None:
            async with first.network:
                first.network.start(handle, lose)
                async with second.network:
                    introduce(first, second)
                    second.start()
                    await wait_until(lambda: is_meshed(second, 2))
                    for _ in range(3):
                        second.network.send(first.id, (b"x",))
                    await wait_until(lambda: len(messages) == expected)
                await asyncio.sleep(10)

        with pytest.raises(ExceptionGroup) as raised:
            await live()
        assert [str(error) for error in raised.value.exceptions] == ["a bug"]
        assert len(messages) == expected

    run(test())


def test_broken_invariant_in_a_handler_ends_the_process() -> None:
    async def test() -> None:
        first, second = Node(1), Node(2)

        def handle(node: NodeId, message: memoryview) -> None:
            raise InvariantBroken("a bug")

        async with first.network, second.network:
            introduce(first, second)
            first.network.start(handle, first.lost.append)
            second.start()
            await wait_until(lambda: is_meshed(second, 2))
            second.network.send(first.id, (b"x",))
            await asyncio.sleep(10)

    with pytest.raises(InvariantBroken, match="a bug"):
        run(test())


def test_error_inside_the_network_leaves_it_as_it_is() -> None:
    async def test() -> None:
        first, second = Node(1), Node(2)
        async with cluster(first, second):
            raise LookupError("not a group")

    with pytest.raises(LookupError, match="not a group"):
        run(test())


def test_address_in_use_is_named() -> None:
    async def test() -> None:
        with socket.create_server(ANYWHERE) as taken:
            address: Address = taken.getsockname()
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{address[1]}"):
                async with Node(1, listen=address).network:
                    pass

    run(test())
