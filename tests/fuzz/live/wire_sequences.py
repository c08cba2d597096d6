"""Throw made-up sequences of frames at live nodes, before and after the hello and the login, and hold them to going on.

    python tests/fuzz/live/wire_sequences.py [--cases 500] [--seed N]

A case is one connection: a hello (of a client, of a node with or without the nodes' secret, mutated, or none), then
steps in any order: requests of every type with ordinary and extreme values, Raft messages, cancels, responses, mutated
and truncated frames, silence. Half of the cases are for an open node, where everybody is an administrator; the other
half for a secure one, where connections also authenticate as ordinary users: rightly, wrongly, half, or again as
another user. What may take the open node out of service comes last; only its health is judged then.

A finding is a node that has ended or is not healthy, a handler that failed with a defect, memory beyond the bound, an
answer that its receiver must not get (`wire_session`), a change of what no ordinary user may change, or a node that
does not serve an honest client afterwards.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "security"))

from live_node import HIDDEN, MARKER, LiveNode, describe, find_topics, populate, running_node, serve_honestly
from made_requests import KINDS, ROUGH, UNKNOWN, basic_pool, encode_body, make_body, make_payload, mutate
from wire_logins import login_steps
from wire_session import REUSED_NUMBERS, FoundError, Judge, Session, Step, opened

import quiver
from quiver.errors import DecodeError
from quiver.model import GroupId, Index, NodeId, Term
from quiver.raft import AppendResponse, Heartbeat, TimeoutNow, VoteRequest, VoteResponse
from quiver.replication.codec import GroupMessage, encode_envelope
from quiver.wire.envelope import ErrorInfo, encode_cancel, encode_failure
from quiver.wire.frames import FrameKind, encode_frame
from quiver.wire.handshake import encode_hello, make_hello, make_requester_hello

RSS_BYTES_MAX = 512 * 1024 * 1024
STEPS_MAX = 40
READ_SHARE = 0.3
"""How often answers are read after a request; the others are sent without waiting."""
CHECK_CASES = 20
"""Cases after which the node is looked at."""
ROUGH_SHARE = 0.2
"""Of the cases of an open node, how many come last and may take it out of service."""
REQUESTS_MIN = 1_000
"""With so many requests every type is among them."""
ALL_KINDS = (*KINDS, UNKNOWN)
NUMBERS = (0, 1, 2, 3, 7, 255, 1 << 31, 1 << 32, (1 << 53) - 1, 1 << 53, 1 << 62, (1 << 64) - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500, help="how many connections (default: 500)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    try:
        with tempfile.TemporaryDirectory(prefix="quiver-fuzz-") as directory:
            fuzz_open(Path(directory) / "open", options.cases // 2, rng)
            fuzz_secure(Path(directory) / "secure", options.cases - options.cases // 2, rng)
    except (AssertionError, FoundError) as finding:
        sys.stdout.write(f"finding, seed {options.seed}: {finding}\n")
        return 1
    return 0


@dataclass(frozen=True)
class Stage:
    """What the cases of a part of the run are made of; every other one has no hostile steps."""

    cases: int
    hellos: Sequence[Step]
    requests: Sequence[Step]
    hostile: Sequence[Step]


def fuzz_open(directory: Path, cases: int, rng: random.Random) -> None:
    """Throw sequences at an open node: first what leaves it serving, then everything."""
    rough = int(cases * ROUGH_SHARE)
    calm_steps = request_steps([*(name for name in KINDS if name not in ROUGH), UNKNOWN])
    with running_node(directory, is_secure=False) as node:
        serve_honestly(node, "before")
        judge = Judge(basic_pool(find_topics(node)), is_open=True)
        throw(node, Stage(cases - rough, HELLOS, *calm_steps), judge=judge, rng=rng)
        serve_honestly(node, "after")
        node.check_health()
        throw(node, Stage(rough, HELLOS, *request_steps(ALL_KINDS)), judge=judge, rng=rng)
        node.check_health()
        finish(node, judge, "open")


def fuzz_secure(directory: Path, cases: int, rng: random.Random) -> None:
    """Throw sequences at a secure node, first by strangers, then by users with few grants."""
    strangers = cases // 4
    requests, hostile = request_steps(ALL_KINDS)
    with running_node(directory, is_secure=True) as node:
        right, wrong = login_steps(populate(node))
        mixed = (*requests, *right, *wrong)
        before, topics = describe(node), find_topics(node)
        judge = Judge(basic_pool(topics), hidden=frozenset((HIDDEN, topics[HIDDEN])), marker=MARKER.encode())
        throw(node, Stage(strangers, HELLOS, mixed, hostile), judge=judge, rng=rng)
        greetings = [then(say_client, login) for login in right]
        throw(node, Stage(cases - strangers, greetings, mixed, hostile), judge=judge, rng=rng)
        node.check_health()
        after = describe(node)
        changed = {key: (value, after[key]) for key, value in before.items() if value != after[key]}
        assert not changed, f"an ordinary user has changed: {changed}"
        serve_honestly(node, "after")
        finish(node, judge, "secure")


def throw(node: LiveNode, stage: Stage, *, judge: Judge, rng: random.Random) -> None:
    """Run the cases of a stage; raise what they find."""
    tls = node.tls
    for number in range(stage.cases):
        case = random.Random(rng.getrandbits(64))
        steps = stage.requests if number % 2 else (*stage.requests, *stage.hostile)
        with (
            suppress(OSError, AssertionError, DecodeError, quiver.QuiverError),  # the connection has ended
            opened(node.wire, judge, case, tls=tls) as session,
        ):
            case.choice(stage.hellos)(session, case)
            for _ in range(case.randrange(STEPS_MAX)):
                case.choice(steps)(session, case)
            if case.random() < 0.7:
                session.read_some()
        if number % CHECK_CASES == 0:
            node.check()
    node.check()


def finish(node: LiveNode, judge: Judge, what: str) -> None:
    """Hold the node to its bound of memory, and the fuzzer to having sent every type of request."""
    sys.stdout.write(f"{what} node: peak memory {node.peak_bytes >> 20} MiB, {judge.report()}\n")
    assert node.peak_bytes <= RSS_BYTES_MAX, f"{node.peak_bytes >> 20} MiB of memory"
    unsent = [name for name in KINDS if not judge.sent[name]]
    assert not unsent or judge.sent.total() < REQUESTS_MIN, f"never sent: {unsent}"


# -- hellos ------------------------------------------------------------------------------------------


def say_client(session: Session, rng: random.Random) -> None:
    session.attacker.say_hello()


def say_node(session: Session, rng: random.Random) -> None:
    session.attacker.pretend(rng.choice((2, 4242)), cluster_id="quiver")


def say_unproven(session: Session, rng: random.Random) -> None:
    session.attacker.send(encode_hello(make_hello(cluster_id="quiver", node=NodeId(3), incarnation=1)))


def say_mutated(session: Session, rng: random.Random) -> None:
    session.attacker.send(mutate(encode_hello(make_requester_hello(name="x")), rng))


def say_nothing(session: Session, rng: random.Random) -> None:
    pass


def then(first: Step, second: Step) -> Step:
    def both(session: Session, rng: random.Random) -> None:
        first(session, rng)
        second(session, rng)

    return both


# -- steps -------------------------------------------------------------------------------------------


def request_steps(kinds: Sequence[str]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the steps that need no credentials: requests of these types, and what mostly ends the connection."""

    def send_request(session: Session, rng: random.Random) -> None:
        name, pool = rng.choice(kinds), session.judge.pool
        number = rng.choice(REUSED_NUMBERS) if rng.random() < 0.03 else None
        check, timeout_ms = rng.random() < 0.97, rng.choice((0, 100, *(5_000,) * 8))
        body, payload = make_body(name, pool, rng), make_payload(name, pool, rng)
        session.ask(body, payload, timeout_ms=timeout_ms, number=number, check=check)
        if rng.random() < READ_SHARE:
            session.read_some()

    def send_mutated(session: Session, rng: random.Random) -> None:
        head = encode_body(0, 100, make_body(rng.choice(kinds), session.judge.pool, rng))
        session.attacker.send(mutate(b"".join(encode_frame(FrameKind.REQUEST, head, ())), rng))

    return (send_request,) * 60, (send_cancel, send_mutated, send_raft, send_response, send_junk, send_length)


def send_raft(session: Session, rng: random.Random) -> None:
    def number() -> int:
        return rng.choice(NUMBERS)

    message = rng.choice(
        (
            Heartbeat(Term(number()), Index(number()), number()),
            VoteRequest(Term(number()), Index(number()), Term(number()), rng.random() < 0.5, rng.random() < 0.5),
            VoteResponse(Term(number()), True, rng.random() < 0.5),
            AppendResponse(Term(number()), True, Index(number()), Index(number()), Index(number()), number()),
            TimeoutNow(Term(number())),
        )
    )
    parts = encode_envelope(number(), [GroupMessage(GroupId(rng.choice((0, 1, 2, 99))), plain=message)], ())
    session.attacker.send(b"".join(encode_frame(FrameKind.MESSAGE, bytes(parts[0]), parts[1:])))


def send_cancel(session: Session, rng: random.Random) -> None:
    session.attacker.send(b"".join(encode_cancel(rng.choice((0, 1, 2, 3, *REUSED_NUMBERS)))))


def send_response(session: Session, rng: random.Random) -> None:
    session.attacker.send(b"".join(encode_failure(1, ErrorInfo(kind="request", code="x"))))


def send_junk(session: Session, rng: random.Random) -> None:
    session.attacker.send(rng.randbytes(rng.randrange(1, 200)))


def send_length(session: Session, rng: random.Random) -> None:
    length = struct.pack("<I", rng.choice((0, 7, 4096, 70 << 20, 0xFFFFFFFF)))
    session.attacker.send(length + rng.randbytes(rng.randrange(64)))


HELLOS: tuple[Step, ...] = (*(say_client,) * 8, say_node, say_unproven, say_mutated, say_nothing)


if __name__ == "__main__":
    sys.exit(main())
