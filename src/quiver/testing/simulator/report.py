"""The report of one seed, and the violation that ends a run.

A report can be sent between processes and added up. Invariants are named as in `docs/reliability.md`: I1 to I18 hold at
every event, F1 to F5 at the end.
"""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import NoReturn

from quiver.errors import InvariantBroken
from quiver.testing.loop import UnhandledError


class Violation(SystemExit):
    """Report a broken invariant; `invariant` is its name.

    It ends the run immediately, wherever it is raised: asyncio re-raises a `SystemExit` of any task.
    """

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class CutOff(Violation):
    """Report a seed that did not end within its limit."""


def violated(invariant: str, message: str, **facts: object) -> NoReturn:
    """Fail the run; `facts` are shown with the message."""
    detail = " ".join(f"{key}={value}" for key, value in facts.items())
    raise Violation(invariant, f"{message} {detail}".rstrip())


def require(condition: object, invariant: str, message: str, **facts: object) -> None:
    """Fail the run unless `condition` holds."""
    if not condition:
        violated(invariant, message, **facts)


@dataclass(slots=True)
class SeedReport:
    """Figures of one seed, and its finding if it has one."""

    seed: int
    option: str = ""
    """The option of `quiver sim` that chooses the model that was run."""
    finding: str | None = None
    is_cut_off: bool = False
    """Whether the finding is that the seed did not end."""
    digest: str = ""
    events: int = 0
    simulated_ms: int = 0
    sends: Counter[str] = field(default_factory=Counter)
    reads: int = 0
    consumed: int = 0
    trimmed: int = 0
    """Records that were trimmed."""
    elections: int = 0
    changes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    effects: Counter[str] = field(default_factory=Counter)
    """Failures of disks and network, by kind."""
    tail: list[str] = field(default_factory=list)
    schedule: list[str] = field(default_factory=list)

    @property
    def replay(self) -> str:
        """Return the command that runs this seed again."""
        return " ".join(["quiver sim", *([self.option] if self.option else []), f"--seed {self.seed}"])


def describe(error: BaseException) -> str:
    """Return one line about the innermost cause of an error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, UnhandledError) and error.__cause__ is not None:
        return describe(error.__cause__)
    if isinstance(error, Violation | InvariantBroken):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{error}".split("\n")[0]
    return f"{type(error).__name__}: {text} ({place.name} in {place.filename.rpartition('/')[2]}:{place.lineno})"
