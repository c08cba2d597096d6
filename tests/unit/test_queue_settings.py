"""Settings of work queues: delays of retries, and the names of dead-letter topics."""

from __future__ import annotations

import re

import pytest

from quiver.groups.settings import QueueSettings, dead_letter_topic_of
from quiver.model import TOPIC_NAME_PATTERN

NAME = re.compile(TOPIC_NAME_PATTERN)


@pytest.mark.parametrize(
    ("fields", "delays"),
    [
        ({}, [1_000, 2_000, 4_000, 8_000]),
        ({"backoff_multiplier": 10.0, "backoff_max_ms": 50_000}, [1_000, 10_000, 50_000, 50_000]),
        ({"backoff_ms": 0}, [0, 0, 0, 0]),
        ({"backoff_multiplier": 1.0}, [1_000, 1_000, 1_000, 1_000]),
        ({"backoff_ms": 9_000, "backoff_max_ms": 500}, [500, 500, 500, 500]),
    ],
)
def test_delay_of_a_retry_grows_up_to_its_bound(fields: dict[str, int], delays: list[int]) -> None:
    settings = QueueSettings(**fields)  # type: ignore[arg-type]
    assert [settings.retry_delay_ms(attempt) for attempt in range(1, 5)] == delays


def test_delay_of_a_record_that_was_delivered_very_often_is_the_longest() -> None:
    assert QueueSettings().retry_delay_ms(1_000_000) == 300_000
    assert QueueSettings(backoff_multiplier=1.0).retry_delay_ms(1_000_000) == 1_000
    assert QueueSettings(backoff_ms=0).retry_delay_ms(1_000) == 0


def test_name_of_a_dead_letter_topic_is_a_name_of_topics() -> None:
    plain = dead_letter_topic_of(QueueSettings(), topic="jobs", group="workers")
    strange = dead_letter_topic_of(QueueSettings(), topic="jobs", group="http/ä b")
    long = [dead_letter_topic_of(QueueSettings(), topic="t" * 200, group=f"g{number}") for number in range(2)]
    own = dead_letter_topic_of(QueueSettings(dead_letter_topic="graves"), topic="jobs", group="workers")
    assert (plain, own) == ("jobs.workers.dead", "graves")
    assert all(NAME.fullmatch(name) for name in (plain, strange, *long))
    assert long[0] != long[1]
