"""Work queues on real nodes: threads, a dead leader, curl alone, and the commands for dead letters."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from waiting import wait_until

import quiver
from quiver.cli import main
from quiver.cli.output import UNAVAILABLE
from quiver.client.cursors import ConsumerCursors
from quiver.model import ConsumerId, Offset, PartitionId
from quiver.testing import LocalCluster

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(local: LocalCluster) -> Iterator[quiver.Cluster]:
    with local.connect() as connected:
        yield connected


def fill(cluster: quiver.Cluster, topic: str, number: int, *, partitions: int = 1) -> None:
    cluster.create_topic(topic, partitions=partitions, exist_ok=True)
    with cluster.producer(topic) as producer:
        for one in range(number):
            producer.send(f"job {one}", partition=one % partitions)


def curl(local: LocalCluster, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """Call a node with curl, as anybody would."""
    command = ["curl", "-s", "-w", "%{http_code}", "-X", "POST", "-d", msgspec.json.encode(body).decode()]
    done = subprocess.run([*command, f"{local.urls[0]}{path}"], capture_output=True, check=True)
    answer, status = done.stdout[:-3], int(done.stdout[-3:])
    return status, msgspec.json.decode(answer) if answer else {}


def test_lease_is_extended_while_the_workers_own_thread_is_blocked(cluster: quiver.Cluster) -> None:
    fill(cluster, "blocked", 1)
    with cluster.queue("blocked", group="blocked", lease=5) as queue:
        (job,) = queue.receive(timeout=120)
        with job:
            first_ms = job.ends_ms
            wait_until(lambda: job.ends_ms > first_ms)  # sleeps: nothing else runs in this thread


def test_threads_share_a_queue_while_a_leader_dies(local: LocalCluster, cluster: quiver.Cluster) -> None:
    fill(cluster, "threads", 300, partitions=3)
    seen: Counter[str] = Counter()
    unknown: set[str] = set()
    with local.connect() as connected:
        queue = connected.queue("threads", group="threads", lease=2)

        def work() -> None:
            for job in queue:
                text = job.text or ""
                try:
                    with job:
                        time.sleep(0.005)
                    seen[text] += 1
                except quiver.FencedError:
                    continue  # another thread has it
                except quiver.QuiverError:
                    unknown.add(text)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(seen) > 20)
        leader = cluster.describe_topic("threads").partitions[0].leader
        assert leader is not None
        local.kill(leader)
        wait_until(lambda: len(seen.keys() | unknown) == 300)
        queue.stop()
        for thread in threads:
            thread.join()
    local.start(leader)
    assert max(seen.values()) == 1
    left = cluster.describe_queue("threads").partitions
    assert sum(one.ready + one.leased + one.waiting for one in left) <= len(unknown - seen.keys())


def test_list_shows_the_queues_that_answer(
    local: LocalCluster, cluster: quiver.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.create_topic("alone", partitions=1, replicas=1)
    cluster.queue("alone", group="alone").close()
    fill(cluster, "shared", 3)
    cluster.queue("shared", group="shared").close()
    leader = cluster.describe_topic("alone").partitions[0].leader
    assert leader is not None
    local.kill(leader)
    try:
        urls = ",".join(url for node, url in zip(local.nodes, local.urls, strict=True) if node != leader)
        wait_until(lambda: cluster.describe_queue("shared").partitions[0].ready == 3)
        capsys.readouterr()
        assert main(["queue", "list", "--url", urls, "--timeout", "3"]) == UNAVAILABLE
    finally:
        local.start(leader)
    shown = capsys.readouterr()
    assert "queue alone: a partition of alone does not answer" in shown.err
    (row,) = [line.split() for line in shown.out.splitlines() if line.startswith("shared")]
    assert row == ["shared", "shared", "3", "0", "0", "0"]


def test_queue_has_no_cursors_to_reset(local: LocalCluster, cluster: quiver.Cluster, capsys: Output) -> None:
    fill(cluster, "final", 20)
    with cluster.queue("final", group="final") as queue:
        queue.receive(max=20, timeout=30).ack()
    (consumer,) = (one for one in cluster.clients("consumer", "final") if one.name == "final")
    with pytest.raises(quiver.ConflictError) as refused:
        cluster.reset(consumer.id, "final", "earliest")
    assert refused.value.code == "group_kind"
    with pytest.raises(quiver.ConflictError) as refused:
        cluster._run(_move_cursor(cluster, consumer.id))
    assert refused.value.code == "group_kind"
    assert main(["consumer", "reset", "final", "--topic", "final", "--to", "earliest", "--url", local.urls[0]]) == 2
    assert "work queue" in capsys.readouterr().err
    (partition,) = cluster.describe_queue("final").partitions
    assert (partition.cursor, partition.ready) == (20, 0)


async def _move_cursor(cluster: quiver.Cluster, consumer_id: int) -> None:
    """Move a cursor as clients did that asked nobody before."""
    router = cluster._cluster.router
    cursors = ConsumerCursors(router, "final", ConsumerId(consumer_id))
    await cursors.move(PartitionId(0), Offset(0), deadline=router.deadline())


def test_queue_of_a_topic_that_was_deleted_and_created_again(cluster: quiver.Cluster) -> None:
    fill(cluster, "short-lived", 2)
    (job,) = cluster.queue("short-lived", group="short").receive(timeout=120)
    job.ack()
    cluster.delete_topic("short-lived")
    assert cluster.describe_queue("short").partitions == ()
    fill(cluster, "short-lived", 1)
    (job,) = cluster.queue("short-lived", group="short").receive(timeout=120)
    assert (job.text, job.attempt) == ("job 0", 1)
    job.ack()
    assert [one.cursor for one in cluster.describe_queue("short").partitions] == [1]


def test_curl_is_enough_to_work(local: LocalCluster, cluster: quiver.Cluster) -> None:
    fill(cluster, "curled", 3)
    queue = {"topic": "curled", "group": "curled"}
    status, answer = curl(local, "/queue/receive", **queue, max=2)
    assert (status, [job["message"] for job in answer["jobs"]]) == (200, ["job 0", "job 1"])
    first, second = (job["receipt"] for job in answer["jobs"])
    assert curl(local, "/queue/ack", **queue, receipt=first) == (200, {"status": "success", "count": 1})
    assert curl(local, "/queue/nack", **queue, receipts=[second], delay_ms=0)[0] == 200
    status, answer = curl(local, "/queue/receive", **queue, max=10, wait_ms=2000)
    assert {job["message"]: job["attempt"] for job in answer["jobs"]}["job 1"] == 2
    status, answer = curl(local, "/queue/ack", **queue, receipt=second)
    assert (status, answer["code"]) == (409, "stale_receipt")


def test_curl_changes_the_settings_of_a_queue(local: LocalCluster, cluster: quiver.Cluster) -> None:
    fill(cluster, "settled", 1)
    cluster.queue("settled", group="settled", max_attempts=7).close()
    path = "/groups/settled/queue"
    assert curl(local, path, lease_ms=90_000, order="key", dead_letter_topic="graves")[0] == 200
    settings = cluster.describe_queue("settled").settings
    assert (settings.lease_ms, settings.order, settings.max_attempts) == (90_000, "key", 7)
    assert settings.dead_letter_topic == "graves"
    assert curl(local, path, dead_letter_topic="")[0] == 200
    assert cluster.describe_queue("settled").settings.dead_letter_topic == ""
    assert curl(local, path)[0] == 400
    assert curl(local, path, lease_ms=0)[0] == curl(local, path, dead_letter_topic="settled")[0] == 422
    assert curl(local, "/groups/nobody/queue", lease_ms=1)[0] == 404


def test_dead_letters_are_listed_shown_requeued_and_purged(
    local: LocalCluster, cluster: quiver.Cluster, capsys: Output
) -> None:
    fill(cluster, "letters", 3)
    with cluster.queue("letters", group="readers") as queue:
        jobs: list[quiver.Job] = []
        while len(jobs) < 3:
            jobs += queue.receive(3)
        for job in jobs:
            job.reject(f"bad {job.text}")

    def run(*arguments: str) -> str:
        assert main(["queue", *arguments, "--url", local.addresses[0]]) == 0
        return capsys.readouterr().out

    def count() -> int:
        return len(msgspec.json.decode(run("dead", "list", "readers", "--json")))

    wait_until(lambda: count() == 3)
    assert "bad job 1" in run("dead", "list", "readers")
    assert "quiver-dead-reason: bad job 2" in run("dead", "show", "readers", "0:2")
    assert run("dead", "requeue", "readers", "0:1") == "requeued 1 dead letter\n"
    assert count() == 2
    with cluster.queue("letters", group="readers") as queue:
        (job,) = queue.receive(10, timeout=120)
        assert (job.text, job.offset, job.headers) == ("job 1", 3, ())
        job.ack()
    assert run("dead", "purge", "readers", "--reason", "job 2", "--yes") == "purged 1 dead letter\n"
    assert count() == 1
    assert main(["queue", "dead", "requeue", "readers", "0:1", "--url", local.addresses[0]]) == 2
    assert "unknown_letter" in capsys.readouterr().err
    assert run("dead", "requeue", "readers", "--all") == "requeued 1 dead letter\n"
    assert "no dead letters" in run("dead", "list", "readers")
    assert "letters" in run("list")
    assert run("configure", "readers", "--lease", "2m") == "configured readers\n"
    assert "lease: 2m" in run("describe", "readers")
