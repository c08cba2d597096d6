"""The live harness finds what is wrong with a server that lies, and nothing with one that does not."""

from __future__ import annotations

import io

import pytest
from chaos_clients import (
    Client,
    CursorConsumer,
    EndWatcher,
    OffsetReader,
    PlainProducer,
    SequencedProducer,
    TopicMaker,
    Workload,
)
from chaos_http import HttpClient, wait_for
from chaos_pretender import FAULTS, Pretender, pretending

from quiver.testing.history import CheckResult, Recorder, check_history, parse_history

EVENTS = 5_000


def _observe(pretender: Pretender) -> tuple[Workload, CheckResult]:
    """Let every kind of client work on a server, read it from the start, and check the history."""
    stream = io.StringIO()
    recorder = Recorder(stream)
    with pretending(pretender) as address:
        workload = Workload(recorder, [address], "t", 3)
        kinds: list[type[Client]] = [
            SequencedProducer,
            PlainProducer,
            CursorConsumer,
            EndWatcher,
            TopicMaker,
            TopicMaker,
        ]
        clients = [kind(workload, f"{kind.__name__}-{at}", 0) for at, kind in enumerate(kinds)]
        for client in clients:
            client.pause_s = 0
            if isinstance(client, SequencedProducer):
                client.restart_chance = 0.1
        workload.start(clients)
        wait_for("enough events", lambda: recorder.count > EVENTS or workload.surprises, 60)
        workload.finish()
        _drain(workload)
    return workload, check_history(parse_history(io.StringIO(stream.getvalue())))


def _drain(workload: Workload) -> None:
    reader = OffsetReader(workload, "drain", 0)
    reader.begin()
    for partition in range(workload.partitions):
        empty = 0
        while empty < 3:
            empty = 0 if reader.read(partition) else empty + 1
        workload.recorder.note(reader.proc, "drain", workload.key(partition), reader.positions[partition])
    reader.http.close()


def test_honest_server_is_clean() -> None:
    workload, verdict = _observe(Pretender())
    assert workload.surprises == []
    assert verdict.is_clean, verdict
    for fact in ("records_acknowledged", "records_read", "sends_info", "end_offsets_read", "names_judged"):
        assert verdict.facts[fact] > 0, verdict


@pytest.mark.parametrize("fault", FAULTS)
def test_lie_is_found(fault: str) -> None:
    _, verdict = _observe(Pretender(fault))
    assert not verdict.is_clean


def test_refused_connection_is_certainly_not_done_and_a_broken_one_unknown() -> None:
    with pretending(Pretender()) as address:
        client = HttpClient([address])
        assert client.get("/size", consumer_id=1, partition_id=0).is_ok
        client.close()
    refused = client.get("/size", consumer_id=1, partition_id=0)
    assert (refused.outcome, refused.status) == ("fail", 0)
