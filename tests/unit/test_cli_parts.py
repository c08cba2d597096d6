"""Command-line code that needs no cluster: splitting lines, start positions, record output, the reference page."""

from __future__ import annotations

import io
import os
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path

import click
import msgspec
import pytest
from click.shell_completion import ShellComplete
from hypothesis import given
from hypothesis import strategies as st

from quiver.cli import main, produce, quiver
from quiver.cli.consume import coloured_line, json_line, pretty_line, printable_line, raw_line
from quiver.cli.options import Start, StartType
from quiver.cli.output import format_bytes, format_count, printable
from quiver.cli.produce import read_files, read_lines, total_bytes
from quiver.cli.reference import render_manual
from quiver.cli.up import plan_nodes
from quiver.errors import TooLargeError
from quiver.model import Offset, PartitionId
from quiver.record import Record

MANUAL_PAGE = Path(__file__).parents[2] / "docs" / "operations" / "cli.md"
Output = pytest.CaptureFixture[str]


def stream(data: bytes) -> io.BufferedReader:
    return io.BufferedReader(io.BytesIO(data))


def lines_of(data: bytes) -> list[bytes]:
    return [line for lines in read_lines(stream(data), "test") for line in lines]


@given(st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=30), st.integers(1, 8))
def test_lines_end_at_line_feeds_for_every_block_size(lines: list[bytes], block_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(produce, "BLOCK_BYTES", block_bytes)
        assert lines_of(b"".join(line + b"\n" for line in lines)) == lines


def test_last_line_may_lack_its_line_feed_and_empty_lines_count() -> None:
    assert lines_of(b"a\n\nb\r\nc") == [b"a", b"", b"b\r", b"c"]
    assert lines_of(b"") == []
    assert lines_of(b"\n") == [b""]


def test_complete_lines_do_not_wait_for_more_input() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source, os.fdopen(writing, "wb", buffering=0) as sink:
        lines = read_lines(source, "pipe")
        sink.write(b"one\ntwo\nthr")
        assert next(lines) == [b"one", b"two"]
        sink.write(b"ee\n")
        assert next(lines) == [b"three"]


def test_line_longer_than_a_record_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce, "PAYLOAD_BYTES_MAX", 10)
    monkeypatch.setattr(produce, "BLOCK_BYTES", 4)
    assert lines_of(b"0123456789\n0123456789") == [b"0123456789"] * 2
    with pytest.raises(TooLargeError, match="line 2 of test"):
        lines_of(b"short\n" + b"x" * 12)


def test_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    Path(paths[0]).write_bytes(b"1\n2")
    Path(paths[1]).write_bytes(b"3\n")
    assert [line for lines in read_files(paths) for line in lines] == [b"1", b"2", b"3"]
    assert total_bytes(paths) == 5
    assert total_bytes([paths[0], "-"]) is None


@pytest.mark.parametrize(
    ("word", "start"),
    [
        ("earliest", Start(offset="earliest")),
        ("latest", Start(offset="latest")),
        ("42", Start(offset=42)),
        ("2026-01-31", Start(timestamp=datetime(2026, 1, 31, tzinfo=UTC))),
        ("2026-01-31T12:00:05.250", Start(timestamp=datetime(2026, 1, 31, 12, 0, 5, 250_000, tzinfo=UTC))),
        ("2026-01-31T12:00Z", Start(timestamp=datetime(2026, 1, 31, 12, tzinfo=UTC))),
    ],
)
def test_start_position_is_a_word_an_offset_or_a_time(word: str, start: Start) -> None:
    assert StartType().convert(word, None, None) == start


@pytest.mark.parametrize(("word", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86_400)])
def test_start_position_may_be_an_age(word: str, seconds: int) -> None:
    before = datetime.now(UTC)
    found = StartType().convert(word, None, None).timestamp
    assert found is not None
    assert before <= found + timedelta(seconds=seconds) <= datetime.now(UTC)


@pytest.mark.parametrize("word", ["yesterday", "-5", "15x", "", "2026-13-01", "99999999999999d"])
def test_invalid_start_position_is_refused(word: str, capsys: Output) -> None:
    assert main(["consume", "logs", "--from", word]) == 2
    assert "is none of: earliest, latest, an offset" in capsys.readouterr().err


def record(value: bytes | None, key: bytes | None = None) -> Record:
    return Record(
        Offset(7), 1_769_860_800_123, key, value, headers=(("h", b"\xff"),) if key else (), partition=PartitionId(2)
    )


def test_records_are_shown_as_bytes_as_text_and_as_json() -> None:
    assert raw_line(record(b"\x1b[31m\xff")) == b"\x1b[31m\xff\n"
    assert raw_line(record(None)) == b"\n"
    assert printable_line(record("grün\t\x1b[31m".encode())) == "grün\t\\x1b[31m\n".encode()
    assert pretty_line(record(b"v", b"k\n")) == b"2026-01-31T12:00:00.123Z  2:7  k\\n  v\n"
    assert msgspec.json.decode(json_line(record(b"v", b"\xfe"))) == {
        "partition": 2,
        "offset": 7,
        "timestamp": 1_769_860_800_123,
        "value": "v",
        "key": {"base64": "/g=="},
        "headers": {"h": {"base64": "/w=="}},
    }
    assert msgspec.json.decode(json_line(record(None)))["value"] is None
    assert click.unstyle(coloured_line(record(b"v", b"k")).decode()).encode() == pretty_line(record(b"v", b"k"))


@given(st.binary())
def test_control_characters_never_reach_a_terminal(value: bytes) -> None:
    assert printable(value).replace("\t", "").isprintable()


def test_amounts_are_easy_to_read() -> None:
    assert [format_count(count, "record") for count in (0, 1, 1_234_567)] == [
        "0 records",
        "1 record",
        "1,234,567 records",
    ]
    sizes = [format_bytes(size) for size in (0, 999, 1500, 5_200_000, 7e15)]
    assert sizes == ["0 B", "999 B", "1.5 kB", "5.2 MB", "7000.0 TB"]


def test_tables_are_not_written_to_a_terminal_and_parquet_is_not_followed(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    assert main(["consume", "logs", "--format", "parquet", "--follow", "--output", "x"]) == 2
    assert "use arrow" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["consume", "logs", "--format", "arrow"]) == 2
    assert "give --output" in capsys.readouterr().err


def test_reference_page_matches_the_commands() -> None:
    assert MANUAL_PAGE.read_text() == render_manual(quiver), "run `make docs`"


def test_reference_page_is_printed(capsys: Output) -> None:
    assert main(["cli", "docs"]) == 0
    assert capsys.readouterr().out == render_manual(quiver)


def test_reference_page_leaves_out_settings() -> None:
    manual = render_manual(quiver)
    assert "\n## quiver node\n" in manual
    assert "| `--log-durability" not in manual


@pytest.mark.parametrize(("shell", "expected"), [("bash", "complete "), ("zsh", "compdef"), ("fish", "complete ")])
def test_completion_is_printed_for_shells(shell: str, expected: str, capsys: Output) -> None:
    assert main(["cli", "completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_QUIVER_COMPLETE" in script
    assert expected in script


@pytest.mark.parametrize(("shell", "name"), [("bash", "quiver.bash"), ("zsh", "_quiver"), ("fish", "quiver.fish")])
def test_package_holds_the_completion_scripts(shell: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert (files("quiver.deploy") / "completions" / name).read_text() == printed
    assert main(["cli", "completion", shell]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "command",
    [("user", "create", "ann", "--new-password-file"), ("token", "revoke", "--in")],
    ids=["password", "token"],
)
def test_advice_about_a_secret_file_does_not_blame_another_flag(
    command: tuple[str, ...], tmp_path: Path, capsys: Output
) -> None:
    assert main([*command, str(tmp_path / "missing")]) == 2
    shown = capsys.readouterr().err
    assert "missing cannot be read" in shown
    assert "correct the file" in shown
    assert "--password-file" not in shown.replace("--new-password-file", "")
    assert "--token-file" not in shown


def test_commands_and_options_are_completed() -> None:
    completion = ShellComplete(quiver, {}, "quiver", "_QUIVER_COMPLETE")
    assert [item.value for item in completion.get_completions([], "con")] == [
        "consume",
        "context",
        "consumer",
        "config",
    ]
    assert [item.value for item in completion.get_completions(["consume", "logs"], "--fo")] == ["--follow", "--format"]


def test_help_lists_every_command_in_a_section(capsys: Output) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in quiver.list_commands(click.Context(quiver)):
        assert f"\n  {name} " in shown
    assert main(["no-such"]) == 2


@pytest.mark.parametrize(
    ("settings", "variables", "url"),
    [
        ((), {}, "http://127.0.0.1:8002"),
        (("--tls-is-enabled", "true"), {}, "https://127.0.0.1:8002"),
        ((), {"QUIVER_TLS__IS_ENABLED": "true"}, "https://127.0.0.1:8002"),
        (("--tls-is-enabled", "true", "--gateway-tls", "off"), {}, "http://127.0.0.1:8002"),
        (("--gateway-tls", "on"), {}, "https://127.0.0.1:8002"),
    ],
)
def test_up_shows_the_scheme_that_the_settings_choose(
    settings: tuple[str, ...], variables: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plan, *_ = plan_nodes(3, data="data", host="127.0.0.1", http_port=8002, wire_port=9002, settings=settings)
    assert plan.url == url


def test_up_shows_a_command_to_copy_without_passwords() -> None:
    settings = ("--metadata-db", "postgresql+psycopg://quiver:s3cret@db/quiver")
    plan, *_ = plan_nodes(1, data="data", host="127.0.0.1", http_port=8002, wire_port=9002, settings=settings)
    assert "--join 1@127.0.0.1:9002 " in plan.shown_command
    assert plan.shown_command.endswith("--metadata-db 'postgresql+psycopg://quiver:<hidden>@db/quiver'")
    assert "s3cret" in " ".join(plan.command)


LOCAL = {
    "backup verify",
    "cli",
    "completion",
    "config",
    "context",
    "deploy",
    "gateway",
    "history",
    "log",
    "metadata",
    "node",
    "recover",
    "security init",
    "security key add",
    "security key list",
    "security key rewrap",
    "security join",
    "security renew",
    "sim",
    "size",
    "up",
}
"""Commands, or groups of them, that work on files or on this machine, and not on a cluster that has to be named."""
NAMES_A_CLUSTER = (
    "--url",
    "--context",
    "--timeout",
    "--tls",
    "--ca-file",
    "--certificate-file",
    "--key-file",
    "--token-file",
)


def leaf_commands(command: click.Command = quiver, name: str = "") -> dict[str, click.Command]:
    if not isinstance(command, click.Group):
        return {name: command}
    found: dict[str, click.Command] = {}
    context = click.Context(command)
    for each in command.list_commands(context):
        inner = command.get_command(context, each)  # imported when it is asked for
        assert inner is not None
        found |= leaf_commands(inner, f"{name} {each}".strip())
    return found


@pytest.mark.parametrize("name", leaf_commands())
def test_every_command_names_its_cluster_in_the_same_way(name: str) -> None:
    flags = {flag for one in leaf_commands()[name].params for flag in one.opts}
    if not LOCAL & {name, name.split()[0]}:
        assert set(NAMES_A_CLUSTER) <= flags, "use `url_option`, or add the command to LOCAL if it needs no cluster"


def test_command_that_prints_json_asks_nothing(capsys: Output) -> None:
    assert main(["cluster", "upgrade", "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "add --yes, or --dry-run" in shown.err


def test_renewing_a_certificate_that_does_not_exist_names_it(tmp_path: Path, capsys: Output) -> None:
    assert main(["security", "renew", str(tmp_path / "nod.pem")]) == 2
    assert "nod.pem" in capsys.readouterr().err
