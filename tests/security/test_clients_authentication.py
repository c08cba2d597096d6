"""How clients authenticate: before the first request, with the current token, never in plain text."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import trustme
from wire_hosts import error_of, run, serve, wait_until

from quiver.client.discovery import http_get
from quiver.config import TlsSettings
from quiver.errors import NotAllowedError, UnavailableError
from quiver.model import Buffer, Offset, PartitionId, TopicId
from quiver.security.secrets import Secret, TokenSource
from quiver.wire import Caller, RequestPool, WireSettings
from quiver.wire.messages import AnyRequest, Fetch, Fetched, FindOffset, OffsetFound
from quiver.wire.requests import Response
from quiver.wire.security_messages import Authenticate, Authenticated

TOKEN = "qv_0011223344556677_" + "ab" * 32
OTHER = "qv_8899aabbccddeeff_" + "cd" * 32
FIND = FindOffset(topic_id=TopicId(1), partition_id=PartitionId(0), at=5)


class Guard:
    """A handler that answers only connections which have authenticated with an accepted token."""

    def __init__(self, *accepted: str) -> None:
        self.accepted = set(accepted)
        self.seen: list[tuple[str, str]] = []
        """The requests as they came: the connection, and the request's name."""
        self._tokens: dict[str, str] = {}

    async def __call__(
        self, caller: Caller, request: AnyRequest, payload: memoryview
    ) -> tuple[Response, Sequence[Buffer]]:
        self.seen.append((caller.address, type(request).__name__))
        if isinstance(request, Authenticate):
            if request.token not in self.accepted:
                raise NotAllowedError("not done: the token is not accepted", code="unauthenticated")
            self._tokens[caller.address] = request.token
            return Authenticated(principal="user:alice"), ()
        if self._tokens.get(caller.address) not in self.accepted:
            raise NotAllowedError("not done: not authenticated", code="unauthenticated")
        return OffsetFound(offset=Offset(5)), ()

    @property
    def requests(self) -> list[str]:
        return [name for _, name in self.seen]


def pool(source: TokenSource | None, *, tls: TlsSettings | None = None) -> RequestPool:
    return RequestPool(name="test client", credentials=source, tls=tls)


def token_file(tmp_path: Path, token: str = TOKEN) -> Path:
    path = tmp_path / "token"
    replacement = tmp_path / "token.new"
    replacement.write_text(token)
    replacement.chmod(0o600)
    os.replace(replacement, path)
    return path


async def ask(pool: RequestPool, address: str) -> OffsetFound:
    return (await pool.call(address, FIND, timeout_ms=10_000))[0]


def test_connection_is_authenticated_once_before_its_first_request() -> None:
    async def test() -> None:
        guard = Guard(TOKEN)
        async with serve(guard) as host, pool(TokenSource(token=Secret(TOKEN))) as client:
            await asyncio.gather(*(ask(client, host.address) for _ in range(5)))
            assert guard.requests == ["Authenticate"] + ["FindOffset"] * 5
            assert len({address for address, _ in guard.seen}) == 1
            assert TOKEN not in repr(vars(client))

    run(test())


def test_new_connection_after_a_lost_one_is_authenticated_again() -> None:
    async def test() -> None:
        guard = Guard(TOKEN)
        async with pool(TokenSource(token=Secret(TOKEN))) as client, serve(guard) as host:
            await ask(client, host.address)
            (lost,) = client._connections
            lost.abort("cut by the test")
            await wait_until(lambda: not client.status().connections)
            await ask(client, host.address)
        assert guard.requests == ["Authenticate", "FindOffset"] * 2
        assert len({address for address, _ in guard.seen}) == 2

    run(test())


@pytest.mark.parametrize("token", [OTHER, TOKEN[:-1]])
def test_refused_token_is_an_error_at_once_for_every_waiter(token: str) -> None:
    async def test() -> None:
        guard = Guard(TOKEN)
        async with serve(guard) as host, pool(TokenSource(token=Secret(token))) as client:
            errors = await asyncio.gather(*(error_of(ask(client, host.address)) for _ in range(3)))
            assert guard.requests == ["Authenticate"]  # one attempt, and no request
            assert len(set(map(id, errors))) == 3
            for error in errors:
                assert isinstance(error, NotAllowedError)
                assert error.code == "unauthenticated"
                assert token not in str(error)
            assert not client.status().connections

    run(test())


def test_client_without_a_token_sends_none() -> None:
    async def test() -> None:
        guard = Guard(TOKEN)
        async with serve(guard) as host, pool(None) as client:
            assert isinstance(await error_of(ask(client, host.address)), NotAllowedError)
            assert guard.requests == ["FindOffset"]

    run(test())


def test_rotated_token_is_read_from_the_file_when_the_old_one_is_revoked(tmp_path: Path) -> None:
    async def test() -> None:
        guard = Guard(TOKEN)
        path = token_file(tmp_path)
        async with serve(guard) as host, pool(TokenSource(file=str(path))) as client:
            await ask(client, host.address)
            token_file(tmp_path, OTHER)
            guard.accepted = {TOKEN, OTHER}
            await ask(client, host.address)  # the open connection goes on
            assert guard.requests == ["Authenticate", "FindOffset", "FindOffset"]
            guard.accepted = {OTHER}
            answers = await asyncio.gather(*(ask(client, host.address) for _ in range(4)))
            assert [one.offset for one in answers] == [5] * 4
            assert guard.requests.count("Authenticate") == 2
            await wait_until(lambda: client.status().connections == len(client._connections) == 1)

    run(test())


def test_rotated_token_replaces_all_connections_to_a_node(tmp_path: Path) -> None:
    async def test() -> None:
        guard, ended = Guard(TOKEN, OTHER), [asyncio.Event(), asyncio.Event()]

        async def handle(caller: Caller, request: AnyRequest, payload: memoryview) -> tuple[Response, Sequence[Buffer]]:
            if isinstance(request, Fetch):
                polled.add(request.offset)
                await ended[request.offset].wait()
                await guard(caller, request, payload)
                return Fetched(first_offset=Offset(0), end_offset=Offset(0)), ()
            return await guard(caller, request, payload)

        polled: set[int] = set()
        source = TokenSource(file=str(token_file(tmp_path)))
        settings = WireSettings(connection_requests_max=2)  # one long poll on each connection
        several = RequestPool(name="test client", settings=settings, credentials=source)
        async with serve(handle) as host, several as client:
            polls = []
            for offset in (0, 1):
                request = Fetch(topic_id=TopicId(1), partition_id=PartitionId(0), offset=Offset(offset), wait_ms=9_000)
                polls.append(asyncio.ensure_future(client.call(host.address, request, timeout_ms=20_000)))
                await wait_until(lambda: len(polled) == len(polls))
            assert client.status().connections == 2
            ended[0].set()
            await polls[0]
            token_file(tmp_path, OTHER)
            guard.accepted = {OTHER}
            ended[1].set()
            # The first connection has room again, and the token that was revoked: it must not be used, either.
            await polls[1]
            assert client.status().connections == 1

    run(test())


def test_revoked_token_without_a_successor_is_refused_and_not_retried_for_ever(tmp_path: Path) -> None:
    async def test() -> None:
        guard = Guard(TOKEN)
        path = token_file(tmp_path)
        async with serve(guard) as host, pool(TokenSource(file=str(path))) as client:
            await ask(client, host.address)
            guard.accepted.clear()
            error = await error_of(ask(client, host.address))
            assert isinstance(error, NotAllowedError)
            assert guard.requests == ["Authenticate", "FindOffset", "FindOffset", "Authenticate"]

    run(test())


def test_file_that_became_readable_by_others_is_not_sent(tmp_path: Path) -> None:
    async def test() -> None:
        guard = Guard(TOKEN)
        path = token_file(tmp_path)
        path.chmod(0o644)
        async with serve(guard) as host, pool(TokenSource(file=str(path))) as client:
            error = await error_of(ask(client, host.address))
            assert isinstance(error, UnavailableError)
            assert "chmod 600" in str(error)
            assert guard.requests == []

    run(test())


def _listening_socket() -> tuple[socket.socket, int]:
    listener = socket.create_server(("0.0.0.0", 0))
    listener.setblocking(False)
    return listener, listener.getsockname()[1]


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost.localdomain", "node-1"])
def test_token_is_not_sent_in_plain_text_to_another_machine(host: str) -> None:
    """Such names may lead to this machine: they are refused by their text, before a socket is opened."""

    async def test() -> None:
        listener, port = _listening_socket()
        with listener:
            source = TokenSource(token=Secret(TOKEN))
            async with pool(source) as client:
                by_wire = await error_of(ask(client, f"{host}:{port}"))
            by_http = await error_of(http_get(host, port, "/metadata", credentials=source))
            with pytest.raises(BlockingIOError):
                listener.accept()
        for error in (by_wire, by_http):
            assert isinstance(error, NotAllowedError)
            assert error.code == "plain_text_token"
            assert "https://" in str(error)

    run(test())


def test_token_reaches_a_node_whose_certificate_is_trusted_and_no_other(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    files = {}
    for name, ca in (("own", authority), ("other", stranger)):
        files[name] = str(tmp_path / f"{name}.pem")
        ca.cert_pem.write_to_path(files[name])
    certificate_file = str(tmp_path / "node.pem")
    authority.issue_cert("127.0.0.1", "node-1").private_key_and_cert_chain_pem.write_to_path(certificate_file)

    async def test() -> None:
        guard = Guard(TOKEN)
        node_tls = TlsSettings(is_enabled=True, certificate_file=certificate_file, ca_file=files["own"])
        async with serve(guard, tls=node_tls) as host:
            for name, is_trusted in (("other", False), ("own", True)):
                tls = TlsSettings(is_enabled=True, ca_file=files[name])
                async with pool(TokenSource(token=Secret(TOKEN)), tls=tls) as client:
                    if is_trusted:
                        await ask(client, host.address)
                    else:
                        assert isinstance(await error_of(ask(client, host.address)), UnavailableError)
                assert guard.requests == (["Authenticate", "FindOffset"] if is_trusted else [])

    run(test())
