"""Deadlines of many, in order, on simulated time."""

from __future__ import annotations

from quiver.gateway.http.server import Deadlines
from quiver.testing.clock import SimulatedClock


class Time:
    def __init__(self) -> None:
        self.now_ns = 0

    def pass_ms(self, ms: int) -> None:
        self.now_ns += ms * 1_000_000


def test_what_has_been_in_a_state_for_too_long_is_taken_once_oldest_first() -> None:
    time = Time()
    deadlines: Deadlines[str] = Deadlines(SimulatedClock(time), timeout_ms=100)
    for item in ("a", "b", "c"):
        deadlines.begin(item)
        time.pass_ms(10)
    assert deadlines.oldest() == "a"
    time.pass_ms(79)
    assert deadlines.pop_expired() == ["a"]
    assert deadlines.pop_expired() == []
    time.pass_ms(20)
    assert deadlines.pop_expired() == ["b", "c"]
    assert len(deadlines) == 0


def test_what_begins_anew_gets_all_its_time_again() -> None:
    time = Time()
    deadlines: Deadlines[str] = Deadlines(SimulatedClock(time), timeout_ms=100)
    deadlines.begin("a")
    deadlines.begin("b")
    time.pass_ms(60)
    deadlines.begin("a")
    assert list(deadlines) == ["b", "a"]
    time.pass_ms(50)
    assert deadlines.pop_expired() == ["b"]


def test_what_has_left_is_forgotten() -> None:
    time = Time()
    deadlines: Deadlines[str] = Deadlines(SimulatedClock(time), timeout_ms=100)
    deadlines.begin("a")
    deadlines.end("a")
    deadlines.end("never")
    time.pass_ms(1000)
    assert deadlines.pop_expired() == []
    assert deadlines.oldest() is None
