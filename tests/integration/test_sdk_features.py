"""The SDK against a real node: several topics and patterns, JSON, frames, scans, timeouts, one user per name."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest

import quiver
from quiver.cli import main
from quiver.errors import (
    DecodeError,
    FencedError,
    NotFoundError,
    OutcomeUnknownError,
    OutOfRangeError,
    QuiverError,
    RequestError,
)
from quiver.testing import LocalCluster


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(local: LocalCluster) -> Iterator[quiver.Cluster]:
    with quiver.connect([local.addresses[0], local.urls[0]]) as connected:
        yield connected


@pytest.fixture
def topic(request: pytest.FixtureRequest, cluster: quiver.Cluster) -> str:
    name = str(request.node.name).removeprefix("test_")[:80].replace("[", "-").replace("]", "")
    cluster.create_topic(name, partitions=2)
    return name


def fill(cluster: quiver.Cluster, topic: str, values: list[Any], partition: int = 0, **options: Any) -> None:
    with cluster.producer(topic) as producer:
        for value in values:
            producer.send_json(value, partition=partition, **options)


# -- addresses -------------------------------------------------------------------------------------


def test_addresses_are_given_one_by_one_in_a_list_or_with_commas(local: LocalCluster) -> None:
    dead, live = "127.0.0.1:9", local.addresses[0]
    for given in ([[dead, live]], [dead, live], [f"{dead}, {live}"], [(live,)]):
        with quiver.connect(*given) as connected:
            assert connected.cluster_id


# -- several topics --------------------------------------------------------------------------------


def test_consumer_reads_several_topics_and_resumes_in_all(cluster: quiver.Cluster, topic: str) -> None:
    other = f"{topic}-other"
    cluster.create_topic(other, partitions=1)
    fill(cluster, topic, [1, 2], partition=1)
    fill(cluster, other, [3])
    with cluster.consumer([topic, other], name=topic) as consumer:
        found = {(record.topic, record.partition, record.json()) for record in _read(consumer, 3)}
        assert found == {(topic, 1, 1), (topic, 1, 2), (other, 0, 3)}
        assert consumer.topics == (topic, other)
        assert consumer.assignment == ((topic, 0), (topic, 1), (other, 0))
        assert consumer.size() == 0
        assert consumer.end_offsets(topic) == {0: 0, 1: 2}
        assert consumer.position(1, topic=topic) == 2
        for ambiguous in (lambda: consumer.topic, consumer.end_offsets, lambda: consumer.position(0)):
            with pytest.raises(RequestError, match="several topics"):
                ambiguous()
        consumer.commit()
    fill(cluster, other, [4])
    with cluster.consumer([topic, other], name=topic) as consumer:
        assert [record.json() for record in _read(consumer, 1)] == [4]


def _read(consumer: quiver.Consumer, count: int) -> list[quiver.Record]:
    found: list[quiver.Record] = []
    while len(found) < count:
        found += consumer.poll(timeout=10)
    return found


def test_pattern_matches_whole_names_and_later_topics(local: LocalCluster, topic: str) -> None:
    async def run() -> list[tuple[str | None, Any]]:
        async with quiver.connect_async(local.addresses) as connected:
            for name in (f"{topic}-a", f"x-{topic}-b"):
                await connected.create_topic(name, partitions=1)
                await (await connected.producer(name)).send_json(name)
            consumer = await connected.consumer(re.compile(f"{topic}-.*"), name=topic)
            consumer.core.options = _refreshing_fast(consumer.core.options)
            consumer.core._tasks.start(consumer.core._follow_topics(), "follow-soon")
            found = [(record.topic, record.json()) for record in await consumer.poll(timeout=10)]
            await connected.create_topic(f"{topic}-later", partitions=1)
            await (await connected.producer(f"{topic}-later")).send_json("late")
            while len(found) < 2:
                found += [(record.topic, record.json()) for record in await consumer.poll(timeout=10)]
            assert consumer.topics == (f"{topic}-a", f"{topic}-later")
            await consumer.commit()
            return found

    assert asyncio.run(run()) == [(f"{topic}-a", f"{topic}-a"), (f"{topic}-later", "late")]


def _refreshing_fast(options: Any) -> Any:
    return type(options)(**{name: getattr(options, name) for name in options.__struct_fields__} | {"refresh_ms": 50})


def test_what_cannot_be_subscribed_to_is_refused(cluster: quiver.Cluster, topic: str) -> None:
    for topics, options in (([], {}), ([1], {}), (re.compile(b"x"), {}), ([topic, "b"], {"partitions": [0]})):
        with pytest.raises(RequestError):
            cluster.consumer(topics, **options)  # type: ignore[arg-type]


# -- seek ------------------------------------------------------------------------------------------


def test_seek_moves_all_partitions_at_once_also_to_a_time(cluster: quiver.Cluster, topic: str) -> None:
    old, new = (datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2))
    for partition in (0, 1):
        fill(cluster, topic, ["old"], partition, timestamp=int(old.timestamp() * 1000))
        fill(cluster, topic, ["new"], partition, timestamp=int(new.timestamp() * 1000))
    consumer = cluster.consumer(topic)
    for target, expected in (
        ({"timestamp": new}, ["new", "new"]),
        ({"timestamp": old}, ["new", "new", "old", "old"]),
        ({"offset": "earliest"}, ["new", "new", "old", "old"]),
        ({"offset": 1, "topic": topic}, ["new", "new"]),
    ):
        consumer.seek(**target)
        assert sorted(record.json() for record in _read(consumer, len(expected))) == expected
    consumer.seek(offset="latest")
    assert consumer.size() == 0
    with pytest.raises(NotFoundError):
        consumer.seek(offset=0, topic="nope")
    with pytest.raises(OutOfRangeError):
        consumer.seek(0)


# -- JSON and frames -------------------------------------------------------------------------------


def test_json_goes_in_and_out(cluster: quiver.Cluster, topic: str) -> None:
    value = {"text": "grün", "list": [1, None, 2.5], "at": "2026-01-01T00:00:00Z"}
    producer = cluster.producer(topic)
    producer.send_json(value, key="k", headers={"a": "1"}).result()
    producer.send_json({"at": datetime(2026, 1, 1, tzinfo=UTC)}, key="k").result()
    with pytest.raises(RequestError, match="JSON"):
        producer.send_json(object())
    first, second = _read(cluster.consumer(topic), 2)
    assert first.json() == value
    assert (first.key, first.headers) == (b"k", (("a", b"1"),))
    assert second.json() == {"at": "2026-01-01T00:00:00Z"}
    producer.send("no json", key="k").result()
    (bad,) = _read(cluster.consumer(topic), 3)[2:]
    with pytest.raises(DecodeError, match=f"offset {bad.offset}"):
        bad.json()


_FIELDS: list[pa.Field[Any]] = [
    pa.field("user", pa.string()),
    pa.field("amount", pa.float64()),
    pa.field("at", pa.timestamp("ms")),
]
SCHEMA = pa.schema(_FIELDS)


def test_values_become_typed_columns(cluster: quiver.Cluster, topic: str) -> None:
    fill(cluster, topic, [{"user": "ann", "amount": 1.5, "at": "2026-01-01T00:00:00", "more": 1}, {"user": "bob"}])
    with cluster.producer(topic) as producer:
        producer.send(None, partition=0)
        producer.send('{\n"user":\n"multi line"}', partition=0)
    table = cluster.consumer(topic).fetch_arrow(schema=SCHEMA)
    assert table.column_names == ["topic", "partition", "offset", "timestamp", "key", "user", "amount", "at"]
    assert table["user"].to_pylist() == ["ann", "bob", None, "multi line"]
    assert table["at"].to_pylist() == [datetime(2026, 1, 1), None, None, None]  # noqa: DTZ001 - a type without a zone
    assert table.schema.field("amount").type == pa.float64()
    frame = cluster.consumer(topic).fetch_pandas(schema=SCHEMA)
    assert frame["user"].tolist()[:2] == ["ann", "bob"]
    polars = cluster.consumer(topic).fetch_polars(schema=SCHEMA, with_headers=True)
    assert polars.columns == [*table.column_names, "headers"]
    assert polars["amount"].to_list() == [1.5, None, None, None]


def test_value_that_does_not_fit_is_named_and_nothing_is_consumed(cluster: quiver.Cluster, topic: str) -> None:
    fill(cluster, topic, [{"user": "ann"}, {"amount": "much"}])
    consumer = cluster.consumer(topic)
    with pytest.raises(DecodeError, match="partition 0 offset 1") as failed:
        consumer.fetch_arrow(schema=SCHEMA)
    assert failed.value.code == "bad_json"
    assert consumer.position(0) == 0
    assert consumer.fetch_arrow(max_records=1, schema=SCHEMA)["user"].to_pylist() == ["ann"]
    with pytest.raises(RequestError, match="offset"):
        consumer.fetch_arrow(schema=pa.schema([("offset", pa.int64())]))


def test_long_reads_report_their_progress(cluster: quiver.Cluster, topic: str) -> None:
    for partition in (0, 1):
        fill(cluster, topic, list(range(100)), partition)
    seen: list[quiver.ReadProgress] = []
    cluster.consumer(topic).fetch_arrow(progress=seen.append)
    assert seen[-1].records == 200
    assert sorted(one.bytes for one in seen) == [one.bytes for one in seen]
    seen.clear()
    assert len(cluster.scan(topic, progress=seen.append).to_arrow()) == 200
    assert [(one.records, one.total) for one in seen] == [(100, 200), (200, 200)]


# -- scan ------------------------------------------------------------------------------------------


def test_scan_is_an_arrow_stream_for_every_library(cluster: quiver.Cluster, topic: str) -> None:
    for partition in (0, 1):
        fill(cluster, topic, [{"user": f"u{number}", "amount": number} for number in range(50)], partition)
    scan = cluster.scan(topic, schema=SCHEMA)
    assert len(scan) == 100
    assert pa.table(scan)["amount"].to_pylist() == [*range(50)] * 2
    assert pl.DataFrame(scan)["user"].n_unique() == 50
    totals = duckdb.connect().execute("SELECT sum(amount) FROM scan WHERE partition = 1").fetchall()
    assert totals == [(sum(range(50)),)]
    assert scan.to_pandas()["amount"].sum() == 2 * sum(range(50))
    assert scan.to_polars().height == sum(batch.num_rows for batch in scan) == scan.to_arrow().num_rows == 100


def test_scan_reads_what_was_there_and_only_the_range(cluster: quiver.Cluster, topic: str) -> None:
    when = datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(10):
        moment = when + timedelta(hours=number)
        fill(cluster, topic, [number], number % 2, timestamp=int(moment.timestamp() * 1000))

    def values(**options: Any) -> list[int]:
        return [json.loads(value or b"") for value in cluster.scan(topic, **options).to_arrow()["value"].to_pylist()]

    scan = cluster.scan(topic)
    fill(cluster, topic, [99])
    assert len(scan.to_arrow()) == 10
    assert values(partitions=[1]) == [1, 3, 5, 7, 9]
    assert values(start=3) == [6, 8, 99, 7, 9]
    assert values(start={0: 4}, end={0: 5, 1: 1}) == [8, 1]
    assert values(start=when + timedelta(hours=4), end=when + timedelta(hours=7)) == [4, 6, 5]
    assert values(start="latest") == values(start=1000) == values(end=0) == []
    assert values(end=1000, partitions=[1]) == [1, 3, 5, 7, 9]
    for options in (
        {"start": -1},
        {"start": 1.5},
        {"end": None},
        {"start": "now"},
        {"partitions": [9]},
        {"start": {9: 1}},
    ):
        with pytest.raises(QuiverError):
            values(**options)


def test_scan_has_an_asyncio_face(local: LocalCluster, cluster: quiver.Cluster, topic: str) -> None:
    fill(cluster, topic, [1, 2, 3])

    async def run() -> tuple[int, int, int]:
        async with quiver.connect_async(local.addresses[0]) as connected:
            scan = await connected.scan(topic)
            rows = sum([batch.num_rows async for batch in scan])
            return rows, (await scan.to_polars()).height, len(await scan.to_pandas())

    assert asyncio.run(run()) == (3, 3, 3)


# -- what objects show -----------------------------------------------------------------------------


def test_objects_say_what_they_are(local: LocalCluster, cluster: quiver.Cluster, topic: str) -> None:
    producer = cluster.producer(topic, name="<web>")
    consumer = cluster.consumer(topic, name=topic)
    scan = cluster.scan(topic)
    assert repr(cluster) == f"<Cluster cluster_id={cluster.cluster_id!r} nodes=({local.addresses[0]!r},)>"
    assert repr(producer).startswith(f"<Producer topic={topic!r} name='<web>' producer_id=")
    assert f"<Consumer topics=({topic!r},) name={topic!r}" in repr(consumer)
    assert f"{topic}/0: 0, {topic}/1: 0" in repr(consumer)
    assert repr(scan) == f"<Scan topic={topic!r} records=0 offsets='0: 0 to 0, 1: 0 to 0'>"
    for shown in (cluster, producer, consumer, scan, cluster.describe_topic(topic)):
        html = shown._repr_html_()
        assert html.startswith("<table>")
        assert html.endswith("</table>")
        assert "<web>" not in html


# -- timeouts --------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_calls_and_deliveries_fail_within_the_timeout_that_was_asked_for() -> None:
    endless_s = 3_600  # beyond the timeout of any test: what waits for it does not pass
    with LocalCluster(nodes=1) as mine, mine.connect(timeout=endless_s) as connected:
        connected.create_topic("logs", partitions=1)
        short = connected.with_timeout(0.5)
        assert short.list_topics() == ["logs"]
        producers = [
            connected.producer("logs", delivery_timeout=0.5),
            short.producer("logs"),
            connected.producer("logs", delivery_timeout=endless_s),
        ]
        consumer = connected.consumer("logs", name="report")
        consumer.seek(offset="latest")
        mine.kill(1)
        with pytest.raises(QuiverError):
            short.list_topics()
        for producer in producers[:2]:
            with pytest.raises(QuiverError):
                producer.send("x").result(timeout=endless_s)
        producers[2].send("x")
        with pytest.raises(OutcomeUnknownError, match="still in flight"):
            producers[2].flush(timeout=0.5)
        for producer in producers:
            producer.abort()


def test_mistyped_topic_is_not_created_where_it_was_asked_not_to(capsys: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(nodes=1, settings={"manager.creates_topics": "false"}) as mine, mine.connect() as connected:
        with pytest.raises(NotFoundError, match="typo"):
            connected.producer("typo")
        assert main(["produce", "typo", __file__, "--url", mine.urls[0]]) == 2
        assert "unknown_topic" in capsys.readouterr().err
        assert connected.list_topics() == []
        connected.create_topic("logs")
        connected.producer("logs").send("x").result()


def test_producer_can_refuse_to_create_its_topic(cluster: quiver.Cluster) -> None:
    with pytest.raises(NotFoundError, match="typo"):
        cluster.producer("typo-of-a-topic", create_topic=False)
    assert "typo-of-a-topic" not in cluster.list_topics()


# -- one user per name -----------------------------------------------------------------------------


def test_name_has_one_user_at_a_time_the_newest(local: LocalCluster, cluster: quiver.Cluster, topic: str) -> None:
    fill(cluster, topic, [1, 2, 3])
    older = cluster.consumer(topic, name=topic)
    assert [record.json() for record in _read(older, 3)] == [1, 2, 3]
    with local.connect() as elsewhere:
        newer = elsewhere.consumer(topic, name=topic)
        with pytest.raises(FencedError, match="opened again"):
            older.commit()
        fill(cluster, topic, [4])
        with pytest.raises(FencedError):
            _read(older, 1000)
        assert [record.json() for record in _read(newer, 4)] == [1, 2, 3, 4]
        newer.commit()
        again = elsewhere.consumer(topic, consumer_id=newer.consumer_id)
        assert again.size() == 0
        fill(cluster, topic, [5])
        with pytest.raises(FencedError):
            _read(newer, 1000)
    beside = cluster.consumer(topic, name=f"{topic}-beside")
    assert len(_read(beside, 5)) == 5
    cluster.move_cursors(topic, topic, {0: 1})  # operators and programs with offsets of their own are not users
