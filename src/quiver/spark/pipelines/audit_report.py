"""The report of an audit: as text, Markdown and JSON fields. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from quiver.spark.pipelines.audit_comparison import RecordFault

SHOWN_MAX: Final = 20
"""Maximum findings shown on a terminal; the report file has all of them."""

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
    """A fault in what one source has of a partition."""

    source: str
    partition: int
    fault: RecordFault

    def __str__(self) -> str:
        fault = self.fault
        where = f"offset {fault.offset}" if fault.count == 1 else f"offsets {fault.offset} to {fault.end_offset - 1}"
        sentence = f"partition {self.partition}, {where}: {_SENTENCES[fault.kind]}"
        if fault.kind == "swapped":
            sentence += f" with offset {fault.other}"
        elif fault.kind == "doubled" and fault.other not in (None, fault.offset):
            sentence += f": it is the record of offset {fault.other}"
        return f"{sentence}; {self.source}" + (f" ({fault.detail})" if fault.detail else "")


class PartitionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A partition, and the digest of what most replicas have of it."""

    partition: int
    first_offset: int
    end_offset: int
    count: int
    digest: str


class SourceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A source, its number of records, and whether all equal the reference."""

    source: str
    count: int
    is_identical: bool


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an audit."""

    topic: str
    archive: str
    partitions: tuple[PartitionSummary, ...]
    sources: tuple[SourceSummary, ...]
    findings: tuple[AuditFinding, ...]
    is_complete: bool
    seconds: float

    @property
    def verdict(self) -> str:
        """`identical`, `different` or `not finished`."""
        if self.findings:
            return "different"
        return "identical" if self.is_complete else "not finished"

    def to_facts(self) -> dict[str, Any]:
        """Return it as fields of the JSON result."""
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
        """Render it for a terminal."""
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
        """Render it as Markdown."""
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
            "## Content",
            _table(("partition", "first offset", "end offset", "records", "digest"), partitions),
            "## Sources",
            _table(("source", "records", "verdict"), sources),
            "## Findings",
            _table(("partition", "first", "last", "kind", "finding"), findings) if findings else "None.",
        ]
        return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Escape a text for a table cell: users choose the names."""
    return text.replace("|", "\\|").replace("\n", " ")
