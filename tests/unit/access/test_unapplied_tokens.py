"""A token that this node has not applied yet is accepted once it has; what strangers can cause by that is bounded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any, TypeVar

import pytest

from quiver.access import AccessControl, AuditEvent, AuditLog, Authenticator, SharedCatchUp
from quiver.access.authentication import FAILURES_MAX
from quiver.access.shared_catch_up import INTERVAL_MS, WAIT_MS_MAX, WAITERS_MAX
from quiver.clock import Clock
from quiver.errors import QuiverError, UnavailableError
from quiver.gateway.access import HttpAccess
from quiver.gateway.application import RoutedApplication
from quiver.gateway.hosts import HostNames
from quiver.gateway.http import HttpHead, HttpRequest, HttpResponse
from quiver.gateway.routes import ROUTES
from quiver.metadata.apply import apply
from quiver.metadata.commands import ChangeMemberCommand, CreateTokenCommand, CreateUserCommand, InitCluster
from quiver.metadata.state import MetadataState
from quiver.model import NodeId
from quiver.security.identity import ConnectionIdentity
from quiver.security.limits import QuotaLimits
from quiver.security.quotas import Quotas
from quiver.security.tokens import Token, hash_secret, new_token
from quiver.testing.clock import SimulatedClock
from quiver.testing.loop import SimulatedLoop
from quiver.wire.security_messages import Authenticate
from quiver.wire.serving import Caller

T = TypeVar("T")
LATENCY_MS = 5


class Audit(AuditLog):
    """Keep the events that are recorded."""

    def __init__(self, events: list[AuditEvent], clock: Clock) -> None:
        super().__init__(node=NodeId(1), clock=clock)
        self._events = events

    def record(self, event: AuditEvent) -> None:
        self._events.append(event)


class World:
    """A node in virtual time; `unapplied` are the tokens that the primary has and the node learns by catching up."""

    def __init__(self) -> None:
        self.loop = SimulatedLoop(random.Random(1), time_max_s=3600.0)
        self.clock = SimulatedClock(self.loop)
        self.state = MetadataState()
        self.unapplied: list[Token] = []
        self.catch_ups: list[int] = []
        """When each of them began."""
        self.events: list[AuditEvent] = []
        audit = Audit(self.events, self.clock)
        control = AccessControl(view=self.state.view, clock=self.clock, is_open=False, audit=audit)
        self.authenticator = Authenticator(
            view=self.state.view,
            clock=self.clock,
            audit=audit,
            is_open=False,
            catch_up=SharedCatchUp(self._catch_up, self.clock),
        )
        self.application = RoutedApplication(
            dict.fromkeys((route.name for route in ROUTES), lambda *_: HttpResponse(status=200)),
            hosts=HostNames(listen_host="127.0.0.1", names=()),
            clock=self.clock,
            quotas=Quotas(QuotaLimits(requests_per_second=2)),
            access=HttpAccess(control, self.authenticator),
            catch_up=self._catch_up,
        )
        apply(self.state, InitCluster(now_ms=1, cluster_id="c", feature_level=2))
        apply(self.state, CreateUserCommand(now_ms=1, user="root"))
        apply(self.state, ChangeMemberCommand(now_ms=1, role="admin", user="root", is_member=True))
        self.known = new_token()
        self.apply_token(self.known)

    def apply_token(self, token: Token) -> None:
        command = CreateTokenCommand(
            now_ms=1, user="root", token_id=token.id, secret_hash=hash_secret(token.secret), expires_ms=None
        )
        assert apply(self.state, command).refusal is None

    async def _catch_up(self) -> None:
        self.catch_ups.append(self.clock.monotonic_ms())
        asked, self.unapplied = self.unapplied, []
        await asyncio.sleep(LATENCY_MS / 1_000)
        for token in asked:
            self.apply_token(token)

    async def log_in(self, text: str, host: str = "10.0.0.1") -> str:
        """Return who a wire connection speaks for after it has authenticated, or the code of the refusal."""
        caller = Caller(
            name="", address=f"{host}:1", deadline_ms=60_000, identity=ConnectionIdentity(address=f"{host}:1")
        )
        answer = self.authenticator.handlers()[Authenticate](caller, Authenticate(token=text), memoryview(b""))
        try:
            await answer
        except QuiverError as error:
            return error.code
        return str(caller.identity.principal)

    async def call(self, text: str) -> int:
        """Return the status of an HTTP call with a token."""
        headers = {b"host": b"localhost", b"authorization": f"Bearer {text}".encode()}
        identity = ConnectionIdentity(address="10.0.0.1:1")
        request = HttpRequest(method="GET", path="/topics", query=b"", headers=headers, body=b"", identity=identity)
        answer = self.application.handle(request)
        return (answer if isinstance(answer, HttpResponse) else await answer).status

    def run(self, scenario: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return self.loop.run_until_complete(scenario())
        finally:
            self.loop.close()


@pytest.fixture
def world() -> World:
    return World()


def test_token_that_was_created_just_now_works_on_the_wire(world: World) -> None:
    token = new_token()
    world.unapplied.append(token)
    assert world.run(lambda: world.log_in(token.text)) == "user:root"
    assert [event.outcome for event in world.events] == ["done"]


def test_token_that_was_created_just_now_works_over_http(world: World) -> None:
    token = new_token()
    world.unapplied.append(token)
    assert world.run(lambda: world.call(token.text)) == 200
    assert [event.outcome for event in world.events] == ["done"]


def test_known_token_waits_for_nothing(world: World) -> None:
    async def scenario() -> None:
        assert await world.call(world.known.text) == 200
        assert await world.log_in(world.known.text) == "user:root"
        assert (world.catch_ups, world.clock.monotonic_ms()) == ([], start_ms)

    start_ms = world.clock.monotonic_ms()
    world.run(scenario)


def test_wrong_tokens_are_refused_after_the_same_time_whatever_is_wrong(world: World) -> None:
    """Otherwise the time would tell which ids exist."""

    async def scenario() -> None:
        took = []
        for text in (new_token().text, f"qv_{world.known.id}_{new_token().secret}"):
            await asyncio.sleep(10)
            start_ms = world.clock.monotonic_ms()
            assert (await world.log_in(text), await world.call(text)) == ("unauthenticated", 401)
            took.append(world.clock.monotonic_ms() - start_ms)
        assert took[0] == took[1] > 0
        assert len(world.catch_ups) == 4
        assert await world.log_in("qv_nonsense") == "unauthenticated", "what can be no token is refused at once"
        assert len(world.catch_ups) == 4

    world.run(scenario)
    assert [event.outcome for event in world.events] == ["unauthenticated"] * 5, "each refusal is recorded once"


def test_strangers_share_catch_ups_and_lock_no_new_token_out(world: World) -> None:
    """However many hosts send however many tokens, the primary is asked once in an interval."""

    async def scenario() -> None:
        end_ms = world.clock.monotonic_ms() + 10 * INTERVAL_MS

        async def attack(host: str) -> None:
            while world.clock.monotonic_ms() < end_ms:
                await world.log_in(new_token().text, host)
                await asyncio.sleep(0.001)

        async with asyncio.TaskGroup() as group:
            for number in range(WAITERS_MAX - 1):
                group.create_task(attack(f"10.0.1.{number}"))
            await asyncio.sleep(0.3)
            token = new_token()
            world.unapplied.append(token)
            assert await world.log_in(token.text) == "user:root"

    world.run(scenario)
    starts = world.catch_ups
    assert len(starts) > 5
    assert min(after - before for before, after in pairwise(starts)) >= INTERVAL_MS


def test_waiting_is_bounded_in_number_and_time(world: World) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def scenario() -> list[int]:
        shared = SharedCatchUp(never, world.clock)
        start_ms = world.clock.monotonic_ms()

        async def wait() -> int:
            await shared.wait()
            return world.clock.monotonic_ms() - start_ms

        return await asyncio.gather(*(wait() for _ in range(WAITERS_MAX + 10)))

    took = sorted(world.run(scenario))
    assert took[:10] == [0] * 10
    assert all(WAIT_MS_MAX <= one <= WAIT_MS_MAX + 1 for one in took[10:])


def test_many_wrong_tokens_at_a_time_are_limited_as_many_in_a_row(world: World) -> None:
    async def scenario() -> list[str]:
        return await asyncio.gather(*(world.log_in(new_token().text) for _ in range(FAILURES_MAX + 5)))

    codes = world.run(scenario)
    assert codes.count("too_many_failures") == 5
    assert codes.count("unauthenticated") == FAILURES_MAX


def test_node_that_cannot_catch_up_decides_by_what_it_knows(world: World) -> None:
    attempts = []

    async def fail() -> None:
        attempts.append(1)
        await asyncio.sleep(0.01)
        raise UnavailableError("not done: no primary")

    async def scenario() -> None:
        shared = SharedCatchUp(fail, world.clock)
        await asyncio.gather(*(shared.wait() for _ in range(20)))

    world.run(scenario)
    assert len(attempts) <= 2, "it failed for all that waited"


def test_who_waits_is_not_failed_by_one_who_leaves(world: World) -> None:
    """A client that closes its connection takes its own request with it, not the catch-up of the others."""

    async def scenario() -> None:
        token = new_token()
        leaver = asyncio.ensure_future(world.log_in(new_token().text, "10.0.0.9"))
        await asyncio.sleep(LATENCY_MS / 2_000)
        waiter = asyncio.ensure_future(world.log_in(token.text))
        await asyncio.sleep(0)
        leaver.cancel()
        world.unapplied.append(token)
        assert await waiter == "user:root"

    world.run(scenario)


def test_quotas_count_an_unapplied_token_as_a_stranger_and_leave_it_to_the_call(world: World) -> None:
    """They are checked before the body arrives, when nothing can wait."""

    def admit(text: str) -> int:
        headers = {b"host": b"localhost", b"authorization": f"Bearer {text}".encode()}
        identity = ConnectionIdentity(address="10.0.0.1:1")
        head = HttpHead(method="GET", path="/topics", query=b"", headers=headers, length=0, identity=identity)
        refusal = world.application.admit(head)
        return 0 if refusal is None else refusal.status

    assert [admit(new_token().text) for _ in range(3)] == [0, 0, 429]
    assert admit(world.known.text) == 0
    assert admit("qv_nonsense") == 401
