"""Every client reaches a cluster with TLS, by the same names; a wrong address says what is wrong, soon."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

import quiver
from quiver.classic import Consumer, Producer
from quiver.cli import main
from quiver.errors import UnavailableError
from quiver.spark.connections import connection, find_servers
from quiver.testing import LocalCluster

ENDLESS_S = 3_600.0
"""A timeout beyond that of any test: only a call that ends without waiting for it ends the test."""


class Secured:
    """A cluster with TLS that asks every client for a certificate, and the files that clients need."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        self.ca_file, self.node_file, self.client_file = (
            str(directory / f"{name}.pem") for name in ("ca", "node", "client")
        )
        authority.cert_pem.write_to_path(self.ca_file)
        authority.issue_cert("127.0.0.1", "node-1").private_key_and_cert_chain_pem.write_to_path(self.node_file)
        authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(self.client_file)
        self.settings = {
            "tls.is_enabled": "true",
            "tls.certificate_file": self.node_file,
            "tls.ca_file": self.ca_file,
            "tls.client_certificates": "all",
        }


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Secured:
    return Secured(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def local(secured: Secured) -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1, settings=secured.settings) as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1) as running:
        yield running


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


Way = Callable[[LocalCluster, Secured, pytest.MonkeyPatch], list[str]]


def by_options(local: LocalCluster, secured: Secured, _: pytest.MonkeyPatch) -> list[str]:
    return ["--url", local.urls[0], "--ca-file", secured.ca_file, "--certificate-file", secured.client_file]


def by_environment(local: LocalCluster, secured: Secured, patch: pytest.MonkeyPatch) -> list[str]:
    patch.setenv("QUIVER_URL", local.addresses[0])
    patch.setenv("QUIVER_CA_FILE", secured.ca_file)
    patch.setenv("QUIVER_CERT_FILE", secured.client_file)
    return []


def by_context(local: LocalCluster, secured: Secured, _: pytest.MonkeyPatch) -> list[str]:
    files = ["--ca-file", secured.ca_file, "--certificate-file", secured.client_file]
    assert main(["context", "add", "prod", "https://127.0.0.1:1", local.urls[0], *files]) == 0
    assert main(["context", "use", "prod"]) == 0
    return []


@pytest.mark.parametrize("way", [by_options, by_environment, by_context])
def test_command_line_uses_a_cluster_with_tls(
    local: LocalCluster,
    secured: Secured,
    way: Way,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    topic = f"logs-{way.__name__}"
    named = way(local, secured, monkeypatch)
    (tmp_path / "lines").write_text("one\ntwo\n")
    for command in (
        ["status"],
        ["topic", "create", topic, "--partitions", "1"],
        ["produce", topic, str(tmp_path / "lines")],
    ):
        assert main([*command, "--timeout", "20", *named]) == 0
    capsys.readouterr()
    assert main(["consume", topic, *named]) == 0
    assert capsys.readouterr().out == "one\ntwo\n"


def test_sdk_spark_and_classic_find_the_context(
    local: LocalCluster, secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_context(local, secured, monkeypatch)
    with quiver.connect() as cluster:
        cluster.create_topic("named", partitions=1)
    with quiver.connect(context="prod") as cluster:
        assert "named" in cluster.list_topics()
    assert "named" in connection(find_servers("", context="prod")).list_topics()
    producer = Producer([local.urls[0]], name="classic")  # its files come from the environment or the context
    producer.close()
    monkeypatch.setenv("QUIVER_URL", local.urls[0])
    monkeypatch.setenv("QUIVER_CA_FILE", secured.ca_file)
    monkeypatch.setenv("QUIVER_CERT_FILE", secured.client_file)
    producer, consumer = Producer(name="classic"), Consumer()
    producer.RegisterProducer("named")
    producer.Enqueue("named", "hello")
    consumer.RegisterConsumer("named")
    assert consumer.Dequeue("named") == "hello"


def test_http_asks_for_a_certificate_where_all_clients_need_one(local: LocalCluster, secured: Secured) -> None:
    context = ssl.create_default_context(cafile=secured.ca_file)
    with pytest.raises(OSError, match=r"(?i)certificate|EOF|closed|reset"):
        urllib.request.urlopen(f"{local.urls[0]}/topics", context=context, timeout=60)
    context.load_cert_chain(secured.client_file)
    with urllib.request.urlopen(f"{local.urls[0]}/topics", context=context, timeout=60) as response:
        assert json.loads(response.read())["status"] == "success"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def stranger() -> Iterator[int]:
    """A server that greets in another protocol."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            while True:
                try:
                    with server.accept()[0] as accepted:
                        accepted.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                except OSError:
                    return

        thread = threading.Thread(target=greet)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.timeout(120)
def test_wrong_address_says_what_is_wrong(
    local: LocalCluster, plain: LocalCluster, secured: Secured, stranger: int
) -> None:
    ca, certificate = secured.ca_file, secured.client_file
    cases: list[tuple[str, dict[str, str], str]] = [
        (f"127.0.0.1:{free_port()}", {}, "nothing listens at"),
        (f"http://127.0.0.1:{free_port()}", {}, "nothing listens at"),
        ("no-such-host.invalid:9002", {}, "the host name 'no-such-host.invalid' is unknown"),
        (f"127.0.0.1:{stranger}", {}, "is not a Quiver node"),
        (f"quiver://{plain.urls[0].removeprefix('http://')}", {}, "is an HTTP port: write http://"),
        (f"http://{plain.addresses[0]}", {}, "is a wire port: write quiver://"),
        (plain.addresses[0], {"ca_file": ca}, "does not use TLS"),
        (plain.urls[0].replace("http", "https"), {"ca_file": ca}, "does not use TLS"),
        (local.addresses[0], {}, "uses TLS: write https://"),
        (local.urls[0].replace("https", "http"), {}, "uses TLS: write https://"),
        (local.urls[0], {}, "is not trusted"),
        (local.addresses[0], {"ca_file": ca}, "asks for a client certificate"),
        (local.urls[0], {"ca_file": ca}, "asks for a client certificate"),
        (
            local.urls[0].replace("127.0.0.1", "localhost"),
            {"ca_file": ca, "certificate_file": certificate},
            "does not name that host",
        ),
    ]

    async def connect(address: str, files: dict[str, str]) -> tuple[str, str]:
        with pytest.raises(UnavailableError) as failed:
            await quiver.connect_async(address, timeout=ENDLESS_S, **files).open()  # type: ignore[arg-type]
        return failed.value.code, str(failed.value)

    async def connect_all() -> list[tuple[str, str]]:
        return await asyncio.gather(*(connect(address, files) for address, files, _ in cases))

    for (address, _, expected), (code, sentence) in zip(cases, asyncio.run(connect_all()), strict=True):
        assert code == "not_reached", address
        assert expected in sentence, address


def test_https_never_becomes_plain_text() -> None:
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            while True:
                try:
                    with server.accept()[0] as accepted:
                        received.append(accepted.recv(3))
                except OSError:
                    return

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(UnavailableError, match="does not use TLS"):
            quiver.connect(f"https://127.0.0.1:{server.getsockname()[1]}", timeout=1)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert received
    assert {first[:2] for first in received} == {b"\x16\x03"}  # a TLS handshake, and nothing else
