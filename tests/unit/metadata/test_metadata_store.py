"""Managers together: what is acknowledged stays, what is replayed is replayed once, and all have the same."""

from __future__ import annotations

import asyncio
from random import Random

import msgspec
import pytest
from metadata_cluster import Cluster, simulate
from metadata_world import create_topic, init_cluster, register_broker, register_consumer, register_producer

from quiver.config import MetadataSettings
from quiver.errors import (
    ConflictError,
    OutcomeUnknownError,
    OutOfRangeError,
    OverloadedError,
    QuiverError,
    UnavailableError,
)
from quiver.metadata import (
    Change,
    CommandDone,
    MetadataStore,
    NotPrimaryError,
    RegisterConsumerResult,
    Table,
    WatchEvent,
)
from quiver.metadata import clients as clients_module
from quiver.metadata import store as store_module
from quiver.metadata.commands import CONTROL_STATE
from quiver.metrics import MetricReader
from quiver.model import ConsumerId, Index, NodeId
from quiver.node_metrics import describe_metadata
from quiver.record import build_batch, build_control_batch
from quiver.testing import SimulatedClock, SimulatedExecutor


async def form(cluster: Cluster) -> None:
    for number in (1, 2, 3):
        await cluster.submit(register_broker(number))
    await cluster.submit(create_topic(request_id="r"))


def test_what_is_submitted_at_the_primary_is_everywhere() -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        assert await cluster.submit(register_consumer()) == RegisterConsumerResult(ConsumerId(1))
        await cluster.wait_equal()
        view = (await cluster.replica()).store.view()
        assert list(view.consumers) == [1]

    simulate(test)


def test_result_is_in_the_primarys_own_database() -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        primary = await cluster.primary()
        await cluster.submit(register_consumer())
        assert list(primary.load_database().view().consumers) == [1]

    simulate(test)


def test_replica_says_who_the_primary_is() -> None:
    async def test(cluster: Cluster) -> None:
        primary, replica = await cluster.primary(), await cluster.replica()
        await cluster.wait(lambda: replica.store.primary)
        with pytest.raises(NotPrimaryError) as caught:
            await replica.store.submit(init_cluster())
        assert caught.value.leader == primary.id
        assert (primary.store.is_primary, replica.store.is_primary) == (True, False)
        with pytest.raises(NotPrimaryError):
            await replica.store.read(linearizable=True)

    simulate(test)


def test_refusal_is_an_error_with_its_code_and_the_same_everywhere() -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        with pytest.raises(ConflictError) as caught:
            await cluster.submit(create_topic())
        assert (caught.value.code, caught.value.outcome) == ("topic_exists", "not_done")
        await cluster.wait_equal()

    simulate(test)


def test_value_that_no_member_could_read_never_gets_into_the_log() -> None:
    async def test(cluster: Cluster) -> None:
        primary = await cluster.primary()
        before = primary.member.commit_index
        for name in ("x\x00", "x" * 1000, "\ud800"):
            with pytest.raises(OutOfRangeError):
                await primary.store.submit(register_producer(name=name))
        with pytest.raises(OutOfRangeError):
            await primary.store.submit(register_producer(now_ms=2**70))
        assert primary.member.commit_index == before

    simulate(test)


def test_commands_under_way_together_share_transactions() -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        primary = await cluster.primary()
        before = primary.store.status().transactions
        submits = [primary.store.submit(register_consumer()) for _ in range(200)]
        found = await asyncio.gather(*submits)
        assert sorted(item.consumer_id for item in found) == list(range(1, 201))
        assert primary.store.status().transactions - before < 20
        assert primary.store.status().submits == 0
        await cluster.wait_equal()

    simulate(test)


@pytest.mark.parametrize("loses_power", [False, True])
def test_restart_replays_what_the_database_does_not_have_no_more_and_no_less(loses_power: bool) -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        manager = cluster[1]
        for _ in range(3):
            await cluster.submit(register_consumer())
        with cluster.loop.node_scope(manager.id):
            for _ in range(50):
                cluster.loop.create_task(manager.store.submit(register_consumer()))
        # Stop in the very moment when some of it is applied in memory and not in the database.
        store = manager.store
        await cluster.wait(lambda: store.applied_index > store.stored_index or None, step_s=0.00005)
        applied = manager.store.applied_index
        manager.kill(loses_power=loses_power)
        stored = manager.load_database().position.index
        assert stored < applied
        manager.start()
        await cluster.primary()
        await cluster.wait(lambda: manager.store.applied_index >= applied or None)
        machine = manager.store.machine
        commands = machine.applied_commands
        # Behind what was stored: commands, and the no-op that a new leader begins with.
        assert commands == manager.store.applied_index - stored - 1
        assert machine.skipped_entries == stored
        await cluster.wait_equal()
        assert len(manager.store.view().consumers) == manager.store.view().counters.next_consumer_id - 1 >= 3

    simulate(test, managers=1)


def test_lost_database_is_rebuilt_from_snapshot_and_log() -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        for _ in range(10):
            await cluster.submit(register_consumer())
        primary = await cluster.primary()
        assert await primary.store.compact(entries_min=10)
        assert await primary.store.compact(entries_min=1000) is False
        for _ in range(5):
            await cluster.submit(register_consumer())
        before = primary.store.view()
        primary.kill()
        primary.lose_database()
        primary.start()
        await cluster.wait_equal()
        assert primary.store.machine.skipped_entries == 0
        assert primary.store.machine.applied_commands == 5 + 1
        assert primary.load_database().view().digest() == before.digest()

    simulate(test, managers=1)


def test_database_that_is_ahead_of_the_snapshot_keeps_what_it_has() -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        manager = cluster[1]
        await manager.member.take_snapshot()
        for _ in range(5):
            await cluster.submit(register_consumer())
        manager.kill()
        manager.start()
        await cluster.wait_equal()
        assert (manager.store.machine.applied_commands, manager.store.machine.skipped_entries) == (1, 5)

    simulate(test, managers=1)


def test_replica_that_was_away_gets_a_snapshot_and_its_database_with_it() -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        replica = await cluster.replica()
        replica.kill()
        for _ in range(200):
            await cluster.submit(register_consumer())
        primary = await cluster.primary()
        for _ in range(2):
            await primary.member.take_snapshot()
            await cluster.submit(register_consumer())
        assert primary.member.log.first_index > 100
        replica.start()
        await cluster.wait_equal()
        assert replica.store.machine.applied_commands < 100

    simulate(test)


@pytest.mark.parametrize("seed", range(6))
def test_managers_stay_equal_and_forget_nothing_while_they_are_killed(seed: int) -> None:
    async def test(cluster: Cluster) -> None:
        rng = Random(seed)
        await form(cluster)
        acknowledged: list[ConsumerId] = []

        async def load(name: str) -> None:
            for number in range(40):
                # The request's id makes it safe to try again what was perhaps done.
                found = await cluster.submit(register_consumer(request_id=f"{name}-{number}"))
                acknowledged.append(found.consumer_id)

        async def kill() -> None:
            for _ in range(8):
                await asyncio.sleep(rng.random())
                victim = cluster[rng.randrange(3) + 1]
                if victim.is_up:
                    victim.kill(loses_power=rng.random() < 0.5)
                    if rng.random() < 0.2:
                        victim.lose_database()
                    await asyncio.sleep(rng.random())
                    victim.start()

        await asyncio.gather(kill(), *(load(f"client-{n}") for n in range(4)))
        await cluster.wait_equal()
        assert sorted(acknowledged) == sorted(cluster[1].store.view().consumers)
        assert len(acknowledged) == 160

    simulate(test, seed=seed)


def test_command_of_a_newer_program_makes_the_member_resign_and_wait_for_an_upgrade() -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        manager = cluster[1]
        newer = bytes((CONTROL_STATE, 1)) + msgspec.msgpack.encode({"type": "paint_topic", "now_ms": 1})
        before = manager.store.view()
        waiting = asyncio.ensure_future(manager.store.submit(register_consumer()))
        await waiting
        manager.member.propose_nowait([build_control_batch(newer, timestamp=1)])
        behind = asyncio.ensure_future(manager.store.submit(register_consumer()))
        with pytest.raises(OutcomeUnknownError, match="paint_topic"):
            await behind
        assert "paint_topic" in manager.member.needs_upgrade
        assert "paint_topic" in (manager.store.status().failure or "")
        assert manager.failures == []
        assert list(manager.store.view().consumers) == [1]
        assert manager.store.view().index == before.index + 1
        with pytest.raises(UnavailableError, match="paint_topic"):
            await manager.store.submit(register_consumer())

    simulate(test, managers=1)


def test_failed_database_stops_the_manager_and_leaves_the_outcome_open() -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        manager = cluster[1]
        with manager.database._engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE consumers")
        with pytest.raises(OutcomeUnknownError, match="database"):
            await manager.store.submit(register_consumer())
        assert manager.failures
        with pytest.raises(OutcomeUnknownError):
            await manager.store.wait_stored(manager.store.applied_index)

    simulate(test, managers=1)


def test_database_of_another_cluster_is_not_used() -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        manager = cluster[1]
        await manager.member.take_snapshot()
        manager.kill()
        with manager.database._engine.begin() as connection:
            connection.exec_driver_sql("UPDATE meta SET cluster_id = 'other'")
        manager.database.close()
        manager.start()
        await cluster.wait(lambda: manager.failures or None)
        assert "cluster other" in manager.failures[0].message

    simulate(test, managers=1)


def test_database_of_another_log_is_not_used() -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        manager = cluster[1]
        manager.kill()
        with manager.database._engine.begin() as connection:
            connection.exec_driver_sql("UPDATE meta SET applied_term = 7")
        manager.database.close()
        manager.start()
        await cluster.wait(lambda: manager.failures or None)
        assert "belongs to another log" in manager.failures[0].message

    simulate(test, managers=1)


def test_read_is_refused_by_a_manager_that_has_long_been_alone() -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        await cluster.wait_equal()
        primary, replica = await cluster.primary(), await cluster.replica()
        assert (await replica.store.read()).digest() == (await primary.store.read(linearizable=True)).digest()
        for manager in cluster.managers.values():
            if manager is not replica:
                manager.kill()
        await asyncio.sleep(5)
        assert (await replica.store.read()).cluster_id == "c1"
        await asyncio.sleep(10)
        with pytest.raises(UnavailableError, match="no primary"):
            await replica.store.read()
        assert replica.store.view().cluster_id == "c1"
        for manager in cluster.managers.values():
            if manager is not replica:
                manager.start()
        await cluster.wait_equal()
        await replica.store.read()

    simulate(test)


def test_watchers_get_what_changes_and_can_begin_anywhere() -> None:
    async def test(cluster: Cluster) -> None:
        manager = cluster[1]
        seen: list[WatchEvent] = []

        async def follow(after_index: Index, into: list[WatchEvent]) -> None:
            async for changed in manager.store.watch(after_index):
                into.append(changed)  # noqa: PERF401 - it never ends

        tasks = [asyncio.ensure_future(follow(Index(0), seen))]
        await form(cluster)
        await cluster.submit(register_consumer())
        await manager.store.wait_applied(manager.store.applied_index)
        await asyncio.sleep(0.01)
        assert seen[0].is_reset
        assert seen[0].view is not None
        assert seen[0].view.index == seen[0].index
        assert seen[-1].index == manager.store.applied_index
        changes: list[Change] = [change for changed in seen[1:] for change in changed.changes]
        assert [change.table for change in changes if change.table is Table.TOPICS] == [Table.TOPICS]
        late: list[WatchEvent] = []
        tasks.append(asyncio.ensure_future(follow(seen[1].index, late)))
        await asyncio.sleep(0.01)
        assert not late[0].is_reset
        assert list(late[0].changes) == [change for changed in seen[2:] for change in changed.changes]
        await manager.store.close()
        await asyncio.gather(*tasks)

    simulate(test, managers=1)


def test_too_many_commands_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: Cluster) -> None:
        store = cluster[1].store
        monkeypatch.setattr(store_module, "SUBMITS_MAX", 2)
        found = await asyncio.gather(*(store.submit(init_cluster()) for _ in range(3)), return_exceptions=True)
        assert sorted(type(item).__name__ for item in found) == ["CommandDone", "CommandDone", OverloadedError.__name__]
        assert await store.submit(init_cluster()) == CommandDone(0)

    simulate(test, managers=1)


def test_store_that_has_no_member_yet_takes_nothing() -> None:
    async def test(cluster: Cluster) -> None:
        manager = cluster[1]
        executor = SimulatedExecutor(cluster.loop, cluster.streams.disk)
        store = await MetadataStore.open(
            manager.database,
            executor=executor,
            clock=SimulatedClock(cluster.loop),
            rng=cluster.streams.schedule,
            on_failure=manager.failures.append,
        )
        with pytest.raises(NotPrimaryError, match="starting"):
            await store.submit(init_cluster())
        with pytest.raises(NotPrimaryError):
            await store.read()
        assert (store.is_primary, store.primary, store.status().commit_index) == (False, None, 0)
        assert store.view().cluster_id == "c1"

    simulate(test, managers=1)


def test_roles_are_told_on() -> None:
    async def test(cluster: Cluster) -> None:
        primary, replica = await cluster.primary(), await cluster.replica()
        leaders: list[NodeId | None] = []
        replica.store.on_role = lambda role, term, leader: leaders.append(leader)
        primary.kill()
        await cluster.submit(init_cluster())
        new = await cluster.primary()
        await cluster.wait(lambda: new.id in leaders or None)

    simulate(test)


def test_database_that_lost_its_last_transactions_catches_up() -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        manager = cluster[1]
        manager.kill()
        older = manager.path.read_bytes()  # closed, hence whole: what a power loss may leave
        stored = manager.load_database().position.index
        manager.database.close()
        manager.start()
        for _ in range(20):
            await cluster.submit(register_consumer())
        expected = manager.store.view().digest()
        last = manager.store.applied_index
        manager.kill(loses_power=True)
        manager.lose_database()
        manager.path.write_bytes(older)
        manager.start()
        await cluster.wait_equal()
        machine = manager.store.machine
        assert (machine.skipped_entries, stored < last) == (stored, True)
        assert machine.applied_commands == 20 + 1
        assert manager.load_database().view().digest() == expected

    simulate(test, managers=1)


@pytest.mark.parametrize("hibernation", [False, True])
def test_learner_that_has_long_not_heard_of_the_primary_refuses_reads(hibernation: bool) -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        learner = cluster.add_node()
        learner.start()
        primary = await cluster.primary()
        primary.store.change_members(voters=cluster.voters.voters, learners=(learner.id,))
        await cluster.wait(lambda: learner.is_up and learner.store.view().cluster_id)
        assert primary.store.members.learners == (learner.id,)
        await asyncio.sleep(30)  # nothing happens, and the primary still speaks
        assert (await learner.store.read()).cluster_id == "c1"
        for number in (1, 2, 3):
            cluster[number].kill()
        await asyncio.sleep(9)
        assert (await learner.store.read()).cluster_id == "c1"
        await asyncio.sleep(3)
        with pytest.raises(UnavailableError, match="no primary"):
            await learner.store.read()
        for number in (1, 2, 3):
            cluster[number].start()
        await cluster.wait_equal()
        await learner.store.read()

    simulate(test, hibernation=hibernation)


@pytest.mark.parametrize("hibernation", [False, True])
def test_primary_that_steps_down_after_a_long_time_still_answers_for_a_while(hibernation: bool) -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        primary = await cluster.primary()
        await asyncio.sleep(60)
        for manager in cluster.managers.values():
            if manager is not primary:
                manager.kill()
        await cluster.wait(lambda: not primary.store.is_primary)
        assert (await primary.store.read()).cluster_id == "c1"
        await asyncio.sleep(11)
        with pytest.raises(UnavailableError, match="no primary"):
            await primary.store.read()

    simulate(test, hibernation=hibernation)


def test_commands_that_cannot_be_applied_are_counted_by_reason_on_every_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a defect")

    async def test(cluster: Cluster) -> None:
        monkeypatch.setattr(clients_module, "register_consumer", fail)
        for _ in range(2):
            with pytest.raises(QuiverError, match="a defect"):
                await cluster.submit(register_consumer())
        primary = await cluster.primary()
        await cluster.run_on(primary, primary.member.propose([build_batch([b"no command"], timestamp=1)]))
        await cluster.wait_equal()
        for manager in cluster.managers.values():
            families = describe_metadata(manager.store.status(), node=manager.id, snapshot_age_ms=0)
            refused = MetricReader(families).values("quiver_metadata_refused_commands_total")
            assert refused == [({"reason": "malformed"}, 1), ({"reason": "defect"}, 2)]

    simulate(test)


def test_log_is_kept_short_by_what_was_applied_since_the_last_snapshot() -> None:
    async def test(cluster: Cluster) -> None:
        await form(cluster)
        manager = cluster[1]
        with cluster.loop.node_scope(manager.id):
            keeping = cluster.loop.create_task(manager.store.run_compaction())
        for _ in range(400):
            await cluster.submit(register_consumer())
        assert manager.member.log.first_index > 200
        assert not keeping.done()
        await manager.store.close()
        await keeping

    simulate(test, managers=1, metadata=MetadataSettings(snapshot_entries=50))


def test_compaction_waits_for_a_member_that_replays_what_the_database_has() -> None:
    """After a restart the loaded state is ahead of the member: until it catches up there is nothing to compact."""
    calls = 0

    async def test(cluster: Cluster) -> None:
        nonlocal calls
        await form(cluster)
        for _ in range(120):
            await cluster.submit(register_consumer())
        await cluster.wait_equal()
        for manager in cluster.managers.values():
            manager.kill()
        alone = cluster[1]
        alone.start()  # without a majority it cannot learn what is committed, so it replays nothing
        await cluster.wait(lambda: alone.is_up or None)
        store, compact = alone.store, alone.store.compact
        assert store.applied_index > 120
        assert alone.member.applied_index < 50

        async def count(*, entries_min: int) -> bool:
            nonlocal calls
            calls += 1
            assert calls < 100, "compaction spins"
            return await compact(entries_min=entries_min)

        store.compact = count  # type: ignore[method-assign]
        with cluster.loop.node_scope(alone.id):
            keeping = cluster.loop.create_task(store.run_compaction())
        await asyncio.sleep(5)
        assert not keeping.done(), keeping.exception()
        assert calls == 1
        cluster[2].start()
        cluster[3].start()
        await cluster.wait(lambda: alone.member.applied_index > 120 or None)
        await cluster.wait(lambda: calls >= 2 or None)  # the replay itself woke it
        assert not keeping.done(), keeping.exception()

    simulate(test, metadata=MetadataSettings(snapshot_entries=50))
