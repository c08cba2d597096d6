"""The folders of a node's replicas: joined before present, left as a whole, understood after a crash anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from quiver.model import GroupId, NodeId
from quiver.raft import Configuration
from quiver.replication.member_files import write_new_files
from quiver.storage import Disk, GroupFolders, HardStateFile, StoredHardState, SystemDisk
from quiver.storage.recovery import recover
from quiver.testing import PowerLoss, SimulatedDisk
from quiver.testing.disk_faults import Moment

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
    HardStateFile(disk, folders.path(group)).save(StoredHardState())


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


def fill(disk: Disk) -> Callable[[str], None]:
    def write(directory: str) -> None:
        write_new_files(disk, directory, bootstrap=Configuration(voters=(NodeId(1),)), now_ms=1)

    return write


def test_many_new_members_are_made_with_the_syncs_of_one() -> None:
    counts = []
    for groups in ((GROUP,), tuple(GroupId(number) for number in range(100, 150))):
        disk = SimulatedDisk(keep_journal=True)
        folders = prepared(disk, "/data")
        assert disk.journal is not None
        disk.journal.clear()
        assert folders.make(dict.fromkeys(groups, fill(disk))) == set(groups)
        counts.append(sum(kind in ("sync", "sync_directory") for kind, _ in disk.journal))
        disk.crash()
        assert folders.present() == folders.joined() == set(groups)
    assert counts[0] == counts[1] <= 3


def test_group_with_a_folder_is_not_made_again(folders: GroupFolders) -> None:
    disk = folders._disk
    make_member(disk, folders, GROUP)
    assert folders.make({GROUP: fill(disk), OTHER: fill(disk)}) == {OTHER}
    assert folders.joined() == {OTHER}
    assert folders.make({GROUP: fill(disk)}) == frozenset()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_power_loss_while_members_are_made_leaves_whole_members_or_none(moment: Moment, seed: int) -> None:
    for operations in range(1, OPERATIONS_MAX):
        disk = SimulatedDisk()
        folders = prepared(disk, "/data")
        disk.crash_after(operations, moment=moment)
        try:
            folders.make({GROUP: fill(disk), OTHER: fill(disk)})
        except PowerLoss:
            disk.crash(Random(seed))
        else:
            return
        folders.prepare()
        assert folders.joined() <= folders.present()
        assert not [name for name in disk.names("/data/groups") if not name.isdecimal()]
        for group in folders.present():
            assert HardStateFile(disk, folders.path(group)).load() is not None
            assert len(recover(disk, folders.path(group), index_interval_bytes=4096).segments) == 1
        folders.make({GROUP: fill(disk), OTHER: fill(disk)})
    raise AssertionError("the work has more operations than the test tries")
