"""The comparison with other systems measures real servers: Quiver, and PostgreSQL as one of the others."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from postgresql_server import ServerMissingError, find_binaries

from peer_fetch import Peers
from peer_page import Results
from peer_servers import Servers, Setup
from quiver.testing import LocalCluster
from run_peers import Rows, Run

LEAST = 0.0
"""The share with which every row does the least that it can."""


def run(setup: Setup, rows: list[str], programs: dict[str, Path]) -> Results:
    results = Results("", "", "", 1, LEAST, rows, [setup.name], {}, {})
    Run([setup], rows, Peers(Path(), programs=programs), results).run(lambda: None)
    return results


def test_quiver_is_measured() -> None:
    with LocalCluster(nodes=1) as cluster:
        servers = Servers(tuple(cluster.addresses), (os.getpid(),))
        rows = Rows(Setup("quiver", 1, is_synced=True), servers, Peers(Path()), LEAST)
        found = rows.measure("bulk") | rows.measure("paced")
    assert set(found) == {"produce", "server_cpu", "consume", "consume_arrow", "paced_p50", "paced_p99"}
    assert min(found.values()) > 0
    assert found["paced_p50"] <= found["paced_p99"]


def test_another_system_is_measured_and_what_fails_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        programs = {"postgresql": find_binaries()}
    except ServerMissingError as error:
        pytest.skip(str(error))
    results = run(Setup("postgresql", 1, is_synced=False), ["awaited", "unknown"], programs)
    assert set(results.figures["postgresql-1-nosync"]) == {"awaited_p50", "awaited_p99"}
    assert [failure.split(":")[0] for failure in results.failures] == ["postgresql-1-nosync, unknown"]
    assert "[unknown FAILED" in capsys.readouterr().out


def test_servers_that_cannot_start_are_said() -> None:
    results = run(Setup("redis", 1, is_synced=True), ["bulk"], {"redis": Path(sys.executable)})
    assert results.figures == {}
    assert [failure.split(":")[0] for failure in results.failures] == ["redis-1-fsync, servers"]
    assert " ended: " in results.failures[0]
