"""The command line: what it prints, where, and how it ends."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from quiver import __version__, errors
from quiver.cli import main, quiver
from quiver.cli.config import show_value
from quiver.cli.output import report_error
from quiver.clock import SystemClock
from quiver.config import LogSettings, all_settings
from quiver.errors import InvariantBroken, QuiverError
from quiver.model import Index, NodeId, Offset, ProducerId, Term
from quiver.record import Batch, BatchHeader, Compression, build_batch, build_control_batch, stamp
from quiver.record.header import encode_header
from quiver.storage import (
    HardStateFile,
    Log,
    SnapshotStore,
    StoredHardState,
    StoredSnapshot,
    SystemDisk,
    ThreadExecutor,
)

TIMESTAMP_MS = 1_769_860_800_123
FIRST = "00000000000000000001.log"


def batches() -> Iterator[bytes]:
    yield build_control_batch(b"no-op", timestamp=TIMESTAMP_MS)
    yield build_batch([b"plain", None, b"\xff\x00", b"two\nlines"], timestamp=TIMESTAMP_MS)
    yield build_batch(
        [b"x" * 500, b"keyed"],
        timestamp=TIMESTAMP_MS,
        keys=[None, b"k"],
        headers=[None, [("h", b"1")]],
        compression=Compression.ZSTD,
        producer_id=ProducerId(7),
        producer_epoch=2,
        base_sequence=40,
    )


async def write_log(directory: Path) -> None:
    executor = ThreadExecutor()
    settings = LogSettings(segment_bytes_max=1024)
    log = Log.open(str(directory), disk=SystemDisk(), executor=executor, clock=SystemClock(), settings=settings)
    for unstamped in (*batches(), *batches(), *batches()):
        stamped = stamp(
            unstamped,
            term=Term(3),
            index=log.end_index,
            base_offset=log.end_offset,
            append_timestamp=TIMESTAMP_MS,
        )
        log.append([Batch.decode(stamped)])
    await log.close()
    executor.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    asyncio.run(write_log(tmp_path / "log"))
    return tmp_path / "log"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def snapshot_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_verify_of_a_whole_log_ends_with_0_and_a_verdict(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot_of(directory)
    assert main(["log", "verify", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "segment state entries offsets terms batches records marks bytes torn bytes"
    assert lines[1].split()[:2] == [FIRST, "sealed"]
    assert lines[-2].split()[1] == "active"
    size_bytes = sum(map(len, before.values()))
    assert lines[-1] == f"whole: segments={len(before)} batches=9 records=18 bytes={size_bytes}"
    assert snapshot_of(directory) == before


@pytest.mark.parametrize(("columns", "is_drawn"), [("200", True), ("80", False)])
def test_verify_draws_a_table_at_a_terminal_that_is_wide_enough(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str, is_drawn: bool
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["log", "verify", str(directory)]) == 0
    out = capsys.readouterr().out
    assert ("───" in out) == is_drawn
    assert FIRST in out


def test_verify_prints_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", "verify", str(directory), "--json"]) == 0
    inspection = json.loads(capsys.readouterr().out)
    assert inspection["directory"] == str(directory)
    assert inspection["damage"] == []
    assert sum(segment["records"] for segment in inspection["segments"]) == 18


def test_verify_of_a_damaged_log_ends_with_1_names_the_place_and_changes_nothing(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(directory / FIRST, 150)
    before = snapshot_of(directory)
    assert main(["log", "verify", str(directory) + "/"]) == 1
    *_, damage, verdict = capsys.readouterr().out.splitlines()
    assert damage.startswith(f"damage: {FIRST}: bytes 64..")
    assert ", entries 1..2 at most: " in damage
    assert verdict.startswith("damaged: places=1 segments=")
    assert snapshot_of(directory) == before


def test_verify_shows_what_lies_beside_the_log(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = SystemDisk()
    HardStateFile(disk, str(directory)).save(StoredHardState(term=Term(3), vote=NodeId(2), commit_index=Index(4)))
    snapshot = StoredSnapshot(last_index=Index(2), last_term=Term(3), end_offset=Offset(4), state=b"s")
    SnapshotStore(disk, str(directory)).save(snapshot)
    (directory / "stray").touch()
    assert main(["log", "verify", str(directory)]) == 0
    out = capsys.readouterr().out
    assert "hard state: term 3, vote 2, commit index at least 4\n" in out
    assert "snapshot-00000000000000000002: up to entry 2, offset 4\n" in out
    assert "note: stray: not a file of Quiver\n" in out


def test_verify_finds_damage_in_files_without_entries(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "snapshot-00000000000000000009").write_bytes(b"rotten")
    assert main(["log", "verify", str(directory)]) == 1
    assert "damage: snapshot-00000000000000000009: bytes 0..6: " in capsys.readouterr().out


def test_verify_says_when_damage_hides_no_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def write() -> None:
        executor, flushed = ThreadExecutor(), asyncio.Event()
        log = Log.open(str(tmp_path), disk=SystemDisk(), executor=executor, clock=SystemClock(), settings=LogSettings())
        log.on_durable = lambda _: flushed.set()
        for _ in range(2):
            flushed.clear()
            batch = stamp(
                build_control_batch(b"", timestamp=1),
                term=Term(1),
                index=log.end_index,
                base_offset=Offset(0),
                append_timestamp=1,
            )
            log.append([Batch.decode(batch)])
            await flushed.wait()  # the second flush begins with a mark that covers the first
        await log.close()
        executor.close()

    asyncio.run(write())
    flip(tmp_path / FIRST, (tmp_path / FIRST).read_bytes().index(b"MRKQ") + 10)
    assert main(["log", "verify", str(tmp_path)]) == 1
    assert ", no entry: " in capsys.readouterr().out


def test_directory_that_cannot_be_understood_ends_with_1_and_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FIRST).write_bytes(b"rotten")
    assert main(["log", "verify", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error damaged: ")
    assert "what to do: restore the directory from another replica" in error


@pytest.mark.parametrize("command", ["verify", "dump"])
def test_directory_without_a_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.log").write_text("not a segment")
    assert main(["log", command, str(tmp_path)]) == 2
    assert f"error no_log: {tmp_path} holds no log" in capsys.readouterr().err


def test_logs_below_a_node_s_directory_are_found(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = directory.parent / "node"
    for number in (2, 3):
        shutil.copytree(directory, node / "groups" / str(number))
    assert main(["log", "verify", str(node)]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.endswith(":")] == [f"{node}/groups/2:", f"{node}/groups/3:"]
    assert shown.count("whole: ") == 2
    assert main(["log", "verify", f"{node}/", "--json"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)) == [f"{node}/groups/2", f"{node}/groups/3"]
    assert main(["log", "dump", str(node)]) == 2
    assert "holds 2 logs: name one of" in capsys.readouterr().err
    (node / "groups" / "3" / FIRST).write_bytes(b"rotten")
    assert main(["log", "verify", str(node)]) == 1


def test_missing_directory_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", "verify", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_disk_error_ends_with_4_and_names_the_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FIRST).symlink_to(tmp_path / "nowhere")
    assert main(["log", "verify", str(tmp_path)]) == 4
    error = capsys.readouterr().err
    assert error.startswith(f"error system_error: {tmp_path}/{FIRST}: No such file or directory")
    assert "Traceback" not in error


def test_dump_prints_a_line_for_each_frame(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", "dump", str(directory), "--limit", "4"]) == 0
    name, heading, control, mark, data, packed = capsys.readouterr().out.splitlines()
    assert name == FIRST
    assert " ".join(heading.split()) == "position kind entry term offsets records bytes codec producer timestamps"
    assert control.split()[:6] == ["64", "control", "1", "3", "0..0", "0"]
    assert mark.split()[1] == "mark"
    assert data.split()[1:6] == ["data", "2", "3", "0..4", "4"]
    assert packed.split()[7:] == ["zstd", "7:2:40", "2026-01-31T12:00:00.123Z..2026-01-31T12:00:00.123Z"]


def test_dump_shows_values_without_letting_them_act_on_the_terminal(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["log", "dump", str(directory), "--from", "2", "--limit", "3", "--values"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if "offset=" in line]
    assert [line.split("Z ", 1)[1] for line in lines] == [
        'value="plain"',
        "value=null",
        'value={"base64": "/wA="}',
        r'value="two\nlines"',
        f'value="{"x" * 500}"',
        'key="k" value="keyed" headers={"h": "1"}',
    ]


def test_dump_prints_json_lines(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", "dump", str(directory), "--json", "--values"]) == 0
    frames = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [frame["index"] for frame in frames if "index" in frame] == list(range(1, 10))
    assert {frame["kind"] for frame in frames} == {"control", "data", "mark"}
    frames = [frame for frame in frames if frame["kind"] == "data"]
    assert frames[0]["records"][1] == {"offset": 1, "timestamp": TIMESTAMP_MS, "value": None}
    assert (frames[0]["producer_id"], frames[1]["producer_id"]) == (None, 7)


def test_dump_shows_marks_and_bytes_that_are_no_frame(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = sorted(directory.iterdir())[-1]
    last.write_bytes(last.read_bytes() + b"torn")
    assert main(["log", "dump", str(directory), "--values"]) == 0
    *_, mark, torn = capsys.readouterr().out.splitlines()
    assert "on disk up to byte" in mark
    assert torn.split()[1] == "bad"
    assert torn.endswith("4 bytes are too few for a batch header")


def test_dump_goes_on_where_records_cannot_be_decoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(write_undecodable(tmp_path))
    assert main(["log", "dump", str(tmp_path), "--values"]) == 0
    assert "records cannot be read: " in capsys.readouterr().out


async def write_undecodable(directory: Path) -> None:
    """Store a batch whose checksums hold and whose columns do not add up."""
    payload = b"\xff" * 12
    header = BatchHeader(record_count=1, payload_bytes=12, raw_bytes=12, first_timestamp=1 << 60, max_timestamp=1 << 60)
    executor = ThreadExecutor()
    log = Log.open(str(directory), disk=SystemDisk(), executor=executor, clock=SystemClock(), settings=LogSettings())
    built = encode_header(header, payload) + payload
    log.append(
        [Batch.decode(stamp(built, term=Term(1), index=Index(1), base_offset=Offset(0), append_timestamp=1 << 60))]
    )
    await log.close()
    executor.close()


@pytest.mark.parametrize("options", [["--limit", "1"], ["--values"]], ids=["less than a buffer", "more than a buffer"])
def test_closed_pipe_ends_the_command_quietly(directory: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "quiver", "log", "dump", str(directory), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_module_runs_as_the_command_does() -> None:
    run = subprocess.run([sys.executable, "-m", "quiver", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"quiver, version {__version__}\n"


def test_a_node_loads_nothing_that_only_other_commands_need() -> None:
    """What it does not import it need not wait for at its start."""
    loaded = "import sys; print([name for name in sys.modules if name.startswith(('quiver.testing', 'rich'))])"
    code = f"from quiver.cli import main; main(['node', '--help']); {loaded}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def commands(group: click.Group, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield prefix, group
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*prefix, name))
        else:
            yield (*prefix, name), command


@pytest.mark.parametrize("path", [path for path, _ in commands(quiver)])
def test_every_help_has_an_example(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*path, "--help"]) == 0
    _, _, shown = capsys.readouterr().out.rpartition("Example")
    assert f"quiver {' '.join(path)}" in shown


def test_every_read_can_print_json() -> None:
    """What `docs`, `gateway` and `completion` print are documents; others run until stopped, or change something."""
    readers = {path: command for path, command in commands(quiver) if not isinstance(command, click.Group)}
    documents = ("docs", "openapi", "completion", "man")
    changes = ("create", "delete", "restore", "add-partitions", "configure", "drain", "rebalance", "reset", "forget")
    access = ("init", "renew", "wait", "join", "join-token", "grant", "revoke", "disable", "password", "rewrap", "set")
    others = {*documents, *changes, *access, "add", "use", "remove", "release", "node", "up", "produce"}
    others |= {"purge", "requeue", "copy", "work"}
    readers = {path: command for path, command in readers.items() if path[-1] not in others}
    readers.pop(("deploy", "show"))  # a document, too
    without = [path for path, command in readers.items() if "--json" not in {o for p in command.params for o in p.opts}]
    assert without == []


def all_errors() -> list[type[QuiverError]]:
    found = [QuiverError]
    for kind in found:
        found.extend(kind.__subclasses__())
    return [kind for kind in found if kind.__module__ == errors.__name__]


EXITS = {
    "error": 70,
    "bad_request": 2,
    "decode_failed": 2,
    "unknown_version": 2,
    "not_found": 2,
    "conflict": 2,
    "out_of_sequence": 2,
    "fenced": 2,
    "out_of_range": 2,
    "not_allowed": 2,
    "too_large": 2,
    "unavailable": 3,
    "overloaded": 3,
    "not_leader": 3,
    "disk_full": 3,
    "outcome_unknown": 5,
    "storage_failed": 4,
    "log_closed": 4,
    "log_failed": 4,
    "damaged": 1,
    "trimmed": 4,
    "bad_config": 2,
}


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.code)
def test_error_is_told_by_its_code_and_what_to_do(kind: type[QuiverError], capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(kind("so it went")) == EXITS[kind.code]
    error, advice = capsys.readouterr().err.splitlines()
    assert error == f"error {kind.code}: so it went"
    assert advice.startswith("  what to do: ")


def test_newer_version_is_answered_with_an_upgrade(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(errors.UnknownVersionError("entry of version 9")) == 2
    assert "upgrade" in capsys.readouterr().err


def test_system_error_without_a_path_is_told() -> None:
    assert report_error(OSError(28, "No space left on device")) == 4


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (InvariantBroken("invariant broken: x"), "error defect: invariant broken: x\n"),
        (ZeroDivisionError("by zero"), "error defect: ZeroDivisionError: by zero ("),
        (OSError("odd"), "error system_error: OSError: odd ("),
    ],
)
def test_defect_is_told_in_one_line(
    error: BaseException, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setitem(quiver.commands, "fail", click.Command("fail", callback=fail))
    assert main(["fail"]) == (4 if isinstance(error, OSError) else 70)
    assert capsys.readouterr().err.startswith(shown)


def test_interrupted_command_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(quiver.commands, "interrupt", click.Command("interrupt", callback=interrupt))
    assert main(["interrupt"]) == 130


def test_config_show_tells_what_is_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "quiver.toml"
    file.write_text("[log]\nflush_interval_ms = 7\n")
    assert main(["config", "show", "--settings-file", str(file), "--log-durability", "interval"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["log.durability", "interval", "fsync"] in rows
    assert ["log.flush_interval_ms", "7", "50"] in rows


def test_config_show_reads_the_environment_and_prints_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIVER_LOGGING__LEVEL", "error")
    assert main(["config", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["logging"] == {"level": "error", "format": "text"}


def test_every_setting_has_a_flag_that_takes_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    given = [part for setting in all_settings() for part in (setting.flag, show_value(setting.default))]
    assert main(["config", "show", *given]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(rows) == len(given) // 2
    assert all(value == default for _, value, default in rows)


def test_bad_setting_ends_with_2_and_names_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--log-segment-bytes-max", "3"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error bad_config: ")
    assert "log.segment_bytes_max" in error


def test_unknown_flag_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--log-nothing", "3"]) == 2
    assert "No such option" in capsys.readouterr().err


def test_config_docs_prints_the_reference_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "docs"]) == 0
    assert capsys.readouterr().out.startswith("# Configuration\n")
