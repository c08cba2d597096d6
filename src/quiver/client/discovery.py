"""Discovery: resolves the addresses that a user gives to wire addresses of the cluster's nodes.

Accepted are `host:port` of either kind (the wire protocol is tried first, then HTTP), a bare `host`, `http://host:port`
or `https://host:port`, and `quiver://host:port` (wire protocol). TLS is on or off for all of them, as `quiver.contexts`
decides. A gateway returns the addresses of its cluster's nodes: `GET /metadata`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from quiver.addresses import format_address, parse_address
from quiver.client.diagnosis import Diagnose
from quiver.contexts import split_addresses
from quiver.errors import NotAllowedError, OverloadedError, QuiverError, RequestError, UnavailableError
from quiver.routing.transport import Transport
from quiver.security.secrets import CredentialSource, PasswordSource, TokenSource
from quiver.tasks import TaskSet, timeout
from quiver.wire.messages import GetMetadata

WIRE_PORT: Final = 9002
HTTP_PORT: Final = 8002
WIRE_MS_MAX: Final = 2_000
"""Timeout of the wire protocol for an address of unknown kind: an HTTP port may not refuse immediately."""
ANSWER_BYTES_MAX: Final = 8 << 20
"""Maximum size of a gateway's answer."""

_DENIALS: Final = ("401", "403")
"""Statuses of a request that the client may not make."""

HttpGet = Callable[[str, int, str], Awaitable[bytes]]
"""Returns the body of a GET to a host, port and path; raises `UnavailableError`."""


class Seed(msgspec.Struct, frozen=True):
    """One address given by the user: the host and ports to try, the wire protocol first."""

    kind: Literal["wire", "http", "either"]
    host: str
    wire_port: int = WIRE_PORT
    http_port: int = HTTP_PORT


def parse_seeds(addresses: Iterable[str]) -> tuple[Seed, ...]:
    """Parse addresses; one text may hold several, separated by commas."""
    seeds = tuple(map(_parse_seed, split_addresses(addresses)))
    if not seeds:
        raise RequestError("not done: no address given: pass at least one host:port of a node", code="bad_address")
    return seeds


def _parse_seed(text: str) -> Seed:
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _parse_bare(text)
    scheme = scheme.lower()
    if scheme not in ("http", "https", "quiver"):
        advice = "use host:port, http://…, https://… or quiver://…"
        raise RequestError(f"not done: bad address {text[:300]!r}: {advice}", code="bad_address")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise RequestError(f"not done: bad address {text[:300]!r}: {error}", code="bad_address") from None
    if parts.username is not None or parts.password is not None:  # it must not be ignored, and not be shown
        raise RequestError(
            "not done: bad address: it holds a user name or password, which is not supported", code="bad_address"
        )
    if not host or port == 0 or rest.rstrip("/") != parts.netloc:
        raise RequestError(f"not done: bad address {text[:300]!r}: give only a host and a port", code="bad_address")
    if scheme != "quiver":
        return Seed("http", host, http_port=port or HTTP_PORT)
    return Seed("wire", host, wire_port=port or WIRE_PORT)


def _parse_bare(text: str) -> Seed:
    if ":" not in text or text.endswith("]"):
        return Seed("either", text.strip("[]"))
    host, port = parse_address(text)
    return Seed("either", host, wire_port=port, http_port=port)


def wire_addresses(seeds: Iterable[Seed], located: Iterable[str]) -> list[str]:
    """Return the wire addresses that `locate` found, then the other given ones that speak the wire protocol.

    Given addresses of unknown kind count as such if one was located by the wire protocol: if a gateway had to be asked,
    they are probably of gateways.
    """
    found = list(located)
    given = {format_address((seed.host, seed.wire_port)): seed.kind for seed in seeds if seed.kind != "http"}
    kinds = ("wire", "either") if any(address in given for address in found) else ("wire",)
    return list(dict.fromkeys((*found, *(address for address, kind in given.items() if kind in kinds))))


async def locate(seeds: Iterable[Seed], transport: Transport, http_get: HttpGet, *, timeout_ms: int) -> list[str]:
    """Return wire addresses of a cluster's nodes from the first seed that answers; all are tried concurrently.

    Raises:
        NotAllowedError: no seed accepted this client, and one said so: waiting does not help.
        OverloadedError: no seed accepted this client, and one said when it will.
        UnavailableError: no seed answered within `timeout_ms`.
    """
    answers: asyncio.Queue[list[str] | QuiverError] = asyncio.Queue()

    async def ask(seed: Seed) -> None:
        try:
            answers.put_nowait(await _locate_one(seed, transport, http_get, timeout_ms))
        except QuiverError as error:
            answers.put_nowait(error)

    tasks = TaskSet(lambda error: answers.put_nowait(UnavailableError(repr(error))))
    try:
        waiting = [tasks.start(ask(seed), f"locate-{seed.host}") for seed in seeds]
        errors: list[str] = []
        denial: NotAllowedError | OverloadedError | None = None
        async with timeout(timeout_ms / 1000):
            for _ in waiting:
                answer = await answers.get()
                if isinstance(answer, list):
                    return answer
                if isinstance(answer, NotAllowedError | OverloadedError):
                    denial = answer
                errors.append(str(answer))
    except TimeoutError:
        errors.append(f"no answer within {timeout_ms} ms")
    finally:
        await tasks.close()
    if denial is not None:
        raise denial
    raise UnavailableError(f"not connected: no node answered: {'; '.join(errors)}", code="not_reached")


async def explain_failure(
    seeds: Iterable[Seed], diagnose: Diagnose, error: UnavailableError, *, is_final: bool
) -> None:
    """Raise an error that says what is wrong with each address; if one may still answer, only if `is_final`."""
    asking = [
        diagnose(seed.host, seed.http_port if seed.kind == "http" else seed.wire_port, seed.kind) for seed in seeds
    ]
    findings = await asyncio.gather(*asking)
    if is_final or all(finding.is_certain for finding in findings):
        sentences = "; ".join(dict.fromkeys(finding.sentence for finding in findings))
        raise UnavailableError(f"not connected: {sentences}", code="not_reached") from error


async def _locate_one(seed: Seed, transport: Transport, http_get: HttpGet, timeout_ms: int) -> list[str]:
    wire_address = format_address((seed.host, seed.wire_port))
    if seed.kind == "http":
        return await _ask_gateway(seed, http_get)
    if seed.kind == "wire":
        return await _ask_wire(wire_address, transport, timeout_ms)
    try:
        return await _ask_wire(wire_address, transport, min(timeout_ms, WIRE_MS_MAX))
    except (NotAllowedError, OverloadedError):
        raise
    except QuiverError as wire_error:
        try:
            return await _ask_gateway(seed, http_get)
        except UnavailableError as http_error:
            reasons = f"as wire: {wire_error}; as HTTP: {http_error}"
            raise UnavailableError(reasons, code="not_reached") from None


async def _ask_wire(address: str, transport: Transport, timeout_ms: int) -> list[str]:
    await transport.call(address, GetMetadata(topics=(), is_stale_ok=True), timeout_ms=timeout_ms)
    return [address]


class _Node(msgspec.Struct, frozen=True):
    wire_address: str


class _Metadata(msgspec.Struct, frozen=True):
    nodes: tuple[_Node, ...]


async def _ask_gateway(seed: Seed, http_get: HttpGet) -> list[str]:
    body = await http_get(seed.host, seed.http_port, "/metadata")
    try:
        nodes = msgspec.json.decode(body, type=_Metadata).nodes
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UnavailableError(
            f"{seed.host}:{seed.http_port} is not a Quiver gateway: {error}", code="not_reached"
        ) from None
    addresses = [node.wire_address for node in nodes if node.wire_address]
    if not addresses:
        raise UnavailableError(
            f"{seed.host}:{seed.http_port} returned no nodes; the cluster may still be starting", code="not_reached"
        )
    return addresses


async def http_get(
    host: str, port: int, path: str, *, tls: ssl.SSLContext | None = None, credentials: CredentialSource | None = None
) -> bytes:
    """Return the body of a small HTTP response, over a new connection.

    Raises:
        UnavailableError: there was no valid response.
        NotAllowedError: the gateway wants another token, or it would be sent in plain text to another machine.
    """
    if isinstance(credentials, PasswordSource):
        raise UnavailableError(f"{host}:{port}: HTTP takes no password; give a wire address", code="not_reached")
    authorization = _authorize(host, credentials, is_encrypted=tls is not None)
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=ANSWER_BYTES_MAX, ssl=tls)
    except OSError as error:
        raise UnavailableError(f"{host}:{port} is not reachable: {error}", code="not_reached") from None
    try:
        name = format_address((host, port))
        head = f"GET {path} HTTP/1.1\r\nHost: {name}\r\nAccept: application/json\r\nConnection: close\r\n"
        head += f"{authorization}\r\n"
        writer.write(head.encode("ascii"))
        return await _read_answer(reader)
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError, msgspec.DecodeError) as error:
        raise UnavailableError(
            f"{host}:{port} did not return a valid HTTP response: {error}", code="not_reached"
        ) from None
    finally:
        writer.transport.abort()  # closing TLS in good order may outlast the caller's event loop


def _authorize(host: str, token_source: TokenSource | None, *, is_encrypted: bool) -> str:
    """Return the header field of a token, with its line end; empty without one."""
    if token_source is None:
        return ""
    token_source.check_channel(host, is_encrypted=is_encrypted)
    return f"Authorization: Bearer {token_source.load().reveal()}\r\n"


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, status, *_ = [*head[0].split(" "), "", ""]
    if not version.startswith("HTTP/1.") or status not in ("200", *_DENIALS):
        raise ValueError(f"unexpected status line {head[0][:100]!r}")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    length = int(fields.get("content-length", "-1"))
    if length > ANSWER_BYTES_MAX:
        raise ValueError(f"response of {length} bytes is too large, the maximum is {ANSWER_BYTES_MAX}")
    body = await (reader.readexactly(length) if length >= 0 else reader.read(ANSWER_BYTES_MAX))
    if status in _DENIALS:
        denial = msgspec.json.decode(body, type=_Denial)
        raise NotAllowedError(denial.message, code=denial.code)
    return body


class _Denial(msgspec.Struct, frozen=True):
    message: str
    code: str
