"""Finds out why an address of a cluster does not work, and says so in a sentence that says what to do.

It runs only after connecting has failed. It asks the address itself what it speaks, and compares the answer with what
the client was told to speak. A client that was told to use TLS asks with TLS only. It sends no credentials, and trusts
nothing that it learns.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Literal

import msgspec

from quiver.addresses import format_address
from quiver.tasks import timeout
from quiver.wire.frames import HEADER_BYTES, FrameKind

DIAGNOSIS_MS_MAX: Final = 600
"""Longest time of a diagnosis: with it, an address that cannot work is reported within two seconds."""
_PROBE_S: Final = 0.25
_REQUEST: Final = b"GET / HTTP/1.1\r\nHost: quiver\r\nConnection: close\r\n\r\n"
"""Understood by a gateway; a wire port answers it with a refusal."""
_TLS_ALERT: Final = 0x15
_KIND_AT: Final = 8
"""Position of a frame's kind."""


class Finding(msgspec.Struct, frozen=True):
    """Why an address does not work; `is_certain` if waiting longer cannot help."""

    sentence: str
    is_certain: bool = True


class Spoken(msgspec.Struct, frozen=True):
    """What a port speaks."""

    is_tls: bool
    protocol: Literal["http", "wire", "unknown", "silent", "closed"]
    """*silent*: it sent nothing; *closed*: it closed the connection without a word."""


Diagnose = Callable[[str, int, Literal["wire", "http", "either"]], Awaitable[Finding]]
"""Finds out what is wrong with a host and port that were given as addresses of this kind."""


async def diagnose(
    host: str, port: int, kind: Literal["wire", "http", "either"], *, tls: ssl.SSLContext | None
) -> Finding:
    """Return why a client with this TLS context cannot use an address."""
    place = format_address((host, port))
    try:
        async with timeout(DIAGNOSIS_MS_MAX / 1000):
            spoken = await (_probe_plain(host, port) if tls is None else _probe_secure(host, port, tls))
    except TimeoutError:
        return Finding(f"{place} does not answer: the address is wrong, or a firewall drops the packets")
    except ssl.SSLCertVerificationError as error:
        return Finding(_distrust(place, error))
    except socket.gaierror:
        return Finding(f"the host name {host!r} is unknown: correct the address")
    except ConnectionRefusedError:
        return Finding(f"nothing listens at {place}: start the node there, or correct the address")
    except OSError as error:
        if "CERTIFICATE_REQUIRED" in str(error) or "HANDSHAKE_FAILURE" in str(error):
            return _ask_certificate(place)
        return Finding(f"{place} is not reachable: {error}")
    return _compare(place, spoken, kind, is_tls=tls is not None)


def _compare(place: str, spoken: Spoken, kind: Literal["wire", "http", "either"], *, is_tls: bool) -> Finding:
    if spoken.protocol == "silent" and not spoken.is_tls:
        return Finding(f"{place} accepts connections and does not answer", is_certain=False)
    if is_tls and not spoken.is_tls:
        advice = "write http:// or the address alone, without TLS files, if plain text is meant"
        return Finding(f"{place} does not use TLS: {advice}")
    if spoken.is_tls and not is_tls:
        advice = "write https:// and pass the file of its authority (ca_file, --ca-file, QUIVER_CA_FILE)"
        return Finding(f"{place} uses TLS: {advice}")
    if is_tls and spoken.protocol == "closed":
        return _ask_certificate(place)
    if spoken.protocol == "http" and kind == "wire":
        scheme = "https" if is_tls else "http"
        return Finding(f"{place} is an HTTP port: write {scheme}://{place}, or give the wire port (9002)")
    if spoken.protocol == "wire" and kind == "http":
        return Finding(f"{place} is a wire port: write quiver://{place}, or give the HTTP port (8002)")
    if spoken.protocol in ("unknown", "closed"):
        return Finding(f"{place} is not a Quiver node: another program listens there; correct the address")
    return Finding(f"{place} is there and did not answer in time", is_certain=False)


def _ask_certificate(place: str) -> Finding:
    advice = "pass certificate_file and key_file (--certificate-file, QUIVER_CERT_FILE, QUIVER_KEY_FILE)"
    return Finding(f"{place} asks for a client certificate of its authority: {advice}")


def _distrust(place: str, error: ssl.SSLCertVerificationError) -> str:
    if "mismatch" in error.verify_message:
        return f"the certificate of {place} does not name that host ({error.verify_message}): use a name that it has"
    advice = "pass the file of the authority that signed it (ca_file, --ca-file, QUIVER_CA_FILE)"
    return f"the certificate of {place} is not trusted ({error.verify_message}): {advice}"


def _anything() -> ssl.SSLContext:
    """Return a context that accepts every certificate: nothing secret is sent, and nothing that is read is trusted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _probe_plain(host: str, port: int) -> Spoken:
    spoken = await _probe(host, port, None)
    if spoken.protocol not in ("http", "wire"):
        with suppress(OSError):
            return await _probe(host, port, _anything())
    return spoken


async def _probe_secure(host: str, port: int, tls: ssl.SSLContext) -> Spoken:
    try:
        spoken = await _probe(host, port, _anything())
    except ConnectionRefusedError:
        raise
    except (ssl.SSLError, ConnectionError):
        return Spoken(is_tls=False, protocol="unknown")
    await _probe(host, port, tls)
    return spoken


async def _probe(host: str, port: int, tls: ssl.SSLContext | None) -> Spoken:
    reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    try:
        writer.write(_REQUEST)
        answer = b""
        try:
            async with timeout(_PROBE_S):
                answer = await reader.read(64)
        except TimeoutError:
            return Spoken(is_tls=tls is not None, protocol="silent")
        except ConnectionError:
            return Spoken(is_tls=tls is not None, protocol="closed")
    finally:
        writer.transport.abort()
    return Spoken(is_tls=tls is not None, protocol=_recognize(answer))


def _recognize(answer: bytes) -> Literal["http", "wire", "unknown", "closed"]:
    if not answer:
        return "closed"
    if answer.startswith(b"HTTP/"):
        return "http"
    if answer[:1] != bytes((_TLS_ALERT,)) and len(answer) > HEADER_BYTES and answer[_KIND_AT] == FrameKind.REFUSAL:
        return "wire"
    return "unknown"
