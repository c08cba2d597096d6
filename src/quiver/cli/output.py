"""What commands print, and the codes with which they exit.

Results go to standard output, through click, everything else to standard error: a table for people at a terminal, plain
columns for pipes, JSON on request. Plain output has no colour, no borders and one line per row, so that `grep`, `cut`
and `awk` work on it. Bytes that are not text are shown in base64 in JSON. Control characters reach a terminal only as
escapes: a record must not be able to move its cursor, or worse.

Each class of error has an exit code and advice, printed with the error. The codes are part of the interface
(`docs/operations/install.md` lists them); scripts depend on them. The table is searched from the most specific class
up, so that every error of `quiver.errors` has an entry.
"""

from __future__ import annotations

import shutil
import signal
import sys
import traceback
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from quiver.errors import (
    ConfigError,
    DamageError,
    InvariantBroken,
    OutcomeUnknownError,
    QuiverError,
    RequestError,
    StorageError,
    UnavailableError,
)

if TYPE_CHECKING:
    from quiver.record.batch import Record


DONE = 0
FOUND = 1
USAGE = 2
UNAVAILABLE = 3
STORAGE = 4
UNKNOWN = 5
DEFECT = 70
INTERRUPTED = 130
PIPE_CLOSED = 141
TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM, in a command that ends in order as after Ctrl-C."""


@contextmanager
def terminated_in_order() -> Iterator[None]:
    """Raise `Terminated` in the main thread at SIGTERM, instead of ending the process at once."""

    def end(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_EXITS: dict[type[BaseException], tuple[int, str]] = {
    DamageError: (FOUND, "restore the directory from another replica; do not start a node on the damaged one"),
    RequestError: (USAGE, "correct the request and run the command again"),
    ConfigError: (USAGE, "correct the setting; `quiver config docs` lists all settings"),
    UnavailableError: (UNAVAILABLE, "nothing was done; run the command again later"),
    StorageError: (STORAGE, "check the disk, its free space and its permissions"),
    OutcomeUnknownError: (UNKNOWN, "the request may have been done: check before you run the command again"),
    OSError: (STORAGE, "check the path, its permissions and the disk"),
}
_ADVICE = {
    "database_lost": "start the database server, or correct --metadata-db; then start the node again",
    "no_encryption_key": "give the key: nodes have encryption.key_file, other commands --encryption-key-file",
    "backup_damaged": "use another backup; `quiver backup verify` lists every damaged file",
    "backup_incomplete": "use another backup, or repeat `quiver backup create` with an empty folder",
    "disk_full": "free space: `quiver doctor` names the nodes, `quiver hold list` and `quiver consumer lag` what keeps "
    "old records; then run the command again",
    "not_started": "correct what the end of the node's log names, and run the command again",
    "not_reached": "start the node at that address, or correct the address; `quiver doctor` shows which nodes of a "
    "cluster do not answer, `quiver up` starts a cluster on this machine",
    "unknown_version": "a newer program wrote it: upgrade this one, and run the command again",
    "unknown_topic": "`quiver topic list --all` lists the topics, `quiver topic create` creates one",
    "unknown_consumer": "`quiver consumer list` lists the consumers",
    "unknown_producer": "`quiver producer list` lists the producers",
    "unknown_broker": "`quiver broker list` lists the brokers",
    "unknown_file": "`quiver deploy list` lists the files",
    "unknown_group": "`quiver group list` lists the groups, `quiver queue list` the work queues",
    "unknown_letter": "`quiver queue dead list` lists the dead letters",
    "queue_settings": "leave the settings out, or change them for everybody: `quiver queue configure`",
    "unknown_hold": "`quiver hold list` lists the holds",
    "unknown_user": "`quiver user list` lists the users, `quiver user create` creates one",
    "unknown_role": "`quiver role list` lists the roles, `quiver role create` creates one",
    "unknown_token": "`quiver token list` lists the tokens",
    "too_many_tokens": "revoke a token that is no longer used: `quiver token list`, `quiver token revoke`",
    "unknown_quota": "`quiver quota list` lists the quotas",
    "quota_topics": "delete topics and wait until they are purged, or ask an administrator: `quiver quota set`",
    "quota_partitions": "delete topics and wait until they are purged, or ask an administrator: `quiver quota set`",
    "quota_registrations": "`quiver producer forget`, `quiver consumer forget`, or ask for more: `quiver quota set`",
    "not_allowed": "ask an administrator: `quiver acl test` says what is missing, `quiver acl grant` adds it",
    "unauthenticated": "pass --token-file, or --username and --password-file, or set QUIVER_TOKEN_FILE; "
    "`quiver token create` creates a token, `quiver user password` sets a password",
    "plain_text_token": "write https:// and pass --ca-file",
    "plain_text_password": "pass --tls or --ca-file",
    "bad_password_file": "correct the file that the command, QUIVER_PASSWORD_FILE or the context names",
    "bad_token_file": "correct the file that the command, QUIVER_TOKEN_FILE or the context names",
    "topic_exists": "choose another name; `quiver topic configure` changes the topic, `quiver topic delete` deletes it",
    "too_few_brokers": "start another broker, then run the command again",
    "not_drained": "`quiver broker drain` first, and wait until `quiver status` shows it as drained",
}
"""Advice by the error's code, where its class alone would give the wrong one."""
_DEFECT = (DEFECT, "this is a defect of Quiver: report it, with the command that led to it")

Cell = str | int | None
Facts = dict[str, Any]

_GAP = 3
"""Characters between two columns of a drawn table."""
_STYLES = {
    "alive": "green",
    "yes": "green",
    "suspect": "yellow",
    "draining": "yellow",
    "pending": "yellow",
    "dead": "red",
    "no": "red",
    "primary": "bold",
    "-": "dim",
}
"""Styles of whole cells at a terminal, by their text."""
_UNITS = ("B", "kB", "MB", "GB", "TB")


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_json_line(value: object) -> None:
    """Print a value as one line of JSON, for streams."""
    click.echo(msgspec.json.encode(value).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Print rows under their column names: as a table at a terminal that is wide enough, else in plain columns."""
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    is_number = [all(isinstance(row[at], int) for row in rows) for at in range(len(columns))]
    if sys.stdout.isatty() and sum(widths) + _GAP * (len(widths) - 1) <= shutil.get_terminal_size().columns:
        _draw_table(columns, cells, is_number)
        return
    for row in ([*columns], *cells):
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        )
        click.echo("  ".join(padded).rstrip())


def _draw_table(columns: Sequence[str], rows: Sequence[Sequence[str]], is_number: Sequence[bool]) -> None:
    # Loaded here: nodes and pipes need no table library, and its import takes longer than most commands.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, right in zip(columns, is_number, strict=True):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
    Console(file=sys.stdout, highlight=False).print(table)


def _text(cell: Cell) -> str:
    return "-" if cell is None else str(cell)


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun and thousands separators: 1 record, 1,234,567 records."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_bytes(count: float) -> str:
    """Return a number of bytes in the largest unit in which it is at least 1: 1.5 MB."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == _UNITS[0] else f"{count:.1f} {unit}"


def format_time(timestamp: int) -> str:
    """Return milliseconds since 1970 as a UTC time, or as a number if they are outside of the calendar."""
    try:
        moment = datetime.fromtimestamp(timestamp // 1000, UTC).replace(microsecond=timestamp % 1000 * 1000)
    except (OverflowError, ValueError, OSError):
        return str(timestamp)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def describe_record(record: Record) -> Facts:
    """Return a record's fields under the names of the JSON output, without those that it does not have."""
    facts: Facts = {} if record.partition is None else {"partition": record.partition}
    facts |= {"offset": record.offset, "timestamp": record.timestamp, "value": as_text(record.value)}
    if record.key is not None:
        facts["key"] = as_text(record.key)
    if record.headers:
        facts["headers"] = {name: as_text(value) for name, value in record.headers}
    return facts


def as_text(value: bytes | None) -> str | dict[str, str] | None:
    """Return bytes as text for JSON, or as `{"base64": …}` if they are not UTF-8."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}


def printable(value: bytes | None) -> str:
    """Return bytes as text in which control characters are escaped, tabs excepted."""
    text = "" if value is None else value.decode(errors="backslashreplace")
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\t" else _escape(one) for one in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def report_error(error: BaseException) -> int:
    """Print the error and what to do about it on standard error; return the exit code."""
    code, advice = next((_EXITS[kind] for kind in type(error).__mro__ if kind in _EXITS), _DEFECT)
    click.echo(f"error {_error_name(error)}: {_error_sentence(error)}", err=True)
    click.echo(f"  what to do: {_ADVICE.get(_error_name(error), advice)}", err=True)
    return code


def _error_name(error: BaseException) -> str:
    if isinstance(error, QuiverError):
        return error.code
    return "system_error" if isinstance(error, OSError) else "defect"


def _error_sentence(error: BaseException) -> str:
    if isinstance(error, QuiverError | InvariantBroken):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
