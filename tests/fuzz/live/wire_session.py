"""One connection of the fuzzer, which judges every answer: who may have got it, and what must not be in it.

It speaks for one user at a time, or for nobody; while a login is not answered, perhaps for either. An answer may be a
success if anybody could have got it for whom the connection perhaps spoke between the request and the answer. An answer
that shows a name which its receiver may not see is a finding, unless the request said the name; so is an answer that
says that the node failed.
"""

from __future__ import annotations

import random
import ssl
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from made_requests import KINDS, PUBLIC, Body, Pool, encode_body, is_for
from wire_attacker import Attacker

from quiver.wire.envelope import IncomingResponse, decode_response
from quiver.wire.frames import FrameKind, encode_frame

STRANGER = ""
REUSED_NUMBERS = (1_000, 1_001, 1_002)
"""Numbers of requests that may be in use; all others are used once."""
WAIT_S = 5.0
READ_S = 0.2
ANSWERS_MAX = 200
"""Answers that are read at most while one of them is waited for."""


class FoundError(Exception):
    """The node did what it must not do."""


@dataclass(frozen=True)
class Judge:
    """What is judged, and how often; an open node has no hidden topics, and lets everybody do everything."""

    pool: Pool
    """It learns from answers."""

    is_open: bool = False
    hidden: frozenset[Any] = frozenset()
    """Names and ids of topics that no user of the fuzzer may see."""
    marker: bytes = b""
    """What is in every hidden name and record, and in nothing else."""
    sent: Counter[str] = field(default_factory=Counter)
    """Requests by type."""
    answered: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    logins: Counter[str] = field(default_factory=Counter)
    """Right logins that were answered with success, by user."""

    def report(self) -> str:
        """Return a line about what has been sent."""
        undone = sorted(name for name in KINDS if not self.done[name])
        counts = f"{self.sent.total()} requests, {self.answered.total()} answered, {self.done.total()} done"
        return f"{counts}; logins: {dict(self.logins)}; never done: {', '.join(undone) or 'none'}"


@dataclass
class _Asked:
    body: Body
    speakers: set[str]
    """For whom the connection has spoken since."""


class Session:
    """A connection, what was asked on it, and for whom it speaks."""

    def __init__(self, attacker: Attacker, judge: Judge) -> None:
        self.attacker = attacker
        self.judge = judge
        self._speakers = {STRANGER}
        """For whom it perhaps speaks."""
        self._asked: dict[int, deque[_Asked]] = {}
        self._number = 0

    def _pending(self) -> list[_Asked]:
        return [one for queue in self._asked.values() for one in queue]

    def may_speak_for(self, user: str) -> None:
        """Record that the node may take this connection for a user's from now on."""
        self._speakers.add(user)
        for one in self._pending():
            one.speakers.add(user)

    def speaks_for(self, user: str) -> None:
        """Record that a login was answered; it is the last word if no other one is under way."""
        if not any(one.body["type"] in PUBLIC for one in self._pending()):
            self._speakers = {user}
        self.judge.logins[user] += 1

    def ask(
        self,
        body: Body,
        payload: bytes = b"",
        *,
        timeout_ms: int = 5_000,
        number: int | None = None,
        check: bool = True,
    ) -> int:
        """Send a request; return its number, which is one of `REUSED_NUMBERS` if it is given."""
        self._number += 1
        number = self._number if number is None else number
        self._asked.setdefault(number, deque()).append(_Asked(body, set(self._speakers)))
        self.judge.sent[body["type"]] += 1
        head = encode_body(number, timeout_ms, body)
        self.attacker.send(b"".join(encode_frame(FrameKind.REQUEST, head, (payload,), check_payload=check)))
        return number

    def wait(self, number: int) -> IncomingResponse | None:
        """Return the answer to a request; None if the connection ends first. Others are judged meanwhile."""
        self.attacker.socket.settimeout(WAIT_S)
        for _ in range(ANSWERS_MAX):
            answer = self._next()
            if answer is None or answer.correlation_id == number:
                return answer
        return None

    def read_some(self) -> None:
        """Judge the answers that come soon."""
        self.attacker.socket.settimeout(READ_S)
        with suppress(TimeoutError):
            while self._pending() and self._next() is not None:
                pass

    def _next(self) -> IncomingResponse | None:
        frame = self.attacker.next_frame()
        if frame is None or frame.kind is not FrameKind.RESPONSE:
            return None
        answer = decode_response(frame)
        queue = self._asked.get(answer.correlation_id)
        if queue:
            self._judge(queue.popleft(), answer, bytes(frame.head) + bytes(frame.payload))
        return answer

    def _judge(self, asked: _Asked, answer: IncomingResponse, data: bytes) -> None:
        said = f"{asked.body!r:.600} by {sorted(asked.speakers)}"
        if answer.failure is not None and answer.failure.code == "internal_error":
            raise FoundError(f"the node failed: {said}: {answer.failure.message}")
        self.judge.answered[asked.body["type"]] += 1
        self.judge.done[asked.body["type"]] += answer.failure is None
        if answer.failure is None:
            self.judge.pool.learn(msgspec.msgpack.decode(answer.body))
        if self.judge.is_open:
            return
        if answer.failure is None and not any(is_for(asked.body, who, self.judge.hidden) for who in asked.speakers):
            raise FoundError(f"not allowed, but done: {said}: {bytes(answer.body)!r:.200}")
        if self.judge.marker in data and self.judge.marker not in msgspec.msgpack.encode(asked.body):
            raise FoundError(f"an answer shows what is hidden: {said}: {data!r:.400}")


@contextmanager
def opened(wire: str, judge: Judge, rng: random.Random, *, tls: ssl.SSLContext | None) -> Iterator[Session]:
    """Open a connection that reads fast or slowly, from a loopback address of its own where there are more than one."""
    source = f"127.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(1, 255)}" if sys.platform == "linux" else ""
    with Attacker(wire, receive_buffer_bytes=rng.choice((None, 4096)), tls=tls, source=source) as attacker:
        attacker.socket.settimeout(WAIT_S)
        yield Session(attacker, judge)


Step = Callable[[Session, random.Random], None]
