"""The folders of a node's replicas: joined before present, left as a whole, understood after a crash anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiver.model import GroupId
from quiver.storage import Disk, GroupFolders, HardStateFile, StoredHardState, SystemDisk
from quiver.testing import PowerLoss, SimulatedDisk

GROUP, OTHER = GroupId(7), GroupId(8)
OPERATIONS_MAX = 100


@pytest.fixture(params=["simulated", "system"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> GroupFolders:
    if request.param == "system":
        return prepared(SystemDisk(), str(tmp_path / "data"))
    return prepared(SimulatedDisk(), "/data")


def prepared(disk: Disk, directory: str) -> GroupFolders:
    folders = GroupFolders(disk, directory)
    folders.prepare()
    return folders


def make_member(disk: Disk, folders: GroupFolders, group: GroupId) -> None:
    disk.make_directory(folders.path(group))
    file = HardStateFile(disk, folders.path(group))
    file.save(StoredHardState())
    file.close()


def test_a_group_is_joined_until_it_is_left(folders: GroupFolders) -> None:
    folders.join(GROUP)
    folders.join(GROUP)
    folders.join(OTHER)
    assert folders.joined() == {GROUP, OTHER}
    folders.leave(GROUP)
    assert folders.joined() == {OTHER}
    folders.prepare()
    assert folders.joined() == {OTHER}


def test_a_folder_without_hard_state_is_no_member(tmp_path: Path) -> None:
    disk = SystemDisk()
    folders = prepared(disk, str(tmp_path))
    disk.make_directory(folders.path(OTHER))
    make_member(disk, folders, GROUP)
    (tmp_path / "groups" / "lost+found").mkdir()
    assert folders.present() == {GROUP}


def test_group_that_is_set_aside_keeps_its_files_and_is_no_member(tmp_path: Path) -> None:
    folders = prepared(SystemDisk(), str(tmp_path))
    make_member(SystemDisk(), folders, GROUP)
    folders.join(GROUP)
    for _ in range(2):
        folders.set_aside(GROUP)
        assert (folders.present(), folders.joined()) == (frozenset(), frozenset())
        assert list((tmp_path / "groups" / "7.unknown").iterdir())


def test_leaving_removes_every_file(tmp_path: Path) -> None:
    folders = prepared(SystemDisk(), str(tmp_path))
    make_member(SystemDisk(), folders, GROUP)
    folders.join(GROUP)
    folders.leave(GROUP)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not folders.present()


@pytest.mark.parametrize("operations", range(1, OPERATIONS_MAX))
def test_power_loss_while_leaving_never_leaves_the_note_without_the_files(operations: int) -> None:
    disk = SimulatedDisk()
    folders = prepared(disk, "/data")
    make_member(disk, folders, GROUP)
    disk.sync_all()
    folders.join(GROUP)
    disk.crash_after(operations)
    try:
        folders.leave(GROUP)
    except PowerLoss:
        disk.crash()
    else:
        disk.restart()
        assert not folders.present()
    folders.prepare()
    assert folders.joined() <= folders.present()
    assert not disk.names("/data/trash")
    folders.leave(GROUP)
    assert not folders.present()
    assert not folders.joined()


def test_a_note_outlives_power_loss() -> None:
    disk = SimulatedDisk()
    folders = prepared(disk, "/data")
    folders.join(GROUP)
    disk.crash()
    assert folders.joined() == {GROUP}
