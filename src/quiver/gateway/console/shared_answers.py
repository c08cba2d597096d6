"""Answers that many callers ask for again and again, such as open consoles: computed at most once a second for all.

Only the callers that say so (`shared`) get an answer of another caller, and only after each was allowed to ask for it:
the key of an answer is the route with all its parameters, and what depends on who asks is filtered afterwards. Callers
that arrive while an answer is computed wait for it. An expensive answer is computed more rarely, so that it costs no
more than a small share of a core. Answers are kept no longer than they are used; records are not shared, because their
memory is counted where they are sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from quiver.clock import Clock
from quiver.errors import QuiverError
from quiver.gateway.application import HandlerResult, RouteHandler

AGE_MS_MIN: Final = 1_000
"""Age up to which an answer is reused."""
AGE_MS_MAX: Final = 10_000
"""The same for one that is expensive."""
COST_SHARE_MAX: Final = 0.05
"""Share of a core that computing one answer again and again may take."""
ANSWERS_MAX: Final = 64
"""Answers that are kept or computed; further ones are not shared."""
SHARED_ROUTES: Final = frozenset(
    (
        "describe_topic",
        "list_consumers",
        "describe_consumer",
        "list_groups",
        "describe_group",
        "get_group_lag",
        "describe_queue",
        "list_pipelines",
    )
)
Key = tuple[str, Any]
Compute = Callable[[], Awaitable[HandlerResult]]


class Outcome(NamedTuple):
    """An answer, or why there is none."""

    answer: HandlerResult | None
    error: QuiverError | None

    def unwrap(self) -> HandlerResult:
        """Return the answer, or raise the error."""
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return self.answer


class SharedAnswers:
    """Share answers among callers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: dict[Key, tuple[int, HandlerResult]] = {}
        """With the time until which they are reused."""
        self._computing: dict[Key, asyncio.Future[Outcome | None]] = {}

    def share(self, handlers: Mapping[str, RouteHandler]) -> dict[str, RouteHandler]:
        """Return the handlers, those of `SHARED_ROUTES` with answers that are shared."""
        return {
            name: self._sharing(name, handler) if name in SHARED_ROUTES else handler
            for name, handler in handlers.items()
        }

    @property
    def kept(self) -> int:
        """Return the number of answers in memory."""
        return len(self._kept)

    def _sharing(self, name: str, handler: RouteHandler) -> RouteHandler:
        async def handle(given: Any) -> HandlerResult:
            async def compute() -> HandlerResult:
                answer = handler(given)
                return await answer if isinstance(answer, Awaitable) else answer

            return await self._find((name, given), compute) if given.shared else await compute()

        return handle

    async def _find(self, key: Key, compute: Compute) -> HandlerResult:
        while True:
            known = self._kept.get(key)
            if known is not None and self._clock.monotonic_ms() < known[0]:
                return known[1]
            computing = self._computing.get(key)
            if computing is None:
                return (await self._compute(key, compute)).unwrap()
            await asyncio.wait((computing,))
            outcome = computing.result()
            if outcome is not None:
                return outcome.unwrap()

    async def _compute(self, key: Key, compute: Compute) -> Outcome:
        """Compute an answer for all who ask meanwhile; if this caller goes away, the next one computes it."""
        if len(self._kept.keys() | self._computing.keys()) >= ANSWERS_MAX:
            return Outcome(await compute(), None)
        computing = self._computing[key] = asyncio.get_running_loop().create_future()
        outcome: Outcome | None = None
        cpu_s = time.thread_time()
        try:
            outcome = Outcome(await compute(), None)
        except QuiverError as error:
            outcome = Outcome(None, error)
        finally:
            del self._computing[key]
            if outcome is not None and outcome.answer is not None:
                self._keep(key, outcome.answer, cost_ms=1000 * (time.thread_time() - cpu_s))
            computing.set_result(outcome)
        return outcome

    def _keep(self, key: Key, answer: HandlerResult, *, cost_ms: float) -> None:
        age_ms = min(AGE_MS_MAX, max(AGE_MS_MIN, round(cost_ms / COST_SHARE_MAX)))
        kept = self._kept[key] = (self._clock.monotonic_ms() + age_ms, answer)
        asyncio.get_running_loop().call_later(age_ms / 1000, self._drop, key, kept)

    def _drop(self, key: Key, kept: tuple[int, HandlerResult]) -> None:
        """Forget an answer that is too old, unless it was computed again meanwhile."""
        if self._kept.get(key) is kept:
            del self._kept[key]
