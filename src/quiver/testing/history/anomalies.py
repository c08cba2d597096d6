"""The result of a history check: anomalies by name with their evidence, and the size of the history."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

EXAMPLES_MAX = 20
"""Of each anomaly so many are kept with their evidence; the others are only counted."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One promise broken, once."""

    name: str
    key: str | None
    evidence: dict[str, Any]

    def __str__(self) -> str:
        facts = " ".join(f"{fact}={value}" for fact, value in self.evidence.items())
        return f"{self.name} key={self.key} {facts}"


@dataclass(slots=True)
class CheckResult:
    """The anomalies of a history, and its size."""

    counts: Counter[str] = field(default_factory=Counter)
    """How often each anomaly was found, by name."""
    anomalies: list[Anomaly] = field(default_factory=list)
    """The first `EXAMPLES_MAX` of each."""
    facts: Counter[str] = field(default_factory=Counter)
    """What the history holds: a history that is clean because it is empty shows here."""

    @property
    def is_clean(self) -> bool:
        """Tell whether nothing was found."""
        return not self.counts

    def find(self, name: str, key: str | None, /, **evidence: Any) -> None:
        """Add an anomaly."""
        self.counts[name] += 1
        if self.counts[name] <= EXAMPLES_MAX:
            self.anomalies.append(Anomaly(name, key, evidence))

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        found = [{"name": one.name, "key": one.key, **one.evidence} for one in self.anomalies]
        return {"is_clean": self.is_clean, "counts": dict(self.counts), "facts": dict(self.facts), "anomalies": found}

    def __str__(self) -> str:
        sizes = " ".join(f"{fact}={count}" for fact, count in sorted(self.facts.items()))
        if self.is_clean:
            return f"nothing found in {sizes}"
        return "\n".join((f"found {dict(self.counts)} in {sizes}", *map(str, self.anomalies)))
