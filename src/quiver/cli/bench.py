"""`quiver bench`: measure a cluster from this machine: throughput of producing and consuming, and latency.

Every figure is what this process sees, its own work included. Latencies are printed as percentiles and as a plot of
their distribution, throughput as a plot over time.
"""

from __future__ import annotations

import math
import os
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import click
import msgspec

import quiver
from quiver.cli.options import connect, examples, json_option, url_option
from quiver.cli.output import format_bytes, format_count, print_json
from quiver.cli.quantities import DurationType, SizeType
from quiver.errors import NotFoundError, UnavailableError
from quiver.model import Offset, PartitionId

DEFAULT_TOPIC: Final = "_bench"
"""Internal by its name: `quiver topic list` hides it."""
CHUNK_RECORDS: Final = 1_000
"""Records that are handed to the producer, or polled, at a time."""
PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9, 100.0)
PLOT_WIDTH: Final = 50
_MARK_BYTES: Final = 8
_STAMP_BYTES: Final = _MARK_BYTES + 16
"""A mark, by which a run knows its own records, and the time of sending, both in hexadecimal."""

_TOPIC = click.option("--topic", default=DEFAULT_TOPIC, show_default=True, help="Topic; created if it does not exist.")
_SIZE = click.option(
    "--size", "size_bytes", type=SizeType(), default="100", show_default=True, help="Bytes of a record."
)


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `bench produce` and `bench consume`."""

    records: int
    bytes: int
    seconds: float
    records_per_second: float
    bytes_per_second: float
    by_second: list[int]
    """Records in each second of the run; the last one may be shorter."""
    latency_ms: dict[str, float] = {}
    """Percentiles of the time until a chunk is acknowledged."""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `bench latency`."""

    records: int
    lost: int
    rate: float
    send_ms: dict[str, float]
    """Percentiles of the time from sending a record to its acknowledgement."""
    end_to_end_ms: dict[str, float]
    """Percentiles of the time from sending a record to having it in a consumer."""


@click.group(epilog="Example: quiver bench produce --records 1000000")
def bench() -> None:
    """Measure the throughput and latency of a cluster from this machine.

    The measurements write to the topic that --topic names; `quiver topic delete` removes it.
    """


@bench.command("produce", epilog=examples("quiver bench produce", "quiver bench produce --records 5000000 --size 1KiB"))
@_TOPIC
@click.option("--records", type=click.IntRange(min=1), default=1_000_000, show_default=True, help="Number of records.")
@_SIZE
@click.option("--compression", type=click.Choice(("none", "lz4", "zstd")), default="none", show_default=True)
@json_option
@url_option
def bench_produce(*, topic: str, records: int, size_bytes: int, compression: str, as_json: bool, url: str) -> None:
    """Send records as fast as they are acknowledged."""
    line = (b"2026-01-31T12:00:00Z INFO bench message " * (size_bytes // 40 + 1))[:size_bytes]
    with connect(url) as cluster:
        _ensure_topic(cluster, topic)
        chosen = None if compression == "none" else compression
        with cluster.producer(topic, compression=chosen) as producer:  # type: ignore[arg-type] # one of the choices
            producer.send(line).result()  # connections and metadata are not part of the measurement
            meter = _Meter()
            pending: list[tuple[float, quiver.Deliveries]] = []
            waits_ms: list[float] = []
            for at in range(0, records, CHUNK_RECORDS):
                count = min(CHUNK_RECORDS, records - at)
                pending.append((time.perf_counter(), producer.send_many([line] * count)))
                _settle(pending, waits_ms, meter, size_bytes)
            producer.flush()
            _settle(pending, waits_ms, meter, size_bytes)
    result = meter.result(latency_ms=percentiles(waits_ms))
    if as_json:
        print_json(result)
        return
    _print_throughput("produced", topic, result)
    click.echo(f"time until {CHUNK_RECORDS:,} records are acknowledged: {format_percentiles(result.latency_ms)}")


def _settle(
    pending: list[tuple[float, quiver.Deliveries]], waits_ms: list[float], meter: _Meter, size_bytes: int
) -> None:
    while pending and pending[0][1].is_done:
        sent_s, deliveries = pending.pop(0)
        deliveries.result()
        waits_ms.append((time.perf_counter() - sent_s) * 1000)
        meter.add(len(deliveries), len(deliveries) * size_bytes)


@bench.command("consume", epilog=examples("quiver bench consume", "quiver bench consume --topic logs --arrow"))
@_TOPIC
@click.option("--records", type=click.IntRange(min=1), help="Stop after this many.  [default: all there are]")
@click.option("--arrow", is_flag=True, help="Read Arrow tables instead of records; needs pyarrow.")
@json_option
@url_option
def bench_consume(*, topic: str, records: int | None, arrow: bool, as_json: bool, url: str) -> None:
    """Read the records of a topic from the earliest on, as fast as they come."""
    with connect(url) as cluster:
        if topic not in cluster.list_topics():
            raise NotFoundError(f"there is no topic {topic!r}; `quiver bench produce` fills one", code="unknown_topic")
        with cluster.consumer(topic, start="earliest") as consumer:
            ends = consumer.end_offsets()
            meter = _Meter()
            while meter.records < (records or math.inf) and _is_before(consumer, ends):
                left = CHUNK_RECORDS * (100 if arrow else 10)
                if records is not None:
                    left = min(left, records - meter.records)
                if arrow:
                    table = consumer.fetch_arrow(left, 1.0)
                    meter.add(table.num_rows, table.nbytes)
                else:
                    found = consumer.poll(left, 1.0)
                    meter.add(len(found), sum(len(one.value or b"") for one in found))
    result = meter.result()
    if as_json:
        print_json(result)
        return
    _print_throughput("consumed", topic, result)


@bench.command("latency", epilog=examples("quiver bench latency", "quiver bench latency --rate 100 --duration 1m"))
@_TOPIC
@click.option(
    "--rate",
    type=click.FloatRange(min=0.1, max=100_000),
    default=1_000.0,
    show_default=True,
    help="Records per second.",
)
@click.option("--duration", "duration_ms", type=DurationType(), default="10s", show_default=True, help="Time to send.")
@_SIZE
@json_option
@url_option
def bench_latency(*, topic: str, rate: float, duration_ms: int, size_bytes: int, as_json: bool, url: str) -> None:
    """Send records at a steady rate; measure the time to the acknowledgement, and to a consumer."""
    count = max(1, round(rate * duration_ms / 1000))
    with connect(url) as cluster:
        _ensure_topic(cluster, topic)
        send_ms: list[float] = []
        mark = os.urandom(_MARK_BYTES // 2).hex().encode()
        with _receiving(cluster, topic, count, mark) as received_ms, cluster.producer(topic, linger_ms=0) as producer:
            producer.send(b"warm-up").result()
            threads = _Acknowledgements(send_ms)
            start_s = time.perf_counter()
            for number in range(count):
                time.sleep(max(0.0, start_s + number / rate - time.perf_counter()))
                stamp = time.perf_counter_ns()
                value = (b"%s%016x" % (mark, stamp)).ljust(max(size_bytes, _STAMP_BYTES), b".")
                threads.add(stamp, producer.send(value))
            producer.flush()
            threads.finish()
    result = Latency(
        records=count,
        lost=count - len(received_ms),
        rate=rate,
        send_ms=percentiles(send_ms),
        end_to_end_ms=percentiles(received_ms),
    )
    if as_json:
        print_json(result)
    else:
        _print_latency(topic, size_bytes, result, send_ms, received_ms)
    if result.lost:
        raise UnavailableError(f"{result.lost:,} of {count:,} records did not reach the consumer in time; retry")


def _print_latency(
    topic: str, size_bytes: int, result: Latency, send_ms: list[float], received_ms: list[float]
) -> None:
    records = format_count(result.records, "record")
    click.echo(f"{records} of {format_bytes(size_bytes)} to {topic} at {result.rate:,g} records/s")
    for name, waits_ms, found in (
        ("acknowledged", send_ms, result.send_ms),
        ("end to end", received_ms, result.end_to_end_ms),
    ):
        click.echo(f"\n{name}: {format_percentiles(found)}")
        for line in plot_distribution(waits_ms):
            click.echo(line)


class _Acknowledgements:
    """Notes when each record is acknowledged, in a thread of its own: the sender must keep its rate."""

    def __init__(self, waits_ms: list[float]) -> None:
        self._waits_ms = waits_ms
        self._sent: list[tuple[int, quiver.Delivery]] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="quiver-bench-acks", daemon=True)
        self._thread.start()

    def add(self, stamp_ns: int, delivery: quiver.Delivery) -> None:
        self._sent.append((stamp_ns, delivery))

    def finish(self) -> None:
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        at = 0
        while at < len(self._sent) or not self._is_over:
            if at == len(self._sent):
                time.sleep(0.0002)
                continue
            stamp_ns, delivery = self._sent[at]
            delivery.result()
            self._waits_ms.append((time.perf_counter_ns() - stamp_ns) / 1e6)
            at += 1


@contextmanager
def _receiving(cluster: quiver.Cluster, topic: str, count: int, mark: bytes) -> Iterator[list[float]]:
    """Read new records with a mark in a thread, and yield the ages at which they arrived; wait for all at the end."""
    ages_ms: list[float] = []
    is_over = threading.Event()

    def run() -> None:
        last_s = time.monotonic()
        while len(ages_ms) < count and time.monotonic() - last_s < 5.0:
            found = consumer.poll(CHUNK_RECORDS, 0.5)
            now_ns = time.perf_counter_ns()
            own = [one.value for one in found if one.value and one.value.startswith(mark)]
            ages_ms.extend((now_ns - int(value[_MARK_BYTES:_STAMP_BYTES], 16)) / 1e6 for value in own)
            if own or not is_over.is_set():
                last_s = time.monotonic()

    with cluster.consumer(topic, start="latest") as consumer:
        thread = threading.Thread(target=run, name="quiver-bench-consumer", daemon=True)
        thread.start()
        try:
            yield ages_ms
        finally:
            is_over.set()
            thread.join()


class _Meter:
    """Counts records and bytes by the second."""

    def __init__(self) -> None:
        self.records = self._bytes = 0
        self._start_s = self._last_s = time.perf_counter()
        self._by_second: Counter[int] = Counter()

    def add(self, records: int, size_bytes: int) -> None:
        if records:
            self.records += records
            self._bytes += size_bytes
            self._last_s = time.perf_counter()
            self._by_second[int(self._last_s - self._start_s)] += records

    def result(self, *, latency_ms: dict[str, float] | None = None) -> Throughput:
        seconds = max(self._last_s - self._start_s, 1e-9)
        return Throughput(
            records=self.records,
            bytes=self._bytes,
            seconds=seconds,
            records_per_second=self.records / seconds,
            bytes_per_second=self._bytes / seconds,
            by_second=[self._by_second[second] for second in range(int(seconds) + 1)],
            latency_ms=latency_ms or {},
        )


def _is_before(consumer: quiver.Consumer, ends: Mapping[PartitionId, Offset]) -> bool:
    return any(consumer.position(at) < end for at, end in ends.items())


def _ensure_topic(cluster: quiver.Cluster, topic: str) -> None:
    cluster.create_topic(topic, exist_ok=True)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the percentiles of some values, by name; `max` is the largest."""
    ranked = sorted(values)
    if not ranked:
        return {}
    ranks = {share: math.ceil(round(share * len(ranked) / 100, 6)) for share in PERCENTILES}
    return {"max" if share == 100 else f"p{share:g}": ranked[rank - 1] for share, rank in ranks.items()}


def format_percentiles(found: dict[str, float]) -> str:
    """Return percentiles in milliseconds as one line."""
    return "  ".join(f"{name} {value:.2f} ms" for name, value in found.items()) or "none"


def plot_distribution(values_ms: Sequence[float]) -> Iterator[str]:
    """Yield a bar for each range of latencies, from the least to the greatest; a range doubles the one before."""
    if not values_ms:
        return
    low = math.floor(math.log2(max(min(values_ms), 1e-3)) * 2)
    high = math.ceil(math.log2(max(*values_ms, 1e-3)) * 2)
    bounds = [2 ** (step / 2) for step in range(low + 1, max(high, low + 1) + 1)]
    counts = Counter(min(bisect_left(bounds, value), len(bounds) - 1) for value in values_ms)
    for at, bound in enumerate(bounds):
        yield f"  ≤ {bound:8.2f} ms {_bar(counts[at], max(counts.values()))} {counts[at]:,}"


def _print_throughput(verb: str, topic: str, result: Throughput) -> None:
    click.echo(
        f"{verb} {format_count(result.records, 'record')} of {topic} in {result.seconds:.2f} s: "
        f"{result.records_per_second:,.0f} records/s, {format_bytes(result.bytes_per_second)}/s"
    )
    for second, count in enumerate(result.by_second):
        if count:
            click.echo(f"  {second:4d} s {_bar(count, max(result.by_second))} {count:,}")


def _bar(count: int, most: int) -> str:
    return ("█" * round(PLOT_WIDTH * count / max(most, 1))).ljust(PLOT_WIDTH)
