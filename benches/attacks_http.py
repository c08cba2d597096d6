"""Attacks on the memory of a node by HTTP: bodies that are aborted, cut into crumbs, deep, or never sent; long polls.

Each returns when it has sent what it sends; its connections stay open until the stack closes.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress

from quiver.addresses import parse_address

MIB = 1 << 20
SEND_S = 5.0
"""How long an attack goes on sending."""
CRUMB = b"2\r\n  \r\n"
POLLS = 8_192
PROBES = 20


def ask(address: str, method: str, path: str, body: object = None, *, timeout_s: float = 60) -> tuple[int, bytes]:
    """Return status and answer of a request."""
    with closing(http.client.HTTPConnection(address, timeout=timeout_s)) as connection:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read()


def begin(stack: ExitStack, address: str, *headers: str, path: str = "/topics", method: str = "POST") -> socket.socket:
    """Open a connection and send the head of a request."""
    connection = stack.enter_context(socket.create_connection(parse_address(address), timeout=SEND_S))
    connection.sendall("\r\n".join((f"{method} {path} HTTP/1.1", f"Host: {address}", *headers, "", "")).encode())
    return connection


def send(connections: Sequence[socket.socket], data: bytes) -> None:
    """Send data on all connections, as fast as the node reads it, for up to `SEND_S`."""
    left = {connection: memoryview(data) for connection in connections}
    end = time.monotonic() + SEND_S
    for connection in connections:
        connection.setblocking(False)
    while left and time.monotonic() < end:
        for connection in select.select((), list(left), (), 0.1)[1]:
            try:
                left[connection] = left[connection][connection.send(left[connection][:MIB]) :]
            except OSError:  # the node has closed it
                left[connection] = memoryview(b"")
            if not left[connection]:
                del left[connection]


def abort_uploads(address: str) -> None:
    """Upload 15 of 16 MiB and close, on four connections at a time, for `SEND_S`."""
    end = time.monotonic() + SEND_S
    while time.monotonic() < end:
        with ExitStack() as own:
            send([begin(own, address, f"Content-Length: {16 * MIB}") for _ in range(4)], bytes(15 * MIB))


def send_crumbs(stack: ExitStack, address: str) -> None:
    connections = [begin(stack, address, "Transfer-Encoding: chunked") for _ in range(8)]
    send(connections, CRUMB * (2 * MIB))


def announce_bodies(stack: ExitStack, address: str) -> None:
    """Announce bodies that do not come; others must be served meanwhile."""
    for _ in range(8):
        begin(stack, address, f"Content-Length: {16 * MIB}")
    status, answer = ask(address, "POST", "/topics", {"topic_name": "meanwhile"})
    assert status in {200, 201, 409}, answer


def send_deep_json(stack: ExitStack, address: str) -> None:
    connections = [begin(stack, address, f"Content-Length: {16 * MIB}") for _ in range(8)]
    send(connections, b"[" * (16 * MIB))


def poll(stack: ExitStack, address: str, path: str) -> float:
    """Open long polls, as many as the node takes; return the slowest probe meanwhile, in milliseconds."""
    for _ in range(POLLS):
        try:
            begin(stack, address, path=path, method="GET")
        except OSError:
            break
    slowest_ms = 0.0
    for _ in range(PROBES):
        before = time.monotonic()
        status, answer = ask(address, "GET", "/healthz", timeout_s=10)
        assert status == 200, answer
        slowest_ms = max(slowest_ms, (time.monotonic() - before) * 1_000)
    return slowest_ms


def read_repeatedly(address: str, method: str, path: str, body: object = None, *, times: int = 3) -> None:
    """Ask for something large again and again; a refusal, or no answer in time, will do."""
    for _ in range(times):
        with suppress(OSError, http.client.HTTPException):
            ask(address, method, path, body, timeout_s=SEND_S)
