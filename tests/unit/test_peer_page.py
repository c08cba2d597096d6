"""The page that compares Quiver with other systems: what it shows, and which figures never become a page of docs/."""

from __future__ import annotations

import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

import peer_load
from peer_page import FIGURES, PEERS, ROWS, Results, chart, objections, write_page
from peer_servers import SETTINGS, setups
from run_peers import OtherLoad, choose, resume

SVG = "{http://www.w3.org/2000/svg}"
PRODUCE = next(figure for figure in FIGURES if figure.name == "produce")


def whole_run() -> Results:
    """Return made-up results of a run that may be published."""
    return Results(
        date="2026-01-02",
        machine="2 cores",
        command="python benches/run_peers.py",
        rounds=5,
        share=1.0,
        rows=list(ROWS),
        setups=[setup.name for peer in PEERS for setup in setups(peer)],
        versions={"quiver": "1.0", "kafka": "4.3.1", "confluent-kafka": "2.16.1"},
        missing={"rabbitmq": "there is no rabbitmq-server"},
        figures={
            "quiver-1-fsync": {"produce": [3_000_000, 2_500_000, 2_800_000], "awaited_p50": [0.5, 0.7, 0.512]},
            "kafka-1-fsync": {"produce": [500_000, 510_000, 490_000]},
            "kafka-3-nosync": {"produce": [200_000]},
        },
        sync_ms=[0.25],
    )


def test_a_whole_run_on_an_idle_machine_becomes_a_page(tmp_path: Path) -> None:
    results = whole_run()
    assert objections(results) == []
    page, *charts = write_page(results, tmp_path)
    text = page.read_text()
    assert "not for publication" not in text
    one_node = text.split("## One node, synced")[1].split("##")[0]
    assert "| | Quiver | Kafka | NATS JetStream | Redis Streams | PostgreSQL |" in one_node
    assert "| Bulk produce, k records/s | 2,800 (2,500–3,000) | 500 (490–510) | – | – | – |" in one_node
    assert "| Awaited produce, p50, ms | 0.512 (0.5–0.7) | – |" in one_node
    assert "**Kafka** 4.3.1 with confluent-kafka 2.16.1: KRaft" in text
    assert [path.name for path in charts] == [f"peers-{figure.name.replace('_', '-')}.svg" for figure in FIGURES]
    assert all(f"](images/{path.name})" in text for path in charts)


def test_a_system_that_cannot_be_had_is_named_and_has_no_column(tmp_path: Path) -> None:
    text = write_page(whole_run(), tmp_path)[0].read_text()
    assert "- **RabbitMQ** was not measured: there is no rabbitmq-server" in text
    assert "| RabbitMQ |" not in text


def test_what_failed_is_said_in_its_cell_and_below(tmp_path: Path) -> None:
    results = whole_run()
    results.failures = [
        "redis-1-fsync, bulk: RuntimeError: the disk is full",
        *["nats-3-fsync, servers: TimeoutError: x"] * 2,
    ]
    text = write_page(results, tmp_path)[0].read_text()
    one_node = text.split("## One node, synced")[1].split("##")[0]
    assert "| Bulk produce, k records/s | 2,800 (2,500–3,000) | 500 (490–510) | – | failed | – |" in one_node
    assert "| Work queue, single, 64 workers, k records/s | – | – | – | – | – |" in one_node
    assert "- failed: redis-1-fsync, bulk: RuntimeError: the disk is full" in text
    assert objections(results) == ["nats-3-fsync failed too often"]


def test_a_system_that_failed_once_is_published_with_its_failure(tmp_path: Path) -> None:
    results = whole_run()
    results.failures = ["kafka-1-fsync, bulk: TimeoutError: x"]
    assert objections(results) == []
    assert "- failed: kafka-1-fsync, bulk: TimeoutError: x" in write_page(results, tmp_path)[0].read_text()
    results.failures.append("kafka-1-fsync, single: TimeoutError: x")
    assert objections(results) == ["kafka-1-fsync failed too often"]


@pytest.mark.parametrize(
    ("change", "objection"),
    [
        ({"rounds": 4}, "4 of 5 rounds"),
        ({"share": 0.2}, "only a share of 0.2 of the records"),
        ({"rows": ["bulk"]}, "only some rows or setups"),
        ({"setups": ["quiver-1-fsync"]}, "only some rows or setups"),
        ({"other_load": 0.5}, "other programs took 50% of the cores"),
    ],
)
def test_a_partial_run_or_a_busy_machine_is_not_published(
    change: dict[str, object], objection: str, tmp_path: Path
) -> None:
    results = whole_run()
    for name, value in change.items():
        setattr(results, name, value)
    assert objections(results) == [objection]
    assert f"not for publication: {objection}" in write_page(results, tmp_path)[0].read_text()


def test_a_chart_has_a_bar_for_each_setup_with_figures() -> None:
    drawn = ElementTree.fromstring(chart(whole_run(), PRODUCE))
    bars = [bar for bar in drawn.iter(f"{SVG}rect") if bar.get("y") != "31"]  # without the legend
    assert [bar.get("class") for bar in bars] == ["a", "a", "d"]
    quiver, kafka, three = (float(str(bar.get("width"))) for bar in bars)
    assert quiver / kafka == pytest.approx(2_800 / 500, rel=0.01)
    assert kafka / three == pytest.approx(500 / 200, rel=0.01)
    spread = next(drawn.iter(f"{SVG}line"))
    assert float(str(spread.get("x2"))) == 760 - 110  # the most of all is at the right end
    assert "Kafka" in "".join(drawn.itertext())


def test_a_chart_without_figures_is_drawn() -> None:
    results = whole_run()
    results.figures = {}
    assert [bar.get("y") for bar in ElementTree.fromstring(chart(results, PRODUCE)).iter(f"{SVG}rect")] == ["31"] * 4


def test_a_run_is_resumed_only_with_what_it_began_with() -> None:
    before, wanted = whole_run(), whole_run()
    before.rounds, wanted.rounds = 2, 5
    assert resume(before, wanted).rounds == 5
    wanted.share = 0.5
    with pytest.raises(SystemExit, match="the run to resume had other share; begin again without --resume"):
        resume(before, wanted)


def test_the_load_of_a_resumed_run_counts_what_was_before() -> None:
    results = whole_run()
    results.other_load, results.seconds = 0.5, 1e9
    share, seconds = OtherLoad(results).read()
    assert share == pytest.approx(0.5, rel=0.01)
    assert seconds >= 1e9


def test_results_are_kept_in_a_file(tmp_path: Path) -> None:
    results = whole_run()
    results.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == results


def test_systems_and_setups_are_chosen_by_name() -> None:
    assert [setup.name for setup in choose("redis,kafka-3-fsync")] == [
        "kafka-3-fsync",
        "redis-1-fsync",
        "redis-1-nosync",
        "redis-3-fsync",
        "redis-3-nosync",
    ]
    assert {setup.peer for setup in choose("")} == set(PEERS) == set(SETTINGS)
    with pytest.raises(SystemExit, match="unknown: pulsar; there are quiver, kafka"):
        choose("pulsar")


def test_values_have_a_hundred_bytes_and_tell_when_they_were_sent() -> None:
    lines = peer_load.make_lines(2_500)
    assert {len(line) for line in lines} == {100}
    assert len(lines) == 2_500
    assert len(set(lines)) == 1_000
    sent = peer_load.stamp(time.perf_counter() - 5)
    assert len(sent) == 100
    assert peer_load.is_stamped(sent)
    assert not any(map(peer_load.is_stamped, lines))
    assert peer_load.age_s(sent) >= 5


def test_quantiles_are_those_that_so_many_values_do_not_exceed() -> None:
    assert peer_load.quantiles_ms([number / 1000 for number in range(1, 201)]) == pytest.approx(
        {"p50": 100.0, "p99": 198.0}
    )
    assert peer_load.quantiles_ms([0.5]) == {"p50": 500, "p99": 500}
