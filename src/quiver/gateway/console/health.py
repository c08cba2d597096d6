"""How a cluster is, in one sentence and one level, with the reasons. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

HealthLevel = Literal["ok", "warning", "critical"]
DISK_FREE_MIN: Final = 2
"""Free bytes of a disk below so many times the reserve are a warning."""
REASONS_MAX: Final = 20


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the health of a cluster depends on, of one node."""

    node: int
    state: str
    is_alive: bool
    is_ready: bool = True
    unready: str = ""
    problems: int = 0
    disk_free_bytes: float | None = None
    disk_reserved_bytes: float = 0


class ConsoleHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The health of a cluster; without reasons it is ok."""

    level: HealthLevel
    sentence: str
    reasons: list[tuple[HealthLevel, str]]


def judge_health(
    nodes: Sequence[NodeFacts],
    *,
    primary: int | None,
    partitions: int,
    under_replicated: int,
    leaderless: int,
    moves: int = 0,
) -> ConsoleHealth:
    """Return the health that follows from the nodes' reports: what is critical first, causes before effects."""
    dead = [node for node in nodes if not node.is_alive]
    reasons: list[tuple[HealthLevel, str]] = [
        *(("warning", f"node {node.node} does not answer (state {node.state})") for node in dead),
        *_judge_cluster(primary=primary, leaderless=leaderless, under_replicated=under_replicated, moves=moves),
        *(reason for node in nodes if node.is_alive for reason in _judge_node(node)),
    ]
    reasons.sort(key=lambda reason: reason[0] != "critical")
    if not reasons:
        sentence = f"All is well: {_count(len(nodes), 'node')} up, {_count(partitions, 'partition')} in sync."
        return ConsoleHealth(level="ok", sentence=sentence, reasons=[])
    shown = [text for _, text in reasons[:2]]
    more = f", and {len(reasons) - 2} more" if len(reasons) > 2 else ""
    sentence = f"{_capitalize('; '.join(shown))}{more}."
    return ConsoleHealth(level=reasons[0][0], sentence=sentence, reasons=reasons[:REASONS_MAX])


def _judge_cluster(
    *, primary: int | None, leaderless: int, under_replicated: int, moves: int
) -> Iterator[tuple[HealthLevel, str]]:
    if primary is None:
        yield "critical", "there is no primary: topics, clients and nodes cannot be changed until one is elected"
    if leaderless:
        yield "critical", f"{_count(leaderless, 'partition')} without a leader: neither produce nor consume works there"
    if under_replicated:
        why = f", {_count(moves, 'move')} in progress" if moves else ""
        yield "warning", f"{_count(under_replicated, 'partition')} under-replicated{why}"


def _judge_node(node: NodeFacts) -> Iterator[tuple[HealthLevel, str]]:
    name = f"node {node.node}"
    if node.state in ("draining", "drained"):
        yield "warning", f"{name} is {node.state}"
    if not node.is_ready:
        yield "warning", f"{name} is not ready: {node.unready}"
    if node.problems:
        yield "warning", f"{_count(node.problems, 'replica')} on {name} cannot serve"
    if node.disk_free_bytes is not None and node.disk_free_bytes < DISK_FREE_MIN * node.disk_reserved_bytes:
        level: HealthLevel = "critical" if node.disk_free_bytes < node.disk_reserved_bytes else "warning"
        yield level, f"the disk of {name} is nearly full: {node.disk_free_bytes / 2**20:,.0f} MiB free"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
