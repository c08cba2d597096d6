"""The handshake: how two nodes make sure that they should talk at all. Pure.

The side that dialled sends a `Hello`; the side that was dialled answers with its own `Hello`, which means that it
agrees, or with a `Refusal`, which says why not and is followed by the end of the connection. So a stranger learns
nothing about the cluster, and whoever has read a `Hello` in answer knows that it may begin.

Rules: the first frame is a `Hello` or the connection ends; `magic`, `version_min` and `version_max` keep their names
and meanings in every version, unknown fields are ignored; refusal codes are stable, sentences are for people.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from quiver.errors import ConfigError, DecodeError
from quiver.model import NodeId
from quiver.wire.frames import Frame, Kind, encode_frame

VERSION_MIN = 1
VERSION_MAX = 1
"""The versions of the protocol that this program speaks."""

HANDSHAKE_BYTES_MAX = 4 * 1024
"""Greatest frame of a handshake: all that a stranger can make us hold."""
SENTENCE_LENGTH_MAX = 300

_Version = Annotated[int, Meta(ge=0, le=0xFFFF)]
_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Feature = Annotated[str, Meta(min_length=1, max_length=32)]
_StructType = TypeVar("_StructType", bound=msgspec.Struct)


class _Versions(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a hello that every version can read of every other."""

    magic: Literal["quiver"]
    version_min: _Version
    version_max: _Version


class Hello(_Versions, frozen=True, kw_only=True):
    """Who is speaking, and what it understands; `incarnation` is a number of its own for each start of a process."""

    cluster_id: Annotated[str, Meta(min_length=1, max_length=64)]
    node: _Number
    incarnation: _Number
    features: Annotated[tuple[_Feature, ...], Meta(max_length=16)] = ()


class RefusalCode(StrEnum):
    """Why a connection is ended; stable."""

    BAD_FRAME = "bad_frame"
    UNEXPECTED_FRAME = "unexpected_frame"
    HELLO_EXPECTED = "hello_expected"
    HELLO_LATE = "hello_late"
    BAD_VERSION = "bad_version"
    OTHER_CLUSTER = "other_cluster"
    OWN_NODE = "own_node"
    OTHER_NODE = "other_node"
    TOO_MANY_CONNECTIONS = "too_many_connections"


class Refusal(msgspec.Struct, frozen=True):
    """The last frame of a connection: a code for programs, a sentence for people."""

    # A plain string: a later version may know codes that this one does not.
    code: Annotated[str, Meta(max_length=64)]
    sentence: Annotated[str, Meta(max_length=SENTENCE_LENGTH_MAX)]


def refuse(code: RefusalCode, sentence: str) -> Refusal:
    """Return a refusal; a sentence that repeats too much of what a stranger sent is cut."""
    return Refusal(code, sentence[:SENTENCE_LENGTH_MAX])


def make_hello(*, cluster_id: str, node: NodeId, incarnation: int) -> Hello:
    """Return what this program says of itself.

    Raises:
        ConfigError: a value is outside of what a hello can carry.
    """
    fields = {
        "magic": "quiver",
        "version_min": VERSION_MIN,
        "version_max": VERSION_MAX,
        "cluster_id": cluster_id,
        "node": node,
        "incarnation": incarnation,
    }
    try:
        return msgspec.convert(fields, Hello)
    except msgspec.ValidationError as error:
        raise ConfigError(f"this node cannot introduce itself: {error}") from None


def judge_hello(frame: Frame, own: Hello, *, dialled: NodeId | None) -> Hello | Refusal:
    """Decide on the first frame of a connection: return the other side's `Hello`, or why it is refused.

    `dialled` is the node that this side wanted to reach, or None on the side that was dialled.
    """
    if frame.kind is not Kind.HELLO:
        return refuse(RefusalCode.HELLO_EXPECTED, f"the first frame must be a hello, not a {frame.kind.name.lower()}")
    try:
        # In two steps, since another version's hello may differ in all but these fields.
        theirs = _decode(frame, _Versions)
        if theirs.version_min > own.version_max or theirs.version_max < own.version_min:
            there, here = (f"{each.version_min} to {each.version_max}" for each in (theirs, own))
            return refuse(RefusalCode.BAD_VERSION, f"versions {there} are spoken there, {here} here")
        hello = _decode(frame, Hello)
    except DecodeError as error:
        return refuse(RefusalCode.BAD_FRAME, error.message)
    return _judge_identity(hello, own, dialled=dialled)


def _judge_identity(hello: Hello, own: Hello, *, dialled: NodeId | None) -> Hello | Refusal:
    # What this side's cluster id is, is not said: who does not know it need not learn it.
    if hello.cluster_id != own.cluster_id:
        return refuse(RefusalCode.OTHER_CLUSTER, "the cluster id is not this cluster's")
    if hello.node == own.node:
        return refuse(RefusalCode.OWN_NODE, f"node {own.node} is the node that was reached")
    if dialled is not None and hello.node != dialled:
        return refuse(RefusalCode.OTHER_NODE, f"node {dialled} was expected here, not node {hello.node}")
    return hello


def encode_hello(hello: Hello) -> bytes:
    """Return a hello as a frame."""
    return _encode(Kind.HELLO, hello)


def encode_refusal(refusal: Refusal) -> bytes:
    """Return a refusal as a frame."""
    return _encode(Kind.REFUSAL, refusal)


def decode_refusal(frame: Frame) -> Refusal:
    """Return the refusal that a frame of that kind carries.

    Raises:
        DecodeError: it does not carry one.
    """
    return _decode(frame, Refusal)


def _encode(kind: Kind, body: msgspec.Struct) -> bytes:
    return b"".join(encode_frame(kind, msgspec.msgpack.encode(body)))


def _decode(frame: Frame, of_type: type[_StructType]) -> _StructType:
    if frame.payload:
        raise DecodeError(f"a {frame.kind.name.lower()} has no payload, but this one has {len(frame.payload)} bytes")
    try:
        return msgspec.msgpack.decode(frame.head, type=of_type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not a valid {frame.kind.name.lower()}: {error}") from None
