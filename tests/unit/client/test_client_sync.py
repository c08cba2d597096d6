"""The blocking interface: the same guarantees for calls from several threads."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

import quiver
from quiver.client.cluster import AsyncCluster
from quiver.client.options import ClusterOptions
from quiver.client.sync import Cluster
from quiver.client.thread import LoopThread, _Call
from quiver.clock import SystemClock
from quiver.errors import FencedError, OutcomeUnknownError, OverloadedError, RequestError, UnavailableError
from quiver.testing import Latency
from quiver.testing.memory_cluster import CallFaults, MemoryCluster


@pytest.fixture
def memory() -> MemoryCluster:
    return MemoryCluster(clock=SystemClock(), rng=random.Random(1), latency=Latency())


def connect(memory: MemoryCluster, *, timeout_ms: int = 10_000) -> Cluster:
    return Cluster(
        AsyncCluster(
            memory.addresses,
            transport=memory,
            clock=SystemClock(),
            rng=random.Random(2),
            options=ClusterOptions(timeout_ms=timeout_ms),
        )
    )


@pytest.fixture
def cluster(memory: MemoryCluster) -> Iterator[Cluster]:
    with connect(memory) as cluster:
        yield cluster


def test_the_first_example_works(cluster: Cluster) -> None:
    cluster.create_topic("logs", partitions=3)
    producer = cluster.producer("logs", name="web-1")
    position = producer.send("hello").result()
    assert position.offset == 0
    producer.send_many(["a", b"b", "c"], key=None, partition=None)
    producer.flush()
    consumer = cluster.consumer("logs", name="report", idle_timeout=0.3)
    assert sorted(record.text or "" for record in consumer) == ["a", "b", "c", "hello"]
    consumer.commit()
    consumer.seek(partition=position.partition, offset=0)
    assert consumer.size() >= 1
    table = consumer.fetch_arrow(max_records=1_000_000)
    assert isinstance(table, pa.Table)
    assert table.num_rows >= 1


def test_administration_has_the_same_surface(cluster: Cluster) -> None:
    cluster.create_topic("logs", partitions=1)
    cluster.create_topic("logs", partitions=1, exist_ok=True)
    cluster.add_partitions("logs", 2)
    cluster.configure_topic("logs", retention=quiver.RetentionInfo(bytes=1 << 20))
    assert len(cluster.describe_topic("logs").partitions) == 2
    assert cluster.list_topics() == ["logs"]
    assert len(cluster.brokers()) == 3
    assert cluster.cluster_id == "memory"
    consumer = cluster.consumer("logs", name="report")
    assert [info.name for info in cluster.clients("consumer")] == ["report"]
    cluster.forget("consumer", consumer.consumer_id or 0)
    cluster.drain(1)
    cluster.remove(1)
    cluster.delete_topic("logs")
    cluster.restore_topic("logs")


def test_both_faces_have_the_same_methods() -> None:
    for one, other in (
        (quiver.Cluster, quiver.AsyncCluster),
        (quiver.Producer, quiver.AsyncProducer),
        (quiver.Consumer, quiver.AsyncConsumer),
    ):
        own = {name for name in vars(one) if not name.startswith("_")}
        awaited = {name for name in vars(other) if not name.startswith("_")}
        assert own <= awaited
        # What only asyncio has: opening by hand, waiting for room by hand, and a step of the iteration.
        assert awaited - own <= {"open", "wait_room", "wait_batch", "facts"}


def test_many_threads_share_a_producer(cluster: Cluster, memory: MemoryCluster) -> None:
    cluster.create_topic("logs", partitions=2)
    producer = cluster.producer("logs", batch_bytes=5000)

    def send(thread: int) -> None:
        for number in range(500):
            producer.send(f"{thread} {number}", partition=thread % 2)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    producer.flush()
    for partition in range(2):
        values = [(value or b"").split() for value in memory.partition("logs", partition).values()]
        for thread_number in range(partition, 6, 2):
            own = [int(number) for name, number in values if int(name) == thread_number]
            assert own == list(range(500))


def test_full_buffer_makes_send_wait_until_there_is_room(cluster: Cluster, memory: MemoryCluster) -> None:
    cluster.create_topic("logs", partitions=1)
    producer = cluster.producer("logs", buffer_bytes=2048)
    for number in range(1000):
        producer.send(f"{number}")
    producer.send_many(f"{number}" for number in range(1000, 5000))
    producer.flush()
    assert memory.partition("logs", 0).values() == [f"{number}".encode() for number in range(5000)]


def test_headers_of_an_iterator_survive_a_wait_for_room(cluster: Cluster) -> None:
    cluster.create_topic("logs", partitions=1)
    producer = cluster.producer("logs", buffer_bytes=2048)
    for number in range(200):
        producer.send("x" * 500, headers=iter([("number", f"{number}".encode())]))
    producer.flush()
    records = list(cluster.consumer("logs", idle_timeout=0.3))
    assert [record.headers for record in records] == [(("number", f"{number}".encode()),) for number in range(200)]


def test_buffer_that_stays_full_is_an_error_and_nothing_is_accepted(memory: MemoryCluster) -> None:
    with connect(memory, timeout_ms=300) as cluster:
        cluster.create_topic("logs", partitions=1)
        producer = cluster.producer("logs", buffer_bytes=1024, delivery_timeout=60)
        memory.faults = CallFaults(lost_request=1.0)
        producer.send(b"x" * 900)
        with pytest.raises(OverloadedError) as refused:
            producer.send(b"y" * 900)
        assert refused.value.code == "buffer_full"
        memory.faults = CallFaults()
        producer.flush()
    assert memory.partition("logs", 0).values() == [b"x" * 900]


def test_result_timeout_is_unknown_and_can_be_repeated(cluster: Cluster, memory: MemoryCluster) -> None:
    cluster.create_topic("logs", partitions=1)
    producer = cluster.producer("logs")
    memory.faults = CallFaults(lost_request=1.0)
    delivery = producer.send("x")
    with pytest.raises(OutcomeUnknownError) as refused:
        delivery.result(timeout=0.05)
    assert refused.value.code == "timeout"
    memory.faults = CallFaults()
    assert delivery.result().offset == 0
    assert "offset 0" in repr(delivery)


def test_delivery_can_be_awaited_on_another_loop(cluster: Cluster) -> None:
    cluster.create_topic("logs", partitions=1)
    producer = cluster.producer("logs")

    async def send() -> int:
        return (await producer.send("x")).offset

    assert asyncio.run(send()) == 0


def test_callback_may_send_but_not_block(cluster: Cluster) -> None:
    cluster.create_topic("logs", partitions=1)
    producer = cluster.producer("logs")
    caught: list[str] = []
    is_called = threading.Event()

    def on_done(_: quiver.Delivery) -> None:
        try:
            producer.flush()
        except RequestError as error:
            caught.append(error.code)
        is_called.set()

    producer.send("x").add_done_callback(on_done)
    assert is_called.wait(10)
    assert caught == ["on_client_thread"]


def test_fenced_producer_raises_in_the_caller(cluster: Cluster) -> None:
    cluster.create_topic("logs", partitions=1)
    old = cluster.producer("logs", name="web-1")
    old.send("x").result()
    with cluster.producer("logs", name="web-1") as new:
        new.send("y").result()
        assert new.next_sequence(0) == 2
    with pytest.raises(FencedError):
        old.send("z").result()
    old.abort()


def test_consumer_keeps_its_position_across_ways_of_reading(cluster: Cluster) -> None:
    cluster.create_topic("logs", partitions=1)
    with cluster.producer("logs") as producer:
        producer.send_many(f"{number}" for number in range(10))
    with cluster.consumer("logs", name="report", auto_commit=60) as consumer:
        for record in consumer:
            if record.offset == 3:
                break
        assert [record.offset for record in consumer.poll(2)] == [4, 5]
        assert consumer.fetch_arrow(2).column("offset").to_pylist() == [6, 7]
        assert consumer.position(0) == 8
    with cluster.consumer("logs", name="report") as again:
        assert [record.offset for record in again.poll()] == [8, 9]
        assert (again.topic, again.partitions, again.skipped_count) == ("logs", (0,), 0)


def test_closed_cluster_raises_closed_and_closes_twice(memory: MemoryCluster) -> None:
    cluster = connect(memory)
    cluster.create_topic("logs", partitions=1)
    producer = cluster.producer("logs", linger_ms=10_000)
    delivery = producer.send("flushed")
    cluster.close()
    cluster.close()
    assert delivery.result(0).offset == 0
    with pytest.raises(RequestError) as refused:
        cluster.list_topics()
    assert refused.value.code == "closed"
    with pytest.raises(UnavailableError):
        producer.send("late")


def test_failed_connection_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(UnavailableError):
        quiver.connect("127.0.0.1:1", timeout=0.2)
    assert threading.active_count() == before


def test_client_from_before_a_fork_is_refused_in_the_child(cluster: Cluster) -> None:
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            cluster.list_topics()
        except RequestError as error:
            os.write(write_end, error.code.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 100) == b"forked"
    os.close(read_end)
    os.close(write_end)
    assert cluster.list_topics() == []


def test_importing_the_package_loads_no_optional_library() -> None:
    program = (
        "import sys, quiver; before = set(sys.modules); "
        "assert not [name for name in before if name.split('.')[0] in ('msgspec', 'asyncio', 'pyarrow', 'numpy')]; "
        "quiver.connect; assert 'quiver.client.sync' in sys.modules; "
        "assert not [name for name in sys.modules if name.split('.')[0] in ('pyarrow', 'numpy')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_is_exported() -> None:
    assert [name for name in quiver.__all__ if not hasattr(quiver, name)] == []
    with pytest.raises(AttributeError):
        quiver.nothing_of_the_kind  # noqa: B018 - the point


def test_program_that_does_not_close_still_sends_its_records() -> None:
    program = """
import random
import test_client_sync as tests
from quiver.clock import SystemClock
from quiver.testing import Latency
from quiver.testing.memory_cluster import MemoryCluster
import atexit
memory = MemoryCluster(clock=SystemClock(), rng=random.Random(1), latency=Latency())
atexit.register(lambda: print(memory.partition("logs", 0).values()))
cluster = tests.connect(memory)
cluster.create_topic("logs", partitions=1)
cluster.producer("logs", linger_ms=60_000).send("forgotten")
"""
    folder = os.path.dirname(__file__)
    found = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([folder, *sys.path])},
    )
    assert (found.stdout.strip(), found.stderr) == ("[b'forgotten']", "")


def test_call_that_is_cancelled_before_it_begins_ends_as_closed() -> None:
    thread, begun = LoopThread("quiver-test"), list[bool]()

    async def work() -> None:
        begun.append(True)

    call = _Call(work())

    def start_and_cancel() -> None:
        call.start()
        call.cancel()

    thread._loop.call_soon_threadsafe(start_and_cancel)
    with pytest.raises(UnavailableError) as caught:
        call.wait()
    assert (caught.value.code, begun) == ("closed", [])
    thread.close()
