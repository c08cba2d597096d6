"""Traffic by topic: bounded labels that never move, and counters that never fall."""

from __future__ import annotations

from quiver.model import TopicId
from quiver.partition import Meters


def test_labels_are_bounded_and_stay() -> None:
    meters = Meters()
    for number in range(5):
        meters.of(TopicId(number)).received_bytes = number
    assert meters.labelled(2) == {4, 3}
    meters.of(TopicId(1)).received_bytes = 100
    assert meters.labelled(2) == {4, 3}
    meters.forget({TopicId(1), TopicId(3)})
    assert meters.labelled(2) == {1, 3}
    assert set(meters.topics) == {1, 3}


def test_topic_without_traffic_takes_no_label() -> None:
    meters = Meters()
    meters.of(TopicId(1))
    assert meters.labelled(10) == set()


def test_meter_outlives_its_replicas() -> None:
    meters = Meters()
    meters.of(TopicId(1)).received_records += 5
    assert meters.of(TopicId(1)).received_records == 5
