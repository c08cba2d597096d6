"""More requests than a gateway can answer, in virtual time: what it costs, who waits, who is refused, and when.

Every answer takes `ANSWER_S` of the one processor, every arrival `ARRIVAL_S`; nothing else takes time. So the figures
are the same on every machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import pytest

from quiver.clock import SystemClock
from quiver.config import GatewaySettings
from quiver.gateway.http import HttpHead, HttpRequest, HttpResponse, HttpServer
from quiver.gateway.http.connection import HttpConnection
from quiver.turns import WAIT_S_MAX

ANSWER_S = 0.000_300
ARRIVAL_S = 0.000_060
"""What reading a request costs, and so what refusing one does."""
TURN_COST_S = 0.000_005
"""What a turn of the loop costs by itself."""
CAPACITY = 1 / (ANSWER_S + ARRIVAL_S)


class VirtualLoop:
    """Run callbacks in turns like a real loop, on a clock that only moves when work is done."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ready: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Callable[..., None], *arguments: Any) -> None:
        self._ready.append((callback, arguments))

    def call_later(self, delay_s: float, callback: Callable[..., None], *arguments: Any) -> None:
        self._serial += 1
        heappush(self._timers, (self.now_s + delay_s, self._serial, callback, arguments))

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            if not self._ready and self._timers:
                self.now_s = max(self.now_s, self._timers[0][0])
            while self._timers and self._timers[0][0] <= self.now_s:
                _, _, callback, arguments = heappop(self._timers)
                self.call_soon(callback, *arguments)
            self.now_s += TURN_COST_S
            turn, self._ready = self._ready, []
            if not turn and not self._timers:
                return
            for callback, arguments in turn:
                callback(*arguments)


class CostlyApplication:
    """Answer every request at once, at the cost of processor time."""

    exempt_paths = frozenset(("/healthz",))

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def handle(self, request: HttpRequest) -> HttpResponse:
        self._loop.now_s += ANSWER_S
        return HttpResponse(status=200)

    def admit(self, head: HttpHead) -> HttpResponse | None:
        return self.refuse(503, "overloaded", "") if head.path == "/refused" else None

    def is_long_poll(self, request: HttpRequest) -> bool:
        return False

    def flow_of(self, request: HttpRequest) -> tuple[str, str]:
        return "", request.path

    def refuse(self, status: int, code: str, message: str) -> HttpResponse:
        return HttpResponse(status=status)


class VirtualClient(asyncio.Transport):
    """A client that sends a request when it is told to; while it is not read, what it sends waits.

    It waits before it retries after a refusal, unless it is rude.
    """

    def __init__(self, server: HttpServer, loop: VirtualLoop, path: str, *, is_rude: bool = False) -> None:
        super().__init__()
        self._loop = loop
        self._is_rude = is_rude
        self._request = b"GET " + path.encode() + b" HTTP/1.1\r\nHost: a\r\n\r\n"
        self._connection = HttpConnection(server)
        self._connection.connection_made(self)
        self._is_paused = False
        self._unread: list[float] = []
        self._sent_at = 0.0
        self.is_busy = False
        self.answers: list[tuple[int, float]] = []

    def send(self) -> None:
        self.is_busy = True
        self._unread.append(self._loop.now_s)
        self._read()

    def send_bytes(self, data: bytes) -> None:
        self._connection.data_received(data)

    def _read(self) -> None:
        if self._unread and not self._is_paused:
            self._sent_at = self._unread.pop()
            self._loop.now_s += ARRIVAL_S
            self._connection.data_received(self._request)

    def write(self, data: Any) -> None:
        status = int(bytes(data[9:12]))
        self.answers.append((status, self._loop.now_s - self._sent_at))
        if status == 200 or self._is_rude:
            self.is_busy = False
        else:
            after_s = bytes(data).partition(b"Retry-After: ")[2].partition(b"\r\n")[0]
            self._loop.call_later(int(after_s), self._rest)

    def _rest(self) -> None:
        self.is_busy = False

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._loop.call_soon(self._read)

    def is_closing(self) -> bool:
        return False

    def give_up(self) -> None:
        """Disconnect: what a transport reports in one turn of the loop, and in the next."""
        self._connection.eof_received()
        self._loop.call_soon(self._connection.connection_lost, None)


class World:
    """A server in virtual time and the clients that load it."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.answered: list[tuple[str, int]] = []
        application = CostlyApplication(self.loop)
        self.server = HttpServer(
            application,
            host="",
            port=0,
            settings=GatewaySettings(),
            clock=SystemClock(),
            on_answered=lambda request, response, _: self.answered.append(
                (request.path, 0 if response is None else response.status)
            ),
        )
        self.server.turns.bind(self.loop)
        self.server.loop = self.loop  # type: ignore[assignment] # all that the server uses of a loop
        self.clients: dict[str, list[VirtualClient]] = {}
        self.warm = (0.0, 0)
        """When the load was steady, and how much was done by then."""

    def load(self, path: str, *, rate: float, connections: int, is_rude: bool = False) -> None:
        """Send requests at a rate, each on a connection that is free."""
        clients = (VirtualClient(self.server, self.loop, path, is_rude=is_rude) for _ in range(connections))
        self.clients[path] = list(clients)
        self._send_due(path, rate, 0)

    def _send_due(self, path: str, rate: float, sent: int) -> None:
        """Send the requests that became due since the last turn of the loop."""
        due = int(self.loop.now_s * rate) + 1
        free = [client for client in self.clients[path] if not client.is_busy]
        for client in free[: due - sent]:
            client.send()
        self.loop.call_later(max(1e-6, due / rate - self.loop.now_s), self._send_due, path, rate, due)

    def times_s(self, path: str, status: int) -> list[float]:
        found = (answer for client in self.clients[path] for answer in client.answers)
        return sorted(seconds for code, seconds in found if code == status)


def p99(times_s: list[float]) -> float:
    return times_s[len(times_s) * 99 // 100]


CONNECTIONS = 3_000


@pytest.fixture(scope="module", params=(False, True), ids=("polite", "rude"))
def overloaded(request: pytest.FixtureRequest) -> World:
    """Five times the capacity of a node for longer than its queue is, by clients that heed Retry-After or do not."""
    world = World()
    world.load("/noisy", rate=5 * CAPACITY, connections=CONNECTIONS, is_rude=request.param)
    world.load("/quiet", rate=40, connections=16)
    world.load("/healthz", rate=10, connections=1)
    world.loop.run(0.5)  # by then all connections have sent their first request
    world.warm = (world.loop.now_s, len(world.times_s("/noisy", 200)))
    world.loop.run(1.5)
    return world


def test_gateway_does_as_much_at_five_times_its_capacity(overloaded: World) -> None:
    since_s, before = overloaded.warm
    done = (len(overloaded.times_s("/noisy", 200)) - before) / (overloaded.loop.now_s - since_s)
    assert done >= 0.9 * CAPACITY, f"{done:.0f} of {CAPACITY:.0f} a second"
    assert len(overloaded.times_s("/noisy", 503)) > 1_000


def test_connections_that_wait_for_their_answers_are_served_instead_of_refused() -> None:
    world = World()
    world.load("/noisy", rate=5 * CAPACITY, connections=400)
    world.loop.run(1.0)
    assert world.times_s("/noisy", 503) == []
    done = len(world.times_s("/noisy", 200)) / world.loop.now_s
    assert done >= 0.95 * CAPACITY, f"{done:.0f} of {CAPACITY:.0f} a second"


@pytest.mark.parametrize("overloaded", [False], indirect=True)
def test_refusals_come_at_once_for_clients_that_heed_retry_after(overloaded: World) -> None:
    assert p99(overloaded.times_s("/noisy", 503)) <= 0.050


@pytest.mark.parametrize("overloaded", [False], indirect=True)
def test_accepted_requests_wait_no_longer_than_the_bound(overloaded: World) -> None:
    assert p99(overloaded.times_s("/noisy", 200)) <= 1.5 * WAIT_S_MAX


def test_noisy_topic_delays_only_itself(overloaded: World) -> None:
    assert overloaded.times_s("/quiet", 503) == []
    assert len(overloaded.times_s("/quiet", 200)) >= 40 * 1.5 - 5
    assert p99(overloaded.times_s("/quiet", 200)) <= 0.1 * p99(overloaded.times_s("/noisy", 200))


def test_probes_do_not_wait_for_their_turn(overloaded: World) -> None:
    assert overloaded.times_s("/healthz", 503) == []
    assert len(overloaded.times_s("/healthz", 200)) >= 12


def test_nobody_waits_below_the_capacity() -> None:
    world = World()
    world.load("/noisy", rate=0.8 * CAPACITY, connections=64)
    world.loop.run(1.0)
    assert world.times_s("/noisy", 503) == []
    assert p99(world.times_s("/noisy", 200)) <= 20 * ANSWER_S


def test_nothing_is_done_for_clients_that_gave_up() -> None:
    world = World()
    clients = [VirtualClient(world.server, world.loop, "/x") for _ in range(60)]
    for client in clients:
        client.send()
    waiting = [client for client in clients if client.is_busy]
    assert len(waiting) > 10
    for client in waiting:
        client.give_up()
    world.loop.run(1.0)
    assert [status for _, status in world.answered].count(200) == len(clients) - len(waiting)
    assert world.server.status().requests == 0


def test_request_that_is_not_read_because_of_a_refusal_is_not_late() -> None:
    world = World()
    client = VirtualClient(world.server, world.loop, "/x", is_rude=True)
    refused = b"GET /refused HTTP/1.1\r\nHost: a\r\n\r\n"
    client.send_bytes(refused + b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n12345")
    assert world.server.turns.penalized == 1
    assert len(world.server.receiving) == len(world.server.progressing) == 0
    world.loop.run(0.1)
    assert world.server.turns.penalized == 0
    assert len(world.server.receiving) == len(world.server.progressing) == 1
    client.send_bytes(b"67890")
    assert [status for status, _ in client.answers] == [503, 200]


def test_refused_clients_that_have_gone_are_forgotten() -> None:
    world = World()
    for _ in range(10):
        client = VirtualClient(world.server, world.loop, "/x", is_rude=True)
        client.send_bytes(b"GET /refused HTTP/1.1\r\nHost: a\r\n\r\n")
        client.give_up()
    world.loop.run(0.001)
    assert world.server.turns.penalized == 0
