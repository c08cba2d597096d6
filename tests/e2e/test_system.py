"""The system tests that users of the API already have, with real processes, over HTTP, `quiver.classic` and the SDK.

`make chaos` runs the first of them for longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos_cluster import Cluster, running_cluster
from system_scenarios import (
    CONSUMERS,
    PRODUCERS,
    five_producers_three_consumers,
    many_producers,
    one_producer_one_consumer,
)
from system_ways import WAYS, Way

LINES = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("system")) as running:
        yield running


def test_every_consumer_has_exactly_what_was_produced_whatever_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    heard = five_producers_three_consumers(cluster, WAYS, tmp_path, lines=LINES)
    by_topic = {topic: sum(LINES // _topics_of(name) for name in names) for topic, names in PRODUCERS.items()}
    assert heard == len(WAYS) * sum(len(CONSUMERS[topic]) * count for topic, count in by_topic.items())


@pytest.mark.parametrize("make_way", WAYS, ids=lambda way: way.name)
def test_what_one_producer_puts_in_comes_out_at_one_consumer(
    cluster: Cluster, make_way: Callable[[Cluster], Way]
) -> None:
    one_producer_one_consumer(cluster, make_way, lines=100)


@pytest.mark.parametrize("make_way", WAYS, ids=lambda way: way.name)
def test_many_producers_at_random_intervals_are_heard_by_all_in_one_order(
    cluster: Cluster, make_way: Callable[[Cluster], Way]
) -> None:
    many_producers(cluster, make_way, producers=12, lines=15)


def _topics_of(producer: str) -> int:
    return sum(producer in names for names in PRODUCERS.values())
