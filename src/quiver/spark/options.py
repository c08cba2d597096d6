"""Parse and check the options of `format("quiver")` into frozen values.

Names follow Spark's Kafka source where the meaning is the same. Spark passes option names case-insensitively. Options
that are unknown, conflict, or are not valid here (a limit per trigger in a batch read) raise an error that names the
option: ignoring one silently would give wrong results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Literal, TypeVar

import msgspec

from quiver.errors import RequestError
from quiver.spark.connections import Servers, find_servers

COLUMNS: Final = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
"""All columns, in schema order."""
HOLD_S: Final = 120.0
HOLD_S_MIN: Final = 4.0
HOLD_S_MAX: Final = 24 * 3600.0
_TIMES_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

T = TypeVar("T")
OffsetSpec = Literal["earliest", "latest"] | int
OffsetSpecs = dict[str, dict[int, OffsetSpec]]
"""Offsets by topic and partition; partitions that are not named use the default."""


class SourceMode(StrEnum):
    """The kind of operation that a source is opened for."""

    BATCH_READ = "a batch read"
    STREAM_READ = "a stream read"
    BATCH_WRITE = "a batch write"
    STREAM_WRITE = "a stream write"


class OffsetBound(msgspec.Struct, frozen=True, kw_only=True):
    """The start or end of a read: a default, and overrides by partition; times are in milliseconds."""

    default: OffsetSpec
    by_partition: OffsetSpecs = {}
    is_time: bool = False


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a reader; exactly one of `topics`, `pattern`, `assigned` is set."""

    servers: Servers
    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: dict[str, tuple[int, ...]] = {}
    columns: tuple[str, ...] = COLUMNS[:-1]
    starting: OffsetBound
    ending: OffsetBound = OffsetBound(default="latest")
    fails_on_data_loss: bool = True
    partitions_min: int = 0
    """Minimum number of tasks; 0: the driver's core count."""
    trigger_records_max: int | None = None
    trigger_records_min: int = 0
    trigger_delay_s_max: float = 15 * 60.0
    trigger_bytes_max: int | None = None
    group_id: str = ""
    hold_s: float = HOLD_S
    """How long unread records of an unresponsive query are protected from retention; 0: no hold."""
    batch_records: int = 10_000


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a writer."""

    servers: Servers
    topic: str = ""
    """Target of all rows; empty: the column `topic` decides."""
    transaction_id: str = ""
    is_exactly_once: bool = True
    compression: Literal["lz4", "zstd"] | None = None


_READ: Final = frozenset((SourceMode.BATCH_READ, SourceMode.STREAM_READ))
_WRITE: Final = frozenset((SourceMode.BATCH_WRITE, SourceMode.STREAM_WRITE))
_BATCH: Final = frozenset({SourceMode.BATCH_READ})
_STREAM: Final = frozenset({SourceMode.STREAM_READ})
_NAMES: Final[dict[str, frozenset[SourceMode]]] = {
    **dict.fromkeys(("servers", "context", "timeout", "tls", "caFile", "certificateFile", "keyFile"), _READ | _WRITE),
    **dict.fromkeys(("tokenFile", "token", "user", "passwordFile", "password"), _READ | _WRITE),
    **dict.fromkeys(("subscribe", "subscribePattern", "assign", "columns", "includeHeaders"), _READ),
    **dict.fromkeys(("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp"), _READ),
    **dict.fromkeys(("failOnDataLoss", "minPartitions", "batchRecords"), _READ),
    **dict.fromkeys(("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"), _BATCH),
    **dict.fromkeys(("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"), _STREAM),
    **dict.fromkeys(("maxBytesPerTrigger", "groupId", "holdTimeout"), _STREAM),
    **dict.fromkeys(("topic", "delivery", "compression"), _WRITE),
    "txnId": frozenset({SourceMode.BATCH_WRITE}),
}
STREAM_ONLY: Final = frozenset(name.lower() for name, modes in _NAMES.items() if modes == _STREAM)
"""Options that are valid for streams only, in lower case."""
_SPARK_OPTIONS: Final = frozenset(("path", "checkpointlocation", "queryname"))
"""Options that Spark itself adds; `path` is rejected below, since a topic has none."""


def read_options(given: Mapping[str, str], mode: SourceMode) -> ReadOptions:
    """Parse a reader's options; raise `RequestError` (`bad_option`) if one is invalid."""
    options = _OptionReader(given, mode)
    topics = _split(options.text("subscribe"))
    pattern, assigned = options.text("subscribePattern"), options.partitions("assign")
    if sum(map(bool, (topics, pattern, assigned))) != 1:
        raise _bad("set exactly one of subscribe (topics), subscribePattern (a regular expression), assign (JSON)")
    _check_pattern(pattern)
    is_stream = mode is SourceMode.STREAM_READ
    return ReadOptions(
        servers=_servers(options),
        topics=topics,
        pattern=pattern,
        assigned=assigned,
        columns=_columns(options),
        starting=_bound(options, "starting", default="latest" if is_stream else "earliest"),
        ending=_bound(options, "ending", default="latest"),
        fails_on_data_loss=options.flag("failOnDataLoss", default=True),
        partitions_min=options.number("minPartitions", minimum=1) or 0,
        trigger_records_max=options.number("maxOffsetsPerTrigger", minimum=1),
        trigger_records_min=options.number("minOffsetsPerTrigger", minimum=1) or 0,
        trigger_delay_s_max=options.duration("maxTriggerDelay", default=15 * 60.0),
        trigger_bytes_max=options.number("maxBytesPerTrigger", minimum=1),
        group_id=options.text("groupId"),
        hold_s=_hold_s(options),
        batch_records=options.number("batchRecords", minimum=1) or 10_000,
    )


def write_options(given: Mapping[str, str], mode: SourceMode) -> WriteOptions:
    """Parse a writer's options; raise `RequestError` (`bad_option`) if one is invalid."""
    options = _OptionReader(given, mode)
    delivery = options.choice("delivery", ("exactlyOnce", "atLeastOnce"))
    transaction_id = options.text("txnId")
    if transaction_id and delivery == "atLeastOnce":
        raise _bad("txnId requires delivery=exactlyOnce: remove txnId or delivery=atLeastOnce")
    compression = options.choice("compression", ("none", "lz4", "zstd"))
    return WriteOptions(
        servers=_servers(options),
        topic=options.text("topic"),
        transaction_id=transaction_id,
        is_exactly_once=delivery == "exactlyOnce",
        compression=None if compression == "none" else compression,  # type: ignore[arg-type] # one of the choices
    )


def parse_duration(text: str, name: str) -> float:
    """Parse a duration such as 500ms, 30s, 15m, 1h or 7d into seconds; raise `RequestError` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(ms|s|m|h|d)", text)
    if not found:
        raise _bad(f"option {name} must be a duration such as 500ms, 30s, 15m, 1h or 7d, not {text!r}")
    return float(found[1]) * _TIMES_S[found[2]]


class _OptionReader:
    """Typed access to the given options by their canonical names."""

    def __init__(self, given: Mapping[str, str], mode: SourceMode) -> None:
        self._values = {name.lower(): value.strip() for name, value in given.items()}
        proper = {name.lower(): name for name in _NAMES}
        for name in self._values.keys() - _SPARK_OPTIONS - proper.keys():
            allowed = ", ".join(sorted(name for name, modes in _NAMES.items() if mode in modes))
            raise _bad(f"unknown option {name!r}; options for {mode} are {allowed}")
        for name in self._values.keys() & proper.keys():
            if mode not in _NAMES[proper[name]]:
                raise _bad(f"option {proper[name]} is not valid for {mode}")
        if "path" in self._values:
            raise _bad("option path is not supported: name a topic with subscribe (to read) or topic (to write)")

    def text(self, name: str) -> str:
        return self._values.get(name.lower(), "")

    def flag(self, name: str, *, default: bool) -> bool:
        text = self.text(name).lower() or str(default).lower()
        if text not in ("true", "false"):
            raise _bad(f"option {name} must be true or false, not {text!r}")
        return text == "true"

    def number(self, name: str, *, minimum: int) -> int | None:
        text = self.text(name)
        if not text:
            return None
        if not text.lstrip("-").isdecimal() or int(text) < minimum:
            raise _bad(f"option {name} must be an integer of at least {minimum}, not {text!r}")
        return int(text)

    def duration(self, name: str, *, default: float) -> float:
        text = self.text(name)
        return parse_duration(text, name) if text else default

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of the choices; the first is the default."""
        text = self.text(name) or choices[0]
        found = next((choice for choice in choices if choice.lower() == text.lower()), None)
        if found is None:
            raise _bad(f"option {name} must be one of {', '.join(choices)}, not {text!r}")
        return found

    def partitions(self, name: str) -> dict[str, tuple[int, ...]]:
        text = self.text(name)
        return _decode(text, dict[str, tuple[int, ...]], name, '{"logs": [0, 1]}') if text else {}


def _bound(options: _OptionReader, prefix: str, *, default: OffsetSpec) -> OffsetBound:
    """Parse one of three options: offsets, one timestamp, or timestamps by partition."""
    offsets, time, times = (options.text(prefix + rest) for rest in ("Offsets", "Timestamp", "OffsetsByTimestamp"))
    if sum(map(bool, (offsets, time, times))) > 1:
        raise _bad(f"set only one of {prefix}Offsets, {prefix}Timestamp, {prefix}OffsetsByTimestamp")
    if time:
        return OffsetBound(default=options.number(f"{prefix}Timestamp", minimum=0) or 0, is_time=True)
    if times:
        name = f"{prefix}OffsetsByTimestamp"
        by_time = _decode(times, dict[str, dict[int, int]], name, '{"logs": {"0": 1700000000000}}')
        return OffsetBound(
            default=default, by_partition={topic: dict(own) for topic, own in by_time.items()}, is_time=True
        )
    if offsets.startswith("{"):
        by_offset = _decode(offsets, dict[str, dict[int, int]], f"{prefix}Offsets", '{"logs": {"0": 23, "1": -2}}')
        specs = {topic: {part: _to_offset_spec(at) for part, at in own.items()} for topic, own in by_offset.items()}
        return OffsetBound(default=default, by_partition=specs)
    if offsets and offsets not in ("earliest", "latest"):
        raise _bad(f"option {prefix}Offsets must be earliest, latest or JSON, not {offsets!r}")
    return OffsetBound(default=offsets or default)  # type: ignore[arg-type] # one of the two words


def _to_offset_spec(offset: int) -> OffsetSpec:
    """Parse an offset in Kafka's notation: -2 is earliest, -1 is latest."""
    if offset < -2:
        raise _bad(f"an offset must be 0 or greater, -1 (latest) or -2 (earliest), not {offset}")
    return {-2: "earliest", -1: "latest"}.get(offset, offset)  # type: ignore[return-value] # a word or the offset


def _columns(options: _OptionReader) -> tuple[str, ...]:
    named = _split(options.text("columns"))
    has_headers = options.flag("includeHeaders", default="headers" in named)
    unknown = sorted(set(named) - set(COLUMNS))
    if unknown:
        raise _bad(f"option columns has unknown columns {', '.join(unknown)}; valid are {', '.join(COLUMNS)}")
    if named and has_headers != ("headers" in named):
        raise _bad("options columns and includeHeaders disagree about the column headers")
    chosen = named or COLUMNS
    return tuple(name for name in COLUMNS if name in chosen and (name != "headers" or has_headers))


def _servers(options: _OptionReader) -> Servers:
    try:
        return find_servers(
            options.text("servers"),
            context=options.text("context"),
            timeout_s=options.duration("timeout", default=60.0),
            tls=options.flag("tls", default=False),
            ca_file=options.text("caFile"),
            certificate_file=options.text("certificateFile"),
            key_file=options.text("keyFile"),
            token_file=options.text("tokenFile"),
            token=options.text("token"),
            user=options.text("user"),
            password_file=options.text("passwordFile"),
            password=options.text("password"),
        )
    except RequestError as error:
        raise _bad(f"options servers, context, tls, caFile, tokenFile, user, passwordFile: {error}") from error


def _hold_s(options: _OptionReader) -> float:
    hold_s = options.duration("holdTimeout", default=HOLD_S)
    if hold_s and not HOLD_S_MIN <= hold_s <= HOLD_S_MAX:
        raise _bad("option holdTimeout must be 4s to 24h, or 0s for no hold")
    return hold_s


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise _bad(f"option subscribePattern is not a valid regular expression: {error}") from None


def _split(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _decode(text: str, kind: type[T], name: str, example: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind, strict=False)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise _bad(f"option {name} must be JSON such as {example}: {error}") from None


def _bad(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_option")
