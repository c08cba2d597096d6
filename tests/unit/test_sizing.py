"""The sizes that `quiver size` calculates agree with what was measured, and grow with what they depend on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.cli import main
from quiver.config import Settings
from quiver.operations.sizing import COSTS, CPU_SHARE_MAX, ClusterSize, Costs, Load, cpu_cores, find_size

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "sizing.md"
DAY_MS = 86_400_000
LOAD = Load(rate=50_000, mean_rate=50_000, record_bytes=200, retention_ms=7 * DAY_MS)

Output = pytest.CaptureFixture[str]


def size_of(**changes: Any) -> ClusterSize:
    found = find_size(msgspec.structs.replace(LOAD, **changes))
    assert found is not None
    return found


def test_processor_time_is_what_was_measured() -> None:
    # docs/performance.md: 2.2 M records of 100 bytes with 200 ns on each of three nodes; nothing reads.
    bulk = Load(rate=2_200_000, mean_rate=1, record_bytes=100, retention_ms=DAY_MS, readers=0)
    assert cpu_cores(bulk, 2_200_000 * 100, 3) / 3 == pytest.approx(2.2 * 0.2, rel=0.05)
    # 13,439 to 14,333 messages a second keep the one core of a node busy.
    http = Load(rate=13_900, mean_rate=1, record_bytes=100, retention_ms=DAY_MS, way="http", readers=0)
    assert cpu_cores(http, 13_900 * 100, 1) == pytest.approx(1.0, rel=0.05)
    # 22,004 entries of 1 KiB a second, 46 to 49 µs on three nodes together.
    awaited = Load(rate=22_004, mean_rate=1, record_bytes=1024, retention_ms=DAY_MS, way="awaited", readers=0)
    assert cpu_cores(awaited, 22_004 * 1024, 3) / 22_004 * 1e6 == pytest.approx(48, rel=0.15)


def test_three_nodes_hold_a_copy_each() -> None:
    found = size_of()
    copy = found.stored_bytes / 3
    assert found.nodes == 3
    assert copy == pytest.approx(50_000 * 204.3 * 7 * 86_400, rel=0.001)
    assert found.node.disk_bytes == pytest.approx(copy / 0.8, rel=0.01)
    assert found.node.disk_write_bytes_per_s == pytest.approx(50_000 * 204.3, rel=0.001)


def test_one_node_is_enough_for_one_replica() -> None:
    found = size_of(replicas=1, rate=100, mean_rate=100)
    assert (found.nodes, found.node.cores) == (1, 2)


def test_disks_of_a_size_ask_for_more_nodes() -> None:
    found = size_of(disk_bytes=2 * 10**12)
    assert found.nodes > 3
    assert "disk" in found.bound_by
    assert found.node.disk_bytes <= 2 * 10**12
    assert found.partitions % found.nodes == 0


def test_processor_time_asks_for_more_nodes() -> None:
    found = size_of(way="http", rate=50_000, mean_rate=1_000)
    assert "processor time" in found.bound_by
    assert found.node.cpu_cores <= CPU_SHARE_MAX
    assert found.nodes > 3


def test_network_asks_for_more_nodes() -> None:
    found = size_of(network_bytes_per_s=10_000_000, readers=10)
    assert "network" in found.bound_by


def test_memory_follows_the_settings_of_the_caches() -> None:
    plain = find_size(LOAD)
    large = find_size(LOAD, Settings(log=msgspec.structs.replace(Settings().log, tail_cache_bytes_max=64 << 20)))
    assert plain is not None
    assert large is not None
    assert large.node.memory_bytes > plain.node.memory_bytes


@given(
    st.builds(
        Load,
        rate=st.integers(1, 10**6),
        mean_rate=st.just(1),
        record_bytes=st.integers(1, 10**4),
        retention_ms=st.integers(1, 365 * DAY_MS),
        replicas=st.integers(1, 5),
        readers=st.integers(0, 10),
        way=st.sampled_from(["bulk", "awaited", "http"]),
        packing=st.sampled_from(["none", "lz4", "zstd"]),
        is_tls=st.booleans(),
    )
)
def test_more_of_anything_never_needs_less(load: Load) -> None:
    small = find_size(load)
    for changes in ({"rate": load.rate * 2}, {"readers": load.readers + 1}, {"record_bytes": load.record_bytes * 2}):
        large = find_size(msgspec.structs.replace(load, **changes))
        if small is None:
            assert large is None
        elif large is not None:
            assert large.nodes >= small.nodes
            assert large.node.cpu_cores * large.nodes >= small.node.cpu_cores * (small.nodes - 1)
    if small is not None:
        assert small.nodes >= load.replicas
        assert small.partitions >= load.rate / load.consumer_rate
        assert small.node.cpu_cores <= CPU_SHARE_MAX


def test_command_prints_a_size(capsys: Output) -> None:
    assert main(["size", "--rate", "50k", "--retention", "7d"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("3 nodes, 3 partitions\n")
    assert re.search(r"^disk +7\.7 TB ", shown, flags=re.MULTILINE)


def test_command_prints_json_with_what_it_assumed(capsys: Output) -> None:
    assert (
        main(["size", "--rate", "1.5M", "--mean-rate", "500k", "--retention", "36h", "--compression", "lz4", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["load"]["rate"] == 1_500_000
    assert found["load"]["retention_ms"] == 36 * 3_600_000
    assert found["load"]["packing"] == "lz4"
    assert msgspec.convert(found["size"], ClusterSize) == find_size(msgspec.convert(found["load"], Load))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rate", "fast", "--retention", "7d"], "'fast' is no count"),
        (["--rate", "5q", "--retention", "7d"], "such as 50000, 50k, 1.5M"),
        (["--rate", "0", "--retention", "7d"], "less than 1"),
        (["--rate", "1k", "--retention", "soon"], "'soon' is no duration"),
        (["--rate", "1k", "--mean-rate", "2k", "--retention", "7d"], "--mean-rate is more than --rate"),
        (["--rate", "1000G", "--retention", "7d"], "not even 1000 nodes"),
        (["--retention", "7d"], "--rate"),
    ],
)
def test_bad_input_gets_a_sentence(arguments: list[str], expected: str, capsys: Output) -> None:
    assert main(["size", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_page_has_the_costs_that_the_command_uses() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.,]+) \|", PAGE.read_text(), flags=re.MULTILINE))
    assert {name: float(value.replace(",", "")) for name, value in rows.items()} == msgspec.structs.asdict(COSTS)
    assert rows.keys() == set(Costs.__struct_fields__)
