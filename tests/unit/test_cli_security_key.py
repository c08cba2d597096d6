"""`quiver security key`, and `quiver log` on encrypted logs."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from quiver.cli import main
from quiver.clock import SystemClock
from quiver.config import LogSettings
from quiver.model import Index, Offset, Term
from quiver.record import Batch, build_batch, stamp
from quiver.security.key_ring import load_key_ring
from quiver.storage import Log, SystemDisk, ThreadExecutor
from quiver.storage.data_key import open_cipher


def make_log(directory: Path, key_file: Path) -> None:
    keys = load_key_ring(file=str(key_file), command="")
    cipher = open_cipher(SystemDisk(), str(directory), keys, is_encrypted=True)

    async def write() -> None:
        executor = ThreadExecutor()
        log = Log.open(
            str(directory),
            disk=SystemDisk(),
            executor=executor,
            clock=SystemClock(),
            settings=LogSettings(),
            cipher=cipher,
        )
        built = build_batch([b"hidden value"], timestamp=1)
        log.append(
            [Batch.decode(stamp(built, term=Term(1), index=Index(1), base_offset=Offset(0), append_timestamp=1))]
        )
        await log.close()
        executor.close()

    asyncio.run(write())


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    assert main(["security", "key", "add", str(path), "--name", "old"]) == 0
    return path


def test_key_file_is_made_for_its_owner_alone_and_grows_at_the_front(
    key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert main(["security", "key", "add", str(key_file), "--name", "new"]) == 0
    assert key_file.stat().st_mode & 0o777 == 0o600
    keys = load_key_ring(file=str(key_file), command="")
    assert keys is not None
    assert keys.names == ("new", "old")
    before = key_file.read_text()
    assert main(["security", "key", "add", str(key_file), "--name", "old"]) != 0
    assert key_file.read_text() == before
    shown = capsys.readouterr()
    assert not any(line.split()[1] in shown.out + shown.err for line in before.splitlines())


def test_keys_are_replaced_by_adding_wrapping_and_removing(
    tmp_path: Path, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, log = tmp_path / "node-1", tmp_path / "node-1" / "groups" / "groups" / "7"
    make_log(log, key_file)
    assert main(["security", "key", "add", str(key_file), "--name", "new"]) == 0
    capsys.readouterr()
    assert main(["security", "key", "list", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"old": 1}
    assert main(["security", "key", "rewrap", str(data), "--encryption-key-file", str(key_file)]) == 0
    assert "1 of 1 data keys" in capsys.readouterr().out
    assert main(["security", "key", "list", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"new": 1}
    key_file.write_text(key_file.read_text().splitlines()[0] + "\n")
    assert main(["log", "dump", str(log), "--values", "--encryption-key-file", str(key_file)]) == 0
    assert "hidden value" in capsys.readouterr().out


def test_files_of_another_user_are_not_replaced(
    tmp_path: Path, key_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "node-1"
    make_log(data / "groups" / "groups" / "7", key_file)
    assert main(["security", "key", "add", str(key_file), "--name", "new"]) == 0
    before, owner = key_file.read_text(), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert main(["security", "key", "add", str(key_file), "--name", "newer"]) != 0
    assert main(["security", "key", "rewrap", str(data), "--encryption-key-file", str(key_file)]) != 0
    assert capsys.readouterr().err.count(f"sudo -u '#{owner}'") == 2
    assert key_file.read_text() == before
    assert main(["security", "key", "list", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"old": 1}


def test_name_of_a_key_file_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, str]] = []
    file = tmp_path / "keys"
    monkeypatch.setattr(SystemDisk, "sync_directory", lambda _, path: synced.append((path, file.read_text())))
    contents = []
    for name in ("old", "new"):
        assert main(["security", "key", "add", str(file), "--name", name]) == 0
        contents.append(file.read_text())
    assert synced == [(str(tmp_path), text) for text in contents]


def test_log_commands_say_what_they_need(tmp_path: Path, key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_log(tmp_path / "7", key_file)
    assert main(["log", "dump", str(tmp_path / "7"), "--values"]) == 0
    shown = capsys.readouterr().out
    assert "hidden value" not in shown
    assert "the entry is encrypted: give the node's --encryption-key-file" in shown
    assert main(["log", "verify", str(tmp_path / "7")]) == 0
    assert "the log is encrypted" in capsys.readouterr().out
    assert main(["log", "verify", str(tmp_path / "7"), "--encryption-key-file", str(key_file)]) == 0
    other = tmp_path / "other"
    assert main(["security", "key", "add", str(other), "--name", "other"]) == 0
    assert main(["log", "verify", str(tmp_path / "7"), "--encryption-key-file", str(other)]) != 0
    shown = capsys.readouterr().err
    assert "by the key 'old', and this node has only other" in shown
    assert "give the key: nodes have encryption.key_file" in shown


def test_directory_without_replicas_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["security", "key", "list", str(tmp_path)]) != 0
    assert "name a node's --data directory" in capsys.readouterr().err
