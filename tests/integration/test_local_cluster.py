"""A cluster in one process, as users' tests have it: faults on demand, and nothing acknowledged is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from waiting import wait_until

import quiver
from quiver.testing import LocalCluster

pytest_plugins = ["pytester"]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3) as running:
        yield running


def leader_of(client: quiver.Cluster, topic: str, partition: int = 0) -> int | None:
    return client.describe_topic(topic).partitions[partition].leader


def are_all_in_sync(client: quiver.Cluster, topic: str) -> bool:
    """Report whether every replica of a topic has caught up: until then it may need the node that is stopped."""
    return all(sorted(one.in_sync) == sorted(one.replicas) for one in client.describe_topic(topic).partitions)


def read_all(client: quiver.Cluster, topic: str, count: int) -> list[str | None]:
    with client.consumer(topic, idle_timeout=20) as consumer:
        texts: list[str | None] = []
        for record in consumer:
            texts.append(record.text)
            if len(texts) == count:
                break
        assert consumer.poll(timeout=0.2) == []
    return texts


def test_killed_leader_loses_nothing_and_comes_back(cluster: LocalCluster) -> None:
    with cluster.connect() as client:
        client.create_topic("logs", partitions=1)
        with client.producer("logs") as producer:
            producer.send_many([f"before {n}" for n in range(50)])
            producer.flush()
            leader = leader_of(client, "logs")
            assert leader is not None
            cluster.kill(leader)
            assert not cluster.is_running(leader)
            for number in range(10):
                producer.send(f"after {number}").result()
        wanted = [f"before {n}" for n in range(50)] + [f"after {n}" for n in range(10)]
        assert read_all(client, "logs", 60) == wanted
        cluster.start(leader)
        wait_until(lambda: set(client.describe_topic("logs").partitions[0].in_sync) == {1, 2, 3})


def test_paused_leader_is_replaced_and_falls_in_line(cluster: LocalCluster) -> None:
    with cluster.connect() as client:
        client.create_topic("logs", partitions=1)
        with client.producer("logs") as producer:
            producer.send("one").result()
            leader = leader_of(client, "logs")
            assert leader is not None
            cluster.pause(leader)
            producer.send("two").result()
            cluster.resume(leader)
        assert read_all(client, "logs", 2) == ["one", "two"]
        wait_until(lambda: set(client.describe_topic("logs").partitions[0].in_sync) == {1, 2, 3})


def test_leader_that_is_cut_off_from_the_others_steps_down(cluster: LocalCluster) -> None:
    with cluster.connect() as client:
        client.create_topic("logs", partitions=1)
        with client.producer("logs") as producer:
            producer.send("one").result()
            leader = leader_of(client, "logs")
            assert leader is not None
            for other in cluster.nodes:
                if other != leader:
                    cluster.cut(leader, other)
            producer.send("two").result()
            cluster.heal()
        assert read_all(client, "logs", 2) == ["one", "two"]


def test_everything_survives_that_all_nodes_are_killed(cluster: LocalCluster) -> None:
    with cluster.connect() as client:
        client.create_topic("logs", partitions=3)
        with client.producer("logs", name="web") as producer:
            for number in range(30):
                producer.send(str(number), partition=number % 3).result()
        for node in cluster.nodes:
            cluster.kill(node)
        for node in cluster.nodes:
            cluster.start(node, wait=False)
        cluster.wait_ready()
        assert client.list_topics() == ["logs"]
        assert sorted(read_all(client, "logs", 30), key=lambda text: int(text or -1)) == [str(n) for n in range(30)]


def test_node_that_is_stopped_hands_over_first(cluster: LocalCluster) -> None:
    with cluster.connect() as client:
        client.create_topic("logs", partitions=3)
        with client.producer("logs") as producer:
            for node in cluster.nodes:
                producer.send_many([f"{node} {n}" for n in range(100)])
                wait_until(lambda: are_all_in_sync(client, "logs"))
                cluster.stop(node)
                producer.send_many([f"{node} {n}" for n in range(100, 200)])
                producer.flush()
                cluster.start(node)
        assert len(set(read_all(client, "logs", 600))) == 600


def test_status_tells_of_nodes_that_do_not_answer(cluster: LocalCluster) -> None:
    with cluster.connect() as client:
        client.create_topic("logs")
        cluster.kill(2)
        overview = client.status()
    assert {node.node: node.is_alive for node in overview.nodes} == {1: True, 2: False, 3: True}
    assert overview.cluster_id == "quiver"
    assert [topic.topic for topic in overview.topics] == ["logs"]


def test_fixture_gives_a_cluster_to_any_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_it(quiver_cluster):
            with quiver_cluster.connect() as client:
                client.create_topic("logs")
                assert client.producer("logs").send("hello").result().offset == 0
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


def test_fixture_serves_groups_and_work_queues(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_it(quiver_cluster):
            with quiver_cluster.connect() as client:
                client.create_topic("jobs", partitions=2)
                with client.producer("jobs") as producer:
                    for number in range(10):
                        producer.send(str(number), partition=number % 2)
                members = [client.consumer("jobs", group="readers") for _ in range(2)]
                read = []
                while len(read) < 10:
                    read += [record.text for member in members for record in member.poll(timeout=0.1)]
                assert sorted(read, key=int) == [str(number) for number in range(10)]
                done, queue = [], client.queue("jobs", group="workers", backoff=0.01)
                for job in queue:
                    try:
                        with job:
                            if job.text == "3" and job.attempt == 1:
                                raise ValueError(job.text)
                            done.append(job.text)
                    except ValueError:
                        quiver_cluster.kill(client.describe_topic("jobs").partitions[1].leader)
                    if len(done) == 10:
                        queue.stop()
                assert sorted(done, key=int) == [str(number) for number in range(10)]
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
