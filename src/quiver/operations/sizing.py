"""How large a cluster has to be for a load: nodes, partitions, disk, network, memory and processors.

Pure arithmetic with costs that were measured (`docs/performance.md`); `docs/operations/sizing.md` explains each formula
and a test holds its table of costs equal to `COSTS`. The results are an estimate to begin with, for processors like the
one that was measured. Every result holds while one node is lost.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

from quiver.config import MIB, Settings
from quiver.record import HEADER_BYTES

Way = Literal["bulk", "awaited", "http"]
Packing = Literal["none", "lz4", "zstd"]

NODES_MAX: Final = 1_000
"""Where the search for enough nodes ends."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, each with the figure of `docs/performance.md` that it comes from."""

    append_ns_per_byte: float = 2.0
    """CPU time of a node for each stored byte of a copy: 200 ns for a record of 100 bytes, three nodes and replicas."""
    awaited_us: float = 16.0
    """CPU time of a node for each copy of a record that is awaited: 46 to 49 µs on three nodes, 64 in flight."""
    http_produce_us: float = 73.0
    """CPU time of the gateway's node for each HTTP message, its append included."""
    http_consume_us: float = 100.0
    """CPU time of the gateway's node for each message that is consumed by HTTP."""
    read_ns_per_byte: float = 1.3
    """CPU time of a node for each byte that is read: 130 ns for a record of 100 bytes."""
    tls_append_factor: float = 1.25
    """CPU time with TLS, of that without: 81 % of the throughput is left of bulk produce on three nodes."""
    tls_read_factor: float = 1.75
    """The same for reads: 0.13 to 0.15 µs become 0.21 to 0.27 µs."""
    tls_http_factor: float = 1.4
    """The same for HTTP: 84 to 110 µs become 110 to 160 µs."""
    lz4_ratio: float = 0.31
    """Stored bytes of log lines with LZ4."""
    zstd_ratio: float = 0.17
    """Stored bytes of log lines with Zstandard."""
    record_bytes: int = 4
    """Bytes of a batch for each record, besides the record's own."""
    node_memory_bytes: int = 71 * MIB
    """Resident memory of a node without topics."""
    replica_memory_bytes: int = 32 * 1024
    """Resident memory of each replica, without its caches."""
    partition_bytes_per_s: int = 50_000_000
    """What one partition takes with room to spare: an eighth of the 347 to 470 MB/s that a lone one reached."""


COSTS: Final = Costs()

CPU_SHARE_MAX: Final = 0.6
"""Of one core: the event loop of a node is one thread, and latency rises steeply above this."""
NETWORK_SHARE_MAX: Final = 0.6
DISK_SHARE_MAX: Final = 0.8
"""Of a disk that may be used: room for rebuilds, and time to react when it fills."""
BATCH_BYTES: Final = 64 * 1024
"""Size of a typical batch of bulk producers, for the share of its header."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster is to carry."""

    rate: int
    """Records per second, at the peak."""
    mean_rate: int
    """Records per second, on average over the retention."""
    record_bytes: int
    """Key, value and headers of a record."""
    retention_ms: int
    replicas: int = 3
    readers: int = 1
    """How often each record is read."""
    way: Way = "bulk"
    reads_by_http: bool = False
    packing: Packing = "none"
    is_tls: bool = False
    consumer_rate: int = 50_000
    """Records per second that one consumer of the application processes."""
    catch_up_ms: int = 300_000
    """How far a consumer may lag and still read from memory."""
    disk_bytes: int | None = None
    """Size of a node's disk; None: any."""
    network_bytes_per_s: int = 1_250_000_000
    """Speed of a node's network, in each direction."""


class NodeNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What each node needs, at the peak and with one node lost."""

    cpu_cores: float
    """Cores that are busy."""
    cores: int
    """Cores to give it."""
    memory_bytes: int
    """Of the process, with all its caches full."""
    page_cache_bytes: int
    """Of the operating system, for consumers that lag."""
    disk_bytes: int
    """Size of the disk, with its free share."""
    disk_write_bytes_per_s: int
    network_in_bytes_per_s: int
    network_out_bytes_per_s: int


class ClusterSize(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a cluster for a load."""

    nodes: int
    bound_by: str
    """What asks for so many nodes."""
    partitions: int
    replicas_per_node: int
    stored_bytes_per_s: int
    """Of one copy, at the peak, after compression."""
    stored_bytes: int
    """Of all copies, at the end of the retention."""
    rebuild_ms: int
    """How long the replicas of a lost node take to be copied, at the default rate."""
    node: NodeNeeds


def find_size(load: Load, settings: Settings | None = None) -> ClusterSize | None:
    """Return the smallest cluster that carries a load; None if not even `NODES_MAX` nodes do."""
    settings = settings or Settings()
    smallest = load.replicas if load.replicas > 1 else 1
    reason = f"{load.replicas} replicas are on as many nodes" if smallest > 1 else "one replica needs one node"
    for nodes in range(smallest, NODES_MAX + 1):
        size = _describe(load, nodes, reason, settings)
        if (found := _find_excess(load, size)) is None:
            return size
        reason = found
    return None


def _find_excess(load: Load, size: ClusterSize) -> str | None:
    """Return what a cluster of this size has too little of; None if it has enough of everything."""
    node = size.node
    if node.cpu_cores > CPU_SHARE_MAX:
        return f"processor time: with one node less, each would use more than {CPU_SHARE_MAX:.0%} of its loop's core"
    if max(node.network_in_bytes_per_s, node.network_out_bytes_per_s) > load.network_bytes_per_s * NETWORK_SHARE_MAX:
        return f"network: with one node less, each would use more than {NETWORK_SHARE_MAX:.0%} of it"
    if load.disk_bytes is not None and node.disk_bytes > load.disk_bytes:
        return "disk: with one node less, the disks would be too small"
    return None


def _describe(load: Load, nodes: int, reason: str, settings: Settings) -> ClusterSize:
    # What is left when a node is lost carries everything; replicas that no node is left for are not made.
    alive = max(1, nodes - 1) if load.replicas > 1 else nodes
    copies = min(load.replicas, alive)
    record_bytes = stored_record_bytes(load)
    written = load.rate * record_bytes
    stored = math.ceil(load.mean_rate * record_bytes * load.retention_ms / 1000 * load.replicas)
    partitions = count_partitions(load, nodes, written)
    replicas_per_node = math.ceil(partitions * copies / alive)
    slack = settings.log.segment_bytes_max + settings.partition.summary_bytes
    copy = stored / load.replicas
    data = copy * copies / alive + replicas_per_node * min(slack, copy / partitions)
    cpu = cpu_cores(load, written, copies) / alive
    forwarded = written / alive if load.way == "http" else 0.0
    return ClusterSize(
        nodes=nodes,
        bound_by=reason,
        partitions=partitions,
        replicas_per_node=replicas_per_node,
        stored_bytes_per_s=math.ceil(written),
        stored_bytes=stored,
        rebuild_ms=math.ceil(stored / nodes / settings.replication.catch_up_bytes_per_second * 1000),
        node=NodeNeeds(
            cpu_cores=round(cpu, 3),
            cores=max(2, math.ceil(cpu / CPU_SHARE_MAX) + 1),
            memory_bytes=memory_bytes(replicas_per_node, settings),
            page_cache_bytes=math.ceil(written * copies / alive * load.catch_up_ms / 1000),
            disk_bytes=math.ceil((data + settings.log.free_bytes_min) / DISK_SHARE_MAX),
            disk_write_bytes_per_s=math.ceil(written * copies / alive),
            network_in_bytes_per_s=math.ceil(written * copies / alive + forwarded),
            network_out_bytes_per_s=math.ceil(written * (copies - 1 + load.readers) / alive + forwarded),
        ),
    )


def stored_record_bytes(load: Load) -> float:
    """Return the bytes of one copy of a record on disk, with its part of the batch's header."""
    ratio = {"none": 1.0, "lz4": COSTS.lz4_ratio, "zstd": COSTS.zstd_ratio}[load.packing]
    own = (load.record_bytes + COSTS.record_bytes) * ratio
    records = max(1.0, BATCH_BYTES / own) if load.way == "bulk" else 1.0
    return own + HEADER_BYTES / records


def count_partitions(load: Load, nodes: int, written: float) -> int:
    """Return enough partitions for consumers and bytes, the same number on each node."""
    wanted = max(load.rate / load.consumer_rate, written / COSTS.partition_bytes_per_s, 1)
    return math.ceil(wanted / nodes) * nodes


def cpu_cores(load: Load, written: float, copies: int) -> float:
    """Return the cores that all nodes together keep busy."""
    tls = (
        COSTS
        if load.is_tls
        else msgspec.structs.replace(COSTS, tls_append_factor=1.0, tls_read_factor=1.0, tls_http_factor=1.0)
    )
    appended = written * copies * COSTS.append_ns_per_byte / 1e9
    if load.way == "awaited":
        appended += load.rate * copies * COSTS.awaited_us / 1e6
    read = written * load.readers * COSTS.read_ns_per_byte / 1e9
    by_http = load.rate * COSTS.http_produce_us / 1e6 if load.way == "http" else 0.0
    if load.reads_by_http:
        by_http += load.rate * load.readers * COSTS.http_consume_us / 1e6
    return appended * tls.tls_append_factor + read * tls.tls_read_factor + by_http * tls.tls_http_factor


def memory_bytes(replicas: int, settings: Settings) -> int:
    """Return the memory of a node with all its caches and buffers full; their limits are settings."""
    tails = min(replicas * settings.log.tail_cache_bytes_max, settings.log.tail_caches_bytes_max)
    gateway, wire = settings.gateway, settings.wire
    buffers = gateway.bodies_bytes_max + gateway.decoded_bytes_max + wire.requests_bytes_max
    return COSTS.node_memory_bytes + replicas * COSTS.replica_memory_bytes + tails + buffers
