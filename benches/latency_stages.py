"""From stamps to stages: how long each record took for every step of its way.

The stages of one record follow each other without a gap, so that they add up to its total. What runs beside them (a
leader's own disk beside its followers) is a branch, whose name is indented, and is part of the stage before it.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Times = dict[str, list[float]]
"""Microseconds of each stage, one for each record, in the order of the stages."""


@dataclass
class Stamped:
    """The stamps of one process."""

    node: int
    """The node's id; 0 for a client."""
    times: dict[str, list[int]]
    """All times of a stage, in order."""
    by_key: dict[str, dict[int, int]]
    """The first time of a stage for each key."""
    others: dict[str, dict[int, int]]
    """The second key of a stage, for each key."""
    threads: dict[int, str]
    seen: list[tuple[int, int, int]]
    """What the application saw of each record: offset, begin, end."""
    stamp_ns: float

    @staticmethod
    def load(path: Path, node: int = 0) -> Stamped:
        content: dict[str, Any] = json.loads(path.read_text())
        times: dict[str, list[int]] = defaultdict(list)
        by_key: dict[str, dict[int, int]] = defaultdict(dict)
        others: dict[str, dict[int, int]] = defaultdict(dict)
        for stage, at_ns, key, other in content["stamps"]:
            times[stage].append(at_ns)
            by_key[stage].setdefault(key, at_ns)
            others[stage].setdefault(key, other)
        for found in times.values():
            found.sort()
        threads = {int(thread): name for thread, name in content["threads"].items()}
        return Stamped(node, times, by_key, others, threads, content.get("seen", []), content["stamp_ns"])

    def first(self, stage: str, since_ns: int) -> int:
        """Return the first time of a stage that is not before another time."""
        found = self.times[stage]
        return found[bisect_left(found, since_ns)]

    def last(self, stage: str, until_ns: int) -> int:
        """Return the last time of a stage that is not after another time."""
        found = self.times[stage]
        at = bisect_right(found, until_ns)
        if not at:
            raise LookupError(stage)
        return found[at - 1]

    @property
    def answers(self) -> int:
        """How many records it has answered as their leader."""
        return len(self.times["produce answered"])


class Steps:
    """The steps of one record."""

    def __init__(self, begun_ns: int) -> None:
        self._begun_ns = self._last_ns = begun_ns
        self._taken_us: dict[str, float] = {}

    def to(self, stage: str, at_ns: int) -> int:
        """Add the stage that began where the last one ended, and ends now."""
        self.beside(stage, self._last_ns, at_ns)
        self._last_ns = at_ns
        return at_ns

    def beside(self, stage: str, from_ns: int, to_ns: int) -> None:
        """Add a stage that is part of another."""
        self._taken_us[stage] = (to_ns - from_ns) / 1e3

    def end(self, times: Times) -> None:
        """Add the steps to those of other records."""
        for stage, taken_us in self._taken_us.items():
            times.setdefault(stage, []).append(taken_us)
        times.setdefault("TOTAL", []).append((self._last_ns - self._begun_ns) / 1e3)


# -- an awaited record -------------------------------------------------------------------------------


def awaited_times(client: Stamped, nodes: Sequence[Stamped]) -> Times:
    """Return the stages of records that were sent one after the other."""
    leader, followers = split_nodes(nodes)
    index_of = {offset: index for index, offset in leader.others["queued"].items()}
    times: Times = {}
    for offset, begun_ns, ended_ns in client.seen:
        steps = Steps(begun_ns)
        try:
            index = index_of[offset]
            arrived_ns = leader.last("produce arrived", leader.by_key["queued"][index])
            _add_client_steps(steps, client, begun_ns, arrived_ns)
            _add_leader_steps(steps, leader, followers, index, offset)
            settled_ns = client.by_key["settled"][offset]
            steps.to("socket: write, leader to client, loop wakes", client.last("answer arrived", settled_ns))
            steps.to("client: loop, answer to outcome", settled_ns)
            steps.to("client: application's thread wakes", ended_ns)
        except LookupError:
            continue  # a stage was not seen, for example because a follower had not finished when it was stopped
        steps.end(times)
    return times


def _add_client_steps(steps: Steps, client: Stamped, begun_ns: int, arrived_ns: int) -> None:
    """Add the stages until the request is written; backwards, since a loop that is awake does not wait to be woken."""
    written_ns = client.last("request written", arrived_ns)
    requested_ns = client.last("requested", written_ns)
    launched_ns = client.last("launched", requested_ns)
    announced_ns = min(client.first("announced", begun_ns), launched_ns)
    woken_ns = min(max(client.last("loop woken", launched_ns), announced_ns), launched_ns)
    steps.to("client: send(), until its loop is notified", announced_ns)
    steps.to("client: loop's thread wakes", woken_ns)
    steps.to("client: loop, to the sender's turn", launched_ns)
    steps.to("client: loop, batch built, request's task runs", requested_ns)
    steps.to("client: loop, encode the request", written_ns)


def _add_leader_steps(steps: Steps, leader: Stamped, followers: Sequence[Stamped], index: int, offset: int) -> None:
    queued_ns = leader.by_key["queued"][index]
    steps.to("socket: write, client to leader, loop wakes", leader.last("produce arrived", queued_ns))
    steps.to("leader: loop, frame to handler", leader.last("produce begun", queued_ns))
    steps.to("leader: loop, checks, to the turn's proposals", leader.last("proposed", queued_ns))
    steps.to("leader: loop, Raft, stamp, queue of the log", queued_ns)
    finished_ns, applied_ns = leader.by_key["flush finished"][index], leader.by_key["applied"][index]
    if followers:
        steps.to("leader and followers: until durable on a majority", _add_branches(steps, leader, followers, index))
    else:
        _add_disk_steps(steps, leader, index, "")
        steps.to("leader: loop, completed flush to the log", finished_ns)
    steps.to("leader: loop, commit and apply", applied_ns)
    steps.to("leader: loop, handler resumes", leader.by_key["produce resumed"][offset])
    steps.to("leader: loop, encode the answer", leader.by_key["produce answered"][offset])


def _add_disk_steps(steps: Steps, node: Stamped, index: int, name: str) -> None:
    """Add the stages from the queue of a log until its loop knows that the write is done."""
    times = node.by_key
    ended_ns, sync_ns = times["flush ended"][index], node.others["synced"][index]
    marks = (
        ("disk thread wakes", times["flush begun"][index]),
        ("disk thread: pwritev", ended_ns - sync_ns),
        ("disk thread: fdatasync", ended_ns),
        ("loop wakes after the write", times["flush completed"][index]),
    )
    at_ns = times["queued"][index]
    for stage, until_ns in marks:
        if name:
            steps.beside(f"  {name}: {stage}", at_ns, until_ns)
        else:
            steps.to(stage, until_ns)
        at_ns = until_ns


def _add_branches(steps: Steps, leader: Stamped, followers: Sequence[Stamped], index: int) -> int:
    """Add the leader's own disk and its fastest follower; return when the leader had heard of a majority."""
    queued_ns, own_ns = leader.by_key["queued"][index], leader.by_key["flush finished"][index]
    _add_disk_steps(steps, leader, index, "own disk")
    steps.beside("  own disk: all of it", queued_ns, own_ns)
    acks = sorted((_ack_arrived(leader, node, index), at) for at, node in enumerate(followers))
    ack_ns, fastest = acks[0]
    follower, times = followers[fastest], followers[fastest].by_key
    sent_ns, arrived_ns = leader.by_key[f"append sent to {follower.node}"][index], times["append arrived"][index]
    steps.beside("  follower: loop, to the envelope", queued_ns, sent_ns)
    steps.beside("  follower: socket, write, loop wakes", sent_ns, arrived_ns)
    steps.beside("  follower: loop, check, queue of the log", arrived_ns, times["queued"][index])
    _add_disk_steps(steps, follower, index, "follower")
    completed_ns, acknowledged_ns = times["flush completed"][index], times["acknowledged"][index]
    steps.beside("  follower: loop, to the acknowledgement", completed_ns, acknowledged_ns)
    steps.beside("  follower: socket, write, leader's loop wakes", acknowledged_ns, ack_ns)
    steps.beside("  follower: all of it", queued_ns, ack_ns)
    needed = (len(followers) + 1) // 2  # of the others, beside the leader itself
    with_leader_ns = max(own_ns, acks[needed - 1][0])
    return min(with_leader_ns, acks[needed][0]) if needed < len(acks) else with_leader_ns


def _ack_arrived(leader: Stamped, follower: Stamped, index: int) -> int:
    """Return when the leader received a follower's acknowledgement of an index: the first after it was sent."""
    return leader.first(f"ack arrived from {follower.node}", follower.by_key["acknowledged"][index])


def split_nodes(nodes: Sequence[Stamped]) -> tuple[Stamped, list[Stamped]]:
    """Return the node that led most of the time, and the others; records that another one led are left out."""
    leader = max(nodes, key=lambda node: node.answers)
    return leader, [node for node in nodes if node is not leader]


# -- a delivered record ------------------------------------------------------------------------------


def delivered_times(producer: Stamped, consumer: Stamped, nodes: Sequence[Stamped]) -> Times:
    """Return the stages of records that were sent at a rate, until the consumer's application had them."""
    leader, _ = split_nodes(nodes)
    index_of = {offset: index for index, offset in leader.others["queued"].items()}
    bases, fetched = sorted(index_of), sorted(leader.by_key["fetch resumed"])
    accepted = sorted(consumer.by_key["accepted"])
    received = {offset: (begun_ns, ended_ns) for offset, begun_ns, ended_ns in consumer.seen}
    times: Times = {}
    for offset, begun_ns, _ in producer.seen:
        steps = Steps(begun_ns)
        try:
            base = bases[bisect_right(bases, offset) - 1]  # of the batch that the record is in
            index = index_of[base]
            polled_ns, ended_ns = received[offset]
            fetch = fetched[bisect_right(fetched, offset) - 1]
            accepted_ns = consumer.by_key["accepted"][accepted[bisect_right(accepted, offset)]]
            _add_sending_steps(steps, producer, leader, index)
            applied_ns = steps.to("leader: until committed and applied", leader.by_key["applied"][index])
            asked_ns = max(applied_ns, leader.last("fetch arrived", leader.by_key["fetch resumed"][fetch]))
            steps.to("leader: until the consumer's next fetch arrives", asked_ns)
            steps.to("leader: loop, waiter to handler, read", leader.by_key["fetch resumed"][fetch])
            steps.to("leader: loop, encode the answer", leader.by_key["fetch answered"][fetch])
            steps.to("socket: write, leader to consumer, loop wakes", consumer.last("records arrived", accepted_ns))
            steps.to("consumer: loop, answer to buffer", accepted_ns)
            steps.to("consumer: until the application polls", max(polled_ns, accepted_ns))
            steps.to("consumer: loop, poll, application's thread wakes", ended_ns)
        except (LookupError, IndexError):
            continue
        steps.end(times)
    return times


def _add_sending_steps(steps: Steps, producer: Stamped, leader: Stamped, index: int) -> None:
    queued_ns = leader.by_key["queued"][index]
    arrived_ns = leader.last("produce arrived", queued_ns)
    sent_ns = producer.last("request written", arrived_ns)
    launched_ns = producer.last("launched", sent_ns)
    steps.to("client: send(), loop wakes, batch before is answered", launched_ns)
    steps.to("client: loop, batch built, encode the request", sent_ns)
    steps.to("socket: write, client to leader, loop wakes", arrived_ns)
    steps.to("leader: loop, frame to the queue of the log", queued_ns)
