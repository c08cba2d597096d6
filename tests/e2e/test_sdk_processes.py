"""The SDK against real nodes: leaders killed, nodes paused and restarted, buffers full, deadlines kept."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_cluster import Cluster as Processes
from chaos_cluster import running_cluster

import quiver
from quiver.errors import FencedError, OutcomeUnknownError, OverloadedError, UnavailableError


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with running_cluster(tmp_path_factory.mktemp("sdk")) as processes:
        yield processes


@pytest.fixture(autouse=True)
def _all_run(processes: Processes) -> None:
    processes.start()


def wires(processes: Processes) -> list[str]:
    return [node.wire for node in processes.nodes]


def make_topic(cluster: quiver.Cluster, topic: str, partitions: int = 3) -> None:
    """Create a topic on all three nodes; right after a start not all of them may have registered yet."""
    end = time.monotonic() + 120
    while True:
        try:
            cluster.create_topic(topic, partitions=partitions, replicas=3)
        except quiver.RequestError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
        else:
            return


def leader_of(cluster: quiver.Cluster, topic: str, partition: int) -> int:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found = cluster.describe_topic(topic).partitions[partition]
        if found.leader is not None and found.end_offset is not None:
            return found.leader
        time.sleep(0.1)
    raise AssertionError(f"{topic} {partition} has no leader")


def read_all(cluster: quiver.Cluster, topic: str, count: int) -> dict[int, list[str]]:
    """Return the texts of every partition, once there are so many of them."""
    found: dict[int, list[str]] = {}
    consumer = cluster.consumer(topic)
    for number, record in enumerate(consumer, start=1):
        found.setdefault(record.partition or 0, []).append(record.text or "")
        if number == count:
            break
    assert consumer.size() == 0
    consumer.close()
    return found


@pytest.mark.parametrize("kind", ["wire", "http", "bare http"])
def test_first_example_works_by_any_address(processes: Processes, kind: str) -> None:
    node = processes.nodes[1]
    address = {"wire": node.wire, "http": f"http://{node.http}", "bare http": node.http}[kind]
    topic = f"first-{kind.replace(' ', '-')}"
    with quiver.connect(address) as cluster:
        make_topic(cluster, topic)
        producer = cluster.producer(topic, name=f"web-{topic}")
        assert producer.send("hello").result().offset == 0
        producer.send_many([f"line {number}" for number in range(1000)])
        producer.flush()
        consumer = cluster.consumer(topic, name=f"report-{topic}")
        values = consumer.fetch_arrow().column("value").to_pylist()
        while len(values) < 1001:
            values += consumer.fetch_arrow().column("value").to_pylist()
        assert len(values) == 1001
        assert set(values) == {b"hello", *(f"line {number}".encode() for number in range(1000))}
        assert consumer.size() == 0
        consumer.commit()
        assert cluster.consumer(topic, name=f"report-{topic}").poll(timeout=0.2) == []


def test_killing_the_leader_neither_loses_doubles_nor_reorders(processes: Processes) -> None:
    with quiver.connect(*wires(processes)) as cluster:
        make_topic(cluster, "killed")
        producer = cluster.producer("killed", name="killer-test")
        deliveries: list[quiver.Delivery] = []
        for number in range(3000):
            deliveries.append(producer.send(f"{number}", partition=number % 3))
            if number == 1000:
                victim = leader_of(cluster, "killed", 0)
                processes.node(victim).kill()
            if number % 50 == 0:
                time.sleep(0.005)
        producer.flush()
        processes.node(victim).start()
        found = read_all(cluster, "killed", 3000)
        for partition in range(3):
            assert found[partition] == [f"{number}" for number in range(partition, 3000, 3)]
        for number, delivery in enumerate(deliveries):
            assert found[number % 3][delivery.result(0).offset] == f"{number}"


def test_paused_leader_is_left_for_the_next_one(processes: Processes) -> None:
    with quiver.connect(*wires(processes)) as cluster:
        make_topic(cluster, "paused", partitions=1)
        producer = cluster.producer("paused", name="pause-test")
        producer.send("before").result()
        victim = processes.node(leader_of(cluster, "paused", 0))
        victim.pause()
        try:
            assert producer.send("during").result(timeout=120).offset == 1
        finally:
            victim.resume()
        assert producer.send("after").result(timeout=120).offset == 2
        assert read_all(cluster, "paused", 3) == {0: ["before", "during", "after"]}


def test_restart_of_the_whole_cluster_is_only_a_wait(processes: Processes) -> None:
    with quiver.connect(*wires(processes)) as cluster:
        make_topic(cluster, "restarted", partitions=2)
        producer = cluster.producer("restarted", name="restart-test")
        consumer = cluster.consumer("restarted", name="restart-reader")
        for number in range(100):
            producer.send(f"{number}", partition=number % 2)
        producer.flush()
        read = [record.text for record in consumer.poll(40)]
        consumer.commit()
        for node in processes.nodes:
            node.kill()
        late = [producer.send(f"{number}", partition=number % 2) for number in range(100, 200)]
        processes.start()
        for delivery in late:
            delivery.result()
        while len(read) < 200:
            try:
                read += [record.text for record in consumer.poll(timeout=5)]
            except UnavailableError:
                continue
        assert sorted(read, key=lambda text: int(text or "")) == [f"{number}" for number in range(200)]


def test_restarted_client_goes_on_exactly(processes: Processes) -> None:
    lines = [f"line {number}" for number in range(500)]
    for cut in (120, 120, 333, 500):
        with quiver.connect(*wires(processes)) as cluster:
            cluster.create_topic("resumed", partitions=1, exist_ok=True)
            producer = cluster.producer("resumed", name="resumer")
            for line in lines[producer.next_sequence(0) : cut]:
                producer.send(line, partition=0)
            if cut == 333:
                processes.node(leader_of(cluster, "resumed", 0)).kill()
            producer.flush()
        processes.start()
    with quiver.connect(*wires(processes)) as cluster:
        assert read_all(cluster, "resumed", 500) == {0: lines}


def test_second_client_of_a_name_fences_the_first(processes: Processes) -> None:
    with quiver.connect(*wires(processes)) as one, quiver.connect(*wires(processes)) as other:
        make_topic(one, "fenced", partitions=1)
        old = one.producer("fenced", name="only-one")
        old.send("old").result()
        new = other.producer("fenced", name="only-one")
        new.send("new").result()
        with pytest.raises(FencedError):
            old.send("too late").result()
        new.send("newer").result()
        assert read_all(other, "fenced", 3) == {0: ["old", "new", "newer"]}
        old.abort()


def test_consumers_read_while_it_is_produced_and_a_node_dies(processes: Processes) -> None:
    with quiver.connect(*wires(processes)) as cluster:
        make_topic(cluster, "live")
        found: dict[str, list[tuple[int, str]]] = {name: [] for name in ("one", "two")}

        def read(name: str) -> None:
            consumer = cluster.consumer("live", name=f"live-{name}", auto_commit=0.2)
            for record in consumer:
                found[name].append((record.partition or 0, record.text or ""))
                if len(found[name]) == 600:
                    break
            consumer.close()

        readers = [threading.Thread(target=read, args=(name,)) for name in found]
        for reader in readers:
            reader.start()
        producer = cluster.producer("live", name="live-producer")
        for number in range(600):
            producer.send(f"{number}", partition=number % 3)
            time.sleep(0.002)
            if number == 200:
                processes.node(leader_of(cluster, "live", 1)).kill()
        producer.flush()
        for reader in readers:
            reader.join(60)
        for records in found.values():
            for partition in range(3):
                own = [text for where, text in records if where == partition]
                assert own == [f"{number}" for number in range(partition, 600, 3)]


def test_deadline_is_kept_and_the_truth_is_told_while_nothing_answers(processes: Processes) -> None:
    with quiver.connect(*wires(processes)) as cluster:
        make_topic(cluster, "silent", partitions=1)
        hasty = cluster.with_timeout(5)
        producer = hasty.producer("silent", delivery_timeout=15, buffer_bytes=4096)
        producer.send("there").result()
        waiting = threading.Thread(target=cluster.with_timeout(600).list_topics)
        patient_producer = cluster.producer("silent", delivery_timeout=600)
        for node in processes.nodes:
            node.pause()
        try:
            waiting.start()
            patient_delivery = patient_producer.send("later")
            with pytest.raises((UnavailableError, OutcomeUnknownError)):
                hasty.list_topics()
            perhaps = producer.send(b"perhaps" * 500)
            with pytest.raises(OverloadedError):
                producer.send(b"no room" * 500)
            with pytest.raises(OutcomeUnknownError):
                perhaps.result()
            assert waiting.is_alive(), "each call ends by its own deadline, and not with all others"
            assert not patient_delivery.is_done
        finally:
            for node in processes.nodes:
                node.resume()
        waiting.join()
        assert patient_delivery.result().offset >= 1
        assert producer.send("again").result(timeout=120).offset in (1, 2, 3)


def test_asyncio_face_works_against_real_nodes(processes: Processes) -> None:
    async def scenario() -> None:
        async with quiver.connect_async(processes.nodes[0].wire) as cluster:
            await cluster.create_topic("async", partitions=1, replicas=3, exist_ok=True)
            producer = await cluster.producer("async")
            positions = await asyncio.gather(*(producer.send(f"{number}") for number in range(200)))
            assert sorted(position.offset for position in positions) == list(range(200))
            consumer, found = await cluster.consumer("async"), list[str | None]()
            while len(found) < 200:
                found += [record.text for record in await consumer.poll(timeout=1)]
            assert found == [f"{number}" for number in range(200)]
            assert await consumer.size() == 0

    asyncio.run(scenario())


def test_cluster_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError):
        quiver.connect("127.0.0.1:9", timeout=1)
