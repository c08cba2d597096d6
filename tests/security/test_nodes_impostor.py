"""Attacks on a running cluster with default settings, by somebody who can only reach its ports.

On loopback without certificates, whoever reached the wire port used to be a node: it could delete the files of topics
on all nodes, register addresses that nodes dial, and learn the cluster's id and identity.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest
from waiting import wait_until

from quiver import Cluster
from quiver.addresses import parse_address
from quiver.errors import ConflictError, NotAllowedError, UnavailableError
from quiver.features import LEVEL_MAX
from quiver.metadata import DeleteTopicCommand, PurgeTopic, RegisterBroker
from quiver.metadata.commands import Command, encode_payload
from quiver.model import GroupId, NodeId, TopicId
from quiver.security.node_proof import load_node_secret
from quiver.security.secrets import Secret
from quiver.testing.local_cluster import LocalCluster
from quiver.wire import FrameKind, FrameReader, RequestPool
from quiver.wire.handshake import (
    HandshakeRefusal,
    Hello,
    RequesterHello,
    decode_refusal,
    encode_hello,
    make_hello,
    make_requester_hello,
    read_hello,
)
from quiver.wire.messages import BrokerHeartbeatRequest, DeleteTopicRequest, GetMembers, SubmitCommand
from quiver.wire.proving import NodeSecret
from quiver.wire.requests import Request
from quiver.wire.security_messages import ListUsers

CLUSTER = "quiver"
"""The default id, which everybody knows."""
IMPOSTOR = NodeId(4242)
GUESS = NodeSecret(Secret("0" * 64))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1) as cluster, cluster.connect() as client:
        client.create_topic("kept")
        yield cluster


def attack(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


def node_pool(secret: NodeSecret | None = None, *, node: NodeId = IMPOSTOR) -> RequestPool:
    return RequestPool(name="attack", cluster_id=CLUSTER, node=node, node_secret=secret)


async def answer_to(address: str, opening: bytes) -> Hello | RequesterHello | HandshakeRefusal:
    """Send a first frame; return the hello or the refusal that ends or answers it."""
    reader, writer = await asyncio.open_connection(*parse_address(address))
    writer.write(opening)
    received = await reader.read(4096)
    writer.close()
    frames = FrameReader(4096)
    frames.writable()[: len(received)] = received
    frames.received(len(received))
    frame = frames.next_frame()
    assert frame is not None, "the connection ended without an answer"
    if frame.kind is FrameKind.REFUSAL:
        return decode_refusal(frame)
    return read_hello(frame, make_hello(cluster_id=CLUSTER, node=NodeId(1), incarnation=1))


COMMANDS: list[Command[Any]] = [
    DeleteTopicCommand(now_ms=1, topic="kept", purge_ms=2),
    PurgeTopic(now_ms=1, topic_id=TopicId(1)),
    RegisterBroker(
        now_ms=1, broker_id=IMPOSTOR, identity="x", wire_address="192.0.2.1:22", http_address="", rack="", roles=()
    ),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
@pytest.mark.parametrize("secret", [None, GUESS], ids=["no proof", "guessed secret"])
def test_command_as_node_4242_is_refused(
    cluster: LocalCluster, command: Command[Any], secret: NodeSecret | None
) -> None:
    async def test() -> None:
        async with node_pool(secret) as pool:
            with pytest.raises(UnavailableError, match="not_proven"):
                await pool.call(cluster.addresses[0], SubmitCommand(), [encode_payload(command)], timeout_ms=5_000)

    attack(test)
    with cluster.connect() as client:
        assert client.list_topics() == ["kept"]


def test_node_that_runs_cannot_be_impersonated_either(cluster: LocalCluster) -> None:
    async def test() -> None:
        beat = BrokerHeartbeatRequest(node=NodeId(1), identity="")
        async with node_pool(GUESS, node=NodeId(1)) as pool:
            with pytest.raises(UnavailableError, match="not_proven"):
                await pool.call(cluster.addresses[0], beat, timeout_ms=5_000)

    attack(test)


@pytest.mark.parametrize(
    "request_",
    [
        SubmitCommand(),
        BrokerHeartbeatRequest(node=NodeId(1), identity=""),
        GetMembers(group=GroupId(1)),
        DeleteTopicRequest(topic="kept", is_forwarded=True),
    ],
    ids=lambda request: type(request).__name__,
)
def test_client_may_not_send_what_nodes_send(cluster: LocalCluster, request_: Request[Any]) -> None:
    async def test() -> None:
        async with RequestPool(name="attack") as pool:
            with pytest.raises(NotAllowedError, match="for nodes only"):
                await pool.call(cluster.addresses[0], request_, timeout_ms=5_000)

    attack(test)


def test_raft_hello_without_proof_learns_nothing(cluster: LocalCluster) -> None:
    async def test() -> None:
        opening = encode_hello(make_hello(cluster_id=CLUSTER, node=IMPOSTOR, incarnation=1))
        refusal = await answer_to(cluster.addresses[0], opening)
        assert isinstance(refusal, HandshakeRefusal)
        assert refusal.code == "not_proven"
        # Not even whether the cluster's id or the node's identity was guessed.
        for guess in (
            make_hello(cluster_id="other", node=IMPOSTOR, incarnation=1),
            make_hello(cluster_id=CLUSTER, node=NodeId(1), incarnation=1, identity="guess"),
        ):
            answered = await answer_to(cluster.addresses[0], encode_hello(guess))
            assert isinstance(answered, HandshakeRefusal)
            assert answered.code == "not_proven"

    attack(test)


def test_anonymous_hello_learns_versions_only(cluster: LocalCluster) -> None:
    async def test() -> None:
        hello = await answer_to(cluster.addresses[0], encode_hello(make_requester_hello(name="")))
        assert isinstance(hello, Hello)
        told = msgspec.to_builtins(hello)
        assert (told["cluster_id"], told["node"], told["incarnation"], told["identity"]) == ("-", 0, 0, "")

    attack(test)


def test_challenge_tells_nothing_but_a_nonce(cluster: LocalCluster) -> None:
    async def test() -> None:
        hello = msgspec.structs.replace(make_hello(cluster_id="x", node=NodeId(9), incarnation=1), nonce="0" * 64)
        seen = set()
        for _ in range(3):
            reader, writer = await asyncio.open_connection(*parse_address(cluster.addresses[0]))
            writer.write(encode_hello(hello))
            received = await reader.read(4096)
            writer.close()
            fields = msgspec.msgpack.decode(received[12:])
            assert set(fields) == {"purpose", "nonce"}
            seen.add(fields["nonce"])
        assert len(seen) == 3

    attack(test)


def test_messages_before_the_proof_are_not_delivered(cluster: LocalCluster) -> None:
    async def test() -> None:
        hello = msgspec.structs.replace(make_hello(cluster_id=CLUSTER, node=IMPOSTOR, incarnation=1), nonce="0" * 64)
        reader, writer = await asyncio.open_connection(*parse_address(cluster.addresses[0]))
        writer.write(encode_hello(hello) + encode_hello(hello))
        received = await reader.read()  # a challenge, a refusal, and the end
        assert b"bad_frame" in received
        writer.close()

    attack(test)


def test_secret_file_is_the_owners_alone(cluster: LocalCluster) -> None:
    home = os.environ.get("XDG_STATE_HOME") or f"{os.environ['HOME']}/.local/state"
    assert os.stat(f"{home}/quiver/node-secret").st_mode & 0o777 == 0o600
    assert cluster.is_running(1)


def test_node_that_was_removed_is_no_node_any_more(cluster: LocalCluster) -> None:
    former = NodeId(9)
    register = RegisterBroker(now_ms=1, broker_id=former, identity="nine", wire_address="127.0.0.1:9")
    secret = NodeSecret(load_node_secret())

    async def ask(request: Request[Any], *parts: bytes) -> None:
        pool = RequestPool(name="nine", cluster_id=CLUSTER, node=former, identity="nine", node_secret=secret)
        async with pool:
            await pool.call(cluster.addresses[0], request, parts, timeout_ms=5_000)

    attack(lambda: ask(SubmitCommand(level_max=LEVEL_MAX), encode_payload(register)))
    attack(lambda: ask(ListUsers()))
    with cluster.connect() as client:
        client.drain(former)
        wait_until(lambda: _is_removed(client, former))
    with pytest.raises(UnavailableError, match="other_identity"):
        attack(lambda: ask(ListUsers()))


def _is_removed(client: Cluster, node: NodeId) -> bool:
    try:
        client.remove(node)
    except ConflictError:  # not drained yet
        return False
    return True
