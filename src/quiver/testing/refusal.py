"""The part of asyncio's loop that reaches the host, refused.

Sockets, pipes, subprocesses, threads and signals would bring the host's timing into a run, which
then could not be repeated. Each raises `HostAccessError` at the call, naming what to use instead.
"""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn


class HostAccessError(RuntimeError):
    """Report that simulated code reached for the host; the message names the call."""


def _refuse(name: str, instead: str) -> Any:
    def refused(_loop: asyncio.AbstractEventLoop, *_arguments: object, **_options: object) -> NoReturn:
        raise HostAccessError(f"a simulated loop has no {name}: {instead}")

    return refused


_NETWORK = "send through the Network seam"
_THREADS = "run blocking work through the Executor seam"
_PROCESSES = "there are no processes in a simulation"
_SIGNALS = "there are no signals in a simulation"


class HostlessLoop(asyncio.AbstractEventLoop):
    """An event loop without a host: every call that would reach it is refused."""

    run_in_executor = _refuse("run_in_executor", _THREADS)
    set_default_executor = _refuse("set_default_executor", _THREADS)

    getaddrinfo = _refuse("getaddrinfo", _NETWORK)
    getnameinfo = _refuse("getnameinfo", _NETWORK)
    create_connection = _refuse("create_connection", _NETWORK)
    create_server = _refuse("create_server", _NETWORK)
    create_unix_connection = _refuse("create_unix_connection", _NETWORK)
    create_unix_server = _refuse("create_unix_server", _NETWORK)
    create_datagram_endpoint = _refuse("create_datagram_endpoint", _NETWORK)
    connect_accepted_socket = _refuse("connect_accepted_socket", _NETWORK)
    start_tls = _refuse("start_tls", _NETWORK)
    sendfile = _refuse("sendfile", _NETWORK)
    add_reader = _refuse("add_reader", _NETWORK)
    remove_reader = _refuse("remove_reader", _NETWORK)
    add_writer = _refuse("add_writer", _NETWORK)
    remove_writer = _refuse("remove_writer", _NETWORK)
    sock_recv = _refuse("sock_recv", _NETWORK)
    sock_recv_into = _refuse("sock_recv_into", _NETWORK)
    sock_recvfrom = _refuse("sock_recvfrom", _NETWORK)
    sock_recvfrom_into = _refuse("sock_recvfrom_into", _NETWORK)
    sock_sendall = _refuse("sock_sendall", _NETWORK)
    sock_sendto = _refuse("sock_sendto", _NETWORK)
    sock_connect = _refuse("sock_connect", _NETWORK)
    sock_accept = _refuse("sock_accept", _NETWORK)
    sock_sendfile = _refuse("sock_sendfile", _NETWORK)

    connect_read_pipe = _refuse("connect_read_pipe", _PROCESSES)
    connect_write_pipe = _refuse("connect_write_pipe", _PROCESSES)
    subprocess_shell = _refuse("subprocess_shell", _PROCESSES)
    subprocess_exec = _refuse("subprocess_exec", _PROCESSES)

    add_signal_handler = _refuse("add_signal_handler", _SIGNALS)
    remove_signal_handler = _refuse("remove_signal_handler", _SIGNALS)
