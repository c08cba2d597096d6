"""Turns in virtual time: who is started when, who waits, who is refused, and which connections are read again."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.turns import (
    PENALTY_S,
    RATE_FIRST,
    REFUSALS_SHARE,
    STALL_S,
    TURN_STARTS,
    UNDER_WAY_MIN,
    UNDER_WAY_S,
    WAIT_S_MAX,
    WAITING_MIN,
    Flow,
    Turns,
)

WORK_S = 0.000_5
DROP_S = 0.000_1


class Loop:
    """An event loop whose clock moves only when something takes time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ready: list[Callable[[], None]] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    @property
    def timers(self) -> int:
        return len(self._timers)

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._ready.append(callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        self._serial += 1
        heappush(self._timers, (self.now_s + delay, self._serial, callback))

    def turn(self) -> None:
        ready, self._ready = self._ready, []
        while self._timers and self._timers[0][0] <= self.now_s:
            ready.append(heappop(self._timers)[2])
        for callback in ready:
            callback()
        self.now_s += 0.000_01


class World:
    """Turns, and requests that take `WORK_S` of the loop, or longer, and with `lasts_s` some time after it."""

    def __init__(self, work_s: float = WORK_S, lasts_s: float = 0.0) -> None:
        self.work_s = work_s
        self.lasts_s = lasts_s
        self.loop = Loop()
        self.turns = Turns()
        self.turns.bind(self.loop)
        self.log: list[tuple[str, str]] = []

    def arrive(
        self,
        name: str,
        *,
        principal: str = "alice",
        topic: str = "a",
        timeout_s: float = 10.0,
        is_long_poll: bool = False,
    ) -> Request:
        request = Request(self, name)
        self.turns.starts += 1
        if self.turns.starts < TURN_STARTS or self.turns.may_start():
            request.begin_turn(None)
        else:
            request.is_waiting = self.turns.wait(
                request, principal=principal, topic=topic, timeout_s=timeout_s, is_long_poll=is_long_poll
            )
            if not request.is_waiting:
                self.log.append(("refused", name))
        return request

    def names(self, what: str) -> list[str]:
        return [name for how, name in self.log if how == what]

    def finish(self) -> None:
        while self.turns.waiting:
            self.loop.turn()


class Request:
    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self.name = name
        self.is_waiting = False
        self.error: Exception | None = None
        self.flow: Flow | None = None

    def begin_turn(self, flow: Flow | None) -> None:
        self.is_waiting = False
        if self.error is not None:
            raise self.error
        self.flow = flow
        loop = self._world.loop
        loop.now_s += self._world.work_s
        self._world.log.append(("started", self.name))
        if flow is None:
            return
        if self._world.lasts_s:
            loop.call_later(self._world.lasts_s, lambda: self._world.turns.end_work(flow))
        else:
            self._world.turns.end_work(flow)

    def drop_turn(self) -> None:
        self.is_waiting = False
        self._world.loop.now_s += DROP_S
        self._world.log.append(("dropped", self.name))


class Connection:
    def __init__(self) -> None:
        self.reads = 0

    def end_penalty(self) -> None:
        self.reads += 1


def test_nobody_waits_while_the_loop_keeps_up() -> None:
    world = World()
    for number in range(100):
        world.arrive(str(number))
        assert world.names("started")[-1] == str(number)
        for _ in range(2):
            world.loop.turn()


def test_burst_is_started_in_the_order_of_arrival_over_several_turns() -> None:
    world = World()
    names = [str(number) for number in range(60)]
    for name in names:
        world.arrive(name)
    assert len(world.names("started")) < 3 * TURN_STARTS, "the loop reads and answers between turns"
    world.finish()
    assert world.names("started") == names


def test_other_topic_and_other_principal_go_before_the_rest_of_a_burst() -> None:
    world = World()
    for number in range(100):
        world.arrive(f"noisy {number}")
    world.arrive("topic", topic="b")
    world.arrive("principal", principal="bob")
    world.finish()
    started = world.names("started")
    first = started.index(f"noisy {2 * TURN_STARTS}")
    assert started.index("principal") < first + 4
    assert started.index("topic") < first + 6


def test_what_waited_until_its_deadline_is_dropped_and_what_is_gone_is_not_started() -> None:
    world = World(work_s=2 * WORK_S)
    waiting = [world.arrive(str(number), timeout_s=0.03) for number in range(60)]
    gone = waiting[25]
    assert gone.is_waiting
    gone.is_waiting = False
    world.finish()
    started, dropped = world.names("started"), world.names("dropped")
    assert gone.name not in started + dropped
    assert len(started) + len(dropped) == 59
    assert dropped[-1] == "59"
    assert len(started) <= 0.03 / world.work_s + 2 * TURN_STARTS


def test_request_whose_turn_comes_after_its_deadline_is_refused_at_once() -> None:
    world = World()
    for number in range(200):
        world.arrive(str(number))
    assert not world.names("refused")
    world.arrive("hurried", timeout_s=0.01)
    assert world.names("refused") == ["hurried"]
    world.arrive("other", topic="b", timeout_s=0.01)
    assert world.names("refused") == ["hurried"], "its topic has nothing waiting"


def test_topic_may_queue_what_is_worked_off_in_time_and_always_a_few() -> None:
    world = World()
    count = 0
    while not world.names("refused"):
        world.arrive(str(count))
        count += 1
    assert world.turns.waiting == int(world.turns.rate * WAIT_S_MAX)
    for topic in range(2_000):
        for number in range(WAITING_MIN):
            world.arrive(f"{topic} {number}", topic=str(topic))
    assert len(world.names("refused")) == 1


def test_rate_is_the_one_of_the_loop() -> None:
    world = World()
    for number in range(400):
        world.arrive(str(number))
    world.finish()
    assert 0.8 / WORK_S <= world.turns.rate <= 1 / WORK_S


def test_requests_that_are_dropped_after_a_pause_say_nothing_about_the_rate() -> None:
    world = World()
    for number in range(400):
        world.arrive(str(number), timeout_s=1.0)
    before = world.turns.rate
    world.loop.now_s += 2.0
    world.finish()
    assert len(world.names("dropped")) > 300
    assert world.turns.rate >= 0.5 * before


def test_node_that_was_slow_soon_serves_as_much_as_before() -> None:
    world = World(work_s=0.05)
    for number in range(100):
        world.arrive(str(number))
    world.finish()
    assert world.turns.rate < 0.2 * RATE_FIRST
    world.work_s = 0.000_05
    for _ in range(100):
        for number in range(30):
            world.arrive(str(number))
        world.loop.turn()
    world.finish()
    world.log.clear()
    for number in range(30):
        world.arrive(str(number))
    assert not world.names("refused")


def test_refused_connection_is_read_again_after_its_penalty() -> None:
    world, connection = World(), Connection()
    world.turns.penalize(connection)
    while not connection.reads:
        world.loop.turn()
    assert world.loop.now_s >= 0.7 * PENALTY_S
    assert world.turns.penalized == 0


def test_refused_connections_are_read_at_a_part_of_the_rate_while_requests_wait() -> None:
    world = World()
    connections = [Connection() for _ in range(500)]
    for connection in connections:
        world.turns.penalize(connection)
    for number in range(600):
        world.arrive(str(number))
    world.finish()
    read = sum(connection.reads for connection in connections)
    assert 0 < read <= 600 * REFUSALS_SHARE + 1
    for _ in range(3_000):
        world.loop.turn()
    assert [connection.reads for connection in connections] == [1] * 500, "nothing waits any more"


def test_connections_that_have_ended_do_not_pile_up_or_delay_others() -> None:
    world = World()
    for number in range(400):
        world.arrive(str(number))
    for _ in range(300):
        ended = Connection()
        world.turns.penalize(ended)
        world.turns.forget_penalty(ended)
    alive = Connection()
    world.turns.penalize(alive)
    assert world.turns.penalized == 1
    while not alive.reads:
        world.loop.turn()
    assert world.turns.waiting, "requests wait, so refused connections are read at a part of their rate"
    assert world.loop.now_s < 4 * PENALTY_S
    assert world.loop.timers <= 1, "there is one timer for all"


def test_request_that_fails_does_not_stop_the_others() -> None:
    world = World()
    requests = [world.arrive(str(number)) for number in range(60)]
    broken = next(request for request in requests if request.is_waiting)
    broken.error = OSError("broken")
    with pytest.raises(OSError, match="broken"):
        world.finish()
    world.finish()
    assert len(world.names("started")) == 59
    world.arrive("later")
    assert world.names("started")[-1] == "later"


def started_of(world: World, topic: str) -> int:
    return sum(name.startswith(topic) for name in world.names("started"))


def test_topic_has_only_so_much_under_way_while_another_waits() -> None:
    world = World(work_s=0.000_1, lasts_s=1.0)
    for number in range(400):
        world.arrive(f"a {number}")
    world.arrive("b", topic="b")
    for _ in range(5):
        world.loop.turn()
    assert "b" in world.names("started")
    limit = max(UNDER_WAY_MIN, world.turns.rate * UNDER_WAY_S)
    assert started_of(world, "a") <= limit + 3 * TURN_STARTS, "some were started before any waited"
    world.arrive("b again", topic="b")
    world.loop.turn()
    assert world.names("started")[-1] == "b again", "it is started although requests of the other topic wait"


def test_topic_alone_has_no_such_limit_and_long_polls_do_not_count() -> None:
    alone, polling = World(work_s=0.000_1, lasts_s=1.0), World(work_s=0.000_1, lasts_s=1.0)
    for number in range(400):
        alone.arrive(f"a {number}")
        polling.arrive(f"a {number}", is_long_poll=True)
    polling.arrive("b", topic="b")
    for _ in range(200):
        alone.loop.turn()
        polling.loop.turn()
    assert not alone.turns.waiting
    assert not polling.turns.waiting


def test_more_is_started_while_the_loop_has_time() -> None:
    world = World(work_s=0.000_01, lasts_s=0.05)
    for number in range(400):
        world.arrive(f"a {number}")
        if number % 50 == 0:
            world.arrive(f"b {number}", topic="b")
    begun_s = world.loop.now_s
    world.finish()
    assert world.loop.now_s - begun_s < 400 * STALL_S / TURN_STARTS * 1.5, "not one batch in 50 ms"


def test_busy_loop_does_not_start_more_than_the_limit() -> None:
    world = World(work_s=0.000_01, lasts_s=0.05)
    for number in range(400):
        world.arrive(f"a {number}")
        if number % 50 == 0:
            world.arrive(f"b {number}", topic="b")
    most = 0
    while world.turns.waiting:
        world.loop.turn()
        world.loop.now_s += 0.003  # what other work takes in every round
        most = max(most, sum(flow.under_way for flow in world.turns._flows.values()))
    assert most <= 2 * max(UNDER_WAY_MIN, RATE_FIRST * UNDER_WAY_S) + 2 * TURN_STARTS


ARRIVALS = st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.floats(0.0, 0.05), st.booleans())


@given(st.lists(ARRIVALS, max_size=120), st.sampled_from([0.0, 0.001, 0.02]))
def test_every_request_is_started_dropped_refused_or_gone_exactly_once(
    arrivals: list[tuple[str, str, float, bool]], lasts_s: float
) -> None:
    world = World(lasts_s=lasts_s)
    gone = set()
    for number, (principal, topic, timeout_s, leaves) in enumerate(arrivals):
        request = world.arrive(str(number), principal=principal, topic=topic, timeout_s=timeout_s)
        if leaves and request.is_waiting:
            request.is_waiting = False
            gone.add(request.name)
        if number % 30 == 29:
            world.loop.turn()
    world.finish()
    names = [name for _, name in world.log]
    assert sorted(names) == sorted({str(number) for number in range(len(arrivals))} - gone)
