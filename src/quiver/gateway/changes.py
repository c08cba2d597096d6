"""Changes of the cluster that a gateway has done by the primary."""

from __future__ import annotations

import msgspec

from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.wire.requests import Done, Request


def with_one_attempt(router: Router) -> Router:
    """Return a router whose attempts may take the timeout of a call.

    It is for requests that are not repeated after an attempt of unknown outcome: to end that attempt early would only
    make the outcome of more calls unknown.
    """
    options = router.options
    return router.with_options(msgspec.structs.replace(options, attempt_timeout_ms=options.timeout_ms))


async def submit_change(router: Router, request: Request[Done], *, deadline: Deadline) -> None:
    """Have a change done; whoever is asked through this router next knows of it."""
    if not request.is_repeatable:
        router = with_one_attempt(router)
    done, _ = await router.ask(request, deadline=deadline)
    router.cache.record_index(done.index)
