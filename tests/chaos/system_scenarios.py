"""What users of the API do to find out whether it works: three scenarios, over any way of using it.

What was produced is what senders were told is safe; where it is, is read over plain HTTP at the end, partition by
partition; and every reader must have heard exactly that, in that order.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import cast

from chaos_cluster import Cluster
from chaos_http import HttpClient, wait_for
from system_ways import PATIENCE_S, Reader, Way, ask

PRODUCERS = {"T1": ("P1", "P2", "P3"), "T2": ("P1", "P4", "P5"), "T3": ("P1", "P2")}
CONSUMERS = {"T1": ("C1", "C2", "C3"), "T2": ("C1",), "T3": ("C1", "C2", "C3")}
PARTITIONS = 3
PAUSE_S = 0.02
"""Longest pause between two lines of a producer."""

Lines = dict[str, list[str]]
"""Lines by topic."""


class Exchange:
    """What the clients of one way have sent and heard."""

    def __init__(self, way: Way, producers: Mapping[str, Lines], consumers: Mapping[str, Sequence[str]]) -> None:
        """Take the lines that each producer has for its topics, and each consumer's topics."""
        self.way = way
        self.producers = producers
        self.consumers = consumers
        self.sent_count = 0
        self.heard: dict[str, Lines] = {name: {topic: [] for topic in topics} for name, topics in consumers.items()}
        self.total = sum(len(lines) for own in producers.values() for lines in own.values())
        self._counting = threading.Lock()
        self._readers: list[Reader] = []

    def lines(self, topic: str) -> list[str]:
        """Return all lines that are meant for a topic."""
        return [line for own in self.producers.values() for line in own.get(topic, ())]

    def produce(self, name: str, seed: int, pause_s: float) -> None:
        """Send a producer's lines one after the other, each when the one before is acknowledged; topics take turns."""
        rng = Random(f"{name} {seed}")
        own = self.producers[name]
        sender = self.way.sender(name, list(own))
        for topic, line in _take_turns(own):
            sender.send(topic, line)
            with self._counting:
                self.sent_count += 1
            time.sleep(rng.random() * pause_s)
        sender.close()

    def consume(self, name: str) -> None:
        """Read a consumer's topics until it has as many lines as are sent, and make sure that there is no more."""
        heard, topics = self.heard[name], list(self.consumers[name])
        wanted = sum(len(self.lines(topic)) for topic in topics)
        counting = threading.Lock()
        count = 0

        def take(topic: str, line: str) -> bool:
            nonlocal count
            with counting:
                heard[topic].append(line)
                count += 1
                return count >= wanted

        reader = self.way.reader(name, topics)
        self._readers.append(reader)
        reader.read(take)
        assert reader.sizes() == dict.fromkeys(topics, 0), (self.way.name, name)
        reader.close()

    def stop(self) -> None:
        """Let nobody wait for lines that will never come."""
        for reader in self._readers:
            reader.stop()


def five_producers_three_consumers(
    cluster: Cluster,
    ways: Sequence[Callable[[Cluster], Way]],
    directory: Path,
    *,
    lines: int,
    rounds: int = 1,
    seed: int = 1,
) -> int:
    """Let producers send their log files while nodes are killed; return how many lines each way's readers heard.

    In each round a broker, then the primary manager, then everything is killed and started again.
    """
    with _open(ways, cluster) as opened:
        exchanges = []
        for way in opened:
            topics = {name: f"{way.name}-{name}" for name in PRODUCERS}
            _create(cluster, topics.values(), partitions=PARTITIONS)
            files = _write_logs(directory / way.name, topics, lines=lines)
            consumers = {
                name: [topics[topic] for topic, names in CONSUMERS.items() if name in names]
                for name in ("C1", "C2", "C3")
            }
            exchanges.append(Exchange(way, {name: _read_log(path) for name, path in files.items()}, consumers))

        def strike() -> int:
            return _strike(cluster, lambda: min(one.sent_count / one.total for one in exchanges), rounds=rounds)

        kills = _run(exchanges, seed=seed, pause_s=PAUSE_S, meanwhile=strike)
        assert kills == rounds * (2 + len(cluster.nodes))
    return sum(_judge(cluster, exchange) for exchange in exchanges)


def one_producer_one_consumer(cluster: Cluster, make_way: Callable[[Cluster], Way], *, lines: int) -> None:
    """What goes in comes out, in the order in which it went in."""
    with _open([make_way], cluster) as (way,):
        topic = f"{way.name}-one"
        _create(cluster, [topic], partitions=1)
        sent = [f'line {number}: grün, "quoted", \t{number}' for number in range(lines)]
        exchange = Exchange(way, {"P": {topic: sent}}, {"C": [topic]})
        _run([exchange], seed=1, pause_s=0.0)
    assert exchange.heard == {"C": {topic: sent}}


def many_producers(
    cluster: Cluster, make_way: Callable[[Cluster], Way], *, producers: int, lines: int, seed: int = 1
) -> None:
    """As many are consumed as are produced, and all consumers hear them in one order."""
    with _open([make_way], cluster) as (way,):
        topic = f"{way.name}-many"
        _create(cluster, [topic], partitions=1)
        own = {f"M{number}": {topic: [f"M{number} {line}" for line in range(lines)]} for number in range(producers)}
        exchange = Exchange(way, own, {name: [topic] for name in ("C1", "C2", "C3")})
        _run([exchange], seed=seed, pause_s=5 * PAUSE_S)
    first, second, third = (exchange.heard[name][topic] for name in ("C1", "C2", "C3"))
    assert first == second == third
    _judge(cluster, exchange)


# -- the files ---------------------------------------------------------------------------------------


def _write_logs(directory: Path, topics: Mapping[str, str], *, lines: int) -> dict[str, Path]:
    """Write each producer's log file: a line names its topic, and says something that no other line says."""
    directory.mkdir()
    files: dict[str, Path] = {}
    for name in sorted({name for names in PRODUCERS.values() for name in names}):
        own = [topics[topic] for topic, names in PRODUCERS.items() if name in names]
        rows = [f"{own[number % len(own)]} INFO {name} did {number}\n" for number in range(lines)]
        files[name] = directory / f"{name}.log"
        files[name].write_text("".join(rows))
    return files


def _read_log(path: Path) -> Lines:
    found: Lines = {}
    for line in path.read_text().splitlines():
        found.setdefault(line.split()[0], []).append(line)
    return found


def _take_turns(own: Lines) -> Iterator[tuple[str, str]]:
    left = {topic: iter(lines) for topic, lines in own.items()}
    while left:
        for topic, lines in list(left.items()):
            line = next(lines, None)
            if line is None:
                del left[topic]
            else:
                yield topic, line


# -- running -----------------------------------------------------------------------------------------


@contextmanager
def _open(ways: Sequence[Callable[[Cluster], Way]], cluster: Cluster) -> Iterator[list[Way]]:
    with ExitStack() as stack:
        opened = []
        for make in ways:
            way = make(cluster)
            stack.callback(way.close)
            opened.append(way)
        yield opened


def _create(cluster: Cluster, topics: Iterable[str], *, partitions: int) -> None:
    client = HttpClient(cluster.http_addresses)
    wait_for("all brokers to be alive", lambda: _alive(client) == len(cluster.nodes), PATIENCE_S)
    for topic in topics:
        answer = client.post("/topics", topic_name=topic, partitions=partitions, replicas=len(cluster.nodes))
        assert answer.is_ok, answer
    client.close()


def _alive(client: HttpClient) -> int:
    return sum(broker["state"] == "alive" for broker in client.get("/brokers").body.get("brokers", ()))


def _run(exchanges: Sequence[Exchange], *, seed: int, pause_s: float, meanwhile: Callable[[], int] = lambda: 0) -> int:
    """Let all clients run at the same time, and something else with them; return what that returns.

    The first that fails fails all; the others are left to themselves, and end when their patience does.
    """
    works: list[Callable[[], object]] = [meanwhile]
    for one in exchanges:
        works += [partial(one.consume, name) for name in one.consumers]
        works += [partial(one.produce, name, seed, pause_s) for name in one.producers]
    running = [_begin(work) for work in works]
    try:
        for future in as_completed(running):
            future.result()
    except BaseException:
        for one in exchanges:
            one.stop()
        raise
    return int(cast("int", running[0].result()))


def _begin(work: Callable[[], object]) -> Future[object]:
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _strike(cluster: Cluster, share_sent: Callable[[], float], *, rounds: int) -> int:
    """Kill a broker, then the primary, then all, spread over the run; return how many processes were killed."""
    kills = 0
    for strike in range(3 * rounds):
        share = (strike + 1) / (3 * rounds + 2)
        wait_for(f"a share of {share:.0%}", lambda share=share: share_sent() >= share, 10 * PATIENCE_S)
        primary = _primary(cluster)
        others = [node for node in cluster.nodes if node.id != primary]
        victims = (others[:1], [cluster.node(primary)], cluster.nodes)[strike % 3]
        for node in victims:
            node.kill()
        kills += len(victims)
        if len(victims) == 1:  # the others must go on without it
            before = share_sent()
            # Clients that have sent everything by now, while the primary was looked for, cannot send more.
            wait_for("progress without it", lambda before=before: share_sent() > before or before == 1, PATIENCE_S)
        cluster.start()
    return kills


def _primary(cluster: Cluster) -> int:
    client = HttpClient(cluster.http_addresses)
    try:
        return int(wait_for("a primary", lambda: client.get("/managers").body.get("primary"), PATIENCE_S))
    finally:
        client.close()


# -- judging -----------------------------------------------------------------------------------------


def _judge(cluster: Cluster, exchange: Exchange) -> int:
    """Compare what was sent, what is there, and what was heard; return how many lines were heard in all."""
    heard_count = 0
    for topic in sorted({topic for topics in exchange.consumers.values() for topic in topics}):
        partitions = _read_partitions(cluster, topic)
        there = [line for lines in partitions for line in lines]
        assert Counter(there) == Counter(exchange.lines(topic)), (exchange.way.name, topic)
        for lines in partitions:
            _check_order(lines, exchange, topic)
        partition_of = {line: number for number, lines in enumerate(partitions) for line in lines}
        for name, heard in exchange.heard.items():
            if topic not in heard:
                continue
            heard_count += len(heard[topic])
            by_partition: list[list[str]] = [[] for _ in partitions]
            for line in heard[topic]:
                by_partition[partition_of[line]].append(line)
            assert by_partition == partitions, (exchange.way.name, topic, name)
    return heard_count


def _check_order(lines: list[str], exchange: Exchange, topic: str) -> None:
    """A producer sends a line when the one before is safe: no partition may have them in another order."""
    place = {line: number for number, line in enumerate(lines)}
    for name, own in exchange.producers.items():
        places = [place[line] for line in own.get(topic, ()) if line in place]
        assert places == sorted(places), (exchange.way.name, topic, name)


def _read_partitions(cluster: Cluster, topic: str) -> list[list[str]]:
    """Read every partition from its beginning, as somebody who comes later does."""
    client = HttpClient(cluster.http_addresses)
    consumer = ask(client, "POST", "/consumer/register", topic=topic).body["consumer_id"]
    found: list[list[str]] = []
    for partition in ask(client, "GET", "/partitions", topic=topic).body["partitions"]:
        lines: list[str] = []
        place = {"topic": topic, "consumer_id": consumer, "partition_id": partition["partition_id"]}
        while batch := ask(client, "GET", "/consumer/consume_batch", offset=len(lines), max=1000, **place).body:
            assert [message["offset"] for message in batch["messages"]] == list(
                range(len(lines), len(lines) + len(batch["messages"]))
            )
            lines += [message["message"] for message in batch["messages"]]
        found.append(lines)
    client.close()
    return found
