"""The command line against a real node: records in and out byte for byte, cursors, interrupts, closed pipes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.shell_completion import ShellComplete

from quiver.cli import main, quiver
from quiver.testing import LocalCluster

ODD = [b"plain", b"", b"\xff\x00\x1b[31m", "grün".encode(), b"carriage\r"]


class Cli:
    """Runs commands against one cluster."""

    def __init__(self, url: str, capture: pytest.CaptureFixture[bytes]) -> None:
        self.url = url
        self._capture = capture

    def __call__(self, *arguments: str, code: int = 0) -> bytes:
        """Return what a command prints."""
        return self.both(*arguments, code=code)[0]

    def both(self, *arguments: str, code: int = 0) -> tuple[bytes, bytes]:
        self._capture.readouterr()
        assert main([*arguments, "--url", self.url]) == code, self._capture.readouterr()
        return self._capture.readouterr()

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command in a process of its own."""
        command = [sys.executable, "-m", "quiver", *arguments, "--url", self.url]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1) as running:
        yield running


@pytest.fixture
def cli(local: LocalCluster, capsysbinary: pytest.CaptureFixture[bytes]) -> Cli:
    return Cli(local.urls[0], capsysbinary)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).removeprefix("test_")[:100].replace("[", "-").replace("]", "")


def write(path: Path, lines: list[bytes]) -> str:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def numbers(first: int, end: int) -> list[bytes]:
    return [f"{number}".encode() for number in range(first, end)]


def test_file_contents_come_out_byte_for_byte(cli: Cli, topic: str, tmp_path: Path) -> None:
    first, second = write(tmp_path / "first", ODD), write(tmp_path / "second", numbers(0, 5000))
    out, err = cli.both("produce", topic, first, second, "--partition", "1", "--compression", "zstd")
    assert out == b""
    assert err.startswith(f"sent to {topic}: 5,005 records in ".encode())
    assert cli("consume", topic) == Path(first).read_bytes() + Path(second).read_bytes()
    assert cli("consume", topic, "--partition", "0") == b""


def test_standard_input_is_sent_under_a_key(cli: Cli, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"one\ntwo"))))
    cli("produce", topic, "--key", "web", "--name", "loader")
    found = [json.loads(line) for line in cli("consume", topic, "--json").splitlines()]
    assert [(one["key"], one["value"], one["offset"]) for one in found] == [("web", "one", 0), ("web", "two", 1)]
    assert len({one["partition"] for one in found}) == 1
    (listed,) = cli.json("producer", "list", "--topic", topic)
    assert (listed["name"], listed["topics"]) == ("loader", [topic])


def test_typed_line_is_a_record_at_once(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "--partitions", "1")
    with cli.start("produce", topic) as process:
        assert process.stdin is not None
        process.stdin.write(b"first\n")
        process.stdin.flush()
        while cli("consume", topic) != b"first\n":
            time.sleep(0.05)
        process.stdin.write(b"second\n")
        process.stdin.close()
        assert process.wait() == 0
        assert cli("consume", topic) == b"first\nsecond\n"


def test_consume_starts_and_stops_at_the_given_positions(cli: Cli, topic: str, tmp_path: Path) -> None:
    cli("produce", topic, write(tmp_path / "old", numbers(0, 10)), "--partition", "0")
    time.sleep(0.01)
    between = datetime.now(UTC).isoformat()
    time.sleep(0.01)
    cli("produce", topic, write(tmp_path / "new", numbers(10, 20)), "--partition", "0")
    assert cli("consume", topic, "--max", "3").split() == numbers(0, 3)
    assert cli("consume", topic, "--max", "0") == b""
    assert cli("consume", topic, "--from", "17", "--partition", "0").split() == numbers(17, 20)
    assert cli("consume", topic, "--from", between).split() == numbers(10, 20)
    assert cli("consume", topic, "--from", "1h").split() == numbers(0, 20)
    assert cli("consume", topic, "--from", "latest") == b""
    assert cli("consume", topic, "--from", "earliest", "--follow", "--max", "20").split() == numbers(0, 20)


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize("format_", ["arrow", "parquet"])
def test_records_become_tables(cli: Cli, topic: str, tmp_path: Path, format_: str, is_file: bool) -> None:
    cli("produce", topic, write(tmp_path / "lines", [*ODD, *numbers(0, 5000)]), "--partition", "2", "--key", "k")
    if is_file:
        path = str(tmp_path / "table")
        out, err = cli.both("consume", topic, "--format", format_, "--output", path)
        assert (out, err) == (b"", f"wrote 5,005 records of {topic} to {path}\n".encode())
        data = Path(path).read_bytes()
    else:
        data = cli("consume", topic, "--format", format_)
    if format_ == "parquet":
        table = pq.read_table(pa.BufferReader(data))
    else:
        table = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(data).read_all()
    assert table.column("value").to_pylist() == [*ODD, *numbers(0, 5000)]
    assert table.column("offset").to_pylist() == list(range(5005))
    assert set(table.column("partition").to_pylist()) == {2}
    assert set(table.column("key").to_pylist()) == {b"k"}


def test_named_consumer_resumes_at_its_cursors_and_can_be_reset(cli: Cli, topic: str, tmp_path: Path) -> None:
    cli("produce", topic, write(tmp_path / "lines", numbers(0, 10)), "--partition", "0")
    consume = ("consume", topic, "--consumer", f"report-{topic}")
    assert cli(*consume, "--max", "4").split() == numbers(0, 4)
    assert cli(*consume, "--output", str(tmp_path / "out"), "--max", "2") == b""
    assert (tmp_path / "out").read_bytes().split() == numbers(4, 6)
    lags = cli.json("consumer", "lag", f"report-{topic}")
    assert [(lag["partition"], lag["cursor"], lag["lag"]) for lag in lags] == [(0, 6, 4), (1, 0, 0), (2, 0, 0)]
    assert cli(*consume, "--format", "json").count(b"\n") == 4
    assert cli(*consume) == b""
    cli("consumer", "reset", f"report-{topic}", "--topic", topic, "--to", "7", "--partition", "0")
    assert cli(*consume).split() == numbers(7, 10)
    assert cli(*consume, "--from", "earliest").split() == numbers(0, 10)
    assert cli(*consume) == b""
    cli("consumer", "reset", f"report-{topic}", "--topic", topic, "--to", "1h")
    assert cli(*consume).split() == numbers(0, 10)


def test_invalid_reset_moves_no_cursor(cli: Cli, topic: str, tmp_path: Path) -> None:
    cli("produce", topic, write(tmp_path / "lines", numbers(0, 10)), "--partition", "0")
    name = f"report-{topic}"
    cli("consume", topic, "--consumer", name, "--max", "4", "--partition", "0")
    for where in (("--to", "11"), ("--to", "0", "--partition", "9"), ("--to", "0", "--partition", "1")):
        cli("consumer", "reset", name, "--topic", topic, *where, code=2)
    lags = cli.json("consumer", "lag", name)
    assert [(lag["partition"], lag["cursor"]) for lag in lags] == [(0, 4)]
    assert b"error unknown_consumer" in cli.both("consumer", "lag", "nobody", code=2)[1]


def test_holds_are_listed_and_released(cli: Cli, local: LocalCluster, topic: str, tmp_path: Path) -> None:
    cli("produce", topic, write(tmp_path / "lines", numbers(0, 10)))
    with local.connect() as client:
        client.hold(topic, f"{topic}-hold", {0: 4}, owner="somebody")
    heading, row = cli("hold", "list").decode().splitlines()
    assert heading.split() == ["hold", "topic", "from", "until", "owner"]
    assert row.split()[:3] == [f"{topic}-hold", topic, "0:4"]
    assert row in cli("status").decode()
    (shown,) = cli.json("status")["holds"]
    assert (shown["name"], shown["topic"], shown["offsets"]) == (f"{topic}-hold", topic, [[0, 4]])
    cli("hold", "release", f"{topic}-hold")
    assert cli.json("hold", "list") == cli.json("status")["holds"] == []


def test_consumers_are_listed_with_their_lag_and_forgotten(cli: Cli, topic: str, tmp_path: Path) -> None:
    cli("produce", topic, write(tmp_path / "lines", numbers(0, 10)))
    cli("consume", topic, "--consumer", topic, "--max", "3")
    heading, row = cli("consumer", "list", "--topic", topic).decode().splitlines()
    assert heading.split() == ["id", "name", "topics", "alive", "last", "seen", "registered"]
    id_, *rest = row.split()
    assert rest[:3] == [topic, topic, "yes"]
    heading, row = cli("consumer", "lag", "--topic", topic).decode().splitlines()
    assert heading.split() == ["id", "name", "topic", "lag", "alive"]
    assert row.split() == [id_, topic, topic, "7", "yes"]
    by_id, by_name = (cli("consumer", "lag", who) for who in (id_, topic))
    assert by_id == by_name
    cli("consumer", "forget", id_)
    assert cli.json("consumer", "list", "--topic", topic) == []


def test_interrupted_consumer_has_consumed_exactly_what_it_wrote(cli: Cli, topic: str, tmp_path: Path) -> None:
    cli("produce", topic, write(tmp_path / "lines", numbers(0, 30_000)), "--partition", "0")
    with cli.start("consume", topic, "--consumer", topic, "--follow") as process:
        assert process.stdout is not None
        read = [process.stdout.readline()]
        interrupted = threading.Timer(0.05, process.send_signal, (signal.SIGINT,))
        interrupted.start()
        read += process.stdout.readlines()
        assert process.wait() == 130
        assert process.stderr is not None
        assert process.stderr.read().strip() == b""
        assert (b"".join(read) + cli("consume", topic, "--consumer", topic)).split() == numbers(0, 30_000)


def test_interrupted_producer_reports_acknowledged_records(cli: Cli, topic: str) -> None:
    with cli.start("produce", topic, "--partition", "0") as process:
        assert process.stdin is not None
        process.stdin.write(b"kept\n")
        process.stdin.flush()
        while cli("topic", "list").split().count(topic.encode()) == 0 or cli("consume", topic) != b"kept\n":
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        assert process.returncode == 130
        assert err.decode().strip() == f"stopped; acknowledged by {topic}: 1 of 1 record read"


def test_closed_pipe_ends_the_command_quietly(cli: Cli, topic: str, tmp_path: Path) -> None:
    cli("produce", topic, write(tmp_path / "lines", numbers(0, 50_000)), "--partition", "0")
    with cli.start("consume", topic, "--follow") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_tail_prints_new_records(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "--partitions", "1")
    with cli.start("tail", topic, "--max", "1") as process:
        number = 0
        while process.poll() is None:  # it sees what comes after it has begun, whenever that is
            with cli.start("produce", topic, "--key", "web") as sending:
                sending.communicate(f"line {number}\n".encode())
            number += 1
        out, err = process.communicate()
        assert err == b""
        at, place, key, *words = out.decode().split()
        assert datetime.fromisoformat(at).tzinfo is not None
        assert (place.split(":")[0], key, words[0]) == ("0", "web", "line")


def test_errors_have_their_exit_codes(cli: Cli, topic: str, tmp_path: Path) -> None:
    assert b"error unknown_topic" in cli.both("consume", topic, code=2)[1]
    assert b"does not exist" in cli.both("produce", topic, str(tmp_path / "none"), code=2)[1]
    cli("topic", "create", topic)
    assert b"error unknown_partition" in cli.both("consume", topic, "--partition", "7", code=2)[1]
    assert main(["consume", topic, "--url", "127.0.0.1:9"]) == 3


def test_topics_are_completed(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic)
    completion = ShellComplete(quiver, {}, "quiver", "_QUIVER_COMPLETE")
    for command in (["consume"], ["produce"], ["tail"], ["topic", "describe"]):
        found = completion.get_completions([*command, "--url", cli.url], topic[:6])
        assert topic in [item.value for item in found]
    assert completion.get_completions(["consume", "--url", "127.0.0.1:9"], "") == []


def test_shell_completion_answers_the_tab_key() -> None:
    pressed = {"_QUIVER_COMPLETE": "bash_complete", "COMP_WORDS": "quiver cons", "COMP_CWORD": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "quiver"], env={**os.environ, **pressed}, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["plain,consume", "plain,consumer"]
