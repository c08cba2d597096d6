"""Contain the unexpected errors of one member: they stop that member, and nothing else on its node.

Everything that enters a member's code from outside passes here: messages and ticks, callbacks of the log and of the
executor, and calls of the layers above. An error of `quiver.errors` is an answer to a caller and passes through a call;
anything else that escapes is a defect, whose member the host stops (`Host.contain`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quiver.errors import OutcomeUnknownError, QuiverError, UnavailableError
from quiver.model import GroupId
from quiver.replication.interfaces import Host


class FaultGuard:
    """The entries into one member's code."""

    __slots__ = ("_group", "_host")

    def __init__(self, host: Host, group: GroupId) -> None:
        self._host = host
        self._group = group

    def run(self, step: Callable[..., None], *arguments: Any) -> None:
        """Run a step that nobody waits for."""
        try:
            step(*arguments)
        except Exception as error:
            if not self._host.contain(self._group, error):
                raise

    def callback(self, step: Callable[..., None]) -> Callable[..., None]:
        """Return a step as a callback for the event loop, the log or the executor."""

        def run(*arguments: Any) -> None:
            self.run(step, *arguments)

        return run

    def call(self, step: Callable[[], None], *, is_read: bool = False) -> None:
        """Run a step for a caller.

        Raises:
            QuiverError: the step's own refusal.
            OutcomeUnknownError: an unexpected error has stopped this member. The step may have reached the log or other
                members by then, from which it goes on without this member.
            UnavailableError: the same for a read, which leaves nothing behind.
        """
        try:
            step()
        except QuiverError:
            raise
        except Exception as error:
            if not self._host.contain(self._group, error):
                raise
            if is_read:
                raise UnavailableError("not done: this member has stopped; retry at another") from error
            raise OutcomeUnknownError("may have been done: this member has stopped; look at another") from error
