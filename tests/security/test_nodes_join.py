"""A new node joins a secure cluster with a join token: it works once, for one node, and for nothing else."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from secured_cluster import SecuredCluster, secured_cluster

from quiver.cli import main
from quiver.config import SecurityMode, TlsSettings, decide_mode, load_settings
from quiver.errors import NotAllowedError, QuiverError, RequestError, UnavailableError
from quiver.model import NodeId
from quiver.security.bootstrap import initialize
from quiver.security.certificates import hosts_of, load_certificate, make_key, make_request
from quiver.security.joining import format_join_token, join_user, parse_join_token, parse_join_user
from quiver.security.secrets import Secret, TokenSource, read_secret, write_secret
from quiver.wire import RequestPool
from quiver.wire.messages import BrokerHeartbeatRequest, CreateTopicRequest
from quiver.wire.requests import Request
from quiver.wire.security_messages import ListUsers, SignNode

CSR = make_request(make_key(), 4)
TOKEN = f"qv_{'0' * 16}_{'0' * 64}"


class Secure:
    """A running cluster of one node, and what its operator does to let nodes join."""

    def __init__(self, running: SecuredCluster) -> None:
        self.directory = running.directory
        self.cluster = running.local
        self.options = running.flags()

    def join_token(self, node: str, output: Path) -> Path:
        assert main(["security", "join-token", node, "--out", str(output), *self.options]) == 0
        return output

    def join(self, token: Path, directory: Path) -> int:
        return main(["security", "join", str(token), "--directory", str(directory)])

    def ask(self, request: Request[Any], token: Secret | None, *, tls: TlsSettings | None = None) -> Any:
        async def call() -> Any:
            trust = tls or TlsSettings(is_enabled=True, ca_file=str(self.directory / "ca.pem"))
            source = None if token is None else TokenSource(token)
            async with RequestPool(name="test", tls=trust, credentials=source) as pool:
                return (await pool.call(self.cluster.addresses[0], request, timeout_ms=20_000))[0]

        return asyncio.run(call())


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    with secured_cluster(tmp_path_factory.mktemp("join") / "security") as running:
        yield Secure(running)


def test_node_gets_its_certificate_once(secure: Secure, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = secure.join_token("4@10.0.0.4,broker-4.example", tmp_path / "join.token")
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    own = tmp_path / "own"
    assert secure.join(token, own) == 0
    certificate = (own / "node.pem").read_text()
    assert load_certificate(certificate).subject.rfc4514_string() == "CN=node-4,O=quiver"
    assert set(hosts_of(certificate)) >= {"10.0.0.4", "broker-4.example"}
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in own.iterdir()} == dict.fromkeys(
        ("node.pem", "node.key", "ca.pem", "quiver.toml"), 0o600
    )
    settings = load_settings((own / "quiver.toml").read_text())
    assert (settings.node.id, settings.node.advertise, settings.node.wire) == (4, "", "10.0.0.4:9002")
    assert settings.node.managers == {1: secure.cluster.addresses[0]}
    assert settings.node.role_names == {"broker", "gateway"}
    assert settings.tls.certificate_file == str(own / "node.pem")
    assert decide_mode(settings) is SecurityMode.SECURE
    capsys.readouterr()
    assert secure.join(token, tmp_path / "again") != 0
    assert "unauthenticated" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_mistakes_on_the_way_use_no_token_up(
    secure: Secure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = secure.join_token("7@10.0.0.7", tmp_path / "lost.token")
    again = ["security", "join-token", "7@10.0.0.7", "--out", str(lost), *secure.options]
    assert main(again) != 0
    assert "exists" in capsys.readouterr().err
    token = secure.join_token("7@10.0.0.7", tmp_path / "join.token")  # the second of the same node
    used = tmp_path / "used"
    used.mkdir()
    (used / "node.key").write_text("of another node")
    assert secure.join(token, used) != 0
    assert "node.key exists" in capsys.readouterr().err
    assert secure.join(token, tmp_path / "file" / "own") == 0
    assert secure.join(lost, tmp_path / "other") != 0  # the other token of the node is used up, too


def test_joined_node_is_accepted_as_itself_and_as_nobody_else(secure: Secure, tmp_path: Path) -> None:
    secure.join(secure.join_token("5@127.0.0.1", tmp_path / "join.token"), tmp_path / "own")
    files = {"certificate_file": "node.pem", "key_file": "node.key", "ca_file": "ca.pem"}
    tls = TlsSettings(is_enabled=True, **{key: str(tmp_path / "own" / name) for key, name in files.items()})  # type: ignore[arg-type]

    def beat(hello: int, node: int) -> Any:
        async def call() -> Any:
            pool = RequestPool(name="node", cluster_id="quiver", node=NodeId(hello), identity="disk", tls=tls)
            async with pool:
                request = BrokerHeartbeatRequest(node=NodeId(node), identity="disk", level_max=2)
                return (await pool.call(secure.cluster.addresses[0], request, timeout_ms=20_000))[0]

        return asyncio.run(call())

    assert beat(5, 5).is_known is False, "it has not registered yet"
    with pytest.raises(NotAllowedError, match="heartbeat of node 1"):
        beat(5, 1)
    with pytest.raises(UnavailableError, match="bad_certificate"):
        beat(1, 1)


@pytest.mark.parametrize(
    "request_", [ListUsers(), CreateTopicRequest(topic="mine")], ids=lambda request: type(request).__name__
)
def test_join_token_is_good_for_nothing_else(secure: Secure, tmp_path: Path, request_: Request[Any]) -> None:
    name = f"7@{type(request_).__name__}"
    token = parse_join_token(read_secret(str(secure.join_token(name, tmp_path / "join.token")))).token
    with pytest.raises(NotAllowedError):
        secure.ask(request_, token)


def test_certificate_of_a_node_that_exists_is_not_signed(secure: Secure, tmp_path: Path) -> None:
    token = parse_join_token(read_secret(str(secure.join_token("1@10.0.0.66", tmp_path / "join.token")))).token
    with pytest.raises(QuiverError) as refused:
        secure.ask(SignNode(csr=CSR), token)
    assert refused.value.code == "node_exists"


def test_nobody_else_gets_a_certificate(secure: Secure) -> None:
    with pytest.raises(NotAllowedError):
        secure.ask(SignNode(csr=CSR), None)
    admin = read_secret(str(secure.directory / "admin.token"))
    with pytest.raises(NotAllowedError, match="join token only"):
        secure.ask(SignNode(csr=CSR), admin)


def test_bad_request_does_not_use_the_token_up(secure: Secure, tmp_path: Path) -> None:
    token = parse_join_token(read_secret(str(secure.join_token("8@10.0.0.8", tmp_path / "join.token")))).token
    with pytest.raises(RequestError) as refused:
        secure.ask(SignNode(csr="nonsense"), token)
    assert refused.value.code == "bad_csr"
    assert secure.ask(SignNode(csr=CSR), token).certificate


def test_token_is_not_sent_to_another_cluster(
    secure: Secure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    initialize(str(tmp_path / "other"), {1: ["127.0.0.1"]})
    made = parse_join_token(read_secret(str(secure.join_token("9@10.0.0.9", tmp_path / "join.token"))))
    other = msgspec.structs.replace(made, authority=(tmp_path / "other" / "ca.pem").read_text())
    assert parse_join_token(format_join_token(other)) == other
    write_secret(str(tmp_path / "other.token"), format_join_token(other))
    assert secure.join(tmp_path / "other.token", tmp_path / "own") != 0
    assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err
    assert secure.join(tmp_path / "join.token", tmp_path / "own") == 0, "nobody has seen the token"


@pytest.mark.parametrize("hosts", [[], ["fd00::1"], ["a b"], ["x" * 120], [""]])
def test_hosts_that_do_not_fit_are_refused(hosts: list[str]) -> None:
    with pytest.raises(RequestError):
        join_user(4, hosts)


@pytest.mark.parametrize("principal", ["user:alice", "join-4@h", "node:4", "anonymous", "user:join-0@h", "user:join-4"])
def test_other_principals_have_no_join_token(principal: str) -> None:
    with pytest.raises(NotAllowedError):
        parse_join_user(principal)
    assert parse_join_user("user:join-4@h@10.0.0.4") == ("join-4@h@10.0.0.4", 4, ["h", "10.0.0.4"])


@pytest.mark.parametrize(
    "text", ["", "qvj_", "qvj_AAAA", "qvj_AAAA.qv_1_2.AAAA", f"qvj_!.{TOKEN}.e30", f"qvj_AAAA.{TOKEN}.e30", TOKEN]
)
def test_other_texts_are_no_join_tokens(text: str) -> None:
    with pytest.raises(RequestError, match="not a join token"):
        parse_join_token(Secret(text))
