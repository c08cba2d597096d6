"""The blocking and the asyncio classes of the SDK have the same public methods, signatures and descriptions.

`compare` reads both classes and lists every difference; `EXCEPTIONS` names the intended ones with their reasons. An
exception that no longer exists is reported, too, so that the table stays true.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import pytest

from quiver.client.access import Access, AsyncAccess
from quiver.client.cluster import AsyncCluster
from quiver.client.consumer import AsyncConsumer
from quiver.client.producer import AsyncProducer
from quiver.client.queue import AsyncJob, AsyncQueue
from quiver.client.scan import AsyncScan, Scan
from quiver.client.sync import Cluster, Consumer, Producer
from quiver.client.sync_queue import Job, Queue

FACES: dict[type, type] = {
    Cluster: AsyncCluster,
    Producer: AsyncProducer,
    Consumer: AsyncConsumer,
    Queue: AsyncQueue,
    Job: AsyncJob,
    Scan: AsyncScan,
    Access: AsyncAccess,
}

EXCEPTIONS: dict[str, str] = {
    "AsyncCluster.open: only in the asyncio class": "`Cluster` opens itself: its constructor may block",
    "AsyncProducer.wait_room: only in the asyncio class": "blocking `send` and `send_many` wait for room themselves",
    "AsyncConsumer.facts: only in the asyncio class": "for the SDK alone: both faces show the same facts",
    "AsyncProducer.facts: only in the asyncio class": "for the SDK alone: both faces show the same facts",
    "AsyncConsumer.wait_batch: only in the asyncio class": "for the SDK alone: `Consumer` iterates over its batches",
    "AsyncQueue.facts: only in the asyncio class": "for the SDK alone: both faces show the same facts",
    "AsyncQueue.next_job: only in the asyncio class": "for the SDK alone: `Queue` iterates with it",
    "Cluster.read_range: returns Generator[Batch, None, None] and AsyncIterator[Batch]": "`close` ends it early",
    "Cluster.read_replica: returns Generator[Batch, None, None] and AsyncIterator[Batch]": "`close` ends it early",
    "Scan.to_reader: only in the blocking class": "an Arrow reader blocks",
    "Producer.send: first lines differ": "`result()` waits for a delivery in threads, `await` in asyncio",
}
"""Every difference between the two faces, and its reason."""

_SPECIAL_NAMES = {"__enter__": "__aenter__", "__exit__": "__aexit__", "__iter__": "__aiter__"}
_AWAITABLE = re.compile(r"^Awaitable\[(.*)\]$")
_ASYNC = re.compile(r"\bAsync(?=Iterator\b|Producer\b|Consumer\b|Scan\b|Access\b|Queue\b|Jobs?\b)")


def compare(face: type, asyncio_face: type) -> list[str]:
    """Return a sentence for each difference between a blocking class and its asyncio counterpart."""
    blocking = _members(face, _SPECIAL_NAMES)
    awaited = _members(asyncio_face, {})
    found = [f"{face.__name__}.{name}: only in the blocking class" for name in blocking.keys() - awaited.keys()]
    found += [f"{asyncio_face.__name__}.{name}: only in the asyncio class" for name in awaited.keys() - blocking.keys()]
    for name in blocking.keys() & awaited.keys():
        found += [f"{face.__name__}.{name}: {what}" for what in _differences(blocking[name], awaited[name])]
    return sorted(found)


def _members(owner: type, special_names: dict[str, str]) -> dict[str, Any]:
    """Return the public methods and properties of a class, special methods under the name of their counterpart."""
    special = {*_SPECIAL_NAMES, *_SPECIAL_NAMES.values()}
    known = {name: value for kind in reversed(owner.__mro__[:-1]) for name, value in vars(kind).items()}
    found = {name: value for name, value in known.items() if not name.startswith("_") or name in special}
    return {special_names.get(name, name): value for name, value in found.items()}


def _differences(blocking: Any, awaited: Any) -> Iterator[str]:
    if isinstance(blocking, property) != isinstance(awaited, property):
        yield "a property in one class and a method in the other"
        return
    first, second = (value.fget if isinstance(value, property) else value for value in (blocking, awaited))
    if not (callable(first) and callable(second)):
        return
    if _first_line(first) != _first_line(second):
        yield "first lines differ"
    mine, theirs = inspect.signature(first), inspect.signature(second)
    if list(mine.parameters) != list(theirs.parameters):
        yield f"parameters {list(mine.parameters)} and {list(theirs.parameters)}"
        return
    for name, parameter in mine.parameters.items():
        other = theirs.parameters[name]
        for what in ("kind", "default", "annotation"):
            one, two = getattr(parameter, what), getattr(other, what)
            if one != two:
                yield f"{what} of {name}: {one} and {two}"
    if mine.return_annotation != _blocking_type(theirs.return_annotation):
        yield f"returns {mine.return_annotation} and {theirs.return_annotation}"


def _first_line(function: Any) -> str:
    return (inspect.getdoc(function) or "").split("\n")[0]


def _blocking_type(annotation: str) -> str:
    """Return the blocking counterpart of an asyncio return type."""
    return _ASYNC.sub("", _AWAITABLE.sub(r"\1", annotation))


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_blocking_class_matches_the_asyncio_class(face: type) -> None:
    found = compare(face, FACES[face])
    assert [difference for difference in found if difference not in EXCEPTIONS] == []


def test_every_exception_is_still_one() -> None:
    found = {difference for face, asyncio_face in FACES.items() for difference in compare(face, asyncio_face)}
    assert EXCEPTIONS.keys() <= found


class Door:
    """A blocking class that differs from its counterpart in every possible way."""

    @property
    def width(self) -> int:
        """Return the width."""
        return 1

    @property
    def height(self) -> int:
        """Return the height."""
        return 2

    def open(self, angle: int = 90) -> None:
        """Open it."""

    def close(self, *, slowly: bool = False) -> None:
        """Close it."""

    def knock(self, times: int) -> str:
        """Knock."""
        return "knock" * times

    def ring(self) -> str:
        """Ring the bell."""
        return "ring"

    def lock(self) -> None:
        """Lock it."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


class AsyncDoor:
    """Its counterpart."""

    @property
    def width(self) -> int:
        """Return the width."""
        return 1

    def height(self) -> int:
        """Return the height."""
        return 2

    async def open(self, angle: int = 80) -> None:
        """Open it."""

    async def close(self, slowly: bool = False) -> None:
        """Close it."""

    async def knock(self, times: float) -> Awaitable[bytes]:
        """Knock."""
        raise AssertionError(times)

    async def ring(self, loudly: bool) -> str:
        """Ring the gong."""
        raise AssertionError(loudly)

    async def unlock(self) -> None:
        """Unlock it."""

    async def __aiter__(self) -> AsyncIterator[str]:
        for _ in ():
            yield ""


def test_every_kind_of_difference_is_found() -> None:
    assert compare(Door, AsyncDoor) == [
        "AsyncDoor.unlock: only in the asyncio class",
        "Door.__aiter__: returns Iterator[int] and AsyncIterator[str]",
        "Door.close: kind of slowly: KEYWORD_ONLY and POSITIONAL_OR_KEYWORD",
        "Door.height: a property in one class and a method in the other",
        "Door.knock: annotation of times: int and float",
        "Door.knock: returns str and Awaitable[bytes]",
        "Door.lock: only in the blocking class",
        "Door.open: default of angle: 90 and 80",
        "Door.ring: first lines differ",
        "Door.ring: parameters ['self'] and ['self', 'loudly']",
    ]


def test_a_class_matches_itself() -> None:
    assert compare(Cluster, Cluster) == [
        f"Cluster.{name}: only in the {kind} class"
        for name, kind in (
            ("__aenter__", "blocking"),
            ("__aexit__", "blocking"),
            ("__enter__", "asyncio"),
            ("__exit__", "asyncio"),
        )
    ]
