"""Find out which content of files is new: files, or parts of files, that were not ingested yet.

A file *continues* ingested content if its own content starts with it: a file that has grown, also if it was renamed,
copied or compressed since. Under its old path it needs no other evidence. Under another path, many files may start with
the same few lines: there it must also be the same file (inode), a rotation by its name (`app.log`, `app.log.2.gz`), or
share at least `SHARED_BYTES_MIN`. Content is continued once only, and the best evidence wins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from quiver.errors import ConflictError
from quiver.spark.pipelines.ingest_ledger import AssignedFile, IngestBatch, IngestState
from quiver.spark.pipelines.source_files import FileScan, SourceFile

SHARED_BYTES_MIN: Final = 1024
"""Content that identifies a file under any name."""
_ROTATION: Final = re.compile(r"(?:[.-]\d+)*(?:\.(?:gz|zst|zstd))?$")

Scanner = Callable[[Sequence[str], Sequence[int]], list[FileScan]]
"""Scans files; computes digests of prefixes of the given sizes."""


class FileSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """The files to ingest, and the files that are skipped."""

    fresh: list[SourceFile] = []
    known_count: int = 0
    same_as: dict[str, str] = {}
    """Files with the same content as another one, and that other path."""
    incomplete_count: int = 0
    """Files whose last line has no line feed yet; it is left for the next run."""
    problems: dict[str, str] = {}
    """Files that cannot be read, and the reason."""

    @property
    def size_bytes(self) -> int:
        """Return the number of new bytes."""
        return sum(file.new_bytes for file in self.fresh)

    def facts(self) -> dict[str, object]:
        """Return it as fields of the JSON result."""
        return {
            "files": len(self.fresh),
            "bytes": self.size_bytes,
            "files_known": self.known_count,
            "files_same": self.same_as,
            "files_incomplete": self.incomplete_count,
            "problems": self.problems,
        }


def survey_files(
    paths: Iterable[str], state: IngestState, look: Scanner, *, is_final: bool = False, problems: Mapping[str, str] = {}
) -> FileSurvey:
    """Find new and grown files; scan only files whose size or modification time changed."""
    changed, known_count = [], 0
    for path in paths:
        known = state.by_path.get(path)
        if known is not None and is_in_place(known) and (known.is_at_end or not is_final):
            known_count += 1
        else:
            changed.append(path)
    scanned = set(changed)
    lost = [known for known in state.contents.values() if known.path in scanned or not is_in_place(known)]
    scans = look(changed, [known.content_end for known in lost if known.content_end is not None])
    found = [scan for scan in scans if not scan.problem and scan.file.size_bytes]
    origins = find_origins(found, lost, state)
    fresh: list[SourceFile] = []
    same_as: dict[str, str] = {}
    unreadable = dict(problems) | {scan.file.path: scan.problem for scan in scans if scan.problem}
    digests = dict(state.digests)
    for scan in found:
        file, origin = scan.file, origins.get(scan.file.path)
        if origin is not None and is_all_of(scan, origin):
            known_count += origin.path == file.path
            same_as |= {file.path: origin.path} if origin.path != file.path else {}
        elif file.digest in digests or scan.whole_digest in digests:
            same_as[file.path] = digests.get(file.digest) or digests[scan.whole_digest]
        elif origin is not None and file.format == "parquet":
            unreadable[file.path] = "it has grown since it was ingested; only text files can be resumed"
        elif file.content_end:
            digests[file.digest] = file.path
            fresh.append(continued(file, origin))
    return FileSurvey(
        fresh=fresh,
        known_count=known_count,
        same_as=same_as,
        incomplete_count=sum(not scan.file.is_at_end for scan in found),
        problems=unreadable,
    )


def is_in_place(known: SourceFile) -> bool:
    """Return whether a file has the size and modification time that it had when it was ingested."""
    try:
        status = os.stat(known.path)
    except OSError:
        return False
    is_same_file = known.inode in (0, status.st_ino)
    return is_same_file and (known.size_bytes, known.mtime_ns) == (status.st_size, status.st_mtime_ns)


def find_origins(found: Sequence[FileScan], lost: Sequence[SourceFile], state: IngestState) -> dict[str, SourceFile]:
    """Return the ingested content that each file continues, by the file's path; each content for one file only."""
    left = sorted(lost, key=lambda known: -(known.content_end or 0))
    origins: dict[str, SourceFile] = {}

    def claim(scans: Iterable[FileScan], is_evidence: Callable[[SourceFile, SourceFile], bool]) -> None:
        for scan in scans:
            if scan.file.path not in origins:
                known = next((one for one in left if is_evidence(scan.file, one) and scan.starts_with(one)), None)
                if known is not None:
                    origins[scan.file.path] = known
                    left.remove(known)

    claim(found, lambda file, known: file.digest == known.digest)
    grown = [scan for scan in found if scan.file.digest not in state.digests]
    claim(grown, _is_same_file)
    claim(grown, lambda file, known: state.by_path.get(file.path) == known)
    claim(grown, _is_rotation)
    return origins


def _is_same_file(file: SourceFile, known: SourceFile) -> bool:
    return bool(known.inode) and file.inode == known.inode


def _is_rotation(file: SourceFile, known: SourceFile) -> bool:
    is_long = (known.content_end or 0) >= SHARED_BYTES_MIN
    return file.format == known.format and (is_long or _stem(file.path) == _stem(known.path))


def _stem(path: str) -> str:
    """Return a path without what rotation adds to names: numbers, dates, the suffix of a compression."""
    return _ROTATION.sub("", path)


def is_all_of(scan: FileScan, known: SourceFile) -> bool:
    """Return whether a file has nothing after the ingested content, except an incomplete line."""
    return known.content_end is None or known.content_end >= (scan.file.content_end or 0)


def continued(file: SourceFile, origin: SourceFile | None) -> SourceFile:
    """Return a file whose new content begins after the content that was ingested before."""
    if origin is None:
        return file
    return msgspec.structs.replace(file, first_byte=origin.content_end, continues=origin.digest)


def locate_batch(batch: IngestBatch, paths: Iterable[str], look: Scanner) -> IngestBatch:
    """Return an interrupted batch with the paths under which its content is now: files may have been rotated since.

    Raises:
        ConflictError: the content of a file is gone (`file_changed`).
    """
    assigned = [one for sender in batch.senders for one in sender]
    sizes = [one.file.content_end for one in assigned if one.file.content_end is not None]
    here = {scan.file.path: scan for scan in look(sorted({one.file.path for one in assigned}), sizes)}
    places = {one.file.path: here[one.file.path].file for one in assigned}
    gone = [one for one in assigned if not here[one.file.path].starts_with(one.file)]
    others = look(list(paths), sizes) if gone else []
    for one in gone:
        place = next((scan.file for scan in others if scan.starts_with(one.file)), None)
        if place is None:
            message = f"{one.file.path} changed while its batch was partly ingested, so the batch cannot be resumed"
            raise ConflictError(f"{message}: restore the file, or ingest under another name", code="file_changed")
        places[one.file.path] = place
    return msgspec.structs.replace(
        batch, senders=tuple(tuple(_at(one, places) for one in sender) for sender in batch.senders)
    )


def _at(assigned: AssignedFile, places: Mapping[str, SourceFile]) -> AssignedFile:
    place = places[assigned.file.path]
    file = msgspec.structs.replace(assigned.file, path=place.path, inode=place.inode)
    return msgspec.structs.replace(assigned, file=file)
