"""A secure cluster and clients with passwords: SCRAM proves both sides, and the password is sent and shown nowhere."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from secured_cluster import SecuredCluster, secured_cluster
from wire_hosts import error_of, serve

import quiver
from quiver import classic
from quiver.cli import main
from quiver.client.discovery import http_get
from quiver.errors import NotAllowedError, QuiverError, RequestError, UnavailableError
from quiver.model import Buffer, Offset, PartitionId, TopicId
from quiver.security.permissions import Grant, ResourceKind, Verb
from quiver.security.scram import ITERATIONS_MIN, ScramServer, make_verifier
from quiver.security.secrets import PasswordSource, Secret
from quiver.wire import Caller, RequestPool
from quiver.wire.messages import AnyRequest, FindOffset, OffsetFound
from quiver.wire.requests import Response
from quiver.wire.security_messages import Authenticated, BeginScram, FinishScram, ScramChallenge

PASSWORD = "correct horse, battery stäple"
OTHER = "another long password"
FIND = FindOffset(topic_id=TopicId(1), partition_id=PartitionId(0), at=5)


# -- a whole cluster -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with secured_cluster(tmp_path_factory.mktemp("security")) as cluster:
        with cluster.admin() as admin:
            admin.create_topic("logs.web", partitions=1)
            admin.access.create_user("alice", password=PASSWORD)
            for verb in (Verb.READ, Verb.WRITE):
                grant = Grant(subject="user:alice", verb=verb, kind=ResourceKind.TOPIC, name="logs.", is_prefix=True)
                admin.access.add_grant(grant)
        yield cluster


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("URL", "CONTEXT", "CA_FILE", "CERT_FILE", "KEY_FILE", "TOKEN_FILE", "USER", "PASSWORD_FILE"):
        monkeypatch.delenv(f"QUIVER_{variable}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def _write(path: Path, password: str = PASSWORD) -> str:
    replacement = path.with_suffix(".new")
    replacement.write_text(f"{password}\n")
    replacement.chmod(0o600)
    os.replace(replacement, path)
    return str(path)


def test_password_reaches_what_the_users_grants_cover(secured: SecuredCluster, tmp_path: Path) -> None:
    (address,) = secured.local.addresses
    with quiver.connect(address, ca_file=secured.ca_file, user="alice", password=PASSWORD) as cluster:
        cluster.producer("logs.web").send("hello").result()
        with pytest.raises(NotAllowedError) as refused:
            cluster.access.users()
        assert refused.value.code == "not_allowed"

    async def ask() -> list[str]:
        file = _write(tmp_path / "password")
        async with quiver.connect_async(address, ca_file=secured.ca_file, user="alice", password_file=file) as cluster:
            return await cluster.list_topics()

    assert asyncio.run(ask()) == ["logs.web"]


@pytest.mark.parametrize(("user", "password"), [("alice", OTHER), ("nobody", PASSWORD)])
def test_wrong_password_and_unknown_user_get_the_same_refusal(
    secured: SecuredCluster, user: str, password: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (address,) = secured.local.addresses
    with pytest.raises(NotAllowedError) as refused:
        quiver.connect(address, ca_file=secured.ca_file, user=user, password=password)
    assert refused.value.code == "unauthenticated"
    assert password not in str(refused.value) + caplog.text
    assert "unknown, wrong, expired or revoked" in str(refused.value)


def test_open_connection_ends_with_its_password_and_goes_on_with_the_next(
    secured: SecuredCluster, tmp_path: Path
) -> None:
    (address,) = secured.local.addresses
    file = _write(tmp_path / "password", OTHER)
    with secured.admin() as admin:
        admin.access.create_user("carol", password=OTHER)
        admin.access.add_grant(Grant(subject="user:carol", verb=Verb.READ, kind=ResourceKind.TOPIC, name="logs.web"))
        with quiver.connect(address, ca_file=secured.ca_file, user="carol", password_file=file) as cluster:
            assert cluster.list_topics() == ["logs.web"]
            _write(tmp_path / "password", PASSWORD)
            admin.access.set_password("carol", PASSWORD)
            assert cluster.list_topics() == ["logs.web"]
            admin.access.set_password("carol", OTHER)
            with pytest.raises(NotAllowedError) as refused:
                cluster.list_topics()
        assert refused.value.code == "unauthenticated"


def test_commands_take_a_password_file_by_flag_context_and_environment(
    secured: SecuredCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (address,) = secured.local.addresses
    file = _write(tmp_path / "password", OTHER)
    assert main(["user", "create", "dora", "--role", "admin", "--new-password-file", file, *secured.flags()]) == 0
    flags = ["--username", "dora", "--password-file", file]
    assert main(["topic", "list", "--url", address, "--ca-file", secured.ca_file, *flags]) == 0
    assert main(["context", "add", "dora", address, "--ca-file", secured.ca_file, *flags]) == 0
    assert main(["topic", "list"]) == 0
    assert main(["user", "password", "dora", "--new-password-file", _write(tmp_path / "2"), *secured.flags()]) == 0
    monkeypatch.setenv("QUIVER_USER", "dora")
    monkeypatch.setenv("QUIVER_PASSWORD_FILE", str(tmp_path / "2"))
    assert main(["topic", "list", "--url", address, "--ca-file", secured.ca_file]) == 0
    shown = capsys.readouterr().out
    assert shown.count("logs.web") >= 3
    assert OTHER not in shown
    assert main(["topic", "list", "--context", "dora"]) == 2  # the old password
    assert (
        main(["user", "create", "eve", "--new-password-file", _write(tmp_path / "3", "short"), *secured.flags()]) == 2
    )
    assert "8 to 1000 characters" in capsys.readouterr().err


def test_http_takes_tokens_and_says_so(
    secured: SecuredCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="wire address") as refused:
        quiver.connect(secured.url, ca_file=secured.ca_file, user="alice", password=PASSWORD)
    assert refused.value.code == "bad_address"
    monkeypatch.setenv("QUIVER_USER", "alice")
    monkeypatch.setenv("QUIVER_PASSWORD_FILE", _write(tmp_path / "password"))
    with pytest.raises((ValueError, RequestError), match="tokens"):
        classic.Producer(secured.url, ca_file=secured.ca_file)
    with pytest.raises(ValueError, match="tokens"):
        classic.Producer("127.0.0.1:1")
    source = PasswordSource("alice", password=Secret(PASSWORD))
    assert isinstance(
        asyncio.run(error_of(http_get("127.0.0.1", 1, "/metadata", credentials=source))), UnavailableError
    )


# -- a node that is none ---------------------------------------------------------------------------


class Impostor:
    """A handler that speaks SCRAM with the verifier, iterations and last message that the test gives."""

    def __init__(self, *, iterations: int = ITERATIONS_MIN, last: str | None = None) -> None:
        self._iterations = iterations
        self._last = last
        self._verifier = make_verifier(PASSWORD, salt=b"s" * 16, iterations=ITERATIONS_MIN)
        self._exchange: ScramServer | None = None
        self.seen: list[str] = []
        self.messages: list[str] = []

    async def __call__(
        self, caller: Caller, request: AnyRequest, payload: memoryview
    ) -> tuple[Response, Sequence[Buffer]]:
        self.seen.append(type(request).__name__)
        if isinstance(request, BeginScram):
            self.messages.append(request.message)
            self._exchange = ScramServer(request.message, nonce="server-nonce")
            challenge = self._exchange.challenge(self._verifier)
            return ScramChallenge(message=challenge.replace(f"i={ITERATIONS_MIN}", f"i={self._iterations}")), ()
        if isinstance(request, FinishScram):
            self.messages.append(request.message)
            assert self._exchange is not None
            answer = self._exchange.finish(request.message)
            if answer is None:
                raise NotAllowedError("not done: wrong", code="unauthenticated")
            return Authenticated(principal="user:alice", message=answer if self._last is None else self._last), ()
        return OffsetFound(offset=Offset(5)), ()


def _ask(guard: Impostor, address: str = "") -> tuple[QuiverError | None, RequestPool]:
    async def test() -> tuple[QuiverError | None, RequestPool]:
        source = PasswordSource("alice", password=Secret(PASSWORD))
        async with serve(guard) as host, RequestPool(name="test", credentials=source) as client:
            try:
                await asyncio.gather(*(client.call(address or host.address, FIND, timeout_ms=10_000) for _ in range(3)))
            except QuiverError as error:
                return error, client
            return None, client

    return asyncio.run(test())


def test_connection_proves_the_password_once_and_never_sends_it() -> None:
    guard = Impostor()
    error, client = _ask(guard)
    assert error is None
    assert guard.seen == ["BeginScram", "FinishScram"] + ["FindOffset"] * 3
    assert guard.messages[0].startswith("n,,n=alice,r=")
    assert PASSWORD not in "".join(guard.messages) + repr(vars(client))


@pytest.mark.parametrize("last", ["", "v=", "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=", "e=other-error"])
def test_node_that_does_not_prove_the_verifier_gets_no_request(last: str) -> None:
    guard = Impostor(last=last)
    error, _ = _ask(guard)
    assert isinstance(error, NotAllowedError)
    assert error.code == "unproven_server"
    assert "FindOffset" not in guard.seen


@pytest.mark.parametrize("iterations", [1, ITERATIONS_MIN - 1, 1_000_001, 999_999_999])
def test_node_that_asks_for_too_few_or_too_many_iterations_gets_no_proof(iterations: int) -> None:
    guard = Impostor(iterations=iterations)
    error, _ = _ask(guard)
    assert isinstance(error, RequestError)
    assert f"{iterations} iterations" in str(error)
    assert guard.seen == ["BeginScram"]


def test_password_is_not_proven_in_plain_text_to_another_machine() -> None:
    guard = Impostor()
    error, _ = _ask(guard, "node-1:9002")
    assert isinstance(error, NotAllowedError)
    assert error.code == "plain_text_password"
    assert "TLS" in str(error)
    assert guard.seen == []
    with pytest.raises(NotAllowedError, match="a password is never sent in plain text"):
        quiver.connect("node-1:9002", user="alice", password=PASSWORD)
