"""What one seed did and found, in a form that can be sent between processes and added up."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from quiver.errors import InvariantBroken
from quiver.testing.finding import Finding
from quiver.testing.loop import UnhandledError


@dataclass(slots=True)
class Report:
    """What one seed did and found."""

    seed: int
    is_cluster: bool = False
    """Whether whole nodes were run."""
    finding: str | None = None
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
    """What disks and network did, by kind."""
    tail: list[str] = field(default_factory=list)
    schedule: list[str] = field(default_factory=list)

    @property
    def replay(self) -> str:
        """Return the command that runs this seed again."""
        return f"quiver sim {'--cluster ' if self.is_cluster else ''}--seed {self.seed}"


class Run(Protocol):
    """A kind of simulation: a pure function from a seed to its report."""

    def __call__(self, seed: int, *, left_out: frozenset[int] = frozenset()) -> Report:
        """Run one seed, without the faults of these numbers."""
        ...


def describe(error: BaseException) -> str:
    """Return one line about what went wrong, looking through wrappers."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, UnhandledError) and error.__cause__ is not None:
        return describe(error.__cause__)
    if isinstance(error, Finding | InvariantBroken):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{error}".split("\n")[0]
    return f"{type(error).__name__}: {text} ({place.name} in {place.filename.rpartition('/')[2]}:{place.lineno})"
