"""A data directory belongs to one node of one cluster, and says so to every other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
    (tmp_path / IDENTITY_NAME).write_text('{"version": 2, "shape": "round"}')
    with pytest.raises(ConfigError, match="newer than this program"):
        claim(tmp_path)


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
