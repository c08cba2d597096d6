"""Batches of a table are decompressed by a thread while further ones arrive, with the same result."""

from __future__ import annotations

import threading

import pytest
from client_world import World

from quiver.client.unpacking import UNPACKED_BYTES_MIN, BatchUnpacker
from quiver.errors import DecodeError
from quiver.record import Batch, Compression, build_batch

VALUES = [b"%d " % number * 40 for number in range(1000)]


def make_batch(values: list[bytes], compression: Compression = Compression.LZ4) -> tuple[Batch, bytearray]:
    """Return a batch, and the memory that it is in."""
    data = bytearray(build_batch(values, timestamp=0, compression=compression))
    return Batch.decode(data), data


def overwrite(data: bytearray) -> None:
    """Make what the batch stores unreadable; what was decompressed before is not touched."""
    data[-100:] = bytes(100)


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
def test_compressed_batches_are_decompressed_before_they_are_asked_for(compression: Compression) -> None:
    made = [make_batch(VALUES, compression) for _ in range(20)]
    with BatchUnpacker() as unpacker:
        for batch, _ in made:
            unpacker.add(batch)
        unpacker.finish()
    for batch, data in made:
        overwrite(data)
        assert batch.values() == VALUES


@pytest.mark.parametrize("compression", [Compression.NONE, Compression.LZ4])
def test_no_thread_is_started_for_what_needs_none(compression: Compression) -> None:
    small = [b"x"] * (UNPACKED_BYTES_MIN // 100) if compression else VALUES
    before = set(threading.enumerate())
    with BatchUnpacker() as unpacker:
        unpacker.add(make_batch(small, compression)[0])
        started = set(threading.enumerate()) - before
        assert not [thread for thread in started if thread.name.startswith("quiver-unpack")]
        unpacker.finish()


def test_a_batch_that_cannot_be_decompressed_is_reported() -> None:
    batch, data = make_batch(VALUES)
    overwrite(data)
    with BatchUnpacker() as unpacker:
        unpacker.add(batch)
        with pytest.raises(DecodeError):
            unpacker.finish()


def test_a_table_has_the_records_of_compressed_batches_in_order() -> None:
    world = World()

    async def scenario() -> list[object]:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            async with await cluster.producer("logs", batch_bytes=80_000, compression="lz4") as producer:
                for value in VALUES * 3:
                    producer.send(value)
            async with await cluster.consumer("logs") as consumer:
                table = await consumer.fetch_arrow()
            return table.column("value").to_pylist()

    assert world.run(scenario()) == VALUES * 3
