"""The tools of the command line against a real node: JSON lines, times, topics, measurements, the live view."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from chaos_cluster import Cluster

from quiver.cli import main
from quiver.testing import LocalCluster


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1) as running:
        yield running


class Cli:
    """Runs commands against one cluster."""

    def __init__(self, url: str, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._url, self._capture, self._patch = url, capture, patch

    def __call__(self, *arguments: str, code: int = 0, stdin: str = "") -> str:
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        self._capture.readouterr()
        found = main([*arguments, "--url", self._url])
        shown = self._capture.readouterr()
        assert found == code, shown
        return shown.out if code == 0 else shown.err

    def json(self, *arguments: str, **options: Any) -> Any:
        return json.loads(self(*arguments, "--json", **options))


@pytest.fixture
def cli(local: LocalCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(local.urls[0], capsys, monkeypatch)


def test_brokers_are_waited_for_that_do_not_listen_yet(tmp_path: Path) -> None:
    nodes = Cluster(tmp_path, 1)
    command = [sys.executable, "-m", "quiver", "broker", "wait", "1", "--url", f"http://{nodes.http_addresses[0]}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        try:
            assert waiting.stderr is not None
            assert waiting.stderr.readline().startswith("waiting: not connected: nothing listens at")
            nodes.start()
            assert waiting.communicate() == ("alive: 1\n", "")
        finally:
            waiting.kill()
            nodes.close()
    assert waiting.returncode == 0


def test_mistyped_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["statsu"]) == 2
    assert "'status'" in capsys.readouterr().err
    assert main(["topic", "lst"]) == 2
    assert "'list'" in capsys.readouterr().err


def test_records_with_headers_keys_and_times(cli: Cli) -> None:
    cli("produce", "plain", "--header", "host=web-1", "--key", "k", "--timestamp", "2026-01-31T12:00", stdin="a\nb\n")
    [first, second] = map(json.loads, cli("consume", "plain", "--json").splitlines())
    assert (first["value"], second["value"]) == ("a", "b")
    assert (first["key"], first["headers"], first["timestamp"]) == ("k", {"host": "web-1"}, 1769860800000)
    assert "NAME=VALUE" in cli("produce", "plain", "--header", "host", code=2, stdin="x\n")


def test_json_lines_go_in_as_they_came_out(cli: Cli) -> None:
    lines = [
        '{"value":"one","key":"k","headers":{"h":"1"},"timestamp":5,"partition":1}',
        '{"value":{"a":1},"partition":0}',
    ]
    cli("produce", "from-json", "--json", stdin="\n".join(lines) + "\n")
    exported = cli("consume", "from-json", "--json")
    cli("produce", "copy", "--json", "--rate", "1000", stdin=exported)
    shown = [
        sorted(cli("consume", topic, "--template", "{partition} {timestamp} {key} {value} {headers}").splitlines())
        for topic in ("from-json", "copy")
    ]
    assert shown[0] == shown[1]
    assert "1 5 k one h=1" in shown[0]
    refused = cli("produce", "copy", "--json", code=2, stdin='{"value":1}\n{"vlaue":1}\n')
    assert "line 2 is not a record" in refused
    assert "vlaue" in refused
    assert "acknowledged by copy: 1 of 1 record read" in refused


def test_part_of_a_topic_by_count_and_by_time(cli: Cli, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"value": str(n), "timestamp": 1_000 * n, "partition": 0}) + "\n" for n in range(10))
    cli("produce", "timed", "--json", stdin=lines)
    assert cli("consume", "timed", "--last", "3").split() == ["7", "8", "9"]
    assert cli("consume", "timed", "--until", "1970-01-01T00:00:04").split() == ["0", "1", "2", "3"]
    part = ("--from", "1970-01-01T00:00:02", "--until", "1970-01-01T00:00:05")
    assert cli("consume", "timed", *part).split() == ["2", "3", "4"]
    target = tmp_path / "part.parquet"
    cli("consume", "timed", *part, "--format", "parquet", "--output", str(target))
    assert pq.read_table(target)["offset"].to_pylist() == [2, 3, 4]
    assert cli("consume", "timed", "--group", "report", "--until", "1970-01-01T00:00:02").split() == ["0", "1"]
    assert cli("consume", "timed", "--consumer", "report", "--max", "1").split() == ["2"]
    assert "at most one of" in cli("consume", "timed", "--last", "1", "--from", "0", code=2)
    assert "--template" in cli("consume", "timed", "--template", "{value}", "--json", code=2)
    before = target.read_bytes()
    cli("consume", "no-such-topic", "--output", str(target), code=2)
    assert target.read_bytes() == before
    assert "{nope}" in cli("consume", "timed", "--template", "{nope}", code=2)


def test_topics_are_listed_and_configured(cli: Cli) -> None:
    cli("topic", "create", "kept", "--partitions", "2", "--retention", "7d", "--retention-bytes", "10GiB")
    cli("topic", "create", "_internal")
    cli("topic", "create", "quiver.digests")
    cli("produce", "kept", stdin="a\nb\n")
    listed = {one["topic"]: one for one in cli.json("topic", "list")}
    assert "_internal" not in listed
    assert "quiver.digests" not in listed
    assert "_internal" in cli("topic", "list", "--all", "--names").split()
    assert (listed["kept"]["partitions"], listed["kept"]["records"]) == (2, 2)
    assert listed["kept"]["retention"] == {"ms": 604_800_000, "bytes": 10 << 30}
    assert "7d, 10GiB per partition" in cli("topic", "list")
    shown = cli("topic", "configure", "kept", "--retention", "unlimited", "--until-consumed")
    assert shown.startswith("retention of kept: 10GiB per partition, until consumed; was: 7d")
    assert "nothing to change" in cli("topic", "configure", "kept", code=2)
    assert "such as 7d" in cli("topic", "configure", "kept", "--retention", "a week", code=2)


def test_nothing_is_said_to_be_done_that_was_not(cli: Cli) -> None:
    refused = cli("hold", "release", "nope", code=2)
    assert "not done: there is no hold 'nope'" in refused
    assert "quiver hold list" in refused
    assert "quiver topic list" in cli("topic", "describe", "nope", code=2)


def test_measurements_print_percentiles_and_a_plot(cli: Cli) -> None:
    produced = cli.json("bench", "produce", "--topic", "measured", "--records", "5000", "--size", "64")
    assert (produced["records"], produced["bytes"]) == (5000, 5000 * 64)
    assert list(produced["latency_ms"]) == ["p50", "p90", "p99", "p99.9", "max"]
    consumed = cli.json("bench", "consume", "--topic", "measured")
    assert consumed["records"] == 5001
    assert cli.json("bench", "consume", "--topic", "measured", "--arrow", "--records", "100")["records"] == 100
    shown = cli("bench", "latency", "--topic", "measured", "--rate", "100", "--duration", "500ms")
    assert "end to end: p50" in shown
    assert "█" in shown
    assert "bench produce" in cli("bench", "consume", "--topic", "empty", code=2)


def test_latency_is_measured_beside_records_of_others(cli: Cli, local: LocalCluster) -> None:
    is_over = threading.Event()

    def disturb() -> None:
        with local.connect() as cluster, cluster.producer("shared") as producer:
            while not is_over.wait(0.005):
                producer.send("a line of somebody else's log")

    other = threading.Thread(target=disturb)
    other.start()
    try:
        found = cli.json("bench", "latency", "--topic", "shared", "--rate", "100", "--duration", "500ms")
    finally:
        is_over.set()
        other.join()
    assert (found["records"], found["lost"]) == (50, 0)


def test_level_that_no_program_knows_is_refused(cli: Cli) -> None:
    assert "knows feature levels up to" in cli("cluster", "upgrade", "--to", "999", "--yes", code=2)


def test_live_view_shows_nodes_topics_and_lag(cli: Cli) -> None:
    cli("produce", "viewed", stdin="a\nb\nc\n")
    cli("consume", "viewed", "--group", "watcher", "--max", "1")
    shown = cli("top", "--once", "--interval", "0.2")
    assert "viewed" in shown
    assert "watcher" in shown
    view = cli.json("top", "--once", "--interval", "0.2")
    assert [node["is_alive"] for node in view["nodes"]] == [True]
    assert [one["lag"] for one in view["consumers"] if one["consumer"] == "watcher"] == [2]


def test_every_command_has_a_manual_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cli", "man", "--to", str(tmp_path)]) == 0
    assert {"quiver.1", "quiver-topic-configure.1", "quiver-bench-latency.1"} <= {
        one.name for one in tmp_path.iterdir()
    }
    page = (tmp_path / "quiver-consume.1").read_text()
    assert r".B \-\-last N" in page
    if shutil.which("groff"):
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", *map(str, tmp_path.iterdir())],
            capture_output=True,
            check=True,
            text=True,
        )
        assert not done.stderr
        assert "quiver-consume" in done.stdout.lower()
