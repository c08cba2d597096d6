"""Measure batches: ``python benches/bench_record.py``.

The batch is 10,000 values of 100 bytes. The last few results are kept alive, as in a producer or a consumer; otherwise
every call would also measure how fast the allocator returns a megabyte to the system and gets it back.
"""

from __future__ import annotations

import struct
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random

import pyarrow as pa

from quiver.model import Index, Offset, Term
from quiver.record import Batch, Compression, build_batch, crc32c, decode_header, stamp
from quiver.record.arrow import build_batch_from_arrow, to_arrow
from table import Row, best_seconds, show

RECORDS = 10_000
VALUE_BYTES = 100
KEPT = 8


def rows() -> list[Row]:
    """Measure everything."""
    return [*build_rows(), *read_rows(), *compression_rows(), *header_rows(), *checksum_rows()]


def build_rows() -> list[Row]:
    values = log_lines()
    texts, array, joined = [str(value, "ascii") for value in values], pa.array(values), b"".join(values)
    join, copy = rate(lambda: b"".join(values)), rate(lambda: bytes(memoryview(joined)))
    return [
        Row("build from a list of bytes", rate(lambda: build_batch(values, timestamp=1)), "M records/s", join, 5),
        Row("build from a list of str", rate(lambda: build_batch(texts, timestamp=1)), "M records/s", join),
        Row("build from an Arrow array", rate(lambda: build_batch_from_arrow(array, timestamp=1)), "M records/s", copy),
        Row("build a batch of one record", micros(lambda: build_batch(values[:1], timestamp=1)), "µs"),
    ]


def read_rows() -> list[Row]:
    values = log_lines()
    batch, joined = build_batch(values, timestamp=1), b"".join(values)
    cut = struct.Struct(f"{VALUE_BYTES}s" * RECORDS)
    copy, unpack = rate(lambda: bytes(memoryview(joined))), rate(lambda: cut.unpack(joined))
    return [
        Row("verify, to Arrow", rate(lambda: read_arrow(batch)), "M records/s", copy, 50),
        Row("verify, to a list of values", rate(lambda: Batch.decode(batch).values()), "M records/s", unpack, 5),
        Row("verify, to a list of records", rate(lambda: list(Batch.decode(batch).records())), "M records/s", unpack),
    ]


def compression_rows() -> list[Row]:
    values = log_lines()
    raw_bytes = len(build_batch(values, timestamp=1))
    measured = []
    for compression in (Compression.LZ4, Compression.ZSTD):
        batch = build_batch(values, timestamp=1, compression=compression)
        name = compression.name.lower()
        build = rate(partial(build_batch, values, timestamp=1, compression=compression))
        read = rate(partial(read_arrow, batch))
        measured += [
            Row(f"build with {name}", build, "M records/s"),
            Row(f"verify, {name} to Arrow", read, "M records/s"),
            Row(f"size with {name}", 100 * len(batch) / raw_bytes, "% of plain"),
        ]
    return measured


def header_rows() -> list[Row]:
    batch = bytearray(build_batch(log_lines(), timestamp=1))
    fields = struct.Struct("<4sIQQqqBBBBIIIqqqIqI")
    limit = micros(lambda: (fields.unpack_from(batch), crc32c(batch[8:96])))
    restamp = partial(stamp, batch, term=Term(1), index=Index(2), base_offset=Offset(3), append_timestamp=4)
    return [
        Row("decode a header", micros(lambda: decode_header(batch)), "µs", limit, 2),
        Row("stamp a batch", micros(restamp), "µs"),
    ]


def checksum_rows() -> list[Row]:
    data = Random(1).randbytes(1 << 20)
    gigabytes = len(data) / 1e9
    copy = gigabytes / best_seconds(lambda: bytes(memoryview(data)))
    return [Row("CRC-32C of 1 MiB", gigabytes / best_seconds(lambda: crc32c(data)), "GB/s", copy)]


def read_arrow(batch: bytes) -> pa.RecordBatch:
    return to_arrow(Batch.decode(batch))


def rate(work: Callable[[], object]) -> float:
    """Return millions of records per second; `work` processes one whole batch."""
    kept: deque[object] = deque(maxlen=KEPT)
    return RECORDS / best_seconds(lambda: kept.append(work())) / 1e6


def micros(work: Callable[[], object]) -> float:
    """Return the microseconds that one call takes."""
    return best_seconds(work, loops=500) * 1e6


def log_lines() -> list[bytes]:
    """Return typical log lines of exactly 100 bytes, the same in every run."""
    random = Random(1)
    services, paths = ("checkout", "search", "ledger"), ("/api/v1/orders", "/api/v1/items", "/health")
    lines = []
    for number in range(RECORDS):
        line = (
            f"2024-05-01T12:{number // 600 % 60:02}:{number // 10 % 60:02}Z INFO {random.choice(services)} "
            f"GET {random.choice(paths)} status=200 took={random.randrange(900)}us id={random.getrandbits(64):016x}"
        )
        lines.append(line.ljust(VALUE_BYTES, ".")[:VALUE_BYTES].encode())
    return lines


if __name__ == "__main__":
    sys.exit(show(rows(), title=f"record: batches of {RECORDS:,} values of {VALUE_BYTES} bytes"))
