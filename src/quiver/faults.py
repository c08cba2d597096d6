"""The one rule for errors that no code handled, in production and in simulation.

Whose code an error escapes from decides what stops:

| escaped from | what stops |
|---|---|
| a partition's callback or task | that partition: it hands leadership on, refuses requests, and is reopened after a pause (`quiver.replication.fault_guard`, `quiver.broker.replica_manager`) |
| a connection's callback | that connection, which the event loop closes |
| a request's handler | that request, which is answered with `internal_error` |
| a background loop, if it is an error of `quiver.errors` | nothing: `supervise` logs it and starts the loop again after a pause |
| anything else of the node | the node, with exit code 70 |

A failed disk or database (`StorageError`) ends the node with its own exit code, as before. A broken invariant
(`InvariantBroken`) ends it with exit code 70 wherever it is found. `judge` is the handler of the event loop: it decides
about what reached the loop itself.
"""  # noqa: E501 - a table

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from quiver.backoff import Backoff
from quiver.clock import Rng
from quiver.errors import ConfigError, QuiverError, StorageError
from quiver.logs import facts

logger = logging.getLogger(__name__)

PAUSE_MS_FIRST = 100
PAUSE_MS_MAX = 10_000
"""Pauses before a background loop that failed is started again; a loop that ran for longer starts with the first."""


class NodeFault(Exception):  # noqa: N818 - as the policy is called
    """Report an error that ends the node because no part of it handled the error."""


def judge(context: Mapping[str, Any]) -> Exception | None:
    """Return the error that must end the node, given what the event loop reports; None if it was only logged.

    An error of `quiver.errors` or of the operating system that nobody awaited is logged: its caller is gone. So is an
    error of a connection: the loop closes the connection, and input from elsewhere must never end a node.
    """
    message, error = str(context.get("message", "")), context.get("exception")
    if not isinstance(error, Exception):
        logger.warning("event loop warns", extra=facts(message=message, error=error))
        return None
    if "transport" in context or "protocol" in context:
        logger.error("connection failed", exc_info=error, extra=facts(message=message))
        return None
    if isinstance(error, OSError) or (isinstance(error, QuiverError) and not isinstance(error, StorageError)):
        logger.warning("error without a caller", extra=facts(message=message, error=describe_fault(error)))
        return None
    logger.critical("error escaped, node stops", exc_info=error, extra=facts(message=message))
    return error


def find_cause(error: BaseException) -> BaseException:
    """Return the error inside nested groups that says most: what is no error of ours, else the first one."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [find_cause(inner) for inner in error.exceptions]
    return next((cause for cause in causes if not isinstance(cause, QuiverError)), causes[0])


def as_exit(error: BaseException) -> BaseException:
    """Return the error that a running node ends with: a failed disk or wrong settings as they are, all else as a fault.

    An error of `quiver.errors` is an answer to a caller. If it ends a node nevertheless, the node has a defect.
    """
    cause = find_cause(error)
    if isinstance(cause, QuiverError) and not isinstance(cause, StorageError | ConfigError):
        fault = NodeFault(f"{cause.code}: {cause.message}")
        fault.__cause__ = cause
        return fault.with_traceback(cause.__traceback__)
    return cause


def describe_fault(error: BaseException) -> str:
    """Return an error in one line, with the place that raised it, for status and logs."""
    text = " ".join(str(error).split())
    if isinstance(error, QuiverError):
        return f"{error.code}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


async def supervise(name: str, run: Callable[[], Awaitable[None]], rng: Rng | None = None) -> None:
    """Run a background loop of a node until it returns; start it again after a pause if an error of ours ends it.

    With `rng` the pauses vary, for loops that run on many nodes and ask the same one.

    Raises:
        StorageError: the disk failed; the node stops.
        Exception: a defect, which ends the node.
    """
    loop = asyncio.get_running_loop()
    backoff = Backoff(rng or _NoJitter(), first_ms=PAUSE_MS_FIRST, max_ms=PAUSE_MS_MAX)
    while True:
        begun = loop.time()
        try:
            await run()
        except (QuiverError, BaseExceptionGroup) as error:
            cause = find_cause(error)
            if isinstance(cause, StorageError) or not isinstance(cause, QuiverError):
                raise
            if (loop.time() - begun) * 1000 > PAUSE_MS_MAX:
                backoff.reset()
            pause_ms = backoff.next_ms()
            extra = facts(loop=name, error=describe_fault(cause), pause_ms=round(pause_ms))
            logger.warning("background loop failed, starts again", extra=extra)
            await asyncio.sleep(pause_ms / 1000)
        else:
            return


class _NoJitter:
    """The `Rng` of pauses that do not vary."""

    def random(self) -> float:
        return 1.0

    def randrange(self, stop: int) -> int:
        return stop - 1
