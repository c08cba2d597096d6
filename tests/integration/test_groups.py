"""Consumer groups on three real nodes: members share, leave, block, restart; the primary dies; cursors are reset."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import pytest

import quiver
from quiver.cli import main
from quiver.cli.output import TERMINATED
from quiver.model import ConsumerId, Offset, PartitionId
from quiver.routing.router import Router
from quiver.testing import LocalCluster
from quiver.wire.group_messages import AssignedPartition, DescribeGroups, GroupHeartbeat, JoinGroup
from quiver.wire.messages import Fetch, MoveCursor, TopicInfo

PARTITIONS = 6
_numbers = count()


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(local: LocalCluster) -> Iterator[quiver.Cluster]:
    with local.connect() as connected:
        yield connected


@pytest.fixture
def topic(cluster: quiver.Cluster) -> str:
    """A topic of its own for each test; its group has the same name."""
    name = f"orders-{next(_numbers)}"
    cluster.create_topic(name, partitions=PARTITIONS)
    return name


def fill(cluster: quiver.Cluster, topic: str, numbers: Sequence[int]) -> None:
    with cluster.producer(topic) as producer:
        for number in numbers:
            producer.send(f"{number}", partition=number % PARTITIONS)


def wait_shares(members: Sequence[quiver.Consumer], *shares: int) -> None:
    """Poll until the members have so many partitions; there must be no records."""
    while sorted(len(one.assignment) for one in members) != sorted(shares):
        for one in members:
            assert one.poll(timeout=0.02) == []


def read(members: Sequence[quiver.Consumer], total: int) -> list[int]:
    found: list[quiver.Record] = []
    while len(found) < total:
        for one in members:
            found += one.poll(timeout=0.05)
    return [int(record.text or "") for record in found]


def poll_for_ever(consumer: quiver.Consumer) -> None:
    while True:
        consumer.poll(timeout=0.1)


def test_members_share_a_topic_and_a_clean_leave_loses_and_repeats_nothing(cluster: quiver.Cluster, topic: str) -> None:
    with cluster.consumer(topic, group=topic) as first:
        second = cluster.consumer(topic, group=topic)
        wait_shares([first, second], 3, 3)
        fill(cluster, topic, range(60))
        seen = read([first, second], 60)
        assert not {*first.assignment} & {*second.assignment}
        second.close()
        wait_shares([first], PARTITIONS)
        fill(cluster, topic, range(60, 120))
        seen += read([first], 60)
    assert sorted(seen) == list(range(120))
    assert [lag.lag for lag in cluster.group_lag(topic)] == [0] * PARTITIONS
    assert cluster.describe_group(topic).state == "empty"


def test_slow_handler_keeps_its_partitions(cluster: quiver.Cluster, topic: str) -> None:
    fill(cluster, topic, range(PARTITIONS))
    with cluster.consumer(topic, group=topic, session_timeout=3) as member:
        known, before = member.member_id, cluster.describe_group(topic).rebalances
        for number, _ in enumerate(member, start=1):
            if number == 1:
                time.sleep(4)
            if number == PARTITIONS:
                break
        assert member.member_id == known
        member.commit()
        assert cluster.describe_group(topic).rebalances == before


def test_blocked_event_loop_keeps_its_partitions(local: LocalCluster, topic: str) -> None:
    async def scenario() -> None:
        async with quiver.connect_async(*local.addresses) as cluster:
            async with await cluster.producer(topic) as producer:
                await producer.send("x", partition=0)
            async with await cluster.consumer(topic, group=topic, session_timeout=3) as member:
                known = member.member_id
                assert await member.poll(timeout=60)
                time.sleep(4)  # noqa: ASYNC251 - it blocks the loop on purpose
                await member.commit()
                assert member.member_id == known
                assert len(member.assignment) == PARTITIONS

    asyncio.run(scenario())


def test_static_member_is_restarted_without_a_rebalance_of_others(cluster: quiver.Cluster, topic: str) -> None:
    with cluster.consumer(topic, group=topic, instance="a") as first:
        second = cluster.consumer(topic, group=topic, instance="b")
        wait_shares([first, second], 3, 3)
        kept, moved = first.assignment, second.assignment
        third = cluster.consumer(topic, group=topic, instance="b")  # as a process that was started again
        wait_shares([third], 3)
        assert (third.assignment, first.assignment) == (moved, kept)
        fill(cluster, topic, range(60))
        assert sorted(read([first, third], 60)) == list(range(60))
        with pytest.raises(quiver.FencedError, match="another process"):
            poll_for_ever(second)
        assert third.assignment == moved
        third.close()


def test_reset_moves_active_members_only_if_it_is_forced(cluster: quiver.Cluster, topic: str) -> None:
    fill(cluster, topic, range(60))
    with cluster.consumer(topic, group=topic) as member:
        read([member], 60)
        with pytest.raises(quiver.ConflictError) as refused:
            cluster.reset_group(topic, "earliest")
        assert refused.value.code == "group_active"
        cluster.reset_group(topic, shift=-100, force=True)
        assert sorted(read([member], 60)) == list(range(60))
    cluster.reset_group(topic, 7, partitions=[2])
    assert [lag.cursor for lag in cluster.group_lag(topic)] == [10, 10, 7, 10, 10, 10]


def test_plain_consumer_is_refused_while_the_group_has_members(cluster: quiver.Cluster, topic: str) -> None:
    fill(cluster, topic, range(PARTITIONS))
    with cluster.consumer(topic, group=topic) as member:
        read([member], PARTITIONS)
        with pytest.raises(quiver.ConflictError) as refused:
            cluster.consumer(topic, name=topic)
        assert refused.value.code == "group_active"
    with cluster.consumer(topic, name=topic) as plain:
        assert plain.poll(timeout=0.2) == []
        with cluster.consumer(topic, group=topic) as member:
            wait_shares([member], PARTITIONS)
            fill(cluster, topic, range(PARTITIONS))
            read([member], PARTITIONS)
            with pytest.raises(quiver.FencedError):
                poll_for_ever(plain)


def test_calls_without_a_session_are_refused_while_the_group_has_members(
    local: LocalCluster, cluster: quiver.Cluster, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(path: str, **body: Any) -> tuple[int, Any]:
        data = json.dumps(body).encode() if body else None
        try:
            with urllib.request.urlopen(f"{local.urls[0]}{path}", data, timeout=30) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    fill(cluster, topic, range(60))
    cluster.move_cursors(topic, topic, dict.fromkeys(range(PARTITIONS), 2))  # as Spark does; its registration is kept
    consumer_id = call("/consumer/register", topic=topic, group=topic)[1]["consumer_id"]
    assert call(f"/consumer/consume?topic={topic}&consumer_id={consumer_id}&partition_id=0")[0] == 200
    with cluster.consumer(topic, group=topic) as member:
        assert len(read([member], 47)) == 47
        member.commit()
        for query in ("", "&partition_id=1", "&partition_id=1&offset=2", "&wait_ms=1000"):
            status, refused = call(f"/consumer/consume?topic={topic}&consumer_id={consumer_id}{query}")
            assert (status, refused["code"]) == (409, "group_active")
        assert call(f"/consumer/consume_batch?topic={topic}&consumer_id={consumer_id}")[0] == 409
        with pytest.raises(quiver.FencedError):
            cluster.move_cursors(topic, topic, {0: 0})
        for where in ("earliest", "latest"):
            with pytest.raises(quiver.ConflictError) as conflict:
                cluster.reset(consumer_id, topic, where)
            assert conflict.value.code == "group_active"
        assert main(["consumer", "reset", topic, "--topic", topic, "--to", "earliest", "--url", local.urls[0]]) == 2
        assert "group_active" in capsys.readouterr().err
        assert [lag.cursor for lag in cluster.group_lag(topic)] == [10] * PARTITIONS
    cluster.reset(consumer_id, topic, "earliest")  # the last member has left
    assert call(f"/consumer/consume?topic={topic}&consumer_id={consumer_id}&partition_id=1")[1]["offset"] == 0
    cluster.move_cursors(topic, topic, {0: 5})
    assert [lag.cursor for lag in cluster.group_lag(topic)] == [5, 1, 0, 0, 0, 0]


def test_deleted_group_ends_its_members_and_is_not_made_again(cluster: quiver.Cluster, topic: str) -> None:
    member = cluster.consumer(topic, group=topic)
    cluster.delete_group(topic, force=True)
    with pytest.raises(quiver.NotFoundError) as refused:
        poll_for_ever(member)
    assert refused.value.code == "unknown_group"
    member.close()
    assert topic not in [one.group for one in cluster.groups()]


def test_program_that_exits_without_closing_leaves_its_group(
    local: LocalCluster, cluster: quiver.Cluster, topic: str
) -> None:
    program = (
        "import sys, quiver\n"
        "cluster = quiver.connect(*sys.argv[2:])\n"
        "member = cluster.consumer(sys.argv[1], group=sys.argv[1], on_revoke=lambda places: print(len(places)))\n"
        "assert len(member.poll(3, timeout=30)) > 0\n"
        "member.poll(3, timeout=30), 1 / 0\n"
    )
    fill(cluster, topic, [0] * 6)
    command = [sys.executable, "-c", program, topic, *local.addresses]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, f"{PARTITIONS}\n")
    assert run.stderr.strip().endswith("ZeroDivisionError: division by zero")
    assert cluster.describe_group(topic).state == "empty"
    assert sum(lag.cursor for lag in cluster.group_lag(topic)) == 3  # not what it received last


def test_callbacks_of_threads_may_call_the_consumer(cluster: quiver.Cluster, topic: str) -> None:
    fill(cluster, topic, range(60))
    seen: list[str] = []

    def on_assign(places: Sequence[tuple[str, int]]) -> None:
        for _, partition in places:
            member.seek(partition, 9)
        seen.append("assign")

    def on_revoke(_: Sequence[tuple[str, int]]) -> None:
        member.commit()
        seen.append("revoke")

    member = cluster.consumer(topic, group=topic, on_assign=on_assign, on_revoke=on_revoke)
    assert sorted(read([member], PARTITIONS)) == list(range(54, 60))
    member.close()
    assert (seen[0], seen[-1]) == ("assign", "revoke")
    assert [lag.lag for lag in cluster.group_lag(topic)] == [0] * PARTITIONS


def test_consume_that_is_terminated_commits_and_leaves_its_group(
    local: LocalCluster, cluster: quiver.Cluster, topic: str
) -> None:
    command = ("consume", topic, "--group", topic, "--follow", "--url", local.urls[0])
    process = subprocess.Popen([sys.executable, "-m", "quiver", *command], stdout=subprocess.PIPE, text=True)
    fill(cluster, topic, range(60))
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(60)]
    time.sleep(0.5)  # what was received last counts as finished when more is asked for, right after it is printed
    process.terminate()
    assert process.communicate()[0] == ""
    assert process.returncode == TERMINATED
    assert sorted(map(int, lines)) == list(range(60))
    assert cluster.describe_group(topic).members == ()
    assert [lag.lag for lag in cluster.group_lag(topic)] == [0] * PARTITIONS


def test_commands_work_on_groups(
    local: LocalCluster, cluster: quiver.Cluster, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*arguments, "--url", local.urls[0]]) == code
        return "".join(capsys.readouterr())

    fill(cluster, topic, range(60))
    assert sorted(map(int, run("consume", topic, "--group", topic).split())) == list(range(60))
    assert run("consume", topic, "--group", topic) == ""
    assert len(run("consume", topic, "--group", topic, "--from", "8").split()) == 12
    assert "empty" in run("group", "list")
    assert [one["lag"] for one in json.loads(run("group", "lag", topic, "--json"))] == [0] * PARTITIONS
    with cluster.consumer(topic, group=topic, instance="worker-1") as member:
        wait_shares([member], PARTITIONS)
        shown = run("group", "describe", topic)
        assert "stable; 1 member" in shown
        assert shown.count("owned") == PARTITIONS
        assert run("group", "lag", topic).count("worker-1") == PARTITIONS
        assert "group_active" in run("group", "reset", topic, "--to", "earliest", code=2)
        assert "group_active" in run("group", "delete", topic, code=2)
    assert "--dry-run" in run("group", "reset", topic, "--shift", "-2", "--dry-run")
    (moved,) = json.loads(run("group", "reset", topic, "--shift", "-2", "--partition", "1", "--json"))
    assert (moved["partition"], moved["cursor"], moved["target"]) == (1, 10, 8)
    assert len(run("consume", topic, "--group", topic, "--max", "1").split()) == 1
    assert "give either" in run("group", "reset", topic, code=2)
    run("group", "delete", topic)
    assert "unknown_group" in run("group", "describe", topic, code=2)


def test_groups_are_served_over_http(local: LocalCluster, cluster: quiver.Cluster, topic: str) -> None:
    def call(method: str, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"{local.urls[1]}{path}", method=method, data=data)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    fill(cluster, topic, range(12))
    with cluster.consumer(topic, group=topic) as member:
        read([member], 12)
        assert topic in [one["group"] for one in call("GET", "/groups")["groups"]]
        (described,) = call("GET", f"/groups/{topic}")["members"]
        assert described["member_id"] == member.member_id
        assert len(described["partitions"]) == PARTITIONS
    assert call("GET", f"/groups/{topic}/lag")["lag"] == 0
    cursors = call("POST", f"/groups/{topic}/reset", to="earliest")["cursors"]
    assert [one["after"] for one in cursors] == [0] * PARTITIONS
    assert call("GET", f"/groups/{topic}/lag")["lag"] == 12
    assert call("DELETE", f"/groups/{topic}") == {"status": "success"}


def test_member_that_was_replaced_is_refused_by_the_partition_itself(
    local: LocalCluster, cluster: quiver.Cluster, topic: str
) -> None:
    fill(cluster, topic, [0] * 5)

    async def use(router: Router, member: str, **fields: Any) -> AssignedPartition:
        """Join, and begin the epoch of partition 0 there."""
        request = JoinGroup(group=topic, topics=(topic,), member_id=member, session_timeout_ms=3_000, **fields)
        joined, _ = await router.ask(request, deadline=router.deadline())
        seen = 0
        while True:
            beat = GroupHeartbeat(group_id=joined.group_id, member_id=member, seen=seen, wait_ms=300)
            found, _ = await router.ask(beat, deadline=router.deadline())
            seen = found.version
            for one in found.owned:
                if one.partition_id == 0:
                    await move(router, joined.group_id, one.epoch, 0, only_new=True)
                    return one

    async def move(router: Router, group_id: ConsumerId, session: int, offset: int, *, only_new: bool = False) -> None:
        def build(info: TopicInfo) -> MoveCursor:
            cursors = ((group_id, Offset(offset)),)
            return MoveCursor(
                topic_id=info.topic_id,
                partition_id=PartitionId(0),
                cursors=cursors,
                only_new=only_new,
                session=session,
            )

        await router.ask_leader(topic, PartitionId(0), build, deadline=router.deadline())

    async def fetch(router: Router, group_id: ConsumerId, session: int) -> None:
        def build(info: TopicInfo) -> Fetch:
            return Fetch(
                topic_id=info.topic_id,
                partition_id=PartitionId(0),
                offset=Offset(0),
                bytes_max=1,
                reader=(group_id, session),
            )

        await router.ask_leader(topic, PartitionId(0), build, deadline=router.deadline())

    async def main() -> None:
        async with quiver.connect_async(local.urls[0]) as connected:
            router = connected.router
            zombie = await use(router, "zombie")
            group_id = (
                (await router.ask(DescribeGroups(groups=(topic,)), deadline=router.deadline()))[0].groups[0].group_id
            )
            await move(router, group_id, zombie.epoch, 3)
            heir = await use(router, "heir")  # gets it when the zombie, which is silent from now on, has expired
            assert heir.epoch > zombie.epoch
            for act in (move(router, group_id, zombie.epoch, 5), fetch(router, group_id, zombie.epoch)):
                with pytest.raises(quiver.FencedError):
                    await act
            await fetch(router, group_id, heir.epoch)
            await move(router, group_id, heir.epoch, 4)

    asyncio.run(main())


def test_dead_primary_costs_the_group_nothing(local: LocalCluster, cluster: quiver.Cluster, topic: str) -> None:
    with (
        cluster.consumer(topic, group=topic, session_timeout=6) as first,
        cluster.consumer(topic, group=topic, session_timeout=6) as second,
    ):
        wait_shares([first, second], 3, 3)
        known, shares = (first.member_id, second.member_id), (first.assignment, second.assignment)
        rebalances = cluster.describe_group(topic).rebalances
        primary = cluster.managers().primary
        assert primary is not None
        local.kill(primary)
        fill(cluster, topic, range(60))
        assert sorted(read([first, second], 60)) == list(range(60))
        end = time.monotonic() + 7  # longer than the session timeout
        while time.monotonic() < end:
            assert read([first, second], 0) == []
            first.poll(timeout=0.2)
        assert (first.member_id, second.member_id) == known
        assert (first.assignment, second.assignment) == shares
        assert cluster.describe_group(topic).rebalances == rebalances
        local.start(primary)
