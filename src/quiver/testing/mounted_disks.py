"""Several simulated disks in one file system, each at a mount point, as an operator's machine sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quiver.storage import Disk, File


class MountedDisks:
    """Implements storage's `Disk` seam: a path belongs to the disk at its first component, such as `/node-3`."""

    def __init__(self, disks: Mapping[str, Disk]) -> None:
        self._disks = disks
        """By mount point, such as `/node-3`."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file for reading and writing; with `create`, create an empty one, which must not exist."""
        disk, inner = self._find(path)
        return disk.open(inner, create=create)

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists."""
        disk, inner = self._find(path)
        return disk.exists(inner)

    def names(self, directory: str) -> list[str]:
        """Return the names in a directory, sorted."""
        disk, inner = self._find(directory)
        return disk.names(inner)

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents; no error if it exists."""
        disk, inner = self._find(path)
        disk.make_directory(inner)

    def rename(self, source: str, target: str) -> None:
        """Rename a file or directory on one disk, atomically."""
        (disk, inner), (other, inner_target) = self._find(source), self._find(target)
        if disk is not other:
            raise OSError(f"{source} and {target} are on different disks")
        disk.rename(inner, inner_target)

    def remove(self, path: str) -> None:
        """Remove a file."""
        disk, inner = self._find(path)
        disk.remove(inner)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        disk, inner = self._find(path)
        disk.remove_directory(inner)

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        disk, inner = self._find(path)
        disk.sync_directory(inner)

    def sync_folders(self, paths: Sequence[str]) -> None:
        """Make directories of one disk and their files durable."""
        found = [self._find(path) for path in paths]
        found[0][0].sync_folders([inner for _, inner in found])

    def free_bytes(self, path: str) -> int:
        """Return the free bytes of the disk that contains a directory."""
        disk, inner = self._find(path)
        return disk.free_bytes(inner)

    def _find(self, path: str) -> tuple[Disk, str]:
        _, mount, inner = path.split("/", 2)
        disk = self._disks.get(f"/{mount}")
        if disk is None:
            raise FileNotFoundError(path)
        return disk, f"/{inner}"
