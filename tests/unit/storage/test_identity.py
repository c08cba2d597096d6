"""A data directory belongs to one node of one cluster, and says so to every other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from quiver.errors import ConfigError, DamageError
from quiver.model import NodeId
from quiver.storage import DirectoryLock, NodeIdentity, SystemDisk, claim_directory, save_identity
from quiver.storage.data_directory import IDENTITY_NAME, load_identity


def claim(directory: Path, *, node: int = 1, cluster: str = "logs", fresh: str = "a1") -> NodeIdentity:
    return claim_directory(SystemDisk(), str(directory), node=NodeId(node), cluster=cluster, fresh=fresh)


def test_unclaimed_directory_becomes_the_nodes_own(tmp_path: Path) -> None:
    first = claim(tmp_path / "new", fresh="a1")
    assert first == NodeIdentity(node=NodeId(1), cluster="logs", identity="a1")
    assert claim(tmp_path / "new", fresh="b2") == first


def test_directory_refuses_another_node_and_another_cluster(tmp_path: Path) -> None:
    first = claim(tmp_path)
    with pytest.raises(ConfigError, match="belongs to node 1, not to node 2"):
        claim(tmp_path, node=2)
    with pytest.raises(ConfigError, match="belongs to cluster 'logs'"):
        claim(tmp_path, cluster="other")
    assert claim(tmp_path) == first


def test_identity_that_was_saved_is_found(tmp_path: Path) -> None:
    assert load_identity(SystemDisk(), str(tmp_path)) is None
    identity = NodeIdentity(node=NodeId(3), cluster="logs", identity="c3", is_member=True)
    save_identity(SystemDisk(), str(tmp_path), identity)
    assert load_identity(SystemDisk(), str(tmp_path)) == identity


def test_save_that_a_crash_interrupted_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / f"{IDENTITY_NAME}.new").write_text("{")
    assert claim(tmp_path) == claim(tmp_path)


def test_identity_that_cannot_be_read_is_damage_and_not_a_new_beginning(tmp_path: Path) -> None:
    (tmp_path / IDENTITY_NAME).write_text("{}")
    with pytest.raises(DamageError, match="the owner of this data is unknown"):
        claim(tmp_path)


def test_directory_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / IDENTITY_NAME).write_text('{"version": 3, "shape": "round"}')
    with pytest.raises(ConfigError, match="newer than this program"):
        claim(tmp_path)


def test_directory_of_a_higher_feature_level_names_the_program_to_install(tmp_path: Path) -> None:
    (tmp_path / IDENTITY_NAME).write_text('{"version": 2, "level": 7, "program": "9.1.0", "shape": "round"}')
    with pytest.raises(
        ConfigError, match=r"feature level 7, but this program knows levels 1 to .*quiver 9.1.0 or newer"
    ):
        claim(tmp_path)


def test_identity_of_level_1_has_the_fields_that_its_programs_know(tmp_path: Path) -> None:
    claimed = claim(tmp_path)
    assert json.loads((tmp_path / IDENTITY_NAME).read_text()).keys() == {
        "node",
        "cluster",
        "identity",
        "is_member",
        "version",
    }
    raised = msgspec.structs.replace(claimed, level=2, program="1.0")
    save_identity(SystemDisk(), str(tmp_path), raised)
    assert json.loads((tmp_path / IDENTITY_NAME).read_text())["version"] == 2
    assert claim(tmp_path) == msgspec.structs.replace(raised, version=2)


def test_directory_is_one_processs_at_a_time(tmp_path: Path) -> None:
    program = "import sys; from quiver.storage import DirectoryLock\nwith DirectoryLock(sys.argv[1]): pass"
    with DirectoryLock(str(tmp_path)):
        other = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False)
        assert f"in use by another process (pid {os.getpid()})" in other.stderr
    assert subprocess.run([sys.executable, "-c", program, tmp_path], check=False).returncode == 0


def test_holder_that_wrote_nothing_is_unknown(tmp_path: Path) -> None:
    with DirectoryLock(str(tmp_path)):
        (tmp_path / "lock").write_text("")
        with pytest.raises(ConfigError, match="pid unknown"), DirectoryLock(str(tmp_path)):
            pass
