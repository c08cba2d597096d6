"""Data on disk: the log of a partition, its hard state and its snapshots. The only code that opens data files.

`Log` is the way in; `HardStateFile` and `SnapshotStore` keep the small things beside it. All file access
goes through the `Disk` seam and all blocking work through the `Executor` seam, so that the same code runs
on real disks and under simulation.
"""

from quiver.storage.data_directory import DirectoryLock, NodeIdentity, claim_directory, save_identity
from quiver.storage.disk import ROOM_RETRY_S, Disk, DiskSpace, File, SystemDisk, is_out_of_space
from quiver.storage.executor import Executor, Lane, LaneStatus, ThreadExecutor
from quiver.storage.groups import GroupFolders
from quiver.storage.hardstate import HardStateFile, StoredHardState
from quiver.storage.log import Log, LogStatus
from quiver.storage.reader import UNBOUNDED, LargeBatch
from quiver.storage.recovery import Damage
from quiver.storage.snapshots import SnapshotStore, StoredSnapshot, decode_snapshot
from quiver.storage.tail import TailBudget
from quiver.storage.writer import LogTimings

__all__ = [
    "ROOM_RETRY_S",
    "UNBOUNDED",
    "Damage",
    "DirectoryLock",
    "Disk",
    "DiskSpace",
    "Executor",
    "File",
    "GroupFolders",
    "HardStateFile",
    "Lane",
    "LaneStatus",
    "LargeBatch",
    "Log",
    "LogStatus",
    "LogTimings",
    "NodeIdentity",
    "SnapshotStore",
    "StoredHardState",
    "StoredSnapshot",
    "SystemDisk",
    "TailBudget",
    "ThreadExecutor",
    "claim_directory",
    "decode_snapshot",
    "is_out_of_space",
    "save_identity",
]
