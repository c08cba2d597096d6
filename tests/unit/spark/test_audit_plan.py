"""What an audit reads: everything, once from each witness, cut at edges that all of them share."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.client.digest_reporter import Run, Statement
from quiver.errors import NotFoundError
from quiver.record.digest import BLOCK_RECORDS, Digest
from quiver.spark.pipelines.audit import _without
from quiver.spark.pipelines.audit_comparison import RecordFault
from quiver.spark.pipelines.audit_plan import (
    LEADER,
    ArchivedPart,
    PartitionPlan,
    cut_edges,
    plan_edges,
    plan_files,
    plan_pieces,
)
from quiver.spark.pipelines.audit_report import AuditFinding, AuditReport, PartitionSummary, SourceSummary
from quiver.spark.pipelines.audit_sources import AuditSource, Piece, choose_clients, sort_statements
from quiver.spark.pipelines.lake import LakeFile
from quiver.spark.pipelines.place import Place

ARCHIVE = AuditSource("archive", "/lake")


def lake_file(first: int, last: int) -> LakeFile:
    return LakeFile(
        path=f"{first}.parquet",
        topic="logs",
        partition=0,
        hour="2026-11-15T14",
        size_bytes=1,
        count=last + 1 - first,
        first_offset=first,
        last_offset=last,
    )


def make_plan(
    end: int, *, first: int = 0, files: tuple[LakeFile, ...] = (), nodes: tuple[int, ...] = (1, 2)
) -> PartitionPlan:
    archived_end = max((file.last_offset + 1 for file in files), default=0)
    archived = (
        ArchivedPart(source=ARCHIVE, place=Place("/lake"), end_offset=archived_end, files=files) if files else None
    )
    edges = plan_edges(first, end, archived_end=archived_end if files else None, runs=[])
    return PartitionPlan(topic="logs", topic_id=7, partition=0, edges=edges, nodes=nodes, archived=archived)


def test_edges_are_those_of_blocks_of_runs_and_of_the_archive() -> None:
    runs = [(0, 1024, Digest()), (1024, 1500, Digest())]
    edges = plan_edges(100, 70_000, archived_end=60_000, runs=[runs, [(69_999, 80_000, Digest())]])
    assert edges == (100, 1024, 1500, 60_000, BLOCK_RECORDS, 69_999, 70_000)
    assert plan_edges(5, 5, archived_end=None, runs=[]) == ()


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 8))
def test_every_witness_is_read_whole_and_once(first: int, count: int, cores: int) -> None:
    plan = make_plan(first + count, first=first)
    by_witness: dict[AuditSource, list[Piece]] = {}
    for piece in plan_pieces([plan], cores):
        by_witness.setdefault(piece.source, []).append(piece)
    assert set(by_witness) == {LEADER, AuditSource("replica", "1"), AuditSource("replica", "2")}
    for pieces in by_witness.values():
        assert (pieces[0].first_offset, pieces[-1].end_offset) == (first, first + count)
        assert all(before.end_offset == after.first_offset for before, after in pairwise(pieces))
        assert tuple(dict.fromkeys(edge for piece in pieces for edge in piece.edges)) == plan.edges


def test_large_partitions_are_cut_into_pieces_for_all_cores() -> None:
    pieces = plan_pieces([make_plan(100 * BLOCK_RECORDS, nodes=(1,))], 2)
    assert len([piece for piece in pieces if piece.source == LEADER]) == 7
    assert all(piece.end_offset - piece.first_offset <= 16 * BLOCK_RECORDS for piece in pieces)
    assert cut_edges((), 10) == []
    assert cut_edges((0, 4, 12, 15, 30, 31), 10) == [(0, 12), (12, 30), (30, 31)]


def test_files_are_read_once_each_and_added_up_between_the_edges_around_them() -> None:
    files = tuple(lake_file(first, first + 39_999) for first in range(0, 200_000, 40_000))
    plan = make_plan(250_000, first=50_000, files=files)
    pieces = plan_files(plan, 80_000)
    assert [piece.paths for piece in pieces] == [
        ("40000.parquet", "80000.parquet"),
        ("120000.parquet", "160000.parquet"),
    ]
    assert pieces[0].edges == (50_000, BLOCK_RECORDS, 2 * BLOCK_RECORDS)
    assert pieces[1].edges == (BLOCK_RECORDS, 2 * BLOCK_RECORDS, 3 * BLOCK_RECORDS, 200_000)
    suspect = plan.piece(ARCHIVE, BLOCK_RECORDS, 2 * BLOCK_RECORDS)
    assert suspect.paths == ("40000.parquet", "80000.parquet", "120000.parquet")
    assert plan_files(make_plan(10), 100) == []


def test_what_could_not_be_read_is_left_out_of_the_comparison() -> None:
    edges = (0, 10, 20, 30, 40)
    fault = RecordFault(kind="unreadable", offset=12, end_offset=25)
    assert list(_without(edges, [])) == [[0, 10, 20, 30, 40]]
    assert list(_without(edges, [fault])) == [[0, 10], [30, 40]]
    assert list(_without(edges, [RecordFault(kind="lost", offset=0, end_offset=40)])) == []


# -- statements --------------------------------------------------------------------------------------


def statement(role: str, name: str, *runs: tuple[int, int], topic_id: int = 7, partition: int = 0) -> Statement:
    told = tuple(Run(first, end, "0" * 32) for first, end in runs)
    return Statement(role=role, name=name, topic="logs", topic_id=topic_id, partition=partition, runs=told)  # type: ignore[arg-type] # one of the two


def test_statements_are_sorted_by_client_and_partition_and_others_topics_left_out() -> None:
    stated = sort_statements(
        [
            statement("consumer", "a", (0, 5)),
            statement("consumer", "a", (5, 9), (9, 12)),
            statement("producer", "a", (0, 5), partition=1),
            statement("consumer", "a", (0, 3), topic_id=6),
        ],
        7,
    )
    assert stated == {
        AuditSource("consumer", "a"): {0: [(0, 5, Digest(5)), (5, 9, Digest(4)), (9, 12, Digest(3))]},
        AuditSource("producer", "a"): {1: [(0, 5, Digest(5))]},
    }


def test_consumers_are_those_that_are_named_and_producers_all() -> None:
    stated = sort_statements([statement("consumer", name) for name in "ab"] + [statement("producer", "p")], 7)
    assert [source.name for source in choose_clients(stated, (), "logs")] == ["a", "b", "p"]
    assert [source.name for source in choose_clients(stated, ("b",), "logs")] == ["b", "p"]
    with pytest.raises(
        NotFoundError, match=r"consumer 'c' has reported no digests of topic 'logs'.*Consumers with digests: a, b"
    ):
        choose_clients(stated, ("c",), "logs")


# -- the report --------------------------------------------------------------------------------------


def report(*findings: AuditFinding) -> AuditReport:
    return AuditReport(
        topic="logs",
        archive="",
        partitions=(PartitionSummary(partition=0, first_offset=5, end_offset=1_005, count=1_000, digest="ab" * 16),),
        sources=(SourceSummary(source="archive |x", count=1_000, is_identical=not findings),),
        findings=findings,
        is_complete=True,
        seconds=1.25,
    )


def finding(kind: str, offset: int = 7, end_offset: int | None = None, **rest: object) -> AuditFinding:
    fault = RecordFault(kind=kind, offset=offset, end_offset=end_offset or offset + 1, **rest)  # type: ignore[arg-type] # as given
    return AuditFinding(source="replica on node 2", partition=0, fault=fault)


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (finding("lost"), "partition 0, offset 7: lost; replica on node 2"),
        (finding("altered", 7, 9), "partition 0, offsets 7 to 8: altered; replica on node 2"),
        (finding("swapped", other=9), "partition 0, offset 7: swapped with offset 9; replica on node 2"),
        (finding("doubled", other=7), "partition 0, offset 7: doubled; replica on node 2"),
        (
            finding("doubled", other=6),
            "partition 0, offset 7: doubled: it is the record of offset 6; replica on node 2",
        ),
        (
            finding("unreadable", detail="checksum"),
            "partition 0, offset 7: cannot be read; replica on node 2 (checksum)",
        ),
    ],
)
def test_findings_are_told_in_a_sentence(one: AuditFinding, told: str) -> None:
    assert str(one) == told


def test_report_has_a_verdict_and_everything_found() -> None:
    assert report().verdict == "identical"
    assert report().to_text().splitlines()[0] == "logs: identical; records 1,000, partitions 1, 1.2 s"
    assert report().to_facts()["findings"] == []
    wrong = report(*(finding("lost", offset) for offset in range(30)))
    assert wrong.verdict == "different"
    assert wrong.to_text().count("lost") == 20
    assert "and 10 more" in wrong.to_text()
    assert wrong.to_markdown().count("| lost |") == 30
    assert "archive \\|x" in wrong.to_markdown()
    assert wrong.to_facts()["findings"][3] == {
        "witness": "replica on node 2",
        "partition": 0,
        "kind": "lost",
        "offset": 3,
        "end_offset": 4,
    }
