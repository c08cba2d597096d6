"""The listing and the dumps in `docs/protocol/log.md` are what the code writes.

After a change of the format: run this file, and put what the failures show into the document.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from log_world import DIRECTORY, FixedClock, control_batch, data_batch, open_log, wait_durable

from quiver.config import LogSettings
from quiver.model import Index, NodeId, Offset, Term
from quiver.storage import HardStateFile, SnapshotStore, StoredHardState, StoredSnapshot
from quiver.storage.frames import decode_footer, footer_bytes
from quiver.storage.hardstate import _SLOT
from quiver.testing import SimulatedDisk

DOCUMENT = Path(__file__).parents[3] / "docs" / "protocol" / "log.md"
NOW_MS = 1714564800000


async def example() -> SimulatedDisk:
    """Return the directory of the document: four entries in two segments, a hard state and a snapshot."""
    disk = SimulatedDisk()
    settings = LogSettings(segment_bytes_max=1024)
    log = open_log(disk, settings, clock=FixedClock(NOW_MS))
    entries = [
        control_batch(b"", index=1, offset=0, term=1, timestamp=NOW_MS),
        data_batch([b"x" * 700], index=2, offset=0, term=2, timestamp=NOW_MS),
        data_batch([b"hello"], index=3, offset=1, term=2, timestamp=NOW_MS + 5),
        data_batch([b"world"], index=4, offset=2, term=3, timestamp=NOW_MS + 9),
    ]
    for entry in entries:
        log.append([entry])
        await wait_durable(log, log.end_index)
    hard_state = HardStateFile(disk, DIRECTORY)
    hard_state.save(StoredHardState(term=Term(3), vote=NodeId(2), commit_index=Index(3), membership=b"members"))
    SnapshotStore(disk, DIRECTORY).save(
        StoredSnapshot(last_index=Index(2), last_term=Term(2), end_offset=Offset(1), state=b"state")
    )
    await log.close()
    return disk


def dump(data: bytes, first_position: int = 0) -> str:
    """Return `data` as sixteen bytes a line: position, hexadecimal, text."""
    lines = []
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{first_position + at:04x}  {part[:8].hex(' '):23}  {part[8:].hex(' '):23}  |{text}|")
    return "\n".join(lines)


def shown(part: str) -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert part in document, f"docs/protocol/log.md should say:\n{part}"


def file_of(disk: SimulatedDisk, name: str) -> bytes:
    return disk.read_file(f"{DIRECTORY}/{name}")


def test_the_listing_is_that_of_the_example() -> None:
    disk = asyncio.run(example())
    shown("\n".join(f"{len(disk.read_file(path)):6}  {path.rpartition('/')[2]}" for path in disk.paths()))


def test_the_dump_of_the_active_segment_is_that_of_the_example() -> None:
    disk = asyncio.run(example())
    shown(dump(file_of(disk, "00000000000000000003.log")))


def test_the_dump_of_the_footer_is_that_of_the_example() -> None:
    disk = asyncio.run(example())
    sealed = file_of(disk, "00000000000000000001.log")
    footer = sealed[-footer_bytes(sealed[-12:]) :]
    assert decode_footer(footer).data_end == len(sealed) - len(footer)
    shown(dump(footer, len(sealed) - len(footer)))


def test_the_dumps_of_hard_state_and_snapshot_are_those_of_the_example() -> None:
    disk = asyncio.run(example())
    slots = file_of(disk, "hardstate")
    assert slots[:4096] == slots[4096:]
    shown(dump(slots[: _SLOT.size + len(b"members")]))
    shown(dump(file_of(disk, "snapshot-00000000000000000002")))
