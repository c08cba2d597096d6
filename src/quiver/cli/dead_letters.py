"""`quiver queue dead`: list, show, requeue and purge the dead letters of a work queue.

Dead letters are records of a topic. That topic is a queue itself, whose group (`GROUP.dead`) acknowledges those that
were requeued or purged: what is listed is what is left. Listing leases records for a moment and releases them.

A requeued record is produced first and its dead letter acknowledged then. A crash between the two loses nothing; the
next requeue then produces the record once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import click

import quiver
from quiver.cli.options import connect, examples, json_option, url_option
from quiver.cli.output import Cell, describe_record, format_count, format_time, print_json, print_table, printable
from quiver.client.queue_groups import QueueDescription
from quiver.errors import NotFoundError, QuiverError, RequestError
from quiver.groups.settings import IN_FLIGHT_MAX, dead_letter_topic_of
from quiver.model import PartitionId
from quiver.record import Record
from quiver.record.delay import DELIVER_AT_HEADER
from quiver.record.queue_headers import (
    DEAD_ATTEMPTS_HEADER,
    DEAD_HEADERS,
    DEAD_OFFSET_HEADER,
    DEAD_PARTITION_HEADER,
    DEAD_REASON_HEADER,
    DEAD_TIME_HEADER,
    DEAD_TOPIC_HEADER,
)

BATCH = 500
LEASE_S = 60.0
WAIT_S = 0.2
"""How long a further dead letter is waited for, beside the answers of all partitions."""

VALUE_SHOWN = 60
"""Characters of a value in the list."""

_GROUP = click.argument("group")
_TOPIC = click.option("--topic", help="Topic of the queue, if the group has several.")
_LETTERS = click.argument("letters", nargs=-1, metavar="[PARTITION:OFFSET]...")
_ALL = click.option("--all", "is_all", is_flag=True, help="All dead letters.")
_REASON = click.option("--reason", metavar="TEXT", help="Only those whose reason contains this text.")

Choose = Callable[[quiver.Job], bool]


@click.group(epilog="Example: quiver queue dead list workers")
def dead() -> None:
    """Work with the dead letters of a queue: records that were rejected, or failed too often."""


@dead.command("list", epilog="Example: quiver queue dead list workers --max 20")
@_GROUP
@_TOPIC
@click.option("--max", "letters_max", type=click.IntRange(min=1), default=100, show_default=True, metavar="N")
@_REASON
@json_option
@url_option
def list_dead(*, group: str, topic: str | None, letters_max: int, reason: str | None, as_json: bool, url: str) -> None:
    """Print the dead letters of GROUP: where they are, where they come from, how often they were tried, and why.

    Those that another command is working on are not listed.
    """
    found: list[quiver.Job] = []
    with connect(url) as cluster, _open(cluster, group, topic) as queue:
        for jobs in _chunks(queue, _chooser((), is_all=True, reason=reason)):
            found += jobs
            if len(found) >= letters_max:
                break
        for job in found:
            with suppress(QuiverError):  # its lease ends soon
                job.release()
    found.sort(key=lambda job: (job.partition, job.offset))
    del found[letters_max:]
    if as_json:
        print_json([describe_record(job.record) for job in found])
        return
    if not found:
        click.echo("no dead letters")
        return
    rows: list[tuple[Cell, ...]] = [_cells(job.record) for job in found]
    print_table(("letter", "from", "attempts", "died", "reason", "value"), rows)


@dead.command("show", epilog="Example: quiver queue dead show workers 0:12")
@_GROUP
@click.argument("letter", metavar="PARTITION:OFFSET")
@_TOPIC
@json_option
@url_option
def show_dead(*, group: str, letter: str, topic: str | None, as_json: bool, url: str) -> None:
    """Print one dead letter of GROUP with its whole value and all headers, whether it is settled or not."""
    partition, offset = _parse_letter(letter)
    with connect(url) as cluster:
        name = _find_topic(_describe(cluster, group), topic)
        with closing(cluster.read_range(name, partition, offset, offset + 1)) as batches:
            records = (one for batch in batches for one in batch.records(partition=PartitionId(partition), topic=name))
            record = next((one for one in records if one.offset == offset), None)
    if record is None:
        raise NotFoundError(f"there is no dead letter {letter} in topic {name!r}", code="unknown_letter")
    if as_json:
        print_json(describe_record(record))
        return
    click.echo(f"dead letter {letter} of topic {name}")
    for header, value in record.headers:
        click.echo(f"  {header}: {_show_header(header, value)}")
    if record.key is not None:
        click.echo(f"  key: {printable(record.key)}")
    click.echo(printable(record.value))


@dead.command(
    "requeue",
    epilog=examples("quiver queue dead requeue workers 0:12 0:13", "quiver queue dead requeue workers --all"),
)
@_GROUP
@_LETTERS
@_TOPIC
@_ALL
@_REASON
@url_option
def requeue_dead(
    *, group: str, letters: tuple[str, ...], topic: str | None, is_all: bool, reason: str | None, url: str
) -> None:
    """Send dead letters of GROUP to the topic that they come from, as new records; they are dead letters no more.

    Every group of that topic gets them, not only GROUP. If the command is killed, none is lost; those that it had sent
    and not yet settled are sent again by the next requeue.
    """
    choose = _chooser(letters, is_all=is_all, reason=reason)
    count = 0
    with connect(url) as cluster, _open(cluster, group, topic) as queue:
        producers: dict[str, quiver.Producer] = {}
        for jobs in _chunks(queue, choose):
            for delivery in [_send(cluster, producers, job.record) for job in jobs]:
                delivery.result()
            assert queue is not None  # it has jobs
            queue.ack(jobs)
            count += len(jobs)
    _report("requeued", count, letters)


@dead.command(
    "purge", epilog=examples("quiver queue dead purge workers 0:12", "quiver queue dead purge workers --all --yes")
)
@_GROUP
@_LETTERS
@_TOPIC
@_ALL
@_REASON
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask.")
@url_option
def purge_dead(
    *,
    group: str,
    letters: tuple[str, ...],
    topic: str | None,
    is_all: bool,
    reason: str | None,
    is_sure: bool,
    url: str,
) -> None:
    """Settle dead letters of GROUP without requeueing them: they are not listed any more.

    Their records stay in the dead-letter topic as long as its retention says; `quiver queue dead show` shows them.
    """
    choose = _chooser(letters, is_all=is_all, reason=reason)
    if not letters and not is_sure:
        click.confirm(f"purge the dead letters of {group}?", abort=True)
    count = 0
    with connect(url) as cluster, _open(cluster, group, topic) as queue:
        for jobs in _chunks(queue, choose):
            assert queue is not None  # it has jobs
            queue.ack(jobs)
            count += len(jobs)
    _report("purged", count, letters)


def _report(done: str, count: int, letters: tuple[str, ...]) -> None:
    click.echo(f"{done} {format_count(count, 'dead letter')}")
    if count < len(set(letters)):
        missing = len(set(letters)) - count
        raise NotFoundError(
            f"not done for {missing} of them: they are not there, settled, or another command is working on them",
            code="unknown_letter",
        )


# -- dead letters as a queue ---------------------------------------------------------------------------


@contextmanager
def _open(cluster: quiver.Cluster, group: str, topic: str | None) -> Iterator[quiver.Queue | None]:
    """Yield the queue of a group's dead letters; None if there were none yet."""
    name = _find_topic(_describe(cluster, group), topic)
    if name not in cluster.list_topics():
        yield None
        return
    # The lease is short, so that what a killed command had comes back soon; it is never lost to further dead letters.
    settings = {"lease": LEASE_S, "max_attempts": 0, "in_flight_max": IN_FLIGHT_MAX}
    with cluster.queue(name, f"{group}.dead", **settings) as queue:  # type: ignore[arg-type] # numbers
        yield queue


def _describe(cluster: quiver.Cluster, group: str) -> QueueDescription:
    found = next((one for one in cluster.queues() if one.group == group), None)
    if found is None:
        raise NotFoundError(f"unknown queue {group!r}; `quiver queue list` lists the queues", code="unknown_group")
    return found


def _find_topic(queue: QueueDescription, topic: str | None) -> str:
    """Return the dead-letter topic of a queue."""
    if topic is None and len(queue.topics) != 1:
        names = ", ".join(queue.topics)
        raise RequestError(f"not done: {queue.group!r} reads several topics: pass --topic, one of {names}")
    chosen = queue.topics[0] if topic is None else topic
    return dead_letter_topic_of(queue.settings, topic=chosen, group=queue.group)


def _chooser(letters: tuple[str, ...], *, is_all: bool, reason: str | None) -> Choose:
    """Return which dead letters a command works on."""
    if not letters and not is_all and reason is None:
        raise click.UsageError("name dead letters as PARTITION:OFFSET, or pass --all or --reason")
    if letters and is_all:
        raise click.UsageError("give at most one of PARTITION:OFFSET and --all")
    places = {_parse_letter(one) for one in letters}

    def choose(job: quiver.Job) -> bool:
        if places and (job.partition, job.offset) not in places:
            return False
        return reason is None or reason in _header(job.record, DEAD_REASON_HEADER)

    return choose


def _parse_letter(letter: str) -> tuple[int, int]:
    partition, sign, offset = letter.partition(":")
    if not sign or not (partition.isascii() and partition.isdigit() and offset.isascii() and offset.isdigit()):
        raise click.UsageError(f"{letter!r} is no PARTITION:OFFSET, such as 0:12; `quiver queue dead list` shows them")
    return int(partition), int(offset)


def _chunks(queue: quiver.Queue | None, choose: Choose) -> Iterator[list[quiver.Job]]:
    """Yield the chosen dead letters in batches; release the others at the end."""
    if queue is None:
        return
    others: list[quiver.Job] = []
    seen: set[tuple[int, int]] = set()
    try:
        while jobs := [job for job in queue.receive(BATCH, timeout=WAIT_S) if (job.partition, job.offset) not in seen]:
            seen.update((job.partition, job.offset) for job in jobs)
            chosen = [job for job in jobs if choose(job)]
            others += [job for job in jobs if not choose(job)]
            if chosen:
                yield chosen
    finally:
        for job in others:
            with suppress(QuiverError):  # its lease ends soon
                job.release()


def _send(cluster: quiver.Cluster, producers: dict[str, quiver.Producer], record: Record) -> quiver.Delivery:
    """Send a dead letter to where it comes from, without the headers that it got as one."""
    topic = _header(record, DEAD_TOPIC_HEADER)
    if not topic:
        message = f"not done: record {record.partition}:{record.offset} does not say where it comes from"
        raise RequestError(message, code="not_a_dead_letter")
    if topic not in producers:
        producers[topic] = cluster.producer(topic, create_topic=False)
    kept = [header for header in record.headers if header[0] not in DEAD_HEADERS and header[0] != DELIVER_AT_HEADER]
    partition = int(_header(record, DEAD_PARTITION_HEADER) or 0)
    return producers[topic].send(record.value, record.key, partition, headers=kept or None)


# -- output --------------------------------------------------------------------------------------------


def _cells(record: Record) -> tuple[Cell, ...]:
    died = _header(record, DEAD_TIME_HEADER)
    source = (_header(record, DEAD_TOPIC_HEADER), _header(record, DEAD_PARTITION_HEADER))
    return (
        f"{record.partition}:{record.offset}",
        f"{'/'.join(source)}:{_header(record, DEAD_OFFSET_HEADER)}",
        _header(record, DEAD_ATTEMPTS_HEADER),
        format_time(int(died)) if died.isdigit() else None,
        printable(_header(record, DEAD_REASON_HEADER).encode()) or None,
        _shorten(printable(record.value)),
    )


def _header(record: Record, name: str) -> str:
    return next(((value or b"").decode(errors="replace") for header, value in record.headers if header == name), "")


def _show_header(name: str, value: bytes | None) -> str:
    text = printable(value)
    return format_time(int(text)) if name == DEAD_TIME_HEADER and text.isdigit() else text


def _shorten(text: str) -> str:
    return text if len(text) <= VALUE_SHOWN else f"{text[: VALUE_SHOWN - 1]}…"
