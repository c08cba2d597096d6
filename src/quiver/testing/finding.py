"""What a simulation fails with: one broken promise, named by its invariant.

The names are those of `docs/reliability.md`: I1 to I18 hold at every event, F1 to F4 at the end.
"""

from __future__ import annotations

from typing import NoReturn


class Finding(SystemExit):
    """Report a broken invariant; `invariant` is its name.

    It ends the run at once, wherever it is raised: asyncio lets no task keep a `SystemExit` to itself.
    """

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


def found(invariant: str, message: str, **facts: object) -> NoReturn:
    """Fail the run; `facts` are shown with the message."""
    detail = " ".join(f"{key}={value}" for key, value in facts.items())
    raise Finding(invariant, f"{message} {detail}".rstrip())


def require(condition: object, invariant: str, message: str, **facts: object) -> None:
    """Fail the run unless `condition` holds."""
    if not condition:
        found(invariant, message, **facts)
