"""The numbers, sentences and events of the console."""

from __future__ import annotations

import json

import pytest

from quiver.gateway.console.events import ROWS_MAX, find_happenings
from quiver.gateway.console.health import NodeFacts, judge_health
from quiver.gateway.console.meter import SERIES, NodeMeter, combine, merge
from quiver.gateway.console.pipelines import SILENT_MS, fold_runs
from quiver.gateway.console.topic_summaries import summarize_topic
from quiver.gateway.contract import MessageItem
from quiver.metadata import BrokerRow, BrokerState, MetadataState, PartitionRow, Retention, TopicRow, TopicState, View
from quiver.metrics import Histogram, MetricFamily, counter, gauge, histogram, labelled
from quiver.model import GroupId, NodeId, Offset, PartitionId, TopicId
from quiver.wire.admin_messages import HistorySample, ReplicaInfo


def families(*, records: float, cpu_s: float, seconds: tuple[float, ...] = (), lag: int = 0) -> list[MetricFamily]:
    commit = Histogram()
    for value in seconds:
        commit.observe(value)
    return [
        labelled("quiver_topic_received_records_total", "counter", "", [((("topic", "a"),), records)]),
        counter("process_cpu_seconds_total", "", cpu_s),
        gauge("process_resident_memory_bytes", "", 1000.0),
        gauge("quiver_disk_free_bytes", "", 5000.0),
        histogram("quiver_produce_stage_seconds", "", {(("stage", "commit"),): commit, (("stage", "fsync"),): commit}),
        labelled("quiver_consumer_lag_records", "gauge", "", [((("consumer", "c"), ("topic", "a")), lag)]),
    ]


def value(sample: HistorySample, name: str) -> float | None:
    return sample.values[SERIES.index(name)]


def test_meter_measures_rates_between_two_looks_and_none_at_the_first() -> None:
    meter = NodeMeter()
    first = meter.measure(families(records=100, cpu_s=1), time_ms=10_000)
    assert value(first, "in_records") is None
    assert value(first, "memory_bytes") == 1000
    second = meter.measure(families(records=300, cpu_s=1.5, lag=7), time_ms=15_000)
    assert value(second, "in_records") == 40
    assert value(second, "cpu") == 0.1
    assert value(second, "produce_p99_ms") is None, "nothing was produced"
    assert second.lags == (("c", "a", 7),)


def test_meter_interpolates_quantiles_of_the_interval_alone() -> None:
    meter = NodeMeter()
    slow = (5.0,) * 100
    meter.measure(families(records=0, cpu_s=1, seconds=slow), time_ms=0)
    sample = meter.measure(families(records=0, cpu_s=2, seconds=slow + (0.002,) * 100), time_ms=1000)
    p50, p99 = value(sample, "produce_p50_ms"), value(sample, "produce_p99_ms")
    assert p50 is not None
    assert p99 is not None
    assert 1.0 < p50 < p99 <= 2.5


def test_meter_begins_again_with_a_node_that_was_restarted() -> None:
    meter = NodeMeter()
    meter.measure(families(records=1_000_000, cpu_s=50), time_ms=0)
    assert value(meter.measure(families(records=5, cpu_s=0.1), time_ms=1000), "in_records") is None


def test_cluster_is_the_sum_of_its_nodes_or_the_worst_of_them() -> None:
    meters = (NodeMeter(), NodeMeter())
    for meter in meters:
        meter.measure(families(records=0, cpu_s=0), time_ms=0)
    one = meters[0].measure(families(records=100, cpu_s=0.5, lag=3), time_ms=1000)
    two = meters[1].measure(families(records=50, cpu_s=0.1, lag=4), time_ms=1000)
    whole = combine([one, two], time_ms=1000)
    assert value(whole, "in_records") == 150
    assert value(whole, "cpu") == 0.5
    assert value(whole, "disk_free_bytes") == 5000
    assert whole.lags == (("c", "a", 7),)
    assert value(combine([], time_ms=1), "in_records") is None


def test_histories_of_nodes_with_different_clocks_become_one() -> None:
    def sample(time_ms: int, number: float) -> HistorySample:
        return HistorySample(time_ms, (number, *([None] * (len(SERIES) - 1))))

    one, two = (sample(1_000, 1), sample(6_000, 2)), (sample(4_000, 10), sample(9_900, 20), sample(14_000, 30))
    merged = merge({NodeId(1): one, NodeId(2): two}, interval_ms=5_000, now_ms=25_000)
    assert [(one.time_ms, one.values[0]) for one in merged] == [(5_000, 11), (10_000, 22), (15_000, 30)]


def test_late_sample_of_a_node_is_no_dip() -> None:
    def sample(time_ms: int, records: float) -> HistorySample:
        values = {"in_records": records, "elections": 1.0}
        return HistorySample(time_ms, tuple(values.get(series) for series in SERIES), (("c", "t", int(records)),))

    steady = tuple(sample(time_ms, 10) for time_ms in (1_000, 6_000, 11_000, 16_000, 21_000))
    late = (sample(4_900, 1), sample(10_100, 2), sample(14_900, 3))
    merged = merge({NodeId(1): steady, NodeId(2): late}, interval_ms=5_000, now_ms=25_000)
    assert [value(one, "in_records") for one in merged] == [11, 11, 13, 10, 10]
    assert [one.lags for one in merged][1] == (("c", "t", 11),)
    assert [value(one, "elections") for one in merged] == [2, 1, 2, 1, 1], "an election is counted once"


def test_history_ends_with_the_last_interval_in_which_all_nodes_were_measured() -> None:
    def sample(time_ms: int) -> HistorySample:
        return HistorySample(time_ms, (10.0, *([None] * (len(SERIES) - 1))))

    early, late = (sample(1_000), sample(6_000), sample(11_000)), (sample(4_900), sample(10_100))
    merged = merge({NodeId(1): early, NodeId(2): late[:1]}, interval_ms=5_000, now_ms=10_050)
    assert [(one.time_ms, one.values[0]) for one in merged] == [(5_000, 20), (10_000, 20)], "no dip at the end"
    merged = merge({NodeId(1): early, NodeId(2): late}, interval_ms=5_000, now_ms=11_500)
    assert [(one.time_ms, one.values[0]) for one in merged] == [(5_000, 20), (10_000, 20)], "nothing of the future"


# -- health ------------------------------------------------------------------------------------------


def node(number: int, **facts: object) -> NodeFacts:
    return NodeFacts(**{"node": number, "state": "alive", "is_alive": True, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "facts", "level", "words"),
    [
        ([node(1), node(2)], {}, "ok", "All is well: 2 nodes up, 6 partitions in sync."),
        ([node(1)], {"primary": None}, "critical", "no primary"),
        ([node(1)], {"leaderless": 1}, "critical", "1 partition without a leader"),
        ([node(1)], {"under_replicated": 2, "moves": 1}, "warning", "2 partitions under-replicated, 1 move"),
        ([node(1, is_alive=False, state="dead")], {}, "warning", "Node 1 does not answer (state dead)"),
        ([node(1, is_ready=False, unready="it starts")], {}, "warning", "not ready: it starts"),
        ([node(1, disk_free_bytes=10, disk_reserved_bytes=100)], {}, "critical", "nearly full"),
        ([node(1, disk_free_bytes=150, disk_reserved_bytes=100)], {}, "warning", "nearly full"),
        ([node(1, problems=3)], {"leaderless": 1}, "critical", "works there; 3 replicas on node 1 cannot serve."),
        (
            [node(1), node(2, is_alive=False, state="dead")],
            {"under_replicated": 6},
            "warning",
            "Node 2 does not answer (state dead); 6 partitions under-replicated.",
        ),
        (
            [node(1, problems=3), node(2, is_alive=False, state="dead")],
            {"leaderless": 1, "under_replicated": 6},
            "critical",
            "works there; node 2 does not answer (state dead), and 2 more.",
        ),
    ],
)
def test_health_is_one_sentence_with_the_worst_reason_first(
    nodes: list[NodeFacts], facts: dict[str, int | None], level: str, words: str
) -> None:
    given = {"primary": 1, "partitions": 6, "under_replicated": 0, "leaderless": 0, **facts}
    health = judge_health(nodes, **given)  # type: ignore[arg-type]
    assert health.level == level
    assert words in health.sentence


# -- events ------------------------------------------------------------------------------------------


def broker(state: BrokerState) -> BrokerRow:
    return BrokerRow(
        broker_id=NodeId(1),
        identity="i",
        wire_address="a:1",
        http_address="a:2",
        rack="",
        state=state,
        is_draining=False,
        registered_ms=0,
        changed_ms=0,
    )


def topic(number: int = 1, state: TopicState = TopicState.ACTIVE, **changes: int) -> TopicRow:
    return TopicRow(
        topic_id=TopicId(number),
        name=f"t{number}",
        partitions=changes.get("partitions", 2),
        replicas=3,
        retention=Retention(ms=changes.get("ms")),
        state=state,
        created_ms=0,
        purge_ms=None,
        request_id="",
    )


def partition(leader: int | None) -> PartitionRow:
    return PartitionRow(
        topic_id=TopicId(1),
        partition_id=PartitionId(0),
        group_id=GroupId(1),
        replicas=(NodeId(1), NodeId(2)),
        learners=(),
        leader=None if leader is None else NodeId(leader),
        epoch=1,
    )


def view(*rows: BrokerRow | TopicRow | PartitionRow) -> View:
    return MetadataState(list(rows)).view()


@pytest.mark.parametrize(
    ("before", "after", "texts"),
    [
        ([], [broker(BrokerState.ALIVE)], ["node 1 joined at a:1"]),
        ([broker(BrokerState.ALIVE)], [broker(BrokerState.DEAD)], ["node 1 is dead: its heartbeats have stopped"]),
        ([], [topic()], ["topic t1 was created with 2 partitions"]),
        ([], [topic(state=TopicState.DELETED)], ["topic t1 was created with 2 partitions and deleted"]),
        ([topic()], [topic(state=TopicState.DELETED)], ["topic t1 was deleted"]),
        ([topic(state=TopicState.DELETED)], [topic()], ["topic t1 was restored"]),
        ([topic(state=TopicState.DELETED)], [], ["topic t1 was purged"]),
        ([topic()], [topic(partitions=4)], ["topic t1 now has 4 partitions"]),
        ([topic()], [topic(ms=5)], ["the retention of topic t1 was changed"]),
        ([topic(), partition(1)], [topic(), partition(2)], ["t1/0: node 2 leads after node 1"]),
        ([topic(), partition(None)], [topic(), partition(2)], []),
    ],
)
def test_changes_of_the_metadata_are_told(before: list[TopicRow], after: list[TopicRow], texts: list[str]) -> None:
    assert [one.text for one in find_happenings(view(*before), view(*after))] == texts


def test_very_many_changes_are_counted() -> None:
    texts = [one.text for one in find_happenings(view(), view(*(topic(at + 1) for at in range(ROWS_MAX + 50))))]
    assert len(texts) == ROWS_MAX + 1
    assert texts[-1] == "50 more changes of the kind topic"


# -- topics and runs ---------------------------------------------------------------------------------


def replica(end: int, *, in_sync: tuple[int, ...] = (1, 2)) -> ReplicaInfo:
    return ReplicaInfo(
        topic_id=TopicId(1),
        partition_id=PartitionId(0),
        group=GroupId(1),
        role="leader",
        epoch=1,
        end_offset=Offset(end),
        bytes=10 * end,
        in_sync=tuple(map(NodeId, in_sync)),
        voters=(NodeId(1), NodeId(2)),
    )


def test_topic_is_summed_over_the_partitions_that_report() -> None:
    key = (TopicId(1), PartitionId(0))
    item = summarize_topic(topic(), {key: replica(300, in_sync=(1,))}, before=(0, {key: replica(100)}), now_ms=2_000)
    assert (item.records, item.bytes, item.records_per_second) == (300, 3000, 100)
    assert (item.under_replicated, item.leaderless) == (1, 1)
    assert summarize_topic(topic(), {}, before=None, now_ms=0).records is None


def described(run: str, updated_ms: int, state: str = "running") -> MessageItem:
    text = {"run": run, "pipeline": "audit", "state": state, "started_ms": 0, "updated_ms": updated_ms}
    return MessageItem(partition_id=0, offset=0, timestamp=0, message=json.dumps(text))


def test_newest_words_of_a_run_count_and_nonsense_is_left_out() -> None:
    junk = [
        MessageItem(partition_id=0, offset=0, timestamp=0, message=text) for text in ("{", "[]", None, '{"run": 1}')
    ]
    records = [described("a", 1), *junk, described("b", 5), described("a", 9, "passed"), described("a", 3)]
    runs = fold_runs(records, now_ms=10)
    assert [(one.run, one.state) for one in runs] == [("a", "passed"), ("b", "running")]
    assert [one.state for one in fold_runs(records, now_ms=6 + SILENT_MS)] == ["passed", "silent"]
