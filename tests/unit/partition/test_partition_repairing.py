"""A leader that cannot read its own records does not go on leading with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from partition_world import DIRECTORY, LARGE, Partition, record, run_lives

from quiver.config import LogSettings
from quiver.errors import UnavailableError
from quiver.model import ConsumerId, Offset
from quiver.partition import Replica

ALICE = ConsumerId(1)
READS: dict[str, Callable[[Replica], Awaitable[object]]] = {
    "fetch": lambda replica: replica.fetch(Offset(0), bytes_max=LARGE),
    "consume": lambda replica: replica.consume(ALICE, bytes_max=LARGE),
    "consume_many": lambda replica: replica.consume_many([(ALICE, "earliest")]),
    "find_offset": lambda replica: replica.find_offset(2),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_damage_that_a_reader_meets_stops_the_node_so_that_it_is_repaired(
    read: Callable[[Replica], Awaitable[object]],
) -> None:
    async def test(partition: Partition) -> None:
        partition.log_settings = LogSettings(tail_cache_bytes_max=512, segment_bytes_max=4096, index_interval_bytes=64)
        async with partition.life() as replica:
            for number in range(60):
                await replica.append(record(b"%03d" % number * 20, timestamp=number))
            first = min(name for name in partition.disk.names(DIRECTORY) if name.endswith(".log"))
            for position in range(200, 3000, 7):
                partition.disk.flip_bit(f"{DIRECTORY}/{first}", position)
            partition.disk.drop_caches()
            with pytest.raises(UnavailableError) as refused:
                await read(replica)
            assert (refused.value.code, refused.value.outcome) == ("damaged", "not_done")
            await asyncio.sleep(1)
            with pytest.raises(UnavailableError):
                await replica.append(record(b"more"))

    run_lives(test)
