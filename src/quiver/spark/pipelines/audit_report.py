"""What an audit has found, for people and for programs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from quiver.spark.pipelines.audit_comparison import RecordFault

SHOWN_MAX: Final = 20
"""Findings that a terminal shows; a report has all of them."""

_SENTENCES: Final = {
    "lost": "lost",
    "doubled": "doubled",
    "altered": "altered",
    "swapped": "swapped",
    "unexpected": "should not be there",
    "unreadable": "cannot be read",
    "unreachable": "cannot be asked",
}


class AuditFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Something wrong with what somebody has of a partition."""

    source: str
    partition: int
    fault: RecordFault

    def __str__(self) -> str:
        fault = self.fault
        where = f"offset {fault.offset}" if fault.count == 1 else f"offsets {fault.offset} to {fault.end_offset - 1}"
        told = f"partition {self.partition}, {where}: {_SENTENCES[fault.kind]}"
        if fault.kind == "swapped":
            told += f" with offset {fault.other}"
        elif fault.kind == "doubled" and fault.other not in (None, fault.offset):
            told += f": it is the record of offset {fault.other}"
        return f"{told}; {self.source}" + (f" ({fault.detail})" if fault.detail else "")


class PartitionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A partition, and the digest of what most replicas hold of it."""

    partition: int
    first_offset: int
    end_offset: int
    count: int
    digest: str


class SourceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who had records to show, how many, and whether all of them were right."""

    source: str
    count: int
    is_identical: bool


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an audit."""

    topic: str
    archive: str
    partitions: tuple[PartitionSummary, ...]
    sources: tuple[SourceSummary, ...]
    findings: tuple[AuditFinding, ...]
    is_complete: bool
    seconds: float

    @property
    def verdict(self) -> str:
        """One word, or two."""
        if self.findings:
            return "different"
        return "identical" if self.is_complete else "not finished"

    def to_facts(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "topic": self.topic,
            "verdict": self.verdict,
            "records": sum(own.count for own in self.partitions),
            "partitions": msgspec.to_builtins(self.partitions),
            "witnesses": [
                {"witness": own.source, "records": own.count, "identical": own.is_identical} for own in self.sources
            ],
            "findings": [
                {"witness": own.source, "partition": own.partition, **msgspec.to_builtins(own.fault)}
                for own in self.findings
            ],
            "seconds": self.seconds,
        }

    def to_text(self) -> str:
        """Return it for a terminal."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        count, partitions = sum(own.count for own in self.partitions), len(self.partitions)
        yield f"{self.topic}: {self.verdict}; records {count:,}, partitions {partitions}, {self.seconds:.1f} s"
        for own in self.sources:
            yield f"  {'same' if own.is_identical else 'DIFFERS':8}{own.count:>15,}  {own.source}"
        for finding in self.findings[:SHOWN_MAX]:
            yield f"  {finding}"
        if len(self.findings) > SHOWN_MAX:
            yield f"  and {len(self.findings) - SHOWN_MAX:,} more: --report FILE has all of them"

    def to_markdown(self) -> str:
        """Return it as a page."""
        partitions = [
            (own.partition, own.first_offset, own.end_offset, f"{own.count:,}", f"`{own.digest}`")
            for own in self.partitions
        ]
        sources = [
            (_cell(own.source), f"{own.count:,}", "the same" if own.is_identical else "**differs**")
            for own in self.sources
        ]
        findings = [
            (own.partition, own.fault.offset, own.fault.end_offset - 1, own.fault.kind, _cell(str(own)))
            for own in self.findings
        ]
        parts = [
            f"# Audit of {self.topic}",
            f"Verdict: **{self.verdict}**, after {self.seconds:.1f} s.",
            "## What it holds",
            _table(("partition", "first offset", "end offset", "records", "digest"), partitions),
            "## Who told it",
            _table(("witness", "records", "verdict"), sources),
            "## Findings",
            _table(("partition", "first", "last", "kind", "finding"), findings) if findings else "None.",
        ]
        return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Return a text that cannot break out of its cell: names are other people's."""
    return text.replace("|", "\\|").replace("\n", " ")
