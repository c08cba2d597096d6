"""Measure requests: a client process and a server process on loopback, many requests in flight.

    python bench_wire.py [--seconds 3]

The handler does nothing, so that the figures are those of the wire alone: encode, checksum, send, receive, check, run
a task, answer. The CPU time of each side is independent of other programs, and bounds the calls per second on two idle
cores. The raw limit is a stream of the same bytes over a bare socket in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import socket
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

from quiver.clock import SystemClock
from quiver.model import Buffer, NodeId, Offset, PartitionId, TopicId
from quiver.wire import Caller, PeerNetwork, RequestPool, RequestServer, WireSettings, format_address
from quiver.wire.messages import AnyRequest, Fetch, Fetched, FindOffset, OffsetFound, Produce, Produced
from quiver.wire.requests import Request, Response
from table import Row, show

MIB = 1 << 20
IN_FLIGHT = 64
LARGE_IN_FLIGHT = 8
BATCH = bytes(MIB)

FIND = FindOffset(topic_id=TopicId(1), partition_id=PartitionId(0), at="latest")
PRODUCE = Produce(topic_id=TopicId(1), partition_id=PartitionId(0))
FETCH = Fetch(topic_id=TopicId(1), partition_id=PartitionId(0), offset=Offset(0))


async def handle(_: Caller, request: AnyRequest, payload: memoryview) -> tuple[Response, Sequence[Buffer]]:
    match request:
        case FindOffset():
            return OffsetFound(offset=Offset(7)), ()
        case Fetch():
            return Fetched(first_offset=Offset(0), end_offset=Offset(9)), (BATCH,)
        case _:
            return Produced(base_offset=Offset(len(payload))), ()


def run_server(pipe: Pipe) -> None:
    asyncio.run(serve(pipe))


async def serve(pipe: Pipe) -> None:
    """Answer requests until the parent process asks to stop."""
    settings = WireSettings()
    async with RequestServer(settings=settings, clock=SystemClock()) as server:
        network = PeerNetwork(
            node=NodeId(1),
            cluster_id="bench",
            incarnation=1,
            listen=("127.0.0.1", 0),
            peers={},
            settings=settings,
            clock=SystemClock(),
            rng=random.Random(1),
            server=server,
        )
        async with network:
            network.start(lambda *_: None, lambda *_: None)
            server.start(handle)
            await network.wait_accepting()
            pipe.send(format_address(network.address))
            while await asyncio.to_thread(pipe.recv) == "processor time":
                pipe.send(time.process_time())


async def measure(address: str, server: Pipe, seconds: float) -> list[Row]:
    limit = raw_stream()
    async with RequestPool(name="bench") as pool:
        await call_for(pool, address, FIND, (), IN_FLIGHT, 0.3)
        before_client_s, before_server_s = time.process_time(), ask_processor_time(server)
        small = await call_for(pool, address, FIND, (), IN_FLIGHT, seconds)
        calls = small * seconds
        client_us = (time.process_time() - before_client_s) / calls * 1e6
        server_us = (ask_processor_time(server) - before_server_s) / calls * 1e6
        single = await call_for(pool, address, FIND, (), 1, seconds / 3)
        produced = await call_for(pool, address, PRODUCE, (BATCH,), LARGE_IN_FLIGHT, seconds)
        fetched = await call_for(pool, address, FETCH, (), LARGE_IN_FLIGHT, seconds)
    return [
        Row("small request, 64 under way", small, "calls/s", None, 25_000),
        Row("its processor time in the client", client_us, "µs", None, 40),
        Row("its processor time in the server", server_us, "µs", None, 40),
        Row("small request, one at a time", 1e6 / single, "µs"),
        Row("1 MiB to the server", produced * MIB / 1e6, "MB/s", limit, 700),
        Row("1 MiB from the server", fetched * MIB / 1e6, "MB/s", limit, 700),
    ]


def ask_processor_time(server: Pipe) -> float:
    server.send("processor time")
    seconds: float = server.recv()
    return seconds


async def call_for(
    pool: RequestPool,
    address: str,
    request: Request[Any],
    payload: Sequence[Buffer],
    width: int,
    seconds: float,
) -> float:
    """Keep this many calls in flight for this long; return the calls answered per second."""
    answered = 0
    end = time.perf_counter() + seconds

    async def caller() -> None:
        nonlocal answered
        while time.perf_counter() < end:
            await pool.call(address, request, payload, timeout_ms=30_000)
            answered += 1

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(width):
            group.create_task(caller())
    return answered / (time.perf_counter() - start)


def raw_stream(total_mib: int = 1024) -> float:
    """Return the MB/s of a bare stream over loopback."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()

    def send() -> None:
        for _ in range(total_mib):
            sender.sendall(BATCH)
        sender.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    buffer = bytearray(MIB)
    start = time.perf_counter()
    thread.start()
    while receiver.recv_into(buffer):
        pass
    elapsed = time.perf_counter() - start
    thread.join()
    for each in (listener, sender, receiver):
        each.close()
    return total_mib * MIB / elapsed / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3)
    seconds = parser.parse_args().seconds
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=run_server, args=(theirs,))
    server.start()
    try:
        rows = asyncio.run(measure(ours.recv(), ours, seconds))
    finally:
        ours.send("stop")
        server.join()
    return show(rows, title="requests over loopback, one client and one server process")


if __name__ == "__main__":
    sys.exit(main())
