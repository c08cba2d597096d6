"""TLS on real sockets, with certificates made for the test: who shows the wrong one, or none, is not let in."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trustme
from wire_hosts import CLUSTER, client, error_of, node, run, serve, wait_until

from quiver.clock import SystemClock
from quiver.errors import ConfigError, UnavailableError
from quiver.model import Buffer, NodeId, Offset, PartitionId, TopicId
from quiver.wire import Caller, PeerNetwork, RequestPool, TlsSettings, WireSettings
from quiver.wire.messages import AnyRequest, BrokerHeartbeatRequest, HeartbeatReceived, Produce, Produced
from quiver.wire.requests import Response
from quiver.wire.tls import check_certificate, make_client_context, make_server_context

MIB = 1 << 20
PRODUCE = Produce(topic_id=TopicId(1), partition_id=PartitionId(0))
BEAT = BrokerHeartbeatRequest(node=NodeId(2), identity="")
QUICK = WireSettings(reconnect_delay_ms_min=5, reconnect_delay_ms_max=20)


async def echo(caller: Caller, request: AnyRequest, payload: memoryview) -> tuple[Response, Sequence[Buffer]]:
    if isinstance(request, BrokerHeartbeatRequest):
        return HeartbeatReceived(is_known=True), ()
    return Produced(base_offset=Offset(len(payload))), (payload,)


class Authority:
    """A certificate authority and the files of what it has issued."""

    def __init__(self, directory: Path) -> None:
        self._authority = trustme.CA()
        self._directory = directory
        directory.mkdir()
        self.ca_file = str(directory / "ca.pem")
        self._authority.cert_pem.write_to_path(self.ca_file)

    def issue(self, *names: str, **settings: object) -> TlsSettings:
        """Return settings with a certificate for these names."""
        certificate = self._authority.issue_cert(*names)
        path = self._directory / f"{'+'.join(names)}.pem"
        certificate.private_key_and_cert_chain_pem.write_to_path(str(path))
        return TlsSettings(is_enabled=True, certificate_file=str(path), ca_file=self.ca_file, **settings)  # type: ignore[arg-type]

    def trust(self) -> TlsSettings:
        """Return the settings of a client that shows no certificate."""
        return TlsSettings(is_enabled=True, ca_file=self.ca_file)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


# Requests.


@pytest.mark.parametrize("size_bytes", [0, 1, 100_000, 5 * MIB])
def test_requests_travel_encrypted(authority: Authority, size_bytes: int) -> None:
    async def test() -> None:
        tls = authority.issue("node-1", "127.0.0.1")
        payload = random.Random(1).randbytes(size_bytes)
        async with serve(echo, tls=tls) as host, client(tls=authority.trust()) as pool:
            for _ in range(3):
                _, returned = await pool.call(host.address, PRODUCE, [payload], timeout_ms=20_000)
                assert returned == payload

    run(test())


def test_many_large_requests_at_once_are_held_to_the_bounds_and_all_answered(authority: Authority) -> None:
    async def test() -> None:
        settings = WireSettings(connection_bytes_max=4 * MIB)
        tls = authority.issue("node-1", "127.0.0.1")
        async with (
            serve(echo, tls=tls, settings=settings) as host,
            client(settings, tls=authority.trust()) as pool,
            asyncio.TaskGroup() as group,
        ):
            calls = [
                group.create_task(pool.call(host.address, PRODUCE, [bytes([at]) * MIB], timeout_ms=20_000))
                for at in range(32)
            ]
            for at, call in enumerate(calls):
                _, payload = await call
                assert payload == bytes([at]) * MIB
            assert host.server.status().requests_bytes == 0

    run(test())


Tls = Callable[[Authority, Authority], TlsSettings]


@pytest.mark.parametrize(
    ("of_client", "reason"),
    [
        (lambda ours, theirs: theirs.trust(), "CERTIFICATE_VERIFY_FAILED"),
        (lambda ours, theirs: TlsSettings(), ""),
    ],
    ids=["other authority", "no TLS"],
)
def test_client_and_node_that_do_not_trust_each_other_do_not_talk(
    authority: Authority, stranger: Authority, of_client: Tls, reason: str
) -> None:
    async def test() -> None:
        tls = authority.issue("node-1", "127.0.0.1")
        async with serve(echo, tls=tls) as host, client(tls=of_client(authority, stranger)) as pool:
            error = await error_of(pool.call(host.address, PRODUCE, timeout_ms=10_000))
            assert isinstance(error, UnavailableError)
            assert error.code == "not_reached"
            assert reason in error.message
            assert host.server.status().client_connections == 0

    run(test())


def test_client_does_not_talk_to_a_node_whose_certificate_names_another_host(authority: Authority) -> None:
    async def test() -> None:
        tls = authority.issue("node-1", "broker.example")
        async with serve(echo, tls=tls) as host, client(tls=authority.trust()) as pool:
            with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
                await pool.call(host.address, PRODUCE, timeout_ms=10_000)

    run(test())


def test_client_with_tls_does_not_talk_to_a_node_without(authority: Authority) -> None:
    async def test() -> None:
        async with serve(echo) as host, client(tls=authority.trust()) as pool:
            with pytest.raises(UnavailableError):
                await pool.call(host.address, PRODUCE, timeout_ms=10_000)

    run(test())


@pytest.mark.parametrize(
    ("of_node", "reason"),
    [
        (lambda ours, theirs: ours.trust(), "bad_certificate"),
        (lambda ours, theirs: ours.issue("node-3", "127.0.0.1"), "bad_certificate"),
        (lambda ours, theirs: ours.issue("client.example"), "bad_certificate"),
        (
            lambda ours, theirs: TlsSettings(
                is_enabled=True, ca_file=ours.ca_file, certificate_file=theirs.issue("node-2").certificate_file
            ),
            "",
        ),
    ],
    ids=["none", "another node's", "a client's", "another authority's"],
)
def test_who_shows_no_certificate_of_the_node_is_not_taken_for_it(
    authority: Authority, stranger: Authority, of_node: Tls, reason: str
) -> None:
    async def test() -> None:
        tls = authority.issue("node-1", "127.0.0.1")
        async with (
            serve(echo, tls=tls) as host,
            node(2, tls=of_node(authority, stranger)) as false,
            node(2, tls=authority.issue("node-2")) as true,
        ):
            error = await error_of(false.call(host.address, BEAT, timeout_ms=10_000))
            assert isinstance(error, UnavailableError)
            assert reason in error.message
            assert host.server.status().node_connections == 0
            await true.call(host.address, BEAT, timeout_ms=10_000)

    run(test())


@pytest.mark.parametrize(("demanded", "is_let_in"), [("none", True), ("nodes", True), ("all", False)])
def test_clients_need_a_certificate_only_where_all_do(authority: Authority, demanded: str, is_let_in: bool) -> None:
    async def test() -> None:
        tls = authority.issue("node-1", "127.0.0.1", client_certificates=demanded)
        async with (
            serve(echo, tls=tls) as host,
            client(tls=authority.trust()) as bare,
            client(tls=authority.issue("client.example")) as certified,
        ):
            await certified.call(host.address, PRODUCE, timeout_ms=10_000)
            if is_let_in:
                await bare.call(host.address, PRODUCE, timeout_ms=10_000)
            else:
                assert isinstance(await error_of(bare.call(host.address, PRODUCE, timeout_ms=10_000)), UnavailableError)

    run(test())


def test_older_versions_of_tls_are_refused(authority: Authority) -> None:
    async def test() -> None:
        async with serve(echo, tls=authority.issue("node-1", "127.0.0.1")) as host:
            context = ssl.create_default_context(cafile=authority.ca_file)
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection(*host.network.address, ssl=context)

    run(test())


# Peers.


class Peer:
    """A node that only sends messages."""

    def __init__(self, number: int, tls: TlsSettings) -> None:
        self.id = NodeId(number)
        self.messages: list[bytes] = []
        self.network = PeerNetwork(
            node=self.id,
            cluster_id=CLUSTER,
            incarnation=1,
            listen=("127.0.0.1", 0),
            peers={},
            settings=QUICK,
            clock=SystemClock(),
            rng=random.Random(number),
            tls=tls,
        )

    def last_error(self, of: Peer) -> str:
        return next((peer.last_error for peer in self.network.status().peers if peer.node == of.id), "")


@asynccontextmanager
async def meeting(*peers: Peer) -> AsyncIterator[None]:
    """Run peers that try to reach each other."""
    async with AsyncExitStack() as stack:
        for peer in peers:
            await stack.enter_async_context(peer.network)
        for peer in peers:
            for other in peers:
                peer.network.add_peer(other.id, other.network.address)
            peer.network.start(lambda _, message, peer=peer: peer.messages.append(bytes(message)), lambda node: None)  # type: ignore[misc]
        yield


def test_messages_between_nodes_travel_encrypted(authority: Authority) -> None:
    async def test() -> None:
        # The names of their hosts do not matter to each other, only who they are.
        first, second = Peer(1, authority.issue("node-1")), Peer(2, authority.issue("node-2"))
        message = random.Random(1).randbytes(3 * MIB)
        async with meeting(first, second):
            await wait_until(lambda: all(peer.is_connected for peer in first.network.status().peers))
            for _ in range(4):
                first.network.send(second.id, [message[:10], message[10:]])
            await wait_until(lambda: len(second.messages) == 4)
            assert set(second.messages) == {message}
            assert [peer.backlog_bytes for peer in first.network.status().peers] == [0]

    run(test())


def test_node_does_not_talk_to_a_peer_that_shows_another_nodes_certificate(authority: Authority) -> None:
    async def test() -> None:
        first, second = Peer(1, authority.issue("node-1")), Peer(2, authority.issue("node-3"))
        async with meeting(first, second):
            await wait_until(lambda: "CERTIFICATE_VERIFY_FAILED" in first.last_error(second))
            await wait_until(lambda: "bad_certificate" in second.last_error(first))
            assert not any(peer.is_connected or peer.is_heard for peer in first.network.status().peers)

    run(test())


# Settings.


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"certificate_file": ""}, "tls.certificate_file is needed"),
        ({"certificate_file": "/no/such.pem"}, "/no/such.pem"),
        ({"ca_file": "/no/such.pem"}, "/no/such.pem"),
        ({"certificate_file": __file__}, "test_wire_tls.py"),
        ({"ca_file": __file__}, "test_wire_tls.py"),
    ],
)
def test_files_that_cannot_be_used_are_named_at_the_start(
    authority: Authority, change: dict[str, str], named: str
) -> None:
    good = authority.issue("node-1")
    with pytest.raises(ConfigError) as refused:
        make_server_context(msgspec.structs.replace(good, **change))
    assert named in refused.value.message


def test_key_of_another_certificate_is_refused(authority: Authority) -> None:
    mixed = TlsSettings(
        is_enabled=True,
        certificate_file=authority.issue("node-1").certificate_file,
        key_file=authority.issue("node-2").certificate_file,
    )
    with pytest.raises(ConfigError, match="tls: "):
        RequestPool(name="mixed", tls=mixed)


def test_key_without_a_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tls\.key_file is set without tls\.certificate_file"):
        TlsSettings(key_file="key.pem")


def test_without_tls_nothing_is_loaded_and_nothing_demanded() -> None:
    off = TlsSettings(certificate_file="/no/such.pem")
    assert make_server_context(off) is None
    assert make_client_context(off) is None
    assert check_certificate(None, off, 2) is None
