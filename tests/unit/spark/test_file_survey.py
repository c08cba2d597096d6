"""Which content of files is new: a log that is written, rotated and compressed at any time gives each line once."""

from __future__ import annotations

import gzip
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.spark.pipelines.file_survey import survey_files
from quiver.spark.pipelines.ingest_ledger import AssignedFile, IngestBatch, IngestState
from quiver.spark.pipelines.source_files import LineFields, find_files, read_records, scan_file

STEPS = ("write", "begin a line", "rotate", "copytruncate", "gzip", "zstd", "touch", "ingest", "ingest", "write")


class Service:
    """A service that writes `svc.log`, its rotation, and an ingest of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "svc.log"
        self.state = IngestState()
        self.written: Counter[bytes] = Counter()
        self.ingested: Counter[bytes] = Counter()
        self.begun = b""
        self.number = self.time_ns = 0
        self._open()

    def _open(self) -> None:
        self.log.write_bytes(b"")
        self._append(b"started\n")  # every log begins with the same line
        self.written[b"started"] += 1
        self.has_own_line = False

    def _append(self, content: bytes) -> None:
        with open(self.log, "ab") as file:
            file.write(content)
        self.touch(self.log)

    def touch(self, path: Path) -> None:
        self.time_ns += 1_000_000
        os.utime(path, ns=(self.time_ns, self.time_ns))

    def begin_line(self) -> None:
        if not self.begun:
            self.begun = b"line %d" % self.number
            self.number += 1
            self._append(self.begun)

    def write(self) -> None:
        self.begin_line()
        self._append(b" is whole\n")
        self.written[self.begun + b" is whole"] += 1
        self.begun, self.has_own_line = b"", True

    def rotate(self, *, is_copied: bool) -> None:
        if self.begun or not self.has_own_line:
            self.write()
        for path in sorted(self.folder.glob("svc.log.*"), key=lambda path: -int(path.name.split(".")[2])):
            number, *suffix = path.name.split(".")[2:]
            path.rename(self.folder / ".".join(("svc.log", str(int(number) + 1), *suffix)))
        if is_copied:
            shutil.copy(self.log, self.folder / "svc.log.1")
        else:
            self.log.rename(self.folder / "svc.log.1")
        self._open()

    def compress(self, suffix: str) -> None:
        for path in self.folder.glob("svc.log.?"):
            pack = gzip.compress if suffix == "gz" else zstandard.compress
            path.with_name(f"{path.name}.{suffix}").write_bytes(pack(path.read_bytes()))
            path.unlink()

    def ingest(self) -> None:
        paths, _ = find_files([str(self.folder)])
        survey = survey_files(paths, self.state, lambda paths, sizes: [scan_file(path, sizes) for path in paths])
        assert survey.problems == {}
        for file in survey.fresh:
            for columns in read_records(file, LineFields()):
                self.ingested.update(value or b"" for value in columns["value"].to_pylist())
        senders = (tuple(AssignedFile(file=file, partition=0) for file in survey.fresh),)
        batch = IngestBatch(number=self.state.batches, partitions=1, fields=LineFields(), senders=senders)
        self.state.add(batch)

    def step(self, name: str) -> None:
        match name:
            case "write":
                self.write()
            case "begin a line":
                self.begin_line()
            case "rotate" | "copytruncate":
                self.rotate(is_copied=name == "copytruncate")
            case "gzip" | "zstd":
                self.compress("gz" if name == "gzip" else "zst")
            case "touch":
                self.touch(self.log)
            case _:
                self.ingest()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=25))
def test_every_line_is_ingested_once_whatever_rotation_does(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    service = Service(tmp_path_factory.mktemp("logs"))
    for step in steps:
        service.step(step)
        assert service.ingested <= service.written
    service.write()
    service.ingest()
    assert service.ingested == service.written
