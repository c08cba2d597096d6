"""Options: what is understood, and that nothing else is let through."""

from __future__ import annotations

import pytest

from quiver.errors import RequestError
from quiver.spark.options import OffsetBound, ReadOptions, SourceMode, read_options, write_options

SERVERS = {"servers": "127.0.0.1:8002"}


def read(use: SourceMode = SourceMode.BATCH_READ, **given: str) -> ReadOptions:
    return read_options({**SERVERS, "subscribe": "logs", **given}, use)


def test_names_are_understood_whatever_their_case() -> None:
    options = read_options({"SERVERS": " a:1 , b:2", "Subscribe": "x, y", "MINPARTITIONS": "7"}, SourceMode.BATCH_READ)
    assert options.servers.addresses == ("a:1", "b:2")
    assert options.topics == ("x", "y")
    assert options.partitions_min == 7


def test_batches_begin_at_the_beginning_and_streams_at_the_end() -> None:
    assert read().starting == OffsetBound(default="earliest")
    assert read(SourceMode.STREAM_READ).starting == OffsetBound(default="latest")
    assert read().ending == OffsetBound(default="latest")


def test_offsets_are_read_as_users_of_kafka_write_them() -> None:
    bound = read(startingOffsets='{"logs": {"0": 23, "1": -1, "2": -2}}').starting
    assert bound.by_partition == {"logs": {0: 23, 1: "latest", 2: "earliest"}}
    assert bound.default == "earliest"
    assert read(startingTimestamp="1700000000000").starting == OffsetBound(default=1700000000000, is_time=True)
    by_time = read(endingOffsetsByTimestamp='{"logs": {"1": 5}}').ending
    assert by_time == OffsetBound(default="latest", by_partition={"logs": {1: 5}}, is_time=True)


@pytest.mark.parametrize(
    ("given", "columns"),
    [
        ({}, ("topic", "partition", "offset", "timestamp", "key", "value")),
        ({"includeHeaders": "true"}, ("topic", "partition", "offset", "timestamp", "key", "value", "headers")),
        ({"columns": "value, offset"}, ("offset", "value")),
        ({"columns": "headers"}, ("headers",)),
    ],
)
def test_columns_are_chosen_and_keep_their_order(given: dict[str, str], columns: tuple[str, ...]) -> None:
    assert read(SourceMode.BATCH_READ, **given).columns == columns


@pytest.mark.parametrize(
    ("given", "use", "sentence"),
    [
        ({"servers": ",", "subscribe": "logs"}, SourceMode.BATCH_READ, "no address given"),
        ({"servers": "http://a", "tls": "true", "subscribe": "logs"}, SourceMode.BATCH_READ, "plain text, but TLS"),
        (SERVERS, SourceMode.BATCH_READ, "exactly one of subscribe"),
        ({**SERVERS, "subscribe": "a", "assign": '{"a": [0]}'}, SourceMode.BATCH_READ, "exactly one of subscribe"),
        ({**SERVERS, "subscribePattern": "("}, SourceMode.BATCH_READ, "not a valid regular expression"),
        (
            {**SERVERS, "subscribe": "a", "startingOffset": "earliest"},
            SourceMode.BATCH_READ,
            "unknown option 'startingoffset'",
        ),
        ({**SERVERS, "subscribe": "a", "path": "a"}, SourceMode.BATCH_READ, "path is not supported"),
        ({**SERVERS, "subscribe": "a", "startingOffsets": "first"}, SourceMode.BATCH_READ, "earliest, latest or JSON"),
        ({**SERVERS, "subscribe": "a", "startingOffsets": "{"}, SourceMode.BATCH_READ, "startingOffsets must be JSON"),
        ({**SERVERS, "subscribe": "a", "startingOffsets": '{"a": {"0": -3}}'}, SourceMode.BATCH_READ, "not -3"),
        ({**SERVERS, "assign": '{"a": 0}'}, SourceMode.BATCH_READ, "assign must be JSON"),
        (
            {**SERVERS, "subscribe": "a", "startingOffsets": "latest", "startingTimestamp": "1"},
            SourceMode.BATCH_READ,
            "set only one of startingOffsets",
        ),
        (
            {**SERVERS, "subscribe": "a", "maxOffsetsPerTrigger": "5"},
            SourceMode.BATCH_READ,
            "is not valid for a batch read",
        ),
        (
            {**SERVERS, "subscribe": "a", "endingOffsets": "latest"},
            SourceMode.STREAM_READ,
            "is not valid for a stream read",
        ),
        ({**SERVERS, "subscribe": "a", "maxOffsetsPerTrigger": "0"}, SourceMode.STREAM_READ, "at least 1"),
        ({**SERVERS, "subscribe": "a", "maxTriggerDelay": "15"}, SourceMode.STREAM_READ, "must be a duration such as"),
        ({**SERVERS, "subscribe": "a", "holdTimeout": "1s"}, SourceMode.STREAM_READ, "4s to 24h, or 0s"),
        ({**SERVERS, "subscribe": "a", "holdTimeout": "25h"}, SourceMode.STREAM_READ, "4s to 24h, or 0s"),
        ({**SERVERS, "subscribe": "a", "failOnDataLoss": "no"}, SourceMode.STREAM_READ, "true or false"),
        ({**SERVERS, "subscribe": "a", "columns": "values"}, SourceMode.STREAM_READ, "unknown columns values"),
        (
            {**SERVERS, "subscribe": "a", "columns": "value", "includeHeaders": "true"},
            SourceMode.STREAM_READ,
            "disagree about the column headers",
        ),
        ({**SERVERS, "subscribe": "a", "topic": "b"}, SourceMode.STREAM_READ, "is not valid for a stream read"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(given: dict[str, str], use: SourceMode, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as caught:
        read_options(given, use)
    assert caught.value.code == "bad_option"


def test_hold_lasts_for_a_while_or_is_not_wanted() -> None:
    assert read(SourceMode.STREAM_READ).hold_s == 120
    assert read(SourceMode.STREAM_READ, holdTimeout="10m").hold_s == 600
    assert read(SourceMode.STREAM_READ, holdTimeout="0s").hold_s == 0


def test_durations_have_units() -> None:
    assert read(SourceMode.STREAM_READ, maxTriggerDelay="500ms").trigger_delay_s_max == 0.5
    assert read(SourceMode.STREAM_READ, maxTriggerDelay="15m").trigger_delay_s_max == 900


@pytest.mark.parametrize(
    ("given", "use", "sentence"),
    [
        ({**SERVERS, "txnId": "x"}, SourceMode.STREAM_WRITE, "is not valid for a stream write"),
        ({**SERVERS, "txnId": "x", "delivery": "atLeastOnce"}, SourceMode.BATCH_WRITE, "remove txnId or delivery"),
        ({**SERVERS, "delivery": "perhaps"}, SourceMode.BATCH_WRITE, "one of exactlyOnce, atLeastOnce"),
        ({**SERVERS, "compression": "gzip"}, SourceMode.BATCH_WRITE, "one of none, lz4, zstd"),
        ({**SERVERS, "subscribe": "logs"}, SourceMode.BATCH_WRITE, "is not valid for a batch write"),
    ],
)
def test_writes_refuse_what_cannot_be(given: dict[str, str], use: SourceMode, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        write_options(given, use)


def test_writes_are_exactly_once_unless_less_is_wished() -> None:
    assert write_options(SERVERS, SourceMode.STREAM_WRITE).is_exactly_once
    assert not write_options({**SERVERS, "delivery": "atleastonce"}, SourceMode.STREAM_WRITE).is_exactly_once
    assert write_options({**SERVERS, "topic": "a", "compression": "zstd"}, SourceMode.BATCH_WRITE).compression == "zstd"
