"""Discovery: user addresses are parsed and resolved to nodes of a cluster."""

from __future__ import annotations

import pytest
from client_world import World

from quiver.client.discovery import Seed, parse_seeds, wire_addresses
from quiver.errors import RequestError, UnavailableError
from quiver.model import NodeId


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("host:7000", [Seed("either", "host", 7000, 7000)]),
        ("host", [Seed("either", "host", 9002, 8002)]),
        ("http://host:80", [Seed("http", "host", 9002, 80)]),
        ("https://host", [Seed("http", "host", 9002, 8002)]),
        ("http://host/", [Seed("http", "host", 9002, 8002)]),
        ("quiver://host", [Seed("wire", "host", 9002, 8002)]),
        ("quiver://[::1]:7000", [Seed("wire", "::1", 7000, 8002)]),
        ("[::1]:7000", [Seed("either", "::1", 7000, 7000)]),
        ("[::1]", [Seed("either", "::1", 9002, 8002)]),
        (" a:1 ,, b:2", [Seed("either", "a", 1, 1), Seed("either", "b", 2, 2)]),
    ],
)
def test_address_is_parsed(text: str, seeds: list[Seed]) -> None:
    assert list(parse_seeds([text])) == seeds


@pytest.mark.parametrize(
    "text", ["", ",", "host:port", "ftp://host", "http://", "http://host/path", "http://host:99999", "quiver://a b:x"]
)
def test_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_seeds([text])
    assert refused.value.code == "bad_address"


@pytest.mark.parametrize("address", ["http://gateway", "gateway:8002", "gateway", "nowhere:1,gateway:8002", "node-2"])
def test_cluster_is_discovered_by_wire_and_by_gateway(address: str) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect([address]) as cluster:
            await cluster.create_topic("logs")
            assert await cluster.list_topics() == ["logs"]

    world.run(scenario())


def test_unreachable_cluster_is_reported_with_every_reason() -> None:
    world = World()

    async def scenario() -> None:
        with pytest.raises(UnavailableError, match=r"as wire.*as HTTP"):
            async with world.connect(["nowhere:1"]):
                pass
        assert 5_000 < world.clock.monotonic_ms() <= 10_000

    world.run(scenario())


def test_connect_waits_for_a_cluster_that_starts_late() -> None:
    world = World()
    for node in (1, 2, 3):
        world.cluster.stop(node)
    world.loop.call_later(3, world.cluster.stopped.clear)

    async def scenario() -> None:
        async with world.connect() as cluster:
            assert cluster.cluster_id == "memory"

    world.run(scenario())


@pytest.mark.parametrize("kind", ["quiver://", ""])
def test_given_addresses_stay_in_use_when_the_node_that_answered_first_knows_no_other_and_is_lost(kind: str) -> None:
    world = World()
    world.cluster.blank.add(NodeId(3))
    for node in (1, 2):
        world.cluster.stop(node)

    async def scenario() -> None:
        async with world.connect([f"{kind}{address}" for address in world.cluster.addresses]) as cluster:
            world.cluster.stop(3)
            world.cluster.start(1)
            await cluster.create_topic("logs")
            async with await cluster.consumer("logs", group="readers") as member:
                assert member.assignment == (("logs", 0),)

    world.run(scenario())


@pytest.mark.parametrize(
    ("located", "addresses"),
    [
        (["b:7000"], ["b:7000", "a:9002", "d:9002"]),
        (["a:9002"], ["a:9002", "b:7000", "d:9002"]),
        (["n:1", "m:2"], ["n:1", "m:2", "a:9002"]),
    ],
)
def test_given_address_is_kept_unless_it_may_be_of_a_gateway(located: list[str], addresses: list[str]) -> None:
    assert wire_addresses(parse_seeds(["quiver://a", "b:7000,http://c", "d"]), located) == addresses
